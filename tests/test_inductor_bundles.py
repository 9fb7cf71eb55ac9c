"""Bundles of packages that inductor compiled: run elsewhere, refused where they cannot run, and by the commands."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import bundles
import pytest
import safetensors.torch
import texts
import torch
from families import FAMILIES
from models import llama, random_prompt, reference
from staticgen.compile import compile_bundle
from test_cli import expected, run

import staticgen
from staticgen import BackendUnavailableError, CompileError, cli
from staticgen.backends import open_backend
from staticgen.certificate import load_golden
from staticgen.compiled import open_compiled
from staticgen.profiles import load_profile

# Two sizes each: a prefill step over the whole cache, and decode.
SMALL = {"profile": "generic-cpu-inductor", "max_length": 32, "prefill_buckets": [8], "cache_sizes": [32]}
# Others than those of test_compiled.py: ALiBi and biases; windows, sinks and experts.
WRITTEN = [("Bloom", "6 heads"), ("GPT-OSS", "")]
HALF = ["bfloat16"]

# What runs a bundle needs neither a compiler nor torch's, besides no model.
_READER = """
import sys
from pathlib import Path
import torch
import staticgen
from staticgen.certificate import load_golden
for folder in sorted(Path(sys.argv[1]).iterdir()):
    session, tokens = staticgen.load(folder), []
    for one in load_golden(session._source.model.bundle):
        ids, mask = one.prompt[None], torch.ones_like(one.prompt)[None]
        tokens.append(session.generate(ids, mask, max_new_tokens=8, eos_token_id=[])[0, ids.shape[1] :].tolist())
    print(tokens)
wrong = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
assert not [name for name in wrong if not name.endswith("modeling_auto")], wrong
assert not {"staticgen.step", "staticgen.compile", "torch._inductor.compile_fx"} & set(sys.modules)
"""


def test_packages_give_the_tokens_in_another_process(tmp_path):
    models_of, wanted = {}, []
    for name, variant in WRITTEN:
        models_of[name] = next(family for family in FAMILIES if family.name == name).build(variant)
    for dtype in HALF:
        models_of[dtype] = llama().to(getattr(torch, dtype))
    for name in sorted(models_of):
        made = compile_bundle(models_of[name], tmp_path / name, **SMALL)
        assert len(made.programs) == 2
        golden, results = load_golden(made.bundle), made.bundle.manifest["certificate"]["results"]
        if name in HALF:  # as far as the certificate goes, float32 has the same tokens
            assert max(one["kl"] for one in results) < 0.01
            wanted.append(
                [one.tokens[: result["diverges_at"]].tolist() for one, result in zip(golden, results, strict=True)]
            )
        else:
            wanted.append([reference(models_of[name], one.prompt.tolist(), 8) for one in golden])
    environment = {**os.environ, "CXX": "no-such-compiler"}
    command = [sys.executable, "-c", _READER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for name, mine, its in zip(sorted(models_of), found, wanted, strict=True):
        assert [tokens[: len(own)] for tokens, own in zip(mine, its, strict=True)] == its, name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle, made by the command."""
    root = tmp_path_factory.mktemp("hub")
    llama(vocab_size=259, num_hidden_layers=1, eos_token_id=2).save_pretrained(root / "tiny model")
    texts.byte_level().save_pretrained(root / "tiny model")
    arguments = ["compile", root / "tiny model", "--profile", "generic-cpu-inductor", "-o", root / "bundle"]
    sizes = ["--max-length", 32, "--prefill-buckets", 8, "--cache-sizes", 32]
    with pytest.raises(SystemExit) as caught:
        cli.app([str(argument) for argument in (*arguments, *sizes)])
    assert not caught.value.code
    return root / "bundle"


def test_a_bundle_and_the_commands(made, capfd):
    code, out, err = run(capfd, "generate", "--model", made, "--prompt", "hello", "--max-new-tokens", 12)
    assert (code, out) == (0, expected(made.parent / "tiny model", "hello", 12) + "\n"), err
    code, out, _ = run(capfd, "verify", made)
    assert (code, out.count("none")) == (0, 3)
    assert "here: inductor on cpu" in out
    assert run(capfd, "verify", made, "--stand-in")[0] == 0
    code, out, _ = run(capfd, "inspect", made)
    for word in (
        "generic-cpu-inductor",
        "decode_32",
        "prefill_8_32",
        f"torch {torch.__version__}",
        "no difference to this",
    ):
        assert word in out
    code, out, _ = run(capfd, "profiles", "generic-cpu-inductor")
    assert code == 0 and "inductor" in out
    found = json.loads(run(capfd, "plan", made.parent / "tiny model", "--profile", "generic-cpu-inductor", "--json")[1])
    assert found["profile"] == "generic-cpu-inductor"


FOREIGN = {
    "torch": ("1.0", r"torch 1\.0, and this is 2"),
    "cpu": ("ANOTHER", "cpu ANOTHER, and this is"),
    "machine": ("abacus", "machine abacus, and this is"),
    "instructions": (["beads", "rods"], "a CPU with beads, rods, which this one has not"),
}


@pytest.mark.parametrize("key", FOREIGN)
def test_a_bundle_for_another_machine_is_refused_when_it_is_opened(made, tmp_path, key):
    value, words = FOREIGN[key]
    folder = bundles.copy(made, tmp_path / "bundle")
    manifest = bundles.read(folder)
    for entry in manifest["programs"]:
        entry["compiled"][0]["made_for"][key] = value
    bundles.write(folder, manifest)
    with pytest.raises(BackendUnavailableError, match=rf"was compiled for {words}.*make the bundle anew"):
        staticgen.load(folder)


def test_a_cpu_with_more_instructions_will_do(made, tmp_path):
    folder = bundles.copy(made, tmp_path / "bundle")
    manifest = bundles.read(folder)
    for entry in manifest["programs"]:
        needed = entry["compiled"][0]["made_for"]["instructions"]
        assert len(needed) > 1
        needed.pop()
    bundles.write(folder, manifest)
    prompt = random_prompt(5)
    assert torch.equal(
        staticgen.load(folder).generate([prompt], max_new_tokens=4),
        staticgen.load(made).generate([prompt], max_new_tokens=4),
    )


def test_files_that_are_mixed_up_or_broken(made, tmp_path):
    model, backend = open_compiled(made), open_backend("inductor")
    decode, prefill = sorted(model.programs.values(), key=lambda files: files.shape.tokens)
    with pytest.raises(
        CompileError, match=r"is of the step \[batch 1, tokens 8, cache 32\], expected \[batch 1, tokens 1"
    ):
        backend.load(model.step, replace(prefill, shape=decode.shape))
    other = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"another": torch.zeros(1)}, other)
    with pytest.raises(CompileError, match=r"lacks of its weights .*model\."):
        backend.load(model.step, replace(decode, paths={**decode.paths, "weights": other}))
    broken, known = tmp_path / "decode.pt2", decode.compiled[0][1]
    broken.write_bytes(decode.paths["package"].read_bytes()[:1000])
    with pytest.raises(CompileError, match="cannot load"):
        backend.load(
            model.step, replace(decode, paths={**decode.paths, "package": broken}, compiled=((broken, known),))
        )
    with pytest.raises(CompileError, match="expected 'package' and 'weights'"):
        backend.load(model.step, replace(decode, paths={"model": broken}))
    with pytest.raises(CompileError, match="and what the package is compiled for"):
        backend.load(model.step, replace(decode, compiled=()))


def test_what_a_package_cannot_have(tiny_llama, tmp_path):
    target, out = load_profile("generic-cpu-inductor"), tmp_path / "bundle"
    table = {**target.to_dict(), "compile_options": {"freezing": "true"}}
    frozen = tmp_path / "frozen.toml"
    frozen.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict))
    )
    frozen.write_text(frozen.read_text() + '[compile_options]\nfreezing = "true"\n')
    with pytest.raises(CompileError, match="leave out the option freezing"):
        compile_bundle(tiny_llama, out, **{**SMALL, "profile": frozen})
    with pytest.raises(
        ValueError, match="weights is 'int8', but profile 'generic-cpu-inductor' stores them as they are"
    ):
        compile_bundle(tiny_llama, out, weights="int8", **SMALL)
    with pytest.raises(ValueError, match="blobs is False"):
        compile_bundle(tiny_llama, out, blobs=False, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen.toml"]
