"""Functions that a device runs from a file: their inputs and outputs by name, and what holds them on disk.

A function takes tensors of fixed sizes and returns tensors of fixed sizes; it has no state. Where an output takes the
memory of an input, that input is gone after the call. The program of a function is StableHLO, in the portable form
that its releases keep readable; its parameters are the function's inputs in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Inputs of this name are weights, the same for every call; the rest is the weight's own name.
WEIGHT = "weights."
# What may cross the border of a function: no device has to emulate it.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool)
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """That of a tensor, on any device."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Its bytes, without padding."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Function:
    """What a program takes and gives.

    Attributes:
        name: what it does; see :mod:`staticgen.device_functions`.
        inputs: by name, in the order of the program's parameters; those that begin with :data:`WEIGHT` are weights.
        outputs: by name, in the order of the program's results.
        aliases: by the name of an output, the input whose memory it takes; both have one shape and dtype.
    """

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def donated(self) -> tuple[int, ...]:
        """Places of the inputs that are gone after a call, ascending."""
        gone = set(self.aliases.values())
        return tuple(place for place, name in enumerate(self.inputs) if name in gone)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "name": self.name,
            "inputs": [_to_list(name, spec) for name, spec in self.inputs.items()],
            "outputs": [_to_list(name, spec) for name, spec in self.outputs.items()],
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Function:
        """Read what :meth:`to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        inputs, outputs = (dict(map(_from_list, table[name])) for name in ("inputs", "outputs"))
        aliases = dict(table["aliases"])
        for output, given in aliases.items():
            if outputs[output] != inputs[given]:
                raise ValueError(f"output {output!r} takes the memory of input {given!r}, and is no tensor of its kind")
        if len(set(aliases.values())) != len(aliases):
            raise ValueError("two outputs take the memory of one input")
        return cls(str(table["name"]), inputs, outputs, aliases)


@dataclass(frozen=True)
class Lowered:
    """A function and its program.

    Attributes:
        function: inputs and outputs.
        stablehlo: the program as a portable StableHLO artifact.
        hlo: the same as a serialised HLO module, for runtimes that take nothing else; empty where it was not kept.
    """

    function: Function
    stablehlo: bytes
    hlo: bytes = b""


def _to_list(name: str, spec: TensorSpec) -> list[Any]:
    return [name, list(spec.shape), str(spec.dtype).removeprefix("torch.")]


def _from_list(entry: Any) -> tuple[str, TensorSpec]:
    name, shape, dtype = entry
    if type(name) is not str or not all(type(size) is int and size >= 0 for size in shape):
        raise TypeError(f"{entry!r} is no name, shape and dtype")
    return name, TensorSpec(tuple(shape), DTYPES[dtype])
