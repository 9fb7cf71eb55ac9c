"""How many tokens fit where: the checks that come before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticgen.compiled import CompiledModel
from staticgen.decoding import Decoding, is_int
from staticgen.errors import UnknownNameError
from staticgen.facts import StepFacts
from staticgen.layouts import OVERFLOW, Layout
from staticgen.prompts import Prompts
from staticgen.shapes import CacheSpec

# Policies under which a row may be longer than the cache.
ENDLESS = ("slide", "sink")


def new_token_count(
    prompts: Prompts, settings: Decoding, capacity: int, overflow: str = "error", remedy: str = "raise max_length"
) -> int:
    """How many tokens to make at most, in buffers of ``capacity`` tokens a row.

    ``max_length`` is a limit for prompt and new tokens together; ``max_new_tokens`` says how many. Lengths
    that only the model's generation_config sets are cut to what fits. ``remedy`` is what can be done about the
    capacity.

    Raises:
        ValueError: the prompt, or the prompt and the tokens asked for, do not fit.
    """
    if overflow in ENDLESS:
        return _endless_count(prompts, settings, capacity)
    limit = capacity
    if settings.max_length is not None and (settings.max_length <= capacity or not settings.lengths_are_own):
        limit = settings.max_length
        if limit > capacity and overflow == "error":
            raise ValueError(
                f"max_length={limit} is more than the session's max_length of {capacity}, for which it is compiled; "
                f"{remedy}, or choose another overflow than 'error'"
            )
        limit = min(limit, capacity)
    remedy = remedy if limit == capacity else "raise max_length"
    if prompts.width >= limit:
        row = max(range(prompts.batch), key=lambda index: len(prompts.rows[index]))
        raise ValueError(
            f"{prompts.size} (row {row} is the longest) and max_length is {limit}: max_length counts the "
            f"prompt, so it must be at least {prompts.width + 1}; shorten the prompt or {remedy}"
        )
    room = limit - prompts.width
    if settings.max_new_tokens is None:
        return room
    if settings.max_new_tokens > room and not settings.lengths_are_own and overflow == "error":
        raise ValueError(
            f"{prompts.size} and max_new_tokens is {settings.max_new_tokens}: together "
            f"{prompts.width + settings.max_new_tokens}, more than max_length={limit}; {remedy} or lower max_new_tokens"
        )
    return min(settings.max_new_tokens, room)


def _endless_count(prompts: Prompts, settings: Decoding, capacity: int) -> int:
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    limit = capacity if settings.max_length is None else settings.max_length
    if prompts.width >= limit:
        raise ValueError(
            f"{prompts.size} and max_length is {limit}, which counts the prompt; give max_new_tokens, which does not"
        )
    return limit - prompts.width


def default_layout(overflow: Any, model: Any = None) -> str:
    """The layout where none is named: of ``"sink"`` that one, else that of a compiled ``model``, or ``"ring"``."""
    if isinstance(overflow, str) and overflow.strip().lower() == "sink":
        return "sink"
    return model.layout if isinstance(model, CompiledModel) else "ring"


def read_overflow(given: Any, layout: str, cls: type[Layout]) -> str:
    """The policy asked for, or the layout's default for None.

    Raises:
        UnknownNameError: there is no such policy.
        ValueError: the layout cannot carry it out; the message says which can.
    """
    if given is None:
        return cls.overflow[0]
    name = given.strip().lower() if isinstance(given, str) else ""
    if name not in OVERFLOW:
        raise UnknownNameError(f"unknown overflow {given!r}: expected one of {', '.join(OVERFLOW)}")
    if name not in cls.overflow:
        other = "sink" if name == "sink" else "ring"
        raise ValueError(
            f"overflow={given!r} is not for layout {layout!r}, which has {', '.join(map(repr, sorted(cls.overflow)))}; "
            f"use layout={other!r}"
        )
    return name


def require_positions(step: StepFacts, max_length: int, overflow: str = "error", capacity: int | None = None) -> None:
    """Refuse what the model has no positions for.

    ``capacity`` is that of a layout that keeps positions below it.
    """
    limit = step.position_limit
    if limit is None:
        return
    kind = step.model_type
    if overflow == "slide":
        raise ValueError(
            f"overflow='slide' lets positions go on, but model_type {kind!r} has {limit} positions; use layout='none', "
            "which recomputes the last window"
        )
    if capacity is not None and capacity > limit:
        raise ValueError(
            f"layout 'sink' with {capacity} positions (num_sink_tokens and window_length together) is too long for "
            f"model_type {kind!r}, which has {limit}; lower window_length or max_length"
        )
    if capacity is None and max_length - 1 > limit:  # the last token is never fed
        raise ValueError(
            f"max_length (prompt and new tokens together) is {max_length}, but model_type {kind!r} has {limit} "
            f"positions; use max_length={limit + 1} or less"
        )


def fit_buckets(given: Sequence[int] | None, default: Sequence[int], max_length: int) -> tuple[int, ...]:
    """The sizes of prefill steps, ascending: those given, or those of the default that ``max_length`` holds."""
    if given is None:
        return tuple(size for size in default if size <= max_length) or (max_length,)
    sizes = _whole_numbers("prefill_buckets", given, max_length)
    if not sizes:
        raise ValueError("prefill_buckets is [], expected at least one size")
    return tuple(sorted(set(sizes)))


def fit_cache_sizes(given: Sequence[int] | None, default: Sequence[int], max_length: int) -> tuple[int, ...]:
    """Cache lengths, ascending: those given or the default's up to half of ``max_length``, and ``max_length``."""
    if given is None:
        return (*(size for size in default if size <= max_length // 2), max_length)
    sizes = _whole_numbers("cache_sizes", given, max_length)
    return tuple(sorted({*sizes, max_length}))


def needed_lengths(spec: CacheSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """Of cache lengths, those that differ for the model: none is longer than what its layers see."""
    longest = spec.longest
    return tuple(sorted({size if longest is None else min(size, longest) for size in sizes}))


def require_count(name: str, value: Any, least: int) -> int:
    """``value`` as an int, if it is a whole number of at least ``least``."""
    if not _is_count(value, least):
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
    return int(value)


def _whole_numbers(name: str, given: Any, most: int) -> list[int]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(_is_count(size, 1, most) for size in given):
        raise ValueError(f"{name} is {given!r}, expected a list of whole numbers from 1 to max_length={most}")
    return [int(size) for size in given]


def _is_count(value: Any, least: int, most: float = math.inf) -> bool:
    return is_int(value) and least <= int(value) <= most
