"""Backend ``jax``: bundles for XLA through jax's own runtime, with neither torch-xla nor its release of torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from staticgen.backends.hlo import HloBackend
from staticgen.device_functions import Draft, RunStep
from staticgen.engines import Executable
from staticgen.errors import BackendUnavailableError
from staticgen.jax_engine import JaxEngine

if TYPE_CHECKING:
    from staticgen.step import Step

MESH = "mesh"


class JaxBackend(HloBackend):
    """``device`` is ``cpu``, ``tpu`` or ``gpu``, one of several as ``tpu:1``; None for the one that jax prefers.

    ``options``: ``{"mesh": "4"}`` divides every program over so many devices; the others go to the device's compiler by
    XLA's names, those of TPUs to TPUs only.
    """

    name = "jax"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        given = dict(options or {})
        mesh = read_mesh(given.pop(MESH, "1"))
        engine = JaxEngine(device, mesh=mesh, options=given)
        if engine.devices[0].platform != "tpu":  # a bundle for TPUs has them
            engine.options = {name: value for name, value in given.items() if not name.startswith("xla_tpu_")}
        super().__init__(engine.name, None, engine)
        self.emulated = engine.devices[0].platform == "cpu"

    @property
    def made_for(self) -> dict[str, Any]:
        return {"backend": self.name, "device": self.device, "jax": version("jax")}

    def _runner(self, step: Step) -> RunStep:
        raise BackendUnavailableError(
            "backend 'jax' runs bundles: make one with `staticgen compile MODEL --profile tpu-v5e -o DIR`, in an environment "
            "with the extra xla, and give its folder for a model. For a model itself: backend='xla'"
        )

    def _make(self, draft: Draft) -> Executable:
        raise AssertionError("it has no step")


def read_mesh(text: str) -> int:
    """How many devices share a program, by the option ``mesh``.

    Raises:
        ValueError: it is no whole number from 1 on.
    """
    if not (isinstance(text, str) and text.isdecimal() and int(text) >= 1):
        raise ValueError(f"backend_options has mesh={text!r}, expected how many devices share a program, as '4'")
    return int(text)
