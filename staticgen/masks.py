"""What follows from positions alone: where queries may look, and ALiBi's scores. Inside a step and on the host alike."""

from __future__ import annotations

import torch


def visible_keys(
    held: torch.Tensor, asked: torch.Tensor, first: torch.Tensor, window: int | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Where queries may look.

    Args:
        held: int64 [B, C], positions of the keys, -1 where there is none.
        asked: int64 [B, T], positions of the queries, -1 where a token is padding.
        first: int64 [B, T], the first position that each query may see.
        window: a query sees this many positions at most, its own included; None for all.
        out: bool [B, T, C] to write to.

    Returns:
        bool [B, T, C].
    """
    held, asked, first = held[:, None, :], asked[:, :, None], first[:, :, None]
    seen = (held >= first) & (held <= asked)
    if window is not None:
        seen = seen & (asked - held < window)
    return seen if out is None else out.copy_(seen)


def alibi_scores(held: torch.Tensor, slopes: tuple[float, ...], coarse: bool) -> torch.Tensor:
    """Scores that grow with a key's position, by each head's slope (arXiv 2108.12409).

    Args:
        held: int64 [B, C], positions of the keys, -1 where there is none.
        slopes: one per head.
        coarse: slopes, positions and their product are rounded to bfloat16, as Falcon does.

    Returns:
        float32 [B, H, 1, C].
    """
    positions = held.clamp(min=0)[:, None, None, :].float()
    slope = torch.tensor(slopes, device="cpu")[None, :, None, None]
    return _to_bfloat16(_to_bfloat16(slope) * _to_bfloat16(positions)) if coarse else slope * positions


def _to_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the 8 bits of bfloat16, in float32 arithmetic: a compiler may drop a cast there and back."""
    lifted = numbers * 65537.0
    return lifted - (lifted - numbers)
