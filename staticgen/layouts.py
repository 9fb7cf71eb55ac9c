"""Cache layouts: which slot each new token goes to, and what is given up when all slots are taken.

All rows of a batch advance together, one column a token. Prompts are left-padded, so the slots that a
layout gives up first are those of padding, and of a row's oldest tokens only when the cache is full.

A layout of one's own is a subclass of :class:`Layout` with two methods, made known by :func:`register_layout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from staticgen.registry import Registry
from staticgen.shapes import EMPTY

# What happens to a call that would need more than the cache holds; see Session.
OVERFLOW = ("error", "stop", "slide", "sink")


@dataclass(frozen=True)
class Segment:
    """``count`` consecutive new tokens of every row, from ``source`` of the step on, go to slots from ``slot`` on."""

    slot: int
    source: int
    count: int


@dataclass(frozen=True)
class RowSegment:
    """Like :class:`Segment`, in one ``row`` only."""

    row: int
    slot: int
    source: int
    count: int = 1


@dataclass(frozen=True)
class Placement:
    """Where the new tokens of one step go.

    Attributes:
        shift: first move every slot this many places to the left; the leftmost ones are dropped.
        segments: then copy these runs of new tokens.
        rows: then these runs of single rows.
        positions: int64 [B, T], what the slots of ``segments`` say afterwards, where it is not the tokens' own
            positions; -1 leaves a slot empty.
    """

    shift: int
    segments: tuple[Segment, ...]
    rows: tuple[RowSegment, ...] = ()
    positions: torch.Tensor | None = None


class Layout(ABC):
    """Chooses slots in a cache of ``length`` slots; holds the state of one sequence of steps.

    Its parameters beyond ``length`` are keyword arguments of ``__init__``; they are those of
    ``Session.set_cache_implementation``.

    Attributes:
        overflow: the policies of :data:`OVERFLOW` that it can carry out; the first is its default. A layout
            with ``"slide"`` drops the oldest column for a new one.
        capacity: positions stay below this: beyond it, the row's oldest token that is not pinned is dropped,
            and the later ones move down by one position, keys re-rotated. None: positions go on.
        pinned: that many first tokens of a row are never dropped.
        recomputes: nothing is kept between steps; the session runs the whole window every time.
        grows: :meth:`newest` is there, so that tokens can move to a cache of another length, and that a row can
            take another text while the others go on.
    """

    overflow: ClassVar[tuple[str, ...]] = ("error", "stop")
    recomputes: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    capacity: int | None = None
    pinned: int = 0

    def __init__(self, length: int):
        self.length = length

    @abstractmethod
    def reset(self) -> None:
        """Begin again with an empty cache."""

    @abstractmethod
    def place(self, positions: torch.Tensor, source: int = 0) -> Placement:
        """Slots for the tokens of a step from column ``source`` on.

        ``positions`` is int64 [B, T], -1 where a token is padding; at least one and at most ``length`` columns
        are to be placed.
        """

    def newest(self, count: int) -> list[int]:
        """Slots of the ``count`` newest columns, oldest first; they have been placed and not given up."""
        raise NotImplementedError(f"{type(self).__name__} cannot say where its newest columns are")


class Shift(Layout):
    """The newest token is always at the right end and everything else moves left: the reference."""

    overflow = ("error", "stop", "slide")
    grows = True

    def reset(self) -> None:
        pass

    def place(self, positions: torch.Tensor, source: int = 0) -> Placement:
        count = positions.shape[1] - source
        return Placement(count, (Segment(self.length - count, source, count),))

    def newest(self, count: int) -> list[int]:
        return list(range(self.length - count, self.length))


class Ring(Layout):
    """Tokens go to the next slot, wrapping around, and nothing moves."""

    overflow = ("error", "stop", "slide")
    grows = True

    def __init__(self, length: int):
        super().__init__(length)
        self._next = 0

    def reset(self) -> None:
        self._next = 0

    def place(self, positions: torch.Tensor, source: int = 0) -> Placement:
        count = positions.shape[1] - source
        segments = _wrapped(0, self.length, self._next, source, count)
        self._next = (self._next + count) % self.length
        return Placement(0, segments)

    def newest(self, count: int) -> list[int]:
        return [slot % self.length for slot in range(self._next - count, self._next)]

    @property
    def next_slot(self) -> int:
        """The slot that the next token takes."""
        return self._next

    def skip(self, count: int) -> None:
        """So many tokens have been placed elsewhere, each in the slot after the last."""
        self._next = (self._next + count) % self.length


class Sink(Layout):
    """The first tokens of every row stay (attention sinks), the others share a ring.

    Text may go on for ever at positions below ``num_sink_tokens + window_length``: a step over a full row first
    drops the row's oldest token after the sinks and moves the later ones down (arXiv 2309.17453).

    Args:
        length: slots of the cache.
        window_length: newest tokens that are seen, besides the sinks, the query's own included; None for all
            that fit. (transformers' former SinkCache counted the sinks in it.)
        num_sink_tokens: first tokens that stay.
    """

    overflow = ("sink", "error", "stop")

    def __init__(self, length: int, window_length: int | None = None, num_sink_tokens: int = 4):
        super().__init__(length)
        if not _is_count(num_sink_tokens, least=0):
            raise ValueError(f"num_sink_tokens is {num_sink_tokens!r}, expected a whole number of at least 0")
        if window_length is None:
            window_length = length - num_sink_tokens
            if window_length < 1:
                raise ValueError(
                    f"num_sink_tokens is {num_sink_tokens}, which leaves no room in max_length={length}; lower it"
                )
        if not _is_count(window_length, least=1):
            raise ValueError(f"window_length is {window_length!r}, expected a whole number of at least 1, or None")
        if window_length + num_sink_tokens > length:
            raise ValueError(
                f"window_length={window_length} and num_sink_tokens={num_sink_tokens} are "
                f"{window_length + num_sink_tokens} slots together, more than max_length={length}; lower either"
            )
        self.window_length, self.pinned = int(window_length), int(num_sink_tokens)
        self.capacity = self.window_length + self.pinned
        self._next = 0

    def reset(self) -> None:
        self._next = 0

    def place(self, positions: torch.Tensor, source: int = 0) -> Placement:
        count, window = positions.shape[1] - source, self.window_length
        skip = max(0, count - window)
        segments = _wrapped(self.pinned, window, (self._next + skip) % window, source + skip, count - skip)
        self._next = (self._next + count) % window
        is_sink = (positions >= 0) & (positions < self.pinned)
        sinks = [cell for cell in is_sink.nonzero().tolist() if cell[1] >= source]
        rows = tuple(RowSegment(row, int(positions[row, column]), column) for row, column in sinks)
        return Placement(0, segments, rows, positions.masked_fill(is_sink, EMPTY))


class Recompute(Layout):
    """Nothing is cached: every step runs the whole left-padded window again. The reference for all others.

    Under ``overflow="slide"`` the last window is recomputed at positions from 0 on, which is the way past the end of
    a table of learned positions.
    """

    overflow = ("error", "stop", "slide")
    recomputes = True

    def reset(self) -> None:
        pass

    def place(self, positions: torch.Tensor, source: int = 0) -> Placement:
        return Placement(0, ())


LAYOUTS: Registry[Layout] = Registry("layout", {"ring": Ring, "shift": Shift, "sink": Sink, "none": Recompute})

# Names of transformers' caches, which mean nothing here or something else.
_TRANSFORMERS_NAMES = {
    "static": "every cache here is static",
    "dynamic": "a cache that grows with every token is what static shapes exclude",
}


def register_layout(name: str, cls: type[Layout]) -> None:
    """Make a layout of one's own known by ``name``, in any letter case.

    Raises:
        TypeError: ``cls`` is no subclass of :class:`Layout`.
        ValueError: the name is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Layout)):
        raise TypeError(f"cls is {cls!r}, expected a subclass of staticgen.Layout")
    if isinstance(name, str) and name.strip().lower() in _TRANSFORMERS_NAMES:
        raise ValueError(f"layout name {name!r} is the name of a cache of transformers; choose another name")
    LAYOUTS.register(name, cls)


def layout_class(name: str) -> type[Layout]:
    """The layout called ``name``, in any letter case.

    Raises:
        UnknownNameError: there is none of this name; the message lists the known ones.
    """
    key = name.strip().lower() if isinstance(name, str) else ""
    remark = _TRANSFORMERS_NAMES.get(key)
    return LAYOUTS.get(name, f"{remark}, and layout 'ring' gives the same tokens" if remark else "")


def layout_factory(name: str, options: Mapping[str, Any]) -> Callable[[int], Layout]:
    """Makes layouts called ``name`` for a number of slots; :func:`layout_class` and the layout's own errors."""
    cls = layout_class(name)

    def make(length: int) -> Layout:
        try:
            return cls(length, **options)
        except TypeError as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no parameters"
            raise TypeError(f"layout {name!r} cannot be made with {given}: {error}") from error

    return make


def _wrapped(first: int, size: int, begin: int, source: int, count: int) -> tuple[Segment, ...]:
    """Segments of a ring of ``size`` slots from slot ``first`` on, ``begin`` places into it."""
    before_wrap = min(count, size - begin)
    segments = [Segment(first + begin, source, before_wrap)]
    if before_wrap < count:
        segments.append(Segment(first, source + before_wrap, count - before_wrap))
    return tuple(segments)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
