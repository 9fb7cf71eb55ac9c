"""Where a call's tokens after the first are chosen: on the host, one step at a time, or on the device, some at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from staticgen.backends import Backend
from staticgen.calls import HOOKS, Call, Hooks
from staticgen.contexts import CachedContext, Context
from staticgen.decoding import Decoding
from staticgen.device_loop import LOOK_EVERY, MOST_EOS, LoopState
from staticgen.prefix_cache import Recorder
from staticgen.sampling import row_processors

_AHEAD = 2  # pieces of work that are started before the first is looked at

# What the loop on the device does not know, by the value that asks for nothing.
_HOST_ONLY: dict[str, Any] = {
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "renormalize_logits": False,
    "output_scores": False,
    "output_logits": False,
    "stop_strings": None,
    "max_time": None,
}


def host_reason(settings: Decoding, hooks: Hooks, backend: Backend, context: Context, layout: str) -> str:
    """Why the loop of a call runs on the host; empty where it runs on the device."""
    if not backend.resident:
        return f"backend {backend.name!r} has no loop of its own"
    if not (isinstance(context, CachedContext) and context.advances):
        return f"layout {layout!r} chooses its slots on the host"
    asked = [name for name, neutral in _HOST_ONLY.items() if getattr(settings, name) != neutral]
    objects = {name: getattr(hooks, name, None) for name in HOOKS}
    asked += [
        name
        for name, value in objects.items()
        if not (value is None or (isinstance(value, list | tuple) and not value))
    ]
    asked += [type(processor).__name__ for processor in row_processors(settings, 1, 1)]
    if len(settings.eos_token_ids) > MOST_EOS:
        asked.append(
            f"eos_token_id with {len(settings.eos_token_ids)} ids, of which the device knows {MOST_EOS} at most"
        )
    return ", ".join(asked)


class HostLoop:
    """Runs a step, reads its logits and chooses, again and again."""

    def __init__(self, call: Call, context: Context, recorder: Recorder | None):
        self._call, self._context, self._recorder = call, context, recorder

    def next(self) -> torch.Tensor:
        """The next token of each row, int64 [B]."""
        call, start = self._call, time.perf_counter()
        logits = self._context.decode(call.token_ids, call.position_ids)
        if self._recorder is not None:
            self._recorder.feed(call.token_ids, call.position_ids)
        call.advance(time.perf_counter() - start)
        return call.choose(logits)

    def end(self) -> None:
        """No more tokens are wanted."""


class DeviceLoop:
    """Has the device make some tokens of every row, and hands them out one after the other.

    The device runs ahead: the next tokens are in the making while these are looked at.
    """

    def __init__(self, call: Call, context: CachedContext, recorder: Recorder | None):
        self._call, self._context, self._recorder = call, context, recorder
        self._waiting: deque[torch.Tensor] = deque()
        self._started: deque[tuple[int, Callable[[], torch.Tensor]]] = deque()
        self._state: LoopState | None = None
        self._left, self._seconds, self._failed = 0, 0.0, False

    def next(self) -> torch.Tensor:
        """The next token of each row, int64 [B]."""
        call = self._call
        if not self._waiting:
            self._failed = True
            self._run()
            self._failed = False
        tokens = self._waiting.popleft()[: len(call.stats.new_tokens)].clone()
        if self._recorder is not None:
            self._recorder.feed(call.token_ids, call.position_ids)
        call.advance(self._seconds)
        call.accept(tokens)
        return tokens

    def _run(self) -> None:
        start = time.perf_counter()
        state = self._begin() if self._state is None else self._state
        while self._left and len(self._started) < _AHEAD:
            count = min(LOOK_EVERY, self._left)
            self._started.append((count, self._context.launch(state, count, self._call.settings.do_sample)))
            self._left -= count
        count, collect = self._started.popleft()
        self._waiting.extend(collect())
        self._seconds = (time.perf_counter() - start) / count

    def _begin(self) -> LoopState:
        call, state = self._call, self._context.begin_loop()
        settings = call.settings
        state.begin(
            call.token_ids,
            call.position_ids,
            eos=settings.eos_token_ids,
            fill=settings.fill_token_id,
            window=self._context.window,
        )
        if settings.do_sample:
            min_p = 0.0 if settings.min_p is None else float(settings.min_p)
            chosen = float(settings.temperature), int(settings.top_k), float(settings.top_p), min_p
            state.sample(*chosen, call.sampler.seed, call.sampler.drawn)
        self._state, self._left = state, call.left
        return state

    def end(self) -> None:
        """No more tokens are wanted; those that wait or are in the making were made in vain."""
        self._call.stats.surplus_steps += len(self._waiting) + sum(count for count, _ in self._started)
        if self._state is not None:
            self._context.end_loop(clean=not self._failed)
        self._waiting.clear()
        self._started.clear()


def loop_of(
    call: Call, hooks: Hooks, backend: Backend, context: Context, layout: str, recorder: Recorder | None
) -> Any:
    """The loop for a call after its first token; says in the call's stats which it is."""
    reason = host_reason(call.settings, hooks, backend, context, layout)
    call.stats.loop, call.stats.loop_reason = ("host", reason) if reason else ("device", "")
    if reason:
        return HostLoop(call, context, recorder)
    assert isinstance(context, CachedContext)
    return DeviceLoop(call, context, recorder)


@torch.inference_mode(False)
def run_for(backend: Backend, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Do a piece of work for a backend's device.

    The caller may be in inference mode while a stream is begun and not while it goes on, or the other way round.
    Tensors made in that mode cannot be written outside it, so that none of ours is made in it.
    """
    with backend.scope():
        return work()
