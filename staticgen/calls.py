"""The rows of one call as they grow: which run on, what they are fed next, and how each ended."""

from __future__ import annotations

import time

import torch

from staticgen.decoding import Decoding, Sampler
from staticgen.prompts import Prompts
from staticgen.shapes import EMPTY
from staticgen.stats import CallStats


class Call:
    """State of one call between its steps. Rows after the prompts are padding, up to ``batch_size``.

    Attributes:
        stats: what is told of the call.
        token_ids, position_ids: int64 [batch_size, 1], inputs of the next decode step.
        finished: no further step is wanted.
    """

    def __init__(self, prompts: Prompts, settings: Decoding, batch_size: int, new_tokens: int):
        rows = prompts.batch
        self.stats = CallStats(
            prompt_tokens=sum(len(row) for row in prompts.rows), new_tokens=[0] * rows, finish_reasons=[""] * rows
        )
        self.finished = False
        self.token_ids = torch.zeros(batch_size, 1, dtype=torch.int64, device="cpu")
        self.position_ids = torch.full_like(self.token_ids, EMPTY)
        lengths = [len(row) for row in prompts.rows]
        self.position_ids[:rows, 0] = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        self._rows, self._left = rows, new_tokens
        self._sampler = Sampler(settings, prompts.rows)
        self._fill = settings.fill_token_id
        self._eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device="cpu")
        self._running = torch.ones(rows, dtype=torch.bool, device="cpu")
        self._begin = time.perf_counter()

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int64 [B], from the step's logits [batch_size, V]; a fresh tensor."""
        tokens = torch.where(self._running, self._sampler(logits[: self._rows]), self._fill)
        ended = self._running & torch.isin(tokens, self._eos)
        self._left -= 1
        for row in self._running.nonzero()[:, 0].tolist():
            self.stats.new_tokens[row] += 1
            if ended[row]:
                self.stats.finish_reasons[row] = "eos"
            elif self._left == 0:
                self.stats.finish_reasons[row] = "length"
        self._running = self._running & ~ended
        self.finished = self._left == 0 or not bool(self._running.any())
        self.token_ids[: self._rows, 0] = torch.where(self._running, tokens, 0)
        self.position_ids[: self._rows, 0][~self._running] = EMPTY  # an ended row goes on as padding
        if self.stats.first_token_seconds == 0:
            self.stats.first_token_seconds = time.perf_counter() - self._begin
        return tokens

    def advance(self, seconds: float) -> None:
        """Count a decode step that took ``seconds``, and move every running row on by one position."""
        self.stats.steps += 1
        self.stats.decode_seconds += seconds
        self.position_ids[: self._rows, 0][self._running] += 1
