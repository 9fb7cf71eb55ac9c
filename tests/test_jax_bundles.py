"""Bundles of StableHLO, written where torch-xla is and run by jax, in another process with another torch."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from models import new_tokens, random_prompt, reference

from staticgen import BackendUnavailableError, BundleError, Session, load
from staticgen.certificate import load_golden
from staticgen.compiled import open_compiled

WRITER = os.environ.get("STATICGEN_XLA_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax: the extra jax"),
    pytest.mark.skipif(
        not WRITER,
        reason="needs STATICGEN_XLA_PYTHON, the Python of an environment with the extra xla, to write bundles",
    ),
    pytest.mark.usefixtures("one_thread"),
]
# Windows, softcap, shared keys, ALiBi, learned positions, experts, a sink score, several rotary embeddings.
CHOSEN = [
    ("Llama", "default rope"), ("Llama", "longrope"), ("Gemma 2", ""), ("Gemma 3", ""), ("GPT-2", ""), ("Bloom", "6 heads"),
    ("Mixtral", ""), ("GPT-OSS", ""), ("Phi-3", "window"),
]  # fmt: skip
WRITE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from families import FAMILIES
from staticgen.compile import compile_bundle
for name, variant, dtype, folder, sizes in eval(sys.argv[2]):
    model = next(family for family in FAMILIES if family.name == name).build(variant)
    model = model.to(getattr(torch, dtype))
    given = {"profile": "tpu-v5e", "batch_size": 2, "prefill_buckets": [8], "blobs": False, **sizes}
    compile_bundle(model, folder, **given)
"""
SIZES = {"max_length": 40, "cache_sizes": [16]}


def write(*bundles):
    """Write bundles, (family, variant, dtype, folder, sizes) each, in the other environment."""
    # What checks a bundle there compiles in a third of the time so, and runs once.
    quickly = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "STATICGEN_CACHE": "off", "XLA_FLAGS": quickly}
    done = subprocess.run(
        [WRITER, "-c", WRITE, str(Path(__file__).parent), repr(bundles)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def build(name, variant):
    return next(family for family in FAMILIES if family.name == name).build(variant)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """The folder of every chosen family's bundle."""
    root = tmp_path_factory.mktemp("bundles")
    folders = {(name, variant): str(root / f"{name}-{variant}".replace(" ", "-")) for name, variant in CHOSEN}
    write(*[(*family, "float32", folder, SIZES) for family, folder in folders.items()])
    return folders


@pytest.fixture(scope="module")
def llama(bundles):
    return bundles["Llama", "default rope"]


@pytest.fixture(scope="module")
def session(llama):
    return Session(llama, backend="jax", device="cpu")


@pytest.mark.parametrize("family", CHOSEN, ids=" ".join)
def test_the_tokens_are_those_of_transformers(bundles, family):
    model, session = build(*family), Session(bundles[family], backend="jax", device="cpu")
    prompts = [random_prompt(length) for length in (5, 19)]
    expected = [reference(model, prompt, 18) for prompt in prompts]
    assert new_tokens(session.generate(prompts, max_new_tokens=18), 19) == expected
    assert session.stats.last.loop == "device"
    # Through the host, which reads logits and writes the cache step by step.
    kept = [reference(model, prompt, 8, repetition_penalty=1.3) for prompt in prompts]
    assert new_tokens(session.generate(prompts, max_new_tokens=8, repetition_penalty=1.3), 19) == kept
    assert session.stats.last.loop == "host"


def test_nothing_compiles_after_the_session_is_made(session):
    for program in session._programs._programs.values():  # they are read in a thread, in the order that they are needed
        if isinstance(program, Future):
            program.result()
    engine = session.backend.engine
    before = engine.compiles
    made = 0
    while made < 1000:
        for length, settings in (
            (1, {}),
            (11, {"do_sample": True, "temperature": 0.5}),
            (20, {"top_k": 3, "do_sample": True}),
        ):
            prompts = [random_prompt(length), random_prompt(max(1, length // 2))]
            made += session.generate(prompts, max_new_tokens=20, **settings).numel()
    session.generate([random_prompt(3)], max_new_tokens=10, num_beams=2)
    assert engine.compiles == before


def test_the_cache_is_given_away(session):
    memory = session.backend._memory[2, 40]  # where prefill writes
    session.generate([random_prompt(5)], max_new_tokens=3)
    held = dict(memory.stacks.held)
    session.generate([random_prompt(5)], max_new_tokens=3)
    assert all(array.is_deleted() for array in held.values())


def test_sampled_tokens_are_those_of_the_functions_themselves(llama, session):
    """The same seed draws the same on every device: here jax against torch, which runs the functions as they are."""
    model = build("Llama", "default rope")
    null = Session(model, backend="xla", device="null", batch_size=2, prefill_buckets=[8], **SIZES)
    call = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 5}
    prompts = [random_prompt(4), random_prompt(9)]
    assert torch.equal(session.generate(prompts, **call), null.generate(prompts, **call))


def test_layouts_and_what_follows_a_cancelled_stream(session):
    model = build("Llama", "default rope")
    expected = reference(model, prompt := random_prompt(6), 12)
    stream = session.stream(prompt, max_new_tokens=30)
    assert [int(next(stream)) for _ in range(3)] == expected[:3]
    stream.close()
    assert new_tokens(session.generate(prompt, max_new_tokens=12), 6) == [expected]
    options = {"window_length": 10, "num_sink_tokens": 2}
    session.set_cache_implementation("sink", **options)
    eager = Session(model, backend="eager", layout="sink", layout_options=options, prefill_buckets=[8], max_length=40)
    assert torch.equal(session.generate(prompt, max_new_tokens=40), eager.generate(prompt, max_new_tokens=40))
    session.set_cache_implementation("ring")
    assert new_tokens(session.generate(prompt, max_new_tokens=12), 6) == [expected]


def test_bfloat16(tmp_path):
    """Logits are as near to float32 as those of transformers in bfloat16, but for what a different order of sums makes."""
    folder = str(tmp_path / "bundle")
    write(("Llama", "default rope", "bfloat16", folder, SIZES))
    model = build("Llama", "default rope")
    session = Session(folder, backend="jax", device="cpu")
    for golden in load_golden(open_compiled(folder).bundle):
        ids = golden.prompt[None]
        with torch.no_grad():
            exact = model(ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
            rounded = model.to(torch.bfloat16)(ids).logits[0, -1].float()
            model.float()
        out = session.generate(
            ids, torch.ones_like(ids), max_new_tokens=1, output_logits=True, return_dict_in_generate=True
        )
        assert (out.logits[0][0] - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 1e-3


def test_what_runs_a_bundle_imports_neither_torch_xla_nor_a_model(llama):
    code = (
        "import sys, json, staticgen; s = staticgen.load(sys.argv[1], backend='jax', device='cpu');"
        "ids = s.generate([[5, 6, 7]], max_new_tokens=4).tolist();"
        "print(json.dumps([ids, [name for name in sys.modules if name.startswith('torch_xla') or '.modeling_llama' in name"
        " or name in ('staticgen.step', 'openvino')]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, llama], capture_output=True, text=True, check=True)
    ids, imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == []
    assert ids[0][3:] == reference(build("Llama", "default rope"), [5, 6, 7], 4)


def test_four_devices_give_the_tokens_of_one(tmp_path):
    """Heads and MLP divided over four virtual devices, in a process that has them, as the profile says."""
    folder = str(tmp_path / "bundle")
    write(("Gemma 2", "", "float32", folder, {**SIZES, "profile": "tpu-v5e-4"}))
    model, prompt = build("Gemma 2", ""), random_prompt(9)
    code = (
        "import sys, json, staticgen;"
        "s = staticgen.load(sys.argv[1], backend='jax', device='cpu');"
        "print(json.dumps([s.generate([json.loads(sys.argv[2])], max_new_tokens=12).tolist(), s.backend.description]))"
    )
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", code, folder, json.dumps(prompt)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    ids, on = json.loads(done.stdout.splitlines()[-1])
    assert (ids[0][9:], on) == (reference(model, prompt, 12), "jax on 4 of cpu")
    with pytest.raises(BackendUnavailableError, match="not 4 devices to share a program"):
        load(folder, backend="jax", device="cpu")


def test_errors(llama, tiny_llama):
    with pytest.raises(BackendUnavailableError, match="backend 'jax' runs bundles: make one with `staticgen compile"):
        Session(tiny_llama, backend="jax", device="cpu")
    with pytest.raises(BackendUnavailableError, match=r"jax finds no device 'tpu'"):
        load(llama, backend="jax", device="tpu")
    with pytest.raises(BundleError, match=r"backend is 'openvino', but bundle .* was compiled for 'xla'"):
        load(llama, backend="openvino")
    with pytest.raises(ValueError, match="mesh='four', expected how many devices"):
        load(llama, backend="jax", device="cpu", backend_options={"mesh": "four"})
