"""How the next token is chosen: a transformers GenerationConfig, read once before anything runs."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# The fields that are honoured, with the value each has when neither the call nor the model sets it
# (transformers' own defaults, except that lengths are dealt with by the caller).
HONOURED: dict[str, Any] = {
    "max_length": None,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "eos_token_id": None,
    "pad_token_id": None,
    "seed": None,
}
_OFF = {"min_length": 0, "do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
# Fields that do not change which tokens come out here.
_WITHOUT_EFFECT = {
    "bos_token_id",
    "cache_implementation",
    "low_memory",
    "prefill_chunk_size",
    "renormalize_logits",
    "use_cache",
    "decoder_start_token_id",
    "transformers_version",
    "early_stopping",
    "length_penalty",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_early_exit",
    "disable_compile",
    "cache_config",
    "compile_config",
}
# Values under which any other field asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "diversity_penalty": 0.0,
    "top_h": None,
}


@dataclass(frozen=True)
class Decoding:
    """Checked decoding settings of one call.

    Attributes:
        eos_token_ids: a row ends after any of these; may be empty.
        pad_token_id: fills a row after its end; the first EOS where none is set; None without either.
        max_length, max_new_tokens: as given, or None.
        lengths_are_own: they come from the model's own generation_config, not from the call.
        seed: for a private random generator; None draws from torch's global one.
    """

    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    lengths_are_own: bool
    max_length: int | None
    max_new_tokens: int | None
    min_length: int
    min_new_tokens: int | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
    repetition_penalty: float
    seed: int | None

    @property
    def fill_token_id(self) -> int:
        """What stands after the end of a row."""
        return 0 if self.pad_token_id is None else self.pad_token_id

    def processors(self, prompt_length: int) -> LogitsProcessorList:
        """transformers' processors for one row whose prompt has ``prompt_length`` real tokens.

        They are in the order in which transformers' ``generate`` applies them.
        """
        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        eos = list(self.eos_token_ids)
        if eos and self.min_length > 0 and self.min_new_tokens is None:
            chain.append(MinLengthLogitsProcessor(int(self.min_length), eos))
        if eos and self.min_new_tokens:
            chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, int(self.min_new_tokens), eos))
        if self.do_sample:
            if self.temperature != 1.0:
                chain.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k != 0:
                chain.append(TopKLogitsWarper(int(self.top_k)))
            if self.top_p < 1.0:
                chain.append(TopPLogitsWarper(float(self.top_p)))
            if self.min_p is not None:
                chain.append(MinPLogitsWarper(float(self.min_p)))
        return chain


class Sampler:
    """Chooses the next token of every row; holds the rows' histories when a processor needs them.

    Args:
        decoding: the settings.
        rows: int64 [t] each, the prompts without padding, so that no processor ever counts a pad.
    """

    def __init__(self, decoding: Decoding, rows: Sequence[torch.Tensor]):
        self._do_sample = decoding.do_sample
        self._chains = [decoding.processors(len(row)) for row in rows]
        self._histories = [row[None] for row in rows] if self._chains[0] else None
        self._generator = None if decoding.seed is None else torch.Generator("cpu").manual_seed(int(decoding.seed))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Next tokens, int64 [B], from logits float32 [B, V], which are not changed."""
        if self._histories is not None:
            logits = torch.cat(
                [
                    chain(history, row[None].clone())  # type: ignore[arg-type]
                    for chain, history, row in zip(self._chains, self._histories, logits, strict=True)
                ]
            )
        if self._do_sample:
            tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=self._generator)[:, 0]
        else:
            # numpy's, which stays in this thread: torch would start its own beside those of the backend, and
            # they spin on through the next step (6% of a decode step on two cores).
            tokens = torch.from_numpy(logits.numpy().argmax(axis=1))
        if self._histories is not None:
            self._histories = [
                torch.cat([h, t[None, None]], dim=1) for h, t in zip(self._histories, tokens, strict=True)
            ]
        return tokens


def read_decoding(
    model: PreTrainedModel, generation_config: GenerationConfig | None, arguments: Mapping[str, Any]
) -> Decoding:
    """Settings of one call: ``arguments`` before ``generation_config`` before the model's own.

    Raises:
        TypeError: an argument that does not exist; the message lists those that do.
        ValueError: a value out of range, or a setting that is not supported and would change the result.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise TypeError(
            f"generation_config must be a transformers GenerationConfig, got {type(generation_config).__name__}"
        )
    fields = set(GenerationConfig().to_dict()) | set(HONOURED)
    unknown = [name for name in arguments if name not in fields]
    if unknown:
        raise TypeError(f"unknown argument {unknown[0]!r}; known decoding arguments are {', '.join(HONOURED)}")

    own, given = _set_fields(model.generation_config, fields), _set_fields(generation_config, fields)
    given.update(arguments)
    lengths_are_own = given.get("max_length") is None and given.get("max_new_tokens") is None
    if not lengths_are_own:  # a length that is given replaces both of the model's
        own.pop("max_length", None)
        own.pop("max_new_tokens", None)
    if own.get("max_new_tokens") is not None:
        own.pop("max_length", None)  # as in transformers, the number of new tokens wins
    values = {**HONOURED, **own, **given}
    for name, off in _OFF.items():  # an explicit None turns a filter off, as in transformers
        if values[name] is None:
            values[name] = off
    _refuse_unsupported(values)
    eos, pad = _eos_ids(values["eos_token_id"]), values["pad_token_id"]
    if pad is not None and (not is_int(pad) or pad < 0):
        raise ValueError(f"pad_token_id is {pad!r}, expected a token id of at least 0, or None to use the first EOS")
    if pad is None and eos:
        pad = eos[0]
    plain = {name: values[name] for name in HONOURED if name not in ("eos_token_id", "pad_token_id")}
    decoding = Decoding(eos_token_ids=eos, pad_token_id=pad, lengths_are_own=lengths_are_own, **plain)
    _check_ranges(decoding)
    return replace(decoding, max_length=_as_int(decoding.max_length), max_new_tokens=_as_int(decoding.max_new_tokens))


def _as_int(value: int | None) -> int | None:
    """A whole number of any kind, numpy's among them, as Python's."""
    return None if value is None else int(value)


def _set_fields(config: GenerationConfig | None, fields: set[str]) -> dict[str, Any]:
    """The fields of a config that are set."""
    if config is None:
        return {}
    return {name: value for name, value in config.to_dict().items() if value is not None and name in fields}


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in HONOURED or name in _WITHOUT_EFFECT or name.startswith("_"):
            continue
        neutral = _NEUTRAL.get(name, False)
        if value in (None, neutral) or (name not in _NEUTRAL and isinstance(value, (list, dict)) and not value):
            continue
        raise ValueError(
            f"{name}={value!r} is not supported; leave it out, or pass {name}={_NEUTRAL.get(name)!r} to override the model's own"
        )


def _check_ranges(decoding: Decoding) -> None:
    def check(name: str, fine: Callable[[Any], bool], expected: str) -> None:
        value = getattr(decoding, name)
        if not _is_number(value) or not fine(value):
            raise ValueError(f"{name} is {value!r}, expected {expected}")

    def check_optional(name: str, fine: Callable[[Any], bool], expected: str) -> None:
        if getattr(decoding, name) is not None:
            check(name, fine, expected + ", or None")

    check_optional("max_length", lambda n: is_int(n) and n > 0, "a whole number of at least 1")
    check_optional("max_new_tokens", lambda n: is_int(n) and n > 0, "a whole number of at least 1")
    check("min_length", lambda n: is_int(n) and n >= 0, "a whole number of at least 0")
    check_optional("min_new_tokens", lambda n: is_int(n) and n >= 0, "a whole number of at least 0")
    if not isinstance(decoding.do_sample, bool):
        raise ValueError(f"do_sample is {decoding.do_sample!r}, expected True or False")
    if decoding.do_sample:
        check("temperature", lambda x: x > 0, "a number above 0 (do_sample=False is greedy)")
        check("top_k", lambda n: is_int(n) and n >= 0, "a whole number of at least 0 (0 turns it off)")
        check("top_p", lambda x: 0 <= x <= 1, "a number from 0 to 1 (1 turns it off)")
        check_optional("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1")
    check("repetition_penalty", lambda x: x > 0, "a number above 0 (1 turns it off)")
    check_optional("seed", lambda n: is_int(n) and -(2**63) <= n < 2**64, "a whole number of 64 bits")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _eos_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    ids = list(ids) if isinstance(ids, (list, tuple, set)) else [ids]
    if not all(is_int(item) for item in ids):
        raise ValueError(f"eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(int(item) for item in ids)


def is_int(value: Any) -> bool:
    """A whole number of any kind, numpy's among them, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
