"""Backend ``eager``: the step run by torch itself on the CPU. Nothing is compiled; it is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from staticgen.backends.base import Backend, Program
from staticgen.cache import KVBuffers, KVCache
from staticgen.errors import UnknownNameError
from staticgen.shapes import StepShape

if TYPE_CHECKING:
    from staticgen.step import Step


class EagerProgram(Program):
    """The step itself, with its new keys and values copied to a buffer."""

    def __init__(self, step: Step, shape: StepShape):
        super().__init__(shape)
        self._step = step
        self._new = KVBuffers(step.cache_spec, shape.batch, shape.tokens)

    @torch.no_grad()
    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        logits, *new = self._step(*inputs, *cache.slot_positions, *cache.buffers.keys, *cache.buffers.values)
        for buffer, tensor in zip((*self._new.keys, *self._new.values), new, strict=True):
            buffer.copy_(tensor)
        return logits, self._new


class EagerBackend(Backend):
    """``device`` is ``cpu``; there are no options."""

    name = "eager"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        super().__init__(device.lower() if device else None, options)
        if self.device != "cpu":
            raise UnknownNameError(f"backend 'eager' runs on device 'cpu' only, got device={device!r}")
        if options:
            raise ValueError(f"backend 'eager' takes no backend_options, got {dict(options)}")

    def compile(self, step: Step, shape: StepShape) -> Program:
        return EagerProgram(step, shape)
