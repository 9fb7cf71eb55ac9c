"""Which sizes of prefill steps suit the prompts: padding, counted and kept small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from staticgen.shapes import plan_chunks

_LARGEST_TRIED = 64  # sizes that are tried for the largest bucket, so that a thousand lengths take a second


@dataclass(frozen=True)
class BucketUse:
    """What some prompts cost with some buckets, one prompt a row.

    Attributes:
        buckets: sizes of prefill steps, ascending.
        prompts: how many prompts there are.
        prompt_tokens: their tokens.
        computed_tokens: tokens that prefill computes for them, padding included.
        steps: prefill steps that they take.
    """

    buckets: tuple[int, ...]
    prompts: int
    prompt_tokens: int
    computed_tokens: int
    steps: int

    @property
    def waste(self) -> float:
        """The share of what is computed that is padding, 0 to 1."""
        return 1 - self.prompt_tokens / self.computed_tokens


def use_buckets(lengths: Mapping[int, int], buckets: Sequence[int]) -> BucketUse:
    """Count what prompts cost; ``lengths`` says how many prompts there are of each length."""
    # A prompt of one token takes the decode step.
    chunks = {length: [1] if length == 1 else plan_chunks(length, buckets) for length in lengths}
    return BucketUse(
        buckets=tuple(buckets),
        prompts=sum(lengths.values()),
        prompt_tokens=sum(length * count for length, count in lengths.items()),
        computed_tokens=sum(sum(chunks[length]) * count for length, count in lengths.items()),
        steps=sum(len(chunks[length]) * count for length, count in lengths.items()),
    )


def propose_buckets(lengths: Mapping[int, int], count: int, least_largest: int) -> tuple[int, ...]:
    """The sizes of at most ``count`` prefill steps with the least padding for these prompts.

    The smaller a bucket, the less padding, and the more steps, down to one step a token; so no prompt may take more
    steps than with a largest bucket of ``least_largest`` tokens. Among sets of equal padding the one with the fewest
    steps is taken, and then with the fewest and smallest buckets. The largest bucket is tried at every size from
    ``least_largest`` to the longest prompt, or at 64 of them evenly if there are more; the smaller ones are then
    exact, by dynamic programming over what the lengths leave after full steps of the largest.

    Args:
        lengths: how many prompts there are of each length.
        count: buckets at most.
        least_largest: see above.
    """
    longest = max(lengths)
    least = min(least_largest, longest)
    stride = max(1, -(-(longest - least) // _LARGEST_TRIED))
    found = [_with_largest(lengths, count, largest) for largest in {*range(least, longest, stride), longest}]
    uses = [use_buckets(lengths, buckets) for buckets in found]
    return min(uses, key=lambda use: (use.computed_tokens, use.steps, len(use.buckets), use.buckets)).buckets


def _with_largest(lengths: Mapping[int, int], count: int, largest: int) -> tuple[int, ...]:
    """The best buckets whose largest is given: cut the sorted remainders into runs that share a bucket each."""
    counts: dict[int, int] = {}
    for length, prompts in lengths.items():
        if length > 1 and length % largest:
            counts[length % largest] = counts.get(length % largest, 0) + prompts
    sizes = np.array(sorted(counts), dtype=np.int64)
    weights = np.array([counts[size] for size in sizes.tolist()], dtype=np.int64)
    prompts_before = np.concatenate([[0], np.cumsum(weights)])
    tokens_before = np.concatenate([[0], np.cumsum(weights * sizes)])

    def padding(first: np.ndarray, last: np.ndarray, bucket: np.ndarray) -> np.ndarray:
        return bucket * (prompts_before[last] - prompts_before[first]) - (tokens_before[last] - tokens_before[first])

    n = len(sizes)
    ends = np.arange(1, n + 1)
    # cost[i, j]: remainders i to j in a bucket of remainder j's size; nothing where i is above j.
    starts = np.arange(n)
    cost = np.where(
        starts[:, None] < ends[None], padding(starts[:, None], ends[None], sizes[None]), np.iinfo(np.int64).max // 4
    )
    best = np.full(n + 1, np.iinfo(np.int64).max // 4)  # padding of the first so many remainders
    best[0] = 0
    choices = []
    for _ in range(count - 1):
        totals = best[:-1, None] + cost
        choice = totals.argmin(axis=0) if n else starts
        better = np.concatenate([[0], totals[choice, starts]])
        improved = better < best
        choices.append(np.where(improved, np.concatenate([[0], choice]), -1))
        best = np.minimum(better, best)
    ends = np.arange(n + 1)
    cut = int((best + padding(ends, np.full(n + 1, n), np.full(n + 1, largest))).argmin())
    buckets = [largest]
    for choice in reversed(choices):
        if cut and choice[cut] >= 0:
            buckets.append(int(sizes[cut - 1]))
            cut = int(choice[cut])
    return tuple(sorted(buckets))


def read_prompt_lengths(path: str | Path) -> dict[int, int]:
    """How many prompts there are of each length, from a file with a length a line, or a length and how often.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is something else; the message names it. No lengths at all.
    """
    lengths: dict[int, int] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        words = line.split()
        if len(words) > 2 or not all(word.isascii() and word.isdigit() and int(word) for word in words):
            raise ValueError(
                f"{str(path)!r} line {number} is {line!r}, expected a prompt's length in tokens, or a length and how "
                "many prompts have it"
            )
        length, count = int(words[0]), int(words[1]) if len(words) == 2 else 1
        lengths[length] = lengths.get(length, 0) + count
    if not lengths:
        raise ValueError(f"{str(path)!r} has no lengths, expected one a line")
    return lengths
