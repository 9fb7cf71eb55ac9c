"""The errors that staticgen raises besides ValueError and TypeError."""

from __future__ import annotations


class UnknownNameError(ValueError):
    """A backend, layout, device or profile was named that does not exist; the message lists what does."""


class UnsupportedModelError(ValueError):
    """The model cannot run as a static step; the message names its type and the reason."""


class BackendUnavailableError(RuntimeError):
    """The backend's library or device is missing here; the message lists what was found and what to do."""


class RecompileError(RuntimeError):
    """Something would have been compiled after warm-up: a shape that the session has no program for."""


class SessionBusyError(RuntimeError):
    """A session was called again by the thread that still holds an open stream of it."""


class StaleSessionError(RuntimeError):
    """The model changed after a session was compiled from it, so that the session would give the old tokens."""


class CompileError(RuntimeError):
    """A compiler refused the step; the message holds its words and the size."""


class NothingAllowedError(ValueError):
    """A token mask left a running row no token to take; the message names the row, the step and the reason."""


class BundleError(RuntimeError):
    """A bundle cannot be used: damaged, of another version, or for another target; says which file and what to do."""
