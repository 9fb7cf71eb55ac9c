"""Intel's NPU compiler: OpenVINO IR in, one blob for one generation of NPU out. No NPU is needed for that."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from staticgen.errors import BackendUnavailableError, CompileError, UnknownNameError

PLATFORMS = {"3720": "Meteor Lake", "4000": "Lunar Lake", "5010": "Panther Lake"}
COMPILER_VARIABLE = "STATICGEN_NPU_COMPILER"
UNAVAILABLE = 69  # the exit status of a compiler that cannot run here, as sysexits.h has it
_MOST_SECONDS = 3600


@dataclass(frozen=True)
class NPUBlob:
    """What a compiler made.

    Attributes:
        path: the blob.
        nbytes: its size.
        seconds: how long it took, the compiler's start included.
    """

    path: Path
    nbytes: int
    seconds: float


def compile_blob(
    model: str | Path,
    blob: str | Path,
    platform: str,
    *,
    weights: str | Path | None = None,
    compiler: str | Path | None = None,
) -> NPUBlob:
    """Compile one static model for one generation of NPU.

    It takes the compiler that is named; or the executable that the environment variable ``STATICGEN_NPU_COMPILER``
    names; or that of OpenVINO's NPU plugin, which comes with Intel's NPU driver and, on Windows, with OpenVINO.
    An executable is called as ``COMPILER MODEL.xml OUT.blob PLATFORM`` and exits with 0, with 69 if it cannot run here,
    or with something else if it refuses the model; what it prints says why.

    Args:
        model: an ``.xml`` file in which every dimension is fixed.
        blob: the file to write.
        platform: one of :data:`PLATFORMS`.
        weights: the model's ``.bin`` file; None for the one beside it.
        compiler: an executable.

    Raises:
        UnknownNameError: there is no such platform.
        FileNotFoundError: the model or its weights are missing.
        BackendUnavailableError: no compiler is at hand; the message says what is needed.
        CompileError: the compiler refuses the model, in its own words.
    """
    if platform not in PLATFORMS:
        known = ", ".join(f"{number} ({name})" for number, name in PLATFORMS.items())
        raise UnknownNameError(f"unknown NPU platform {platform!r}: expected one of {known}")
    source, target = Path(model).absolute(), Path(blob).absolute()
    numbers = source.with_suffix(".bin") if weights is None else Path(weights).absolute()
    for path in (source, numbers):
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is missing; a bundle has models in programs/ and their weights beside that folder"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    executable = find_compiler(compiler)
    target.unlink(missing_ok=True)  # one of an earlier call would pass for a new one
    start = time.perf_counter()
    if executable is None:
        _compile_with_plugin(source, numbers, target, platform)
    else:
        _compile_with(executable, source, numbers, target, platform)
    if not target.is_file() or not target.stat().st_size:
        raise CompileError(f"the NPU compiler wrote no blob for {str(source)!r} on NPU {platform}")
    return NPUBlob(target, target.stat().st_size, time.perf_counter() - start)


def find_compiler(given: str | Path | None = None) -> Path | None:
    """The executable that is given or named by ``STATICGEN_NPU_COMPILER``; None where neither is.

    Raises:
        BackendUnavailableError: it is not there, or cannot be executed.
    """
    named = given if given is not None else os.environ.get(COMPILER_VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser().absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        source = "compiler" if given is not None else COMPILER_VARIABLE
        raise BackendUnavailableError(
            f"{source} is {str(named)!r}, which is no executable file; expected one that takes MODEL.xml OUT.blob PLATFORM"
        )
    return path


def _compile_with(executable: Path, source: Path, weights: Path, target: Path, platform: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".staticgen-npu-", dir=target.parent) as folder:
        model = source
        if weights != source.with_suffix(".bin"):  # a compiler looks for them beside the model
            model = Path(folder, source.name)
            shutil.copy(source, model)
            try:
                os.link(weights, model.with_suffix(".bin"))
            except OSError:  # on another file system
                shutil.copy(weights, model.with_suffix(".bin"))
        command = [str(executable), str(model), str(target), platform]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_MOST_SECONDS, check=False
            )
        except OSError as error:
            raise BackendUnavailableError(f"the NPU compiler {str(executable)!r} does not start: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                f"the NPU compiler took more than {_MOST_SECONDS} s for {str(source)!r} on NPU {platform}"
            ) from error
    said = (done.stdout + done.stderr).strip()
    if done.returncode == UNAVAILABLE:
        raise BackendUnavailableError(f"the NPU compiler {str(executable)!r} cannot run here: {said}")
    if done.returncode:
        target.unlink(missing_ok=True)  # half of one, perhaps
        raise CompileError(f"the NPU compiler refused {str(source)!r} on NPU {platform}: {_reason(said)}")


def _compile_with_plugin(source: Path, weights: Path, target: Path, platform: str) -> None:
    core = ov.Core()
    read = core.read_model(source, weights)
    try:
        compiled = core.compile_model(read, "NPU", {"NPU_PLATFORM": platform, "NPU_COMPILER_TYPE": "PLUGIN"})
        exported = compiled.export_model().getvalue()
    except RuntimeError as error:
        said = str(error)
        if "Cannot load library" in said or "loading failed" in said or "not registered" in said:
            raise BackendUnavailableError(
                "no NPU compiler is at hand. OpenVINO's packages for Linux have none: install Intel's NPU driver with its compiler "
                f"(libopenvino_intel_npu_compiler), or let {COMPILER_VARIABLE} name an executable that takes MODEL.xml OUT.blob "
                f"PLATFORM. OpenVINO said: {_reason(said)}"
            ) from error
        raise CompileError(f"the NPU compiler refused {str(source)!r} on NPU {platform}: {_reason(said)}") from error
    target.write_bytes(exported)


def _reason(said: str) -> str:
    """The lines that say why, of an output that is mostly where in the compiler's source it was."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "[ERROR]" in line] or [
        line for line in lines if not line.startswith("Exception from")
    ]
    return " | ".join((telling or lines or ["it said nothing"])[:4])[:1500]
