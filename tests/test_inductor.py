"""Backend ``inductor``: one graph per size, the tokens of transformers, and no compilation after warm-up."""

import pytest
import torch
from families import FAMILIES
from models import new_tokens, random_prompt, reference

from staticgen import BackendUnavailableError, RecompileError, Session, UnknownNameError
from staticgen.backends import open_backend

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


def test_devices_and_options():
    with pytest.raises(UnknownNameError, match="device 'cpu' only, got device='cuda'"):
        open_backend("inductor", "cuda")
    with pytest.raises(ValueError, match="unknown option 'frezing' for inductor"):
        open_backend("inductor", options={"frezing": "true"})
    with pytest.raises(ValueError, match="freezing='perhaps', expected a bool"):
        open_backend("inductor", options={"freezing": "perhaps"})
