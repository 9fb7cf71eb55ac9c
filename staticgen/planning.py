"""What a model will need on a target, and how fast it can be there at best: worked out, before anything is compiled.

Times follow the roofline (Williams et al., 2009, doi:10.1145/1498765.1498785): a step takes as long as reading what it
reads at the target's bandwidth, or as computing what it computes at its peak, whichever is longer. Nothing is faster;
a real step is slower, by what its target does not overlap or reuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from staticgen.buckets import BucketUse, propose_buckets, use_buckets
from staticgen.contexts import cached_sizes
from staticgen.layouts import layout_class
from staticgen.limits import fit_buckets, fit_cache_sizes, needed_lengths, require_count
from staticgen.measuring import measure_bandwidth, measure_memory, measure_peak
from staticgen.outline import Matrices, Outline, load_outline
from staticgen.profiles import Figure, Profile, load_profile
from staticgen.shapes import StepShape, largest_that_fits
from staticgen.text import DTYPES

WEIGHTS = ("none", "int8", "int4")
# Backends whose every compiled program has a copy of the weights of its own.
_OWN_WEIGHTS = {"openvino", "npu"}
_MAX_LENGTH = 512
_MOST_ROWS, _MOST_TOKENS = 1 << 16, 1 << 20  # where the search for what fits ends, if nothing ends it before


@dataclass(frozen=True)
class ProgramPlan:
    """One program.

    Attributes:
        kind: ``"prefill"`` or ``"decode"``.
        tokens: of each row, in one step.
        cache_length: slots.
        nbytes: its buffers, and its own copy of the weights where the target's programs have one.
        read_bytes: weights and cache that a step reads.
        flops: operations of a step, two for each multiplication with an addition.
        seconds: a step at best; None without a bandwidth.
        bound: what takes that long, ``"memory"`` or ``"compute"``; None without a bandwidth.
    """

    kind: str
    tokens: int
    cache_length: int
    nbytes: int
    read_bytes: int
    flops: int
    seconds: float | None
    bound: str | None


@dataclass(frozen=True)
class Plan:
    """What a model needs on a target, and how fast it can be there.

    Attributes:
        model, model_type: its name as given (None for the default one), and its config's.
        profile: the target's name.
        dtype, weights, max_length, batch_size: what was asked for.
        parameters: numbers of the model; a tied embedding counts once.
        active_parameters: those that one token meets; fewer with experts.
        weights_bytes: one copy of the weights.
        cache_bytes: keys and values, at all cache lengths.
        loaded_model_bytes: the model as a session has it beside its programs, in the same memory; 0 where it is not.
        programs: those of a session of these sizes.
        total_bytes: all of these together.
        memory: bytes of the target; None where they are not known.
        fits: whether that is enough; None where it is not known.
        largest_max_length: that fits with this batch size, up to the positions that the model has or was trained
            on, or max_length if that is more; 0 if none does, None where memory is not known.
        largest_batch_size: that fits with this max_length; 0 if none does, None where memory is not known.
        own_buckets: the profile's prefill sizes with the prompts given, or with one prompt of each length that fits.
        proposed_buckets: sizes with less padding for the prompts given; None without any.
        notes: what the figures assume, and which are missing.
    """

    model: str | None
    model_type: str
    profile: str
    dtype: str
    weights: str
    max_length: int
    batch_size: int
    parameters: int
    active_parameters: int
    weights_bytes: int
    cache_bytes: int
    loaded_model_bytes: int
    programs: tuple[ProgramPlan, ...]
    total_bytes: int
    memory: float | None
    fits: bool | None
    largest_max_length: int | None
    largest_batch_size: int | None
    own_buckets: BucketUse
    proposed_buckets: BucketUse | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, texts and numbers; buckets have their ``waste``."""
        table = asdict(self)
        for key in ("own_buckets", "proposed_buckets"):
            use: BucketUse | None = getattr(self, key)
            table[key] = None if use is None else {**asdict(use), "waste": use.waste}
        return table


def plan(
    model: str | Path | None = None,
    profile: str | Path | Profile = "generic-cpu",
    *,
    max_length: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    weights: str = "none",
    prompt_lengths: Mapping[int, int] | None = None,
    buckets: int | None = None,
) -> Plan:
    """Work out what a session of these sizes needs on a target, from the model's config and the target's profile.

    Args:
        model: a hub id, a folder, or a GGUF file; None for the default model. Its weights are not loaded.
        profile: the target: a name, the path of a file, or a profile.
        max_length: as in :class:`staticgen.Session`; None for 512, as far as the model and the profile allow it.
        batch_size: as in :class:`staticgen.Session`.
        dtype: one of the profile's; None for its first.
        weights: ``"none"``, ``"int8"`` or ``"int4"``: how matrices are compressed. Each of their output channels has
            a scale of two bytes; with ``"int4"`` embeddings and head are int8.
        prompt_lengths: how many prompts there are of each length, to propose prefill buckets for.
        buckets: how many buckets to propose at most; None for as many as the profile has.

    Raises:
        UnsupportedModelError: the model cannot be a static step.
        ValueError: an argument that the profile or the model does not allow; the message names it.
        OSError: the model's config or the profile cannot be read.
    """
    target = profile if isinstance(profile, Profile) else load_profile(profile)
    dtype = target.dtypes[0] if dtype is None else dtype
    _check_target(target, max_length, batch_size, dtype)
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}, expected one of {', '.join(WEIGHTS)}")
    _check_prompts(prompt_lengths, buckets)
    found = load_outline(model, DTYPES[dtype])
    limit = None if found.position_limit is None else found.position_limit + 1  # the last token is never fed
    if max_length is None:
        max_length = min(most for most in (_MAX_LENGTH, limit, target.limits.max_length) if most is not None)
    if limit is not None and max_length > limit:
        raise ValueError(
            f"max_length is {max_length}, but model_type {found.model_type!r} has {limit - 1} positions; use "
            f"max_length={limit} or less"
        )
    too_long = max(prompt_lengths or (0,))
    if too_long >= max_length:
        raise ValueError(
            f"prompt_lengths has a prompt of {too_long} tokens, but max_length is {max_length} and counts the answer "
            f"too; use max_length={too_long + 1} or more"
        )
    sizes = _Sizes(found, target, weights)
    programs = sizes.programs(max_length, batch_size)
    memory = None if target.memory is None else target.memory.value * target.chips
    total = sizes.total(max_length, batch_size)
    largest_length = largest_batch = None
    if memory is not None:
        trained = limit or found.trained_length or _MOST_TOKENS
        longest = max(max_length, min(target.limits.max_length or _MOST_TOKENS, trained))
        rows = target.limits.batch_size or _MOST_ROWS
        largest_length = largest_that_fits(2, longest, lambda length: sizes.total(length, batch_size) <= memory)
        largest_batch = largest_that_fits(1, rows, lambda batch: sizes.total(max_length, batch) <= memory)
    own = fit_buckets(None, target.prefill_buckets, max_length)
    proposed = None
    if prompt_lengths is not None:
        proposed = use_buckets(prompt_lengths, propose_buckets(prompt_lengths, buckets or len(own), own[-1]))
    return Plan(
        model=None if model is None else str(model),
        model_type=found.model_type,
        profile=target.name,
        dtype=dtype,
        weights=weights,
        max_length=max_length,
        batch_size=batch_size,
        parameters=found.parameters,
        active_parameters=found.active_parameters,
        weights_bytes=sizes.weights_bytes,
        cache_bytes=sizes.cache_bytes(max_length, batch_size),
        loaded_model_bytes=sizes.loaded_model_bytes,
        programs=programs,
        total_bytes=total,
        memory=memory,
        fits=None if memory is None else total <= memory,
        largest_max_length=largest_length,
        largest_batch_size=largest_batch,
        own_buckets=use_buckets(prompt_lengths or dict.fromkeys(range(1, max_length), 1), own),
        proposed_buckets=proposed,
        notes=_notes(found, target, dtype, weights),
    )


def _check_target(target: Profile, max_length: int | None, batch_size: int, dtype: str) -> None:
    require_count("batch_size", batch_size, least=1)
    if max_length is not None:
        require_count("max_length", max_length, least=2)
    for name, value in (("max_length", max_length), ("batch_size", batch_size)):
        most = getattr(target.limits, name)
        if most is not None and value is not None and value > most:
            raise ValueError(f"{name} is {value}, but profile {target.name!r} allows {most} at most")
    if dtype not in target.dtypes:
        raise ValueError(f"dtype is {dtype!r}, but profile {target.name!r} has {', '.join(target.dtypes)}")
    if layout_class(target.layout).recomputes:
        raise ValueError(f"profile {target.name!r} has layout {target.layout!r}, which keeps no cache to plan")


def _check_prompts(prompt_lengths: Mapping[int, int] | None, buckets: int | None) -> None:
    if buckets is not None:
        require_count("buckets", buckets, least=1)
        if prompt_lengths is None:
            raise ValueError("buckets is given without prompt_lengths, for which they would be proposed")
    if prompt_lengths is not None and not prompt_lengths:
        raise ValueError("prompt_lengths is empty, expected how many prompts there are of each length")
    for length, count in (prompt_lengths or {}).items():
        require_count("prompt_lengths has a length which", length, least=1)
        require_count(f"prompt_lengths[{length}]", count, least=1)


class _Sizes:
    """Bytes and operations of one model on one target."""

    def __init__(self, outline: Outline, profile: Profile, weights: str):
        self._outline, self._profile, self._weights = outline, profile, weights
        self.weights_bytes = (
            self._compressed(outline.layers)
            + self._compressed(outline.experts)
            + self._compressed(outline.head, embedding=True)
            + self._compressed(outline.tables, embedding=True)
            + outline.vectors * outline.dtype.itemsize
        )
        self.loaded_model_bytes = outline.parameters * outline.dtype.itemsize if _holds_model(profile) else 0

    def _compressed(self, matrices: Matrices, embedding: bool = False) -> int:
        if self._weights == "none":
            return matrices.numbers * self._outline.dtype.itemsize
        halves = 1 if self._weights == "int4" and not embedding else 2
        return -(-matrices.numbers * halves // 2) + 2 * matrices.rows

    def lengths(self, max_length: int) -> tuple[int, ...]:
        """Cache lengths of decode programs, ascending; prefill runs over the last."""
        sizes = fit_cache_sizes(None, self._profile.cache_sizes, max_length)
        lengths = needed_lengths(self._outline.cache_spec, sizes)
        return lengths if layout_class(self._profile.layout).grows else lengths[-1:]

    def cache_bytes(self, max_length: int, batch: int) -> int:
        return sum(self._outline.cache_spec.nbytes(batch, length) for length in self.lengths(max_length))

    def total(self, max_length: int, batch: int) -> int:
        """All bytes of a session."""
        shared = 0 if self._profile.backend in _OWN_WEIGHTS else self.weights_bytes
        programs = sum(program.nbytes for program in self.programs(max_length, batch))
        return shared + self.loaded_model_bytes + self.cache_bytes(max_length, batch) + programs

    def programs(self, max_length: int, batch: int) -> tuple[ProgramPlan, ...]:
        lengths = self.lengths(max_length)
        buckets = fit_buckets(None, self._profile.prefill_buckets, max_length)
        shapes = [StepShape(batch, tokens, length) for tokens, length in cached_sizes(buckets, lengths)]
        kinds = ["prefill"] * len(buckets) + ["decode"] * len(lengths)
        return tuple(self._program(kind, shape) for kind, shape in zip(kinds, shapes, strict=True))

    def _program(self, kind: str, shape: StepShape) -> ProgramPlan:
        outline, spec = self._outline, self._outline.cache_spec
        tokens = shape.batch * shape.tokens
        own = self.weights_bytes
        if self._profile.form.fed:  # the host looks embeddings up
            own -= 0 if outline.tied else self._compressed(outline.tables, embedding=True)
        elif outline.tied:  # a table that is the head as well is there twice, in one layout for each
            own += self._compressed(outline.head, embedding=True)
        keys = max(layer.slots(shape.cache_length) for layer in spec.layers) + shape.tokens
        scores = 4 * shape.batch * outline.heads * shape.tokens * keys
        nbytes = spec.nbytes(1, 1) * tokens + 4 * shape.batch * outline.logits_size + scores
        if self._profile.backend in _OWN_WEIGHTS:
            nbytes += own
        met = min(outline.expert_count, tokens * outline.experts_per_token)
        read = (
            self._compressed(outline.layers)
            + self._compressed(outline.head, embedding=True)
            + self._compressed(outline.experts) * met // max(1, outline.expert_count)
            + outline.vectors * outline.dtype.itemsize
            + spec.nbytes(shape.batch, shape.cache_length)
        )
        met_numbers = outline.experts.numbers * outline.experts_per_token // max(1, outline.expert_count)
        attended = sum(
            (layer.key_dim + layer.value_dim) * (layer.slots(shape.cache_length) + shape.tokens)
            for layer in spec.layers
        )
        flops = 2 * (
            tokens * (outline.layers.numbers + met_numbers + outline.heads * attended)
            + shape.batch * outline.head.numbers  # logits are of the last token only
        )
        seconds, bound = self._time(read, flops)
        return ProgramPlan(kind, shape.tokens, shape.cache_length, nbytes, read, flops, seconds, bound)

    def _time(self, read: int, flops: int) -> tuple[float | None, str | None]:
        if self._profile.bandwidth is None:
            return None, None
        peak = self._profile.peak.get(_name(self._outline.dtype))
        chips = self._profile.chips
        reading = read / (self._profile.bandwidth.value * chips)
        computing = 0.0 if peak is None else flops / (peak.value * chips)
        return max(reading, computing), "memory" if reading >= computing else "compute"


def _holds_model(profile: Profile) -> bool:
    """Whether the model that a session was made from is in the target's own memory."""
    return profile.backend == "openvino" and profile.device == "CPU"


def _notes(outline: Outline, profile: Profile, dtype: str, weights: str) -> tuple[str, ...]:
    """What the figures assume, and which are missing."""
    notes = [
        "times are the roofline's: the best that bandwidth and peak allow",
        "a step reads all slots of its cache, filled or not, and its activations stay in the target's caches",
    ]
    if profile.backend in _OWN_WEIGHTS:
        notes.append("every program has a copy of the weights of its own")
    if _holds_model(profile):
        notes.append("the loaded model is one more copy, uncompressed, in the same memory")
    if outline.expert_count:
        notes.append(
            f"a token goes through {outline.experts_per_token} of {outline.expert_count} experts, and the tokens of a "
            "step through different ones as far as there are any"
        )
    if weights != "none":
        scales = "each output channel of a compressed matrix has a scale of two bytes"
        notes.append(scales + ("; embeddings and head are int8" if weights == "int4" else ""))
    if profile.chips > 1:
        notes.append(
            f"{profile.chips} chips share memory, bandwidth and peak evenly, and what they tell each other takes no time"
        )
    for name, figure in profile.figures().items():
        if figure.estimate:
            notes.append(f"{name} is an estimate: {figure.source}")
    if profile.memory is None:
        notes.append(
            f"profile {profile.name!r} has no memory size, so what fits is not known unless it is given or measured"
        )
    if profile.bandwidth is None:
        notes.append(
            f"profile {profile.name!r} has no bandwidth, so times cannot be predicted unless it is given or measured"
        )
    elif dtype not in profile.peak:
        notes.append(f"profile {profile.name!r} has no peak for {dtype}, so times count reading only")
    return tuple(notes)


def with_figures(
    profile: Profile,
    dtype: str | None = None,
    *,
    memory: float | None = None,
    bandwidth: float | None = None,
    peak: float | None = None,
    source: str = "given",
) -> Profile:
    """A profile with other figures: ``memory`` in bytes, ``bandwidth`` in bytes/s, ``peak`` of ``dtype`` in FLOP/s."""
    for name, value in (("memory", memory), ("bandwidth", bandwidth), ("peak", peak)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value!r}, expected a number above 0")
    peaks = dict(profile.peak)
    if peak is not None:
        peaks[dtype or profile.dtypes[0]] = Figure(peak, source)
    return replace(
        profile,
        memory=profile.memory if memory is None else Figure(memory, source),
        bandwidth=profile.bandwidth if bandwidth is None else Figure(bandwidth, source),
        peak=peaks,
    )


def measured(profile: Profile, dtype: str | None = None) -> Profile:
    """A CPU's profile with the memory, bandwidth and peak of this machine, which takes some seconds.

    Raises:
        ValueError: the profile is not of a CPU, or has no such dtype.
    """
    if profile.device.upper() != "CPU":
        raise ValueError(f"profile {profile.name!r} is for device {profile.device!r}, and only a CPU is measured here")
    dtype = profile.dtypes[0] if dtype is None else dtype
    if dtype not in profile.dtypes:
        raise ValueError(f"dtype is {dtype!r}, but profile {profile.name!r} has {', '.join(profile.dtypes)}")
    memory, bandwidth, peak = measure_memory(), measure_bandwidth(), measure_peak(DTYPES[dtype])
    return with_figures(profile, dtype, memory=memory, bandwidth=bandwidth, peak=peak, source="measured here")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
