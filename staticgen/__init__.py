"""Text generation with static shapes: every tensor has a fixed size, every step is compiled once.

>>> import staticgen
>>> staticgen.generate(model, ids, max_length=512, backend="openvino")  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staticgen.completions import Completed, Completion, completion
    from staticgen.constraints import grammar, json_schema, regex
    from staticgen.custom import custom_generate
    from staticgen.errors import (
        BackendUnavailableError,
        BundleError,
        CompileError,
        NothingAllowedError,
        RecompileError,
        SessionBusyError,
        StaleSessionError,
        UnknownNameError,
        UnsupportedModelError,
    )
    from staticgen.generation import generate, load, stream
    from staticgen.layouts import Layout, Placement, RowSegment, Segment, register_layout
    from staticgen.prefixes import Prefix, load_prefix
    from staticgen.session import Session
    from staticgen.stats import CallStats, SessionStats

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "BundleError",
    "CallStats",
    "CompileError",
    "Completed",
    "Completion",
    "Layout",
    "NothingAllowedError",
    "Placement",
    "Prefix",
    "RecompileError",
    "RowSegment",
    "Segment",
    "Session",
    "SessionBusyError",
    "SessionStats",
    "StaleSessionError",
    "UnknownNameError",
    "UnsupportedModelError",
    "completion",
    "custom_generate",
    "generate",
    "grammar",
    "json_schema",
    "load",
    "load_prefix",
    "regex",
    "register_layout",
    "stream",
]

# Where names come from that are not errors. They are imported on first use: torch and transformers take seconds,
# and `staticgen --help` needs neither.
_MODULES = {
    "CallStats": "stats",
    "Completed": "completions",
    "Completion": "completions",
    "Layout": "layouts",
    "Placement": "layouts",
    "Prefix": "prefixes",
    "RowSegment": "layouts",
    "Segment": "layouts",
    "Session": "session",
    "SessionStats": "stats",
    "custom_generate": "custom",
    "completion": "completions",
    "generate": "generation",
    "grammar": "constraints",
    "json_schema": "constraints",
    "regex": "constraints",
    "load": "generation",
    "load_prefix": "prefixes",
    "register_layout": "layouts",
    "stream": "generation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'staticgen' has no attribute {name!r}")
    module = importlib.import_module(f"staticgen.{_MODULES.get(name, 'errors')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
