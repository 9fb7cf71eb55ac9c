from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticgen.buckets import propose_buckets, read_prompt_lengths, use_buckets

HISTOGRAMS = st.dictionaries(st.integers(1, 30), st.integers(1, 5), min_size=1, max_size=8)


def padded(length, buckets):
    """Tokens and steps of one prompt, step by step: full ones of the largest bucket, and before them the rest."""
    if length == 1:
        return 1, 1
    tokens = steps = 0
    while length >= buckets[-1]:
        length, tokens, steps = length - buckets[-1], tokens + buckets[-1], steps + 1
    if length:
        tokens, steps = tokens + min(size for size in buckets if size >= length), steps + 1
    return tokens, steps


def totals(lengths, buckets):
    pairs = [(padded(length, buckets), count) for length, count in lengths.items()]
    return tuple(sum(pair[part] * count for pair, count in pairs) for part in (0, 1))


@given(HISTOGRAMS, st.sets(st.integers(1, 32), min_size=1, max_size=3).map(sorted))
def test_what_is_counted_is_what_the_prompts_cost(lengths, buckets):
    use = use_buckets(lengths, buckets)
    assert (use.computed_tokens, use.steps) == totals(lengths, buckets)
    assert use.prompts == sum(lengths.values())
    tokens = sum(length * count for length, count in lengths.items())
    assert use.waste == pytest.approx((use.computed_tokens - tokens) / use.computed_tokens)


@settings(max_examples=150, deadline=None)
@given(HISTOGRAMS, st.integers(1, 3), st.integers(1, 32))
def test_no_other_set_of_buckets_has_less_padding(lengths, count, least):
    """Against all sets there are, of which none has a smaller largest bucket."""
    longest = max(lengths)
    sets = [
        (*smaller, largest)
        for largest in range(min(least, longest), longest + 1)
        for extra in range(count)
        for smaller in combinations(range(1, largest), extra)
    ]
    best = min((*totals(lengths, buckets), len(buckets)) for buckets in sets)
    found = propose_buckets(lengths, count, least)
    assert (*totals(lengths, found), len(found)) == best
    assert len(found) <= count and found[-1] >= min(least, longest)


def test_no_prompt_takes_more_steps_than_before():
    lengths = {100: 5, 700: 1, 260: 3}
    own, found = (16, 128), propose_buckets(lengths, 3, 128)
    for length in lengths:
        assert padded(length, found)[1] <= padded(length, own)[1]
    assert use_buckets(lengths, found).waste < use_buckets(lengths, own).waste


def test_prompts_of_a_few_lengths_get_a_bucket_each():
    assert propose_buckets({20: 9, 50: 9, 90: 1}, 3, 128) == (20, 50, 90)
    assert propose_buckets({20: 9, 50: 9, 90: 1}, 2, 128) == (50, 90)
    assert propose_buckets({20: 9, 50: 1, 90: 9}, 2, 128) == (20, 90)
    assert propose_buckets({1: 4}, 2, 128) == (1,)


def test_a_thousand_lengths_are_no_trouble():
    lengths = {length: 1 + length % 7 for length in range(1, 1000)}
    found = propose_buckets(lengths, 3, 512)
    assert use_buckets(lengths, found).waste < use_buckets(lengths, (16, 128, 512)).waste


def test_lengths_are_read_from_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("12\n\n 7 3\n12\n", encoding="utf-8")
    assert read_prompt_lengths(file) == {12: 2, 7: 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5\n12 2 3\n", "line 2 is '12 2 3'"),
        ("0\n", "line 1 is '0'"),
        ("5 0\n", "line 1 is '5 0'"),
        ("-4\n", "line 1 is '-4'"),
        ("1.5\n", "line 1 is '1.5'"),
        ("twelve\n", "line 1 is 'twelve'"),
        ("\n \n", "has no lengths"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, words):
    file = tmp_path / "lengths.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words) as caught:
        read_prompt_lengths(file)
    assert str(file) in str(caught.value)
