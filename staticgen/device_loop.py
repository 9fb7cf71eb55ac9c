"""The decode loop where the model is: one call of :func:`advance` makes one token of every row, with no work of the host.

The state of the loop is a few small tensors of fixed size on the device. A backend records ``advance`` once for each
cache length and replays it; the host looks at the tokens every few steps and drops what was made after a row's end.
The functions here are torch only, ask no tensor for its numbers and work on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from staticgen.cache import KVMemory
from staticgen.shapes import EMPTY

LOOK_EVERY = 8  # tokens between two looks of the host; so many are made in vain at most
MOST_EOS = 16  # ids that can end a row in the loop
BROKEN = -2  # stands for the token of a row whose logits are NaN
NO_LIMIT = 2**30  # more than any position or vocabulary, and what 32 bits hold

# The constants of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
_GOLDEN, _FIRST, _SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class LoopState:
    """What the loop knows between two steps, on the device.

    Attributes:
        token_ids, position_ids: int64 [B, 1], inputs of the next step; position -1 in rows that have ended.
        finished: bool [B].
        generated: int64 [n, B], the tokens of the newest steps; step i goes to row i modulo n.
        column: int64 [1], the row that the next tokens go to.
        slots: int64 [1] for each window of the cache, the slot that the next token takes.
        window: int64 [1], how many positions a token sees, its own included.
        eos: int64 [:data:`MOST_EOS`], -1 where there is none.
        fill: int64 [1], what stands after the end of a row.
        temperature, top_p, min_p: float32 [1]. top_k: int64 [1].
        seed, drawn: int64 [1], of the random numbers: where they begin, and how many each row has had.

    Args:
        fetch: starts a copy of a tensor to the CPU, and gives what waits for it; by default it is there at once.
    """

    def __init__(
        self,
        batch: int,
        windows: Sequence[int | None],
        device: torch.device,
        fetch: Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None = None,
    ):
        self._fetch = fetch_now if fetch is None else fetch

        def whole(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        def real() -> torch.Tensor:
            return torch.ones(1, dtype=torch.float32, device=device)

        self.token_ids, self.position_ids = whole(batch, 1), whole(batch, 1)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.generated, self.column = whole(LOOK_EVERY, batch), whole(1)
        self.slots = [whole(1) for _ in windows]
        self.window, self.eos, self.fill = whole(1), whole(MOST_EOS), whole(1)
        self.temperature, self.top_p, self.min_p, self.top_k = real(), real(), real(), whole(1)
        self.seed, self.drawn = whole(1), whole(1)
        self._made = 0
        self.sample(1.0, 0, 1.0, 0.0, 0, 0)

    def begin(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        eos: Sequence[int],
        fill: int,
        window: int | None,
    ) -> None:
        """Go on from these inputs of the next step, int64 [B, 1] both; choose greedily."""
        self.token_ids.copy_(token_ids)
        self.position_ids.copy_(position_ids)
        self.finished.copy_(position_ids[:, 0] == EMPTY)
        self.column.zero_()
        self._made = 0
        self.eos.copy_(torch.tensor([*eos, *[EMPTY] * (MOST_EOS - len(eos))], device="cpu"))
        self.fill.fill_(fill)
        self.window.fill_(NO_LIMIT if window is None else window)

    def sample(self, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, drawn: int) -> None:
        """Sample by these settings; 0, 1.0 and 0.0 turn ``top_k``, ``top_p`` and ``min_p`` off."""
        self.temperature.fill_(temperature)
        self.top_k.fill_(top_k or NO_LIMIT)
        self.top_p.fill_(top_p)
        self.min_p.fill_(min_p)
        self.seed.fill_(signed(seed))
        self.drawn.fill_(drawn)

    def place(self, slots: Sequence[int]) -> None:
        """The slot that the next token takes, for each window of the cache that the next step runs over."""
        for own, slot in zip(self.slots, slots, strict=True):
            own.fill_(slot)

    def snapshot(self, count: int) -> Callable[[], torch.Tensor]:
        """The tokens of the newest ``count`` steps, at most :data:`LOOK_EVERY`, all of which have been started.

        Returns:
            what waits for them and gives them, int64 [count, B] on the CPU.
        """
        rows, wait = self._note_made(count), self._fetch(self.generated)
        return lambda: wait()[rows]

    def _note_made(self, count: int) -> list[int]:
        """The rows of :attr:`generated` that the newest ``count`` steps went to."""
        self._made += count
        return [step % LOOK_EVERY for step in range(self._made - count, self._made)]


def past_of(memory: KVMemory) -> tuple[torch.Tensor, ...]:
    """What a step is given of the cache: slot positions, keys, values."""
    return (*memory.slot_positions, *memory.buffers.keys, *memory.buffers.values)


def fetch_now(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a tensor to the CPU at once; gives what gives it."""
    copy = tensor.to("cpu", copy=True)
    return lambda: copy


def advance(
    step: Callable[..., tuple[torch.Tensor, ...]],
    state: Any,
    memory: KVMemory,
    sampled: bool,
    precision: torch.dtype = torch.float64,
    writes_last: bool = False,
) -> None:
    """Run the step on what ``state`` says, keep its keys and values, choose the next tokens, and move on.

    Args:
        step: :meth:`staticgen.step.Step.forward`, or what was compiled of it, for one token of each row.
        state: a :class:`LoopState`, or what has its attributes; like ``memory``, read and written in place.
        sampled: draw the tokens; else take the best.
        precision: of the numbers that they are drawn by; float32 for devices that emulate float64.
        writes_last: have the slots depend on the tokens, without changing them. XLA on the CPU does not see otherwise
            that the last layer has read the cache when it is written, and copies all of it.
    """
    positions = state.position_ids
    first = (positions - (state.window - 1)).clamp(min=0)
    logits, *new = step(state.token_ids, positions, first, *past_of(memory))
    if sampled:
        ordered, order = restrict(logits, state.temperature, state.top_k, state.top_p, state.min_p)
        chosen = pick(ordered, order, uniform(state.seed, state.drawn, logits.shape[0], precision))
    else:
        chosen = logits.argmax(dim=-1)
    tokens = torch.where(state.finished, state.fill, chosen.to(state.fill.dtype))
    slots = [torch.minimum(slot, tokens.max() + NO_LIMIT) for slot in state.slots] if writes_last else state.slots
    memory.put_(new, positions, slots)
    shown = torch.where(logits.isnan().any(dim=-1), BROKEN, tokens)
    state.generated.index_copy_(0, state.column.long(), shown[None])
    state.finished.logical_or_((tokens[:, None] == state.eos[None]).any(dim=-1))
    state.token_ids.copy_(torch.where(state.finished, 0, tokens)[:, None])
    state.position_ids.copy_(torch.where(state.finished[:, None], EMPTY, positions + 1))
    state.column.add_(1).remainder_(LOOK_EVERY)
    for slot, held in zip(state.slots, memory.slot_positions, strict=True):
        slot.add_(1).remainder_(held.shape[1])
    state.drawn.add_(1)


def restrict(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores that may be drawn, -inf elsewhere, ascending, float32 [B, V]; and whose they are, int64 [B, V].

    Temperature, then top-k, top-p and min-p, each of what the one before left, as transformers' warpers have it.
    """
    ordered, order = (logits / temperature).sort(dim=-1, stable=True)
    size = logits.shape[1]
    worst = (size - top_k).clamp(min=0, max=size - 1).long().expand(logits.shape[0], 1)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, worst), -math.inf)
    best = torch.arange(size, device=logits.device) == size - 1  # always stays
    small = torch.softmax(ordered, dim=-1).cumsum(dim=-1) <= 1 - top_p
    ordered = ordered.masked_fill(small & ~best & (top_p < 1), -math.inf)
    shares = torch.softmax(ordered, dim=-1)
    return ordered.masked_fill((shares < min_p * shares[:, -1:]) & ~best, -math.inf), order


def draw(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A token of every row, int64 [B], by scores float32 [B, V] and one uniform number each, float64 or float32 [B]."""
    return pick(*scores.sort(dim=-1, stable=True), numbers)


def pick(ordered: torch.Tensor, order: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """:func:`draw` for scores in ascending order, and whose they are."""
    mass = torch.softmax(ordered, dim=-1).to(numbers.dtype).cumsum(dim=-1)
    place = (mass <= numbers[:, None] * mass[:, -1:]).sum(dim=-1, keepdim=True).clamp(max=mass.shape[1] - 1)
    return order.gather(1, place)[:, 0]


def uniform(seed: torch.Tensor, drawn: torch.Tensor, rows: int, precision: torch.dtype = torch.float64) -> torch.Tensor:
    """One number from 0 on, below 1, for each row, [B] of this precision, by seed and count alone: the same on every device.

    A device's own generator would keep its state apart from the loop's, and differ from the next device's.
    """
    row = torch.arange(rows, device=seed.device)
    mixed = _mix(_mix(seed + _GOLDEN * (drawn.long() + 1)) + _GOLDEN * (row + 1))
    bits = 53 if precision == torch.float64 else 24
    return _shift(mixed, 64 - bits).to(precision) * 2.0**-bits


def signed(number: int) -> int:
    """The 64 bits of a number as int64 holds them."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(number: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; int64 products wrap as its unsigned ones do."""
    number = (number ^ _shift(number, 30)) * _FIRST
    number = (number ^ _shift(number, 27)) * _SECOND
    return number ^ _shift(number, 31)


def _shift(number: torch.Tensor, bits: int) -> torch.Tensor:
    """Bits moved to the right, zeros from the left; the sign by itself, since torch-xla divides, and rounds towards 0."""
    return ((number & (2**63 - 1)) >> bits) | ((number < 0).long() << (63 - bits))
