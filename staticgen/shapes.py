"""The sizes a session is compiled for, as plain frozen values.

Letters used in every docstring of the package: B batch rows, T tokens of one step, L cache slots,
V vocabulary, H query heads, K key/value heads, D head size, N layers that cache, G windows among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

EMPTY = -1  # the position of a slot without a token, and of a token that is padding


@dataclass(frozen=True)
class StepShape:
    """The size of one compiled step: ``batch`` rows of ``tokens`` new tokens over ``cache_length`` slots."""

    batch: int
    tokens: int
    cache_length: int

    def __str__(self) -> str:
        return f"[batch {self.batch}, tokens {self.tokens}, cache {self.cache_length}]"


Attention = Literal["split", "spread", "concat", "sdpa"]


@dataclass(frozen=True)
class StepForm:
    """How a target wants the attention of the step to be written; every form gives the same numbers.

    Attributes:
        attention: ``"split"`` multiplies the query with past and new keys apart and never joins the
            caches; ``"concat"`` joins past and new first, the form NPU compilers recognise; ``"sdpa"`` joins them for
            torch's ``scaled_dot_product_attention``, which holds no scores but has neither a softcap nor sinks.
            ``"spread"`` is split, with the past of one token in parts of 128 slots, each with a softmax of its own: a GPU
            would give one long softmax and sum to as few processors as there are rows and heads.
        transposed_keys: keys are cached as [B, K, D, L] instead of [B, K, L, D], which saves a
            transposition of the whole cache in every step.
        late_heads: queries and keys are turned, normed and scaled before heads and tokens change places,
            where the backend can write it so; the NPU 3720 takes prefill in no other form.
        fed: the host looks up the embeddings and works out masks and rotary tables, for targets that compute in
            float16, which cannot hold positions above 2048 (:mod:`staticgen.feeds`); for backends that compile ahead.
    """

    attention: Attention = "split"
    transposed_keys: bool = False
    late_heads: bool = False
    fed: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """What one layer caches for a token: ``heads`` keys of ``key_dim`` and values of ``value_dim`` numbers.

    Attributes:
        window: a query sees this many positions at most, its own included, so that older ones need no
            slot; None for all.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def slots(self, cache_length: int) -> int:
        """Slots of this layer in a cache of ``cache_length``."""
        return slots_of(self.window, cache_length)


def slots_of(window: int | None, cache_length: int) -> int:
    """Slots that layers of this window have in a cache of ``cache_length``."""
    return cache_length if window is None else min(window, cache_length)


@dataclass(frozen=True)
class CacheSpec:
    """What a model caches: one :class:`LayerSpec` per layer with keys and values of its own, and their dtype."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows that occur, each once, in the order of the layers; G of them."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    @property
    def longest(self) -> int | None:
        """Slots beyond which no layer needs more; None when a layer sees everything."""
        return None if None in self.windows else max(window for window in self.windows if window)

    def nbytes(self, batch: int, cache_length: int) -> int:
        """Bytes of keys and values of a cache of ``cache_length`` slots, for ``batch`` rows."""
        numbers = sum(
            layer.heads * (layer.key_dim + layer.value_dim) * layer.slots(cache_length) for layer in self.layers
        )
        return numbers * batch * self.dtype.itemsize


def plan_chunks(prompt_length: int, buckets: Sequence[int]) -> list[int]:
    """Split a prompt into prefill steps of the given sizes.

    The remainder comes first, in the smallest bucket that holds it, then full chunks of the largest
    bucket; all padding is therefore at the left end. ``buckets`` is ascending.

    >>> plan_chunks(70, [8, 32])
    [8, 32, 32]
    """
    largest = buckets[-1]
    full, rest = divmod(prompt_length, largest)
    first = [next(size for size in buckets if size >= rest)] if rest else []
    return first + [largest] * full


def largest_that_fits(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from ``least`` to ``most`` that fits, or 0; what is larger than one that does not, does not."""
    if most < least or not fits(least):
        return 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
