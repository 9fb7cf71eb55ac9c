"""The programs of a session: compiled once for each size, then only replayed."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch

from staticgen.backends.base import Backend, Program
from staticgen.cache import KVBuffers, KVCache
from staticgen.errors import RecompileError
from staticgen.shapes import StepShape
from staticgen.stats import SessionStats
from staticgen.step import Step


class Programs:
    """The step of a model, compiled by a backend for some sizes."""

    def __init__(self, step: Step, backend: Backend, batch: int, stats: SessionStats):
        self.step, self.backend, self.batch = step, backend, batch
        self._stats = stats
        self._programs: dict[StepShape, Program] = {}

    def prepare(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Compile what is missing of these sizes, (tokens, cache length) each."""
        for tokens, cache_length in sizes:
            shape = StepShape(self.batch, tokens, cache_length)
            if shape not in self._programs:
                start = time.perf_counter()
                self._programs[shape] = self.backend.compile(self.step, shape)
                self._stats.compiles += 1
                self._stats.compile_seconds += time.perf_counter() - start

    def run(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, first_positions: torch.Tensor, cache: KVCache
    ) -> tuple[torch.Tensor, KVBuffers]:
        """Replay the program of this size: logits float32 [B, V], keys and values of the T tokens.

        Raises:
            RecompileError: there is no program of this size.
            ArithmeticError: logits are NaN.
        """
        shape = StepShape(self.batch, token_ids.shape[1], cache.length)
        if shape not in self._programs:
            sizes = ", ".join(map(str, self._programs))
            raise RecompileError(
                f"the step {shape} is not among those compiled: {sizes}; nothing compiles after warm-up"
            )
        logits, new = self._programs[shape](token_ids, position_ids, first_positions, cache)
        self._stats.replays += 1
        if np.isnan(logits.numpy().max(axis=1)).any():  # in this thread, like the argmax of a Sampler
            raise ArithmeticError(
                f"the step {shape} gave NaN logits on {self.backend.description}; check that the model's "
                f"weights are finite, and its range in {self.step.dtype}"
            )
        return logits, new
