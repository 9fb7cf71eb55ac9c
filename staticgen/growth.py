"""A cache in several sizes, so that a decode step costs what is live and not what could be.

A step over 4096 slots reads 4096 slots, however few are filled. Prefill runs over the largest size; then the
tokens move to the smallest size with room, and on to the next one whenever it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from staticgen.cache import KVBuffers, KVCache
from staticgen.layouts import Ring


class SizedCaches:
    """The cache at each of ``sizes`` slots (ascending), of which one holds the tokens.

    Args:
        sizes: slots of each.
        make: makes the cache of a size.

    Attributes:
        current: the one that holds the tokens.
        used: columns that hold tokens of at least one row.
    """

    def __init__(self, sizes: Sequence[int], make: Callable[[int], KVCache]):
        self.sizes = tuple(sizes)
        self._caches = [make(size) for size in sizes]
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values at all sizes."""
        return sum(cache.buffers.nbytes for cache in self._caches)

    def clear(self) -> None:
        """Begin empty, at the largest size."""
        self.current, self.used = self._caches[-1], 0
        self.current.clear()

    def zero_(self) -> None:
        """Forget every number that was ever stored."""
        for cache in self._caches:
            cache.buffers.zero_()

    def skip(self, count: int) -> None:
        """So many tokens of every row were written by the device itself, each in the slot after the last."""
        for group in self.current.groups:
            assert isinstance(group.layout, Ring)
            group.layout.skip(count)
        self.used = min(self.used + count, self.current.length)

    def settle(self) -> None:
        """Be at the smallest size with room for another token; the tokens move along."""
        self._enter(next((cache for cache in self._caches if cache.length > self.used), self._caches[-1]))

    def settle_at_largest(self) -> None:
        """Be at the largest size, where prefill runs."""
        self._enter(self._caches[-1])

    def _enter(self, cache: KVCache) -> None:
        if cache is not self.current:
            if self.used:
                cache.take_over(self.current, self.used)
            else:
                cache.clear()
            self.current = cache

    def write(self, new: KVBuffers, positions: torch.Tensor, skip: int = 0) -> None:
        """Store the keys and values of a step's tokens, but for the first ``skip``; positions int64 [B, T]."""
        self.current.write(new, positions, skip)
        self.used = min(self.used + positions.shape[1] - skip, self.current.length)
