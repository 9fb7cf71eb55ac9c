import copy
import json
import re

import pytest
import torch

from staticgen import UnknownNameError
from staticgen.layouts import LAYOUTS
from staticgen.profiles import Topology, load_profile, parse_profile, profile_names

GOOD = {
    "description": "a test",
    "backend": "openvino",
    "device": "CPU",
    "dtypes": ["bfloat16", "float32"],
    "layout": "shift",
    "attention": "split",
    "transposed_keys": False,
    "prefill_buckets": [8, 32],
    "cache_sizes": [64],
    "compile_options": {"A": 1},
    "limits": {"batch_size": 4},
    "memory": {"value": 16e9, "source": "a book"},
    "bandwidth": {"value": 100_000_000_000, "source": "worked out", "estimate": True},
    "peak": {"float32": {"value": 1e12, "source": "a book"}, "int8": {"value": 8e12, "source": "a book"}},
    "tpu": {"topology": "v5e:2x2", "mesh": 4},
}
OPTIONAL = {"limits", "memory", "bandwidth", "peak", "tpu"}
FILE = """
description = "mine"
backend = "xla"
device = "TPU"
dtypes = ["bfloat16"]
layout = "ring"
attention = "concat"
transposed_keys = true
prefill_buckets = [4]
cache_sizes = []
[compile_options]
[memory]
value = 8_000_000_000
source = "the box"
"""


def changed(path, value):
    """GOOD with another value at a place like ``memory.value``; None removes it."""
    table = copy.deepcopy(GOOD)
    *outer, key = path.split(".")
    inner = table
    for name in outer:
        inner = inner[name]
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    return table


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_of_the_package_is_valid(name):
    profile = load_profile(name)
    assert profile.name == name
    assert parse_profile(name, json.loads(json.dumps(profile.to_dict()))) == profile
    assert profile.layout in LAYOUTS.names()
    for dtype in profile.dtypes:
        assert isinstance(getattr(torch, dtype), torch.dtype)
    for key, figure in profile.figures().items():
        assert len(figure.source) > 20, f"{key} does not say where it is from"
        assert figure.estimate == figure.source.startswith("worked out"), key


def test_there_is_a_profile_of_every_target():
    targets = {
        "generic-cpu", "generic-cpu-inductor", "cpu-amx", "intel-gpu", "intel-npu", "intel-npu-3720", "intel-npu-4000", "intel-npu-5010",
        "tpu-v4", "tpu-v5e", "tpu-v5e-4", "tpu-v5e-16", "tpu-v5p", "tpu-v6e", "nvidia", "nvidia-a100", "nvidia-h100", "nvidia-h200", "nvidia-l4",
    }  # fmt: skip
    assert set(profile_names()) == targets


@pytest.mark.parametrize("platform", ["3720", "4000", "5010"])
def test_each_npu_is_the_general_one_with_its_platform(platform):
    general, one = load_profile("intel-npu"), load_profile(f"intel-npu-{platform}")
    assert one.compile_options == {**general.compile_options, "NPU_PLATFORM": platform}
    assert (one.form, one.backend, one.dtypes) == (general.form, "npu", ("float16",))
    assert one.bandwidth is not None and one.bandwidth.estimate


@pytest.mark.parametrize(("name", "chips"), [("tpu-v5e-4", 4), ("tpu-v5e-16", 16)])
def test_several_chips_are_one_several_times(name, chips):
    one, several = load_profile("tpu-v5e"), load_profile(name)
    assert (several.chips, several.tpu.chips, one.chips) == (chips, chips, 1)
    assert several.form == one.form and several.compile_options == one.compile_options
    for key, figure in one.figures().items():
        assert several.figures()[key].value == figure.value, f"{key} is not that of one chip"


def test_every_tpu_has_a_topology_of_its_generation():
    for name in profile_names():
        profile = load_profile(name)
        if profile.device != "TPU":
            assert profile.tpu is None
        else:
            assert profile.tpu.topology.partition(":")[0] == name.split("-")[1]


def test_a_topology_without_a_name_is_refused():
    with pytest.raises(ValueError, match=re.escape("missing entry 'tpu.topology'")):
        parse_profile("test", changed("tpu.topology", None))
    assert parse_profile("test", changed("tpu.mesh", None)).chips == 1


def test_a_profile_is_read():
    profile = parse_profile("test", GOOD)
    assert (profile.prefill_buckets, profile.cache_sizes) == ((8, 32), (64,))
    assert profile.compile_options == {"A": "1"}
    assert (profile.limits.batch_size, profile.limits.max_length) == (4, None)
    assert list(profile.figures()) == ["memory", "bandwidth", "peak.float32", "peak.int8"]
    assert profile.memory.value == 16e9 and not profile.memory.estimate
    assert profile.bandwidth.estimate and profile.bandwidth.source == "worked out"
    assert profile.tpu == Topology("v5e:2x2", 4) and profile.chips == profile.tpu.chips == 4


def test_figures_and_limits_may_be_left_out():
    profile = parse_profile("test", {key: value for key, value in GOOD.items() if key not in OPTIONAL})
    assert profile.figures() == {}
    assert (profile.memory, profile.limits.batch_size) == (None, None)
    assert (profile.tpu, profile.chips) == (None, 1)
    assert parse_profile("test", profile.to_dict()) == profile


def test_a_profile_becomes_a_dict_and_back():
    profile = parse_profile("test", GOOD)
    table = profile.to_dict()
    assert "name" not in table
    assert table["limits"] == {"batch_size": 4}
    assert parse_profile("test", json.loads(json.dumps(table))) == profile


@pytest.mark.parametrize("key", sorted(set(GOOD) - OPTIONAL))
def test_a_missing_entry_is_named(key):
    with pytest.raises(ValueError, match=f"profile 'test': missing entry '{key}'"):
        parse_profile("test", changed(key, None))


@pytest.mark.parametrize("key", ["memory", "bandwidth", "peak.int8"])
@pytest.mark.parametrize("part", ["value", "source"])
def test_a_figure_without_a_value_or_a_source_is_refused(key, part):
    with pytest.raises(ValueError, match=re.escape(f"missing entry '{key}.{part}'")):
        parse_profile("test", changed(f"{key}.{part}", None))


@pytest.mark.parametrize(
    "key", ["atention", "limits.batch", "memory.unit", "bandwidth.bytes", "peak.float64", "peak.int8.url", "tpu.chips"]
)
def test_an_unknown_entry_is_named_with_those_there_are(key):
    with pytest.raises(ValueError, match=re.escape(f"unknown entry '{key}'; expected ")):
        parse_profile("test", changed(key, {"value": 1, "source": "x"}))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("description", 7, "a text"),
        ("description", " ", "a text"),
        ("backend", ["xla"], "a text"),
        ("device", "", "a text"),
        ("dtypes", [], "a list of some of float32, bfloat16, float16"),
        ("dtypes", "float32", "a list of some of"),
        ("dtypes", ["float64"], "a list of some of"),
        ("dtypes", ["float32", "float32"], "each once"),
        ("dtypes", [["float32"]], "a list of some of"),
        ("layout", "dynamic", "one of ring, shift"),
        ("layout", 3, "one of ring"),
        ("attention", "flash", "one of split, spread, concat, sdpa"),
        ("transposed_keys", "no", "true or false"),
        ("transposed_keys", 0, "true or false"),
        ("late_heads", 1, "true or false"),
        ("fed", "yes", "true or false"),
        ("prefill_buckets", [32, 8], "ascending whole numbers"),
        ("prefill_buckets", [8, 8], "ascending whole numbers"),
        ("prefill_buckets", [True, 8], "ascending whole numbers"),
        ("prefill_buckets", [8.0], "ascending whole numbers"),
        ("prefill_buckets", [], "at least one size"),
        ("cache_sizes", [0], "ascending whole numbers"),
        ("cache_sizes", 64, "ascending whole numbers"),
        ("compile_options", [], "a table"),
        ("compile_options.A", True, "a text or a number"),
        ("compile_options.A", ["x"], "a text or a number"),
        ("limits", 4, "a table"),
        ("limits.batch_size", 0, "a whole number from 1 on"),
        ("limits.max_length", True, "a whole number from 1 on"),
        ("memory", 16e9, "a table"),
        ("memory.value", "16 GB", "a number above 0"),
        ("memory.value", True, "a number above 0"),
        ("bandwidth.value", 0, "a number above 0"),
        ("bandwidth.value", float("inf"), "a number above 0"),
        ("bandwidth.value", float("nan"), "a number above 0"),
        ("bandwidth.estimate", "yes", "true or false"),
        ("bandwidth.source", "", "a text"),
        ("peak", [], "a table"),
        ("peak.float32", 1e12, "a table"),
        ("peak.float32.value", -1, "a number above 0"),
        ("tpu", "v5e:2x2", "a table"),
        ("tpu.topology", "v5e", "a generation and how its chips are arranged, as 'v5e:2x2'"),
        ("tpu.topology", "v5e:0x2", "a generation and how"),
        ("tpu.topology", 4, "a generation and how"),
        ("tpu.mesh", 0, "a whole number from 1 on"),
        ("tpu.mesh", True, "a whole number from 1 on"),
        ("tpu.mesh", 5, "4 at most, the chips of topology 'v5e:2x2'"),
        ("tpu.chip_config", "", "a text"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(key, value, expected):
    with pytest.raises(ValueError) as caught:
        parse_profile("test", changed(key, value))
    assert f"profile 'test': {key} is {value!r}, expected " in str(caught.value)
    assert expected in str(caught.value)


def test_an_unknown_profile():
    with pytest.raises(UnknownNameError, match="unknown profile 'tpu': expected one of cpu-amx, generic-cpu"):
        load_profile("tpu")


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "my board.toml"
    file.write_text(FILE, encoding="utf-8")
    profile = load_profile(file)
    assert profile == load_profile(str(file))
    assert (profile.name, profile.backend, profile.memory.source) == ("my board", "xla", "the box")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"description = ", "is no TOML in UTF-8"),
        (b"description = '\xff'", "is no TOML in UTF-8"),
        (FILE.replace("[4]", "[0]").encode(), "prefill_buckets is [0], expected"),
        (b"[memory]", "missing entry 'description'"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, words):
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"profile {str(file)!r}")) as caught:
        load_profile(file)
    assert words in str(caught.value)


def test_a_path_that_is_no_profile(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_profile("./nowhere.toml")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_profile(tmp_path / "a.toml")
    with pytest.raises(ValueError, match=r"must end in \.toml"):
        load_profile(tmp_path)
