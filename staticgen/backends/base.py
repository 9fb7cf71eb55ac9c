"""What a backend is: something that turns a step of one size into a program that can be replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from staticgen.cache import KVBuffers, KVCache, KVMemory
from staticgen.device_loop import LoopState
from staticgen.errors import BackendUnavailableError
from staticgen.facts import StepFacts
from staticgen.shapes import StepForm, StepShape

if TYPE_CHECKING:
    from pathlib import Path

    from staticgen.step import Step


@dataclass(frozen=True)
class ProgramFiles:
    """A step of one size on disk.

    Attributes:
        name: for people, and for the names of its files.
        shape: its size.
        paths: the files that it is loaded from, by what they are to the backend.
        compiled: what a compiler made of them for one device, and for which: :attr:`Backend.made_for`.
    """

    name: str
    shape: StepShape
    paths: Mapping[str, Path]
    compiled: tuple[tuple[Path, Mapping[str, Any]], ...] = ()


class Program(ABC):
    """A step of one fixed size, ready to replay.

    What a call returns belongs to the program and is overwritten by its next call.
    """

    def __init__(self, shape: StepShape):
        self.shape = shape

    def __call__(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        first_positions: torch.Tensor,
        cache: KVCache,
    ) -> tuple[torch.Tensor, KVBuffers]:
        """Run the step once.

        Args:
            token_ids: int64 [B, T].
            position_ids: int64 [B, T], -1 where a token is padding.
            first_positions: int64 [B, T], the first position that each token may see.
            cache: with B rows and L slots; read, not written.

        Returns:
            logits float32 [B, V] of the last token; keys and values of the T tokens.

        Raises:
            ValueError: an input has not the size or dtype that the program was compiled for.
        """
        expected = (self.shape.batch, self.shape.tokens)
        inputs = {"token_ids": token_ids, "position_ids": position_ids, "first_positions": first_positions}
        for name, tensor in inputs.items():
            if tuple(tensor.shape) != expected or tensor.dtype != torch.int64:
                raise ValueError(
                    f"{name}: this program replays int64 {list(expected)}, got {tensor.dtype} {list(tensor.shape)}"
                )
        slots, held = (self.shape.batch, self.shape.cache_length), (cache.buffers.batch, cache.length)
        if held != slots:
            raise ValueError(f"cache: this program replays {list(slots)} slots, got {list(held)}")
        return self._run((token_ids, position_ids, first_positions), cache)

    @abstractmethod
    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]: ...

    def advance(self, sampled: bool) -> None:
        """Make one token of every row where the cache is: :func:`staticgen.device_loop.advance`.

        For programs of one token, of a backend that is ``resident``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loop of its own")


class Backend(ABC):
    """One kind of target, opened on one device.

    Args:
        device: the backend's own name for a device; None takes its default.
        options: compiler options by the vendor's names; None for none.

    Attributes:
        device: the device in use.
        form: how the step's attention is written for it.
        prefill_buckets: sizes of prefill steps, ascending.
        cache_sizes: cache lengths at which decode is compiled besides the session's own, ascending.
        emulated: the device named is stood in for by another one.
        keeps_blobs: what its compiler makes is worth keeping, by :meth:`compile_converted`.
        resident: the cache and the decode loop can stay on the device: :meth:`memory` and :meth:`loop_state` are there,
            and its programs of one token can :meth:`Program.advance`.
    """

    name: ClassVar[str]
    emulated: bool = False
    keeps_blobs: bool = False
    resident: bool = False

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        self.device = device or "cpu"
        self.form = StepForm()
        self.prefill_buckets: tuple[int, ...] = (16, 128)
        self.cache_sizes: tuple[int, ...] = ()

    @property
    def description(self) -> str:
        """Backend and device in words, for people."""
        return f"{self.name} on {self.device}"

    @abstractmethod
    def compile(self, step: Step, shape: StepShape) -> Program:
        """Compile ``step`` for one size; may take seconds to minutes."""

    def reserve(self, step: StepFacts, batch: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Be told, before anything is allocated, which programs (tokens, cache length) a session is going to have.

        Raises:
            DoesNotFitError: the device has not the memory for it; the message says what would fit.
        """
        return None

    def memory(self, step: StepFacts, batch: int, length: int) -> KVMemory | None:
        """The memory of a cache that programs of this size are bound to; None where they take any cache on the CPU."""
        return None

    def loop_state(self, step: StepFacts, batch: int) -> LoopState:
        """The state that programs of this batch :meth:`Program.advance`."""
        raise NotImplementedError(f"backend {self.name!r} has no loop of its own")

    def scope(self) -> AbstractContextManager[None]:
        """Inside, what a session does is done for this device, and in order."""
        return nullcontext()

    @property
    def made_for(self) -> dict[str, Any]:
        """What compiled code depends on besides the step: device, compiler, options; as JSON has it."""
        return {"backend": self.name, "device": self.device}

    @property
    def conversion(self) -> dict[str, Any] | None:
        """What :meth:`convert` depends on besides the step, as JSON has it; None where nothing is converted."""
        return None

    def convert(self, step: Step, folder: Path) -> None:
        """Write the step, with open sizes, as files that :meth:`read_converted` reads.

        Raises:
            CompileError: it cannot be converted.
        """
        raise BackendUnavailableError(f"backend {self.name!r} writes no files")

    def read_converted(self, folder: Path) -> Any:
        """What :meth:`convert` wrote, for :meth:`compile_converted`.

        Raises:
            CompileError: it cannot be read.
        """
        raise BackendUnavailableError(f"backend {self.name!r} cannot run programs from files")

    def compile_converted(self, step: Step, converted: Any, shape: StepShape, blob: Path | None = None) -> Program:
        """Compile what :meth:`read_converted` read for one size, and keep in ``blob`` what the compiler made of it.

        Raises:
            CompileError: as for :meth:`compile`.
        """
        raise BackendUnavailableError(f"backend {self.name!r} cannot run programs from files")

    def load_blob(self, step: Step, shape: StepShape, blob: Path) -> Program:
        """A program that :meth:`compile_converted` kept.

        Raises:
            CompileError: the device does not take it.
        """
        raise BackendUnavailableError(f"backend {self.name!r} cannot run programs from files")

    def must_compile(self, files: ProgramFiles) -> bool:
        """Whether :meth:`load` compiles this program, because nothing in its files is compiled for this device."""
        return True

    def require_fit(self, files: ProgramFiles) -> None:
        """Refuse, before anything is read, a program that :meth:`load` could only refuse: what it is made for is not here.

        Raises:
            BackendUnavailableError: the message says what it is made for, and what is here.
        """
        return None

    def load(self, step: StepFacts, files: ProgramFiles) -> Program:
        """Read a program that was written, and compile it for this device where that must be.

        Raises:
            CompileError: the files cannot be read or compiled here.
        """
        raise BackendUnavailableError(f"backend {self.name!r} cannot run programs from files")


def write_experts_plainly(step: Step) -> None:
    """Let experts multiply by operations that every compiler has: by default transformers takes a grouped one of its own."""
    config = step.model.config.get_text_config()
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        step.model.set_experts_implementation("batched_mm")


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of which each fills memory of its own, as a file of safetensors wants them; copies only of those that do not."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        alone = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in seen
        seen.add(memory.data_ptr())
        found[name] = (
            tensor if alone and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
        )
    return found
