"""The commands about targets; what they print is on standard output, errors on standard error."""

import json
import subprocess
import sys

import models
import pytest
from test_cli import run

from staticgen.planning import plan
from staticgen.profiles import load_profile, profile_names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config without weights, in a folder with dots, spaces and accents in its name."""
    path = tmp_path_factory.mktemp("hub") / "Tiny-2.5 0.5B é"
    models.llama().config.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables of a terminal that cuts nothing."""
    monkeypatch.setenv("COLUMNS", "200")


def test_profiles_are_listed(capfd):
    code, out, err = run(capfd, "profiles")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert names == profile_names()
    assert "tpu-v5e xla 16 GB 819 GB/s 197 TFLOP/s bfloat16" in " ".join(out.split())
    assert "intel-npu-4000 npu ~136.5 GB/s ~24 TFLOP/s float16" in " ".join(out.split())


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_is_shown_with_its_sources(capfd, name):
    code, out, err = run(capfd, "profiles", name)
    assert (code, err) == (0, "")
    words, profile = " ".join(out.split()), load_profile(name)
    for key, figure in profile.figures().items():
        assert f"{key} " in words
        assert f"({figure.source})" in words
    for key, value in profile.compile_options.items():
        assert f"{key}={value}" in words
    for key in {"memory", "bandwidth"} - set(profile.figures()):
        assert f"{key} differs between machines" in words
    if profile.tpu is not None:
        assert f"tpu topology {profile.tpu.topology}" in words
        assert (f"{profile.chips} chips share a program" in words) == (profile.chips > 1)


def test_profiles_as_json(capfd):
    tables = json.loads(run(capfd, "profiles", "--json")[1])
    assert [table["name"] for table in tables] == profile_names()
    one = json.loads(run(capfd, "profiles", "nvidia-l4", "--json")[1])
    assert one == {"name": "nvidia-l4", **load_profile("nvidia-l4").to_dict()}


def test_a_profile_of_ones_own_is_shown_and_planned_for(capfd, folder, tmp_path):
    table = load_profile("tpu-v6e").to_dict()
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    file = tmp_path / "my board.toml"
    file.write_text("\n".join([*lines, "compile_options = {}", "[memory]", "value = 5e4", 'source = "the box"']))
    assert "50 kB (the box)" in run(capfd, "profiles", file)[1]
    code, out, _ = run(capfd, "plan", folder, "--profile", file, "--max-length", 64)
    assert code == 0
    assert "on my board, bfloat16" in out
    assert "does not fit; the largest max_length that does is none" in out


def test_a_plan_is_printed(capfd, folder):
    code, out, err = run(capfd, "plan", folder, "--profile", "nvidia-l4", "--max-length", 256, "--batch-size", 2)
    assert (code, err) == (0, "")
    found = plan(folder, "nvidia-l4", max_length=256, batch_size=2)
    words = " ".join(out.split())
    assert f"{folder} (llama) on nvidia-l4, bfloat16 max_length 256, batch_size 2" in words
    assert f"in all {found.total_bytes / 1e6:.4g} MB of 24 GB fits" in words
    assert f"the largest batch_size {found.largest_batch_size}" in words
    assert f"decode 256 {found.programs[-1].read_bytes / 1e3:.4g} kB" in words
    assert f"the profile's 64: {100 * found.own_buckets.waste:.1f} %" in words
    for note in found.notes:
        assert f"- {note}" in words


def test_a_plan_as_json(capfd, folder, tmp_path):
    lengths = tmp_path / "lengths"
    lengths.write_text("20 9\n45\n90 2\n")
    flags = [
        "--dtype",
        "float32",
        "--weights",
        "int8",
        "--max-length",
        120,
        "--prompt-lengths",
        lengths,
        "--buckets",
        3,
    ]
    code, out, err = run(capfd, "plan", folder, "--json", *flags)
    assert (code, err) == (0, "")
    arguments = {"dtype": "float32", "weights": "int8", "max_length": 120, "buckets": 3}
    expected = plan(folder, prompt_lengths={20: 9, 45: 1, 90: 2}, **arguments)
    assert json.loads(out) == json.loads(json.dumps(expected.to_dict()))
    assert expected.proposed_buckets.buckets == (20, 45, 90)
    words = " ".join(run(capfd, "plan", folder, *flags)[1].split())
    assert "12 prompts: the profile's 16: " in words
    assert "proposed 20, 45, 90: 0.0 % of what is computed is padding, 12 steps" in words


def test_figures_can_be_given(capfd, folder):
    found = json.loads(run(capfd, "plan", folder, "--json", "--memory", "16e9", "--bandwidth", "2e10")[1])
    decode = found["programs"][-1]
    assert (found["memory"], found["fits"]) == (16e9, True)
    assert decode["seconds"] == decode["read_bytes"] / 2e10
    assert "unknown" in run(capfd, "plan", folder)[1]


def test_figures_can_be_measured(capfd, folder):
    found = json.loads(run(capfd, "plan", folder, "--json", "--measure")[1])
    assert all(program["seconds"] > 0 for program in found["programs"])
    assert not any("no bandwidth" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profiles", "tpu"], "unknown profile 'tpu': expected one of cpu-amx"),
        (["profiles", "./nowhere.toml"], "'./nowhere.toml': there is no such file"),
        (["plan", "./nowhere"], "'./nowhere' is neither a folder nor a .gguf file"),
        (["plan", "--profile", "abacus"], "unknown profile 'abacus'"),
        (["plan", "FOLDER", "--dtype", "int8"], "dtype is 'int8', but profile 'generic-cpu' has float32"),
        (["plan", "FOLDER", "--weights", "fp8"], "weights is 'fp8', expected one of none, int8, int4"),
        (["plan", "FOLDER", "--buckets", "2"], "buckets is given without prompt_lengths"),
        (["plan", "FOLDER", "--prompt-lengths", "nowhere"], "nowhere"),
        (["plan", "FOLDER", "--profile", "tpu-v4", "--measure"], "is for device 'TPU'"),
        (["plan", "FOLDER", "--memory", "0"], "memory is 0.0, expected a number above 0"),
    ],
)
def test_what_is_refused_is_said_in_one_line(capfd, folder, arguments, words):
    code, out, err = run(capfd, *(folder if each == "FOLDER" else each for each in arguments))
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert words in err


def test_a_broken_file_is_named_with_its_line(capfd, folder, tmp_path):
    lengths = tmp_path / "lengths"
    lengths.write_text("12\nlong\n")
    code, _, err = run(capfd, "plan", folder, "--prompt-lengths", lengths)
    assert code == 1
    assert f"{str(lengths)!r} line 2 is 'long'" in err


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom staticgen.cli import app\n"
        "for name in ('profiles', 'plan'):\n"
        "    try: app([name, '--help'])\n    except SystemExit: pass\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "set()"
    assert "--prompt-lengths" in out
