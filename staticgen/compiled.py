"""A model that was compiled ahead of time: what a bundle holds, in place of a transformers model.

Nothing here imports a model class of transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from staticgen.backends.base import ProgramFiles
from staticgen.bundle import Bundle, read_bundle
from staticgen.errors import BundleError, UnknownNameError, UnsupportedModelError
from staticgen.facts import StepFacts
from staticgen.identity import Identity
from staticgen.layouts import LAYOUTS
from staticgen.rotary import Rotation
from staticgen.shapes import CacheSpec, StepForm, StepShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP = "step.json"
# The classes of transformers that may read a bundle's tokenizer.
TOKENIZERS = ("PreTrainedTokenizerFast", "AutoTokenizer")


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

    Args:
        bundle: its files and manifest.
        unfinished: it is being made, and has no certificate yet.

    Attributes:
        bundle: as given.
        config, generation_config: the model's, of transformers.
        step: the facts of its step.
        max_length, batch_size, prefill_buckets, cache_sizes, layout, overflow: what it was compiled for.
    """

    def __init__(self, bundle: Bundle, unfinished: bool = False):
        self.bundle = bundle
        try:
            self._read(bundle.manifest)
            self._check()
            if not unfinished:
                _check_words(bundle.manifest)
        except BundleError:
            raise
        except Exception as error:  # configs of transformers raise anything
            raise self._misfit(f"{type(error).__name__}: {error}") from error
        if self.layout not in LAYOUTS.names():
            raise UnknownNameError(
                f"bundle {str(bundle.folder)!r} was compiled for layout {self.layout!r}, which is none of "
                f"{', '.join(LAYOUTS.names())}; register it with staticgen.register_layout before the bundle is loaded"
            )

    def _read(self, manifest: Mapping[str, Any]) -> None:
        path = self.bundle.path
        self.config = _read_config(path("config.json"))
        self.generation_config = GenerationConfig(**json.loads(path("generation_config.json").read_bytes()))
        self.step = CompiledStep(json.loads(path(STEP).read_bytes()), self.config)
        target, shapes = _field(manifest, "target", dict), _field(manifest, "shapes", dict)
        self.backend: str = _field(target, "backend", str)
        self.device: str = _field(target, "device", str)
        options = _field(target, "compile_options", dict)
        self.compile_options: dict[str, str] = {name: _field(options, name, str) for name in options}
        self.max_length, self.batch_size = _count(shapes, "max_length"), _count(shapes, "batch_size")
        self.prefill_buckets, self.cache_sizes = _counts(shapes, "prefill_buckets"), _counts(shapes, "cache_sizes")
        self.layout: str = _field(manifest, "layout", str)
        entries = _field(manifest, "programs", list)
        self.programs = {files.shape: files for files in (program_files(entry, self.bundle) for entry in entries)}

    def _check(self) -> None:
        """Refuse files that are each as they were written, but do not belong together."""
        manifest, spec = self.bundle.manifest, self.step.cache_spec
        known, identity = _field(manifest, "model", dict), self.step.identity()
        longest = self.max_length if spec.longest is None else min(self.max_length, spec.longest)
        shapes = set(self.programs)
        lengths = {min(size, longest) for size in self.cache_sizes}
        cached = {(count, longest) for count in self.prefill_buckets} | {(1, length) for length in lengths}
        limit = self.step.position_limit or self.max_length
        recomputed = {(min(size, limit), 1) for size in self.cache_sizes}
        pairs = {
            "model_type": (known["model_type"], self.config.model_type),
            "weights_digest": (known["weights_digest"], identity.weights),
            "config_sha256": (known["config_sha256"], config_sha256(identity)),
            "cache": (manifest["cache"], describe_cache(spec, self.batch_size, self.max_length)),
            "dtype": (manifest["dtype"], str(spec.dtype).removeprefix("torch.")),
            "vocab_size": (known["vocab_size"], self.step.vocab_size),
            "cache_sizes": (self.cache_sizes[-1], self.max_length),
        }
        for name, (one, other) in pairs.items():
            if json.dumps(one) != json.dumps(other):  # 1 is not true
                raise self._misfit(f"{name} is {one!r} in one file and {other!r} in another")
        wanted = [{StepShape(self.batch_size, *size) for size in sizes} for sizes in (cached, recomputed)]
        if shapes not in wanted or len(shapes) != len(manifest["programs"]):
            raise self._misfit(f"its programs are {', '.join(map(str, self.programs))}, and its sizes want others")

    def _misfit(self, reason: str) -> BundleError:
        return BundleError(
            f"bundle {str(self.bundle.folder)!r} has parts that do not fit together ({reason}); make it anew with "
            "`staticgen compile`"
        )

    def __repr__(self) -> str:
        return (
            f"CompiledModel({str(self.bundle.folder)!r}, {self.config.model_type}, backend={self.backend!r}, "
            f"device={self.device!r}, max_length={self.max_length}, batch_size={self.batch_size})"
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, of transformers; None where the bundle was made without one."""
        described = self.bundle.manifest["tokenizer"]
        if described is None:
            return None
        try:
            return read_tokenizer(described["read_by"], self.bundle.folder)
        except Exception as error:  # of tokenizers, which has no class of its own for them, and of transformers
            raise self._misfit(f"the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def read_tokenizer(reader: str, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer whose files are in ``folder``, read by one of :data:`TOKENIZERS`."""
    if reader not in TOKENIZERS:
        raise ValueError(f"its class is {reader!r}, expected one of {', '.join(TOKENIZERS)}")
    # Never code that came with a tokenizer, and no question whether to run it.
    return getattr(transformers, reader).from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _check_words(manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest without what is only for people, so that whoever prints it need not look."""
    model, certificate = _field(manifest, "model", dict), _field(manifest, "certificate", dict)
    _count(model, "parameters")
    texts = [
        manifest["created"],
        manifest["weights"],
        manifest["target"]["profile"],
        certificate["reference"],
        certificate["checked_on"],
    ]
    optional = [model["source"], model["revision"]]
    if not all(isinstance(text, str) for text in (*texts, *(text for text in optional if text is not None))):
        raise TypeError(f"of {texts + optional!r} not all are texts")
    if not all(isinstance(text, str) for text in _field(manifest, "versions", dict).values()):
        raise TypeError(f"versions are {manifest['versions']!r}, expected texts")
    for one in manifest["target"].get("compiled", {}).values():
        for name in ("memory", "temporary", "flops"):
            _field(one, name, int)
        if type(one["bytes_accessed"]) not in (int, type(None)) or one["fits"] not in (True, False, None):
            raise TypeError(f"what a compiler said is {one!r}")
    results = _field(certificate, "results", list)
    if not results or not all(isinstance(one["largest_difference"], float) for one in results):
        raise TypeError(f"results of the certificate are {results!r}")


def _field(table: Mapping[str, Any], name: str, kind: type) -> Any:
    value = table[name]
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r}, expected a {kind.__name__}")
    return value


def _count(table: Mapping[str, Any], name: str) -> int:
    value = _field(table, name, int)
    if value < 1:
        raise ValueError(f"{name} is {value}, expected a whole number from 1 on")
    return value


def _counts(table: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = _field(table, name, list)
    if not values or not all(type(value) is int and value > 0 for value in values) or values != sorted(set(values)):
        raise ValueError(f"{name} is {values!r}, expected ascending whole numbers from 1 on")
    return tuple(values)


def config_sha256(identity: Identity) -> str:
    """SHA-256 of a config's fields that compute, as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(identity.config, sort_keys=True).encode()).hexdigest()


def describe_cache(spec: CacheSpec, batch_size: int, max_length: int) -> dict[str, Any]:
    """What is cached of rows of ``max_length`` tokens, for a manifest."""
    return {
        "layers": len(spec.layers),
        "windows": list(spec.windows),
        "bytes": spec.nbytes(batch_size, max_length),
    }


def program_files(entry: Mapping[str, Any], bundle: Bundle) -> ProgramFiles:
    """What the manifest says of one program, with paths."""
    shape = StepShape(**{field.name: _count(entry, field.name) for field in fields(StepShape)})
    paths = {role: bundle.path(name) for role, name in _field(entry, "files", dict).items()}
    compiled = tuple(
        (bundle.path(each["file"]), _field(each, "made_for", dict)) for each in _field(entry, "compiled", list)
    )
    return ProgramFiles(_field(entry, "name", str), shape, paths, compiled)


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
