"""The programs of a session: compiled once for each size, then only replayed."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
import torch

from staticgen.backends.base import Program
from staticgen.cache import KVBuffers, KVCache
from staticgen.errors import RecompileError
from staticgen.shapes import StepShape
from staticgen.sources import Source
from staticgen.stats import SessionStats


class Programs:
    """The step of a model at some sizes, for a batch."""

    def __init__(self, source: Source, stats: SessionStats):
        self.step, self.backend, self.batch = source.step, source.backend, source.batch_size
        self._source, self._stats = source, stats
        self._programs: dict[StepShape, Program | Future[Program]] = {}

    def prepare(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Get what is missing of these sizes, (tokens, cache length) each."""
        shapes = dict.fromkeys(StepShape(self.batch, tokens, cache_length) for tokens, cache_length in sizes)
        missing = [shape for shape in shapes if shape not in self._programs]
        self._programs.update(self._source.programs(missing, self._stats))

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
        program = self._programs[shape]
        if isinstance(program, Future):  # it is being read from a file
            program = self._programs[shape] = program.result()
        logits, new = program(token_ids, position_ids, first_positions, cache)
        self._stats.replays += 1
        if np.isnan(logits.numpy().max(axis=1)).any():  # in this thread, like the argmax of a Sampler
            raise ArithmeticError(
                f"the step {shape} gave NaN logits on {self.backend.description}; check that the model's "
                f"weights are finite, and its range in {self.step.dtype}"
            )
        return logits, new
