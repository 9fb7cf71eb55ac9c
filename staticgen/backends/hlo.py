"""What backends have in common that keep cache and loop on a device and run functions there: ``xla`` and ``jax``."""

from __future__ import annotations

import json
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import torch

from staticgen.backends.base import Backend, Program, ProgramFiles
from staticgen.cache import KVBuffers, KVCache, KVMemory
from staticgen.device_functions import MOVE, Draft, Drafts, RunStep
from staticgen.device_memory import DeviceLoopState, DeviceMemory, Functions, Held, NewBuffers, call
from staticgen.engines import Engine, Executable
from staticgen.errors import CompileError
from staticgen.facts import StepFacts
from staticgen.functions import WEIGHT, Function, Lowered, TensorSpec
from staticgen.rotary import Rotation
from staticgen.shapes import StepShape

if TYPE_CHECKING:
    from pathlib import Path

    from staticgen.step import Step

# Roles of a program's files in a bundle, besides one for each function, and one for each as HLO.
FUNCTIONS, WEIGHTS, HLO = "functions", "weights", ".hlo"


class HloProgram(Program):
    """The functions of a step at one size."""

    def __init__(self, backend: HloBackend, facts: StepFacts, shape: StepShape):
        super().__init__(shape)
        self._backend, self._facts = backend, facts
        self._engine = backend.engine
        self._new = NewBuffers(backend.engine, facts.cache_spec, shape.batch, shape.tokens)

    def _function(self, name: str) -> Executable:
        return self._backend.function(self.shape, name)

    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        memory = self._memory(cache.memory)
        names = ("token_ids", "position_ids", "first_positions")
        given = {name: self._engine.upload(tensor.int()) for name, tensor in zip(names, inputs, strict=True)}
        past = {**memory.upload_positions(), **memory.stacks.held}
        outputs = call(self._function("step"), {**self._backend.weights, **given, **past})
        self._new.take(outputs)
        return self._engine.download(outputs["logits"]), self._new

    def advance(self, sampled: bool) -> None:
        batch, length = self.shape.batch, self.shape.cache_length
        state = self._backend.loop_state(self._facts, batch)
        memory = self._memory(self._backend.memory(self._facts, batch, length))
        if state.held is None:
            state.held = state.upload()
        if memory.positions is None:
            memory.positions = memory.upload_positions()
        given = {**self._backend.weights, **state.held, **memory.positions, **memory.stacks.held}
        outputs = call(self._function("sampled" if sampled else "greedy"), given)
        state.held = {name: outputs.get(name, buffer) for name, buffer in state.held.items()}
        memory.positions = {name: outputs[name] for name in memory.positions}
        memory.stacks.held = {name: outputs[name] for name in memory.stacks.held}

    def _memory(self, memory: KVMemory) -> DeviceMemory:
        if not isinstance(memory, DeviceMemory):
            raise ValueError(f"cache: the program {self.shape} runs on memory of its backend's own")
        return memory


class HloBackend(Backend):
    """A backend over an engine.

    Attributes:
        engine: runs its functions.
        weights: on the device, by the names of the functions' inputs.
    """

    resident = True

    def __init__(self, device: str | None, options: Mapping[str, str] | None, engine: Engine):
        super().__init__(device, options)
        self.engine = engine
        self.weights: Held = {}
        self._code: dict[tuple[StepShape, str], Future[Executable]] = {}
        self._ended: dict[StepShape, CompileError | None] = {}  # sizes that no one makes functions for any more
        self._lock = threading.Lock()  # programs of bundles are read in a thread
        self._rotations: dict[StepShape, Sequence[Rotation | None]] = {}
        self._sizes: dict[int, list[tuple[int, int]]] = {}
        self._memory: dict[tuple[int, int], DeviceMemory] = {}
        self._states: dict[int, DeviceLoopState] = {}
        self._run_step: RunStep | None = None
        self._read: set[Path] = set()
        self._specs: dict[str, TensorSpec] = {}  # of the weights that were read

    def function(self, shape: StepShape, name: str) -> Executable:
        """The function of this name at one size; waits while it is being read.

        Raises:
            CompileError: it cannot be read, or there is none.
        """
        future = self._future(shape, name)
        with self._lock:
            if shape in self._ended and not future.done():
                raise self._ended[shape] or _absent(shape, name)
        return future.result()

    def _future(self, shape: StepShape, name: str) -> Future[Executable]:
        with self._lock:
            return self._code.setdefault((shape, name), Future())

    def _end(self, shape: StepShape, failure: CompileError | None = None) -> None:
        """No more functions come for a size: whoever waits for one is told."""
        with self._lock:
            self._ended[shape] = failure
            waiting = {name: future for (size, name), future in self._code.items() if size == shape}
        for name, future in waiting.items():
            if not future.done():
                future.set_exception(failure or _absent(shape, name))

    def reserve(self, step: StepFacts, batch: int, sizes: Sequence[tuple[int, int]]) -> None:
        known = self._sizes.setdefault(batch, [])
        known += [size for size in sizes if size not in known]

    def memory(self, step: StepFacts, batch: int, length: int) -> DeviceMemory:
        if (batch, length) not in self._memory:
            functions: Functions = lambda size, name: self.function(StepShape(batch, *size), name)  # noqa: E731
            turns = partial(self._prepare_turns, step, StepShape(batch, 1, length))
            self._memory[batch, length] = DeviceMemory(self.engine, functions, self.weights, step, batch, length, turns)
        memory = self._memory[batch, length]
        memory.stacks.puts |= {tokens for tokens, slots in self._sizes.get(batch, ()) if slots == length}
        return memory

    def loop_state(self, step: StepFacts, batch: int) -> DeviceLoopState:
        if batch not in self._states:
            self._states[batch] = DeviceLoopState(self.engine, batch, step.cache_spec.windows)
        return self._states[batch]

    def compile(self, step: Step, shape: StepShape) -> Program:
        if self._run_step is None:
            self._run_step = self._runner(step)
        self._ended[shape] = None
        # Sizes that were there first may need more functions beside this one.
        for size in [size for size in self._ended if size.batch == shape.batch]:
            for draft in drafts_of(step, size, self._sizes[size.batch], self._run_step):
                self._add(size, draft)
        if shape in self._rotations:
            self._prepare_turns(step, shape, self._rotations[shape])
        return HloProgram(self, step, shape)

    def _add(self, shape: StepShape, draft: Draft) -> None:
        future = self._future(shape, draft.name)
        if not future.done():
            future.set_result(self._make(draft))

    def _prepare_turns(self, step: StepFacts, shape: StepShape, rotations: Sequence[Rotation | None]) -> None:
        self._rotations[shape] = rotations
        if shape in self._ended and self._run_step is not None:  # a bundle has what it has
            for draft in turns_of(step, shape, rotations):
                self._add(shape, draft)

    @abstractmethod
    def _runner(self, step: Step) -> RunStep:
        """What functions call to run the step, with its weights in :attr:`weights`."""

    @abstractmethod
    def _make(self, draft: Draft) -> Executable:
        """Compile a function of the step in use.

        Raises:
            CompileError: it cannot be lowered or compiled.
        """

    def load(self, step: StepFacts, files: ProgramFiles) -> Program:
        try:
            self._read_weights(files.paths[WEIGHTS])
            for name, function in self._read_functions(step, files).items():
                hlo = files.paths.get(name + HLO)
                lowered = Lowered(function, files.paths[name].read_bytes(), b"" if hlo is None else hlo.read_bytes())
                self._future(files.shape, name).set_result(self.engine.load(lowered))
        except Exception as error:
            failure = error if isinstance(error, CompileError) else None
            if failure is None:
                failure = CompileError(
                    f"program {files.name!r} cannot be read ({type(error).__name__}: {error}); make the bundle anew with "
                    "`staticgen compile`"
                )
            self._end(files.shape, failure)
            raise failure from error
        self._end(files.shape)
        return HloProgram(self, step, files.shape)

    def _read_functions(self, step: StepFacts, files: ProgramFiles) -> dict[str, Function]:
        """A program's functions by name, which are those that its step needs at its size, and take what it gives them."""
        table = json.loads(files.paths[FUNCTIONS].read_bytes())
        functions = {name: Function.from_dict(entry) for name, entry in table.items()}
        needed = {draft.name: draft for draft in drafts_of(step, files.shape, self._sizes[files.shape.batch])}
        known = {**needed, **{draft.name: draft for draft in turns_of(step, files.shape, ())}}
        for name in functions:  # tokens may come from caches that the layout in use does not have
            length = name.removeprefix(MOVE)
            if name not in known and length.isdecimal() and files.shape.tokens == 1:
                known[name] = Drafts(step, files.shape).move(int(length))
        for name in needed:
            if name not in functions:
                raise ValueError(f"it has no function {name!r}")
        for name, function in functions.items():
            if name not in known:
                raise ValueError(f"its function {name!r} is none that is known")
            for key, spec in function.inputs.items():
                expected = self._specs.get(key) if key.startswith(WEIGHT) else known[name].inputs.get(key)
                if expected is None and key.startswith(WEIGHT):
                    raise ValueError(f"its function {name!r} needs the weight {key!r}, which there is not")
                if expected != spec:
                    raise ValueError(f"its function {name!r} takes {key!r} as {spec}, expected {expected}")
        return functions

    def _read_weights(self, path: Path) -> None:
        import safetensors  # noqa: PLC0415 - for bundles only

        if path in self._read:
            return
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                tensor = file.get_tensor(name)
                self._specs[WEIGHT + name] = TensorSpec.of(tensor)
                self.weights[WEIGHT + name] = self.engine.upload(tensor, WEIGHT + name)
        self._read.add(path)


def _absent(shape: StepShape, name: str) -> CompileError:
    return CompileError(f"the program {shape} has no function {name!r}; make the bundle anew with `staticgen compile`")


def drafts_of(
    facts: StepFacts, shape: StepShape, sizes: Iterable[tuple[int, int]], run_step: RunStep | None = None
) -> Iterator[Draft]:
    """The functions that a session of programs of these sizes, (tokens, cache length) each, needs at one of them."""
    drafts = Drafts(facts, shape, run_step)
    yield drafts.step()
    lengths = sorted({slots for tokens, slots in sizes if tokens == 1})
    if shape.cache_length not in lengths:  # nothing is cached
        return
    yield drafts.put()
    if shape.tokens == 1:
        yield drafts.loop(sampled=False)
        yield drafts.loop(sampled=True)
        yield drafts.arrange()
        yield drafts.row()
        place = lengths.index(shape.cache_length)
        # Tokens come from the cache that is one smaller when it is full; from the largest after prefill; and to it
        # from any before it.
        sources = {*lengths[max(0, place - 1) : place], lengths[-1]} if place < len(lengths) - 1 else set(lengths)
        for length in sorted(sources - {shape.cache_length}):
            yield drafts.move(length)


def turns_of(facts: StepFacts, shape: StepShape, rotations: Sequence[Rotation | None]) -> Iterator[Draft]:
    """The functions for a layout that drops a token and moves the later ones down by one position."""
    drafts = Drafts(facts, shape)
    if drafts.exact_keys():
        yield drafts.exact()
    yield drafts.turn(rotations)
