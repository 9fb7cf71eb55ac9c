"""Backend ``cuda`` through the null graph, whose strictness is tested too; and, where there is a GPU, on it."""

import gc
import importlib.util
import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import models
import pytest
import torch
from families import FAMILIES
from models import new_tokens, random_prompt, reference
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from staticgen import (
    BackendUnavailableError,
    CompileError,
    RecompileError,
    Session,
    UnknownNameError,
    UnsupportedModelError,
)
from staticgen.backends import cuda, open_backend
from staticgen.cache import KVMemory
from staticgen.device_loop import LoopState, advance
from staticgen.errors import DoesNotFitError
from staticgen.graphs import Graph, NullGraphs
from staticgen.shapes import StepForm, StepShape
from staticgen.step import step_for

NULL = {"backend": "cuda", "device": "null", "prefill_buckets": [8]}
# What differs in attention or in what a capture would refuse: windows and softcap, shared keys, ALiBi, learned
# positions, local attention without an interface, experts, a sink score.
CHOSEN = [
    ("Llama", "longrope"), ("Gemma 2", ""), ("Gemma 4", "shared keys"), ("Bloom", "6 heads"), ("Falcon", "ALiBi"),
    ("GPT-Neo", "global and local"), ("OPT", ""), ("Mixtral", ""), ("GPT-OSS", ""),
]  # fmt: skip
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")


pytestmark = pytest.mark.usefixtures("one_thread")


def build(name, variant):
    return next(family for family in FAMILIES if family.name == name).build(variant)


@pytest.fixture(scope="module")
def session(tiny_llama):
    return Session(tiny_llama, max_length=40, batch_size=2, cache_sizes=[13, 20], **NULL)


# That the null graph sees errors.


def fails(tiny_llama, prompts, expected):
    """Whether a new session gives other tokens, or none."""
    try:
        session = Session(tiny_llama, max_length=24, batch_size=2, **NULL)
        gc.collect()
        return new_tokens(session.generate(prompts, max_new_tokens=14), len(prompts[1])) != expected
    except (ArithmeticError, IndexError, RuntimeError):
        return True


def test_what_is_broken_on_purpose_is_seen(tiny_llama, monkeypatch):
    prompts = [random_prompt(length) for length in (5, 9)]
    expected = [reference(tiny_llama, prompt, 14) for prompt in prompts]
    assert not fails(tiny_llama, prompts, expected)

    def replay_without_inputs(self, *given):
        self.run()

    def put_at_the_first_slot(self, new, positions, slots):
        return put(self, new, positions, [slot * 0 for slot in slots])

    def keep_slots(self, slots):
        pass

    def hold_nothing(self, work, inputs):
        self._inputs = inputs

    put = KVMemory.put_
    changes = [
        (Graph, "replay", replay_without_inputs),
        (KVMemory, "put_", put_at_the_first_slot),
        (NullGraphs, "prepare_memory", lambda self, tensor: tensor.fill_(torch.nan)),
        (LoopState, "place", keep_slots),
        (Graph, "__init__", hold_nothing),
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            assert fails(tiny_llama, prompts, expected), change


def test_a_mask_that_lets_empty_slots_through_is_seen(tiny_llama, monkeypatch):
    """They hold large numbers here, where a zeroed cache would change little."""
    from staticgen.attention import StepCache

    prompt = random_prompt(5)
    expected = reference(tiny_llama, prompt, 8)
    original = StepCache.key_positions

    def empty_is_the_first(self, layer):
        held = original(self, layer)
        return torch.where(held < 0, 0, held)

    monkeypatch.setattr(StepCache, "key_positions", empty_is_the_first)
    other = models.llama()  # with a step of its own, which is made with the error
    with monkeypatch.context() as patch:
        patch.setattr(
            "staticgen.step.Step._run_in_two_steps",
            lambda self, ids, positions: self._run(ids, positions, StepCache(self.form, positions)),
        )
        session = Session(other, max_length=24, **NULL)
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) != [expected]


class OnlyInScope(TorchDispatchMode):
    """Refuses operations on a backend's own tensors outside of its scope, where a GPU would run them on another stream."""

    def __init__(self, graphs):
        super().__init__()
        self.graphs, self.seen = graphs, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.graphs.own & {tensor.untyped_storage().data_ptr() for tensor in tensors}:
            self.seen += 1
            if not self.graphs.inside:
                raise AssertionError(f"{func} outside of the backend's scope")
        return func(*args, **(kwargs or {}))


class ScopedGraphs(NullGraphs):
    """Knows the tensors that are on the device, and whether it is in its scope."""

    def __init__(self):
        super().__init__()
        self.inside, self.own, self._held = 0, set(), []

    @contextmanager
    def scope(self):
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def own_all_of(self, session):
        backend = session.backend
        states = [tensor for state in backend._states.values() for tensor in tree_leaves(vars(state))]
        programs = [
            program for program in session._programs._programs.values() if isinstance(program, cuda.CudaProgram)
        ]
        memories = [
            tensor for memory in backend._memory.values() for tensor in (*memory.buffers.stacks, *memory.slot_positions)
        ]
        buffers = [
            tensor for program in programs for tensor in (program._logits, *program._new.stacks, *program.graph._inputs)
        ]
        tensors = [tensor for tensor in (*states, *memories, *buffers) if isinstance(tensor, torch.Tensor)]
        self.own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert len(self.own) > 20


def test_what_is_on_the_device_is_touched_in_its_scope_only(tiny_llama, monkeypatch):
    """On a GPU the scope is a stream: what runs outside of it races with what runs inside."""
    graphs = ScopedGraphs()
    monkeypatch.setattr(cuda, "NullGraphs", lambda: graphs)
    session = Session(tiny_llama, max_length=40, batch_size=2, cache_sizes=[20], prefix_cache=1 << 20, **NULL)
    graphs.own_all_of(session)
    prompts = [random_prompt(length) for length in (5, 12)]
    expected = [reference(tiny_llama, prompt, 16) for prompt in prompts]
    with OnlyInScope(graphs) as mode:
        assert new_tokens(session.generate(prompts, max_new_tokens=16), 12) == expected
        stream = session.stream(prompts, max_new_tokens=16)
        assert [next(stream).tolist() for _ in range(3)] == [list(pair) for pair in zip(*expected, strict=True)][:3]
        stream.close()
        prefix = session.prefix(prompts[1][:8])
        assert new_tokens(session.generate(prompts[1], prefix=prefix, max_new_tokens=16), 12) == expected[1:]
        assert len(session.generate_many(prompts, max_new_tokens=4)) == 2
        session.generate(prompts[0], max_new_tokens=8, num_beams=2)
        session.generate(prompts[0], max_new_tokens=8, num_return_sequences=2, do_sample=True, repetition_penalty=1.1)
        session.generate(prompts, max_new_tokens=40, overflow="slide")
        session.set_cache_implementation("sink")
        session.generate(prompts, max_new_tokens=40)
        assert mode.seen > 1000
        with pytest.raises(AssertionError, match="outside of the backend's scope"):
            session.backend._states[2].token_ids.zero_()


# The backend.


@pytest.mark.parametrize(("name", "variant"), CHOSEN, ids=[" ".join(filter(None, case)) for case in CHOSEN])
def test_families(name, variant):
    model = build(name, variant)
    prompts = [random_prompt(length) for length in (3, 12)]
    session = Session(model, max_length=40, batch_size=2, **NULL)
    output = session.generate(prompts, max_new_tokens=20)
    assert session.stats.last.loop == "device"
    assert new_tokens(output, 12) == [reference(model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize(("name", "variant"), CHOSEN, ids=[" ".join(filter(None, case)) for case in CHOSEN])
def test_nothing_that_is_recorded_is_on_the_host(name, variant):
    """Device "meta" stands for the GPU: an operation on tensors there and here, or on numbers, is refused."""
    step, shape = step_for(build(name, variant), StepForm()), StepShape(2, 1, 24)
    compiled = cuda.on_device(cuda.exported(step, shape), torch.device("meta"), {})
    memory = KVMemory(step.cache_spec, 2, 24, device="meta")
    state = LoopState(2, step.cache_spec.windows, torch.device("meta"))
    for sampled in (False, True):
        advance(compiled, state, memory, sampled)
    nodes = [node for node in compiled.graph.nodes if str(node.kwargs.get("device", "meta")) != "meta"]
    assert not nodes


def test_an_operation_that_asks_for_numbers_inside_is_refused(monkeypatch):
    """transformers' own for experts on the CPU: one operation for whoever looks from outside."""
    monkeypatch.setattr(cuda, "_gathered_experts", lambda model: nullcontext())
    with pytest.raises(CompileError, match=r"transformers\.grouped_mm_fallback.* cannot be seen"):
        Session(build("Mixtral", ""), max_length=24, **NULL)


def test_tied_weights_are_on_the_device_once():
    model = models.llama(tie_word_embeddings=True)
    session = Session(model, max_length=24, **NULL)
    held = sum(tensor.nbytes for tensor in session.backend._weights.values())
    assert held <= 1.02 * sum(tensor.nbytes for tensor in model.parameters())


@pytest.mark.parametrize("attention", ["spread", "split", "concat", "sdpa"])
def test_forms_of_attention(tiny_llama, attention):
    prompts = [random_prompt(length) for length in (3, 12)]
    session = Session(tiny_llama, max_length=256, batch_size=2, backend_options={"attention": attention}, **NULL)
    assert session._step.form.attention == attention
    output = session.generate(prompts, max_new_tokens=12)
    assert new_tokens(output, 12) == [reference(tiny_llama, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "variant"), [("Gemma 2", ""), ("Gemma 4", "shared keys"), ("Bloom", "6 heads"), ("GPT-OSS", "")]
)
def test_attention_in_parts(name, variant):
    """With softcap, windows, ALiBi and a sink; over full parts, half empty ones and empty ones."""
    model, prompts = build(name, variant), [random_prompt(length) for length in (3, 150)]
    session = Session(model, max_length=384, batch_size=2, **{**NULL, "prefill_buckets": [64]})
    output = session.generate(prompts, max_new_tokens=12)
    assert session.stats.last.loop == "device"
    assert new_tokens(output, 150) == [reference(model, prompt, 12) for prompt in prompts]


def test_attention_that_sdpa_has_not_is_refused():
    with pytest.raises(UnsupportedModelError, match="softcap or a sink in its scores"):
        Session(build("Gemma 2", ""), max_length=24, backend_options={"attention": "sdpa"}, **NULL)


def test_the_cache_grows_on_the_device(tiny_llama, session):
    for lengths in ((3, 7), (12, 13), (20, 4), (30, 1)):
        prompts = [random_prompt(length) for length in lengths]
        width = max(lengths)
        output = session.generate(prompts)
        assert session.stats.last.loop == "device"
        assert new_tokens(output, width) == [reference(tiny_llama, prompt, 40 - width) for prompt in prompts]
    assert session.stats.compiles == 4


@pytest.mark.parametrize("overflow", ["slide", "stop", "sink"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_overflow(overflow, family):
    """As on the eager backend, whose overflow is tested against transformers."""
    model, prompts = getattr(models, family)(), [random_prompt(4), random_prompt(11)]
    found = []
    for target in ({"backend": "eager", "prefill_buckets": [8]}, NULL):
        session = Session(model, max_length=16, batch_size=2, overflow=overflow, **target)
        found.append(new_tokens(session.generate(prompts, max_new_tokens=24), 11))
    assert found[0] == found[1]
    assert session.stats.last.loop == ("host" if overflow == "sink" else "device")
    assert len(found[0][0]) == (5 if overflow == "stop" else 24)


def test_the_oldest_goes_first_in_a_cache_that_has_grown(tiny_llama):
    prompts, found = [random_prompt(4), random_prompt(7)], []
    for target in ({"backend": "eager", "prefill_buckets": [8]}, NULL):
        session = Session(tiny_llama, max_length=20, batch_size=2, cache_sizes=[13], overflow="slide", **target)
        found.append(new_tokens(session.generate(prompts, max_new_tokens=40), 7))
    assert session.stats.last.loop == "device"
    assert found[0] == found[1]


def test_a_prefix_and_what_the_prefix_cache_keeps(tiny_llama, session):
    prompt = random_prompt(18)
    expected = reference(tiny_llama, prompt, 12)
    prefix = session.prefix(prompt[:10])
    assert new_tokens(session.generate(prompt, prefix=prefix, max_new_tokens=12), 18) == [expected]
    assert session.stats.last.reused_tokens == 10
    other = Session(tiny_llama, max_length=48, prefix_cache=1 << 20, **NULL)
    assert new_tokens(other.generate(prompt, max_new_tokens=12), 18) == [expected]
    answer = prompt + expected
    assert new_tokens(other.generate(answer, max_new_tokens=8), 30) == [reference(tiny_llama, answer, 8)]
    assert other.stats.last.loop == "device"
    assert other.stats.last.reused_tokens >= 28  # what the loop on the device has computed is known, too


def test_two_sessions_and_threads_do_not_disturb_each_other(tiny_llama, session):
    prompts = [random_prompt(length) for length in (4, 6)]
    expected = [reference(tiny_llama, prompt, 12) for prompt in prompts]
    first = session.stream(prompts[0], max_new_tokens=12)
    begun = [next(first)]
    other = Session(models.gpt2(), max_length=24, **NULL)  # records while the other is in use
    other.generate(prompts[1], max_new_tokens=4)
    begun += list(first)
    assert [int(token) for token in begun] == expected[0]
    assert new_tokens(session.generate(prompts[1], max_new_tokens=12), 6) == [expected[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    model, prompt = models.llama().to(dtype), random_prompt(6)
    found = [
        Session(model, max_length=24, **target).generate(prompt, max_new_tokens=12).tolist()
        for target in ({"backend": "eager", "prefill_buckets": [8]}, NULL)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("sizes", [{"prefill_buckets": [1], "cache_sizes": [2]}, {"cache_sizes": [4]}], ids=str)
def test_caches_smaller_than_what_recording_writes(tiny_llama, sizes):
    prompt = random_prompt(2)
    session = Session(tiny_llama, max_length=16, **{**NULL, **sizes})
    assert new_tokens(session.generate(prompt, max_new_tokens=14), 2) == [reference(tiny_llama, prompt, 14)]


def test_a_size_that_was_not_recorded_is_refused(session):
    with pytest.raises(RecompileError, match="nothing compiles after warm-up"):
        session._programs.advance(KVMemoryOfAnotherLength(), False)


class KVMemoryOfAnotherLength:
    length = 17


def test_what_does_not_fit_says_what_would(tiny_llama, monkeypatch):
    free = cuda._CONTEXT + 400_000_000
    monkeypatch.setattr(cuda, "NullGraphs", lambda: NullGraphs(free))
    with pytest.raises(
        DoesNotFitError, match=r"batch_size=8 and max_length=262144 need .* GB on cuda on null"
    ) as error:
        Session(tiny_llama, max_length=262144, batch_size=8, cache_sizes=[], **NULL)
    text = str(error.value)
    rows = int(text.split("batch_size=")[2].split(" ", maxsplit=1)[0])
    length = int(text.split("max_length=")[2].split(" ", maxsplit=1)[0])
    backend, step = open_backend("cuda", "null"), step_for(tiny_llama, StepForm())
    backend.reserve(step, rows, [(8, 262144), (1, 262144)])
    backend.reserve(step, 8, [(8, length), (1, length)])
    for batch, longest in ((rows + 1, 262144), (8, length + 1)):
        with pytest.raises(DoesNotFitError):
            backend.reserve(step, batch, [(8, longest), (1, longest)])
    assert step.cache_spec.nbytes(rows, 262144) < 400_000_000 > step.cache_spec.nbytes(8, length)


def test_devices_and_options():
    with pytest.raises(UnknownNameError, match=r"cuda, cuda:1 \.\.\. and null \(for tests\), got 'tpu'"):
        open_backend("cuda", "tpu")
    with pytest.raises(ValueError, match="unknown option 'compiler' for backend 'cuda'; known are compile, attention"):
        open_backend("cuda", "null", {"compiler": "inductor"})
    with pytest.raises(ValueError, match="compile='triton', expected one of none, auto, inductor"):
        open_backend("cuda", "null", {"compile": "triton"})
    with pytest.raises(ValueError, match="compile='inductor' is not for device 'null'"):
        open_backend("cuda", "null", {"compile": "inductor"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU here")
def test_without_a_gpu():
    with pytest.raises(BackendUnavailableError, match=r"backend 'cuda'.*Alternatives: backend='openvino'"):
        open_backend("cuda")


def test_the_benchmark_runs_without_a_gpu(tmp_path, monkeypatch):
    """All of it but the GPU, so that it cannot fail there for another reason."""
    path = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", path)
    gpu = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, gpu)  # where dataclasses look
    spec.loader.exec_module(gpu)
    assert gpu.main(["--tiny", "--json", str(tmp_path / "figures.json")]) == 0
    result = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert (result["families"], result["wrong"]) == (2, {})
    assert [figure["problem"] for figure in result["figures"]] == [""] * 3
    assert [figure["compiles"] for figure in result["figures"]] == [2, 1, 0]
    assert all(figure["tokens_per_second"] > 0 and figure["bandwidth_share"] > 0 for figure in result["figures"])


# On a GPU.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", [{}, {"attention": "sdpa"}, {"compile": "inductor"}, {"compile": "auto"}], ids=str)
def test_llama_on_a_gpu(tiny_llama, options):
    prompts = [random_prompt(length) for length in (3, 12, 20)]
    session = Session(
        tiny_llama,
        max_length=64,
        batch_size=3,
        backend="cuda",
        prefill_buckets=[8],
        cache_sizes=[24],
        backend_options=options,
    )
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):  # the caller's own
            output = session.generate(prompts, max_new_tokens=24)
        assert new_tokens(output, 20) == [reference(tiny_llama, prompt, 24) for prompt in prompts]
    sampled = [session.generate(prompts, max_new_tokens=24, do_sample=True, seed=1).tolist() for _ in range(2)]
    assert sampled[0] == sampled[1]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("name", "variant"), CHOSEN, ids=[" ".join(filter(None, case)) for case in CHOSEN])
def test_families_on_a_gpu(name, variant):
    model = build(name, variant)
    prompts = [random_prompt(length) for length in (3, 12)]
    session = Session(model, max_length=40, batch_size=2, backend="cuda", prefill_buckets=[8])
    output = session.generate(prompts, max_new_tokens=20)
    assert new_tokens(output, 12) == [reference(model, prompt, 20) for prompt in prompts]
