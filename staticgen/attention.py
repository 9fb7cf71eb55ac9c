"""Attention over (past, new) keys and values, plugged into transformers' models.

A model calls ``cache.update(keys, values, layer)`` and hands what it gets to its attention function.
:class:`StepCache` answers with a :class:`PastAndNew` pair instead of a joined tensor, and
:func:`static_attention`, registered in transformers' ``AttentionInterface``, knows what to do with it.
The models themselves stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, Cache

from staticgen.errors import UnsupportedModelError
from staticgen.masks import alibi_scores, visible_keys
from staticgen.shapes import StepForm

ATTENTION_NAME = "staticgen"

# The score of what a query may not see: the lowest of float16, so that it stays finite on targets that compute
# in it (a row of -inf would be NaN). It replaces the score; added to it, a large score would shine through.
MASKED = -65504.0
_PART = 128  # slots of a part of attention "spread"

# Attention arguments that would change the result and that this function does not implement.
_REFUSED_ARGUMENTS = ("position_bias", "head_mask", "alibi")


class Past(NamedTuple):
    """What the cache holds for one layer.

    keys: [B, K, L, D] (or [B, K, D, L]).
    values: [B, K, L, D].
    slot_positions: int64 [B, L], -1 where a slot is empty.
    group: layers with the same number have the same slot_positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot_positions: torch.Tensor
    group: int


class PastAndNew(NamedTuple):
    """What :meth:`StepCache.update` returns in place of one joined tensor.

    past: [B, K, L, D] (or [B, K, D, L]); None when there is no past at all.
    new: [B, K, T, D].
    cache: the step's cache, for the mask.
    layer: the layer whose keys or values these are; others may attend to them too (Gemma 3n).
    """

    past: torch.Tensor | None
    new: torch.Tensor
    cache: StepCache
    layer: int


class MaskKey(NamedTuple):
    """Layers with the same slots and window share a mask."""

    group: int
    window: int | None


class AlibiKey(NamedTuple):
    """Layers with the same slots and slopes share their ALiBi scores."""

    group: int
    slopes: tuple[float, ...]
    coarse: bool


class StepCache(Cache):
    """The cache that a model sees during one step; collects the new keys and values.

    Args:
        form: how the target wants attention written.
        position_ids: int64 [B, T], -1 where a token is padding.
        first_positions: int64 [B, T], the first position that each query may see; None for 0.
        past: per layer with keys and values of its own, by its index in the model; empty for a step without a past.
    """

    def __init__(
        self,
        form: StepForm,
        position_ids: torch.Tensor,
        first_positions: torch.Tensor | None = None,
        past: Mapping[int, Past] | None = None,
    ):
        super().__init__(layers=[])
        self.form = form
        self.new_keys: dict[int, torch.Tensor] = {}
        self.new_values: dict[int, torch.Tensor] = {}
        # By layer that attends, filled by the attention function: its window, and the layer whose keys it reads.
        self.windows: dict[int, int | None] = {}
        self.sources: dict[int, int] = {}
        self._past = past or {}
        self._position_ids = position_ids
        self._first = torch.zeros_like(position_ids) if first_positions is None else first_positions
        self._made: dict[Any, torch.Tensor] = {}

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[PastAndNew, PastAndNew]:
        """Keep a layer's new keys and values [B, K, T, D], and pair them with its past."""
        self.new_keys[layer_idx], self.new_values[layer_idx] = key_states, value_states
        past = self._past.get(layer_idx)
        keys, values = (None, None) if past is None else (past.keys, past.values)
        return PastAndNew(keys, key_states, self, layer_idx), PastAndNew(values, value_states, self, layer_idx)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """0: models ask in order to number positions, and a step always gives positions."""
        if layer_idx is not None:  # a layer that asks does more than numbering
            raise UnsupportedModelError(f"layer {layer_idx} uses the length of the cache")
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The size of the mask that a model would make; whatever it makes is ignored."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As :meth:`get_seq_length`, for the model's own mask."""
        return 0

    def key_positions(self, layer: int) -> torch.Tensor:
        """int64 [B, L + T]: positions of the keys of a layer, -1 where there is none."""
        past = self._past.get(layer)
        if past is None:
            return self._position_ids
        return self._once(("keys", past.group), lambda: torch.cat([past.slot_positions, self._position_ids], dim=1))

    def mask(self, layer: int, window: int | None) -> torch.Tensor:
        """bool [B, T, L + T]: where the queries may look among the keys of ``layer``."""
        return self._once(
            MaskKey(self._group(layer), window),
            lambda: visible_keys(self.key_positions(layer), self._position_ids, self._first, window),
        )

    def alibi(self, layer: int, slopes: tuple[float, ...], coarse: bool = False) -> torch.Tensor:
        """float32 [B, H, 1, L + T]: see :func:`staticgen.masks.alibi_scores`."""
        return self._once(
            AlibiKey(self._group(layer), slopes, coarse),
            lambda: alibi_scores(self.key_positions(layer), slopes, coarse),
        )

    def _group(self, layer: int) -> int:
        past = self._past.get(layer)
        return -1 if past is None else past.group

    def _once(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What layers have in common is computed for the first of them."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def static_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: PastAndNew,
    value: PastAndNew,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax attention over the past and the new keys, with H query heads grouped over K key heads.

    Args:
        query: [B, H, T, D].
        key, value: past and new, as :meth:`StepCache.update` returned them.
        attention_mask: ignored; the mask follows from positions.
        sliding_window: a query sees this many positions, its own included.
        softcap: scores are squashed to (-softcap, softcap) by tanh (Gemma 2).
        s_aux: [H], the score of a sink that takes weight and has no value (GPT-OSS).
        bias: float32 [B, H, 1 or T, L + T], added to the scores (ALiBi).

    Returns:
        [B, T, H, D], and None in place of the attention weights.
    """
    refused = [name for name in _REFUSED_ARGUMENTS if kwargs.get(name) is not None]
    if refused:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {refused[0]!r} to its attention, not supported yet"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens as well; a causal decoder is needed"
        )
    if not isinstance(key, PastAndNew):
        raise UnsupportedModelError(f"{type(module).__name__} changes its keys after they went to the cache")
    step, layer = key.cache, key.layer
    attending = getattr(module, "layer_idx", layer)
    step.windows[attending], step.sources[attending] = sliding_window, layer
    batch, heads, tokens, size = query.shape
    kv_heads = key.new.shape[1]
    group = heads // kv_heads
    query = (query * (size**-0.5 if scaling is None else scaling)).reshape(batch, kv_heads, group * tokens, size)

    past_keys, past_values = _transposed(key.past, step.form.transposed_keys), value.past
    new_keys, new_values = key.new.transpose(2, 3), value.new
    if step.form.attention in ("concat", "sdpa") and past_keys is not None and past_values is not None:
        new_keys = torch.cat([past_keys, new_keys], dim=3)
        new_values = torch.cat([past_values, new_values], dim=2)
        past_keys = past_values = None
    if step.form.attention == "sdpa":
        if softcap is not None or s_aux is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has a softcap or a sink in its scores, which attention 'sdpa' has not: use 'split'"
            )
        mask = step.mask(layer, sliding_window)[:, None, None, -tokens:].expand(-1, kv_heads, group, -1, -1)
        if bias is not None:
            grouped = bias.reshape(bias.shape[0], kv_heads, group, bias.shape[2], -1)
            mask = torch.where(mask, grouped, MASKED).to(query.dtype)
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            new_keys.transpose(2, 3),
            new_values,
            attn_mask=mask.reshape(batch, kv_heads, group * tokens, -1),
            scale=1.0,
        )
        return output.reshape(batch, heads, tokens, output.shape[3]).transpose(1, 2).contiguous(), None

    # A model may drop all queries but the last (Gemma 4, in layers that cache nothing).
    mask = step.mask(layer, sliding_window)[:, None, None, -tokens:]
    sink = None if s_aux is None else s_aux.float().reshape(1, kv_heads, group, 1, 1).expand(batch, -1, -1, tokens, 1)

    def finished(scores: torch.Tensor, part: slice | None = None) -> torch.Tensor:
        """Products with the keys of a part of the columns, [B, K, G * T, n], as scores: float32 [B, K, G, T, n]."""
        seen, added = (mask, bias) if part is None else (mask[..., part], None if bias is None else bias[..., part])
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        columns = scores.shape[3]
        scores = scores.float().reshape(batch, kv_heads, group, tokens, columns)
        if added is not None:
            scores = scores + added.reshape(added.shape[0], kv_heads, group, added.shape[2], columns)
        return scores.masked_fill(~seen, MASKED)

    if past_keys is None or past_values is None:
        output = _weights(finished(query @ new_keys), sink, query) @ new_values
    else:
        slots = past_values.shape[2]
        past, new = query @ past_keys, query @ new_keys
        if step.form.attention == "spread" and new_values.shape[2] == 1 and slots % _PART == 0:
            alone = [finished(new, slice(slots, None)), *([] if sink is None else [sink])]
            output = _in_parts(finished(past, slice(slots)), torch.cat(alone, dim=-1), past_values, new_values)
        else:
            weights = _weights(finished(torch.cat([past, new], dim=3)), sink, query)
            output = weights[..., :slots] @ past_values + weights[..., slots:] @ new_values
    return output.reshape(batch, heads, tokens, output.shape[3]).transpose(1, 2).contiguous(), None


def _weights(scores: torch.Tensor, sink: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """The softmax of scores, float32 [B, K, G, T, n], as the query's dtype [B, K, G * T, n]; what a sink takes is gone."""
    columns = scores.shape[-1]
    if sink is not None:
        scores = torch.cat([scores, sink], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :columns].to(query.dtype).reshape(*query.shape[:3], columns)


def _in_parts(
    past: torch.Tensor, alone: torch.Tensor, past_values: torch.Tensor, new_values: torch.Tensor
) -> torch.Tensor:
    """Attention of one token, each part of the slots with a softmax of its own, which the part's share then weighs.

    As in flash-decoding (Dao, Haziza, Massa and Sizov 2023): as many parts run at once as there are.

    Args:
        past: scores of the past keys, float32 [B, K, G, 1, L].
        alone: the score of the new key, and of a sink if there is one, float32 [B, K, G, 1, 1 or 2].
        past_values: [B, K, L, D].
        new_values: [B, K, 1, D].

    Returns:
        [B, K, G, D].
    """
    parts = past[:, :, :, 0].unflatten(-1, (-1, _PART))  # [B, K, G, P, slots of a part]
    most = parts.amax(dim=-1, keepdim=True)
    weights = (parts - most).exp()
    sums = weights.sum(dim=-1, keepdim=True)
    found = (weights / sums).to(past_values.dtype).transpose(2, 3) @ past_values.unflatten(2, (-1, _PART))
    masses = (most + sums.log())[..., 0]
    count = masses.shape[-1]
    shares = torch.softmax(torch.cat([masses, alone[:, :, :, 0]], dim=-1), dim=-1)
    past_part = (found.float() * shares[..., :count].transpose(2, 3)[..., None]).sum(dim=2)
    return (past_part + shares[..., count : count + 1] * new_values).to(past_values.dtype)


def _transposed(past_keys: torch.Tensor | None, already: bool) -> torch.Tensor | None:
    """Past keys as [B, K, D, L]."""
    if past_keys is None or already:
        return past_keys
    return past_keys.transpose(2, 3)


def register_attention() -> None:
    """Make ``attn_implementation="staticgen"`` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, static_attention)
