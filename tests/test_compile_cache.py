"""The compile cache: what is found again, what is not and why, and that nothing breaks it."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest
import torch

import staticgen
from staticgen.backends import BACKENDS, ir
from staticgen.backends.openvino import OpenVINOBackend
from staticgen.compile_cache import CompileCache, user_cache

IDS = [[5, 6, 7, 8]]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STATICGEN_CACHE", str(tmp_path / "cache"))
    return CompileCache(tmp_path / "cache")


class KeepingBackend(OpenVINOBackend):
    """The CPU as a device whose compiler's work is kept, like a GPU's or an NPU's."""

    def __init__(self, device=None, options=None):
        super().__init__(device, options)
        self.keeps_blobs = True


def session(model, **arguments):
    return staticgen.Session(model, **{"backend": "openvino", "max_length": 32, "prefill_buckets": [8]} | arguments)


def test_another_session_converts_nothing(cache, monkeypatch):
    first = session(models.llama())
    assert (first.stats.compile_cache.hits, first.stats.compile_cache.misses) == (0, 1)
    monkeypatch.setattr(ir, "convert_step", lambda step: pytest.fail("it is converted again"))
    again = session(models.llama(), max_length=48, batch_size=2)
    assert (again.stats.compile_cache.hits, again.stats.compile_cache.misses) == (1, 0)
    expected = models.llama().generate(torch.tensor(IDS), max_new_tokens=12, do_sample=False)
    assert torch.equal(first.generate(IDS, max_new_tokens=12), expected)
    assert torch.equal(again.generate(IDS, max_new_tokens=12), expected)


def test_compiled_programs_are_kept_where_compilers_take_long(cache, monkeypatch):
    monkeypatch.setitem(BACKENDS._entries, "keeping", KeepingBackend)
    first = session(models.llama(), backend="keeping")
    assert first.stats.compiles == 2
    assert [entry.kind for entry in cache.entries()].count("program") == 2
    again = session(models.llama(), backend="keeping")
    assert (again.stats.compiles, again.stats.loads, again.stats.compile_cache.hits) == (0, 2, 3)
    assert torch.equal(first.generate(IDS, max_new_tokens=12), again.generate(IDS, max_new_tokens=12))
    other = session(models.llama(), backend="keeping", max_length=40)
    assert other.stats.compile_cache.reason == "program: cache_length is 40, not 32"
    other = session(models.llama(), backend="keeping", backend_options={"NUM_STREAMS": "1"})
    assert other.stats.compile_cache.reason.startswith("program: made_for is ")
    assert "'NUM_STREAMS': '1'" in other.stats.compile_cache.reason
    assert "batch" not in other.stats.compile_cache.reason


def test_a_miss_names_the_fields_that_differ(cache):
    assert session(models.llama()).stats.compile_cache.reason == "model: there is none yet"
    reason = session(models.llama().to(torch.bfloat16)).stats.compile_cache.reason
    assert "dtype is 'bfloat16', not 'float32'" in reason
    assert "weights is" in reason
    assert "torch" not in reason


def test_weights_that_changed_are_not_found(cache):
    model = models.llama()
    before = session(model).generate(IDS, max_new_tokens=8)
    with torch.no_grad():
        model.lm_head.weight[:] = model.lm_head.weight.flip(0)
    changed = session(model)
    assert changed.stats.compile_cache.misses == 1
    assert not torch.equal(changed.generate(IDS, max_new_tokens=8), before)


@pytest.mark.parametrize("damage", ["flip", "cut", "manifest", "lost"])
def test_a_damaged_entry_is_made_anew(cache, damage, caplog):
    expected = session(models.llama()).generate(IDS, max_new_tokens=8)
    (entry,) = cache.entries()
    weights = entry.folder / "step.bin"
    octets = bytearray(weights.read_bytes())
    if damage == "flip":
        octets[len(octets) // 2] ^= 1
        weights.write_bytes(octets)
    elif damage == "cut":
        weights.write_bytes(octets[:-1])
    elif damage == "manifest":
        (entry.folder / "manifest.json").write_text("{")
    else:
        weights.unlink()
    again = session(models.llama())
    assert "damaged" in caplog.text
    assert again.stats.compile_cache.misses == 1
    assert torch.equal(again.generate(IDS, max_new_tokens=8), expected)
    assert session(models.llama()).stats.compile_cache.hits == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STATICGEN_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="STATICGEN_CACHE"):
        made = session(models.llama())
    expected = models.llama().generate(torch.tensor(IDS), max_new_tokens=8, do_sample=False)
    assert torch.equal(made.generate(IDS, max_new_tokens=8), expected)


def test_it_stays_below_its_limit_and_keeps_what_was_used_last(tmp_path):
    cache = CompileCache(tmp_path, limit=4500)

    def write(folder):
        (folder / "data").write_bytes(bytes(1000))

    for number in range(3):
        cache.store("model", {"number": number}, write)
        os.utime(cache._folder("model", {"number": number}), (number, number))
    assert cache.find("model", {"number": 0}) is not None  # and so it was used last
    cache.store("model", {"number": 3}, write)
    assert {entry.key["number"] for entry in cache.entries()} == {0, 2, 3}
    large = CompileCache(tmp_path, limit=10)
    large.store("model", {"number": 4}, write)
    assert [entry.key["number"] for entry in large.entries()] == [4]


def test_a_failed_writer_leaves_nothing(tmp_path):
    cache = CompileCache(tmp_path)

    def fail(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        cache.store("model", {"a": 1}, fail)
    assert list(tmp_path.iterdir()) == []
    assert cache.find("model", {"a": 1}) is None


PROCESS = """
import sys, torch
sys.path.insert(0, {tests!r})
import models, staticgen
session = staticgen.Session(models.llama(), backend="openvino", max_length=32, prefill_buckets=[8])
print(session.generate([[5, 6, 7, 8]], max_new_tokens=8).tolist(), session.stats.compile_cache.hits)
"""


def process(cache):
    environment = {**os.environ, "STATICGEN_CACHE": str(cache.root)}
    code = PROCESS.format(tests=str(Path(__file__).parent))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def test_two_processes_at_once(cache):
    both = [process(cache), process(cache)]
    outputs = [one.communicate(timeout=300)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert outputs[0].split("]]")[0] == outputs[1].split("]]")[0]
    assert [entry.kind for entry in cache.entries()] == ["model"]
    assert session(models.llama()).stats.compile_cache.hits == 1


def test_a_killed_process_leaves_nothing_that_is_used(cache):
    killed = 0
    for moment in range(6):
        one = process(cache)
        deadline = time.monotonic() + 120
        while one.poll() is None and time.monotonic() < deadline:
            left = list(cache.root.glob("*.tmp")) if cache.root.is_dir() else []
            if left and len(list(left[0].iterdir())) >= moment % 3:
                one.kill()
                killed += 1
                break
        one.communicate()
        if any(entry.kind == "model" for entry in cache.entries()):
            break
    assert killed
    made = session(models.llama())
    expected = models.llama().generate(torch.tensor(IDS), max_new_tokens=8, do_sample=False)
    assert torch.equal(made.generate(IDS, max_new_tokens=8), expected)
    cache.clean()
    assert list(cache.root.iterdir()) == []


def test_clean_drops_what_is_old(cache):
    session(models.llama())
    assert cache.clean(older_than=3600) == []
    (entry,) = cache.entries()
    os.utime(entry.folder, (0, 0))
    shutil.copytree(entry.folder, cache.root / ".model-x.0123.tmp")
    os.utime(cache.root / ".model-x.0123.tmp")
    assert [one.folder for one in cache.clean(older_than=3600)] == [entry.folder]
    assert [one.kind for one in cache.entries()] == ["unfinished"]


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("STATICGEN_CACHE", "off")
    assert user_cache() is None
    monkeypatch.delenv("STATICGEN_CACHE")
    assert user_cache().root.name == "staticgen"
    monkeypatch.setenv("STATICGEN_CACHE", str(tmp_path))
    monkeypatch.setenv("STATICGEN_CACHE_BYTES", "12")
    assert (user_cache().root, user_cache().limit) == (tmp_path, 12)
    monkeypatch.setenv("STATICGEN_CACHE_BYTES", "lots")
    with pytest.raises(ValueError, match="STATICGEN_CACHE_BYTES is 'lots'"):
        user_cache()
