"""Who uses a session: one call at a time."""

from __future__ import annotations

import threading

from staticgen.errors import SessionBusyError


class Lock:
    """A session's lock, which knows the thread that holds it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.user: threading.Thread | None = None


class Hold:
    """Holds a lock for one call: other threads wait, the same thread gets an error, not a deadlock.

    A stream may be continued in another thread, which then holds the session.
    """

    def __init__(self, lock: Lock):
        self._lock = lock

    def __enter__(self) -> Hold:
        if self._lock.user is threading.current_thread():
            raise SessionBusyError(
                "this thread holds an unfinished stream of the session; close it (stream.close()), or use a "
                "staticgen.Session for each"
            )
        self._lock.lock.acquire()
        self.resume()
        return self

    def resume(self) -> None:
        """The thread that runs now is the one that holds."""
        self._lock.user = threading.current_thread()

    def __exit__(self, *error: object) -> None:
        self._lock.user = None
        self._lock.lock.release()
