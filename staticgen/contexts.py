"""What a session knows of the tokens so far when it runs the next one: a cache of them, or just the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch.nn import functional

from staticgen.cache import KVBuffers, KVCache
from staticgen.device_loop import BROKEN, LoopState
from staticgen.growth import SizedCaches
from staticgen.layouts import Layout, Ring, Shift
from staticgen.programs import Programs
from staticgen.ready import ReadyKeys
from staticgen.shapes import EMPTY, StepShape, plan_chunks
from staticgen.spans import KVSpan


class Context(ABC):
    """The tokens of all rows of a session. Rows are left-padded: their newest tokens stand in one column."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys and values."""

    @abstractmethod
    def sizes(self) -> list[tuple[int, int]]:
        """The programs that it runs: (tokens, cache length) each."""

    def prefill(
        self,
        rows: Sequence[torch.Tensor],
        window: int | None = None,
        ready: ReadyKeys | None = None,
        copies: int = 1,
    ) -> torch.Tensor:
        """Forget what was there and take in ``rows``, int64 [t] each.

        With a ``window``, no token sees further back than that many positions, its own included, from here on.
        Tokens whose keys and values are ``ready`` do not run. Each row is run once; then ``copies`` rows in succession
        are what it is.

        Returns:
            logits float32 [batch size of the session, V] of the last tokens.
        """
        logits = self._take_in(rows, window, ready)
        if copies == 1:
            return logits
        sources = [row for row in range(len(rows)) for _ in range(copies)]
        self.select_rows(sources)
        return logits[sources]

    @abstractmethod
    def _take_in(self, rows: Sequence[torch.Tensor], window: int | None, ready: ReadyKeys | None) -> torch.Tensor:
        """:meth:`prefill` without copies."""

    @property
    @abstractmethod
    def resident(self) -> bool:
        """Whether the backend can keep the loop on the device, for some layouts at least."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything; rows may be inserted."""

    @abstractmethod
    def insert(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Forget what was in these rows and take in int64 [t] each instead; the others go on as they were.

        Returns:
            logits float32 [B, V], of the last tokens of these rows.
        """

    @abstractmethod
    def select_rows(self, sources: Sequence[int]) -> None:
        """Row i becomes what row ``sources[i]`` was; rows beyond those named do not matter."""

    @abstractmethod
    def decode(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Take in one token of every row; int64 [B, 1] both, position -1 in rows that have ended. Logits [B, V]."""

    def read(self, row: int, start: int, stop: int) -> KVSpan | None:
        """A copy of the keys and values of a row's tokens from ``start`` to ``stop`` - 1; ``stop`` is how many it has.

        None when there are none, or some of them are gone.
        """
        return None


class CachedContext(Context):
    """Keys and values are cached, in slots that a layout chooses.

    Args:
        programs: run the step.
        layout: makes the layout for a number of slots.
        buckets: tokens of prefill steps, ascending.
        lengths: cache lengths of decode steps, ascending; prefill runs over the last.
        max_length: tokens of a row; more than the last length where all layers have windows.

    Attributes:
        advances: :meth:`begin_loop` and :meth:`launch` are there.
    """

    def __init__(
        self,
        programs: Programs,
        layout: Callable[[int], Layout],
        buckets: Sequence[int],
        lengths: Sequence[int],
        max_length: int,
    ):
        step, self._programs, self._buckets = programs.step, programs, buckets
        backend, batch = programs.backend, programs.batch
        if backend.resident and type(layout(max_length)) is Shift:
            layout = Ring  # the same tokens out of other slots, and nothing on the device has to move
        whole = layout(max_length)
        self._capacity = whole.capacity
        rotations = None if self._capacity is None else step.rotations()

        def make(length: int) -> KVCache:
            reach = max_length if length == lengths[-1] else length
            turned, memory = step.form.transposed_keys, backend.memory(step, batch, length)
            return KVCache(step.cache_spec, batch, length, layout, turned, rotations, reach, memory)

        backend.reserve(step, batch, cached_sizes(buckets, lengths if whole.grows else lengths[-1:]))
        self.advances = backend.resident and type(whole) is Ring
        self._caches = SizedCaches(lengths if whole.grows else lengths[-1:], make)
        self._window: int | None = None
        self._packed = False
        self._torn = False  # a step began and did not end: what is in the cache may be half written
        self._placed = False  # the loop on the device knows its slots

    @property
    def nbytes(self) -> int:
        return self._caches.nbytes

    def sizes(self) -> list[tuple[int, int]]:
        return cached_sizes(self._buckets, self._caches.sizes)

    @property
    def resident(self) -> bool:
        return self._programs.backend.resident

    def clear(self) -> None:
        self._caches.clear()
        self._window, self._packed = None, True

    def insert(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        self._caches.settle_at_largest()
        cache = self._caches.current
        cache.clear_rows(list(rows))
        longest = max(map(len, rows.values()))
        chunks = plan_chunks(longest, self._buckets)
        token_ids, position_ids = _left_padded(rows, self._programs.batch, sum(chunks))
        padding = sum(chunks) - longest  # columns that are padding in every row take no slot
        for columns in _columns(chunks):
            logits, new = self._step(token_ids[:, columns], position_ids[:, columns])
            cache.write_rows(new, position_ids[:, columns], list(rows), longest, columns.start - padding)
        self._caches.used = max(self._caches.used, longest)
        return logits

    def _take_in(self, rows: Sequence[torch.Tensor], window: int | None, ready: ReadyKeys | None) -> torch.Tensor:
        self._caches.clear()
        self._window, self._packed = window, False
        starts = [0] * len(rows)
        late: ReadyKeys | None = None
        if ready is not None:
            self._caches.write(ready.buffers, ready.position_ids[:, : ready.first_run])
            starts = list(ready.counts)
            rows = [row[start - ready.before :] for row, start in zip(rows, starts, strict=True)]
            late = ready if ready.late else None
        longest = max(map(len, rows))
        # Beyond a layout's capacity each token must drop another first, and so takes a step of its own. A step ends
        # too where a row with ready keys begins: its first token must find them in the cache.
        room = longest if self._capacity is None else self._capacity - max(starts)
        together = max(0, min(longest, room))
        begins = {longest - len(row) for row, start in zip(rows, starts, strict=True) if start}
        token_ids, position_ids = _left_padded(dict(enumerate(rows)), self._programs.batch, longest, starts)
        for begin, end in pairwise(sorted({0, *begins, *range(together, longest + 1)})):
            chunks = [1] if end - begin == 1 else plan_chunks(end - begin, self._buckets)
            padding = sum(chunks) - (end - begin)  # columns that are padding in every row take no slot
            ids = functional.pad(token_ids[:, begin:end], (padding, 0))
            positions = functional.pad(position_ids[:, begin:end], (padding, 0), value=EMPTY)
            column = begin - padding + (0 if late is None else late.first_run)
            for columns in _columns(chunks):
                skip = max(0, padding - columns.start)
                logits = self._run(ids[:, columns], positions[:, columns], skip, late, column + columns.start)
        return logits

    def select_rows(self, sources: Sequence[int]) -> None:
        self._caches.current.select_rows_(sources)

    def decode(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        self._torn = True
        if self._packed:  # the rows' tokens are their newest columns, without gaps
            self._caches.used = max(1, int(position_ids.max()))
        self._caches.settle()
        return self._run(token_ids, position_ids)

    def begin_loop(self) -> LoopState:
        """The state of the loop on the device, to be filled; then :meth:`launch`, any number of times, and :meth:`end_loop`."""
        self._placed = False
        return self._programs.backend.loop_state(self._programs.step, self._programs.batch)

    @property
    def window(self) -> int | None:
        """How many positions a token of the present call sees; None for all."""
        return self._window

    def launch(self, state: LoopState, count: int, sampled: bool) -> Callable[[], torch.Tensor]:
        """Start ``count`` decode steps on the device, at most :data:`LOOK_EVERY`.

        Returns:
            what waits for the tokens chosen after each and gives them, int64 [count, B] on the CPU; it raises
            ArithmeticError where logits are NaN.
        """
        self._torn = True
        for _ in range(count):
            before = self._caches.current
            self._caches.settle()
            if not self._placed or self._caches.current is not before:
                state.place([group.layout.next_slot for group in self._caches.current.groups])  # type: ignore[attr-defined]
                self._placed = True
            self._programs.advance(self._caches.current, sampled)
            self._caches.skip(1)
        length, look = self._caches.current.length, state.snapshot(count)

        def collect() -> torch.Tensor:
            tokens = look()
            if (tokens == BROKEN).any():
                self._caches.zero_()
                raise self._programs.broken(StepShape(self._programs.batch, 1, length))
            return tokens

        return collect

    def end_loop(self, clean: bool) -> None:
        """No more steps are started; ``clean`` if what was started has gone well, as far as it was looked at."""
        self._caches.current.memory.refresh_()
        self._torn = not clean

    def read(self, row: int, start: int, stop: int) -> KVSpan | None:
        if self._torn or (self._capacity is not None and stop > self._capacity):
            return None
        return self._caches.current.read(row, start, stop)

    def _run(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        skip: int = 0,
        late: ReadyKeys | None = None,
        column: int = 0,
    ) -> torch.Tensor:
        """Run a step and keep its tokens, but for the first ``skip`` columns, and the late ones from ``column`` on."""
        self._torn = True
        position_ids = self._caches.current.make_room(position_ids)
        logits, new = self._step(token_ids, position_ids)
        if late is not None:
            position_ids = late.merge_(new, position_ids, column)
        self._caches.write(new, position_ids, skip)
        self._torn = False
        return logits

    def _step(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, KVBuffers]:
        first = torch.zeros_like(position_ids)
        if self._window is not None:
            first = (position_ids - (self._window - 1)).clamp_(min=0)
        try:
            return self._programs.run(token_ids, position_ids, first, self._caches.current)
        except ArithmeticError:
            self._caches.zero_()  # NaN in a stale slot would survive a weight of 0
            raise


def cached_sizes(buckets: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The programs over a cache, (tokens, cache length) each: prefill over the largest, then decode over all."""
    return [(count, lengths[-1]) for count in buckets] + [(1, length) for length in lengths]


class RecomputedContext(Context):
    """Nothing is cached: every step runs the newest tokens of each row again, at positions from 0 on.

    Args:
        programs: run the step.
        lengths: tokens of the windows, ascending; a step runs the smallest that holds the longest row, and rows
            longer than the largest lose their oldest tokens.
    """

    def __init__(self, programs: Programs, lengths: Sequence[int]):
        self._programs, self._lengths = programs, lengths
        step, backend = programs.step, programs.backend
        backend.reserve(step, programs.batch, recomputed_sizes(lengths))
        # Programs have a cache as input; this one stays empty.
        memory = backend.memory(step, programs.batch, 1)
        self._nothing = KVCache(
            step.cache_spec, programs.batch, 1, transposed_keys=step.form.transposed_keys, memory=memory
        )
        self._nothing.clear()
        self._rows: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return self._nothing.buffers.nbytes

    @property
    def resident(self) -> bool:
        return self._programs.backend.resident

    def sizes(self) -> list[tuple[int, int]]:
        return recomputed_sizes(self._lengths)

    def _take_in(self, rows: Sequence[torch.Tensor], window: int | None, ready: ReadyKeys | None) -> torch.Tensor:
        assert ready is None  # refused before
        self._rows = [row[-self._lengths[-1] :] for row in rows]
        return self._run()

    def clear(self) -> None:
        self._rows = [torch.zeros(0, dtype=torch.int64, device="cpu")] * self._programs.batch

    def insert(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        for index, row in rows.items():
            self._rows[index] = row[-self._lengths[-1] :]
        return self._run()

    def select_rows(self, sources: Sequence[int]) -> None:
        self._rows = [self._rows[source] for source in sources]

    def decode(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        most = self._lengths[-1]
        for index, row in enumerate(self._rows):
            ended = bool(position_ids[index, 0] == EMPTY)
            self._rows[index] = row[:0] if ended else torch.cat([row, token_ids[index]])[-most:]
        return self._run()

    def _run(self) -> torch.Tensor:
        longest = max(map(len, self._rows))
        width = next(length for length in self._lengths if length >= longest)
        token_ids, position_ids = _left_padded(dict(enumerate(self._rows)), self._programs.batch, width)
        return self._programs.run(token_ids, position_ids, torch.zeros_like(position_ids), self._nothing)[0]


def recomputed_sizes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The programs without a cache, (tokens, cache length) each."""
    return [(length, 1) for length in lengths]


def _columns(chunks: Sequence[int]) -> Iterator[slice]:
    """The columns of each chunk."""
    for start, stop in pairwise(accumulate(chunks, initial=0)):
        yield slice(start, stop)


def _left_padded(
    rows: Mapping[int, torch.Tensor], batch: int, width: int, starts: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions, int64 [batch, width], of the rows given; the others are padding.

    ``starts`` are the positions of the rows' first tokens, 0 by default.
    """
    token_ids = torch.zeros(batch, width, dtype=torch.int64, device="cpu")
    position_ids = torch.full_like(token_ids, EMPTY)
    for index, row in rows.items():
        start = starts[index] if starts else 0
        token_ids[index, width - len(row) :] = row
        position_ids[index, width - len(row) :] = torch.arange(start, start + len(row), device="cpu")
    return token_ids, position_ids
