"""Programs as OpenVINO IR over one file of weights, for the backends openvino and npu; and what compilers make of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from staticgen.backends import open_backend
from staticgen.backends.base import ProgramFiles
from staticgen.backends.ir import convert_step, write_ir
from staticgen.backends.openvino import OpenVINOBackend
from staticgen.certificate import stand_in_arguments
from staticgen.compiled import CompiledModel
from staticgen.errors import BackendUnavailableError
from staticgen.shapes import StepShape

from .compress import WEIGHT_MODES, compress_weights
from .npu import PLATFORMS, compile_blob
from .writers import Job, Writer

logger = logging.getLogger("staticgen")


class OpenVINOWriter(Writer):
    """Weights may be stored as float16 or in a mode of :func:`staticgen.compile.compress_weights`."""

    _here: OpenVINOBackend | None = None  # the target itself, if this machine has it

    def check(self, job: Job) -> None:
        if job.weights not in (None, "float16", *WEIGHT_MODES):
            raise ValueError(
                f"weights is {job.weights!r}, expected None, 'float16' or one of {', '.join(WEIGHT_MODES)}"
            )

    def write(self, job: Job, shapes: Mapping[str, StepShape], folder: Path) -> list[ProgramFiles]:
        job.report("convert", "", 0.0)
        model = convert_step(job.step)
        if job.weights in WEIGHT_MODES:
            job.report("compress", f"to {job.weights}", 0.0)
            model = compress_weights(model, job.weights)
        # NPU compilers were tried with programs as they are.
        fold = job.weights not in WEIGHT_MODES and job.profile.backend != "npu"
        half, report = job.weights == "float16", job.reporter("programs", shapes)
        programs = write_ir(job.step, shapes, folder, model, half, fold, report)
        self._here = _backend_here(job)
        return _compile_blobs(job, programs, self._here) if job.blobs else programs

    def session_arguments(self, model: CompiledModel) -> dict[str, Any]:
        return {} if self._here is not None else stand_in_arguments(model)


def _backend_here(job: Job) -> OpenVINOBackend | None:
    try:
        backend = open_backend(job.profile.backend, job.profile.device, job.profile.compile_options)
    except BackendUnavailableError:
        return None
    assert isinstance(backend, OpenVINOBackend)
    return None if backend.emulated else backend


def _compile_blobs(job: Job, programs: Sequence[ProgramFiles], backend: OpenVINOBackend | None) -> list[ProgramFiles]:
    """The programs, with what a compiler makes of them where it is at hand."""
    platform = job.profile.compile_options.get("NPU_PLATFORM")
    done = []
    for at, files in enumerate(programs, start=1):
        what = f"{files.name}, {at} of {len(programs)}"
        if backend is not None and backend.keeps_blobs:
            job.report("blobs", f"{what}, on {backend.description}", (at - 1) / len(programs))
            done.append(backend.precompile(job.step, files))
        elif backend is None and platform in PLATFORMS:
            job.report("blobs", f"{what}, for NPU {platform}", (at - 1) / len(programs))
            blob = files.paths["model"].with_suffix(".blob")
            try:
                compile_blob(files.paths["model"], blob, platform, weights=files.paths["weights"])
            except BackendUnavailableError as error:
                logger.info("the bundle has no blobs, its programs are compiled where they run: %s", error)
                return list(programs)
            done.append(replace(files, compiled=((blob, {"npu_platform": platform}),)))
        else:
            return list(programs)
    return done
