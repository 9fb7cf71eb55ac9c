"""A prefix: keys and values of the tokens that prompts begin with, computed once and used any number of times."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from transformers import Cache

from staticgen.contexts import Context
from staticgen.facts import StepFacts
from staticgen.identity import Identity, difference
from staticgen.layouts import Layout
from staticgen.prompts import Prompts, read_prompts
from staticgen.ready import ReadyKeys, layers_of, ready_from_spans
from staticgen.shapes import CacheSpec, LayerSpec
from staticgen.spans import KVSpan, usable_lengths

_FORMAT, _VERSION = "staticgen-prefix", "1"


class Prefix:
    """What :meth:`staticgen.Session.prefix` computes, and :func:`load_prefix` reads; it never changes.

    It is for every session of the same model, whatever their sizes, layout and backend.

    Args:
        identity: the model that it is for.
        span: keys and values of its tokens.
        token_ids: int64 [n]; None for a learned prefix, which has keys and values only.
    """

    def __init__(self, identity: Identity, span: KVSpan, token_ids: torch.Tensor | None):
        if not all(bool(tensor.isfinite().all()) for pair in span.parts.values() for tensor in pair):
            raise ValueError("the prefix has keys or values that are not finite")
        self.identity, self._span, self._token_ids = identity, span, token_ids

    def __len__(self) -> int:
        """n, the number of its tokens."""
        return self._span.stop

    def __repr__(self) -> str:
        kind = "learned" if self._token_ids is None else "tokens"
        return (
            f"Prefix({len(self)} {kind}, {self.identity.config.get('model_type')}, {self.dtype}, {self.nbytes} bytes)"
        )

    @property
    def token_ids(self) -> torch.Tensor | None:
        """int64 [n], a copy; None for a learned prefix."""
        return None if self._token_ids is None else self._token_ids.clone()

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values."""
        return self.identity.spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self._span.nbytes

    @property
    def before(self) -> int:
        """Tokens that stand before the ids of a call: n of a learned prefix, otherwise none, as the ids hold them."""
        return len(self) if self._token_ids is None else 0

    def ready(self, prompts: Prompts, step: StepFacts, batch: int, most: int) -> ReadyKeys | None:
        """Its keys and values for these prompts; None where they cannot be used and everything must run.

        Args:
            prompts: the call's.
            step: of the session's model.
            batch: rows of the session.
            most: tokens of a row that may be taken over.

        Raises:
            ValueError: it is for another model, or a prompt does not begin with it.
        """
        if different := difference(self.identity, step.identity()):
            raise ValueError(f"prefix was made for another model than the session's: it has {different}")
        count = len(self)
        if self._token_ids is None:
            if count > most:
                raise ValueError(f"prefix has {count} tokens, more than the {most} that this session keeps of a row")
            usable = np.arange(count + 1) == count
            rows, lengths = [usable] * prompts.batch, [count + len(row) for row in prompts.rows]
        else:
            for index, row in enumerate(prompts.rows):
                self._require_beginning(index, row)
            usable = usable_lengths([self._span], count)
            lengths = [len(row) for row in prompts.rows]
            rows = [usable[: min(length - 1, most) + 1] for length in lengths]  # the last token gives the logits
        return ready_from_spans([[self._span]] * prompts.batch, rows, lengths, step.cache_spec, batch, self.before)

    def _require_beginning(self, index: int, row: torch.Tensor) -> None:
        assert self._token_ids is not None
        shared = min(len(row), len(self))
        differ = (row[:shared] != self._token_ids[:shared]).nonzero()
        remedy = "a prompt must begin with all tokens of the prefix; leave prefix out, or make one for what they share"
        if len(differ):
            at = int(differ[0])
            raise ValueError(
                f"ids row {index} differs from the prefix at token {at}: {int(row[at])} there, {int(self._token_ids[at])} "
                f"in the prefix; {remedy}"
            )
        if shared < len(self):
            raise ValueError(f"ids row {index} has {len(row)} tokens and the prefix {len(self)}; {remedy}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, which is there as a whole or not at all."""
        tensors = {} if self._token_ids is None else {"token_ids": self._token_ids}
        members: dict[LayerSpec, int] = {}
        for index, size in enumerate(self.identity.spec.layers):
            member = members[size] = members.get(size, -1) + 1
            for kind, tensor in zip(("keys", "values"), self._span.parts[size], strict=True):
                tensors[f"{kind}.{index}"] = tensor[member].clone()
        metadata = {"format": _FORMAT, "version": _VERSION, "length": str(len(self)), **self.identity.to_strings()}
        target = Path(path)
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            safetensors.torch.save_file(tensors, unfinished, metadata)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def load_prefix(path: str | os.PathLike[str]) -> Prefix:
    """Read a prefix that :meth:`Prefix.save` wrote. Whether it suits a model is seen when it is used.

    Raises:
        ValueError: the file is damaged, or is something else.
        OSError: it cannot be read.
    """
    octets = Path(path).read_bytes()
    try:
        return _parse(octets)
    except (ValueError, TypeError, KeyError, RecursionError, safetensors.SafetensorError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{os.fspath(path)!r} is no prefix that can be read: {reason}") from error


def read_prefix(prefix: Any, past_key_values: Any) -> Any:
    """The one that is given of a call's ``prefix`` and ``past_key_values``; None without either."""
    if prefix is None:
        return past_key_values
    if not isinstance(prefix, Prefix):
        raise TypeError(f"prefix is a {type(prefix).__name__}, expected what session.prefix(ids) returns")
    if past_key_values is not None:
        raise ValueError("both prefix and past_key_values are given; leave one out")
    return prefix


def after_prefix(prompts: Prompts, prefix: Any) -> Prompts:
    """The prompts of a call with ``prefix``, if it is one."""
    return replace(prompts, before=prefix.before) if isinstance(prefix, Prefix) else prompts


def require_prefix_layout(layout: str, cls: type[Layout], argument: str) -> None:
    """Refuse a layout that keeps no keys and values."""
    if cls.recomputes:
        raise ValueError(
            f"layout {layout!r} keeps no keys and values, so that {argument} is of no use with it: leave it out, or "
            "choose layout='ring'"
        )


def prefix_of_tokens(ids: Any, step: StepFacts, context: Context, most: int) -> Prefix:
    """Run the tokens of one row, int64 [n] or [1, n], in a session's context, and take out what it caches of them.

    ``most`` is how many tokens of a row the context keeps.
    """
    prompts = read_prompts(ids, None, vocab_size=step.vocab_size, pad_token_id=None, eos_token_ids=())
    if prompts.batch != 1:
        raise ValueError(
            f"ids has {prompts.batch} rows, expected one: a prefix is what all prompts of a call begin with"
        )
    count = prompts.width
    if count > most:
        raise ValueError(
            f"ids has {count} tokens, more than the {most} that this session keeps of a row; shorten it or make a "
            "session with a larger max_length"
        )
    context.prefill(prompts.rows)
    span = context.read(0, 0, count)
    if span is None:
        raise ValueError("the session's layout does not keep all tokens of ids; use layout='ring'")
    return Prefix(step.identity(), span, prompts.rows[0])


def prefix_of_keys_values(keys_values: Any, step: StepFacts) -> Prefix:
    """A learned prefix.

    Args:
        keys_values: per layer its keys and values, [K, n, D] or [1, K, n, D], or a transformers ``Cache`` of them.
        step: of the model that they were learned for.

    Raises:
        TypeError, ValueError: the message says which layer does not fit, and what was expected.
    """
    spec, pairs = step.cache_spec, _pairs(keys_values)
    if len(pairs) != len(spec.layers):
        raise ValueError(f"keys_values has {len(pairs)} layers, the model caches {len(spec.layers)}")
    count = max(keys.shape[1] for keys, _ in pairs)
    if count == 0:
        raise ValueError("keys_values holds no token")
    return Prefix(step.identity(), _span(pairs, spec, count, "keys_values: "), None)


def _pairs(keys_values: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer its keys and values, [K, held, D]."""
    if isinstance(keys_values, Cache):
        keys_values = layers_of(keys_values)
    if not isinstance(keys_values, Sequence) or isinstance(keys_values, str):
        raise TypeError(f"keys_values is a {type(keys_values).__name__}, expected (keys, values) per layer, or a Cache")
    pairs = []
    for index, pair in enumerate(keys_values):
        tensors = [
            tensor.detach()[0] if tensor.dim() == 4 and tensor.shape[0] == 1 else tensor.detach()
            for tensor in (pair if isinstance(pair, Sequence) else ())
            if isinstance(tensor, torch.Tensor)
        ]
        if len(tensors) != 2 or len(pair) != 2 or any(tensor.dim() != 3 for tensor in tensors):
            raise TypeError(f"keys_values: layer {index} must be a pair of tensors [heads, tokens, size], of one row")
        pairs.append((tensors[0], tensors[1]))
    return pairs


def _span(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], spec: CacheSpec, count: int, where: str = "") -> KVSpan:
    """Copy the layers' keys and values, [K, held, D] each, after a check of their shapes and dtypes."""
    for index, (layer, pair) in enumerate(zip(spec.layers, pairs, strict=True)):
        least = count if layer.window is None else min(count, layer.window - 1)
        for kind, tensor, size in zip(("keys", "values"), pair, (layer.key_dim, layer.value_dim), strict=True):
            held = tensor.shape[1] if tensor.dim() == 3 else -1
            if tuple(tensor.shape) != (layer.heads, held, size) or not least <= held <= count:
                raise ValueError(
                    f"{where}{kind} of layer {index} are {list(tensor.shape)}, expected {[layer.heads, count, size]}"
                )
            if tensor.dtype != spec.dtype:
                raise ValueError(f"{where}{kind} of layer {index} are {tensor.dtype}, expected {spec.dtype}")
    parts = {}
    for layer in dict.fromkeys(spec.layers):
        mine = [pair for pair, its in zip(pairs, spec.layers, strict=True) if its == layer]
        held = min(tensor.shape[1] for pair in mine for tensor in pair)
        held = held if layer.window is None else min(held, layer.window)
        keys, values = (
            torch.stack([pair[kind][:, pair[kind].shape[1] - held :].cpu() for pair in mine]) for kind in (0, 1)
        )
        parts[layer] = keys, values
    return KVSpan(count, parts)


def _parse(octets: bytes) -> Prefix:
    tensors = safetensors.torch.load(octets)
    header = json.loads(octets[8 : 8 + int.from_bytes(octets[:8], "little")])
    metadata = header.get("__metadata__") or {}
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, expected {_FORMAT!r}")
    if metadata["version"] != _VERSION:
        raise ValueError(f"it is of version {metadata['version']!r}, and this staticgen reads version {_VERSION!r}")
    identity, count = Identity.from_strings(metadata), int(metadata["length"])
    ids = tensors.pop("token_ids", None)
    if count < 1 or (ids is not None and (ids.dtype != torch.int64 or tuple(ids.shape) != (count,))):
        raise ValueError(f"token_ids must be int64 of {count} tokens, and at least one")
    layers = len(identity.spec.layers)
    names = {f"{kind}.{index}" for kind in ("keys", "values") for index in range(layers)}
    if names != set(tensors):
        wrong = sorted(names ^ set(tensors))[0]
        raise ValueError(f"tensor {wrong!r} is {'missing' if wrong in names else 'none of a prefix'}")
    pairs = [(tensors[f"keys.{index}"], tensors[f"values.{index}"]) for index in range(layers)]
    return Prefix(identity, _span(pairs, identity.spec, count), ids)
