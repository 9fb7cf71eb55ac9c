import pytest

from staticgen import UnknownNameError
from staticgen.profiles import load_profile, parse_profile, profile_names

GOOD = {
    "description": "a test",
    "attention": "split",
    "transposed_keys": False,
    "late_heads": False,
    "fed": False,
    "prefill_buckets": [8, 32],
    "cache_sizes": [64],
    "compile_options": {"A": 1},
}


def test_every_profile_of_the_package_is_valid():
    assert profile_names()
    for name in profile_names():
        assert load_profile(name).name == name


def test_a_profile_is_read():
    profile = parse_profile("test", GOOD)
    assert profile.prefill_buckets == (8, 32)
    assert profile.compile_options == {"A": "1"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"atention": "split"}, "unknown entry 'atention'"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"prefill_buckets": [32, 8]}, "prefill_buckets is"),
        ({"prefill_buckets": []}, "prefill_buckets is"),
        ({"cache_sizes": [0]}, "cache_sizes is"),
        ({"cache_sizes": 64}, "cache_sizes is"),
        ({"transposed_keys": "no"}, "transposed_keys is 'no'"),
        ({"late_heads": 1}, "late_heads is 1"),
        ({"fed": "yes"}, "fed is 'yes'"),
        ({"compile_options": []}, "compile_options is"),
    ],
)
def test_a_broken_profile_names_the_entry(change, words):
    with pytest.raises(ValueError, match=words):
        parse_profile("test", {**GOOD, **change})


def test_a_missing_entry_and_an_unknown_profile():
    with pytest.raises(ValueError, match="missing entry 'attention'"):
        parse_profile("test", {key: value for key, value in GOOD.items() if key != "attention"})
    with pytest.raises(UnknownNameError, match="unknown profile 'tpu': expected one of generic-cpu"):
        load_profile("tpu")
