"""What runs functions on a device: keeps tensors there, and calls programs on them without waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from staticgen.functions import Function, Lowered

Buffer = Any  # a tensor on the device, as the engine's library has it


class Executable(ABC):
    """A function that is compiled."""

    def __init__(self, function: Function):
        self.function = function

    @abstractmethod
    def __call__(self, inputs: Sequence[Buffer]) -> list[Buffer]:
        """Start a call, and give its outputs, which may be passed on at once.

        Inputs whose memory an output takes are gone; see :attr:`staticgen.functions.Function.aliases`.
        """


class Engine(ABC):
    """A device and the library that drives it.

    Attributes:
        name: of the device, for people.
        compiles: programs compiled so far, or read compiled from a cache of the library's own.
    """

    name: str
    compiles: int = 0

    @abstractmethod
    def upload(self, tensor: torch.Tensor, name: str = "") -> Buffer:
        """A tensor of the CPU as a buffer; what becomes of the tensor afterwards does not matter.

        Args:
            tensor: of a dtype in :data:`staticgen.functions.DTYPES`.
            name: of the input that it is for; an engine of several devices divides it by that.
        """

    @abstractmethod
    def download(self, buffer: Buffer) -> torch.Tensor:
        """A copy of a buffer on the CPU; waits for what computes it."""

    @abstractmethod
    def load(self, lowered: Lowered) -> Executable:
        """Compile a program.

        Raises:
            CompileError: the device's compiler refuses it.
        """


class NullEngine(Engine):
    """Runs the functions themselves on the CPU, for tests: inputs that a device would have taken are filled with rubbish."""

    name = "null"

    def upload(self, tensor: torch.Tensor, name: str = "") -> Buffer:
        return tensor.clone()

    def download(self, buffer: Buffer) -> torch.Tensor:
        return buffer.clone()

    def load(self, lowered: Lowered) -> Executable:
        raise NotImplementedError("device 'null' has no compiler")

    def take(self, function: Function, call: Callable[..., Sequence[torch.Tensor]]) -> Executable:
        """The executable of a function of torch."""
        self.compiles += 1
        return _NullExecutable(function, call)


class _NullExecutable(Executable):
    def __init__(self, function: Function, call: Callable[..., Sequence[torch.Tensor]]):
        super().__init__(function)
        self._call = call

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Buffer]) -> list[Buffer]:
        given = [
            tensor if name.startswith("weights.") else tensor.clone()
            for name, tensor in zip(self.function.inputs, inputs, strict=True)
        ]
        for (name, spec), tensor in zip(self.function.inputs.items(), inputs, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec}")
        outputs = [tensor.clone() for tensor in self._call(*given)]
        for (name, spec), tensor in zip(self.function.outputs.items(), outputs, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec}")
        for place in self.function.donated:
            spoil(inputs[place])
        return outputs


def spoil(tensor: torch.Tensor) -> None:
    """Fill a tensor with what nobody would take for a result."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
