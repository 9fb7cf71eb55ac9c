"""Attention of models that are older than transformers' AttentionInterface, brought to :func:`static_attention`.

These models compute their attention in the module itself, over keys in the order of the columns. On the step's copy
of a model that method is replaced; what the module computes besides (its projections, its rotary embedding) stays.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from staticgen.attention import PastAndNew, static_attention


def adapt_legacy_attention(model: nn.Module) -> dict[str, Any] | None:
    """Bring every attention of an old kind to :func:`static_attention`, in place.

    Returns:
        None where there is none of an old kind; else arguments that the model's forward needs besides.
    """
    found = [
        (module, _ADAPTERS[type(module).__name__]) for module in model.modules() if type(module).__name__ in _ADAPTERS
    ]
    if not found:
        return None
    arguments: dict[str, Any] = {}
    for module, adapt in found:
        arguments.update(adapt(module) or {})
    return arguments


def _gpt_neo(module: Any) -> None:
    module.layer_idx = module.layer_id
    # The buffer marks in each row the columns that a query sees: all before it, or the newest of a local window.
    last = module.bias[0, 0, -1]
    window = None if bool(last.all()) else int(last.sum())

    def _attn(self: Any, query: torch.Tensor, key: PastAndNew, value: PastAndNew, mask: Any = None) -> Any:
        output, weights = static_attention(self, query, key, value, None, scaling=1.0, sliding_window=window)
        return output.transpose(1, 2), weights

    module._attn = MethodType(_attn, module)
    module.bias = torch.empty(0)  # positions x positions, and no longer read


def _bloom(module: Any) -> None:
    slopes = _slopes(module, module.num_heads)

    def forward(self: Any, hidden_states: Any, residual: Any, *args: Any, layer_past: Any, **kwargs: Any) -> Any:
        query, new_key, new_value = self._reshape(self.query_key_value(hidden_states))
        key, value = layer_past.update(new_key, new_value, self.layer_idx)
        bias = key.cache.alibi(key.layer, slopes)
        output, _ = static_attention(self, query, key, value, None, scaling=self.inv_norm_factor, bias=bias)
        return self.dense(output.flatten(2)) + residual, None

    module.forward = MethodType(forward, module)


def _mpt(module: Any) -> dict[str, Any]:
    slopes = _slopes(module, module.n_heads)

    def forward(self: Any, hidden_states: Any, position_bias: Any, *args: Any, **kwargs: Any) -> Any:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, new_key, new_value = (
            part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=2)
        )
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
        key, value = cache.update(new_key, new_value, self.layer_idx)
        bias = key.cache.alibi(key.layer, slopes)
        output, _ = static_attention(self, query, key, value, None, scaling=self.softmax_scale, bias=bias)
        return self.out_proj(output.flatten(2)), None

    module.forward = MethodType(forward, module)
    return {"attention_mask": torch.zeros(1, 1, 1, 1)}  # the model turns its mask to bool before it hands it down


def _falcon(module: Any) -> None:
    slopes = _slopes(module, module.num_heads)
    scaling = 1 / math.sqrt(module.head_dim)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb

    def forward(
        self: Any, hidden_states: Any, alibi: Any, *args: Any, layer_past: Any, position_embeddings: Any, **kwargs: Any
    ) -> Any:
        heads = self._split_heads(self.query_key_value(hidden_states))
        query, new_key, new_value = (part.transpose(1, 2) for part in heads)
        if alibi is None:
            query, new_key = rotate(query, new_key, *position_embeddings)
        key, value = layer_past.update(new_key, new_value, self.layer_idx)
        # Falcon rounds its slopes and biases to bfloat16 whatever its dtype, and scales them with the scores.
        bias = None if alibi is None else key.cache.alibi(key.layer, slopes, coarse=True) * scaling
        output, _ = static_attention(self, query, key, value, None, scaling=scaling, bias=bias)
        return self.dense(output.flatten(2)), None

    module.forward = MethodType(forward, module)


def _slopes(module: nn.Module, heads: int) -> tuple[float, ...]:
    """What the module's own ALiBi function adds per position, for each head."""
    source: Any = sys.modules[type(module).__module__]
    if build := getattr(source, "build_mpt_alibi_tensor", None):
        bias = build(heads, 2)
    else:
        bias = source.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    return tuple((bias[..., 1] - bias[..., 0]).flatten().tolist())


# By the name of the class, so that no model's code is imported for it.
_ADAPTERS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "GPTNeoSelfAttention": _gpt_neo,
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
}
