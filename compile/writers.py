"""What a bundle leaves to its target: how programs get into it, and how they are run where it is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from staticgen.backends.base import ProgramFiles
from staticgen.compiled import CompiledModel
from staticgen.errors import BackendUnavailableError
from staticgen.profiles import Profile
from staticgen.registry import Registry
from staticgen.shapes import StepShape
from staticgen.step import Step


@dataclass
class Job:
    """What is compiled, with every choice made.

    Attributes:
        model, tokenizer, profile, layout, max_length, batch_size, prefill_buckets, cache_sizes, weights, blobs, source,
            report: see :func:`staticgen.compile.compile_bundle`.
        step: the model's, in the profile's form; there after :meth:`Writer.check`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    profile: Profile
    layout: str
    max_length: int
    batch_size: int
    prefill_buckets: tuple[int, ...]
    cache_sizes: tuple[int, ...]
    weights: str | None
    blobs: bool
    source: str | None
    report: Callable[[str, str, float], None]
    step: Step = field(init=False)

    def reporter(self, stage: str, shapes: Mapping[str, StepShape]) -> Callable[[str], None]:
        """What is called with the name of each program of ``shapes`` as it begins."""
        places = {name: at for at, name in enumerate(shapes)}

        def report(name: str) -> None:
            at, total = places[name], len(places)
            self.report(stage, f"{name}, {at + 1} of {total}", at / total)

        return report


class Writer(ABC):
    """How programs for the backends of one kind are written. One object makes one bundle.

    What it wrote is read by :meth:`staticgen.backends.Backend.load` of the profile's backend.
    """

    @abstractmethod
    def check(self, job: Job) -> None:
        """Refuse what this writer has no use for, before anything is written.

        Raises:
            ValueError: ``job.weights`` or ``job.blobs`` is none that it knows.
            BackendUnavailableError: what it needs for writing is not here.
        """

    @abstractmethod
    def write(self, job: Job, shapes: Mapping[str, StepShape], folder: Path) -> list[ProgramFiles]:
        """Write the step at every size into ``folder``, which is the bundle's and exists.

        Args:
            job: what is compiled.
            shapes: the sizes, by their programs' names.
            folder: files go to ``programs/`` in it, and what programs share beside that.

        Returns:
            one for each size, in their order; every file that a program is loaded from has a role of its own.

        Raises:
            CompileError: the step cannot be converted or compiled.
        """

    @abstractmethod
    def session_arguments(self, model: CompiledModel) -> dict[str, Any]:
        """How the bundle that was written is run here: on the target if it is here, or on what stands for it.

        Returns:
            arguments of :class:`staticgen.Session`.
        """

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """What the manifest says besides, by its keys and those below them; asked for when all is written."""
        return {}


# By the backends of the profiles that they write for.
WRITERS: Registry[Writer] = Registry(
    "writer",
    {
        "openvino": "staticgen.compile.openvino_writer:OpenVINOWriter",
        "npu": "staticgen.compile.openvino_writer:OpenVINOWriter",
        "inductor": "staticgen.compile.inductor_writer:InductorWriter",
        "xla": "staticgen.compile.xla_writer:XlaWriter",
    },
)


def writer_for(profile: Profile) -> Writer:
    """A new writer for a profile's backend.

    Raises:
        BackendUnavailableError: its backend has none; the message lists those that have.
    """
    if profile.backend not in WRITERS.names():
        raise BackendUnavailableError(
            f"profile {profile.name!r} is for backend {profile.backend!r}, for which no bundle can be made; profiles of the "
            f"backends {', '.join(WRITERS.names())} can be compiled for"
        )
    return WRITERS.get(profile.backend)()
