"""Backends by name. Looking one up imports its vendor library; importing this package imports none."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from staticgen.backends.base import Backend, Program
from staticgen.errors import BackendUnavailableError
from staticgen.registry import Registry

__all__ = ["AUTO_ORDER", "BACKENDS", "Backend", "Program", "open_backend"]

logger = logging.getLogger("staticgen")

BACKENDS: Registry[Backend] = Registry(
    "backend",
    {
        "eager": "staticgen.backends.eager:EagerBackend",
        "openvino": "staticgen.backends.openvino:OpenVINOBackend",
        "npu": "staticgen.backends.npu:NPUBackend",
    },
)

# What "auto" tries, best first.
AUTO_ORDER = ("npu", "openvino", "eager")


def open_backend(name: str, device: str | None = None, options: Mapping[str, str] | None = None) -> Backend:
    """The backend called ``name``, on ``device``, or the best one present for ``"auto"``.

    Raises:
        UnknownNameError: no backend has this name.
        BackendUnavailableError: its library or device is not here.
        ValueError: a device or option that it does not have.
    """
    if not isinstance(name, str) or name.strip().lower() != "auto":
        if isinstance(name, str) and name.strip().lower() not in BACKENDS.names():
            BACKENDS.get(name)  # raises, with the list
        return BACKENDS.get(name)(device, options)
    if device is not None or options:
        raise ValueError("device and backend_options need a backend by name: backend='auto' chooses both itself")
    reasons = []
    for candidate in AUTO_ORDER:
        try:
            backend = BACKENDS.get(candidate)()
        except BackendUnavailableError as error:
            reasons.append(f"{candidate}: {error}")
            continue
        if not backend.emulated:
            logger.info("backend 'auto' chose %s", backend.description)
            return backend
    raise BackendUnavailableError("backend 'auto' found nothing that runs here; " + "; ".join(reasons))
