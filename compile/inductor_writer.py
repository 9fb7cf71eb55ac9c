"""Programs as packages of machine code over one file of weights, for the backend inductor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staticgen.backends.base import ProgramFiles
from staticgen.backends.inductor import InductorBackend, require_compiler
from staticgen.compiled import CompiledModel
from staticgen.shapes import StepShape

from .writers import Job, Writer


class InductorWriter(Writer):
    """Compiles for the CPU of this machine: a bundle runs on those that have all of its instructions."""

    def check(self, job: Job) -> None:
        if job.weights is not None:
            raise ValueError(
                f"weights is {job.weights!r}, but profile {job.profile.name!r} stores them as they are in the model: leave "
                "weights out, or give the model another dtype"
            )
        if not job.blobs:
            raise ValueError(
                f"blobs is False, but what profile {job.profile.name!r} compiles is all that a bundle has: leave it out"
            )
        require_compiler()

    def write(self, job: Job, shapes: Mapping[str, StepShape], folder: Path) -> list[ProgramFiles]:
        backend = InductorBackend(job.profile.device, job.profile.compile_options)
        return backend.write(job.step, shapes, folder, job.reporter("compile", shapes))

    def session_arguments(self, model: CompiledModel) -> dict[str, Any]:
        return {}
