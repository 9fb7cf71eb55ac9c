"""A cache in several sizes, so that a decode step costs what is live and not what could be.

A step over 4096 slots reads 4096 slots, however few are filled. Prefill runs over the largest size; then the
tokens move to the smallest size with room, and on to the next one whenever it is full.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from staticgen.cache import KVBuffers, KVCache
from staticgen.layouts import Layout
from staticgen.shapes import CacheSpec


class SizedCaches:
    """The cache at each of ``sizes`` slots (ascending), of which one holds the tokens.

    Attributes:
        current: the one that holds them.
        used: columns that hold tokens of at least one row.
    """

    def __init__(
        self, spec: CacheSpec, batch: int, sizes: Sequence[int], layout: type[Layout], transposed_keys: bool = False
    ):
        self.sizes = tuple(sizes)
        self._caches = {size: KVCache(spec, batch, size, transposed_keys) for size in sizes}
        self._layouts = {size: layout(size) for size in sizes}
        self.clear()

    @property
    def current(self) -> KVCache:
        return self._caches[self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values at all sizes."""
        return sum(cache.buffers.nbytes for cache in self._caches.values())

    def clear(self) -> None:
        """Begin empty, at the largest size."""
        self._enter(self.sizes[-1])
        self.used = 0

    def zero_(self) -> None:
        """Forget every number that was ever stored."""
        for cache in self._caches.values():
            cache.buffers.zero_()

    def settle(self) -> None:
        """Be at the smallest size with room for another token; the tokens move along."""
        size = next((size for size in self.sizes if size > self.used), self.sizes[-1])
        if size == self.length:
            return
        source, slots = self.current, self._layouts[self.length].newest(self.used)
        self._enter(size)
        placement = self._layouts[size].place(self.used)
        targets = [slot for run in placement.segments for slot in range(run.slot, run.slot + run.count)]
        self.current.copy_slots_(source, slots, targets)

    def write(self, new: KVBuffers, positions: torch.Tensor, skip: int = 0) -> None:
        """Store the keys and values of a step's tokens, but for the first ``skip``; positions int64 [B, T]."""
        count = positions.shape[1] - skip
        self.current.write(self._layouts[self.length].place(count, source=skip), new, positions)
        self.used = min(self.used + count, self.length)

    def _enter(self, size: int) -> None:
        self.length = size
        self._caches[size].clear()
        self._layouts[size].reset()
