"""What a caller may pass as ``ids`` and ``attention_mask``, checked and brought into one form."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call.

    Attributes:
        ids: int64 [B, T] as the caller gave them, padding included; the result starts with them.
        rows: for every prompt its real tokens, int64 [t], without padding.
        mask: bool [B, T], where ``ids`` holds real tokens.
        before: tokens without ids that stand before each of the rows: those of a learned prefix.
    """

    ids: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    mask: torch.Tensor
    before: int = 0

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """T, the padded length, and what stands before: what ``max_length`` counts, as in transformers."""
        return self.before + self.ids.shape[1]

    @property
    def size(self) -> str:
        """What the width is made of, in words."""
        return f"{'the prefix and ids have' if self.before else 'ids has'} {self.width} tokens"

    def repeated(self, count: int) -> Prompts:
        """Every prompt ``count`` times in succession."""
        if count == 1:
            return self
        rows = tuple(row for row in self.rows for _ in range(count))
        return Prompts(self.ids.repeat_interleave(count, 0), rows, self.mask.repeat_interleave(count, 0), self.before)

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
        ids: integers [B, T] or [T]: a tensor, a numpy array, a list of ids, or a list of lists,
            which may differ in length and are then left-padded.
        attention_mask: the same shape, 1 on real tokens and 0 on padding, which must be on the left.
            Without it every token of a list is real, and every token of a tensor or array except where
            ``pad_token_id`` occurs and is no EOS: then these tokens are padding, as in transformers.
        vocab_size: ids of real tokens are below this; what stands under padding does not matter.
        pad_token_id: for ragged lists and for the mask that is inferred.
        eos_token_ids: a pad token among these never makes a mask.

    Raises:
        ValueError, TypeError: the message names the argument, the row and what was expected.
    """
    tensor, lengths = _as_tensor(ids, 0 if pad_token_id is None else pad_token_id)
    if attention_mask is not None:
        if lengths is not None and len(set(lengths)) > 1:
            raise ValueError("attention_mask cannot be given with a ragged list of ids: it is known from their lengths")
        mask = _as_mask(attention_mask, tensor)
    elif lengths is not None:
        mask = (
            torch.arange(tensor.shape[1], device="cpu")
            >= tensor.shape[1] - torch.tensor(lengths, device="cpu")[:, None]
        )
        if len(set(lengths)) == 1:  # lists of different lengths are clearly not padded
            _warn_of_pads(tensor, mask, pad_token_id)
    elif pad_token_id is not None and pad_token_id not in eos_token_ids:
        mask = tensor != pad_token_id
    else:
        mask = torch.ones_like(tensor, dtype=torch.bool)
        _warn_of_pads(tensor, mask, pad_token_id)
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
            "(0 to vocabulary size - 1); if it is padding, give attention_mask with 0 there"
        )
    return Prompts(tensor, tuple(tensor[row, mask[row]] for row in range(tensor.shape[0])), mask)


def _as_tensor(ids: Any, pad: int) -> tuple[torch.Tensor, list[int] | None]:
    """int64 [B, T], a copy; and for lists the lengths of their rows."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (torch.Tensor, np.ndarray, Sequence)):
        raise TypeError(f"ids must be token ids (a tensor, a numpy array or a list), got {type(ids).__name__}")
    if isinstance(ids, Sequence):
        if len(ids) == 0:
            raise ValueError("ids is empty: give at least one prompt of at least one token")
        rows = [_one_row(ids)] if _is_int(ids[0]) else [_one_row(row) for row in ids]
        lengths = [len(row) for row in rows]
        if 0 in lengths:
            raise ValueError(
                f"ids row {lengths.index(0)} is empty: every prompt needs at least one token (a BOS token will do)"
            )
        width = max(lengths)
        padded = [[pad] * (width - len(row)) + row for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device="cpu"), lengths
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu":
            raise TypeError(f"ids must have an integer dtype, got {ids.dtype}")
        ids = torch.from_numpy(np.array(ids, dtype=np.int64, order="C"))
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must have an integer dtype, got {ids.dtype}")
    tensor = ids[None] if ids.dim() == 1 else ids
    if tensor.dim() != 2 or tensor.numel() == 0:
        raise ValueError(
            f"ids must have shape [batch, tokens] or [tokens] with at least one token, got {list(tensor.shape)}"
        )
    return tensor.detach().to(device="cpu", dtype=torch.int64, copy=True), None


def _one_row(row: Any) -> list[int]:
    values = row.tolist() if isinstance(row, (torch.Tensor, np.ndarray)) else row
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not all(map(_is_int, values)):
        raise TypeError(f"ids must hold integers, got the row {row!r}")
    numbers = [int(value) for value in values]
    wide = next((number for number in numbers if not -(2**63) <= number < 2**63), None)
    if wide is not None:
        raise ValueError(f"ids holds {wide}, which is no token id")
    return numbers


def _is_int(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_floating_point() and value.dtype != torch.bool
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _as_mask(attention_mask: Any, ids: torch.Tensor) -> torch.Tensor:
    """bool [B, T]."""
    if isinstance(attention_mask, torch.Tensor):
        mask = attention_mask.detach().cpu()
    else:
        try:
            array = np.array(attention_mask)
        except ValueError:
            raise ValueError(f"attention_mask must have the shape of ids, {list(ids.shape)}; its rows differ") from None
        if array.dtype.kind not in "iufb":
            raise TypeError(f"attention_mask must hold numbers, got {type(attention_mask).__name__} of {array.dtype}")
        mask = torch.from_numpy(array.astype(np.float64))
    if mask.dim() == 1 and ids.shape[0] == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, expected {list(ids.shape)}, the shape of ids")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold only 1 (real token) and 0 (padding)")
    return mask == 1


def _warn_of_pads(ids: torch.Tensor, mask: torch.Tensor, pad_token_id: int | None) -> None:
    """Real tokens that look like padding: a row begins with several, or with one where another row does not."""
    if pad_token_id is None:
        return
    pads = ((ids != pad_token_id) & mask).cumsum(1).eq(0).logical_and(mask).sum(1)
    if (pads > 1).any() or 0 < int((pads == 1).sum()) < len(pads):
        warnings.warn(
            f"ids begins with the pad token {pad_token_id}, which counts as a real token here; pass attention_mask if "
            "it is padding",
            stacklevel=6,
        )
