"""Text generation with static shapes: every tensor has a fixed size, every step is compiled once.

>>> import staticgen
>>> staticgen.generate(model, ids, max_length=512, backend="openvino")  # doctest: +SKIP
"""

from staticgen.errors import (
    BackendUnavailableError,
    CompileError,
    RecompileError,
    SessionBusyError,
    StaleSessionError,
    UnknownNameError,
    UnsupportedModelError,
)
from staticgen.generation import generate, stream
from staticgen.session import Session
from staticgen.stats import CallStats, SessionStats

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "CallStats",
    "CompileError",
    "RecompileError",
    "Session",
    "SessionBusyError",
    "SessionStats",
    "StaleSessionError",
    "UnknownNameError",
    "UnsupportedModelError",
    "generate",
    "stream",
]
