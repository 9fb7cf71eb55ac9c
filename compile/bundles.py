"""From a model to a bundle: every program that a target replays, and what the runtime has to know besides."""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from staticgen.backends.base import ProgramFiles
from staticgen.bundle import Bundle, library_versions, new_folder, read_bundle, write_manifest
from staticgen.certificate import CERTIFICATE, Golden, ask_reference, compare, loop_differs, save_golden
from staticgen.compiled import (
    STEP,
    TOKENIZERS,
    CompiledModel,
    config_sha256,
    describe_cache,
    describe_step,
    read_tokenizer,
)
from staticgen.contexts import cached_sizes, recomputed_sizes
from staticgen.errors import CompileError
from staticgen.layouts import layout_class, layout_factory
from staticgen.limits import fit_buckets, fit_cache_sizes, needed_lengths, require_count, require_positions
from staticgen.models import longest
from staticgen.profiles import load_profile
from staticgen.session import Session
from staticgen.shapes import StepShape
from staticgen.sources import DEFAULT_MAX_LENGTH
from staticgen.step import check_model, step_for

from .writers import Job, Writer, writer_for

AS_THEY_ARE = "as in the model"
_STEPS = 8
# Where nothing is rounded, the distributions of two ways to compute them are this near in nats, and a lot nearer.
_MOST_KL = 1e-3
_TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small town by the sea, where every morning the fishermen went out before the sun rose and",
    "def",
)


def compile_bundle(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    profile: str | Path = "generic-cpu",
    max_length: int | None = None,
    batch_size: int = 1,
    layout: str | None = None,
    prefill_buckets: Sequence[int] | None = None,
    cache_sizes: Sequence[int] | None = None,
    weights: str | None = None,
    blobs: bool = True,
    source: str | None = None,
    report: Callable[[str, str, float], None] = lambda stage, detail, part: None,
) -> CompiledModel:
    """Compile a model for a target and write everything that it replays there into a new folder.

    Every dimension of a program is fixed, and all programs share one file of weights. The target need not be here, but for
    backend inductor, whose packages are for this CPU. For the backends openvino and npu they are OpenVINO IR; for TPUs
    StableHLO, and the manifest has what the TPU's compiler says of it, where that is installed. What a compiler makes of
    them for a GPU or an NPU is kept besides, if the device is here; or, for a profile of one generation of NPU, if its
    compiler is at hand (see :func:`staticgen.compile.compile_blob`).

    Args:
        model: a causal decoder of transformers, on the CPU, in the dtype that it is to have.
        folder: must not exist; it appears when everything in it is written and checked, or not at all.
        tokenizer: the model's, to be kept with it.
        profile: the target: a name of ``staticgen profiles`` or the path of a file of one's own.
        max_length: tokens of a row, prompt and padding included; None for 512, or the model's positions if fewer.
        batch_size, prefill_buckets, cache_sizes: as in :class:`staticgen.Session`; None for the target's own.
        layout: the one to use by default; None for the target's. All layouts that keep keys and values run the same
            programs, ``"none"`` has its own.
        weights: how weights are stored: None as they are, ``"float16"``, or a mode of
            :func:`staticgen.compile.compress_weights`.
        blobs: whether to keep what a GPU's or an NPU's compiler makes, a copy of the weights for each program; and whether to
            ask the TPU's.
        source: where the model is from, in words; None for its config's own word.
        report: called with the name of each stage as it begins, what it is about, and what part of the stage is done.

    Returns:
        the bundle, read back.

    Raises:
        FileExistsError: ``folder`` exists.
        UnsupportedModelError, CompileError, UnknownNameError, ValueError, TypeError: as for a session.
        BackendUnavailableError: the target's backend writes no bundles, or NNCF is needed and not installed.
    """
    check_model(model)
    target = load_profile(profile)
    writer = writer_for(target)
    name = (layout or target.layout).strip().lower()
    layout_class(name)
    length = longest(model, DEFAULT_MAX_LENGTH) if max_length is None else require_count("max_length", max_length, 2)
    rows = require_count("batch_size", batch_size, least=1)
    for limit, value in (("batch_size", rows), ("max_length", length)):
        most = getattr(target.limits, limit)
        if most is not None and value > most:
            raise ValueError(f"{limit} is {value}, but profile {target.name!r} goes up to {most}; lower it")
    buckets = fit_buckets(prefill_buckets, target.prefill_buckets, length)
    sizes = fit_cache_sizes(cache_sizes, target.cache_sizes, length)
    job = Job(model, tokenizer, target, name, length, rows, buckets, sizes, weights, blobs, source, report)
    writer.check(job)
    with new_folder(folder) as unfinished:
        _write(job, writer, unfinished)
    return CompiledModel(read_bundle(folder))


def _write(job: Job, writer: Writer, folder: Path) -> None:
    job.report("step", job.model.config.model_type, 0.0)
    job.step = step = step_for(job.model, job.profile.form)
    shapes = _shapes(job)
    description = describe_step(step)
    programs = writer.write(job, shapes, folder)
    (folder / STEP).write_text(json.dumps(description, indent=1), encoding="utf-8")
    config = _without(job.model.config.to_dict(), ("_name_or_path", "auto_map"))
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str), encoding="utf-8")
    own = getattr(job.model, "generation_config", None)
    settings = {} if own is None else {key: value for key, value in own.to_dict().items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=1, default=str), encoding="utf-8")
    job.report("reference", "", 0.0)
    steps = min(_STEPS, job.max_length - 1)
    reference = job.model if step.dtype == torch.float32 else copy.deepcopy(job.model).float()
    golden = ask_reference(reference, _prompts(job, job.max_length - steps), steps)
    save_golden(golden, folder / CERTIFICATE)
    manifest: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": _model_entry(job),
        "target": {
            "profile": job.profile.name,
            "backend": job.profile.backend,
            "device": job.profile.device,
            "compile_options": job.profile.compile_options,
            **asdict(job.profile.form),
        },
        "shapes": {
            "max_length": job.max_length,
            "batch_size": job.batch_size,
            "prefill_buckets": list(job.prefill_buckets),
            "cache_sizes": list(job.cache_sizes),
        },
        "layout": job.layout,
        "dtype": str(step.dtype).removeprefix("torch."),
        "weights": job.weights or AS_THEY_ARE,
        "cache": describe_cache(step.cache_spec, job.batch_size, job.max_length),
        "tokenizer": _write_tokenizer(job, folder),
        "programs": [_program_entry(files, folder) for files in programs],
        "certificate": {
            "reference": f"transformers {version('transformers')}, torch on the CPU, float32",
            "steps": steps,
        },
        "versions": library_versions(),
    }
    for key, entries in writer.describe().items():
        manifest[key] = {**manifest.get(key, {}), **entries}
    job.report("check", "", 0.0)
    write_manifest(folder, manifest)
    bundle = read_bundle(folder)
    manifest["certificate"] |= _check(bundle, golden, writer)
    job.report("files", "", 0.0)
    write_manifest(folder, manifest, bundle.manifest["files"])


def _shapes(job: Job) -> dict[str, StepShape]:
    """The sizes of all programs, by their names."""
    cls = layout_class(job.layout)
    if cls.recomputes:
        require_positions(job.step, job.max_length)
        limit = job.step.position_limit or job.max_length
        sizes = recomputed_sizes(sorted({min(size, limit) for size in job.cache_sizes}))
    else:
        capacity = layout_factory(job.layout, {})(job.max_length).capacity
        require_positions(job.step, job.max_length, cls.overflow[0], capacity)
        sizes = cached_sizes(job.prefill_buckets, needed_lengths(job.step.cache_spec, job.cache_sizes))
    names = {
        (f"decode_{slots}" if tokens == 1 else f"prefill_{tokens}_{slots}"): (tokens, slots) for tokens, slots in sizes
    }
    return {name: StepShape(job.batch_size, *size) for name, size in names.items()}


def _check(bundle: Bundle, golden: Sequence[Golden], writer: Writer) -> dict[str, Any]:
    """Run the bundle against the reference, as its writer says."""
    model = CompiledModel(bundle, unfinished=True)
    session = Session(model, **writer.session_arguments(model))
    results = compare(session, golden, model.step.vocab_size)
    on, device = session.backend.description, session.backend.made_for
    exact = model.step.dtype == torch.float32 and model.bundle.manifest["weights"] == AS_THEY_ARE
    for one, given in zip(results, golden, strict=True):
        if not one.kl < (_MOST_KL if exact else math.inf):  # NaN as well
            raise CompileError(
                f"what was compiled does not compute what the model does: for a prompt of {one.prompt_tokens} tokens the "
                f"logits differ by up to {one.largest_difference:.3g} and the distributions by {one.kl:.3g} nats on "
                f"{on}; nothing was written"
            )
        differs = loop_differs(session, given) if exact and session.backend.resident else None
        if differs is not None and differs != one.diverges_at:
            raise CompileError(
                f"the loop that was compiled does not choose what the model does: for a prompt of {one.prompt_tokens} tokens "
                f"token {differs} is another on {on}; nothing was written"
            )
    del session
    gc.collect()  # Windows renames no folder of which a file is mapped into memory
    return {
        "checked_on": on,
        "device": device,
        "results": [one.to_dict() for one in results],
    }


def _prompts(job: Job, room: int) -> list[list[int]]:
    """Token ids of a few prompts, ``room`` at most."""
    if job.tokenizer is not None:
        texts: list[list[int]] = [job.tokenizer(text).input_ids for text in _TEXTS]
    else:  # any ids do, as long as they are the same every time
        texts = [
            [(17 * index + 3 * place) % job.step.vocab_size for place in range(count)]
            for index, count in enumerate((5, 24, 1))
        ]
    return [ids[:room] for ids in texts if ids]


def _write_tokenizer(job: Job, folder: Path) -> dict[str, Any] | None:
    """Write the tokenizer's files; their names, and the class of transformers that makes the same tokenizer of them."""
    if job.tokenizer is None:
        return None
    before = set(folder.iterdir())
    job.tokenizer.save_pretrained(folder)
    for path in folder.glob("*.py"):  # of a tokenizer with code of its own; none is run from a bundle
        path.unlink()
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if before.isdisjoint([path, *path.parents]) and path.is_file()
    )
    expected = [job.tokenizer(text).input_ids for text in _TEXTS]
    # A tokenizer that is one file needs no class of its own, and AutoTokenizer takes seconds to find that out.
    readers = TOKENIZERS if "tokenizer.json" in names else TOKENIZERS[1:]
    reasons = []
    for reader in readers:
        try:
            tokenizer = read_tokenizer(reader, folder)
            if [tokenizer(text).input_ids for text in _TEXTS] == expected:
                return {"read_by": reader, "files": names}
            reasons.append(f"{reader} gives other tokens")
        except Exception as error:  # of tokenizers, which has no class of its own for them
            reasons.append(f"{reader}: {error}")
    raise ValueError(
        f"tokenizer is a {type(job.tokenizer).__name__}, which cannot be made again from its files ({'; '.join(reasons)}); "
        "give one that transformers can read without code of its own, or None"
    )


def _without(value: Any, names: Sequence[str]) -> Any:
    """A config without some fields, and its parts without them."""
    if not isinstance(value, dict):
        return value
    return {name: _without(part, names) for name, part in value.items() if name not in names}


def _model_entry(job: Job) -> dict[str, Any]:
    config, identity = job.model.config, job.step.identity()
    return {
        "source": job.source or Path(str(config._name_or_path)).name or None,
        "revision": getattr(config, "_commit_hash", None),
        "model_type": config.model_type,
        "config_sha256": config_sha256(identity),
        "weights_digest": identity.weights,
        "vocab_size": job.step.vocab_size,
        "parameters": sum(tensor.numel() for tensor in job.model.parameters()),
    }


def _program_entry(files: ProgramFiles, folder: Path) -> dict[str, Any]:
    def place(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    return {
        "name": files.name,
        **asdict(files.shape),
        "files": {role: place(path) for role, path in files.paths.items()},
        "compiled": [{"file": place(path), "made_for": dict(made_for)} for path, made_for in files.compiled],
    }
