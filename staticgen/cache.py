"""The key/value cache: buffers of a fixed size, and for every slot the position of its token.

``slot_positions`` [B, L] is the only state that attention needs besides keys and values: -1 marks an
empty slot, and a query at position p sees no slot with a position above p. Layers with a sliding window
have slots, and positions of them, for their window only. Which slot a new token goes to is the business
of :mod:`staticgen.layouts`; this module carries the choice out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from staticgen.layouts import Layout, Placement, Ring, RowSegment
from staticgen.rotary import Rotation
from staticgen.shapes import EMPTY, CacheSpec, LayerSpec, slots_of
from staticgen.spans import KVSpan


class KVBuffers:
    """Keys and values of every layer for ``batch`` rows, zeroed.

    Layers of one size share one allocation, so that a token is written with one copy for all layers.

    Args:
        spec: the layers.
        batch: rows.
        length: tokens.
        transposed_keys: keys are [B, K, D, length] instead of [B, K, length, D].
        windowed: a layer with a window has slots for that only, not for ``length`` tokens.
        device: where they are.
        stacks: what they are made of, in the order of :attr:`stacks`; None for zeros.

    Attributes:
        keys: one view per layer, [B, K, length, D], or [B, K, D, length] with ``transposed_keys``.
        values: one view per layer, [B, K, length, D].
    """

    def __init__(
        self,
        spec: CacheSpec,
        batch: int,
        length: int,
        transposed_keys: bool = False,
        windowed: bool = False,
        device: torch.device | str = "cpu",
        stacks: Sequence[torch.Tensor] | None = None,
    ):
        self.spec, self.batch, self.length, self.transposed_keys = spec, batch, length, transposed_keys
        self._key_dim = -1 if transposed_keys else -2  # where the tokens of the keys are
        self.keys: list[torch.Tensor] = [torch.empty(0)] * len(spec.layers)
        self.values: list[torch.Tensor] = [torch.empty(0)] * len(spec.layers)
        self._stacks: dict[LayerSpec, tuple[torch.Tensor, torch.Tensor]] = {}
        self._exact: dict[LayerSpec, torch.Tensor] = {}  # 16-bit keys that turn, in float32; see rotate_
        self._members = members_of(spec)
        shapes = stack_shapes(spec, batch, length, transposed_keys, windowed)
        given = [_zeros(shape, spec.dtype, device) for shape in shapes] if stacks is None else list(stacks)
        for place, (size, members) in enumerate(self._members.items()):
            keys, values = self._stacks[size] = (given[2 * place], given[2 * place + 1])
            for row, index in enumerate(members):
                self.keys[index], self.values[index] = keys[row], values[row]

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._stacks.values())

    @property
    def stacks(self) -> list[torch.Tensor]:
        """The memory of :attr:`keys` and :attr:`values`, [layers, B, K, ...] for layers of one size."""
        return [tensor for pair in self._stacks.values() for tensor in pair]

    def of_size(self, size: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """The stacks of keys and of values of the layers of one size."""
        return self._stacks[size]

    def put_token_(self, new: Sequence[torch.Tensor], slots: Mapping[int | None, torch.Tensor]) -> None:
        """Store one token of every row: new keys [B, K, 1, D] of the layers, then new values; a slot [1] per window.

        Nothing of it depends on a number that the host would have to know.
        """
        count = len(self.keys)
        for size, (keys, values) in self._stacks.items():
            members = self._members[size]
            new_keys = torch.stack([new[index] for index in members])
            if self.transposed_keys:
                new_keys = new_keys.transpose(-1, -2)
            slot = slots[size.window].long()
            keys.index_copy_(keys.dim() + self._key_dim, slot, new_keys)
            values.index_copy_(3, slot, torch.stack([new[count + index] for index in members]))

    def zero_(self) -> None:
        """Set every key and value to zero."""
        for keys, values in self._stacks.values():
            keys.zero_()
            values.zero_()
        self._exact.clear()

    def write_(self, new: KVBuffers, placements: Mapping[int | None, Placement]) -> None:
        """Store tokens of ``new``, the keys and values of one step, as each window's placement says."""
        turned = self.transposed_keys != new.transposed_keys
        for size, (keys, values) in self._stacks.items():
            placement = placements[size.window]
            source_keys, new_values = new._stacks[size]
            new_keys = source_keys.transpose(-1, -2) if turned else source_keys
            if placement.shift:
                _shift_left_(keys, placement.shift, dim=self._key_dim)
                _shift_left_(values, placement.shift, dim=-2)
            copies = [keys, self._exact[size]] if size in self._exact else [keys]
            for segment in placement.segments:
                for copy in copies:
                    copy.narrow(self._key_dim, segment.slot, segment.count).copy_(
                        new_keys.narrow(self._key_dim, segment.source, segment.count)
                    )
                values.narrow(-2, segment.slot, segment.count).copy_(
                    new_values.narrow(-2, segment.source, segment.count)
                )
            for run in placement.rows:
                row = (slice(None), run.row)
                for copy in copies:
                    copy[row].narrow(self._key_dim, run.slot, run.count).copy_(
                        new_keys[row].narrow(self._key_dim, run.source, run.count)
                    )
                values[row].narrow(-2, run.slot, run.count).copy_(new_values[row].narrow(-2, run.source, run.count))

    def copy_slots_(self, source: KVBuffers, moves: Mapping[int | None, tuple[Sequence[int], Sequence[int]]]) -> None:
        """Copy tokens of buffers of another length: for each window, from which slots to which."""
        for size, (keys, values) in self._stacks.items():
            old_keys, old_values = source._stacks[size]
            taken, put = (torch.tensor(slots, device=keys.device) for slots in moves[size.window])
            keys.index_copy_(self._key_dim, put, old_keys.index_select(self._key_dim, taken))
            values.index_copy_(-2, put, old_values.index_select(-2, taken))

    def select_rows_(self, rows: Sequence[int], sources: Sequence[int]) -> None:
        """``rows`` become what the rows ``sources`` were."""
        tensors = [tensor for stack in self._stacks.values() for tensor in stack]
        for tensor in (*tensors, *self._exact.values()):
            tensor[:, rows] = tensor[:, sources]

    def read(self, row: int, slots: Mapping[int | None, torch.Tensor], stop: int) -> KVSpan:
        """A copy, on the CPU, of what stands in these slots of a row, for each window: the tokens up to ``stop``."""
        parts = {}
        for size, (keys, values) in self._stacks.items():
            chosen = slots[size.window].to(keys.device)
            row_keys = keys[:, row].index_select(self._key_dim, chosen)
            if self.transposed_keys:
                row_keys = row_keys.transpose(-1, -2).contiguous()
            parts[size] = row_keys.cpu(), values[:, row].index_select(-2, chosen).cpu()
        return KVSpan(stop, parts)

    def put_(self, row: int, column: int, span: KVSpan, count: int) -> None:
        """Store a span's tokens before position ``count``, as far as they are held; ``column`` is that of position 0.

        Keys must not be transposed, nor layers have slots for their window only.
        """
        stop = min(count, span.stop)
        for size, (keys, values) in self._stacks.items():
            held = span.held_from(size)
            if held < stop:
                new_keys, new_values = span.parts[size]
                keys[:, row, :, column + held : column + stop] = new_keys[:, :, : stop - held]
                values[:, row, :, column + held : column + stop] = new_values[:, :, : stop - held]

    def merge_(self, source: KVBuffers, chosen: torch.Tensor, column: int, source_column: int) -> None:
        """Replace tokens by those of ``source``: where ``chosen``, bool [B, T], says so, from these columns on."""
        count, where = chosen.shape[1], chosen[None, :, None, :, None]
        for size, mine in self._stacks.items():
            for target, given in zip(mine, source._stacks[size], strict=True):
                part = target.narrow(-2, column, count)
                late = given.narrow(-2, source_column, count).to(part.device)
                part.copy_(torch.where(where.to(part.device), late, part))

    def rotate_(
        self, rotations: Sequence[Rotation | None], rows: torch.Tensor, first: Mapping[int | None, int], delta: int
    ) -> None:
        """Turn the keys of ``rows`` (bool [B]) by ``delta`` positions, in each window's slots from ``first`` on.

        A key is turned again for every token that is dropped. In 16 bits each turn would round it, hundreds of
        times over, so that those are kept in float32 besides from the first turn on.
        """
        chosen = [slice(None)] if bool(rows.all()) else rows.nonzero()[:, 0].tolist()
        for size, (keys, _) in self._stacks.items():
            mine = [rotations[index] for index in self._members[size]]
            if not any(mine):
                continue
            exact = keys
            if keys.dtype != torch.float32:
                if size not in self._exact:
                    self._exact[size] = keys.float()
                exact = self._exact[size]
            begin = first[size.window]
            # All layers at once where they turn alike, which is nearly always: four times as fast as one by one.
            parts: list[tuple[int | slice, Rotation | None]] = list(enumerate(mine))
            if all(rotation is mine[0] for rotation in mine):
                parts = [(slice(None), mine[0])]
            for layers, rotation in parts:
                for row in chosen:
                    if rotation is not None:
                        turned = exact[layers, row].narrow(self._key_dim, begin, exact.size(self._key_dim) - begin)
                        rotation.apply_(turned, delta, self._key_dim)
                        if exact is not keys:
                            keys[layers, row].narrow(self._key_dim, begin, turned.size(self._key_dim)).copy_(turned)


class KVMemory:
    """The tensors of a cache, which a program may be bound to; whose tokens they hold is :class:`KVCache`'s to know.

    Args:
        spec, batch, length, transposed_keys, device: see :class:`KVBuffers`.

    Attributes:
        buffers: the keys and values.
        slot_positions: int64 [B, slots] of every window, -1 where a slot is empty; where a device has a copy of its own,
            what the host knows of it.
    """

    def __init__(
        self,
        spec: CacheSpec,
        batch: int,
        length: int,
        transposed_keys: bool = False,
        device: torch.device | str = "cpu",
    ):
        self.buffers = KVBuffers(spec, batch, length, transposed_keys, windowed=True, device=device)
        self.slot_positions = empty_slots(spec, batch, length, device)

    @classmethod
    def of(cls, buffers: KVBuffers, slot_positions: list[torch.Tensor]) -> KVMemory:
        """The memory that is made of these."""
        memory = cls.__new__(cls)
        memory.buffers, memory.slot_positions = buffers, slot_positions
        return memory

    def put_(self, new: Sequence[torch.Tensor], positions: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        """Store one token of every row: see :meth:`KVBuffers.put_token_`; positions int64 [B, 1]."""
        for held, slot in zip(self.slot_positions, slots, strict=True):
            held.index_copy_(1, slot.long(), positions)
        self.buffers.put_token_(new, dict(zip(self.buffers.spec.windows, slots, strict=True)))

    def will_turn(self, rotations: Sequence[Rotation | None]) -> None:
        """Be told, before anything runs, that :meth:`KVBuffers.rotate_` is going to be called."""
        return None

    def refresh_(self) -> None:
        """Have in ``slot_positions`` what a device has written since the host last did."""
        return None


def empty_slots(spec: CacheSpec, batch: int, length: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """int64 [B, slots] of every window, -1 everywhere."""
    return [
        torch.full((batch, slots_of(window, length)), EMPTY, dtype=torch.int64, device=device)
        for window in spec.windows
    ]


def members_of(spec: CacheSpec) -> dict[LayerSpec, list[int]]:
    """The layers of each size, by their index; layers of one size share a stack."""
    return {
        size: [index for index, layer in enumerate(spec.layers) if layer == size] for size in dict.fromkeys(spec.layers)
    }


def stack_shapes(
    spec: CacheSpec, batch: int, length: int, transposed_keys: bool = False, windowed: bool = False
) -> list[tuple[int, ...]]:
    """Shapes of :attr:`KVBuffers.stacks`, of which each size has two: keys, values."""
    shapes: list[tuple[int, ...]] = []
    for size, members in members_of(spec).items():
        slots = size.slots(length) if windowed else length
        shape = (len(members), batch, size.heads)
        shapes.append((*shape, size.key_dim, slots) if transposed_keys else (*shape, slots, size.key_dim))
        shapes.append((*shape, slots, size.value_dim))
    return shapes


class SlotGroup:
    """The slots of all layers that share a window: the positions in them, and the layout that hands them out."""

    def __init__(self, window: int | None, slot_positions: torch.Tensor, layout: Layout):
        self.window, self.layout, self.slot_positions = window, layout, slot_positions

    def note_rows(self, placement: Placement, positions: torch.Tensor) -> None:
        """Enter the positions of what a placement puts into single rows."""
        for run in placement.rows:
            held = positions[run.row, run.source : run.source + run.count]
            self.slot_positions[run.row, run.slot : run.slot + run.count] = held


class KVCache:
    """The cache of a session: :class:`KVBuffers` and the position of the token in every slot.

    Args:
        spec: what the model caches.
        batch: rows.
        length: slots of a layer without a window.
        layout: makes the layout for a number of slots.
        transposed_keys: see :class:`KVBuffers`.
        rotations: how the keys of each layer turn with their position; for a layout with a capacity.
        reach: slots that a layer without a window would have, where there is none and ``length`` is less.
        memory: what it is made of; None for memory of its own on the CPU.

    Attributes:
        groups: one per window, in the order of ``spec.windows``.
        buffers: the keys and values. A stale slot keeps its old, finite numbers: attention gives
            empty slots the weight 0.
        capacity, pinned: the layout's.
    """

    def __init__(
        self,
        spec: CacheSpec,
        batch: int,
        length: int,
        layout: Callable[[int], Layout] = Ring,
        transposed_keys: bool = False,
        rotations: Sequence[Rotation | None] | None = None,
        reach: int | None = None,
        memory: KVMemory | None = None,
    ):
        whole = layout(length if reach is None else reach)
        self.length, self.capacity, self.pinned = length, whole.capacity, whole.pinned
        self.memory = KVMemory(spec, batch, length, transposed_keys) if memory is None else memory
        self.buffers = self.memory.buffers
        self._rotations = rotations
        self.groups: list[SlotGroup] = []
        for window, slot_positions in zip(spec.windows, self.memory.slot_positions, strict=True):
            slots = slots_of(window, length)
            if window is None or "slide" in whole.overflow or self._sees_the_pinned(window):
                own = layout(slots)
            else:  # a window's slots are for the newest tokens, whatever the layout keeps elsewhere
                own = Ring(slots)
            self.groups.append(SlotGroup(window, slot_positions, own))
        if rotations is not None:
            self.memory.will_turn(rotations)

    def _sees_the_pinned(self, window: int) -> bool:
        """Whether layers of this window see all that the layout keeps; if not, they must see no pinned token."""
        if self.capacity is None or window >= self.capacity:
            return self.capacity is not None
        if window > self.capacity - self.pinned:
            raise ValueError(
                f"the model has layers with a window of {window} positions, which would see some of the "
                f"{self.pinned} sinks and not others: with {self.pinned} sinks, window_length must be at least {window}"
            )
        return False

    @property
    def slot_positions(self) -> list[torch.Tensor]:
        """int64 [B, slots] of every window; -1 where a slot is empty."""
        return [group.slot_positions for group in self.groups]

    def clear(self) -> None:
        """Mark every slot empty."""
        for group in self.groups:
            group.slot_positions.fill_(EMPTY)
            group.layout.reset()

    def make_room(self, positions: torch.Tensor) -> torch.Tensor:
        """Bring the next tokens below the layout's capacity, dropping what must go for them.

        ``positions`` int64 [B, T] are the tokens' places in their rows; those to be run at come back, a tensor of
        its own where they differ. T is 1 for a row at its capacity.
        """
        if self.capacity is None:
            return positions
        full = positions[:, -1] >= self.capacity
        if not full.any():
            return positions
        for group in self.groups:
            held = group.slot_positions
            later = held > self.pinned
            dropped = held == self.pinned
            rows = full[:, None].to(held.device)
            held[rows & dropped] = EMPTY
            held[rows & later] -= 1
        if self._rotations is not None:
            first = {group.window: group.layout.pinned for group in self.groups}
            self.buffers.rotate_(self._rotations, full, first, delta=-1)
        return positions.clamp(max=self.capacity - 1)

    def write(self, new: KVBuffers, positions: torch.Tensor, skip: int = 0) -> None:
        """Store what a step computed, but for its first ``skip`` columns.

        Args:
            new: keys and values of the step's T tokens.
            positions: int64 [B, T], -1 where a token is padding.
            skip: columns that take no slot.
        """
        placements = {}
        for group in self.groups:
            source = max(skip, positions.shape[1] - group.layout.length)  # older ones would be given up at once
            placement = placements[group.window] = group.layout.place(positions, source)
            if placement.shift:
                _shift_left_(group.slot_positions, placement.shift, dim=-1)
            stored = positions if placement.positions is None else placement.positions
            for run in placement.segments:
                group.slot_positions.narrow(1, run.slot, run.count).copy_(stored.narrow(1, run.source, run.count))
            group.note_rows(placement, positions)
        self.buffers.write_(new, placements)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Mark every slot of these rows empty."""
        for group in self.groups:
            group.slot_positions[rows] = EMPTY

    def write_rows(self, new: KVBuffers, positions: torch.Tensor, rows: Sequence[int], columns: int, done: int) -> None:
        """Store what a step computed in some rows, in the slots of columns that have been placed already.

        Args:
            new, positions: as in :meth:`write`.
            rows: those that are written.
            columns: the texts of these rows take so many of the newest columns.
            done: of which so many stand before this step's first column; less than 0 for padding.
        """
        placements = {}
        for group in self.groups:
            length = group.layout.length
            order = group.layout.newest(length)
            # The last of them overwrites what a window gives up, as if they had been placed one after the other.
            source = max(0, -done, positions.shape[1] - length)
            count = positions.shape[1] - source
            runs = _runs([order[(done + source + column - columns) % length] for column in range(count)], source)
            segments = tuple(RowSegment(row, slot, begin, count) for row in rows for slot, begin, count in runs)
            placement = placements[group.window] = Placement(0, (), segments)
            group.note_rows(placement, positions)
        self.buffers.write_(new, placements)

    def select_rows_(self, sources: Sequence[int]) -> None:
        """Row i becomes what row ``sources[i]`` was."""
        moved = [(row, source) for row, source in enumerate(sources) if row != source]
        if not moved:
            return
        rows, wanted = (list(column) for column in zip(*moved, strict=True))
        for group in self.groups:
            group.slot_positions[rows] = group.slot_positions[wanted]
        self.buffers.select_rows_(rows, wanted)

    def read(self, row: int, start: int, stop: int) -> KVSpan | None:
        """A copy of a row's keys and values at positions ``start`` to ``stop`` - 1.

        Layers with a window give the newest tokens before ``stop`` that it holds, whatever ``start``. None when a
        token is no longer there.
        """
        slots = {}
        for group in self.groups:
            first = start if group.window is None else max(0, stop - group.window)
            held = group.slot_positions[row].cpu()
            wanted = ((held >= first) & (held < stop)).nonzero()[:, 0]
            found, order = held[wanted].sort()
            if not torch.equal(found, torch.arange(first, stop, device="cpu")):
                return None
            slots[group.window] = wanted[order]
        return self.buffers.read(row, slots, stop)

    def take_over(self, source: KVCache, count: int) -> None:
        """Be what ``source``, a cache of another length, holds: its ``count`` newest columns, or what fits of them."""
        self.clear()
        source.memory.refresh_()
        moves = {}
        for group, old in zip(self.groups, source.groups, strict=True):
            fitting = min(count, group.layout.length, old.layout.length)
            slots = old.layout.newest(fitting)
            placement = group.layout.place(old.slot_positions[:, slots])
            targets = [slot for run in placement.segments for slot in range(run.slot, run.slot + run.count)]
            group.slot_positions[:, targets] = old.slot_positions[:, slots]
            moves[group.window] = (slots, targets)
        self.buffers.copy_slots_(source.buffers, moves)


def _runs(slots: Sequence[int], source: int) -> list[tuple[int, int, int]]:
    """Consecutive slots of tokens from ``source`` on, as (slot, source, count)."""
    runs: list[tuple[int, int, int]] = []
    for offset, slot in enumerate(slots):
        if runs and slot == runs[-1][0] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((slot, source + offset, 1))
    return runs


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Zeros; on the CPU in memory that numpy asked huge pages for: a decode step over 4096 slots was 3 to 9% faster so."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        numbers = np.zeros((*shape, dtype.itemsize), dtype=np.uint8)
    except ValueError as error:  # more than numpy can count
        raise MemoryError(f"{shape} is too large: {error}") from error
    return torch.from_numpy(numbers).view(dtype)[..., 0]


def _shift_left_(tensor: torch.Tensor, count: int, dim: int) -> None:
    kept = tensor.size(dim) - count
    if kept > 0:  # the ranges overlap, hence the copy
        tensor.narrow(dim, 0, kept).copy_(tensor.narrow(dim, count, kept).clone())
