"""What one call asks for: prompts, settings and a caller's own objects, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from staticgen.calls import HOOKS, Hooks, read_hooks
from staticgen.decoding import Decoding, read_decoding
from staticgen.models import vocab_size
from staticgen.prefixes import after_prefix, read_prefix
from staticgen.prompts import Prompts, read_prompts


@dataclass(frozen=True)
class Request:
    """What a call asks for, checked; see :meth:`Session.generate`."""

    prompts: Prompts
    settings: Decoding
    hooks: Hooks
    overflow: str | None = None
    past_key_values: Any = None


def read_request(
    model: Any,
    ids: Any,
    attention_mask: Any,
    generation_config: GenerationConfig | None,
    arguments: Mapping[str, Any],
) -> Request:
    """Check what a caller passed, before anything runs; see :meth:`staticgen.Session.generate`."""
    rest = dict(arguments)
    overflow = rest.pop("overflow", None)
    past = read_prefix(rest.pop("prefix", None), rest.pop("past_key_values", None))
    objects = {name: rest.pop(name) for name in HOOKS if name in rest}
    settings = read_decoding(model, generation_config, rest)
    prompts = read_prompts(
        ids,
        attention_mask,
        vocab_size=vocab_size(model),
        pad_token_id=settings.pad_token_id,
        eos_token_ids=settings.eos_token_ids,
    )
    return Request(after_prefix(prompts, past), settings, read_hooks(settings, prompts, objects), overflow, past)
