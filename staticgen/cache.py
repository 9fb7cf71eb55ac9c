"""The key/value cache: buffers of a fixed size, and for every slot the position of its token.

``slot_positions`` [B, L] is the only state that attention needs besides keys and values: -1 marks an
empty slot, and a query at position p sees exactly the slots with 0 <= position <= p. Which slot a new
token goes to is the business of :mod:`staticgen.layouts`; this module carries the choice out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from staticgen.shapes import CacheSpec

EMPTY = -1


@dataclass(frozen=True)
class Segment:
    """``count`` consecutive new tokens, from ``source`` of the step on, go to slots from ``slot`` on."""

    slot: int
    source: int
    count: int


@dataclass(frozen=True)
class Placement:
    """Where the new tokens of one step go.

    Attributes:
        shift: first move every slot this many places to the left; the leftmost ones are dropped.
        segments: then copy these runs of new tokens.
    """

    shift: int
    segments: tuple[Segment, ...]


class KVBuffers:
    """Keys and values of every layer, for ``length`` tokens of ``batch`` rows, zeroed.

    Layers of one size share one allocation, so that a token is written with one copy for all layers.

    Attributes:
        keys: one view per layer, [B, K, length, D], or [B, K, D, length] with ``transposed_keys``.
        values: one view per layer, [B, K, length, D].
    """

    def __init__(self, spec: CacheSpec, batch: int, length: int, transposed_keys: bool = False):
        self.spec, self.batch, self.length, self.transposed_keys = spec, batch, length, transposed_keys
        self._key_dim = -1 if transposed_keys else -2  # where the tokens of the keys are
        self.keys: list[torch.Tensor] = [torch.empty(0)] * len(spec.layers)
        self.values: list[torch.Tensor] = [torch.empty(0)] * len(spec.layers)
        self._stacks: list[tuple[torch.Tensor, torch.Tensor]] = []
        for size in dict.fromkeys(spec.layers):
            members = [index for index, layer in enumerate(spec.layers) if layer == size]
            shape = (len(members), batch, size.heads)
            key_shape = (size.key_dim, length) if transposed_keys else (length, size.key_dim)
            keys = _zeros((*shape, *key_shape), spec.dtype)
            values = _zeros((*shape, length, size.value_dim), spec.dtype)
            self._stacks.append((keys, values))
            for row, index in enumerate(members):
                self.keys[index], self.values[index] = keys[row], values[row]

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return self.spec.nbytes(self.batch, self.length)

    def zero_(self) -> None:
        """Set every key and value to zero."""
        for keys, values in self._stacks:
            keys.zero_()
            values.zero_()

    def shift_left_(self, count: int) -> None:
        """Move every token ``count`` places to the left."""
        for keys, values in self._stacks:
            _shift_left_(keys, count, dim=self._key_dim)
            _shift_left_(values, count, dim=-2)

    def copy_tokens_(self, new: KVBuffers, segments: Sequence[Segment]) -> None:
        """Copy runs of tokens out of ``new``, which holds the keys and values of one step."""
        turned = self.transposed_keys != new.transposed_keys
        for (keys, values), (source_keys, new_values) in zip(self._stacks, new._stacks, strict=True):
            new_keys = source_keys.transpose(-1, -2) if turned else source_keys
            for run in segments:
                keys.narrow(self._key_dim, run.slot, run.count).copy_(
                    new_keys.narrow(self._key_dim, run.source, run.count)
                )
                values.narrow(-2, run.slot, run.count).copy_(new_values.narrow(-2, run.source, run.count))

    def copy_slots_(self, source: KVBuffers, slots: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the tokens in ``slots`` of buffers of another length to the slots ``targets`` of these."""
        taken, put = torch.tensor(slots, device="cpu"), torch.tensor(targets, device="cpu")
        for (keys, values), (old_keys, old_values) in zip(self._stacks, source._stacks, strict=True):
            keys.index_copy_(self._key_dim, put, old_keys.index_select(self._key_dim, taken))
            values.index_copy_(-2, put, old_values.index_select(-2, taken))


class KVCache:
    """The cache of a session: :class:`KVBuffers` and the position of the token in every slot.

    Attributes:
        slot_positions: int64 [B, L]; -1 where a slot is empty.
        buffers: the keys and values. A stale slot keeps its old, finite numbers: attention gives
            empty slots the weight 0.
    """

    def __init__(self, spec: CacheSpec, batch: int, length: int, transposed_keys: bool = False):
        self.buffers = KVBuffers(spec, batch, length, transposed_keys)
        self.slot_positions = torch.full((batch, length), EMPTY, dtype=torch.int64, device="cpu")

    def clear(self) -> None:
        """Mark every slot empty."""
        self.slot_positions.fill_(EMPTY)

    def write(self, placement: Placement, new: KVBuffers, positions: torch.Tensor) -> None:
        """Store what a step computed.

        Args:
            placement: the slots, as a layout chose them.
            new: keys and values of the step's T tokens.
            positions: int64 [B, T], -1 where a token is padding.
        """
        if placement.shift:
            self.buffers.shift_left_(placement.shift)
            _shift_left_(self.slot_positions, placement.shift, dim=-1)
        self.buffers.copy_tokens_(new, placement.segments)
        for run in placement.segments:
            self.slot_positions.narrow(1, run.slot, run.count).copy_(positions.narrow(1, run.source, run.count))

    def copy_slots_(self, source: KVCache, slots: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the tokens in ``slots`` of a cache of another length to the slots ``targets`` of this one."""
        self.buffers.copy_slots_(source.buffers, slots, targets)
        self.slot_positions[:, targets] = source.slot_positions[:, slots]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that numpy asked huge pages for: a decode step over 4096 slots was 3 to 9% faster so."""
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), dtype=np.uint8)).view(dtype)[..., 0]


def _shift_left_(tensor: torch.Tensor, count: int, dim: int) -> None:
    kept = tensor.size(dim) - count
    if kept > 0:  # the ranges overlap, hence the copy
        tensor.narrow(dim, 0, kept).copy_(tensor.narrow(dim, count, kept).clone())
