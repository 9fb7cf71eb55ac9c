"""The commands that make bundles and look into them, against transformers' own generate."""

import json
import re
import shutil

import models
import pytest
import texts
from test_cli import expected, run

from staticgen.cli_bundles import STAGES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "tiny model"
    models.llama(vocab_size=259, eos_token_id=2).save_pretrained(path)
    texts.byte_level().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "bundle"
    from staticgen.compile import compile_bundle

    from staticgen.text import load_text_model

    model, tokenizer = load_text_model(folder)
    compile_bundle(model, path, tokenizer=tokenizer, max_length=64, source="tiny model")
    return path


def test_compile_then_generate(folder, capfd, tmp_path):
    out = tmp_path / "bundle"
    code, _, err = run(
        capfd, "compile", folder, "-o", out, "--max-length", 64, "--prefill-buckets", 8, "--cache-sizes", 32
    )
    assert code == 0, err
    for word in ("3 programs", "peak memory", "logits within", "checked on openvino on CPU"):
        assert word in err
    stages = re.findall(r"^ *[\d.]+ s  (\w+)", err, re.MULTILINE)
    assert set(stages) == set(STAGES) - {"compress", "compile", "target", "blobs"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["model"]["source"] == "tiny model"
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    code, text, err = run(capfd, "generate", "--model", out, "--prompt", "hello", "--max-new-tokens", 20)
    assert (code, text) == (0, expected(folder, "hello", 20) + "\n")
    code, text, _ = run(capfd, "generate", "--model", out, "--prompt", "hello", "--max-length", 16)
    assert (code, text) == (0, expected(folder, "hello", 10) + "\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", 3], "batch_size is 3, but bundle"),
        (["--backend", "eager"], "backend is 'eager', but bundle"),
        (["--dtype", "float16"], "was compiled in torch.float32"),
        (["--layout", "none"], "has no program for the step"),
        (["--max-length", 100], "max_length=100"),
    ],
)
def test_a_bundle_refuses_what_it_was_not_compiled_for(bundle, capfd, arguments, words):
    code, out, err = run(capfd, "generate", "--model", bundle, "--prompt", "hello", *arguments)
    assert (code, out) == (1, "")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "no-such"], "unknown profile 'no-such'"),
        (["--profile", "tpu-v5e"], "backend 'xla'"),
        (["--dtype", "float64"], "dtype is 'float64'"),
        (["--max-length", 1], "max_length is 1"),
        (["--layout", "sideways"], "'sideways'"),
        (["--weights", "int3"], "weights is 'int3'"),
    ],
)
def test_a_compile_that_is_refused_leaves_nothing(folder, capfd, tmp_path, arguments, words):
    code, out, err = run(capfd, "compile", folder, "-o", tmp_path / "bundle", *arguments)
    assert (code, out) == (1, "")
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_compile_does_not_overwrite(folder, capfd, tmp_path):
    (tmp_path / "bundle").mkdir()
    code, _, err = run(capfd, "compile", folder, "-o", tmp_path / "bundle")
    assert code == 1
    assert "exists already" in err


def test_verify(bundle, capfd):
    code, out, _ = run(capfd, "verify", bundle)
    assert code == 0
    assert out.count("none") == 3
    code, out, _ = run(capfd, "verify", bundle, "--json")
    report = json.loads(out)
    assert code == 0
    assert [one["diverges_at"] for one in report["results"]] == [None] * 3
    assert max(one["largest_difference"] for one in report["results"]) < 1e-3


def test_verify_tells_another_model_by_its_tokens(folder, capfd, tmp_path):
    """A bundle of one model with another one's reference: every file is in order, and what it computes is not."""
    from staticgen.bundle import read_bundle, write_manifest
    from staticgen.certificate import CERTIFICATE, ask_reference, load_golden, save_golden

    run(capfd, "compile", folder, "-o", tmp_path / "bundle", "--max-length", 64)
    found = read_bundle(tmp_path / "bundle")
    prompts = [one.prompt.tolist() for one in load_golden(found)]
    other = models.llama(vocab_size=259, eos_token_id=2, seed=7)
    save_golden(ask_reference(other, prompts, 8), tmp_path / "bundle" / CERTIFICATE)
    fields = {
        name: value for name, value in found.manifest.items() if name not in ("format", "version", "files", "checksum")
    }
    write_manifest(tmp_path / "bundle", fields)
    code, out, _ = run(capfd, "verify", tmp_path / "bundle", "--json")
    assert code == 1
    worst = max(json.loads(out)["results"], key=lambda one: one["kl"])
    assert worst["found"] != worst["expected"]
    assert worst["kl"] > 0.1
    code, out, _ = run(capfd, "verify", tmp_path / "bundle")
    assert code == 1
    assert f"{worst['diverges_at']}: {worst['found']}, not {worst['expected']}" in out


def test_a_changed_file_is_one_line(bundle, capfd, tmp_path):
    shutil.copytree(bundle, tmp_path / "b")
    weights = bytearray((tmp_path / "b" / "weights.bin").read_bytes())
    weights[100] ^= 1
    (tmp_path / "b" / "weights.bin").write_bytes(weights)
    for command in ("verify", "inspect"):
        code, out, err = run(capfd, command, tmp_path / "b")
        assert (code, out) == (1, "")
        assert len(err.strip().splitlines()) == 1
        assert "'weights.bin' was changed" in err


def test_inspect(bundle, folder, capfd, tmp_path):
    code, out, _ = run(capfd, "inspect", bundle)
    assert code == 0
    for word in ("tiny model", "generic-cpu", "decode_64", "prefill_16_64", "no difference to this machine"):
        assert word in out
    run(capfd, "compile", folder, "-o", tmp_path / "other", "--max-length", 32, "--layout", "shift")
    code, out, _ = run(capfd, "inspect", bundle, tmp_path / "other", "--json")
    differ = {one["name"]: (one["bundle"], one["other"]) for one in json.loads(out)["differences"]}
    assert code == 0
    assert differ["layout"] == ("ring", "shift")
    assert differ["shapes.max_length"] == (64, 32)
    assert not any(name.startswith(("versions", "model")) for name in differ)


def test_cache(folder, capfd, tmp_path, monkeypatch):
    code, out, err = run(capfd, "cache", "list")
    assert (code, out) == (1, "")
    assert "STATICGEN_CACHE" in err
    monkeypatch.setenv("STATICGEN_CACHE", str(tmp_path))
    generate = ["generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", 3, "--backend", "openvino"]
    code, text, _ = run(capfd, *generate)
    assert (code, text) == (0, expected(folder, "hello", 3) + "\n")
    code, out, _ = run(capfd, "cache", "list", "--json")
    (entry,) = json.loads(out)["entries"]
    assert (entry["kind"], entry["key"]["model_type"]) == ("model", "llama")
    code, text, err = run(capfd, *generate)
    assert text == expected(folder, "hello", 3) + "\n"
    assert "converted before" in err
    code, out, _ = run(capfd, "cache", "list")
    assert "1 entries" in out
    code, out, _ = run(capfd, "cache", "clean", "--days", 1)
    assert "removed 0 entries" in out
    code, out, _ = run(capfd, "cache", "clean")
    assert "removed 1 entries" in out
    assert list(tmp_path.iterdir()) == []
