"""Where a session's programs come from: compiled from a model, out of the compile cache, or read from a bundle."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staticgen.backends import Backend, Program, open_backend
from staticgen.backends.base import ProgramFiles
from staticgen.bundle import Bundle
from staticgen.compile_cache import CompileCache, code_digest, user_cache
from staticgen.compiled import CompiledModel, config_sha256
from staticgen.errors import BackendUnavailableError, BundleError, UnknownNameError
from staticgen.facts import StepFacts
from staticgen.limits import fit_buckets, fit_cache_sizes, require_count
from staticgen.shapes import StepShape
from staticgen.stats import SessionStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from staticgen.step import Step

logger = logging.getLogger("staticgen")

DEFAULT_MAX_LENGTH = 512
_BLOB = "program.blob"
# Backends that run what was compiled for another one.
_ENGINES = {"xla": ("jax",)}


@dataclass(frozen=True)
class Asked:
    """The arguments of a session that decide on its programs, as they were given; see :class:`staticgen.Session`."""

    max_length: int | None
    batch_size: int | None
    backend: str
    device: str | None
    backend_options: Mapping[str, str] | None
    prefill_buckets: Sequence[int] | None
    cache_sizes: Sequence[int] | None


class Source(ABC):
    """A model and a target, of which programs can be had.

    Attributes:
        step: what the runtime knows of the step.
        backend: the open backend.
        max_length, batch_size, prefill_buckets, cache_sizes: see :class:`staticgen.Session`.
        layout: the one that the programs were made with in mind; None for no preference.
    """

    step: StepFacts
    backend: Backend
    max_length: int
    batch_size: int
    prefill_buckets: tuple[int, ...]
    cache_sizes: tuple[int, ...]
    layout: str | None = None

    @property
    @abstractmethod
    def given(self) -> Any:
        """The model that was given; None when it is gone."""

    @property
    @abstractmethod
    def model(self) -> Any:
        """The model: what was given, or what stands for it."""

    @abstractmethod
    def is_current(self, model: Any) -> bool:
        """Whether ``model`` is what the programs were made from."""

    @abstractmethod
    def programs(
        self, shapes: Sequence[StepShape], stats: SessionStats
    ) -> Mapping[StepShape, Program | Future[Program]]:
        """Programs of these sizes; what is in the future is on its way."""


class LiveSource(Source):
    """A transformers model, compiled here."""

    def __init__(self, model: PreTrainedModel, asked: Asked):
        from staticgen.step import step_for  # noqa: PLC0415 - it imports transformers' models

        self.max_length = DEFAULT_MAX_LENGTH
        if asked.max_length is not None:
            self.max_length = require_count("max_length", asked.max_length, least=2)
        self.batch_size = 1 if asked.batch_size is None else require_count("batch_size", asked.batch_size, least=1)
        self.backend = open_backend(asked.backend, asked.device, asked.backend_options)
        self.prefill_buckets = fit_buckets(asked.prefill_buckets, self.backend.prefill_buckets, self.max_length)
        self.cache_sizes = fit_cache_sizes(asked.cache_sizes, self.backend.cache_sizes, self.max_length)
        self._step: Step = step_for(model, self.backend.form)
        self.step = self._step
        self._model = weakref.ref(model)

    @property
    def given(self) -> Any:
        return self._model()

    @property
    def model(self) -> Any:
        return self._model() or self._step.model

    def is_current(self, model: Any) -> bool:
        from staticgen.step import model_stamp  # noqa: PLC0415

        return not isinstance(model, CompiledModel) and model_stamp(model) == self._step.stamp

    def programs(self, shapes: Sequence[StepShape], stats: SessionStats) -> Mapping[StepShape, Program]:
        cache = None if self.backend.conversion is None else user_cache()
        if cache is None or not shapes:
            return self._compile_all(shapes, stats)
        return self._through_cache(cache, shapes, stats) or self._compile_all(shapes, stats)

    def _compile_all(self, shapes: Sequence[StepShape], stats: SessionStats) -> dict[StepShape, Program]:
        return {shape: _timed(stats, lambda: self.backend.compile(self._step, shape)) for shape in shapes}  # noqa: B023

    def _through_cache(
        self, cache: CompileCache, shapes: Sequence[StepShape], stats: SessionStats
    ) -> dict[StepShape, Program] | None:
        """Programs out of the cache, or into it; None where it cannot be written to."""
        step, backend, converted = self._step, self.backend, conversion_key(self._step, self.backend)
        model = _find(cache, "model", converted, stats)
        if model is None:
            start = time.perf_counter()
            model = cache.try_to_store("model", converted, lambda folder: backend.convert(step, folder))
            stats.compile_seconds += time.perf_counter() - start
            if model is None:
                return None
        made: dict[StepShape, Program] = {}

        @functools.cache
        def read() -> Any:
            return backend.read_converted(model.folder)

        def compile_one(shape: StepShape, blob: Path | None = None) -> None:
            made[shape] = backend.compile_converted(step, read(), shape, blob)

        for shape in shapes:
            if not backend.keeps_blobs:
                _timed(stats, lambda: compile_one(shape))  # noqa: B023
                continue
            key = {**converted, **asdict(shape), "made_for": backend.made_for}
            kept = _find(cache, "program", key, stats)
            if kept is not None:
                made[shape] = backend.load_blob(step, shape, kept.path(_BLOB))
                stats.loads += 1
                continue
            write = lambda folder: compile_one(shape, folder / _BLOB)  # noqa: B023, E731
            _timed(stats, lambda: cache.try_to_store("program", key, write))  # noqa: B023
            if shape not in made:  # what was compiled could not be written
                compile_one(shape)
        return made


class CompiledSource(Source):
    """A bundle."""

    def __init__(self, model: CompiledModel, asked: Asked):
        fixed: dict[str, tuple[Any, Any]] = {
            "max_length": (asked.max_length, model.max_length),
            "batch_size": (asked.batch_size, model.batch_size),
            "prefill_buckets": (_tuple(asked.prefill_buckets), model.prefill_buckets),
            "cache_sizes": (_tuple(asked.cache_sizes), model.cache_sizes),
            "backend": (
                None if asked.backend in ("auto", *_ENGINES.get(model.backend, ())) else asked.backend,
                model.backend,
            ),
        }
        for name, (wanted, has) in fixed.items():
            if wanted is not None and wanted != has:
                raise BundleError(
                    f"{name} is {wanted!r}, but bundle {str(model.bundle.folder)!r} was compiled for {has!r}; leave {name} "
                    "out, or compile another bundle"
                )
        self.step, self._compiled = model.step, model
        self.max_length, self.batch_size = model.max_length, model.batch_size
        self.prefill_buckets, self.cache_sizes, self.layout = model.prefill_buckets, model.cache_sizes, model.layout
        device, options = asked.device, {**model.compile_options, **(asked.backend_options or {})}
        name = model.backend if asked.backend == "auto" else asked.backend
        try:
            self.backend = open_backend(name, model.device if device is None else device, options)
        except (BackendUnavailableError, ValueError) as error:
            if device is not None or asked.backend_options:
                raise
            kind = type(error) if isinstance(error, BackendUnavailableError | UnknownNameError) else BundleError
            raise kind(
                f"bundle {str(model.bundle.folder)!r} was compiled for device {model.device!r} of backend "
                f"{model.backend!r}: {error}. For another target, compile another bundle with `staticgen compile`"
            ) from error

    @property
    def given(self) -> Any:
        return self._compiled

    @property
    def model(self) -> Any:
        return self._compiled

    def is_current(self, model: Any) -> bool:
        return model is self._compiled

    def programs(self, shapes: Sequence[StepShape], stats: SessionStats) -> Mapping[StepShape, Future[Program]]:
        absent = [shape for shape in shapes if shape not in self._compiled.programs]
        if absent:
            raise BundleError(
                f"bundle {str(self._compiled.bundle.folder)!r} has no program for the step {', '.join(map(str, absent))}; it has "
                f"{', '.join(map(str, self._compiled.programs))}: use the layout that it was compiled for "
                f"({self.layout!r}), or compile another bundle"
            )
        # What a short prompt needs first: the smallest prefill, then decode.
        first = min((shape.tokens for shape in shapes if shape.tokens > 1), default=1)
        ordered = sorted(shapes, key=lambda shape: (shape.tokens != first, shape.tokens, shape.cache_length))
        return read_in_background(self.backend, self.step, [self._compiled.programs[shape] for shape in ordered], stats)


def open_source(model: Any, asked: Asked) -> Source:
    """The source of a model's programs."""
    return (CompiledSource if isinstance(model, CompiledModel) else LiveSource)(model, asked)


def _tuple(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def conversion_key(step: Step, backend: Backend) -> dict[str, Any]:
    """What a converted step depends on, as JSON has it."""
    identity = step.identity()
    return {
        "model_type": step.model_type,
        "weights": identity.weights,
        "config": config_sha256(identity),
        "dtype": str(step.dtype).removeprefix("torch."),
        "form": asdict(step.form),
        **(backend.conversion or {}),
        **{name: version(name) for name in ("staticgen", "torch", "transformers")},
        "code": code_digest(),
    }


def _find(cache: CompileCache, kind: str, key: Mapping[str, Any], stats: SessionStats) -> Bundle | None:
    found = cache.find(kind, key)
    if found is None:
        stats.compile_cache.misses += 1
        reason = f"{kind}: {cache.difference(kind, key)}"
        stats.compile_cache.reason = stats.compile_cache.reason or reason
        logger.info("not in the compile cache: %s", reason)
    else:
        stats.compile_cache.hits += 1
    return found


def _timed(stats: SessionStats, compile_one: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    program = compile_one()
    stats.compiles += 1
    stats.compile_seconds += time.perf_counter() - start
    return program


def read_in_background(
    backend: Backend, step: StepFacts, programs: Sequence[ProgramFiles], stats: SessionStats
) -> dict[StepShape, Future[Program]]:
    """Read programs from files, one after the other in a thread, in their order: the first is wanted first.

    Raises:
        BackendUnavailableError: they are made for what is not here.
    """
    for files in programs:
        backend.require_fit(files)
    stats.loads += len(programs)
    stats.compiles += sum(map(backend.must_compile, programs))

    def read(files: ProgramFiles) -> Program:
        start = time.perf_counter()
        program = backend.load(step, files)
        stats.load_seconds += time.perf_counter() - start
        return program

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staticgen-load")
    try:
        return {files.shape: pool.submit(read, files) for files in programs}
    finally:
        pool.shutdown(wait=False)
