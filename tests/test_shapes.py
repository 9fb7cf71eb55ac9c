import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staticgen.shapes import CacheSpec, LayerSpec, plan_chunks


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [8]), (8, [8]), (9, [32]), (32, [32]), (33, [8, 32]), (70, [8, 32, 32]), (64, [32, 32])],
)
def test_the_remainder_comes_first_in_the_smallest_bucket_that_holds_it(length, expected):
    assert plan_chunks(length, [8, 32]) == expected


@given(st.integers(1, 500), st.sets(st.integers(1, 64), min_size=1, max_size=4).map(sorted))
def test_chunks_hold_the_prompt_and_only_the_first_has_padding(length, buckets):
    chunks = plan_chunks(length, buckets)
    assert set(chunks) <= set(buckets)
    padding = sum(chunks) - length
    assert 0 <= padding < chunks[0]


def test_bytes_of_a_cache():
    spec = CacheSpec((LayerSpec(2, 16, 16), LayerSpec(1, 8, 4)), torch.float16)
    assert spec.nbytes(batch=3, cache_length=10) == 2 * 3 * 10 * (2 * 32 + 1 * 12)
    assert (spec.windows, spec.longest) == ((None,), None)


def test_layers_with_windows_count_their_window():
    spec = CacheSpec((LayerSpec(2, 16, 16, 4), LayerSpec(1, 8, 4, 6), LayerSpec(1, 8, 4, 4)), torch.float32)
    assert (spec.windows, spec.longest) == ((4, 6), 6)
    assert spec.nbytes(batch=1, cache_length=10) == 4 * (4 * 64 + 6 * 12 + 4 * 12)
    assert spec.nbytes(batch=1, cache_length=3) == 4 * 3 * (64 + 12 + 12)
