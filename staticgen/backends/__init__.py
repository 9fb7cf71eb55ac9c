"""Backends by name. Looking one up imports its vendor library; importing this package imports none."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from staticgen.backends.base import Backend, Program
from staticgen.errors import BackendUnavailableError, UnknownNameError
from staticgen.registry import Registry

__all__ = ["AUTO_ORDER", "BACKENDS", "Backend", "Program", "open_backend"]

logger = logging.getLogger("staticgen")

BACKENDS: Registry[Backend] = Registry(
    "backend",
    {
        "eager": "staticgen.backends.eager:EagerBackend",
        "inductor": "staticgen.backends.inductor:InductorBackend",
        "cuda": "staticgen.backends.cuda:CudaBackend",
        "xla": "staticgen.backends.xla:XlaBackend",
        "jax": "staticgen.backends.jax:JaxBackend",
        "openvino": "staticgen.backends.openvino:OpenVINOBackend",
        "npu": "staticgen.backends.npu:NPUBackend",
        "intel_npu": "staticgen.backends.intel_npu:IntelNPUBackend",
    },
)

# What "auto" tries, best first. Not intel_npu, which is archived.
AUTO_ORDER = ("npu", "openvino", "eager")


def open_backend(name: str, device: str | None = None, options: Mapping[str, str] | None = None) -> Backend:
    """The backend called ``name``, on ``device``, or the best one present for ``"auto"``.

    Raises:
        UnknownNameError: no backend has this name.
        BackendUnavailableError: its library or device is not here.
        ValueError: a device or option that it does not have.
    """
    if device is not None and not (isinstance(device, str) and device):
        raise ValueError(f"device is {device!r}, expected the backend's name for a device, or None for its default")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"backend_options must be a dict of the vendor's option names, got {type(options).__name__}")
    for key in options or ():
        if not isinstance(key, str):
            raise TypeError(f"backend_options has the key {key!r}, expected the vendor's name of an option")
    key = name.strip().lower() if isinstance(name, str) else ""
    if key not in ("auto", *BACKENDS.names()):
        raise UnknownNameError(f"unknown backend {name!r}: expected one of auto, {', '.join(BACKENDS.names())}")
    if key != "auto":
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
