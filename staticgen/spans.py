"""Keys and values of consecutive tokens of one row, apart from any cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from staticgen.shapes import LayerSpec


class KVSpan:
    """Keys and values of a row's tokens up to position ``stop``, in memory of its own.

    Args:
        stop: the position after the last token.
        parts: for every size of layer the keys [layers, K, held, D] and the values of the newest tokens. A layer
            without a window holds all tokens of the span; one with a window only those that anyone may still see.
    """

    def __init__(self, stop: int, parts: Mapping[LayerSpec, tuple[torch.Tensor, torch.Tensor]]):
        self.stop, self.parts = stop, dict(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.parts.values())

    def held_from(self, size: LayerSpec) -> int:
        """The position of the first token whose keys layers of this size hold; ``stop`` where they hold none."""
        return self.stop - self.parts[size][0].shape[2]

    def cut(self, start: int, stop: int) -> KVSpan:
        """A copy of the tokens from ``start`` to ``stop`` - 1, as far as they are held."""
        parts = {}
        for size, (keys, values) in self.parts.items():
            held = self.held_from(size)
            taken = slice(max(0, start - held), max(0, stop - held))
            parts[size] = keys[:, :, taken].clone(), values[:, :, taken].clone()
        return KVSpan(stop, parts)


def usable_lengths(spans: Sequence[KVSpan], count: int) -> np.ndarray:
    """Which n of 0 ... ``count`` are such that generation can go on after the first n tokens; bool [count + 1].

    ``spans`` follow each other from position 0 on, up to ``count`` at least. A layer with a window must hold the
    window - 1 tokens before n, which the next token sees.
    """
    usable = np.ones(count + 1, dtype=bool)
    sizes = spans[0].parts if spans else {}
    for size in sizes:
        if size.window is None:
            continue
        gaps = np.arange(count)  # where no token is held, and -1 elsewhere
        for span in spans:
            gaps[span.held_from(size) : span.stop] = -1
        newest_gap = np.maximum.accumulate(gaps)
        lengths = np.arange(1, count + 1)
        usable[1:] &= newest_gap < np.maximum(0, lengths - (size.window - 1))
    return usable
