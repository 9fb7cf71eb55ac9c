"""Named things that are imported on first use: backends and cache layouts.

An entry is either a class or the string ``"module:attribute"``; a string is resolved on the first
lookup, so that naming a backend never imports its vendor library.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Generic, TypeVar

from staticgen.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A lookup table from lower-case names to classes.

    Args:
        kind: what the entries are, in the singular; error messages use it (``"backend"``).
        entries: the names known from the start.
    """

    def __init__(self, kind: str, entries: dict[str, str | type[T]]):
        self.kind = kind
        self._entries: dict[str, Any] = dict(entries)
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The known names, in the order in which they were registered."""
        return list(self._entries)

    def register(self, name: str, cls: type[T]) -> None:
        """Add ``cls`` under ``name`` (any letter case).

        Raises:
            ValueError: the name is taken by another class, or is not a non-empty string.
        """
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{self.kind} name must be a non-empty string, got {name!r}")
        key = name.strip().lower()
        with self._lock:
            known = self._entries.get(key)
            if known is not None and known is not cls:
                raise ValueError(f"{self.kind} name {name!r} is already taken by {known}; choose another name")
            self._entries[key] = cls

    def get(self, name: str, remark: str = "") -> type[T]:
        """The class registered under ``name``.

        Raises:
            UnknownNameError: nothing has this name; the message lists what there is, and ends with ``remark``.
        """
        key = name.strip().lower() if isinstance(name, str) else ""
        if key not in self._entries:
            known = ", ".join(self.names())
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}: expected one of {known}" + (f" ({remark})" if remark else "")
            )
        entry = self._entries[key]
        if isinstance(entry, str):
            module, attribute = entry.split(":")
            entry = getattr(importlib.import_module(module), attribute)
            with self._lock:
                self._entries[key] = entry
        return entry
