"""Cache layouts: which slot each new token goes to.

All rows of a batch advance together, one column a token. Prompts are left-padded, so the slots that a
layout gives up first are those of padding, and of the row's oldest tokens only when the cache is full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from staticgen.cache import Placement, Segment
from staticgen.registry import Registry


class Layout(ABC):
    """Chooses slots in a cache of ``length`` slots; holds the state of one sequence of steps."""

    def __init__(self, length: int):
        self.length = length

    @abstractmethod
    def reset(self) -> None:
        """Begin again with an empty cache."""

    @abstractmethod
    def place(self, count: int, source: int = 0) -> Placement:
        """Slots for the next ``count`` tokens, which stand at ``source`` and after in the step.

        ``count`` is at least 1 and at most ``length``.
        """

    @abstractmethod
    def newest(self, count: int) -> list[int]:
        """Slots of the ``count`` newest tokens, oldest first; they have been placed and not given up."""


class Shift(Layout):
    """The newest token is always at the right end and everything else moves left: the reference."""

    def reset(self) -> None:
        pass

    def place(self, count: int, source: int = 0) -> Placement:
        return Placement(count, (Segment(self.length - count, source, count),))

    def newest(self, count: int) -> list[int]:
        return list(range(self.length - count, self.length))


class Ring(Layout):
    """Tokens go to the next slot, wrapping around, and nothing moves."""

    def __init__(self, length: int):
        super().__init__(length)
        self._next = 0

    def reset(self) -> None:
        self._next = 0

    def place(self, count: int, source: int = 0) -> Placement:
        before_wrap = min(count, self.length - self._next)
        segments = [Segment(self._next, source, before_wrap)]
        if before_wrap < count:
            segments.append(Segment(0, source + before_wrap, count - before_wrap))
        self._next = (self._next + count) % self.length
        return Placement(0, tuple(segments))

    def newest(self, count: int) -> list[int]:
        return [slot % self.length for slot in range(self._next - count, self._next)]


LAYOUTS: Registry[Layout] = Registry("layout", {"shift": Shift, "ring": Ring})
