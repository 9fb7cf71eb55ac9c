"""A session: one model compiled for fixed sizes on one backend, replayed for every call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from staticgen.backends import Backend
from staticgen.calls import Call, Hooks
from staticgen.contexts import CachedContext, Context, RecomputedContext
from staticgen.errors import DoesNotFitError, StaleSessionError
from staticgen.holding import Hold, Lock
from staticgen.layouts import layout_class, layout_factory
from staticgen.limits import (
    ENDLESS,
    default_layout,
    needed_lengths,
    new_token_count,
    read_overflow,
    require_count,
    require_positions,
)
from staticgen.loops import loop_of, run_for
from staticgen.many import require_plain, run_many
from staticgen.models import read_model
from staticgen.prefix_cache import PrefixCache, Recorder
from staticgen.prefixes import Prefix, prefix_of_keys_values, prefix_of_tokens, require_prefix_layout
from staticgen.programs import Programs
from staticgen.progress import bar
from staticgen.prompts import Prompts
from staticgen.ready import ReadyKeys, read_past_key_values, warn_that_keys_win
from staticgen.request import Request, read_request
from staticgen.sources import Asked, open_source
from staticgen.stats import CallStats, SessionStats


class Session:
    """Holds what is compiled for a model and generates with it, any number of times.

    Everything is compiled here, in the constructor. Afterwards prompt lengths, batches up to
    ``batch_size``, masks, decoding settings and overflow policies vary freely and compile nothing.

    Args:
        model: a causal decoder of transformers on the CPU, which stays as it is and shares its weights; or the folder
            of a bundle that ``staticgen compile`` made. What a bundle was compiled for (sizes, backend) is fixed:
            those arguments are left out, or the same.
        max_length: tokens of a row, prompt and padding included; sizes the cache. None for 512.
        batch_size: rows of the compiled steps; calls may have fewer prompts. None for 1.
        backend: ``"auto"`` or a name of :data:`staticgen.backends.BACKENDS`.
        layout: which slots the tokens take: ``"ring"``, ``"shift"``, ``"sink"``, ``"none"`` or one that was
            registered by :func:`staticgen.register_layout`. None: ``"sink"`` for that overflow, else the bundle's or ``"ring"``.
        layout_options: the layout's parameters; see :meth:`set_cache_implementation`.
        overflow: what becomes of a call that needs more than ``max_length``, unless the call says otherwise.
            ``"error"`` refuses it before it starts. ``"stop"`` ends it at ``max_length``, with finish reason
            "length". ``"slide"`` goes on and forgets the oldest tokens: no token sees further back than
            ``max_length`` positions, its own included. ``"sink"`` goes on with the first and the newest tokens;
            it needs that layout. None: what suits the layout, ``"sink"`` for that one and else ``"error"``.
        prefix_cache: bytes for the keys and values of the prompts and answers so far; of a later prompt that begins
            like one of them, only what is new runs. 0 for none. See :class:`staticgen.prefix_cache.PrefixCache`.
        prefill_buckets: prompt tokens per prefill step, one program each; None for the target's own.
        cache_sizes: cache lengths below ``max_length`` at which decode is compiled too, so that its cost
            follows the tokens that are live; None for those of the target's own up to half of it.
        device: the backend's name for a device, None for its default.
        backend_options: compiler options by the vendor's names.

    Attributes:
        backend: the open backend; ``session.backend.description`` says what it runs on.
        layout, layout_options, overflow: those in use.
        stats: counters and times.

    Raises:
        UnsupportedModelError: the model cannot run as a static step.
        BackendUnavailableError: the backend's library or device is not here.
        CompileError: the compiler refused.
        BundleError, FileNotFoundError: the bundle cannot be used; the message says why.
        ValueError, TypeError: a bad argument; nothing has been compiled then.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: Any,
        *,
        max_length: int | None = None,
        batch_size: int | None = None,
        backend: str = "auto",
        layout: str | None = None,
        layout_options: Mapping[str, Any] | None = None,
        overflow: str | None = None,
        prefix_cache: int | None = None,
        prefill_buckets: Sequence[int] | None = None,
        cache_sizes: Sequence[int] | None = None,
        device: str | None = None,
        backend_options: Mapping[str, str] | None = None,
    ):
        model = read_model(model)
        layout = default_layout(overflow, model) if layout is None else layout
        policy = read_overflow(overflow, layout, layout_class(layout))
        self._asked_overflow = None if overflow is None else policy
        budget = 0 if prefix_cache is None else require_count("prefix_cache", prefix_cache, least=0)
        asked = Asked(max_length, batch_size, backend, device, backend_options, prefill_buckets, cache_sizes)
        source = self._source = open_source(model, asked)
        self.max_length, self.batch_size = source.max_length, source.batch_size
        self.backend: Backend = source.backend
        self.prefill_buckets, self.cache_sizes = source.prefill_buckets, source.cache_sizes
        self._step = source.step
        self._lock = Lock()
        self.stats = SessionStats()
        self._programs = Programs(source, self.stats)
        self._prefix_cache = PrefixCache(budget, self._step.cache_spec, self.stats) if budget else None
        self._recorder: Recorder | None = None
        self._set_layout(layout, layout_options or {}, overflow)

    @torch.inference_mode(False)
    def set_cache_implementation(self, name: str, /, **parameters: Any) -> None:
        """Keep tokens by another layout from now on, or by the same with other parameters.

        The overflow policy is the one that the session was made with, if the layout has it, and else the layout's
        default. Nothing is compiled anew, except that ``"none"`` has programs of its own, and on backend xla ``"sink"`` a
        function that turns keys.

        Args:
            name: ``"ring"``, ``"shift"``, ``"sink"``, ``"none"`` or a registered one, in any letter case.
            parameters: the layout's own; of ``"sink"`` ``window_length``, how many of the newest tokens are
                seen (None for all that fit), and ``num_sink_tokens``, how many of the first (4).

        Raises:
            UnknownNameError: there is no such layout; the message lists those there are.
            ValueError, TypeError: the parameters do not suit the layout or the session; it stays as it was.
            SessionBusyError: this thread still holds an open stream of this session.
        """
        cls = layout_class(name)
        with Hold(self._lock):
            asked = self._asked_overflow
            self._set_layout(name, parameters, asked if asked in cls.overflow else None)

    def _set_layout(self, name: str, options: Mapping[str, Any], overflow: str | None) -> None:
        with self.backend.scope():
            self._make_layout(name, options, overflow)

    def _make_layout(self, name: str, options: Mapping[str, Any], overflow: str | None) -> None:
        cls = layout_class(name)
        policy = read_overflow(overflow, name, cls)
        if self._prefix_cache is not None:
            require_prefix_layout(name, cls, "prefix_cache")
        make = layout_factory(name, options)
        capacity = make(self.max_length).capacity
        context: Context
        if cls.recomputes:
            if policy != "slide":
                require_positions(self._step, self.max_length)
            limit = self._step.position_limit or self.max_length
            context = RecomputedContext(self._programs, sorted({min(size, limit) for size in self.cache_sizes}))
        else:
            require_positions(self._step, self.max_length, policy, capacity)
            lengths = needed_lengths(self._step.cache_spec, self.cache_sizes)
            context = self._allocate(
                lambda: CachedContext(self._programs, make, self.prefill_buckets, lengths, self.max_length)
            )
        self._programs.prepare(context.sizes())
        self._context, self._capacity = context, capacity
        self._most_kept = self.max_length if capacity is None else min(capacity, self.max_length)
        self.layout, self.layout_options, self.overflow = name.strip().lower(), dict(options), policy
        self.stats.cache_bytes = context.nbytes

    def _allocate(self, make: Callable[[], Context]) -> Context:
        try:
            return make()
        except DoesNotFitError:
            raise
        except (RuntimeError, MemoryError) as error:
            spec = self._step.cache_spec
            gigabytes = sum(spec.nbytes(self.batch_size, size) for size in self.cache_sizes) / 1e9
            raise MemoryError(
                f"the cache for max_length={self.max_length} and batch_size={self.batch_size} needs {gigabytes:.3g} GB, "
                "which this machine does not give; lower either"
            ) from error

    def __repr__(self) -> str:
        return (
            f"Session({self._step.model_type}, backend={self.backend.description!r}, layout={self.layout!r}, "
            f"max_length={self.max_length}, batch_size={self.batch_size}, prefill_buckets={self.prefill_buckets})"
        )

    def is_current(self, model: Any) -> bool:
        """Whether ``model`` is what it was when this session was compiled: weights, modules and config."""
        return self._source.is_current(model)

    @torch.inference_mode(False)
    def prefix(self, ids: Any = None, *, keys_values: Any = None) -> Prefix:
        """Compute a prefix once, to be used as ``generate(..., prefix=prefix)`` any number of times.

        Args:
            ids: its tokens, one row: int64 [n] or [1, n], or a list.
            keys_values: instead of them, a learned prefix (prefix tuning): per layer the keys, as the model caches
                them at positions 0 to n - 1, and the values, [K, n, D] or [1, K, n, D], or a transformers ``Cache``.

        Returns:
            a prefix, for every session of this model; it can be saved. It shares no memory with the session.

        Raises:
            ValueError, TypeError: bad input, or a layout that keeps nothing; nothing has run then.
            StaleSessionError, SessionBusyError: see :meth:`generate`.
        """
        self._require_current()
        if (ids is None) == (keys_values is None):
            raise ValueError("prefix takes either ids or keys_values")
        if keys_values is not None:
            return prefix_of_keys_values(keys_values, self._step)
        with Hold(self._lock), self.backend.scope():
            require_prefix_layout(self.layout, layout_class(self.layout), "a prefix")
            return prefix_of_tokens(ids, self._step, self._context, self._most_kept)

    def generate(
        self,
        ids: Any,
        attention_mask: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> Any:
        """Generate, as ``model.generate`` does.

        Args:
            ids: int64 [B, T] or [T]: tensor, numpy array, list of ids or (ragged) list of lists.
            attention_mask: [B, T], 1 on real tokens, 0 on the padding at the left.
            generation_config: settings; the model's own fill what it leaves open.
            arguments: any of these, which win over both configs:

                - ``max_length`` (counts the prompt; at most the session's, which is the default, unless
                  ``overflow`` lets it go on), ``max_new_tokens`` (wins over it), ``max_time``, ``eos_token_id``,
                  ``pad_token_id``, ``stop_strings`` with ``tokenizer``, and the other fields of a
                  ``GenerationConfig`` that :data:`staticgen.decoding.HONOURED` lists, by their own names
                - ``seed``: makes sampling repeatable, and leaves torch's global generator alone
                - ``frequency_penalty``, ``presence_penalty``: see :class:`staticgen.decoding.Decoding`
                - ``logits_processor``, ``stopping_criteria``, ``streamer``: transformers' objects or one's own; see
                  :class:`staticgen.calls.Hooks`
                - ``token_mask``: which tokens may come next: bool [V] or [B, V], a callable that gives one for the
                  history int64 [B, t], or :func:`staticgen.regex`, ``json_schema`` or ``grammar``
                - ``overflow``: the policy of this call, if not the session's
                - ``prefix``: what :meth:`prefix` made. ``ids`` are the whole prompts, each of which begins with its
                  tokens; after a learned prefix, which has none, they are what follows it, and ``max_length`` counts
                  both
                - ``past_key_values``: keys and values of the first tokens of ``ids``, which then do not run: a
                  transformers ``Cache``, or per layer its keys and values [B, K, n, D]. It is read, not changed.
                - ``cache_implementation``: the session's layout; :meth:`set_cache_implementation` changes it

        Returns:
            int64 [B * num_return_sequences, T + new tokens]: the prompts as given, then the new tokens; a row that has
            ended is filled with the pad token. A fresh tensor. With ``return_dict_in_generate`` transformers'
            ``GenerateDecoderOnlyOutput`` or ``GenerateBeamDecoderOnlyOutput`` with it.

        Raises:
            ValueError, TypeError: bad input; nothing has run then.
            StaleSessionError: the model has changed since the session was made.
            SessionBusyError: this thread still holds an open stream of this session.
        """
        return self.run_to_end(self._read(ids, attention_mask, generation_config, arguments))

    def stream(
        self,
        ids: Any,
        attention_mask: Any = None,
        *,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> Iterator[torch.Tensor]:
        """Like :meth:`generate`, but yields the new tokens of each step, int64 [B], as they come.

        Where the loop is on the device (``stats.last.loop``), some steps' tokens come at once.
        The session is in use until the stream ends, is closed or is dropped.
        """
        return self.run(self._read(ids, attention_mask, generation_config, arguments))

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        progress: bool = False,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> list[torch.Tensor]:
        """Generate from any number of prompts, in the session's ``batch_size`` rows.

        A row whose text has ended takes the next prompt, while the others go on; nothing is compiled. Each text is what
        :meth:`generate` gives for its prompt alone, with sampling and a ``seed`` too.

        Args:
            prompts: int64 [t] each, as tensors, arrays or lists; they may differ in length.
            progress: draw a progress bar on standard error.
            generation_config, arguments: as for :meth:`generate`, for all prompts, but for what belongs to one call
                (num_beams, num_return_sequences, return_dict_in_generate, streamer, past_key_values). A caller's
                logits_processor and stopping_criteria are called for each text by itself, with int64 [1, t].

        Returns:
            int64 [t + new tokens] for each prompt, in their order, without padding.

        Raises:
            ValueError, TypeError: as for :meth:`generate`, before anything runs; the message names the prompt.
        """
        cls = layout_class(self.layout)
        if not (cls.grows or cls.recomputes):
            raise ValueError(
                f"layout {self.layout!r} cannot give one row another text while others go on; call "
                "session.set_cache_implementation('ring')"
            )
        model, rest = self._require_current(), dict(arguments)
        self._check_implementation(rest.pop("cache_implementation", None), None)
        requests, counts = [], []
        for index, ids in enumerate(prompts):
            try:
                request = read_request(model, ids, None, generation_config, rest)
                require_plain(request, index)
                policy, new_tokens = self._plan(request)
            except (ValueError, TypeError) as error:
                raise type(error)(f"prompts[{index}]: {error}") from error
            if policy in ENDLESS:
                raise ValueError(f"overflow={policy!r} is not for generate_many; use 'error' or 'stop'")
            requests.append(request)
            counts.append(new_tokens)
        with Hold(self._lock), bar("generating", len(requests), progress) as report:
            total = len(requests)
            stats = CallStats(
                prompt_tokens=sum(request.prompts.longest for request in requests),
                new_tokens=[0] * total,
                finish_reasons=[""] * total,
            )
            self.stats.last = stats
            with torch.inference_mode(False), self.backend.scope():
                return run_many(self._context, requests, counts, self.batch_size, self._sizes, stats, report)

    def _read(
        self, ids: Any, attention_mask: Any, generation_config: GenerationConfig | None, arguments: Mapping[str, Any]
    ) -> Request:
        model, rest = self._require_current(), dict(arguments)
        name = rest.pop("cache_implementation", None)
        request = read_request(model, ids, attention_mask, generation_config, rest)
        self._check_implementation(name, request.past_key_values)
        return request

    def _require_current(self) -> Any:
        """The model, which must be what it was; the step's copy of it where it is gone."""
        model = self._source.given
        if model is not None and not self.is_current(model):
            raise StaleSessionError(
                "the model's weights, modules or config changed after this session was compiled from them; "
                "make a new staticgen.Session"
            )
        return self._source.model

    def _check_implementation(self, name: str | None, past_key_values: Any) -> None:
        if name is None:
            return
        layout_class(name)
        if past_key_values is not None:
            warn_that_keys_win(name, self.layout)
        elif name.strip().lower() != self.layout:
            raise ValueError(
                f"cache_implementation is {name!r}, but this session keeps its tokens by layout {self.layout!r}: call "
                f"session.set_cache_implementation({name!r}) first"
            )

    def run_to_end(self, request: Request) -> Any:
        """:meth:`generate` for a call that has been read."""
        settings, ids = request.settings, request.prompts.ids
        if settings.num_beams > 1:
            return self._search_beams(request)
        call, tokens = self._start(request)
        new = [step[:, None] for step in tokens]
        sequences = torch.cat([ids.repeat_interleave(settings.num_return_sequences, 0), *new], dim=1)
        if not settings.return_dict_in_generate:
            return sequences
        kept: dict[str, Any] = {"scores": call.scores, "logits": call.logits}
        kept = {name: None if steps is None else tuple(steps) for name, steps in kept.items()}
        return GenerateDecoderOnlyOutput(sequences=sequences, **kept)  # type: ignore[arg-type]

    def run(self, request: Request) -> Iterator[torch.Tensor]:
        """:meth:`stream` for a call that has been read."""
        if request.settings.num_beams > 1:
            raise ValueError(
                f"num_beams is {request.settings.num_beams}, but a stream yields tokens as they come, and beam search "
                "knows them at the end only: use generate"
            )
        return self._start(request)[1]

    @torch.inference_mode(False)  # see _outside_inference_mode
    def _start(self, request: Request) -> tuple[Call, Iterator[torch.Tensor]]:
        """The state of a call that has been read, and its tokens, of which none has been computed."""
        prompts, settings = request.prompts, request.settings
        copies = settings.num_return_sequences
        self._require_rows(prompts, copies, "num_return_sequences")
        policy, new_tokens = self._plan(request)
        past = request.past_key_values
        ready = None if past is None else self._read_past(past, prompts)
        repeated = prompts.repeated(copies)
        resident = self.backend.resident
        call = Call(repeated, settings, self.batch_size, new_tokens, request.hooks, self._sizes, resident)
        call.position_ids[: repeated.batch] += prompts.before
        window = self.max_length if policy == "slide" else None

        def prefill() -> torch.Tensor:
            found, self._recorder = ready, None
            if self._prefix_cache is not None and ready is None:
                found = self._prefix_cache.find(prompts.rows, self.batch_size, self._most_kept)
                self._recorder = Recorder(self._prefix_cache, repeated.rows, self._most_kept)
            call.stats.reused_tokens = 0 if found is None else sum(found.counts)
            return self._context.prefill(prompts.rows, window, found, copies)

        return call, self._tokens(call, request.hooks, prefill)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._step.vocab_size, self._step.logits_size

    def _require_rows(self, prompts: Prompts, copies: int, name: str) -> None:
        if prompts.batch * copies > self.batch_size:
            times = f" with {name}={copies}" if copies > 1 else ""
            raise ValueError(
                f"ids has {prompts.batch} prompts{times}, more than the session's batch_size of {self.batch_size}; "
                "make a session with a larger batch_size or split the call"
            )

    def _plan(self, request: Request) -> tuple[str, int]:
        """The overflow policy of a call, and how many tokens it may make."""
        policy = self.overflow
        if request.overflow is not None:
            cls = layout_class(self.layout)
            policy = read_overflow(request.overflow, self.layout, cls)
            if not cls.recomputes:
                require_positions(self._step, self.max_length, policy, self._capacity)
        remedy = "make a session with a larger max_length"
        return policy, new_token_count(request.prompts, request.settings, self.max_length, policy, remedy)

    def _search_beams(self, request: Request) -> Any:
        from staticgen.beams import require_beams, search_all  # noqa: PLC0415 - it needs a model class of transformers

        require_beams(request, self.batch_size)
        policy, new_tokens = self._plan(request)
        if policy in ENDLESS:
            raise ValueError(f"num_beams above 1 does not go with overflow={policy!r}; use 'error' or 'stop'")
        with Hold(self._lock), self.backend.scope():
            self.stats.last = CallStats(prompt_tokens=sum(map(len, request.prompts.rows)))
            return search_all(self._context, self._step, self.batch_size, request, new_tokens)

    def _read_past(self, past_key_values: Any, prompts: Prompts) -> ReadyKeys | None:
        is_prefix = isinstance(past_key_values, Prefix)
        require_prefix_layout(self.layout, layout_class(self.layout), "prefix" if is_prefix else "past_key_values")
        if is_prefix:
            return past_key_values.ready(prompts, self._step, self.batch_size, self._most_kept)
        ready = read_past_key_values(past_key_values, prompts, self._step.cache_spec, self.batch_size)
        if self._capacity is not None and ready.buffers.length > self._capacity:
            raise ValueError(
                f"past_key_values holds {ready.buffers.length} tokens, more than the {self._capacity} that layout "
                f"{self.layout!r} keeps"
            )
        return ready

    def _tokens(
        self, call: Call, hooks: Hooks, prefill: Callable[[], torch.Tensor]
    ) -> Generator[torch.Tensor, None, None]:
        """The loop: prefill, then choose a token, hand it out, run one step; until all rows have ended."""
        with Hold(self._lock) as hold:
            self.stats.last = call.stats
            call.begin()
            logits = run_for(self.backend, prefill)
            loop = loop_of(call, hooks, self.backend, self._context, self.layout, self._recorder)
            try:
                self._keep()
                tokens = run_for(self.backend, lambda: call.choose(logits))
                while True:
                    call.hand_to_streamer(tokens)
                    yield tokens
                    hold.resume()
                    if call.finished:
                        break
                    tokens = run_for(self.backend, loop.next)
            finally:
                self._end(loop)
                self._keep()
            call.end_streamer()

    @torch.inference_mode(False)
    def _end(self, loop: Any) -> None:
        with self.backend.scope():
            loop.end()

    @torch.inference_mode(False)
    def _keep(self) -> None:
        """What has run goes to the prefix cache."""
        if self._recorder is not None:
            with self.backend.scope():
                self._recorder.keep(self._context.read)
