"""The rows of one call as they grow: which run on, what they are fed next, and how each ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from staticgen.constraints import read_token_mask
from staticgen.decoding import Decoding
from staticgen.prompts import Prompts
from staticgen.sampling import Sampler, row_processors, warpers
from staticgen.shapes import EMPTY
from staticgen.stats import CallStats

# Arguments of a call that are objects and no settings.
HOOKS = ("logits_processor", "stopping_criteria", "streamer", "tokenizer", "token_mask")


@dataclass(frozen=True)
class Hooks:
    """A caller's own objects that take part in a call.

    Attributes:
        logits_processor: called once a step with the history int64 [B, t] (left-padded prompts, then exactly the
            generated tokens) and the scores float32 [B, V]; both are fresh, and may be kept.
        stopping_criteria: called once a step with the history that now ends in the new tokens, and the scores; rows
            for which one says True have ended.
        streamer: is put the prompts, then the tokens of each step.
        token_mask: what may come next; see :func:`staticgen.constraints.read_token_mask`.
    """

    logits_processor: Sequence[LogitsProcessor] = ()
    stopping_criteria: Sequence[StoppingCriteria] = ()
    streamer: Any = None
    token_mask: Any = None


def read_hooks(settings: Decoding, prompts: Prompts, arguments: dict[str, Any]) -> Hooks:
    """Take a caller's objects out of ``arguments``, and check them.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    processors = _listed("logits_processor", arguments.pop("logits_processor", None))
    criteria = _listed("stopping_criteria", arguments.pop("stopping_criteria", None))
    streamer, tokenizer = arguments.pop("streamer", None), arguments.pop("tokenizer", None)
    require_streamer(streamer)
    if settings.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings needs the model's tokenizer: pass tokenizer=")
        criteria = [*criteria, StopStringCriteria(tokenizer, list(settings.stop_strings))]
    if settings.max_time is not None:
        criteria = [*criteria, MaxTimeCriteria(float(settings.max_time))]
    try:  # transformers checks some settings only when it makes processors of them
        row_processors(settings, len(prompts.rows[0]), 1)
        warpers(settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"decoding settings: {error}") from error
    return Hooks(processors, criteria, streamer, arguments.pop("token_mask", None))


def require_streamer(streamer: Any) -> None:
    """Refuse what is neither None nor like transformers' streamers; a TypeError names it."""
    if streamer is not None and not (callable(getattr(streamer, "put", None)) and hasattr(streamer, "end")):
        raise TypeError(
            f"streamer is a {type(streamer).__name__}, expected one with put() and end() like transformers'"
        )


def as_list(given: Any) -> list[Any]:
    """A caller's processors or criteria, which may be one, several or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _listed(name: str, given: Any) -> list[Any]:
    items = as_list(given)
    for item in items:
        if not callable(item):
            raise TypeError(
                f"{name} has a {type(item).__name__}, expected objects that can be called like transformers'"
            )
    return items


class Call:
    """State of one call between its steps. Rows after the prompts are padding, up to ``batch_size``.

    Args:
        sizes: the model's vocabulary, and numbers per row of logits; for a ``token_mask``.
        counted: see :class:`staticgen.sampling.Sampler`.

    Attributes:
        stats: what is told of the call.
        token_ids, position_ids: int64 [batch_size, 1], inputs of the next decode step.
        finished: no further step is wanted.
        scores, logits: float32 [B, V] of each step so far, where the settings ask for them.
    """

    def __init__(
        self,
        prompts: Prompts,
        settings: Decoding,
        batch_size: int,
        new_tokens: int,
        hooks: Hooks = Hooks(),
        sizes: tuple[int, int] = (0, 0),
        counted: bool = False,
    ):
        rows = prompts.batch
        processors, self._constraint = list(hooks.logits_processor), None
        if hooks.token_mask is not None:
            self._constraint = read_token_mask(
                hooks.token_mask,
                vocab_size=sizes[0],
                logits_size=sizes[1],
                prompt_width=prompts.width,
                batch=rows,
                eos_token_ids=settings.eos_token_ids,
            )
            processors.append(self._constraint)
        self.stats = CallStats(
            prompt_tokens=sum(len(row) for row in prompts.rows), new_tokens=[0] * rows, finish_reasons=[""] * rows
        )
        self.finished = False
        self.token_ids = torch.zeros(batch_size, 1, dtype=torch.int64, device="cpu")
        self.position_ids = torch.full_like(self.token_ids, EMPTY)
        lengths = [len(row) for row in prompts.rows]
        self.position_ids[:rows, 0] = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        self.scores: list[torch.Tensor] | None = [] if settings.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if settings.output_logits else None
        self._rows, self._left, self._hooks = rows, new_tokens, hooks
        self.settings, self.sampler = settings, Sampler(settings, prompts.rows, new_tokens, processors, counted)
        self._fill = settings.fill_token_id
        self._eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device="cpu")
        self._running = torch.ones(rows, dtype=torch.bool, device="cpu")
        self._padded: torch.Tensor | None = None
        if processors or hooks.stopping_criteria:
            self._padded = prompts.ids.where(prompts.mask, torch.tensor(self._fill, device="cpu"))
        self._ids, self._began = prompts.ids, time.perf_counter()

    def begin(self) -> None:
        """The call runs from now on."""
        self._began = time.perf_counter()
        if self._hooks.streamer is not None:
            self._hooks.streamer.put(self._ids)

    def hand_to_streamer(self, tokens: torch.Tensor) -> None:
        """Show the step's tokens to the caller's streamer."""
        if self._hooks.streamer is not None:
            self._hooks.streamer.put(tokens)

    def end_streamer(self) -> None:
        """Tell the caller's streamer that no more tokens come."""
        if self._hooks.streamer is not None:
            self._hooks.streamer.end()

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int64 [B], from the step's logits [batch_size, V]; a fresh tensor."""
        logits = logits[: self._rows]
        if self._constraint is not None:  # which asks nothing of rows that have ended
            self._constraint.running = self._running
        scores = self.sampler.process(logits, self._padded)
        tokens = torch.where(self._running, self.sampler.choose(scores), self._fill)
        if self.logits is not None:
            self.logits.append(logits.clone())
        if self.scores is not None:
            self.scores.append(scores.clone())
        self.accept(tokens, scores)
        return tokens

    @property
    def left(self) -> int:
        """Tokens that each row may still get."""
        return self._left

    def accept(self, tokens: torch.Tensor, scores: torch.Tensor | None = None) -> None:
        """Tokens int64 [B] have been chosen; the scores are for a caller's criteria, where there are any."""
        ended = self._running & torch.isin(tokens, self._eos)
        stopped = self._stopped(tokens, scores) & self._running & ~ended
        self._left -= 1
        for row in self._running.nonzero()[:, 0].tolist():
            self.stats.new_tokens[row] += 1
            if ended[row]:
                self.stats.finish_reasons[row] = "eos"
            elif stopped[row]:
                self.stats.finish_reasons[row] = "stop"
            elif self._left == 0:
                self.stats.finish_reasons[row] = "length"
        self._running = self._running & ~ended & ~stopped
        self.finished = self._left == 0 or not bool(self._running.any())
        self.token_ids[: self._rows, 0] = torch.where(self._running, tokens, 0)
        self.position_ids[: self._rows, 0][~self._running] = EMPTY  # an ended row goes on as padding
        if self.stats.first_token_seconds == 0:
            self.stats.first_token_seconds = time.perf_counter() - self._began

    def _stopped(self, tokens: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        """bool [B]: rows that a criterion ends."""
        stopped = torch.zeros_like(self._running)
        if self._padded is None:
            return stopped
        self._padded = torch.cat([self._padded, tokens[:, None]], dim=1)
        for criterion in self._hooks.stopping_criteria:
            said = criterion(self._padded, scores)
            stopped = stopped | torch.as_tensor(said, dtype=torch.bool, device="cpu")
        return stopped

    def advance(self, seconds: float) -> None:
        """Count a decode step that took ``seconds``, and move every running row on by one position."""
        self.stats.steps += 1
        self.stats.decode_seconds += seconds
        self.position_ids[: self._rows, 0][self._running] += 1
