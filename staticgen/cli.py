"""The command line: ``staticgen generate`` and ``staticgen chat``, and the commands of the other modules."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staticgen.cli_bundles import cache_app, compile_model, inspect, verify
from staticgen.cli_devices import devices
from staticgen.cli_targets import plan, profiles
from staticgen.flags import CONSTRAINT, LAYOUT, MODEL, SESSION, shared_flags
from staticgen.terminal import bar, console, errors, print_error, quiet_transformers

if TYPE_CHECKING:
    from staticgen.completions import Completion

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
MAX_LENGTH, CHAT_MAX_LENGTH = 512, 2048
# Keys and values of the conversation, so that a turn runs its own message only.
CHAT_PREFIX_CACHE = 1 << 30
_CHAT_HELP = {
    "max_length": f"Tokens of the whole conversation; sizes the buffers. (default: {CHAT_MAX_LENGTH})",
    "prefix_cache": f"Bytes for what was said before, which need not run again. (default: {CHAT_PREFIX_CACHE})",
}


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"staticgen {version('staticgen')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Generate text with static shapes: every step is compiled once and replayed for every token."""


@app.command()
@shared_flags()
def generate(
    given: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue, or with --chat the message to answer.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="Prompts, one a line; - reads standard input. Blank lines are left out.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    samples: Annotated[
        int | None, typer.Option(help="Texts for each prompt; several need --do-sample or --num-beams.")
    ] = None,
) -> None:
    """Complete one prompt, or every line of a file.

    The text for --prompt streams to standard output. With --file or --samples, every text is a line of JSON there, with
    prompt, text, new_tokens and finish_reason. All else goes to standard error.
    """
    with errors():
        if (prompt is None) == (file is None):
            raise ValueError("give either --prompt or --file")
        texts = [prompt] if prompt is not None else _lines(file or "")
        prompts: list[Any] = [[{"role": "user", "content": text}] for text in texts] if chat else list(texts)
        complete, load_seconds = _open(given, prompts, MAX_LENGTH)
        if file is None and samples is None:
            with closing(complete.stream(prompts[0])) as stream:
                for piece in stream:
                    print(piece, end="", flush=True)
            print(flush=True)
            parts = [*_opening(complete, load_seconds), *_last_call(complete)]
        else:
            start, new_tokens = time.perf_counter(), 0
            results = complete.results(prompts, samples=samples)
            with bar() as progress:
                for text, results_of_one in zip(progress.track(texts, description="completing"), results, strict=True):
                    for index, result in enumerate(results_of_one):
                        line = {"prompt": text} if samples is None else {"prompt": text, "sample": index}
                        print(json.dumps(line | asdict(result), ensure_ascii=False), flush=True)
                        new_tokens += result.new_tokens
            seconds = time.perf_counter() - start
            parts = [
                *_opening(complete, load_seconds),
                f"{len(texts)} prompts, {new_tokens} new tokens in {seconds:.1f} s",
            ]
        console.print(" | ".join([*parts, complete.session.backend.description]), style="dim", soft_wrap=True)


@app.command()
@shared_flags(_CHAT_HELP)
def chat(
    given: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="A system message, before all others.")] = None,
) -> None:
    """Talk to a chat model: one message a line, until the end of the input or /exit; /reset forgets the conversation.

    Of each turn only what is new runs. Answers stream to standard output, all else goes to standard error. Ctrl-C ends an answer, and not the chat.
    """
    with errors():
        if given.get("layout", "").strip().lower() != "none":  # which keeps no keys and values
            given.setdefault("prefix_cache", CHAT_PREFIX_CACHE)
        complete, load_seconds = _open(given, [], CHAT_MAX_LENGTH)
        parts = [*_opening(complete, load_seconds), complete.session.backend.description]
        console.print(" | ".join(parts), style="dim", soft_wrap=True)
        first = [] if system is None else [{"role": "system", "content": system}]
        messages, refused = list(first), False
        for line in _typed():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(first)
                continue
            try:
                answer = _answer(complete, [*messages, {"role": "user", "content": line}])
            except ValueError as error:  # too long, say; the conversation before it is still good
                print_error(error)
                refused = True
                continue
            messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
        if refused:
            raise typer.Exit(1)


def _typed() -> Iterator[str]:
    """Lines of standard input that are not blank, each asked for on standard error."""
    while True:
        console.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            console.print()
            return
        if line.strip():
            yield line.strip()


def _answer(complete: Completion, messages: list[dict[str, str]]) -> str:
    """Stream the answer to standard output; Ctrl-C ends it."""
    pieces: list[str] = []
    with closing(complete.stream(messages)) as stream:
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            console.print("cancelled; /exit ends the chat", style="dim")
        else:
            print(flush=True)
            console.print(" | ".join(_last_call(complete)), style="dim", soft_wrap=True)
    return "".join(pieces)


def _lines(file: str) -> list[str]:
    """The lines of a file in UTF-8, or of standard input, without blank ones."""
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    lines = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"file {file!r} has no prompts, expected one a line")
    return lines


def _text_or_file(value: str, name: str) -> str:
    """A constraint as it was typed, or the text of the file that was named; a pattern is never a file."""
    return (
        Path(value).read_text(encoding="utf-8-sig")
        if name != "regex" and "\n" not in value and Path(value).is_file()
        else value
    )


def _open(given: Mapping[str, Any], prompts: list[Any], max_length: int) -> tuple[Completion, float]:
    """Load and compile what the flags ask for; how long loading took.

    What can be refused is refused before what takes long: names before loading, ``prompts`` before compiling.
    ``max_length`` is the default, as far as the model has positions.
    """
    with console.status("importing"):
        quiet_transformers()
        from staticgen import constraints  # noqa: PLC0415
        from staticgen.backends import open_backend  # noqa: PLC0415
        from staticgen.completions import Completion, check_calls  # noqa: PLC0415
        from staticgen.layouts import layout_class  # noqa: PLC0415
        from staticgen.limits import default_layout, read_overflow  # noqa: PLC0415
        from staticgen.models import longest  # noqa: PLC0415
        from staticgen.text import DTYPES, encode_prompt, load_text_model  # noqa: PLC0415
    dtype = given.get("dtype")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    used = [name for name in CONSTRAINT if name in given]
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} are given, expected one constraint")
    layout = given.get("layout", default_layout(given.get("overflow")))
    read_overflow(given.get("overflow"), layout, layout_class(layout))
    open_backend(given.get("backend", "auto"), given.get("device"))
    start = time.perf_counter()
    with console.status(f"loading {given.get('model', 'the default model')}"):
        network, tokenizer = load_text_model(given.get("model"), None if dtype is None else DTYPES[dtype])
    load_seconds = time.perf_counter() - start
    elsewhere = {**MODEL, **LAYOUT, **CONSTRAINT}
    arguments = {name: value for name, value in given.items() if name not in elsewhere}
    arguments.setdefault("max_length", longest(network, max_length))
    decoding = {name: value for name, value in arguments.items() if name not in SESSION and name != "stop"}
    check_calls(network, [encode_prompt(tokenizer, prompt) for prompt in prompts], decoding, arguments)
    for name in used:
        arguments["token_mask"] = getattr(constraints, name)(_text_or_file(given[name], name), tokenizer)
    options = {name: given[name] for name in LAYOUT if name in given}
    with console.status("compiling"):
        complete = Completion(network, tokenizer, layout_options=options, **arguments)
    return complete, load_seconds


def _opening(complete: Completion, load_seconds: float) -> list[str]:
    from staticgen.compile_cache import NONE_YET  # noqa: PLC0415

    stats = complete.session.stats
    if stats.compile_seconds or not stats.loads:
        kept = stats.compile_cache
        known = ", converted before" if kept.hits else ""
        if kept.misses and not kept.reason.endswith(NONE_YET):
            known += f"; {kept.reason}"
        return [
            f"load {load_seconds:.1f} s",
            f"compile {stats.compile_seconds:.1f} s ({stats.compiles} programs{known})",
        ]
    return [f"load {load_seconds:.1f} s"]


def _last_call(complete: Completion) -> list[str]:
    call = complete.session.stats.last
    parts = [f"first token {call.first_token_seconds:.2f} s"]
    if call.steps:
        parts += [f"{1000 * call.seconds_per_token:.1f} ms/token", f"{1 / call.seconds_per_token:.1f} tokens/s"]
    if call.new_tokens:  # beams are not counted
        known = f" ({call.reused_tokens} known)" if call.reused_tokens else ""
        parts.append(f"{call.prompt_tokens}{known} + {call.new_tokens[0]} tokens, ended by {call.finish_reasons[0]}")
    return parts


for command in (verify, inspect, plan, profiles, devices):
    app.command()(command)
app.command("compile")(compile_model)
app.add_typer(cache_app, name="cache")
