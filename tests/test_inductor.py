"""Backend ``inductor``: one graph per size, the tokens of transformers, and no compilation after warm-up."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from models import new_tokens, random_prompt, reference

from staticgen import BackendUnavailableError, CompileError, RecompileError, Session, UnknownNameError
from staticgen.backends import open_backend
from staticgen.compiled import describe_step
from staticgen.shapes import StepForm, StepShape
from staticgen.step import step_for

SIZES = {"prefill_buckets": [8], "backend": "inductor", "max_length": 48}

# A selection, since each takes some seconds: a window, and ALiBi.
CHOSEN = [("Mistral", ""), ("Bloom", "6 heads")]


def counted():
    """What torch counts: graphs, and breaks of them."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.fixture(scope="module")
def session(tiny_llama):
    graphs, breaks = counted()
    session = Session(tiny_llama, batch_size=2, cache_sizes=[24], **SIZES)
    assert counted() == (graphs + 3, breaks)
    assert session.stats.compiles == 3
    return session


@pytest.mark.parametrize(("name", "variant"), CHOSEN, ids=[" ".join(case) for case in CHOSEN])
def test_families(name, variant):
    model = next(family for family in FAMILIES if family.name == name).build(variant)
    prompts = [random_prompt(length) for length in (3, 12)]
    session = Session(model, batch_size=2, **SIZES)
    output = session.generate(prompts, max_new_tokens=16)
    assert new_tokens(output, 12) == [reference(model, prompt, 16) for prompt in prompts]


def test_nothing_is_compiled_after_warm_up(tiny_llama, session):
    before = counted()
    for length in (1, 7, 9, 20):
        prompt = random_prompt(length)
        for layout in ("shift", "sink", "ring"):
            session.set_cache_implementation(layout)
            output = session.generate([prompt, prompt[-3:]], max_new_tokens=20)
            assert output[0, length:].tolist() == reference(tiny_llama, prompt, 20)
    session.generate(random_prompt(5), do_sample=True, temperature=0.7, top_k=5, seed=1)
    assert counted() == before
    assert session.stats.compiles == 3


def test_the_cache_grows(tiny_llama, session):
    prompts = [random_prompt(10), random_prompt(4)]
    output = session.generate(prompts)
    assert new_tokens(output, 10) == [reference(tiny_llama, prompt, 38) for prompt in prompts]


def test_what_would_compile_anew_is_refused(tiny_llama, session):
    prompt, threads = random_prompt(5), torch.get_num_threads()
    expected = reference(tiny_llama, prompt, 4)
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(RecompileError, match=r"number of threads.*make a new staticgen\.Session"):
            session.generate(prompt, max_new_tokens=4)
    finally:
        torch.set_num_threads(threads)
    assert new_tokens(session.generate(prompt, max_new_tokens=4), 5) == [expected]
    with torch.autocast("cpu", torch.bfloat16):  # the caller's, and no concern of the step
        assert new_tokens(session.generate(prompt, max_new_tokens=4), 5) == [expected]


def test_frozen_weights_give_the_same_tokens(tiny_llama):
    prompt = random_prompt(6)
    session = Session(tiny_llama, backend_options={"freezing": "true"}, **SIZES)
    assert new_tokens(session.generate(prompt, max_new_tokens=16), 6) == [reference(tiny_llama, prompt, 16)]


def test_without_a_compiler(tiny_llama):
    search = torch._inductor.cpp_builder.cpp_compiler_search
    search.cache_clear()
    try:
        with (
            torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
            pytest.raises(BackendUnavailableError, match=r"needs a C\+\+ compiler.*install g\+\+"),
        ):
            Session(tiny_llama, **SIZES)
    finally:
        search.cache_clear()


_READER = """
import pickle, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from staticgen.backends import open_backend
from staticgen.backends.base import ProgramFiles
from staticgen.cache import KVCache
from staticgen.compiled import CompiledStep
from staticgen.shapes import StepShape
folder = Path({folder!r})
description, files, prompt = pickle.loads((folder / "facts").read_bytes())
backend, step = open_backend("inductor"), CompiledStep(description, None)
prefill, decode = (backend.load(step, one) for one in files)
cache = KVCache(step.cache_spec, 1, 24)
row = torch.tensor([[0] * (8 - len(prompt)) + prompt])
positions = torch.tensor([[-1] * (8 - len(prompt)) + list(range(len(prompt)))])
tokens, zeros = [], torch.zeros(1, 8, dtype=torch.int64)
logits, new = prefill(row, positions, zeros, cache)
cache.write(new, positions)
for at in range(len(prompt), len(prompt) + 9):
    tokens.append(int(logits.argmax()))
    one = torch.tensor([[at]])
    logits, new = decode(torch.tensor([[tokens[-1]]]), one, torch.zeros_like(one), cache)
    cache.write(new, one)
assert "transformers.models.llama.modeling_llama" not in sys.modules
print(tokens)
"""


def test_packages_are_loaded_in_another_process(tiny_llama, tmp_path):
    backend, step, prompt = open_backend("inductor"), step_for(tiny_llama, StepForm()), random_prompt(5)
    shapes = {"prefill": StepShape(1, 8, 24), "decode": StepShape(1, 1, 24)}
    written = backend.write(step, shapes, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["programs", "weights.safetensors"]
    weights = sum(tensor.nbytes for tensor in tiny_llama.parameters())
    assert weights <= (tmp_path / "weights.safetensors").stat().st_size < 1.2 * weights  # once for both
    (tmp_path / "facts").write_bytes(pickle.dumps((describe_step(step), written, prompt)))
    code = _READER.format(folder=str(tmp_path), tests=str(Path(__file__).parent))
    environment = {**os.environ, "CXX": "no-such-compiler"}  # nothing is compiled
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(reference(tiny_llama, prompt, 9))
    mixed = replace(written[0], shape=written[1].shape)
    with pytest.raises(
        CompileError, match=r"is of the step \[batch 1, tokens 8, cache 24\], expected \[batch 1, tokens 1"
    ):
        backend.load(step, mixed)
    path, made_for = written[0].compiled[0]
    foreign = replace(written[0], compiled=((path, {**made_for, "cpu": "ANOTHER"}),))
    with pytest.raises(CompileError, match=r"was compiled for .*ANOTHER.*make the bundle anew"):
        backend.load(step, foreign)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CompileError, match="cannot load"):
        backend.load(step, written[0])


def test_devices_and_options():
    with pytest.raises(UnknownNameError, match="device 'cpu' only, got device='cuda'"):
        open_backend("inductor", "cuda")
    with pytest.raises(ValueError, match="unknown option 'frezing' for inductor"):
        open_backend("inductor", options={"frezing": "true"})
    with pytest.raises(ValueError, match="freezing='perhaps', expected a bool"):
        open_backend("inductor", options={"freezing": "perhaps"})
