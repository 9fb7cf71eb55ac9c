"""Backend ``cuda``: steps and the decode loop recorded into CUDA graphs once, and replayed for every token.

Weights, cache and all buffers are on the GPU, allocated once and owned here. What is handed out is a copy on the CPU.
``device="null"`` runs all of it on the CPU through :class:`staticgen.graphs.NullGraphs`, for tests: slow, and strict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.export.passes import move_to_device_pass

from staticgen.backends.base import Backend, Program
from staticgen.cache import KVBuffers, KVCache, KVMemory
from staticgen.device_loop import LoopState, advance
from staticgen.errors import BackendUnavailableError, CompileError, DoesNotFitError, UnknownNameError
from staticgen.facts import StepFacts
from staticgen.graphs import Graph, Graphs, NullGraphs
from staticgen.profiles import load_profile
from staticgen.shapes import EMPTY, StepShape, largest_that_fits

if TYPE_CHECKING:
    from staticgen.step import Step

# What backend_options may hold; the first of each is the default.
_OPTIONS = {"compile": ("none", "inductor"), "attention": ("spread", "split", "concat", "sdpa")}
# What kernels, graphs and the allocator take besides what is counted, as a part of it and in bytes.
_SLACK, _CONTEXT = 1.05, 1 << 29

_Compiled = Callable[..., tuple[torch.Tensor, ...]]


class CudaGraphs(Graphs):
    """CUDA graphs of one GPU, on a stream and in a memory pool of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def scope(self) -> Iterator[None]:
        # A stream of its own: whatever stream the caller is in, work of this session is in one order.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _record(
        self, work: Callable[[], None], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may go on to allocate and to synchronise while this one records.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return _CudaGraph(work, inputs, graph)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0]


class _CudaGraph(Graph):
    def __init__(self, work: Callable[[], None], inputs: Sequence[torch.Tensor], graph: Any):
        super().__init__(work, inputs)
        self._graph = graph

    def _run(self) -> None:
        self._graph.replay()


class CudaProgram(Program):
    """A step of one size as a graph over the memory of its cache; and, for one token, the loop over it as well."""

    def __init__(self, graphs: Graphs, step: StepFacts, shape: StepShape, compiled: _Compiled, memory: KVMemory):
        super().__init__(shape)
        device, self._memory = graphs.device, memory
        size = (shape.batch, shape.tokens)
        inputs = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3)]
        self._logits = torch.zeros(shape.batch, step.logits_size, dtype=torch.float32, device=device)
        self._new = KVBuffers(step.cache_spec, shape.batch, shape.tokens, device=device)
        outputs = [self._logits, *self._new.keys, *self._new.values]
        past = (*memory.slot_positions, *memory.buffers.keys, *memory.buffers.values)

        def work() -> None:
            for buffer, tensor in zip(outputs, compiled(*inputs, *past), strict=True):
                buffer.copy_(tensor)

        self._graph = graphs.record(work, inputs, outputs)
        self._loops: dict[bool, Graph] = {}

    def record_loop(self, graphs: Graphs, compiled: _Compiled, state: LoopState) -> None:
        """Record both ways to choose tokens, on rows that have ended: what that leaves in the cache is no token's."""
        ended = torch.full((self.shape.batch, 1), EMPTY, dtype=torch.int64, device="cpu")
        state.begin(torch.zeros_like(ended), ended, eos=(), fill=0, window=None)
        for sampled in (False, True):

            def work() -> None:
                advance(compiled, state, self._memory, sampled)  # noqa: B023 - it is recorded before the next turn

            self._loops[sampled] = graphs.record(work)

    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        if cache.memory is not self._memory:
            raise ValueError(f"cache: the program {self.shape} is bound to the memory of its backend's own cache")
        self._graph.replay(*inputs)
        return self._logits.to("cpu", copy=True), self._new

    def advance(self, sampled: bool) -> None:
        self._loops[sampled].replay()


class CudaBackend(Backend):
    """``device`` is ``cuda``, ``cuda:1`` ..., or ``null``.

    ``options``: ``{"compile": "inductor"}`` has ``torch.compile`` rewrite the step before it is recorded;
    ``{"attention": "split"}``, ``"concat"`` or ``"sdpa"`` writes attention in another way than ``"spread"``; see
    :class:`staticgen.shapes.StepForm`.
    """

    name = "cuda"
    resident = True

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        super().__init__((device or "cuda").lower(), options)
        self._options = _read_options(options or {})
        self.emulated = self.device == "null"
        if self.emulated and self._options["compile"] != "none":
            raise ValueError(
                "backend_options: compile='inductor' is not for device 'null', which cannot see what compiled code does"
            )
        self._graphs: Graphs = NullGraphs() if self.emulated else CudaGraphs(_find_device(self.device))
        profile = load_profile("nvidia" if self.emulated else _profile_of(self._graphs.device))
        self.form = replace(profile.form, attention=self._options["attention"])  # type: ignore[arg-type]
        self.prefill_buckets, self.cache_sizes = profile.prefill_buckets, profile.cache_sizes
        self._weights: dict[str, torch.Tensor] = {}
        self._memory: dict[tuple[int, int], KVMemory] = {}
        self._states: dict[int, LoopState] = {}

    @property
    def made_for(self) -> dict[str, Any]:
        found = {"backend": self.name, "device": self.device, "torch": torch.__version__, "options": self._options}
        return found if self.emulated else {**found, "gpu": torch.cuda.get_device_name(self._graphs.device)}

    def scope(self) -> AbstractContextManager[None]:
        return self._graphs.scope()

    def memory(self, step: StepFacts, batch: int, length: int) -> KVMemory:
        # Layouts differ in what they put where, so that all caches of one size can be in the same memory: of a
        # session one is in use.
        if (batch, length) not in self._memory:
            device = self._graphs.device
            made = KVMemory(step.cache_spec, batch, length, step.form.transposed_keys, device)
            for tensor in made.buffers.stacks:
                self._graphs.prepare_memory(tensor)
            self._memory[batch, length] = made
        return self._memory[batch, length]

    def loop_state(self, step: StepFacts, batch: int) -> LoopState:
        if batch not in self._states:
            self._states[batch] = LoopState(batch, step.cache_spec.windows, self._graphs.device)
        return self._states[batch]

    def compile(self, step: Step, shape: StepShape) -> Program:
        with self.scope(), _exact_float32():
            compiled = self._on_device(step, shape)
            memory = self.memory(step, shape.batch, shape.cache_length)
            try:
                program = CudaProgram(self._graphs, step, shape, compiled, memory)
                if shape.tokens == 1:
                    program.record_loop(self._graphs, compiled, self.loop_state(step, shape.batch))
            except RuntimeError as error:
                raise CompileError(f"backend 'cuda' cannot record the step {shape} in {step.dtype}: {error}") from error
            finally:
                for held in memory.slot_positions:  # to record is to run on whatever was there
                    held.fill_(-1)
            return program

    def _on_device(self, step: Step, shape: StepShape) -> _Compiled:
        """The step as torch's own graph, which has no code of Python left, over weights on the device."""
        try:
            with torch.no_grad(), _gathered_experts(step.model):
                exported = torch.export.export(step, step.example_inputs(shape), strict=False)
        except Exception as error:  # of export, which raises anything
            raise CompileError(f"torch cannot export the step {shape} in {step.dtype}: {error}") from error
        exported._example_inputs = None  # a cache on the CPU, which would be moved as well
        for name, tensor in exported.state_dict.items():
            place = f"{tensor.data_ptr()} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"  # tied ones move once
            if place not in self._weights:
                self._weights[place] = tensor.detach().to(self._graphs.device, copy=True)
            exported.state_dict[name] = torch.nn.Parameter(self._weights[place], requires_grad=False)
        for name, constant in exported.constants.items():
            if isinstance(constant, torch.Tensor):
                exported.constants[name] = constant.to(self._graphs.device, copy=True)
        moved: Any = move_to_device_pass(exported, str(self._graphs.device))
        takes_guards = "check_guards" in inspect.signature(moved.module).parameters
        module = moved.module(**({"check_guards": False} if takes_guards else {}))
        if self._options["compile"] == "inductor":
            return torch.compile(module, fullgraph=True, dynamic=False)
        return module

    def reserve(self, step: StepFacts, batch: int, sizes: Sequence[tuple[int, int]]) -> None:
        free = self._graphs.free_bytes()
        if free is None:
            return
        held = sum(memory.buffers.nbytes for memory in self._memory.values()) + sum(
            tensor.nbytes for tensor in self._weights.values()
        )
        weights, available = _weight_bytes(step), free + held

        def needed(rows: int, longest: int) -> int:
            fitted = [(min(tokens, longest), min(length, longest)) for tokens, length in sizes]
            return int((weights + _bytes(step, rows, fitted)) * _SLACK) + _CONTEXT

        longest = max(max(size) for size in sizes)
        total = needed(batch, longest)
        if total <= available:
            return
        rows = largest_that_fits(1, batch, lambda count: needed(count, longest) <= available)
        length = largest_that_fits(1, longest, lambda count: needed(batch, count) <= available)
        fits = [f"batch_size={rows} with this max_length"] * bool(rows)
        fits += [f"max_length={length} with this batch_size"] * bool(length)
        spec = step.cache_spec
        cache = sum(spec.nbytes(batch, slots) for slots in {slots for _, slots in sizes})
        raise DoesNotFitError(
            f"batch_size={batch} and max_length={longest} need {total / 1e9:.3g} GB on {self.description}: weights "
            f"{weights / 1e9:.3g}, cache {cache / 1e9:.3g}, the rest for what steps compute in between; "
            f"{available / 1e9:.3g} GB are free. "
            + (f"What would fit: {', or '.join(fits)}" if fits else "Not even one row of one token fits")
        )


def _bytes(step: StepFacts, rows: int, sizes: Sequence[tuple[int, int]]) -> int:
    """Memory for caches of these sizes, and for what the largest of their steps has in between."""
    spec, text = step.cache_spec, step.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or max(layer.heads for layer in spec.layers)
    hidden = getattr(text, "intermediate_size", None) or 4 * getattr(text, "hidden_size", 0) or 0
    cache = sum(spec.nbytes(rows, slots) for slots in {slots for _, slots in sizes})
    new = sum(spec.nbytes(rows, tokens) for tokens, _ in sizes)
    experts = getattr(text, "num_experts_per_tok", None) or 0
    width = getattr(text, "moe_intermediate_size", None) or hidden
    gathered = 3 * experts * width * (getattr(text, "hidden_size", 0) or 0) * spec.dtype.itemsize
    chosen = max(rows * tokens for tokens, _ in sizes) * gathered
    # Scores, masked scores and their softmax; some layers' worth of the widest activation; sorted logits.
    between = max(rows * tokens * (3 * heads * (slots + tokens) + 4 * hidden) * 4 for tokens, slots in sizes)
    return cache + new + between + chosen + 40 * rows * step.logits_size


def _weight_bytes(step: StepFacts) -> int:
    tensors = {id(tensor): tensor for tensor in step.parameters()} if isinstance(step, torch.nn.Module) else {}
    return sum(tensor.nbytes for tensor in tensors.values())


def _read_options(given: Mapping[str, str]) -> dict[str, str]:
    for name, value in given.items():
        if name not in _OPTIONS:
            raise ValueError(
                f"backend_options has the unknown option {name!r} for backend 'cuda'; known are {', '.join(_OPTIONS)}"
            )
        if value not in _OPTIONS[name]:
            raise ValueError(f"backend_options has {name}={value!r}, expected one of {', '.join(_OPTIONS[name])}")
    return {**{name: values[0] for name, values in _OPTIONS.items()}, **given}


def _find_device(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UnknownNameError(f"backend 'cuda' has the devices cuda, cuda:1 ... and null (for tests), got {name!r}")
    if torch.version.cuda is None:
        raise BackendUnavailableError(
            f"backend 'cuda' needs a CUDA build of torch, and this one is {torch.__version__}: install torch from the "
            "index that its site names for your CUDA release. Alternatives: backend='openvino' or backend='auto'"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "backend 'cuda': torch finds no NVIDIA GPU that it can use; see `staticgen devices cuda`. Alternatives: "
            "backend='openvino' or backend='auto'"
        )
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise BackendUnavailableError(f"backend 'cuda': there is no device {name}, torch finds {count}")
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def _profile_of(device: torch.device) -> str:
    """The profile of a GPU by the name that its driver has for it."""
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return next((f"nvidia-{kind}" for kind in ("a100", "h100", "h200", "l4") if kind in words), "nvidia")


@contextmanager
def _gathered_experts(model: Any) -> Iterator[None]:
    """Export experts as a gather of the chosen ones' weights.

    The other ways of transformers ask for the sizes of groups, which no capture allows, or need a dtype or a GPU.
    """
    change = getattr(model, "set_experts_implementation", None)  # not in transformers 5.5
    if change is None or not model._can_set_experts_implementation():
        yield
        return
    before = model.config._experts_implementation
    change("batched_mm")
    try:
        yield
    finally:
        change(before)


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Record float32 products that are not rounded to TF32, whatever the caller has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
