"""What runs functions on a device: keeps tensors there, and calls programs on them without waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from staticgen.device_functions import Draft, Tensors
from staticgen.errors import CompileError
from staticgen.functions import Function, Lowered, TensorSpec

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
    """Runs the functions themselves on the CPU, for tests: inputs that a device would have taken are spoilt."""

    name = "null"

    def upload(self, tensor: torch.Tensor, name: str = "") -> Buffer:
        return tensor.clone()

    def download(self, buffer: Buffer) -> torch.Tensor:
        return buffer.clone()

    def load(self, lowered: Lowered) -> Executable:
        raise CompileError("device 'null' runs no compiled programs")

    @torch.no_grad()
    def take(self, draft: Draft) -> Executable:
        """The executable of a function, which runs once to see what it gives."""
        self.compiles += 1
        zeros = {name: torch.zeros(spec.shape, dtype=spec.dtype, device="cpu") for name, spec in draft.inputs.items()}
        outputs = {name: TensorSpec.of(tensor) for name, tensor in draft.call(zeros).items()}
        function = Function(draft.name, draft.inputs, outputs, {name: name for name in draft.kept})
        return _NullExecutable(Function.from_dict(function.to_dict()), draft.call)


class _NullExecutable(Executable):
    def __init__(self, function: Function, call: Callable[[Tensors], Tensors]):
        super().__init__(function)
        self._call = call

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Buffer]) -> list[Buffer]:
        given = {}
        for (name, spec), tensor in zip(self.function.inputs.items(), inputs, strict=True):
            if TensorSpec.of(tensor) != spec:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec}")
            given[name] = tensor.clone()
        outputs = self._call(given)
        if list(outputs) != list(self.function.outputs):
            raise ValueError(f"{self.function.name} gives {list(outputs)}, expected {list(self.function.outputs)}")
        for name, tensor in outputs.items():
            if TensorSpec.of(tensor) != self.function.outputs[name]:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {self.function.outputs[name]}"
                )
        results = [tensor.clone() for tensor in outputs.values()]
        for place in self.function.donated:
            _spoil(inputs[place])
        return results


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
