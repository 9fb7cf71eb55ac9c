"""A session: one model compiled for fixed sizes on one backend, replayed for every call."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from staticgen.backends import Backend, Program, open_backend
from staticgen.cache import EMPTY
from staticgen.calls import Call
from staticgen.decoding import Decoding, is_int, read_decoding
from staticgen.errors import RecompileError, SessionBusyError, StaleSessionError
from staticgen.growth import SizedCaches
from staticgen.layouts import LAYOUTS, Layout
from staticgen.prompts import Prompts, read_prompts
from staticgen.shapes import StepShape, plan_chunks
from staticgen.stats import SessionStats
from staticgen.step import Step, model_stamp, step_for, vocab_size


class Session:
    """Holds what is compiled for a model and generates with it, any number of times.

    Everything is compiled here, in the constructor. Afterwards prompt lengths, batches up to
    ``batch_size``, masks and decoding settings vary freely and compile nothing.

    Args:
        model: a causal decoder of transformers on the CPU; it stays as it is and shares its weights.
        max_length: tokens of a row, prompt and padding included; sizes the cache.
        batch_size: rows of the compiled steps; calls may have fewer prompts.
        backend: ``"auto"`` or a name of :data:`staticgen.backends.BACKENDS`.
        layout: ``"ring"`` or ``"shift"``; they give the same tokens, and ``ring`` moves nothing.
        prefill_buckets: prompt tokens per prefill step, one program each; None for the target's own.
        cache_sizes: cache lengths below ``max_length`` at which decode is compiled too, so that its cost
            follows the tokens that are live; None for those of the target's own up to half of it.
        device: the backend's name for a device, None for its default.
        backend_options: compiler options by the vendor's names.

    Attributes:
        backend: the open backend; ``session.backend.description`` says what it runs on.
        stats: counters and times.

    Raises:
        UnsupportedModelError: the model cannot run as a static step.
        BackendUnavailableError: the backend's library or device is not here.
        CompileError: the compiler refused.
        ValueError, TypeError: a bad argument; nothing has been compiled then.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int = 512,
        batch_size: int = 1,
        backend: str = "auto",
        layout: str = "ring",
        prefill_buckets: Sequence[int] | None = None,
        cache_sizes: Sequence[int] | None = None,
        device: str | None = None,
        backend_options: Mapping[str, str] | None = None,
    ):
        max_length = _require_count("max_length", max_length, least=2)
        batch_size = _require_count("batch_size", batch_size, least=1)
        layout_class = LAYOUTS.get(layout)
        self.layout, self.max_length, self.batch_size = layout.strip().lower(), max_length, batch_size
        self.backend: Backend = open_backend(backend, device, backend_options)
        self.prefill_buckets = fit_buckets(prefill_buckets, self.backend.prefill_buckets, max_length)
        self.cache_sizes = _fit_cache_sizes(cache_sizes, self.backend.cache_sizes, max_length)
        self._step = step_for(model, self.backend.form)
        self._model = weakref.ref(model)
        require_positions(self._step, max_length)
        self._caches = self._new_caches(layout_class)
        self._programs: dict[StepShape, Program] = {}
        self._warm = False
        self._in_use = threading.Lock()
        self._user: threading.Thread | None = None
        self.stats = SessionStats(cache_bytes=self._caches.nbytes)
        for tokens in self.prefill_buckets:
            self._program(tokens, max_length)
        for size in self.cache_sizes:
            self._program(1, size)
        self._warm = True

    def __repr__(self) -> str:
        return (
            f"Session({self._step.model.config.model_type}, backend={self.backend.description!r}, layout={self.layout!r}, "
            f"max_length={self.max_length}, batch_size={self.batch_size}, prefill_buckets={self.prefill_buckets})"
        )

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` is what it was when this session was compiled: weights, modules and config."""
        return model_stamp(model) == self._step.stamp

    def generate(
        self,
        ids: Any,
        attention_mask: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        **decoding: Any,
    ) -> torch.Tensor:
        """Generate, as ``model.generate`` does.

        Args:
            ids: int64 [B, T] or [T]: tensor, numpy array, list of ids or (ragged) list of lists.
            attention_mask: [B, T], 1 on real tokens, 0 on the padding at the left.
            generation_config: settings; the model's own fill what it leaves open.
            decoding: its fields as arguments, which win over both, and ``seed``: max_length (counts
                the prompt; at most the session's, which is the default), max_new_tokens (wins over
                max_length), min_length, min_new_tokens, do_sample, temperature, top_k, top_p, min_p,
                repetition_penalty, eos_token_id, pad_token_id.

        Returns:
            int64 [B, at most max_length]: the prompts as given, then the new tokens; a row that has
            ended is filled with the pad token. A fresh tensor.

        Raises:
            ValueError, TypeError: bad input; nothing has run then.
            StaleSessionError: the model has changed since the session was made.
            SessionBusyError: this thread still holds an open stream of this session.
        """
        return self.run_to_end(*self._read(ids, attention_mask, generation_config, decoding))

    def stream(
        self,
        ids: Any,
        attention_mask: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        **decoding: Any,
    ) -> Iterator[torch.Tensor]:
        """Like :meth:`generate`, but yields the new tokens of each step, int64 [B], as they come.

        The session is in use until the stream ends, is closed or is dropped.
        """
        return self.run(*self._read(ids, attention_mask, generation_config, decoding))

    def _read(
        self, ids: Any, attention_mask: Any, generation_config: GenerationConfig | None, decoding: Mapping[str, Any]
    ) -> tuple[Prompts, Decoding]:
        model = self._model()
        if model is not None and not self.is_current(model):
            raise StaleSessionError(
                "the model's weights, modules or config changed after this session was compiled from them; "
                "make a new staticgen.Session"
            )
        return read_call(model or self._step.model, ids, attention_mask, generation_config, decoding)

    def run_to_end(self, prompts: Prompts, settings: Decoding) -> torch.Tensor:
        """:meth:`generate` for a call that has been read by :func:`read_call`."""
        new = [tokens[:, None] for tokens in self.run(prompts, settings)]
        return torch.cat([prompts.ids, *new], dim=1)

    def run(self, prompts: Prompts, settings: Decoding) -> Iterator[torch.Tensor]:
        """:meth:`stream` for a call that has been read by :func:`read_call`."""
        if prompts.batch > self.batch_size:
            raise ValueError(
                f"ids has {prompts.batch} prompts, more than the session's batch_size of {self.batch_size}; "
                "make a session with a larger batch_size or split the call"
            )
        remedy = "make a session with a larger max_length"
        return self._tokens(prompts, settings, new_token_count(prompts, settings, self.max_length, remedy))

    def _tokens(self, prompts: Prompts, settings: Decoding, new_tokens: int) -> Generator[torch.Tensor, None, None]:
        """The loop: prefill, then choose a token, hand it out, run one step; until all rows have ended."""
        with _Hold(self) as hold:
            call, logits = self._begin(prompts, settings, new_tokens)
            while True:
                yield self._choose(call, logits)
                hold.resume()
                if call.finished:
                    return
                logits = self._decode(call)

    # The caller may be in inference mode while a stream is begun and not while it goes on, or the other way
    # round. Tensors made in that mode cannot be written outside it, so that none of ours is made in it.

    @torch.inference_mode(False)
    def _begin(self, prompts: Prompts, settings: Decoding, new_tokens: int) -> tuple[Call, torch.Tensor]:
        call = Call(prompts, settings, self.batch_size, new_tokens)
        self.stats.last = call.stats
        return call, self._prefill(prompts)

    @torch.inference_mode(False)
    def _choose(self, call: Call, logits: torch.Tensor) -> torch.Tensor:
        return call.choose(logits)

    @torch.inference_mode(False)
    def _decode(self, call: Call) -> torch.Tensor:
        start = time.perf_counter()
        self._caches.settle()
        logits = self._run(call.token_ids, call.position_ids)
        call.advance(time.perf_counter() - start)
        return logits

    def _new_caches(self, layout: type[Layout]) -> SizedCaches:
        spec, turned = self._step.cache_spec, self.backend.form.transposed_keys
        try:
            return SizedCaches(spec, self.batch_size, self.cache_sizes, layout, turned)
        except (RuntimeError, MemoryError, ValueError) as error:
            gigabytes = sum(spec.nbytes(self.batch_size, size) for size in self.cache_sizes) / 1e9
            raise MemoryError(
                f"the cache for max_length={self.max_length} and batch_size={self.batch_size} needs {gigabytes:.3g} GB, "
                "which this machine does not give; lower either"
            ) from error

    def _prefill(self, prompts: Prompts) -> torch.Tensor:
        """Fill the cache from empty, chunk by chunk; logits [batch_size, V] of the last prompt token."""
        self._caches.clear()
        chunks = plan_chunks(prompts.longest, self.prefill_buckets)
        width = sum(chunks)
        ids = torch.zeros(self.batch_size, width, dtype=torch.int64, device="cpu")
        positions = torch.full_like(ids, EMPTY)
        for index, row in enumerate(prompts.rows):
            ids[index, width - len(row) :] = row
            positions[index, width - len(row) :] = torch.arange(len(row), device="cpu")
        padding = width - prompts.longest  # columns that are padding in every row take no slot
        start = 0
        for size in chunks:
            columns = slice(start, start + size)
            logits = self._run(ids[:, columns], positions[:, columns], skip=max(0, padding - start))
            start += size
        return logits

    def _run(self, token_ids: torch.Tensor, position_ids: torch.Tensor, skip: int = 0) -> torch.Tensor:
        """Replay the program of this size and write its keys and values, but for the first ``skip`` columns."""
        program = self._program(token_ids.shape[1], self._caches.length)
        logits, new = program(token_ids, position_ids, self._caches.current)
        self.stats.replays += 1
        if np.isnan(logits.numpy().max(axis=1)).any():  # in this thread, like the argmax of a Sampler
            self._caches.zero_()  # NaN in a stale slot would survive a weight of 0
            raise ArithmeticError(
                f"the step {program.shape} gave NaN logits on {self.backend.description}; check that the model's "
                f"weights are finite, and its range in {self._step.dtype}"
            )
        self._caches.write(new, position_ids, skip)
        return logits

    def _program(self, tokens: int, cache_length: int) -> Program:
        """The program for a step of this size; compiled during warm-up, looked up afterwards."""
        shape = StepShape(self.batch_size, tokens, cache_length)
        if shape not in self._programs:
            if self._warm:
                sizes = ", ".join(map(str, self._programs))
                raise RecompileError(
                    f"the step {shape} is not among those compiled: {sizes}; nothing compiles after warm-up"
                )
            start = time.perf_counter()
            self._programs[shape] = self.backend.compile(self._step, shape)
            self.stats.compiles += 1
            self.stats.compile_seconds += time.perf_counter() - start
        return self._programs[shape]


class _Hold:
    """Holds a session for one call: other threads wait, the same thread gets an error, not a deadlock.

    A stream may be continued in another thread, which then holds the session.
    """

    def __init__(self, session: Session):
        self._session = session

    def __enter__(self) -> _Hold:
        session = self._session
        if session._user is threading.current_thread():
            raise SessionBusyError(
                "this thread holds an unfinished stream of the session; close it (stream.close()), or use a "
                "staticgen.Session for each"
            )
        session._in_use.acquire()
        self.resume()
        return self

    def resume(self) -> None:
        """The thread that runs now is the one that holds."""
        self._session._user = threading.current_thread()

    def __exit__(self, *error: object) -> None:
        self._session._user = None
        self._session._in_use.release()


def read_call(
    model: PreTrainedModel,
    ids: Any,
    attention_mask: Any,
    generation_config: GenerationConfig | None,
    decoding: Mapping[str, Any],
) -> tuple[Prompts, Decoding]:
    """Check what a caller passed, before anything runs; see :meth:`Session.generate`."""
    settings = read_decoding(model, generation_config, decoding)
    prompts = read_prompts(
        ids,
        attention_mask,
        vocab_size=vocab_size(model),
        pad_token_id=settings.pad_token_id,
        eos_token_ids=settings.eos_token_ids,
    )
    return prompts, settings


def new_token_count(prompts: Prompts, settings: Decoding, capacity: int, remedy: str = "raise max_length") -> int:
    """How many tokens to make at most, in buffers of ``capacity`` tokens a row.

    ``max_length`` is a limit for prompt and new tokens together; ``max_new_tokens`` says how many. Lengths
    that only the model's generation_config sets are cut to what fits. ``remedy`` is what can be done about the
    capacity.

    Raises:
        ValueError: the prompt, or the prompt and the tokens asked for, do not fit.
    """
    limit = capacity
    if settings.max_length is not None and (settings.max_length <= capacity or not settings.lengths_are_own):
        limit = settings.max_length
        if limit > capacity:
            raise ValueError(
                f"max_length={limit} is more than the session's max_length of {capacity}, for which it is compiled; "
                "make a session with a larger max_length"
            )
    remedy = remedy if limit == capacity else "raise max_length"
    if prompts.width >= limit:
        row = max(range(prompts.batch), key=lambda index: len(prompts.rows[index]))
        raise ValueError(
            f"ids has {prompts.width} tokens (row {row} is the longest) and max_length is {limit}: max_length counts the "
            f"prompt, so it must be at least {prompts.width + 1}; shorten the prompt or {remedy}"
        )
    room = limit - prompts.width
    if settings.max_new_tokens is None:
        return room
    if settings.max_new_tokens > room and not settings.lengths_are_own:
        raise ValueError(
            f"ids has {prompts.width} tokens and max_new_tokens is {settings.max_new_tokens}: together "
            f"{prompts.width + settings.max_new_tokens}, more than max_length={limit}; {remedy} or lower max_new_tokens"
        )
    return min(settings.max_new_tokens, room)


def require_positions(step: Step, max_length: int) -> None:
    """Refuse a ``max_length`` for which the model has no positions (the last token is never fed)."""
    limit = step.position_limit
    if limit is not None and max_length - 1 > limit:
        raise ValueError(
            f"max_length (prompt and new tokens together) is {max_length}, but model_type "
            f"{step.model.config.model_type!r} has {limit} positions; use max_length={limit + 1} or less"
        )


def fit_buckets(given: Sequence[int] | None, default: Sequence[int], max_length: int) -> tuple[int, ...]:
    """The sizes of prefill steps, ascending: those given, or those of the default that ``max_length`` holds."""
    if given is None:
        return tuple(size for size in default if size <= max_length) or (max_length,)
    sizes = _whole_numbers("prefill_buckets", given, max_length)
    if not sizes:
        raise ValueError("prefill_buckets is [], expected at least one size")
    return tuple(sorted(set(sizes)))


def _fit_cache_sizes(given: Sequence[int] | None, default: Sequence[int], max_length: int) -> tuple[int, ...]:
    if given is None:
        return (*(size for size in default if size <= max_length // 2), max_length)
    sizes = _whole_numbers("cache_sizes", given, max_length)
    return tuple(sorted({*sizes, max_length}))


def _whole_numbers(name: str, given: Any, most: int) -> list[int]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(_is_count(size, 1, most) for size in given):
        raise ValueError(f"{name} is {given!r}, expected a list of whole numbers from 1 to max_length={most}")
    return [int(size) for size in given]


def _require_count(name: str, value: Any, least: int) -> int:
    if not _is_count(value, least):
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
    return int(value)


def _is_count(value: Any, least: int, most: float = math.inf) -> bool:
    return is_int(value) and least <= int(value) <= most
