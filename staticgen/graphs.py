"""Work on fixed buffers, recorded once and replayed: CUDA graphs, and on the CPU what stands for them in tests."""

from __future__ import annotations

import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import TensorWeakRef

from staticgen.device_loop import fetch_now

_WARM_UPS = 2
_ROUNDS, _REPLAYS = 10, 8  # of a measurement


class Graph(ABC):
    """Recorded work. What it reads and writes are the tensors that it was recorded with.

    Args:
        work: what was recorded. It is not called again, and holds those tensors: a CUDA graph knows only where they are.
        inputs: tensors that every replay is given.
    """

    def __init__(self, work: Callable[[], None], inputs: Sequence[torch.Tensor]):
        self._work, self._inputs = work, inputs

    def replay(self, *given: torch.Tensor) -> None:
        """Copy ``given``, from any device, to the inputs, and run."""
        for own, tensor in zip(self._inputs, given, strict=True):
            own.copy_(tensor)
        self.run()

    @abstractmethod
    def run(self) -> None:
        """Run on what is in the inputs."""


class Graphs(ABC):
    """Records graphs for one device. They share their memory for what is in between, and never run at once.

    Attributes:
        device: where all tensors of the work are.
    """

    device: torch.device

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Inside, work is for this device, and in order."""
        yield

    def record(
        self,
        work: Callable[[], None],
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
    ) -> Graph:
        """Warm ``work`` up and record it.

        Args:
            work: returns nothing; writes its results to buffers that were there before. It asks no tensor for its
                numbers, and makes none from numbers of the host. It runs a few times here.
            inputs: buffers that it reads and every replay is given; nothing else holds them.
            outputs: buffers that every replay writes in full. What is to outlive the next replay is copied.
        """
        with self.scope(), torch.no_grad():
            for _ in range(_WARM_UPS):
                work()
            return self._record(work, inputs, outputs)

    @abstractmethod
    def _record(
        self, work: Callable[[], None], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Graph: ...

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        """What a replay of each takes, one after the other as in the loop: the best of some rounds, taken in turns."""
        best = [math.inf] * len(graphs)
        with self.scope():
            for _ in range(_ROUNDS):
                for place, graph in enumerate(graphs):
                    self.synchronise()
                    start = time.perf_counter()
                    for _ in range(_REPLAYS):
                        graph.run()
                    self.synchronise()
                    best[place] = min(best[place], (time.perf_counter() - start) / _REPLAYS)
        return best

    def synchronise(self) -> None:
        """Wait for all work that was started."""
        return None

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a copy of a tensor to the CPU, of what it is after the work before; gives what waits for it."""
        return fetch_now(tensor)

    def give_back(self) -> None:
        """Free what nobody holds any more, as far as it is known only later."""
        gc.collect()

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Memory of the device that is free; None where nothing is known of it."""

    def prepare_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new buffer whose numbers nobody may see before they are written."""
        return tensor


class NullGraphs(Graphs):
    """Records and replays on the CPU, operation by operation, and is stricter than a GPU, so that errors show here.

    Numbers of Python are those of the recording, as in a CUDA graph, and a tensor that nobody else holds is gone. Before
    a replay its outputs are spoilt, and afterwards its inputs; new buffers are full of large numbers. What a capture on
    a GPU would refuse, or take in as a copy from the host, raises a RuntimeError.

    Args:
        free: what :meth:`free_bytes` says.
    """

    def __init__(self, free: int | None = None):
        self.device, self._free = torch.device("cpu"), free

    def _record(
        self, work: Callable[[], None], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Graph:
        # In inference mode some operations would hide those that they are made of.
        with torch.inference_mode(False), torch.no_grad(), _NoLists(), _Recorder() as recorder:
            if work() is not None:  # type: ignore[func-returns-value]
                raise RuntimeError(
                    "work that is recorded must return nothing: what it returns, the next replay overwrites"
                )
        spoil(inputs)
        spoil(outputs)
        return _NullGraph(work, recorder.calls, inputs, outputs)

    def free_bytes(self) -> int | None:
        return self._free

    def prepare_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(1e4)


def spoil(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite with what no model gives: NaN, and numbers that are no token, position or slot."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else True if tensor.dtype == torch.bool else -(2**62))


class _NullGraph(Graph):
    def __init__(
        self,
        work: Callable[[], None],
        calls: Sequence[_Call],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ):
        super().__init__(work, inputs)
        self._calls, self._outputs = calls, outputs

    @torch.no_grad()
    def run(self) -> None:
        spoil(self._outputs)
        made: list[list[Any]] = []

        def value(part: Any) -> Any:
            if isinstance(part, _Made):
                return made[part.call][part.place]
            if isinstance(part, TensorWeakRef):
                tensor = part()
                if tensor is None:
                    raise RuntimeError("what was recorded reads a tensor that is gone: nobody has held it since")
                return tensor
            return [value(each) for each in part] if isinstance(part, list) else part

        for call in self._calls:
            args, kwargs = call.arguments
            result = call.function(*map(value, args), **{name: value(part) for name, part in kwargs.items()})
            made.append(list(result) if isinstance(result, tuple | list) else [result])
        spoil(self._inputs)


class _Made:
    """The result of an earlier operation."""

    def __init__(self, call: int, place: int):
        self.call, self.place = call, place


class _Call:
    """An operation and its arguments, of which some are results of earlier ones."""

    def __init__(self, function: Any, arguments: Any):
        self.function, self.arguments = function, arguments


class _Recorder(TorchDispatchMode):
    """Runs operations and keeps which they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._made: dict[int, _Made] = {}
        self._alive: list[Any] = []  # so that no id is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(func, args, kwargs or {})
        leaves, form = tree_flatten((args, kwargs or {}))
        kept = [self._kept(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        result = func(*args, **(kwargs or {}))
        results = tree_flatten(result)[0]
        self.calls.append(_Call(func, tree_unflatten(kept, form)))
        self._alive.append(results)
        for place, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor):
                self._made[id(tensor)] = _Made(len(self.calls) - 1, place)
        return result

    def _kept(self, tensor: torch.Tensor) -> _Made | TensorWeakRef:
        return self._made.get(id(tensor)) or TensorWeakRef(tensor)


class _NoLists(TorchFunctionMode):
    """Refuses what reads a tensor of the CPU without an operation, and would be one on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            raise RuntimeError(f"{name}: the host cannot ask for numbers while work is recorded")
        return func(*args, **(kwargs or {}))


def _refuse(func: Any, args: Any, kwargs: Any) -> None:
    name = func.overloadpacket.__name__
    if name in _READ_BY_THE_HOST:
        raise RuntimeError(f"{name}: the host cannot ask for numbers while work is recorded")
    if func.namespace not in ("aten", "prims"):
        raise RuntimeError(f"{func}: what a library's own operation does cannot be seen, so that it is not recorded")
    if name == "lift_fresh":
        raise RuntimeError("a tensor is made from numbers of the host while work is recorded; make it before")
    masks = name in _INDEXES and any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    if masks and not (name != "index" and args[2].numel() == 1):  # one number for all that a mask chooses fills them
        raise RuntimeError(f"{name}: a mask chooses a number of elements that is not known while work is recorded")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        raise RuntimeError("repeat_interleave: without output_size the host asks for numbers while work is recorded")


_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_READ_BY_THE_HOST = {
    "_local_scalar_dense", "nonzero", "equal", "allclose", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "unique_dim_consecutive", "bincount",
}  # fmt: skip
