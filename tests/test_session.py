"""What a session promises besides the right tokens: state, streams, threads, errors."""

import threading

import models
import pytest
import torch
from models import new_tokens, random_prompt, reference

from staticgen import RecompileError, Session, SessionBusyError, StaleSessionError
from staticgen.shapes import StepShape

BUCKETS = [8, 32]


def test_no_call_leaves_anything_to_the_next(tiny_llama, backend, layout):
    """C48, C49, C51: long, short, long, short; inputs untouched; nothing compiled after warm-up."""
    session = Session(tiny_llama, max_length=64, batch_size=2, layout=layout, prefill_buckets=BUCKETS, **backend)
    compiles = session.stats.compiles
    assert compiles == len(BUCKETS) + 1
    for seed, length in enumerate([40, 3, 40, 3]):
        ids, mask = models.left_padded([random_prompt(length, seed), random_prompt(2, seed)])
        before = ids.clone(), mask.clone()
        for _ in range(2):
            output = session.generate(ids, mask, max_new_tokens=16)
            assert new_tokens(output, length)[0] == reference(tiny_llama, random_prompt(length, seed), 16)
        assert torch.equal(ids, before[0])
        assert torch.equal(mask, before[1])
    for length in range(1, 21):
        count = 2 * length if length < 20 else 40
        output = session.generate(random_prompt(length), max_new_tokens=count, do_sample=length % 2 == 0, top_k=length)
        assert output.shape[1] == length + count
    assert session.stats.compiles == compiles


def test_cache_sizes_of_the_target_are_taken_up_to_half_of_max_length(tiny_llama):
    for max_length, expected in [(512, (512,)), (2047, (2047,)), (2048, (1024, 2048)), (4096, (1024, 4096))]:
        assert Session(tiny_llama, max_length=max_length, backend="openvino").cache_sizes == expected
    assert Session(tiny_llama, max_length=64, cache_sizes=[], backend="eager").cache_sizes == (64,)


def test_a_size_that_is_not_compiled_is_refused(tiny_llama):
    session = Session(tiny_llama, max_length=32, prefill_buckets=[8], backend="eager")
    with pytest.raises(RecompileError, match=r"\[batch 1, tokens 5, cache 32\] is not among .*tokens 8"):
        session._programs.run(*torch.zeros(3, 1, 5, dtype=torch.int64), session._context._caches.current)
    program = session._programs._programs[StepShape(1, 1, 32)]
    with pytest.raises(ValueError, match=r"token_ids: this program replays int64 \[1, 1\], got torch.int64 \[1, 2\]"):
        program(*torch.zeros(3, 1, 2, dtype=torch.int64), session._context._caches.current)


def test_lengths(tiny_llama):
    """C16, C17, C18: what does not fit is refused by name before anything runs."""
    session = Session(tiny_llama, max_length=32, batch_size=3, backend="eager")
    assert session.generate(random_prompt(31)).shape == (1, 32)
    for length in (32, 33, 100):
        with pytest.raises(ValueError, match=rf"{length} tokens .*max_length is 32.*make a session"):
            session.generate(random_prompt(length), max_new_tokens=4)
    with pytest.raises(ValueError, match="row 1 is the longest"):
        session.generate([random_prompt(3), random_prompt(40), random_prompt(4)])
    with pytest.raises(ValueError, match=r"together 34, more than max_length=32; make a session with a larger"):
        session.generate(random_prompt(30), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"together 14, more than max_length=12; raise max_length"):
        session.generate(random_prompt(10), max_new_tokens=4, max_length=12)
    with pytest.raises(ValueError, match=r"max_length=64 is more than the session's max_length of 32"):
        session.generate(random_prompt(3), max_length=64)
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"max_new_tokens is {bad}"):
            session.generate(random_prompt(3), max_new_tokens=bad)
    assert session.stats.replays == 2  # of the one call that was accepted: 31 tokens, in two chunks of 16
    assert session.generate(random_prompt(3), max_length=10).shape == (1, 10)
    assert session.generate(random_prompt(3), max_new_tokens=1).shape == (1, 4)
    assert session.stats.last.steps == 0


def test_too_many_prompts_are_refused(tiny_llama):
    session = Session(tiny_llama, max_length=32, batch_size=2, backend="eager")
    with pytest.raises(ValueError, match=r"ids has 3 prompts, more than the session's batch_size of 2"):
        session.generate([[5], [6], [7]])


def test_a_stream_yields_the_tokens_of_generate_and_keeps_none_of_them(tiny_llama, backend):
    """C53: what is handed out is never overwritten."""
    session = Session(tiny_llama, max_length=64, batch_size=2, **backend)
    prompts = [random_prompt(4), random_prompt(12)]
    kept, copies = [], []
    for tokens in session.stream(prompts, max_new_tokens=10):
        kept.append(tokens)
        copies.append(tokens.clone())
    first = session.generate(prompts, max_new_tokens=10)
    copy = first.clone()
    session.generate([random_prompt(9), random_prompt(5)], max_new_tokens=10)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert torch.equal(first, copy)
    assert torch.stack(kept, 1).tolist() == new_tokens(first, 12)


def test_a_session_works_after_a_stream_was_dropped_or_closed(tiny_llama, backend):
    session = Session(tiny_llama, max_length=64, **backend)
    prompt, other = random_prompt(5), random_prompt(30)
    expected = [reference(tiny_llama, prompt, 8)]
    for _ in session.stream(other, max_new_tokens=20):
        break
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) == expected
    stream = session.stream(other, max_new_tokens=20)
    next(stream)
    with pytest.raises(SessionBusyError, match="close it"):
        session.generate(prompt, max_new_tokens=8)
    next(stream)  # the refused call has not disturbed it
    stream.close()
    assert session.stats.last.finish_reasons == [""]
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) == expected


def test_nan_is_an_error_that_leaves_nothing_behind(tiny_llama):
    session = Session(tiny_llama, max_length=32, backend="eager")
    prompt = random_prompt(5)
    expected = session.generate(prompt, max_new_tokens=8)
    shape = StepShape(1, 1, 32)
    program = session._programs._programs[shape]

    def broken(*inputs):
        logits, new = program(*inputs)
        session._context._caches.current.buffers.values[0].fill_(float("nan"))
        return logits.fill_(float("nan")), new

    broken.shape = shape
    session._programs._programs[shape] = broken
    with pytest.raises(ArithmeticError, match="NaN logits on eager"):
        session.generate(prompt, max_new_tokens=8)
    session._programs._programs[shape] = program
    assert torch.equal(session.generate(prompt, max_new_tokens=8), expected)


@pytest.mark.parametrize("change", ["weight", "data", "numpy", "buffer", "module", "config", "dtype"])
def test_a_session_of_a_model_that_changed_is_refused(change, backend):
    model = models.llama()
    session = Session(model, max_length=32, **backend)
    session.generate([5, 6], max_new_tokens=2)
    weight = model.model.layers[1].mlp.up_proj.weight
    if change == "weight":
        with torch.no_grad():
            weight[3, 5] += 1
    elif change == "data":
        weight.data.mul_(-1)
    elif change == "numpy":
        weight.detach().numpy()[:] += 1
    elif change == "buffer":
        model.model.rotary_emb.inv_freq.mul_(0.5)
    elif change == "module":
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    elif change == "config":
        model.config.rms_norm_eps = 0.1
    else:
        model.to(torch.float16)
    with pytest.raises(StaleSessionError, match="make a new"):
        session.generate([5, 6], max_new_tokens=2)
    if change != "dtype":
        prompt = random_prompt(5)
        output = Session(model, max_length=32, **backend).generate(prompt, max_new_tokens=8)
        assert new_tokens(output, 5) == [reference(model, prompt, 8)]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_what_a_model_does_to_itself_is_no_change(kind, tmp_path):
    """Forwards rewrite frequencies that depend on the length, and saving fills in the config."""
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = models.llama(max_position_embeddings=64 if kind == "longrope" else 32, rope_parameters=rope)
    session = Session(model, max_length=32, backend="eager")
    prompt = random_prompt(5)
    expected = [reference(model, prompt, 20)]
    assert new_tokens(session.generate(prompt, max_new_tokens=20), 5) == expected
    for length in (1, 40, 4):
        model(torch.tensor([random_prompt(length)]))
        assert new_tokens(session.generate(prompt, max_new_tokens=20), 5) == expected
    model.save_pretrained(tmp_path)
    model.train().requires_grad_(False)
    model.config.use_cache = False
    assert new_tokens(session.generate(prompt, max_new_tokens=20), 5) == expected


def test_the_models_generation_config_is_read_at_every_call(tiny_llama):
    import transformers

    model = models.llama()
    session = Session(model, max_length=32, backend="eager")
    assert session.generate([5, 6]).shape == (1, 32)
    model.generation_config.max_new_tokens = 3
    assert session.generate([5, 6]).shape == (1, 5)
    model.generation_config = transformers.GenerationConfig(max_new_tokens=4)
    assert session.generate([5, 6]).shape == (1, 6)


@pytest.mark.parametrize("built", [True, False])
def test_inference_mode_may_come_and_go(backend, built):
    with torch.inference_mode(built):
        model = models.llama()
        session = Session(model, max_length=32, **backend)
    prompt = random_prompt(5)
    expected = [reference(model, prompt, 8)]
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) == expected
            stream = session.stream(prompt, max_new_tokens=8)
            tokens = [next(stream)]
        assert [torch.cat([*tokens, *stream]).tolist()] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_callers_default_dtype_changes_nothing(tiny_llama, backend, dtype):
    prompt = random_prompt(5)
    expected = [reference(tiny_llama, prompt, 8)]
    torch.set_default_dtype(dtype)
    try:
        output = Session(tiny_llama, max_length=32, **backend).generate(prompt, max_new_tokens=8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert new_tokens(output, 5) == expected


def test_a_stream_may_go_on_in_another_thread(tiny_llama):
    session = Session(tiny_llama, max_length=32, backend="eager")
    prompt, seen = random_prompt(5), []
    stream = session.stream(prompt, max_new_tokens=8)

    def take(count):
        seen.extend(token.item() for token, _ in zip(stream, range(count), strict=False))

    for count in (2, 3):
        thread = threading.Thread(target=take, args=(count,))
        thread.start()
        thread.join(timeout=60)
    seen.extend(token.item() for token in stream)
    assert [seen] != [[]]
    with pytest.raises(StopIteration):
        next(stream)
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) == [reference(tiny_llama, prompt, 8)]

    stream = session.stream(prompt, max_new_tokens=8)
    thread = threading.Thread(target=take, args=(1,))
    thread.start()
    thread.join(timeout=60)
    next(stream)  # now this thread holds the session
    with pytest.raises(SessionBusyError):
        session.generate(prompt)
    stream.close()


def test_a_cache_that_does_not_fit_says_its_size(tiny_llama):
    with pytest.raises(MemoryError, match=r"max_length=1000000000000 and batch_size=1 needs 5\.12e\+05 GB"):
        Session(tiny_llama, max_length=10**12, backend="eager")


def test_one_session_per_thread(tiny_llama):
    """C54: sessions of one model do not share state."""
    prompts = [random_prompt(3 + index, seed=6) for index in range(4)]
    expected = [reference(tiny_llama, prompt, 12) for prompt in prompts]
    found = {}

    def work(index):
        session = Session(tiny_llama, max_length=64, backend="openvino")
        found[index] = [new_tokens(session.generate(prompts[index], max_new_tokens=12), 3 + index) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {index: [[expected[index]]] * 5 for index in range(4)}


def test_threads_on_one_session_take_turns(tiny_llama, backend):
    """C54."""
    session = Session(tiny_llama, max_length=64, **backend)
    prompts = [random_prompt(3 + index, seed=5) for index in range(8)]
    expected = [reference(tiny_llama, prompt, 12) for prompt in prompts]
    wrong = []

    def work(index):
        for _ in range(5):
            output = session.generate(prompts[index], max_new_tokens=12)
            if new_tokens(output, len(prompts[index])) != [expected[index]]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert wrong == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_length": 1}, ValueError, "max_length is 1"),
        ({"max_length": "64"}, ValueError, "max_length is '64'"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"layout": "rign"}, ValueError, "unknown layout 'rign': expected one of ring, shift, sink, none"),
        (
            {"backend": "tpu"},
            ValueError,
            "unknown backend 'tpu': expected one of auto, eager, inductor, cuda, xla, jax, openvino, npu",
        ),
        ({"backend": None}, ValueError, "unknown backend None"),
        ({"prefill_buckets": [128]}, ValueError, r"prefill_buckets is \[128\].*1 to max_length=64"),
        ({"prefill_buckets": []}, ValueError, "prefill_buckets"),
        ({"cache_sizes": [0]}, ValueError, r"cache_sizes is \[0\], expected a list of whole numbers from 1"),
        ({"prefill_buckets": 16}, ValueError, "prefill_buckets is 16, expected a list"),
        ({"backend": []}, ValueError, r"unknown backend \[\]"),
        ({"layout": []}, ValueError, r"unknown layout \[\]"),
        ({"device": 5}, ValueError, "device is 5"),
        ({"device": ""}, ValueError, "device is ''"),
        ({"backend_options": "abc"}, TypeError, "backend_options must be a dict"),
        ({"backend_options": {1: "a"}}, TypeError, "backend_options has the key 1"),
        ({"batchsize": 2}, TypeError, "batchsize"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_compiled(tiny_llama, monkeypatch, arguments, error, words):
    monkeypatch.setattr("staticgen.step.step_for", lambda *_: pytest.fail("went on to the model"))
    with pytest.raises(error, match=words):
        Session(tiny_llama, **{"max_length": 64, "backend": "eager", **arguments})


def test_a_session_says_what_it_is(tiny_llama):
    session = Session(tiny_llama, max_length=64, backend="eager", layout="SHIFT")
    assert repr(session) == (
        "Session(llama, backend='eager on cpu', layout='shift', max_length=64, batch_size=1, prefill_buckets=(16,))"
    )
    assert session.stats.cache_bytes == 2 * 2 * 2 * 16 * 64 * 4
