"""How tokens are chosen and when a call ends: a transformers GenerationConfig, read once before anything runs."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import GenerationConfig

# The fields that are honoured, with the value each has when neither the call nor the model sets it
# (transformers' own defaults, except that lengths are dealt with by the caller).
HONOURED: dict[str, Any] = {
    "max_length": None,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "max_time": None,
    "stop_strings": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "top_h": None,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "seed": None,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "num_return_sequences": 1,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
}
# An explicit None means this, as in transformers; elsewhere it means the default.
_OFF = {"top_k": 0}
# Fields that do not change which tokens come out here.
_WITHOUT_EFFECT = {
    "bos_token_id",
    "cache_implementation",
    "low_memory",
    "prefill_chunk_size",
    "use_cache",
    "decoder_start_token_id",
    "transformers_version",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_early_exit",
    "disable_compile",
    "cache_config",
    "compile_config",
    "max_cache_len",
}
# Values under which any other field asks for nothing.
_NEUTRAL: dict[str, Any] = {
    "num_beam_groups": 1,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "diversity_penalty": 0.0,
}
# Fields of other packages, by what they are called here.
_SYNONYMS = {
    "stop": "stop_strings",
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "best_of": "num_beams",
    "logit_bias": "sequence_bias",
}


@dataclass(frozen=True)
class Decoding:
    """Checked decoding settings of one call, by the names of a ``GenerationConfig``; besides them:

    Attributes:
        eos_token_ids: a row ends after any of these; may be empty.
        pad_token_id: fills a row after its end; the first EOS where none is set; None without either.
        max_length, max_new_tokens: as given, or None.
        lengths_are_own: they come from the model's own generation_config, not from the call.
        seed: for a private random generator; None draws from torch's global one.
        frequency_penalty, presence_penalty: subtracted from the score of a token that was generated, for every
            time and once (as OpenAI's API defines them); the prompt does not count.
    """

    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    lengths_are_own: bool
    max_length: int | None
    max_new_tokens: int | None
    min_length: int
    min_new_tokens: int | None
    max_time: float | None
    stop_strings: tuple[str, ...] | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    top_h: float | None
    min_p: float | None
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    seed: int | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: list[list[int]] | None
    sequence_bias: Any
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    remove_invalid_values: bool
    renormalize_logits: bool
    num_return_sequences: int
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    return_dict_in_generate: bool
    output_scores: bool
    output_logits: bool

    @property
    def fill_token_id(self) -> int:
        """What stands after the end of a row."""
        return 0 if self.pad_token_id is None else self.pad_token_id


def read_decoding(model: Any, generation_config: GenerationConfig | None, arguments: Mapping[str, Any]) -> Decoding:
    """Settings of one call: ``arguments`` before ``generation_config`` before the model's own.

    Raises:
        TypeError: an argument that does not exist; the message lists those that do.
        ValueError: a value out of range, or a setting that is not supported and would change the result.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise TypeError(
            f"generation_config must be a transformers GenerationConfig, got {type(generation_config).__name__}"
        )
    known = set(GenerationConfig().to_dict()) | set(HONOURED)
    for name in arguments:
        if name not in known:
            other = f"; it is called {_SYNONYMS[name]} here" if name in _SYNONYMS else ""
            raise TypeError(f"unknown argument {name!r}{other}; known decoding arguments are {', '.join(HONOURED)}")

    own, given = _set_fields(model.generation_config, known), _set_fields(generation_config, known)
    given.update(arguments)
    lengths_are_own = given.get("max_length") is None and given.get("max_new_tokens") is None
    if not lengths_are_own:  # a length that is given replaces both of the model's
        own.pop("max_length", None)
        own.pop("max_new_tokens", None)
    if own.get("max_new_tokens") is not None:
        own.pop("max_length", None)  # as in transformers, the number of new tokens wins
    values = {**HONOURED, **own, **given}
    for name, default in HONOURED.items():
        if values[name] is None:
            values[name] = _OFF.get(name, default)
    _refuse_unsupported(values)
    eos, pad = _eos_ids(values["eos_token_id"]), values["pad_token_id"]
    if pad is not None and (not is_int(pad) or pad < 0):
        raise ValueError(f"pad_token_id is {pad!r}, expected a token id of at least 0, or None to use the first EOS")
    if pad is None and eos:
        pad = eos[0]
    plain = {field.name: values[field.name] for field in fields(Decoding) if field.name in HONOURED}
    plain.update(pad_token_id=pad, stop_strings=_stop_strings(values["stop_strings"]))
    decoding = Decoding(eos_token_ids=eos, lengths_are_own=lengths_are_own, **plain)
    _check_ranges(decoding)
    whole: dict[str, Any] = {name: getattr(decoding, name) for name in _WHOLE}
    whole = {name: None if value is None else int(value) for name, value in whole.items()}
    return replace(decoding, **whole)


# Whole numbers may come as numpy's.
_WHOLE = ("max_length", "max_new_tokens", "num_return_sequences", "num_beams")


def _set_fields(config: GenerationConfig | None, known: set[str]) -> dict[str, Any]:
    """The fields of a config that are set."""
    if config is None:
        return {}
    return {name: value for name, value in config.to_dict().items() if value is not None and name in known}


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
        if not is_number(value) or not fine(value):
            raise ValueError(f"{name} is {value!r}, expected {expected}")

    def check_optional(name: str, fine: Callable[[Any], bool], expected: str) -> None:
        if getattr(decoding, name) is not None:
            check(name, fine, expected + ", or None")

    check_optional("max_length", lambda n: is_int(n) and n > 0, "a whole number of at least 1")
    check_optional("max_new_tokens", lambda n: is_int(n) and n > 0, "a whole number of at least 1")
    check("min_length", lambda n: is_int(n) and n >= 0, "a whole number of at least 0")
    check_optional("min_new_tokens", lambda n: is_int(n) and n >= 0, "a whole number of at least 0")
    check_optional("max_time", lambda x: x > 0, "a number of seconds above 0")
    for name in ("do_sample", "remove_invalid_values", "renormalize_logits", "return_dict_in_generate"):
        if not isinstance(getattr(decoding, name), bool):
            raise ValueError(f"{name} is {getattr(decoding, name)!r}, expected True or False")
    if decoding.do_sample:
        check("temperature", lambda x: x > 0, "a number above 0 (do_sample=False is greedy)")
        check("top_k", lambda n: is_int(n) and n >= 0, "a whole number of at least 0 (0 turns it off)")
        check("top_p", lambda x: 0 <= x <= 1, "a number from 0 to 1 (1 turns it off)")
        check_optional("top_h", lambda x: 0 < x <= 1, "a number above 0, at most 1")
        check_optional("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1")
        check("typical_p", lambda x: 0 < x <= 1, "a number above 0, at most 1 (1 turns it off)")
        check("epsilon_cutoff", lambda x: 0 <= x < 1, "a number from 0, below 1 (0 turns it off)")
        check("eta_cutoff", lambda x: 0 <= x < 1, "a number from 0, below 1 (0 turns it off)")
    check("repetition_penalty", lambda x: x > 0, "a number above 0 (1 turns it off)")
    check("frequency_penalty", lambda x: -10 <= x <= 10, "a number from -10 to 10 (0 turns it off)")
    check("presence_penalty", lambda x: -10 <= x <= 10, "a number from -10 to 10 (0 turns it off)")
    check("no_repeat_ngram_size", lambda n: is_int(n) and n >= 0, "a whole number of at least 0 (0 turns it off)")
    check("num_return_sequences", lambda n: is_int(n) and n > 0, "a whole number of at least 1")
    check("num_beams", lambda n: is_int(n) and n > 0, "a whole number of at least 1")
    if decoding.num_return_sequences > 1 and decoding.num_beams == 1 and not decoding.do_sample:
        raise ValueError(
            f"num_return_sequences is {decoding.num_return_sequences}, but greedy decoding has one result: pass "
            "do_sample=True or num_beams"
        )
    if decoding.num_beams > 1 and decoding.num_return_sequences > decoding.num_beams:
        raise ValueError(
            f"num_return_sequences is {decoding.num_return_sequences}, expected at most num_beams={decoding.num_beams}"
        )
    check("length_penalty", lambda x: True, "a number")
    if decoding.early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping is {decoding.early_stopping!r}, expected True, False or 'never'")
    for name in ("output_scores", "output_logits"):
        if getattr(decoding, name) and not decoding.return_dict_in_generate:
            raise ValueError(f"{name}=True needs return_dict_in_generate=True; there is no place for it otherwise")
    check_optional("seed", lambda n: is_int(n) and -(2**63) <= n < 2**64, "a whole number of 64 bits")


def _stop_strings(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop_strings is {value!r}, expected a string or a list of strings, none of them empty")
    return tuple(strings) or None


def _eos_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    ids = list(ids) if isinstance(ids, (list, tuple, set)) else [ids]
    if not all(is_int(item) for item in ids):
        raise ValueError(f"eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(int(item) for item in ids)


def is_number(value: Any) -> bool:
    """A real number of any kind, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_int(value: Any) -> bool:
    """A whole number of any kind, numpy's among them, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
