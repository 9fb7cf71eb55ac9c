"""The TPU's compiler: StableHLO in, out its own account of memory and work on the chip. No TPU is needed for that."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from staticgen.errors import BackendUnavailableError, CompileError
from staticgen.functions import WEIGHT, Function, Lowered
from staticgen.jax_programs import CACHE, divided
from staticgen.profiles import Profile, load_profile

_MOST_SECONDS = 3600
# libtpu asks a Google Cloud machine for these and fails elsewhere. The chip that it compiles for is another matter. It
# also takes a lock, since a TPU is one process's at a time; none is used here.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The compiler prefetches operands into the chip's vector memory, and counts one that is fetched in four slices five times:
# the whole of it for each slice, and what is read there; one that is copied at once three times. Without memory space
# assignment every operand is read where it lies, and what is counted are bytes of the chip's main memory.
_READING_OPTIONS = {"xla_msa_enable": "false"}


@dataclass(frozen=True)
class TPUAccount:
    """What the compiler says about one program, in bytes and operations of each chip.

    Attributes:
        target: the profile's name.
        chips: how many share the program.
        compiler: jax and libtpu, with their versions.
        seconds: how long it compiled.
        arguments: bytes of the inputs, as the chip pads them.
        outputs: bytes of the outputs that take no input's memory.
        aliased: bytes of the outputs that do; they are among the arguments.
        temporary: bytes of what lives only during a call, in the chip's main memory.
        code: bytes of the program itself.
        capacity: bytes of the chip's memory, by the profile; None where it does not say.
        weights: bytes of the weights among the inputs, without padding.
        cache: bytes of the caches among the inputs, without padding.
        bytes_accessed: bytes that a call reads and writes in main memory if nothing is prefetched, counted per
            operation: the program is compiled once more for this, without memory space assignment. Prefetching changes
            when these bytes are read, not how many they are. None where the compiler refuses that form alone.
        flops: operations of a call as the compiler counts them. A product with one row is done by its vector units in
            float32, and the conversions are counted too.
    """

    target: str
    chips: int
    compiler: str
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    capacity: float | None
    weights: int
    cache: int
    bytes_accessed: int | None
    flops: int

    @property
    def memory(self) -> int:
        """Bytes that the program needs on a chip in all."""
        return self.arguments + self.outputs + self.temporary + self.code

    @property
    def fits(self) -> bool | None:
        """Whether that is no more than the chip has; None where the profile does not say how much it has."""
        return None if self.capacity is None else self.memory <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """As a manifest has it."""
        return {**asdict(self), "memory": self.memory, "fits": self.fits}


def account(lowered: Lowered, target: str | Path | Profile) -> TPUAccount:
    """Compile one program for a TPU that need not be here, and say what the compiler says about it.

    Args:
        lowered: the program, for one device; it is divided over the chips that the target has.
        target: a profile with an entry ``tpu``, or its name.

    Raises:
        UnknownNameError, FileNotFoundError: there is no such profile.
        ValueError: the profile is no TPU's.
        BackendUnavailableError: jax or libtpu is missing, or libtpu does not start.
        CompileError: the compiler refuses the program, in its own words.
    """
    return account_all({"": lowered}, target)[""]


def account_all(
    programs: Mapping[str, Lowered], target: str | Path | Profile, executables: Mapping[str, Path] | None = None
) -> dict[str, TPUAccount]:
    """:func:`account` of several programs, by their names, in one process.

    Args:
        programs: by names that errors have.
        target: a profile with an entry ``tpu``, or its name.
        executables: by the same names, files to write what was compiled into, for
            :meth:`staticgen.jax_engine.JaxEngine.load_compiled` on the chips. No such file has been on a TPU yet.

    Raises:
        the same; a :class:`CompileError` names the first program that the compiler refuses.
    """
    profile = target if isinstance(target, Profile) else load_profile(target)
    if profile.tpu is None:
        raise ValueError(f"profile {profile.name!r} is no TPU's; expected one with an entry tpu, such as tpu-v5e")
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="staticgen-tpu-") as folder:
        entries = []
        for place, (name, lowered) in enumerate(programs.items()):
            path = Path(folder, f"{place}.stablehlo")
            path.write_bytes(lowered.stablehlo)
            kept = (executables or {}).get(name)
            entries.append(
                {
                    "function": lowered.function.to_dict(),
                    "stablehlo": str(path),
                    "executable": None if kept is None else str(kept.absolute()),
                }
            )
        request = {
            **asdict(profile.tpu),
            "options": profile.compile_options,
            "reading_options": _READING_OPTIONS,
            "programs": entries,
        }
        answers, said = _ask(request, Path(folder))
    accounts = {}
    for place, (name, lowered) in enumerate(programs.items()):
        what = (
            f"program {name!r}, function {lowered.function.name!r}" if name else f"function {lowered.function.name!r}"
        )
        if place >= len(answers):
            raise CompileError(f"the TPU compiler gave up on {what} for {profile.name}: {_reason(said)}")
        answer = answers[place]
        if "error" in answer:
            raise CompileError(f"the TPU compiler refused {what} for {profile.name}: {answer['error'][:1500]}")
        accounts[name] = TPUAccount(
            target=profile.name,
            chips=profile.chips,
            compiler=compiler,
            capacity=None if profile.memory is None else profile.memory.value,
            weights=_bytes(lowered.function, WEIGHT, profile.chips),
            cache=_bytes(lowered.function, CACHE, profile.chips),
            **answer,
        )
    return accounts


def _compiler() -> str:
    """The compiler in words."""
    found = []
    for package in ("jax", "libtpu"):
        if importlib.util.find_spec(package) is None:
            raise BackendUnavailableError(
                f"compiling for a TPU needs {package}, which is not installed; install staticgen with the extra tpu-aot: "
                "pip install 'staticgen[tpu-aot]'"
            )
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # from elsewhere than a package
            found.append(package)
    return ", ".join(found)


def _ask(request: Mapping[str, Any], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The worker's answers, and what it printed."""
    question, answers = folder / "request.json", folder / "answers.jsonl"
    question.write_text(json.dumps(request), encoding="utf-8")
    # By its path: as a module it would take the whole package of the compiler along.
    command = [sys.executable, "-P", str(Path(__file__).with_name("tpu_worker.py")), str(question), str(answers)]
    try:
        done = subprocess.run(
            command,
            # Flags of the user's are for another compiler: that of the host.
            env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | _ENVIRONMENT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"the TPU compiler took more than {_MOST_SECONDS} s") from error
    said = (done.stdout + done.stderr).strip()
    if not answers.is_file():
        lock = "; another process has it, wait until that has ended" if "lockfile" in said else ""
        raise BackendUnavailableError(
            f"libtpu does not start for topology {request['topology']!r}{lock}: {_reason(said)}"
        )
    return [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()], said


def _bytes(function: Function, prefix: str | tuple[str, ...], chips: int) -> int:
    """Bytes on each chip of the inputs whose names begin so, without padding."""
    return sum(
        spec.nbytes // (1 if divided(name, spec.shape, chips) is None else chips)
        for name, spec in function.inputs.items()
        if name.startswith(prefix)
    )


def _reason(said: str) -> str:
    """The line that says why, of an output that is mostly where in the compiler's code it was."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "Check failed" in line] or lines[-1:] or ["it said nothing"]
    return telling[0][:1500]
