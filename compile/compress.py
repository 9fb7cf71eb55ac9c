"""Weights of a converted step as small whole numbers, by NNCF."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import openvino as ov

from staticgen.errors import BackendUnavailableError, CompileError, UnknownNameError

# What each mode asks of NNCF. Symmetric, because an NPU's compiler would turn zero points back into float16 weights;
# what int4 leaves alone (the head, and embeddings) becomes int8.
WEIGHT_MODES: dict[str, dict[str, Any]] = {
    "int8": {"mode": "int8_sym"},
    "int4": {"mode": "int4_sym", "group_size": -1},
    "int4-g64": {"mode": "int4_sym", "group_size": 64},
}


def compress_weights(model: ov.Model, mode: str) -> ov.Model:
    """A copy of a model whose weights are stored as whole numbers and multiplied by scales where they are used.

    It looks at the weights alone, needs no text, and gives the same numbers every time.

    Args:
        model: a step with open sizes, as :func:`staticgen.backends.ir.convert_step` makes it; it stays as it is.
        mode: ``int8`` (a scale for each output channel), ``int4`` (the same), or ``int4-g64`` (a scale for every 64
            weights of a channel, where the channels can be divided so).

    Raises:
        UnknownNameError: there is no such mode.
        BackendUnavailableError: NNCF is not installed.
        CompileError: NNCF refuses the model, in its own words.
    """
    if mode not in WEIGHT_MODES:
        raise UnknownNameError(f"unknown weight mode {mode!r}: expected one of {', '.join(WEIGHT_MODES)}")
    nncf = _import_nncf()
    settings = {**WEIGHT_MODES[mode]}
    settings["mode"] = nncf.CompressWeightsMode(settings["mode"])
    if "group_size" in settings:
        fallback = nncf.GroupSizeFallbackMode.IGNORE  # a layer that 64 does not divide becomes int8
        settings |= {
            "ratio": 1.0,
            "backup_mode": nncf.BackupMode.INT8_SYM,
            "advanced_parameters": nncf.AdvancedCompressionParameters(group_size_fallback_mode=fallback),
        }
    compress = inspect.unwrap(nncf.compress_weights)  # what it is wrapped in sends usage data
    try:
        with _quiet():
            return compress(model.clone(), **settings)
    except Exception as error:
        raise CompileError(f"NNCF cannot compress the weights to {mode!r}: {error}") from error


def _import_nncf() -> Any:
    """NNCF, which would otherwise note its use in a file in the user's home and send it, from its import on."""
    hidden = "openvino_telemetry"
    before = sys.modules.get(hidden)
    sys.modules[hidden] = None  # type: ignore[assignment] # as if it were not installed
    try:
        with _quiet():
            import nncf  # noqa: PLC0415 - only whoever compresses needs it
    except ImportError as error:
        raise BackendUnavailableError("compressing weights needs NNCF: pip install 'staticgen[nncf]'") from error
    finally:
        del sys.modules[hidden]
        if before is not None:
            sys.modules[hidden] = before
    return nncf


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep NNCF's progress bars and tables off standard output."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
