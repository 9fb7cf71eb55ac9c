"""What a caller may pass as ``ids`` and ``attention_mask``, checked and brought into one form."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MASK_DTYPES = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float32}


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call.

    Attributes:
        ids: int64 [B, T] as the caller gave them, padding included; the result starts with them.
        rows: for every prompt its real tokens, int64 [t], without padding.
    """

    ids: torch.Tensor
    rows: tuple[torch.Tensor, ...]

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """T, the padded length: what ``max_length`` counts, as in transformers."""
        return self.ids.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, without padding."""
        return max(len(row) for row in self.rows)


def read_prompts(
    ids: Any,
    attention_mask: Any,
    *,
    vocab_size: int,
    pad_token_id: int | None,
    eos_token_ids: Collection[int],
) -> Prompts:
    """Check ``ids`` and ``attention_mask`` and take the padding off.

    Args:
        ids: int64 or int32 [B, T] or [T]: a tensor, a numpy array, a list of ids, or a list of lists,
            which may differ in length and are then left-padded.
        attention_mask: the same shape, 1 on real tokens and 0 on padding, which must be on the left.
            Without it every token is real, except where ``pad_token_id`` occurs and is no EOS: then
            these tokens are padding, as in transformers.
        vocab_size: ids of real tokens are below this; what stands under padding does not matter.
        pad_token_id: for ragged lists and for the mask that is inferred.
        eos_token_ids: a pad token among these never makes a mask.

    Raises:
        ValueError, TypeError: the message names the argument, the row and what was expected.
    """
    tensor, mask = _as_tensor(ids, pad_token_id)
    if mask is not None and attention_mask is not None:
        raise ValueError("attention_mask cannot be given with a ragged list of ids: it is known from their lengths")
    if attention_mask is not None:
        mask = _as_mask(attention_mask, tensor)
    elif mask is None:
        mask = _inferred_mask(tensor, pad_token_id, eos_token_ids)
    for row in range(tensor.shape[0]):
        if not mask[row].any():
            raise ValueError(f"ids row {row} is empty: every prompt needs at least one token (a BOS token will do)")
        if not mask[row, -1]:
            raise ValueError(
                f"ids row {row} is padded on the right (attention_mask ends in 0): prompts need left padding; "
                "set tokenizer.padding_side = 'left'"
            )
    outside = mask & ((tensor < 0) | (tensor >= vocab_size))
    if outside.any():
        row, column = (int(index) for index in outside.nonzero()[0])
        raise ValueError(
            f"ids[{row}, {column}] is {int(tensor[row, column])}, outside the model's vocabulary of {vocab_size} tokens "
            "(0 to vocabulary size - 1); if it is padding, give attention_mask with 0 there, or set pad_token_id"
        )
    return Prompts(tensor, tuple(tensor[row, mask[row]] for row in range(tensor.shape[0])))


def _as_tensor(ids: Any, pad_token_id: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int64 [B, T], and a mask if ``ids`` was a ragged list."""
    if isinstance(ids, str) or not isinstance(ids, (torch.Tensor, np.ndarray, Sequence)):
        raise TypeError(f"ids must be token ids (a tensor, a numpy array or a list), got {type(ids).__name__}")
    if isinstance(ids, Sequence):
        if len(ids) == 0:
            raise ValueError("ids is empty: give at least one prompt of at least one token")
        rows = [_one_row(row) for row in ids] if not _is_int(ids[0]) else [_one_row(ids)]
        lengths = [len(row) for row in rows]
        if 0 in lengths:
            raise ValueError(
                f"ids row {lengths.index(0)} is empty: every prompt needs at least one token (a BOS token will do)"
            )
        width = max(lengths)
        pad = 0 if pad_token_id is None else pad_token_id
        padded = torch.tensor([[pad] * (width - len(row)) + row for row in rows], dtype=torch.int64)
        ragged = min(lengths) < width
        mask = torch.tensor([[False] * (width - size) + [True] * size for size in lengths]) if ragged else None
        return padded, mask
    tensor = torch.from_numpy(np.ascontiguousarray(ids)) if isinstance(ids, np.ndarray) else ids
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"ids must have an integer dtype, got {tensor.dtype}")
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or tensor.numel() == 0:
        raise ValueError(
            f"ids must have shape [batch, tokens] or [tokens] with at least one token, got {list(tensor.shape)}"
        )
    return tensor.detach().to(device="cpu", dtype=torch.int64, copy=True), None


def _one_row(row: Any) -> list[int]:
    values = row.tolist() if isinstance(row, (torch.Tensor, np.ndarray)) else row
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(_is_int(value) for value in values):
        raise TypeError(f"ids must hold integers, got the row {row!r}")
    return [int(value) for value in values]


def _is_int(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_floating_point() and value.dtype != torch.bool
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _as_mask(attention_mask: Any, ids: torch.Tensor) -> torch.Tensor:
    """bool [B, T]."""
    mask = torch.as_tensor(attention_mask)
    if mask.dtype not in _MASK_DTYPES:
        raise TypeError(f"attention_mask must be integer, bool or float32, got {mask.dtype}")
    if mask.dim() == 1 and ids.shape[0] == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, expected {list(ids.shape)}, the shape of ids")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold only 1 (real token) and 0 (padding)")
    return mask.to("cpu").bool()


def _inferred_mask(ids: torch.Tensor, pad_token_id: int | None, eos_token_ids: Collection[int]) -> torch.Tensor:
    everything = torch.ones_like(ids, dtype=torch.bool)
    if pad_token_id is None or not (ids == pad_token_id).any():
        return everything
    if pad_token_id not in eos_token_ids:
        return ids != pad_token_id
    if ids.shape[0] > 1 and (ids[:, 0] == pad_token_id).any():
        warnings.warn(
            f"ids starts with token {pad_token_id}, which is both pad and EOS; without attention_mask it counts as a "
            "real token. Pass attention_mask if it is padding.",
            stacklevel=4,
        )
    return everything
