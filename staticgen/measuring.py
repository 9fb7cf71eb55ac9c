"""Figures of this machine's CPU, measured, for profiles that cannot have them.

Other work on the machine only makes a run slower, so that short ones are repeated for a second and the fastest counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import cycle

import torch

_COLUMNS, _ROWS, _PARTS = 8192, 1024, 8  # float32: 32 MiB a part, in all more than a CPU's caches hold
_SIDE = 512  # of the matrices that are multiplied
_SECONDS, _RUNS = 1.0, 10  # at least


def measure_bandwidth() -> float:
    """Bytes/s that memory gives at best: copied, read and written bytes both counted, or read by a matrix-vector product.

    Where a written line is read first, a copy moves more than it counts, and the product, which is what decoding
    mostly does, is ahead.
    """
    source = torch.ones(_PARTS, _ROWS, _COLUMNS)
    target, vector = torch.empty_like(source), torch.ones(_COLUMNS)
    nbytes = source[0].nbytes
    copied, read = cycle(range(_PARTS)), cycle(source)

    def copy() -> None:
        part = next(copied)
        target[part].copy_(source[part])

    return max(2 * nbytes / _fastest(copy), nbytes / _fastest(lambda: next(read) @ vector))


def measure_peak(dtype: torch.dtype) -> float:
    """FLOP/s at which torch multiplies matrices of this dtype, at best."""
    left, right = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _fastest(lambda: left @ right)


def measure_memory() -> int | None:
    """Bytes of memory that this machine has; None where its system does not say."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(seconds) < _RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
