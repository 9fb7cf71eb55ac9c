"""A model that was compiled ahead of time: what a bundle holds, in place of a transformers model.

Nothing here imports a model class of transformers.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from staticgen.backends.base import ProgramFiles
from staticgen.bundle import Bundle, read_bundle
from staticgen.errors import BundleError, UnsupportedModelError
from staticgen.facts import StepFacts
from staticgen.identity import Identity
from staticgen.rotary import Rotation
from staticgen.shapes import StepForm, StepShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP = "step.json"


class CompiledStep(StepFacts):
    """The facts of a step, as :func:`describe_step` wrote them."""

    def __init__(self, description: Mapping[str, Any], config: Any):
        self._config = config
        self.form = StepForm(**description["form"])
        self._identity = Identity.from_strings(description["identity"])
        self.cache_spec = self._identity.spec
        self.vocab_size = int(description["vocab_size"])
        self.logits_size = int(description["logits_size"])
        limit = description["position_limit"]
        self.position_limit = None if limit is None else int(limit)
        self._rotations = description["rotations"]

    @property
    def config(self) -> Any:
        return self._config

    def identity(self) -> Identity:
        return self._identity

    def rotations(self) -> list[Rotation | None]:
        if "reason" in self._rotations:
            raise UnsupportedModelError(self._rotations["reason"])
        known = [
            Rotation(torch.tensor(table["frequencies"], dtype=torch.float64, device="cpu"), table["interleaved"])
            for table in self._rotations["tables"]
        ]
        return [None if index is None else known[index] for index in self._rotations["layers"]]


def describe_step(step: StepFacts) -> dict[str, Any]:
    """All facts of a step, as JSON has them."""
    return {
        "form": asdict(step.form),
        "vocab_size": step.vocab_size,
        "logits_size": step.logits_size,
        "position_limit": step.position_limit,
        "rotations": _describe_rotations(step),
        "identity": step.identity().to_strings(),
    }


def _describe_rotations(step: StepFacts) -> dict[str, Any]:
    try:
        rotations = step.rotations()
    except UnsupportedModelError as error:
        return {"reason": str(error)}
    tables: list[dict[str, Any]] = []
    layers: list[int | None] = []
    for rotation in rotations:
        if rotation is None:
            layers.append(None)
            continue
        table = {"frequencies": rotation.frequencies.tolist(), "interleaved": rotation.interleaved}
        if table not in tables:
            tables.append(table)
        layers.append(tables.index(table))
    return {"tables": tables, "layers": layers}


class CompiledModel:
    """A bundle that has been read and checked; taken wherever a transformers model is.

    Attributes:
        bundle: its files and manifest.
        config, generation_config: the model's, of transformers.
        step: the facts of its step.
        max_length, batch_size, prefill_buckets, cache_sizes, layout, overflow: what it was compiled for.
    """

    def __init__(self, bundle: Bundle):
        self.bundle = bundle
        manifest = bundle.manifest
        try:
            self.config = _read_config(bundle.path("config.json"))
            self.generation_config = GenerationConfig(**json.loads(bundle.path("generation_config.json").read_bytes()))
            self.step = CompiledStep(json.loads(bundle.path(STEP).read_bytes()), self.config)
            self.backend: str = manifest["target"]["backend"]
            self.device: str = manifest["target"]["device"]
            self.compile_options: dict[str, str] = dict(manifest["target"]["compile_options"])
            shapes = manifest["shapes"]
            self.max_length, self.batch_size = int(shapes["max_length"]), int(shapes["batch_size"])
            self.prefill_buckets = tuple(shapes["prefill_buckets"])
            self.cache_sizes = tuple(shapes["cache_sizes"])
            self.layout: str = manifest["layout"]
            self.programs = {files.shape: files for files in map(self._program, manifest["programs"])}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(
                f"bundle {str(bundle.folder)!r} has parts that do not fit together ({type(error).__name__}: {error}); "
                "make it anew with `staticgen compile`"
            ) from error

    def _program(self, entry: Mapping[str, Any]) -> ProgramFiles:
        return program_files(entry, self.bundle)

    def __repr__(self) -> str:
        return (
            f"CompiledModel({str(self.bundle.folder)!r}, {self.config.model_type}, backend={self.backend!r}, "
            f"device={self.device!r}, max_length={self.max_length}, batch_size={self.batch_size})"
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, of transformers; None where the bundle was made without one."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

        name = self.bundle.manifest["tokenizer"]
        if name is None:
            return None
        # A tokenizer that is one file needs no class of its own, and AutoTokenizer takes seconds to find that out.
        cls = PreTrainedTokenizerFast if name == "tokenizer.json" else AutoTokenizer
        return cls.from_pretrained(self.bundle.folder)


def program_files(entry: Mapping[str, Any], bundle: Bundle) -> ProgramFiles:
    """What the manifest says of one program, with paths."""
    shape = StepShape(**{field.name: int(entry[field.name]) for field in fields(StepShape)})
    paths = {role: bundle.path(name) for role, name in entry["files"].items()}
    compiled = tuple((bundle.path(each["file"]), dict(each["made_for"])) for each in entry["compiled"])
    return ProgramFiles(entry["name"], shape, paths, compiled)


def _read_config(path: Path) -> Any:
    fields_of_config = json.loads(path.read_bytes())
    try:
        return AutoConfig.for_model(**fields_of_config)
    except ValueError:  # a kind of model that this release of transformers does not have, or code of its own
        return PreTrainedConfig.from_dict(fields_of_config)


# Bundles that were read, by their folder.
_read: dict[Path, CompiledModel] = {}
_lock = threading.Lock()


def open_compiled(folder: str | os.PathLike[str]) -> CompiledModel:
    """The bundle in ``folder``, read and checked; the same object as long as its files stay what they are.

    Raises:
        FileNotFoundError, BundleError: see :func:`staticgen.bundle.read_bundle`.
    """
    place = Path(folder).absolute()
    with _lock:
        known = _read.get(place)
        if known is None or not known.bundle.is_unchanged():
            known = _read[place] = CompiledModel(read_bundle(folder))
        return known


def missing_programs(model: CompiledModel, shapes: Sequence[StepShape], layout: str) -> BundleError:
    """The error for sizes that a bundle was not compiled for."""
    absent = ", ".join(str(shape) for shape in shapes if shape not in model.programs)
    present = ", ".join(map(str, model.programs))
    return BundleError(
        f"bundle {str(model.bundle.folder)!r} has no program for the step {absent}, which layout {layout!r} runs; it has "
        f"{present}: use the layout and sizes that it was compiled for, or compile another bundle"
    )
