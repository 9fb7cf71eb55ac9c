"""``generate`` and ``stream`` on a model: they make a session for its sizes and keep it with the model."""

from __future__ import annotations

import json
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from staticgen.compiled import CompiledModel
from staticgen.decoding import Decoding
from staticgen.layouts import layout_class
from staticgen.limits import ENDLESS, default_layout, new_token_count, read_overflow
from staticgen.models import longest, position_limit, read_model
from staticgen.prompts import Prompts
from staticgen.ready import warn_that_keys_win
from staticgen.request import Request, read_request
from staticgen.session import Session
from staticgen.sources import DEFAULT_MAX_LENGTH

# Sessions kept for one model; the one that was used longest ago goes first.
SESSIONS_PER_MODEL = 4


def generate(
    model: Any,
    ids: Any,
    attention_mask: Any = None,
    *,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    backend: str = "auto",
    layout: str | None = None,
    layout_options: Mapping[str, Any] | None = None,
    overflow: str | None = None,
    prefill_buckets: Sequence[int] | None = None,
    cache_sizes: Sequence[int] | None = None,
    device: str | None = None,
    backend_options: Mapping[str, str] | None = None,
    generation_config: GenerationConfig | None = None,
    **arguments: Any,
) -> Any:
    """Generate tokens as ``model.generate`` does, on static shapes.

    The first call compiles for its sizes, and the session stays with the model: another call with the
    same number of prompts, ``max_length``, backend and layout compiles nothing, nor does any other prompt
    length, mask or decoding setting. When the model's weights have changed, it compiles anew.

    Args:
        model: a causal decoder of transformers, on the CPU, or the folder of a bundle; see :class:`staticgen.Session`.
        ids: int64 [B, T] or [T]: tensor, numpy array, list of ids or (ragged) list of lists.
        attention_mask: [B, T], 1 on real tokens, 0 on the padding at the left.
        max_length: tokens of a row, prompt and padding included; sizes the buffers.
        max_new_tokens: how many new tokens at most; with ``overflow``, also more than ``max_length`` holds. Alone,
            it sizes the buffers together with the prompt, rounded up to a power of two. With neither, and none
            in the generation config, 512 bounds the length, and a warning says so.
        backend: ``"auto"``, ``"openvino"``, ``"npu"``, ``"cuda"``, ``"xla"``, ``"inductor"``, ``"eager"``; see
            :class:`staticgen.Session`, also for
            ``layout``, ``layout_options``, ``overflow``, ``prefill_buckets``, ``cache_sizes``, ``device`` and
            ``backend_options``.
        generation_config, arguments: see :meth:`staticgen.Session.generate`; ``cache_implementation`` is
            transformers' word for ``layout``.

    Returns:
        int64 [B * num_return_sequences, T + new tokens]: the prompts as given, then the new tokens; a row that has
        ended is filled with the pad token. With ``return_dict_in_generate`` transformers' output object.

    Raises:
        ValueError, TypeError: bad input, before anything is compiled.
        UnsupportedModelError, BackendUnavailableError, CompileError: see :class:`staticgen.Session`.
    """
    lengths = {"max_length": max_length, "max_new_tokens": max_new_tokens}
    session, request = _prepare(
        model, ids, attention_mask, generation_config, {**_given(lengths), **arguments},
        overflow=overflow, backend=backend, layout=layout, layout_options=layout_options,
        prefill_buckets=prefill_buckets, cache_sizes=cache_sizes, device=device, backend_options=backend_options,
    )  # fmt: skip
    return session.run_to_end(request)


def stream(
    model: Any,
    ids: Any,
    attention_mask: Any = None,
    *,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    backend: str = "auto",
    layout: str | None = None,
    layout_options: Mapping[str, Any] | None = None,
    overflow: str | None = None,
    prefill_buckets: Sequence[int] | None = None,
    cache_sizes: Sequence[int] | None = None,
    device: str | None = None,
    backend_options: Mapping[str, str] | None = None,
    generation_config: GenerationConfig | None = None,
    **arguments: Any,
) -> Iterator[torch.Tensor]:
    """Like :func:`generate`, but yields the new tokens of each step, int64 [B], as they come.

    Everything is checked and compiled when this is called, not at the first token. Closing the iterator
    ends the call.
    """
    lengths = {"max_length": max_length, "max_new_tokens": max_new_tokens}
    session, request = _prepare(
        model, ids, attention_mask, generation_config, {**_given(lengths), **arguments},
        overflow=overflow, backend=backend, layout=layout, layout_options=layout_options,
        prefill_buckets=prefill_buckets, cache_sizes=cache_sizes, device=device, backend_options=backend_options,
    )  # fmt: skip
    return session.run(request)


def load(folder: str | os.PathLike[str], **arguments: Any) -> Session:
    """A session of the bundle in ``folder``: ``staticgen.load("bundle").generate(ids)``.

    Its files are checked first, each against the manifest; programs are then read while the session is in use already.

    Args:
        folder: what ``staticgen compile`` wrote.
        arguments: of :class:`staticgen.Session`, but for what the bundle was compiled for.

    Raises:
        FileNotFoundError, BundleError: it is no bundle, or one that cannot be used here.
        TypeError, ValueError, BackendUnavailableError: see :class:`staticgen.Session`.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder is a {type(folder).__name__}, expected the path of a bundle")
    return Session(folder, **arguments)


def _prepare(
    model: Any,
    ids: Any,
    attention_mask: Any,
    generation_config: GenerationConfig | None,
    arguments: Mapping[str, Any],
    *,
    layout: str | None,
    overflow: str | None,
    **session_arguments: Any,
) -> tuple[Session, Request]:
    model = read_model(model)
    rest = dict(arguments)
    layout = _layout(model, layout, rest.pop("cache_implementation", None), overflow, rest.get("past_key_values"))
    policy = read_overflow(overflow, layout, layout_class(layout))
    request = read_request(model, ids, attention_mask, generation_config, {**rest, "overflow": overflow})
    prompts, settings = request.prompts, request.settings
    capacity = _capacity(model, prompts, settings, policy)
    new_token_count(prompts, settings, capacity, policy)
    # Beams are searched for one prompt after the other.
    rows = settings.num_beams if settings.num_beams > 1 else prompts.batch * settings.num_return_sequences
    sizes = {} if isinstance(model, CompiledModel) else {"max_length": capacity, "batch_size": rows}
    session = session_for(model, **sizes, layout=layout, **session_arguments)
    return session, request


def _layout(
    model: Any, layout: str | None, cache_implementation: str | None, overflow: str | None, past_key_values: Any
) -> str:
    """The layout of a call; ``cache_implementation`` is transformers' name for it."""
    if layout is not None:
        layout_class(layout)
    if cache_implementation is not None:
        layout_class(cache_implementation)
        if past_key_values is not None:
            warn_that_keys_win(cache_implementation, layout or default_layout(overflow, model))
        elif layout is None:
            return cache_implementation
        elif layout.strip().lower() != cache_implementation.strip().lower():
            raise ValueError(f"layout={layout!r} and cache_implementation={cache_implementation!r} differ; give one")
    return default_layout(overflow, model) if layout is None else layout


def _capacity(model: Any, prompts: Prompts, settings: Decoding, overflow: str) -> int:
    """Tokens of a row that the buffers must hold."""
    if isinstance(model, CompiledModel):
        return model.max_length
    limit = position_limit(model)
    if limit is not None and prompts.width > limit and overflow not in ENDLESS:
        raise ValueError(
            f"{prompts.size}, but model_type {model.config.model_type!r} has {limit} positions; shorten the prompt"
        )
    if settings.max_length is not None:
        return settings.max_length
    if settings.max_new_tokens is not None:
        needed = prompts.width + settings.max_new_tokens
        rounded = max(64, 1 << (needed - 1).bit_length())
        return rounded if limit is None else max(needed, min(rounded, limit + 1))
    capacity = longest(model, DEFAULT_MAX_LENGTH)
    warnings.warn(
        f"neither max_length nor max_new_tokens is given: generating up to max_length={capacity}",
        UserWarning,
        stacklevel=4,
    )
    return capacity


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


# A session refers to a copy of the model's modules, not to the model, so that its entry dies with the model.
_sessions: weakref.WeakKeyDictionary[Any, OrderedDict[str, Session]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def session_for(model: Any, **arguments: Any) -> Session:
    """The session kept for this model and these arguments of :class:`Session`; made if there is none.

    One that was compiled from other weights than the model has now is dropped.
    """
    key = json.dumps(arguments, sort_keys=True, default=repr)
    with _lock:
        kept = _sessions.setdefault(model, OrderedDict())
        session = kept.pop(key, None)
        if session is None or not session.is_current(model):
            session = Session(model, **arguments)
        kept[key] = session
        while len(kept) > SESSIONS_PER_MODEL:
            kept.popitem(last=False)
        return session
