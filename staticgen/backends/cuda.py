"""Backend ``cuda``: steps and the decode loop recorded into CUDA graphs once, and replayed for every token.

Weights, cache and all buffers are on the GPU, allocated once and owned here. What is handed out is a copy on the CPU.
``device="null"`` runs all of it on the CPU through :class:`staticgen.graphs.NullGraphs`, for tests: slow, and strict.
"""

from __future__ import annotations

import gc
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from staticgen.backends.base import Backend, Program
from staticgen.cache import KVBuffers, KVCache, KVMemory
from staticgen.device_loop import LoopState, advance, past_of
from staticgen.errors import BackendUnavailableError, CompileError, DoesNotFitError, UnknownNameError
from staticgen.facts import StepFacts
from staticgen.graphs import Graph, Graphs, NullGraphs
from staticgen.profiles import load_profile
from staticgen.shapes import EMPTY, Attention, StepShape, largest_that_fits

if TYPE_CHECKING:
    from staticgen.step import Step

# What backend_options may hold.
_OPTIONS = {"compile": ("none", "auto", "inductor"), "attention": get_args(Attention)}
# Inductor writes products with one row itself, in loops that it measures, instead of leaving them to a library that
# reads weights at less than the memory's speed, and puts what comes before and after into the same kernels.
INDUCTOR: dict[str, Any] = {"coordinate_descent_tuning": True}
# What kernels, graphs and the allocator take besides what is counted, as a part of it and in bytes.
_SLACK, _CONTEXT = 1.05, 1 << 29
_WORTH_IT = 0.97  # of the time of the step as it is written; less is noise

_recording = threading.RLock()  # two recordings in one process break each other, and both want settings of the process

logger = logging.getLogger("staticgen")

_Compiled = Callable[..., tuple[torch.Tensor, ...]]


class CudaGraphs(Graphs):
    """CUDA graphs of one GPU, on a stream and in a memory pool of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)
        # Recorded where nothing else runs. A product's workspace belongs to its stream, and torch frees it when any graph
        # recorded there goes, or when cudagraph trees ask: first made while recording, it is in the pool of the graphs that
        # use it, and stays theirs. Few have streams of high priority, of which torch hands out the same few again.
        self._recording: Any = torch.cuda.Stream(device, priority=-1)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def scope(self) -> Iterator[None]:
        # A stream of its own: whatever stream the caller is in, work of this session is in one order, and after the
        # caller's, whose processors may look at tensors that are still in the making.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _record(
        self, work: Callable[[], None], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may go on to allocate. What waits for the whole device breaks a recording all the same.
        mode = {"pool": self._pool, "stream": self._recording, "capture_error_mode": "thread_local"}
        with _no_collection(), torch.cuda.graph(graph, **mode):
            work()
        return _CudaGraph(work, inputs, graph)

    def synchronise(self) -> None:
        self._stream.synchronize()

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)  # or the copy would wait
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._stream)

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait

    def give_back(self) -> None:
        super().give_back()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int | None:
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)  # torch gives it back
        return torch.cuda.mem_get_info(self.device)[0] + kept


class _CudaGraph(Graph):
    def __init__(self, work: Callable[[], None], inputs: Sequence[torch.Tensor], graph: Any):
        super().__init__(work, inputs)
        self._graph = graph

    def run(self) -> None:
        self._graph.replay()


class CudaProgram(Program):
    """A step of one size as a graph over the memory of its cache; and, for one token, the loop over it as well.

    Attributes:
        graph: the step; its inputs are token ids, positions and first positions.
    """

    def __init__(self, graphs: Graphs, step: StepFacts, shape: StepShape, compiled: _Compiled, memory: KVMemory):
        super().__init__(shape)
        device, self._memory = graphs.device, memory
        inputs = _new_inputs(shape, device)
        self._logits = torch.zeros(shape.batch, step.logits_size, dtype=torch.float32, device=device)
        self._new = KVBuffers(step.cache_spec, shape.batch, shape.tokens, device=device)
        outputs = [self._logits, *self._new.keys, *self._new.values]
        past = past_of(memory)

        def work() -> None:
            for buffer, tensor in zip(outputs, compiled(*inputs, *past), strict=True):
                buffer.copy_(tensor)

        self.graph = graphs.record(work, inputs, outputs)
        self._loops: dict[bool, Graph] = {}

    def record_loop(self, graphs: Graphs, compiled: _Compiled, state: LoopState) -> None:
        """Record both ways to choose tokens, on rows that have ended: what that leaves in the cache is no token's."""
        ended = torch.full((self.shape.batch, 1), EMPTY, dtype=torch.int64, device="cpu")
        state.begin(torch.zeros_like(ended), ended, eos=(), fill=0, window=None)
        state.place([0] * len(state.slots))  # the last one recorded may have had more of them
        for sampled in (False, True):
            self._loops[sampled] = graphs.record(partial(advance, compiled, state, self._memory, sampled))

    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        if cache.memory is not self._memory:
            raise ValueError(f"cache: the program {self.shape} is bound to the memory of its backend's own cache")
        self.graph.replay(*inputs)
        return self._logits.to("cpu", copy=True), self._new

    def advance(self, sampled: bool) -> None:
        self._loops[sampled].replay()


class CudaBackend(Backend):
    """``device`` is ``cuda``, ``cuda:1`` ..., or ``null``.

    ``options``: ``compile`` says whether ``torch.compile`` rewrites a step before it is recorded, which takes minutes for
    a large model, the first time: ``"none"``, ``"inductor"``, or ``"auto"``, which records decode steps both ways and
    keeps what replays faster. ``attention`` is ``"spread"``, ``"split"``, ``"concat"`` or ``"sdpa"``, in place of the
    profile's; see :class:`staticgen.shapes.StepForm`.
    """

    name = "cuda"
    resident = True

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        super().__init__((device or "cuda").lower(), options)
        given = _read_options(options or {})
        self.emulated = self.device == "null"
        if self.emulated and given.get("compile") == "inductor":
            raise ValueError(
                "backend_options: compile='inductor' is not for device 'null', which cannot see what compiled code does"
            )
        self._graphs: Graphs = NullGraphs() if self.emulated else CudaGraphs(_find_device(self.device))
        profile = load_profile("nvidia" if self.emulated else _profile_of(self._graphs.device))
        self._options = {"compile": "none", "attention": profile.form.attention, **given}
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
            self._states[batch] = LoopState(batch, step.cache_spec.windows, self._graphs.device, self._graphs.fetch)
        return self._states[batch]

    def compile(self, step: Step, shape: StepShape) -> Program:
        with _recording, self.scope(), _own_settings():
            module = on_device(exported(step, shape), self._graphs.device, self._weights)
            memory = self.memory(step, shape.batch, shape.cache_length)
            try:
                program, compiled = self._record(step, shape, module, memory)
                if shape.tokens == 1:
                    program.record_loop(self._graphs, compiled, self.loop_state(step, shape.batch))
            except RuntimeError as error:
                raise CompileError(f"backend 'cuda' cannot record the step {shape} in {step.dtype}: {error}") from error
            return program

    def _record(
        self, step: Step, shape: StepShape, module: _Compiled, memory: KVMemory
    ) -> tuple[CudaProgram, _Compiled]:
        """A program, and what was recorded for it."""

        def record(compiled: _Compiled) -> tuple[CudaProgram, _Compiled]:
            return CudaProgram(self._graphs, step, shape, compiled, memory), compiled

        asked = self._options["compile"]
        if asked == "inductor":
            return record(_rewritten(module))
        written = record(module)
        if asked == "none" or self.emulated or shape.tokens > 1:
            return written
        compiled = _rewritten(module)
        try:  # before it is recorded, since nothing can go on after a recording that failed
            with torch.no_grad():
                compiled(*_new_inputs(shape, self._graphs.device), *past_of(memory))
        except Exception as error:  # of torch.compile, which raises anything
            logger.warning(
                "the step %s runs as it is written, because torch.compile cannot rewrite it: %s", shape, error
            )
            return written
        rewritten = record(compiled)
        seconds = self._graphs.seconds([written[0].graph, rewritten[0].graph])
        logger.info(
            "the step %s takes %.3f ms as it is written and %.3f ms as torch.compile rewrites it",
            shape, *(1000 * each for each in seconds),
        )  # fmt: skip
        return rewritten if seconds[1] < _WORTH_IT * seconds[0] else written

    def reserve(self, step: StepFacts, batch: int, sizes: Sequence[tuple[int, int]]) -> None:
        if self._graphs.free_bytes() is None:
            return
        held = sum(memory.buffers.nbytes for memory in self._memory.values()) + sum(
            tensor.nbytes for tensor in self._weights.values()
        )
        weights = _weight_bytes(step)

        def available() -> int:
            return (self._graphs.free_bytes() or 0) + held

        def needed(rows: int, longest: int, bucket: int) -> int:
            fitted = [(min(tokens, longest, bucket), min(length, longest)) for tokens, length in sizes]
            return int((weights + _bytes(step, rows, fitted)) * _SLACK) + _CONTEXT

        longest, bucket = max(max(size) for size in sizes), max(tokens for tokens, _ in sizes)
        total = needed(batch, longest, bucket)
        if total <= available():
            return
        self._graphs.give_back()  # sessions that are gone hold their weights until their cycles are collected
        room = available()
        if total <= room:
            return
        rows = largest_that_fits(1, batch, lambda count: needed(count, longest, bucket) <= room)
        length = largest_that_fits(1, longest, lambda count: needed(batch, count, bucket) <= room)
        tokens = largest_that_fits(1, bucket, lambda count: needed(batch, longest, count) <= room)
        fits = [f"batch_size={rows} with this max_length"] * bool(rows)
        fits += [f"max_length={length} with this batch_size"] * bool(length)
        fits += [f"prefill_buckets=[{tokens}] with both"] * bool(tokens)
        spec = step.cache_spec
        cache = sum(spec.nbytes(batch, slots) for slots in {slots for _, slots in sizes})
        raise DoesNotFitError(
            f"batch_size={batch} and max_length={longest} need {total / 1e9:.3g} GB on {self.description}: weights "
            f"{weights / 1e9:.3g}, cache {cache / 1e9:.3g}, the rest for what steps compute in between; "
            f"{room / 1e9:.3g} GB are free. "
            + (f"What would fit: {', or '.join(fits)}" if fits else "Not even one row of one token fits")
        )


def exported(step: Step, shape: StepShape) -> ExportedProgram:
    """The step at one size as a graph of torch's own, which has no code of Python left."""
    try:
        with torch.no_grad(), _gathered_experts(step.model):
            program = torch.export.export(step, step.example_inputs(shape), strict=False)
    except Exception as error:  # of export, which raises anything
        raise CompileError(f"torch cannot export the step {shape} in {step.dtype}: {error}") from error
    program._example_inputs = None  # a cache on the CPU, which would be moved as well
    return program


def on_device(program: ExportedProgram, device: torch.device, weights: dict[str, torch.Tensor]) -> Any:
    """An exported step, to be called, with copies of its tensors on a device; ``weights`` are those that are there already."""
    for name, tensor in program.state_dict.items():
        place = f"{tensor.data_ptr()} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"  # tied ones move once
        if place not in weights:
            weights[place] = tensor.detach().to(device, copy=True)
        program.state_dict[name] = torch.nn.Parameter(weights[place], requires_grad=False)
    for name, constant in program.constants.items():
        if isinstance(constant, torch.Tensor):
            program.constants[name] = constant.to(device, copy=True)
    moved: Any = move_to_device_pass(program, str(device))
    takes_guards = "check_guards" in inspect.signature(moved.module).parameters
    return moved.module(**({"check_guards": False} if takes_guards else {}))


def _new_inputs(shape: StepShape, device: torch.device) -> list[torch.Tensor]:
    """Token ids, positions and first positions of a step."""
    return [torch.zeros(shape.batch, shape.tokens, dtype=torch.int64, device=device) for _ in range(3)]


def _rewritten(module: _Compiled) -> _Compiled:
    """What inductor makes of a module when it is first called."""
    return torch.compile(module, fullgraph=True, dynamic=False, options=INDUCTOR)


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
    return dict(given)


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
def _no_collection() -> Iterator[None]:
    """Collect no garbage: what is collected may be another graph, and to destroy one breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _own_settings() -> Iterator[None]:
    """Record the step in its own dtype, with float32 products that are not rounded to TF32, whatever the caller has set."""
    products: Any = torch.backends.cuda.matmul
    change: Callable[[str], None] = torch.set_float32_matmul_precision
    try:
        before, exact = torch.get_float32_matmul_precision(), "highest"
    except RuntimeError:  # the caller has used torch's newer names, after which it does not tell by the older
        before, exact, change = products.fp32_precision, "ieee", partial(setattr, products, "fp32_precision")
    change(exact)
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        change(before)
