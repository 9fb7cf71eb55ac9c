"""The sizes a session is compiled for, as plain frozen values.

Letters used in every docstring of the package: B batch rows, T tokens of one step, L cache slots,
V vocabulary, H query heads, K key/value heads, D head size, N layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class StepShape:
    """The size of one compiled step: ``batch`` rows of ``tokens`` new tokens over ``cache_length`` slots."""

    batch: int
    tokens: int
    cache_length: int

    def __str__(self) -> str:
        return f"[batch {self.batch}, tokens {self.tokens}, cache {self.cache_length}]"


@dataclass(frozen=True)
class StepForm:
    """How a target wants the attention of the step to be written; every form gives the same numbers.

    Attributes:
        attention: ``"split"`` multiplies the query with past and new keys apart and never joins the
            caches; ``"concat"`` joins past and new first, the form NPU compilers recognise.
        transposed_keys: keys are cached as [B, K, D, L] instead of [B, K, L, D], which saves a
            transposition of the whole cache in every step.
    """

    attention: Literal["split", "concat"] = "split"
    transposed_keys: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """What one layer caches for a token: ``heads`` keys of ``key_dim`` and values of ``value_dim`` numbers."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class CacheSpec:
    """What a model caches: one :class:`LayerSpec` per layer, and the dtype of keys and values."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype

    def nbytes(self, batch: int, length: int) -> int:
        """Bytes of keys and values for ``batch`` rows of ``length`` slots."""
        numbers = sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return numbers * batch * length * self.dtype.itemsize


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
