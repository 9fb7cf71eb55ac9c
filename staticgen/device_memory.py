"""A cache whose tensors are an engine's buffers, and the state of the loop over it.

The host keeps what it needs to choose slots: the positions in them. They go to the device with each step that the host
starts; while the device loops by itself it has a copy of its own, which the host reads when the loop has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from staticgen.cache import KVBuffers, KVMemory, empty_slots, members_of
from staticgen.device_functions import Drafts, loop_specs, move_name
from staticgen.device_loop import LoopState
from staticgen.engines import Buffer, Engine, Executable
from staticgen.facts import StepFacts
from staticgen.functions import TensorSpec
from staticgen.layouts import Placement
from staticgen.rotary import Rotation
from staticgen.shapes import CacheSpec, StepShape, slots_of
from staticgen.spans import KVSpan

Held = dict[str, Buffer]
# Gives the function of a name at a size, (tokens, cache length); waits for it where it is still being read.
Functions = Callable[[tuple[int, int], str], Executable]


def call(executable: Executable, given: Mapping[str, Buffer]) -> Held:
    """Call a function with inputs by name; it takes of them what it has inputs for."""
    function = executable.function
    outputs = executable([given[name] for name in function.inputs])
    return dict(zip(function.outputs, outputs, strict=True))


class NewBuffers(KVBuffers):
    """Keys and values that a step computed, where it computed them; on the CPU when the host has changed them.

    Attributes:
        held: ``new_keys.0`` ... on the device; empty when they are :attr:`on_cpu`.
        on_cpu: the same on the CPU, when they were needed there.
    """

    def __init__(self, engine: Engine, spec: CacheSpec, batch: int, tokens: int):
        super().__init__(spec, batch, tokens, device="meta")
        self._engine = engine
        self.held: Held = {}
        self.on_cpu: KVBuffers | None = None

    def take(self, outputs: Held) -> None:
        """Be what a step returned."""
        self.held = {name: buffer for name, buffer in outputs.items() if name.startswith("new_")}
        self.on_cpu = None

    def merge_(self, source: KVBuffers, chosen: torch.Tensor, column: int, source_column: int) -> None:
        if self.on_cpu is None:
            stacks = [self._engine.download(buffer) for buffer in self.held.values()]
            self.on_cpu = KVBuffers(self.spec, self.batch, self.length, stacks=stacks)
            self.held = {}
        self.on_cpu.merge_(source, chosen, column, source_column)


class DeviceBuffers(KVBuffers):
    """Keys and values on a device; the tensors of this object have sizes and no numbers.

    Args:
        engine: has the buffers.
        functions: give those of this cache's length.
        weights: what functions may need besides what they are given; gets more entries as they are made.
        facts: of the step.
        batch, length: see :class:`staticgen.cache.KVBuffers`.

    Attributes:
        held: the stacks, by the names of :mod:`staticgen.device_functions`.
        puts: tokens of the steps whose keys and values can be written here.
    """

    def __init__(self, engine: Engine, functions: Functions, weights: Held, facts: StepFacts, batch: int, length: int):
        super().__init__(facts.cache_spec, batch, length, facts.form.transposed_keys, windowed=True, device="meta")
        self._engine, self._functions, self._weights = engine, functions, weights
        self._drafts = Drafts(facts, StepShape(batch, 1, length))
        self._slots = {window: slots_of(window, length) for window in self.spec.windows}
        self._exact_held: Held = {}  # 16-bit keys that turn, in float32; see KVBuffers.rotate_
        self.puts: set[int] = set()
        self.held: Held = {}
        self.zero_()

    def zero_(self) -> None:
        self.held = self._zeros(self._drafts.cache())
        self._exact_held = {}

    def _zeros(self, specs: Mapping[str, TensorSpec]) -> Held:
        return {
            name: self._engine.upload(torch.zeros(spec.shape, dtype=spec.dtype, device="cpu"), name)
            for name, spec in specs.items()
        }

    def _run(self, tokens: int, name: str, given: Mapping[str, Buffer]) -> Held:
        return call(self._functions((tokens, self.length), name), {**self._weights, **given})

    def write_(self, new: KVBuffers, placements: Mapping[int | None, Placement]) -> None:
        shifts = {window: placement.shift for window, placement in placements.items()}
        if any(shifts.values()):
            order = {
                window: (np.arange(count) + shifts[window]).clip(max=count - 1) for window, count in self._slots.items()
            }
            self._arrange(range(self.batch), order)
        columns = {window: self._columns(count, placements[window]) for window, count in self._slots.items()}
        if isinstance(new, NewBuffers) and new.on_cpu is None:
            self._put(new.length, new.held, columns)
        else:
            for begin, count, stacks in self._pieces(new.on_cpu or new if isinstance(new, NewBuffers) else new):
                part = {
                    window: np.where((source >= begin) & (source < begin + count), source - begin, -1)
                    for window, source in columns.items()
                }
                self._put(count, stacks, part)
        if self._exact_held:
            self._note_exact({window: source >= 0 for window, source in columns.items()})

    def _columns(self, count: int, placement: Placement) -> np.ndarray:
        """Which column of the new tokens goes to each slot, int [B, slots]; -1 where none does."""
        columns = np.full((self.batch, count), -1)
        for segment in placement.segments:
            columns[:, segment.slot : segment.slot + segment.count] = np.arange(segment.count) + segment.source
        for run in placement.rows:
            columns[run.row, run.slot : run.slot + run.count] = np.arange(run.count) + run.source
        return columns

    def _pieces(self, new: KVBuffers) -> Iterator[tuple[int, int, Held]]:
        """Keys and values of the CPU in pieces that a ``put`` takes: first column, columns, and stacks on the device."""
        widths = sorted(self.puts)
        count = next((width for width in widths if width >= new.length), widths[-1])
        for begin in range(0, new.length, count):
            stacks: Held = {}
            for index, size in enumerate(members_of(self.spec)):
                for kind, tensor in zip(("keys", "values"), new.of_size(size), strict=True):
                    piece = tensor[:, :, :, begin : begin + count]
                    padded = torch.nn.functional.pad(piece, (0, 0, 0, count - piece.shape[3]))
                    stacks[f"new_{kind}.{index}"] = self._engine.upload(padded.contiguous())
            yield begin, count, stacks

    def _put(self, tokens: int, stacks: Held, columns: Mapping[int | None, np.ndarray]) -> None:
        """Write columns of ``stacks`` to slots, as many at once as a ``put`` takes."""
        used = {window: np.flatnonzero((source >= 0).any(axis=0)) for window, source in columns.items()}
        width = {window: min(tokens, count) for window, count in self._slots.items()}
        turns = max(-(-len(slots) // width[window]) for window, slots in used.items())
        for turn in range(turns):
            where: Held = {}
            for group, (window, slots) in enumerate(used.items()):
                mine = slots[turn * width[window] : (turn + 1) * width[window]]
                rest = np.setdiff1d(np.arange(self._slots[window]), mine)[: width[window] - len(mine)]
                chosen = columns[window][:, mine]
                untouched = np.full((self.batch, len(rest)), -1)
                where[f"at.{group}"] = self._upload(np.concatenate([mine, rest]))
                where[f"column.{group}"] = self._upload(np.concatenate([chosen, untouched], axis=1))
            self.held = self._run(tokens, "put", {**stacks, **where, **self.held})

    def copy_slots_(self, source: KVBuffers, moves: Mapping[int | None, tuple[Sequence[int], Sequence[int]]]) -> None:
        assert isinstance(source, DeviceBuffers)
        where: Held = {}
        for group, (window, count) in enumerate(self._slots.items()):
            taken, put = moves[window]
            order = np.zeros(count, dtype=np.int64)
            order[list(put)] = list(taken)
            where[f"slots.{group}"] = self._upload(order)
        self.held = self._run(1, move_name(source.length), {**where, **source.held})
        self._exact_held = {}

    def select_rows_(self, rows: Sequence[int], sources: Sequence[int]) -> None:
        order = np.arange(self.batch)
        order[list(rows)] = list(sources)
        self._arrange(order, {window: np.arange(count) for window, count in self._slots.items()})

    def _arrange(self, rows: Sequence[int] | np.ndarray, slots: Mapping[int | None, np.ndarray]) -> None:
        where = {f"slots.{group}": self._upload(order) for group, order in enumerate(slots.values())}
        self.held = self._run(1, "arrange", {"rows": self._upload(np.asarray(rows)), **where, **self.held})
        self._exact_held = {}  # made again from the keys when they turn

    def read(self, row: int, slots: Mapping[int | None, torch.Tensor], stop: int) -> KVSpan:
        stacks = self._run(1, "row", {"row": self._upload(np.array([row])), **self.held})
        parts = {}
        for index, size in enumerate(members_of(self.spec)):
            keys = self._engine.download(stacks[f"keys.{index}"])[:, 0]
            values = self._engine.download(stacks[f"values.{index}"])[:, 0]
            chosen = slots[size.window]
            keys = keys.transpose(-1, -2) if self.transposed_keys else keys
            parts[size] = keys.index_select(-2, chosen).contiguous(), values.index_select(-2, chosen)
        return KVSpan(stop, parts)

    def rotate_(
        self, rotations: Sequence[Rotation | None], rows: torch.Tensor, first: Mapping[int | None, int], delta: int
    ) -> None:
        assert delta == -1  # the one that there is a function for
        if self._drafts.exact_keys() and not self._exact_held:
            self._exact_held = self._zeros(self._drafts.exact_keys())
            self._note_exact({window: np.ones((self.batch, count), bool) for window, count in self._slots.items()})
        where = {f"first.{group}": self._upload(np.array([first[window]])) for group, window in enumerate(self._slots)}
        turned = self._run(1, "turn", {"rows": self._engine.upload(rows), **where, **self._exact_held, **self.held})
        self.held = {name: turned.get(name, buffer) for name, buffer in self.held.items()}
        self._exact_held = {name: turned[name] for name in self._exact_held}

    def _note_exact(self, written: Mapping[int | None, np.ndarray]) -> None:
        where = {
            f"written.{group}": self._engine.upload(torch.from_numpy(slots))
            for group, slots in enumerate(written.values())
        }
        self._exact_held = self._run(1, "exact", {**where, **self._exact_held, **self.held})

    def _upload(self, numbers: np.ndarray) -> Buffer:
        return self._engine.upload(torch.from_numpy(numbers.astype(np.int32)))


class DeviceMemory(KVMemory):
    """The memory of a cache on a device.

    Args:
        engine, functions, weights, facts, batch, length: see :class:`DeviceBuffers`.
        turns: called when keys are going to turn, with how.

    Attributes:
        positions: what the loop's own copy of the positions is; None while the host has the newer ones.
    """

    def __init__(
        self,
        engine: Engine,
        functions: Functions,
        weights: Held,
        facts: StepFacts,
        batch: int,
        length: int,
        turns: Callable[[Sequence[Rotation | None]], None],
    ):
        self._engine, self._turns = engine, turns
        self.stacks = DeviceBuffers(engine, functions, weights, facts, batch, length)
        self.buffers = self.stacks
        self.slot_positions = empty_slots(facts.cache_spec, batch, length)
        self.positions: Held | None = None

    def will_turn(self, rotations: Sequence[Rotation | None]) -> None:
        self._turns(rotations)

    def upload_positions(self) -> Held:
        """The host's positions, as inputs of a step."""
        return {
            f"slot_positions.{group}": self._engine.upload(held.int()) for group, held in enumerate(self.slot_positions)
        }

    def refresh_(self) -> None:
        if self.positions is not None:
            for held, buffer in zip(self.slot_positions, self.positions.values(), strict=True):
                held.copy_(self._engine.download(buffer))
            self.positions = None


class DeviceLoopState(LoopState):
    """The state of the loop as an engine's buffers; its tensors are what the loop begins with.

    Attributes:
        held: what the device has, by the names of :mod:`staticgen.device_functions`; None before the first step.
    """

    def __init__(self, engine: Engine, batch: int, windows: Sequence[int | None]):
        self._engine = engine
        self.held: Held | None = None
        super().__init__(batch, windows, torch.device("cpu"))

    def begin(self, *inputs: torch.Tensor, **settings: object) -> None:
        super().begin(*inputs, **settings)  # type: ignore[arg-type]
        self.held = None

    def place(self, slots: Sequence[int]) -> None:
        super().place(slots)
        if self.held is not None:
            self.held |= {f"slots.{group}": self._engine.upload(slot.int()) for group, slot in enumerate(self.slots)}

    def upload(self) -> Held:
        """The state as it is to begin, on the device."""
        batch = self.token_ids.shape[0]
        held: Held = {}
        for name, spec in loop_specs(batch, len(self.slots), sampled=True).items():
            kind, _, group = name.partition(".")
            tensor = self.slots[int(group)] if kind == "slots" else getattr(self, name)
            if name == "seed":  # its lower and its upper half
                tensor = torch.stack([tensor[0] << 32 >> 32, tensor[0] >> 32])
            held[name] = self._engine.upload(tensor.to(spec.dtype))
        return held

    def snapshot(self, count: int) -> Callable[[], torch.Tensor]:
        assert self.held is not None
        made, generated = self._note_made(count), self.held["generated"]
        return lambda: self._engine.download(generated).long()[made]
