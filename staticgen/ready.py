"""Keys and values that are there already: those of a prompt's first tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache

from staticgen.cache import KVBuffers
from staticgen.prompts import Prompts
from staticgen.shapes import EMPTY, CacheSpec
from staticgen.spans import KVSpan


@dataclass(frozen=True)
class ReadyKeys:
    """Keys and values of the first columns of a call's left-padded prompts.

    Attributes:
        buffers: of n columns.
        position_ids: int64 [B, n], -1 where there is no token or it is to run.
        counts: per prompt, how many of its tokens they cover.
        late: that many of the columns, the last ones, are such where other rows' tokens run.
        before: tokens at the head of each prompt that have no ids; ``counts`` include them, the prompts do not.
    """

    buffers: KVBuffers
    position_ids: torch.Tensor
    counts: tuple[int, ...]
    late: int = 0
    before: int = 0

    @property
    def first_run(self) -> int:
        """The column of the first token that is to run."""
        return self.buffers.length - self.late

    def merge_(self, new: KVBuffers, position_ids: torch.Tensor, column: int) -> torch.Tensor:
        """Put late tokens among those that a step computed, whose first column is ``column``.

        Returns:
            int64 [B, T], the positions of what is in ``new`` then.
        """
        first, stop = max(column, 0), min(column + position_ids.shape[1], self.buffers.length)
        if stop <= first:
            return position_ids
        late = self.position_ids[:, first:stop]
        new.merge_(self.buffers, late >= 0, first - column, first)
        merged = position_ids.clone()
        columns = merged[:, first - column : stop - column]
        columns.copy_(torch.where(late >= 0, late, columns))
        return merged


def ready_from_spans(
    spans: Sequence[Sequence[KVSpan]],
    usable: Sequence[np.ndarray],
    lengths: Sequence[int],
    spec: CacheSpec,
    batch: int,
    before: int = 0,
) -> ReadyKeys | None:
    """Ready keys for as many tokens as spare a column, each row's being contiguous; None when there is none.

    All rows advance together, so that what a call costs is the columns that run: as many as the row with most to
    run has tokens to run. A shorter row's tokens in those columns run too, where its known keys can end before
    them: the cost is the same, and no step must be cut in two.

    Args:
        spans: per prompt what is known of it, from position 0 on.
        usable: per prompt, bool: which numbers of its first tokens may be taken over; at least one is True.
        lengths: tokens of each prompt.
        spec: what the model caches.
        batch: rows of the session.
        before: see :class:`ReadyKeys`.
    """
    counts = [int(np.flatnonzero(row).max()) for row in usable]
    width = max(lengths)
    first = min(width - length + count for length, count in zip(lengths, counts, strict=True))
    for index, (row, length) in enumerate(zip(usable, lengths, strict=True)):
        aligned = max(0, first - (width - length))
        if row[aligned]:
            counts[index] = aligned
    if not any(counts):
        return None
    ends = [width - length + count for length, count in zip(lengths, counts, strict=True) if count]
    columns = max(first, *ends)
    buffers = KVBuffers(spec, batch, columns)
    position_ids = torch.full((batch, columns), EMPTY, dtype=torch.int64, device="cpu")
    for index, (known, length, count) in enumerate(zip(spans, lengths, counts, strict=True)):
        column = width - length
        position_ids[index, column : column + count] = torch.arange(count, device="cpu")
        for span in known:
            buffers.put_(index, column, span, count)
    return ReadyKeys(buffers, position_ids, tuple(counts), columns - first, before)


def read_past_key_values(past: Any, prompts: Prompts, spec: CacheSpec, batch: int) -> ReadyKeys:
    """Check ready keys and values against the prompts and the model.

    Args:
        past: a transformers ``Cache``, or per layer its keys and values, [B, K, n, D]; n is less than the width of
            the prompts, whose first n columns they belong to. A layer with a window may hold the newest only.
        prompts: the call's; their mask says which of the columns are padding.
        spec: what the model caches.
        batch: rows of the session.

    Raises:
        TypeError, ValueError: the message says which layer does not fit, and what was expected.
    """
    pairs = _pairs(past)
    if len(pairs) != len(spec.layers):
        raise ValueError(f"past_key_values has {len(pairs)} layers, the model caches {len(spec.layers)}")
    count = max(keys.shape[2] for keys, _ in pairs)
    if isinstance(past, Cache):
        count = max(count, int(past.get_seq_length()))
    if not 0 < count < prompts.width:
        raise ValueError(
            f"past_key_values holds {count} tokens and ids has {prompts.width}: ids must hold those tokens too, and at "
            "least one more"
        )
    buffers = KVBuffers(spec, batch, count)
    for index, (layer, pair) in enumerate(zip(spec.layers, pairs, strict=True)):
        least = count if layer.window is None else min(count, layer.window - 1)
        targets = (buffers.keys[index], buffers.values[index])
        for kind, tensor, target, size in zip(
            ("keys", "values"), pair, targets, (layer.key_dim, layer.value_dim), strict=True
        ):
            held = tensor.shape[2]
            if tuple(tensor.shape) != (prompts.batch, layer.heads, held, size) or held < least:
                raise ValueError(
                    f"past_key_values: {kind} of layer {index} are {list(tensor.shape)}, expected "
                    f"{[prompts.batch, layer.heads, count, size]}"
                )
            if tensor.dtype != spec.dtype:
                raise ValueError(f"past_key_values: {kind} of layer {index} are {tensor.dtype}, expected {spec.dtype}")
            target[: prompts.batch, :, count - held :] = tensor.detach().cpu()
    mask = prompts.mask[:, :count]
    position_ids = torch.full((batch, count), EMPTY, dtype=torch.int64, device="cpu")
    position_ids[: prompts.batch] = torch.where(mask, mask.cumsum(1) - 1, EMPTY)
    return ReadyKeys(buffers, position_ids, tuple(mask.sum(1).tolist()))


def warn_that_keys_win(cache_implementation: str, layout: str) -> None:
    """A caller gave both an implementation and ready keys and values."""
    warnings.warn(
        f"both cache_implementation={cache_implementation!r} and past_key_values are given: past_key_values wins. Its keys "
        f"and values are taken into the cache of layout {layout!r}, and cache_implementation is ignored",
        stacklevel=4,
    )


def layers_of(cache: Cache) -> list[tuple[Any, Any]]:
    """Keys and values of each layer of transformers' cache; None where it has none."""
    return [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]


def _pairs(past: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs: list[Any]
    if isinstance(past, Cache):
        pairs = layers_of(past)
    elif isinstance(past, Sequence) and not isinstance(past, str):
        pairs = [pair if isinstance(pair, Sequence) else () for pair in past]
    else:
        raise TypeError(
            f"past_key_values is a {type(past).__name__}, expected a transformers Cache or (keys, values) per layer"
        )
    for index, pair in enumerate(pairs):
        if len(pair) != 2 or not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 4 for tensor in pair):
            raise TypeError(
                f"past_key_values: layer {index} must be a pair of tensors [batch, heads, tokens, size]; an empty cache "
                "is left out"
            )
    return pairs
