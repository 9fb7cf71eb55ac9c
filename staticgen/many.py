"""Many prompts through a few rows: a row whose text has ended takes the next prompt, and nothing is compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from staticgen.calls import Call
from staticgen.contexts import Context
from staticgen.request import Request
from staticgen.shapes import EMPTY
from staticgen.stats import CallStats

# What one prompt alone can ask for, and one of many cannot.
_ALONE = ("num_beams", "num_return_sequences")


def require_plain(request: Request, index: int) -> None:
    """Refuse what makes no sense for one of many prompts.

    Raises:
        ValueError: the message names the argument.
    """
    for name in _ALONE:
        if getattr(request.settings, name) != 1:
            raise ValueError(f"{name} is {getattr(request.settings, name)}: generate_many makes one text per prompt")
    asked = {
        "return_dict_in_generate": request.settings.return_dict_in_generate,
        "streamer": request.hooks.streamer is not None,
        "past_key_values or a prefix": request.past_key_values is not None,
    }
    for name, given in asked.items():
        if given:
            raise ValueError(f"{name} is not for generate_many: it belongs to one call; use generate")
    if request.prompts.batch != 1:
        raise ValueError(f"prompts[{index}] holds {request.prompts.batch} prompts, expected one: int64 [t]")


def run_many(
    context: Context,
    requests: Sequence[Request],
    new_tokens: Sequence[int],
    batch_size: int,
    sizes: tuple[int, int],
    stats: CallStats,
    report: Callable[[], None],
) -> list[torch.Tensor]:
    """Texts of all requests, int64 [t] each, prompt included, in their order.

    ``report`` is called once for every text that has ended.
    """
    running: dict[int, tuple[int, Call]] = {}  # by row: the request in it, and its state
    texts: list[list[int]] = [request.prompts.rows[0].tolist() for request in requests]
    waiting = list(reversed(range(len(requests))))
    context.clear()

    def choose(row: int, logits: torch.Tensor) -> None:
        index, call = running[row]
        texts[index].append(int(call.choose(logits[row : row + 1])))
        if call.finished:
            stats.new_tokens[index] = call.stats.new_tokens[0]
            stats.finish_reasons[index] = call.stats.finish_reasons[0]
            del running[row]
            report()

    while waiting or running:
        free = [row for row in range(batch_size) if row not in running]
        taken = {row: waiting.pop() for row in free[: len(waiting)]}
        if taken:
            for row, index in taken.items():
                asked = requests[index]
                running[row] = (
                    index,
                    Call(asked.prompts, asked.settings, 1, new_tokens[index], asked.hooks, sizes, context.resident),
                )
            logits = context.insert({row: requests[index].prompts.rows[0] for row, index in taken.items()})
            for row in taken:
                choose(row, logits)
            continue  # a text of one token has left its row free again
        start = time.perf_counter()
        token_ids = torch.zeros(batch_size, 1, dtype=torch.int64, device="cpu")
        position_ids = torch.full_like(token_ids, EMPTY)
        for row, (_, call) in running.items():
            token_ids[row], position_ids[row] = call.token_ids[0], call.position_ids[0]
        logits = context.decode(token_ids, position_ids)
        seconds = time.perf_counter() - start
        stats.steps += 1
        stats.decode_seconds += seconds
        for row in sorted(running):
            running[row][1].advance(seconds)
            choose(row, logits)
    return [torch.tensor(text, dtype=torch.int64, device="cpu") for text in texts]
