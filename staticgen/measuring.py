"""Figures of this machine's CPU, measured, for profiles that cannot have them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

_READ = 1 << 28  # bytes; more than any cache of a CPU holds
_SIDE = 1024  # of the matrices that are multiplied
_TIMES = 7


def measure_bandwidth() -> float:
    """Bytes/s that memory gives at best: copied, read and written bytes both counted, or read by a matrix-vector product.

    Where a written line is read first, a copy moves more than it counts, and the product, which is what decoding
    mostly does, is ahead.
    """
    source = torch.ones(_READ // 4)
    target, matrix = torch.empty_like(source), source.view(-1, 8192)
    vector = torch.ones(8192)
    return max(2 * source.nbytes / _best(lambda: target.copy_(source)), matrix.nbytes / _best(lambda: matrix @ vector))


def measure_peak(dtype: torch.dtype) -> float:
    """FLOP/s at which torch multiplies matrices of this dtype; the best of seven products."""
    left, right = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _best(lambda: left @ right)


def measure_memory() -> int | None:
    """Bytes of memory that this machine has; None where its system does not say."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest run, after one to warm up."""
    work()
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
