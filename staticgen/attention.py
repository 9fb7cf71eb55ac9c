"""Attention over (past, new) keys and values, plugged into transformers' models.

A model calls ``cache.update(keys, values, layer)`` and hands what it gets to its attention function.
:class:`StepCache` answers with a :class:`PastAndNew` pair instead of a joined tensor, and
:func:`static_attention`, registered in transformers' ``AttentionInterface``, knows what to do with it.
The models themselves stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, Cache

from staticgen.errors import UnsupportedModelError
from staticgen.shapes import StepForm

ATTENTION_NAME = "staticgen"

# The score of what a query may not see: the lowest of float16, so that it stays finite on targets that compute
# in it (a row of -inf would be NaN). It replaces the score; added to it, a large score would shine through.
MASKED = -65504.0

# Attention arguments that would change the result and that this function does not implement.
_REFUSED_ARGUMENTS = ("position_bias", "head_mask", "alibi")


class PastAndNew(NamedTuple):
    """What :meth:`StepCache.update` returns in place of one joined tensor.

    past: [B, K, L, D] (or [B, K, D, L]); None when there is no past at all.
    new: [B, K, T, D].
    cache: the step's cache, for the mask.
    """

    past: torch.Tensor | None
    new: torch.Tensor
    cache: StepCache


class StepCache(Cache):
    """The cache that a model sees during one step; collects the new keys and values.

    Args:
        position_ids: int64 [B, T], -1 where a token is padding.
        slot_positions: int64 [B, L], -1 where a slot is empty.
        past_keys, past_values: one tensor per layer; empty for a step without a past.
    """

    def __init__(
        self,
        position_ids: torch.Tensor,
        slot_positions: torch.Tensor,
        past_keys: Sequence[torch.Tensor],
        past_values: Sequence[torch.Tensor],
        form: StepForm,
    ):
        super().__init__(layers=[])
        self.form = form
        self.new_keys: dict[int, torch.Tensor] = {}
        self.new_values: dict[int, torch.Tensor] = {}
        self.windows: dict[int, int | None] = {}  # by layer; filled by the attention function
        self._past_keys, self._past_values = past_keys, past_values
        self._query_positions = position_ids[:, :, None]
        self._key_positions = torch.cat([slot_positions, position_ids], dim=1)[:, None, :]
        self._masks: dict[int | None, torch.Tensor] = {}

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[PastAndNew, PastAndNew]:
        """Keep a layer's new keys and values [B, K, T, D], and pair them with its past."""
        self.new_keys[layer_idx], self.new_values[layer_idx] = key_states, value_states
        past_key = self._past_keys[layer_idx] if self._past_keys else None
        past_value = self._past_values[layer_idx] if self._past_values else None
        return PastAndNew(past_key, key_states, self), PastAndNew(past_value, value_states, self)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """0: models ask in order to number positions, and a step always gives positions."""
        if layer_idx is not None:  # a layer that asks does more than numbering
            raise UnsupportedModelError(f"layer {layer_idx} uses the length of the cache")
        return 0

    def mask(self, window: int | None) -> torch.Tensor:
        """bool [B, 1, 1, T, L + T]: where the query may look."""
        if window not in self._masks:
            visible = (self._key_positions >= 0) & (self._key_positions <= self._query_positions)
            if window is not None:
                visible = visible & (self._query_positions - self._key_positions < window)
            self._masks[window] = visible[:, None, None]
        return self._masks[window]


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
    step = key.cache
    step.windows[module.layer_idx] = sliding_window  # type: ignore[index]
    batch, heads, tokens, size = query.shape
    kv_heads = key.new.shape[1]
    group = heads // kv_heads
    query = (query * (size**-0.5 if scaling is None else scaling)).reshape(batch, kv_heads, group * tokens, size)

    past_keys, past_values = _transposed(key.past, step.form.transposed_keys), value.past
    new_keys, new_values = key.new.transpose(2, 3), value.new
    if step.form.attention == "concat" and past_keys is not None and past_values is not None:
        new_keys = torch.cat([past_keys, new_keys], dim=3)
        new_values = torch.cat([past_values, new_values], dim=2)
        past_keys = past_values = None

    scores = query @ new_keys
    if past_keys is not None:
        scores = torch.cat([query @ past_keys, scores], dim=3)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    columns = scores.shape[3]
    scores = scores.float().reshape(batch, kv_heads, group, tokens, columns)
    scores = scores.masked_fill(~step.mask(sliding_window), MASKED)
    if s_aux is not None:
        sink = s_aux.float().reshape(1, kv_heads, group, 1, 1).expand(batch, -1, -1, tokens, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :columns].to(query.dtype)
    weights = weights.reshape(batch, kv_heads, group * tokens, columns)
    if past_values is not None:
        slots = past_values.shape[2]
        output = weights[..., :slots] @ past_values + weights[..., slots:] @ new_values
    else:
        output = weights @ new_values
    return output.reshape(batch, heads, tokens, output.shape[3]).transpose(1, 2).contiguous(), None


def _transposed(past_keys: torch.Tensor | None, already: bool) -> torch.Tensor | None:
    """Past keys as [B, K, D, L]."""
    if past_keys is None or already:
        return past_keys
    return past_keys.transpose(2, 3)


def register_attention() -> None:
    """Make ``attn_implementation="staticgen"`` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, static_attention)
