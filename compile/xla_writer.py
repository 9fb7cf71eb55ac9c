"""Programs as StableHLO over one file of weights, for the backends xla and jax."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch

from staticgen.backends.base import ProgramFiles, apart
from staticgen.backends.hlo import FUNCTIONS, HLO, WEIGHTS, drafts_of, turns_of
from staticgen.backends.xla import XlaBackend
from staticgen.certificate import stand_in_arguments
from staticgen.compiled import CompiledModel
from staticgen.errors import BackendUnavailableError, UnsupportedModelError
from staticgen.functions import Lowered
from staticgen.shapes import StepShape

from .tpu import account_all
from .writers import Job, Writer

logger = logging.getLogger("staticgen")

_WEIGHTS_FILE = "weights.safetensors"


class XlaWriter(Writer):
    """Weights are kept in the model's own dtype. torch-xla writes the programs; see :mod:`staticgen.device_functions`."""

    def check(self, job: Job) -> None:
        if job.weights is not None:
            raise ValueError(
                f"weights is {job.weights!r}, expected None for profile {job.profile.name!r}: XLA programs keep weights in the "
                "model's dtype; load the model in bfloat16 for half the bytes"
            )
        self._backend = XlaBackend("cpu")
        self._accounts: dict[str, Any] = {}
        self._options, self._mesh = job.profile.compile_options, job.profile.chips

    def write(self, job: Job, shapes: Mapping[str, StepShape], folder: Path) -> list[ProgramFiles]:
        step, backend = job.step, self._backend
        job.report("convert", "", 0.0)
        run_step, tensors = backend.take(step)
        sizes = [(shape.tokens, shape.cache_length) for shape in shapes.values()]
        report = job.reporter("programs", shapes)
        (folder / "programs").mkdir()
        written, heavy = [], {}
        for name, shape in shapes.items():
            report(name)
            drafts = list(drafts_of(step, shape, sizes, run_step))
            if shape.tokens == 1:
                with suppress(UnsupportedModelError):  # keys that cannot be moved: no layout "sink" for this model
                    drafts += turns_of(step, shape, step.rotations())
            functions: dict[str, Any] = {}
            paths = {FUNCTIONS: folder / "programs" / f"{name}.json", WEIGHTS: folder / _WEIGHTS_FILE}
            for draft in drafts:
                lowered, constants = backend.lower(draft)
                tensors |= constants
                functions[draft.name] = lowered.function.to_dict()
                paths |= _write(lowered, folder / "programs", name)
                if draft.weighs:
                    heavy[f"{name}.{draft.name}"] = lowered
            paths[FUNCTIONS].write_text(json.dumps(functions), encoding="utf-8")
            written.append(ProgramFiles(name, shape, paths))
        self._accounts = _account(job, heavy)
        safetensors.torch.save_file(apart(tensors), folder / _WEIGHTS_FILE)
        return written

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        entries: dict[str, Any] = {"compiled": self._accounts} if self._accounts else {}
        if self._mesh > 1:
            entries["compile_options"] = {**self._options, "mesh": str(self._mesh)}
        return {"target": entries}

    def session_arguments(self, model: CompiledModel) -> dict[str, Any]:
        return stand_in_arguments(model)


def _account(job: Job, programs: Mapping[str, Lowered]) -> dict[str, Any]:
    """What the TPU's compiler says about each function that runs the step; nothing where it is not installed."""
    if job.profile.tpu is None or not job.blobs:
        return {}
    job.report("target", f"{len(programs)} functions, for {job.profile.name}", 0.0)
    try:
        return {name: found.to_dict() for name, found in account_all(programs, job.profile).items()}
    except BackendUnavailableError as error:
        logger.info("the programs were not compiled for %s: %s", job.profile.name, error)
        return {}


def _write(lowered: Lowered, folder: Path, program: str) -> dict[str, Path]:
    """The files of a function by their roles."""
    name = lowered.function.name
    paths = {name: folder / f"{program}.{name}.stablehlo", name + HLO: folder / f"{program}.{name}.hlo"}
    paths[name].write_bytes(lowered.stablehlo)
    paths[name + HLO].write_bytes(lowered.hlo)
    return paths
