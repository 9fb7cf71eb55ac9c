"""Backend ``xla``: on device ``null``, where torch runs the functions, and on XLA's CPU client where torch-xla is."""

import importlib.util
import threading
from functools import cache

import models
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import left_padded, new_tokens, random_prompt, reference
from on_xla import DEVICES, HAS_XLA, needs_xla
from transformers import DynamicCache

from staticgen import BackendUnavailableError, Session, UnknownNameError, load_prefix
from staticgen.backends import open_backend
from staticgen.device_loop import LOOK_EVERY
from staticgen.engines import Engine

PROMPTS = [random_prompt(length) for length in (3, 9, 12)]
SAMPLING = {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.01}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


def on(device, model, **arguments):
    sizes = {"max_length": 48, "batch_size": 3, "prefill_buckets": [8], "cache_sizes": []}
    return Session(model, backend="xla", device=device, **{**sizes, **arguments})


@pytest.fixture(scope="module")
def session(device, tiny_llama):
    session = on(device, tiny_llama, cache_sizes=[16, 24])
    session.set_cache_implementation("sink")  # which has a function of its own
    return session


@pytest.fixture(scope="module")
def windowed(device):
    """A model with windows in some layers, and its session."""
    model = models.gemma3(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    return model, on(device, model, cache_sizes=[16])


@pytest.fixture
def compiles_nothing(session):
    session.set_cache_implementation("ring")
    before = session.stats.compiles, session.backend.engine.compiles
    yield
    assert (session.stats.compiles, session.backend.engine.compiles) == before
    session.set_cache_implementation("ring")


def watch(monkeypatch, session):
    """What the session's engine does from now on: the functions it calls, and the tensors that come to the host."""
    events, functions = [], session.backend.function
    download = session.backend.engine.download

    def function(shape, name):
        events.append(name)
        return functions(shape, name)

    def bring(buffer):
        found = download(buffer)
        events.append((found.dtype, tuple(found.shape)))
        return found

    monkeypatch.setattr(session.backend, "function", function)
    monkeypatch.setattr(session.backend.engine, "download", bring)
    return events


# Tokens.


@pytest.mark.parametrize("lengths", [(3, 9, 12), (7,), (20, 4), (30, 1, 17)], ids=str)
def test_the_cache_grows_and_the_tokens_are_those_of_transformers(tiny_llama, session, lengths, compiles_nothing):
    prompts, width = [random_prompt(length) for length in lengths], max(lengths)
    for layout in ("ring", "shift", "ring"):
        session.set_cache_implementation(layout)
        output = session.generate(prompts, max_new_tokens=48 - width)
        assert session.stats.last.loop == "device"
        assert new_tokens(output, width) == [reference(tiny_llama, prompt, 48 - width) for prompt in prompts]


def test_windows(windowed):
    model, session = windowed
    expected = [reference(model, prompt, 30) for prompt in PROMPTS]
    for layout in ("ring", "shift"):
        session.set_cache_implementation(layout)
        assert new_tokens(session.generate(PROMPTS, max_new_tokens=30), 12) == expected
        assert session.stats.last.loop == "device"


@pytest.mark.parametrize("overflow", ["slide", "sink", "stop"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_overflow(device, kind, overflow):
    """As on the eager backend, whose overflow is tested against transformers."""
    model, prompts, found = getattr(models, kind)(), PROMPTS[:2], []
    sizes = {"max_length": 14, "batch_size": 2, "overflow": overflow, "prefill_buckets": [8]}
    for session in (Session(model, backend="eager", **sizes), on(device, model, **sizes)):
        found.append([new_tokens(session.generate(prompts, max_new_tokens=24), 9) for _ in range(2)])
    assert found[0] == found[1]
    assert session.stats.last.loop == ("host" if overflow == "sink" else "device")
    assert len(found[0][0][0]) == (5 if overflow == "stop" else 24)


def test_prompts_longer_than_the_cache(device, tiny_llama):
    found, prompts = [], [random_prompt(30), random_prompt(5)]
    for target in ({"backend": "eager"}, {"backend": "xla", "device": device}):
        session = Session(
            tiny_llama, max_length=16, batch_size=2, overflow="sink", prefill_buckets=[8], cache_sizes=[], **target
        )
        found.append(session.generate(prompts, max_new_tokens=12).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("first", ["sink", "none"])
def test_a_session_may_begin_with_any_layout(device, tiny_llama, first):
    """What a smaller cache of another layout needs of the largest is there, too."""
    session = on(device, tiny_llama, max_length=24, batch_size=1, cache_sizes=[16], layout=first)
    for layout in (first, "ring"):
        session.set_cache_implementation(layout)
        for length in (9, 20, 3):
            prompt, found = random_prompt(length), []
            worker = threading.Thread(target=lambda p=prompt, f=found: f.append(session.generate(p)), daemon=True)
            worker.start()
            worker.join(60)
            assert found, f"layout {layout!r} waits for ever"
            assert new_tokens(found[0], length) == [reference(tiny_llama, prompt, 24 - length)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(device, dtype):
    """Logits are no further from float32 than transformers' own of this dtype, twice; tokens are those of float32.

    Twice, since the same sums are rounded in another order: both errors are of one size and neither is the smaller. A
    token may be another one only where the best two are closer than both their errors.
    """
    model, exact = models.llama().to(dtype), models.llama().to(dtype).float()  # of the same weights
    session, prompt = on(device, model, max_length=24, batch_size=1), random_prompt(6)
    asked = {"max_new_tokens": 16, "return_dict_in_generate": True, "output_logits": True}
    output = session.generate(prompt, **asked)
    with torch.no_grad():
        right, theirs = (one(output.sequences).logits[0, 5:-1].float() for one in (exact, model))
    tolerance = 2 * float((theirs - right).abs().max())
    assert 0 < tolerance < 16 * torch.finfo(dtype).eps * float(right.abs().max())
    difference = float((torch.stack(output.logits)[:, 0] - right).abs().max())
    assert 0 < difference <= tolerance
    best = right.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * tolerance
    assert int(clear.sum()) >= 3
    assert torch.equal(output.sequences[0, 6:][clear], right.argmax(dim=-1)[clear])
    looped = session.generate(prompt, max_new_tokens=16)
    assert session.stats.last.loop == "device"
    assert torch.equal(looped, output.sequences)


def test_turned_keys_of_16_bits(device):
    model, found = models.llama().to(torch.bfloat16), []
    for target in ({"backend": "eager"}, {"backend": "xla", "device": device}):
        session = Session(model, max_length=12, layout="sink", prefill_buckets=[8], cache_sizes=[], **target)
        output = session.generate(
            random_prompt(6), max_new_tokens=30, return_dict_in_generate=True, output_logits=True, output_scores=True
        )
        found.append((output.sequences[0].tolist(), torch.stack(output.logits)))
    same = next((at for at, pair in enumerate(zip(found[0][0], found[1][0], strict=True)) if pair[0] != pair[1]), 36)
    assert same > 12  # keys have turned before rounding in another order chose another token
    left, right = (logits[: same - 6] for _, logits in found)
    torch.testing.assert_close(left, right, rtol=0, atol=float(left.abs().max()) * 4 * 2**-7)


# Sampling.


def test_a_seed_gives_the_same_tokens_on_every_device_and_on_the_host(tiny_llama, session, compiles_nothing):
    for seed in (5, 2**31 + 7, 2**40 + 2**31, 2**63 + 11):
        found = session.generate(PROMPTS, seed=seed, max_new_tokens=20, **SAMPLING)
        assert session.stats.last.loop == "device"
        same = session.generate(PROMPTS, seed=seed, max_new_tokens=20, logits_processor=[passes], **SAMPLING)
        assert session.stats.last.loop == "host"
        assert found.tolist() == same.tolist()
        assert null(tiny_llama).generate(PROMPTS, seed=seed, max_new_tokens=20, **SAMPLING).tolist() == found.tolist()
        assert session.generate(PROMPTS, seed=seed + 1, max_new_tokens=20, **SAMPLING).tolist() != found.tolist()


def passes(ids, scores):
    """A processor that asks for the host's loop and changes nothing."""
    return scores


@cache
def null(model):
    return on("null", model)


def test_samples_of_one_prompt_and_many_prompts(tiny_llama, session, compiles_nothing):
    output = session.generate(PROMPTS[0], num_return_sequences=3, max_new_tokens=20, seed=1, **SAMPLING)
    assert session.stats.last.loop == "device" and len(set(map(tuple, output.tolist()))) == 3
    alone = session.generate(PROMPTS[1], max_new_tokens=10, seed=1, **SAMPLING)
    (many,) = session.generate_many([PROMPTS[1]], max_new_tokens=10, seed=1, **SAMPLING)
    assert many.tolist() == alone[0].tolist()
    prompts = [random_prompt(length, seed) for seed, length in enumerate((3, 20, 1, 12, 8, 5, 2))]
    eos = reference(tiny_llama, prompts[0], 5)[-1]
    texts = session.generate_many(prompts, max_new_tokens=20, eos_token_id=eos)
    expected = [prompt + reference(tiny_llama, prompt, 20, eos_token_id=eos) for prompt in prompts]
    assert [text.tolist() for text in texts] == expected
    assert new_tokens(session.generate(prompts[1], max_new_tokens=9), 20) == [reference(tiny_llama, prompts[1], 9)]


def test_beams(tiny_llama, session, compiles_nothing):
    prompt = PROMPTS[1]
    arguments = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 20, "do_sample": False}
    ids = torch.tensor([prompt])
    expected = tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert session.generate(prompt, **arguments).tolist() == expected.tolist()


# What is known already.


def test_prefixes_and_their_files(tiny_llama, session, tmp_path, compiles_nothing):
    common, prompts = PROMPTS[2], [PROMPTS[2] + random_prompt(length, seed=3) for length in (2, 5, 9)]
    expected = [reference(tiny_llama, prompt, 16) for prompt in prompts]
    prefix = session.prefix(common)
    prefix.save(tmp_path / "common.safetensors")
    for one in (prefix, load_prefix(tmp_path / "common.safetensors"), null(tiny_llama).prefix(common)):
        for layout in ("ring", "shift", "sink"):
            session.set_cache_implementation(layout)
            assert new_tokens(session.generate(prompts, max_new_tokens=16, prefix=one), 21) == expected
            assert session.stats.last.reused_tokens >= 12


def test_prefixes_under_windows(windowed):
    model, session = windowed
    common, prompts = PROMPTS[2], [PROMPTS[2] + random_prompt(length, seed=3) for length in (2, 9)]
    output = session.generate(prompts, max_new_tokens=16, prefix=session.prefix(common))
    assert session.stats.last.reused_tokens == 24
    assert new_tokens(output, 21) == [reference(model, prompt, 16) for prompt in prompts]


def test_the_prefix_cache_knows_what_the_device_has_made(device, tiny_llama):
    session, prompt = on(device, tiny_llama, batch_size=1, prefix_cache=1 << 20), random_prompt(18)
    expected = reference(tiny_llama, prompt, 12)
    assert new_tokens(session.generate(prompt, max_new_tokens=12), 18) == [expected]
    answer = prompt + expected
    assert new_tokens(session.generate(answer, max_new_tokens=8), 30) == [reference(tiny_llama, answer, 8)]
    assert (session.stats.last.loop, session.stats.last.reused_tokens >= 28) == ("device", True)
    for chunk in (1, 3, 9):  # a stream that ends while steps ahead of it have run
        stream = session.stream(random_prompt(6, chunk), max_new_tokens=30)
        begun = [int(next(stream)) for _ in range(chunk)]
        stream.close()
        text = random_prompt(6, chunk) + begun
        assert new_tokens(session.generate(text, max_new_tokens=10), len(text)) == [reference(tiny_llama, text, 10)]
        assert session.stats.last.reused_tokens >= 5


def test_keys_and_values_of_transformers(tiny_llama, session, compiles_nothing):
    ids, mask = left_padded([random_prompt(14), random_prompt(11)])
    known = DynamicCache(config=tiny_llama.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        tiny_llama(ids[:, :9], attention_mask=mask[:, :9], position_ids=positions[:, :9], past_key_values=known)
    output = session.generate(ids, mask, max_new_tokens=16, past_key_values=known)
    assert new_tokens(output, 14) == [reference(tiny_llama, random_prompt(length), 16) for length in (14, 11)]
    assert session.stats.last.reused_tokens == 9 + 6


# The loop runs ahead.


def test_only_token_ids_come_back_and_only_every_few_steps(tiny_llama, session, monkeypatch, compiles_nothing):
    events = watch(monkeypatch, session)
    prompts = [random_prompt(6), random_prompt(4)]
    output = session.generate(prompts, max_new_tokens=42)
    assert new_tokens(output, 6) == [reference(tiny_llama, prompt, 42) for prompt in prompts]
    tokens, logits, positions = (torch.int32, (LOOK_EVERY, 3)), (torch.float32, (3, 128)), (torch.int32, (3, 48))
    begin = events.index("greedy")
    assert events[:begin] in (["step", logits, "put"], ["step", logits, "put", "move_48"])
    looped = [event for event in events[begin:] if event == "greedy" or isinstance(event, tuple)]
    moved = [event for event in events[begin:] if event not in looped]
    assert moved in ([["move_16", "move_24"]], ["move_16", "move_24"])  # between two steps, by no work of the host
    chunks = [LOOK_EVERY] * 5 + [1]
    expected = ["greedy"] * (chunks[0] + chunks[1])  # two chunks are under way before the first look
    for later in [*chunks[2:], 0, 0]:
        expected += [tokens, *["greedy"] * later]
    # The positions come once, when the loop has ended; those of the smaller caches when their tokens move.
    small = [(torch.int32, (3, 16)), (torch.int32, (3, 24))]
    assert [event for event in looped if event not in small] == [*expected, positions]


def test_rows_end_and_the_surplus_is_dropped(tiny_llama, session, compiles_nothing):
    prompts = [random_prompt(length, seed=3) for length in (3, 9, 16)]
    free = [reference(tiny_llama, prompt, 24) for prompt in prompts]
    ids, mask = left_padded(prompts)
    for eos in ([free[0][4], free[1][6]], [free[0][0], free[1][3], free[2][9]], [row[0] for row in free]):
        arguments = {"eos_token_id": eos, "max_new_tokens": 24, "do_sample": False}
        expected = tiny_llama.generate(ids, attention_mask=mask, **arguments)
        output = session.generate(ids, mask, **arguments)
        assert output.tolist() == expected.tolist()
        call, steps = session.stats.last, output.shape[1] - 17
        assert (call.loop, call.steps) == ("device", steps)
        looked = -(-steps // LOOK_EVERY) * LOOK_EVERY  # the chunk with the end, and the one ahead of it
        assert call.steps + call.surplus_steps == (min(23, looked + LOOK_EVERY) if steps else 0)
    assert new_tokens(session.generate(prompts[0], max_new_tokens=24), 3) == free[:1]


@pytest.mark.parametrize("seen", [1, 2, 5, LOOK_EVERY, LOOK_EVERY + 1, 2 * LOOK_EVERY + 3])
def test_a_stream_is_closed_in_the_middle(tiny_llama, session, seen, compiles_nothing):
    prompts = PROMPTS[:2]
    expected = [reference(tiny_llama, prompt, 36) for prompt in prompts]
    stream = session.stream(prompts, max_new_tokens=36)
    begun = [next(stream).clone() for _ in range(seen)]
    stream.close()
    assert torch.stack(begun, 1).tolist() == [row[:seen] for row in expected]
    call = session.stats.last
    assert (call.new_tokens, call.finish_reasons, call.steps) == ([seen] * 2, [""] * 2, seen - 1)
    started = 0 if seen == 1 else min(35, (-(-(seen - 1) // LOOK_EVERY) + 1) * LOOK_EVERY)
    assert call.steps + call.surplus_steps == started
    streamed = torch.stack([token.clone() for token in session.stream(prompts, max_new_tokens=36)], 1)
    assert streamed.tolist() == expected


@pytest.mark.parametrize("new", [1, 2, LOOK_EVERY, LOOK_EVERY + 1, LOOK_EVERY + 2, 25])
def test_any_number_of_tokens(tiny_llama, session, new, compiles_nothing):
    prompt = random_prompt(6)
    assert new_tokens(session.generate(prompt, max_new_tokens=new), 6) == [reference(tiny_llama, prompt, new)]
    call = session.stats.last
    assert (call.loop, call.steps, call.surplus_steps, call.new_tokens) == ("device", new - 1, 0, [new])


def test_the_cache_is_given_away_and_taken(session, compiles_nothing):
    """Every call of a function takes the memory of the cache that it is given."""
    memory = session.backend.memory(session._step, 3, 48)
    session.generate(PROMPTS, max_new_tokens=36)
    held = [*memory.stacks.held.values()]
    session.generate(PROMPTS, max_new_tokens=2)
    for buffer in held:
        if session.backend.device == "null":
            assert bool(buffer.isnan().all())
        else:
            with pytest.raises(RuntimeError):
                session.backend.engine.download(buffer)


# Errors, and what is left after them.


def test_nan_is_an_error_and_the_session_goes_on(device):
    """Out of a position that neither prefill nor the first chunk reaches; the chunk ahead has been started."""
    model = models.gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight[14:] = torch.nan
    session, prompt = on(device, model, batch_size=1, prefix_cache=1 << 20), random_prompt(4)
    expected = reference(model, prompt, 10)
    for _ in range(2):
        assert new_tokens(session.generate(prompt, max_new_tokens=10), 4) == [expected]
        with pytest.raises(ArithmeticError, match=rf"gave NaN logits on xla on {device}"):
            session.generate(prompt, max_new_tokens=40)
    with pytest.raises(ArithmeticError, match="gave NaN logits"):
        session.generate(random_prompt(20), max_new_tokens=4)  # in prefill
    assert new_tokens(session.generate(prompt, max_new_tokens=10), 4) == [expected]


def test_an_error_of_the_caller_in_a_call(tiny_llama, session, compiles_nothing):
    def fails(ids, scores):
        if ids.shape[1] > 15:
            raise LookupError("mine")
        return scores

    with pytest.raises(LookupError, match="mine"):
        session.generate(PROMPTS, max_new_tokens=10, logits_processor=[fails])
    assert new_tokens(session.generate(PROMPTS[0], max_new_tokens=20), 3) == [reference(tiny_llama, PROMPTS[0], 20)]


def test_two_sessions_and_threads(tiny_llama, session, windowed, compiles_nothing):
    """One's stream goes on while the other works; one session's calls wait for each other."""
    model, other = windowed
    expected = [reference(tiny_llama, prompt, 30) for prompt in PROMPTS]
    stream = session.stream(PROMPTS[0], max_new_tokens=30)
    begun = [int(next(stream)) for _ in range(4)]
    other.set_cache_implementation("ring")
    right = [reference(model, prompt, 20) for prompt in PROMPTS]
    assert new_tokens(other.generate(PROMPTS, max_new_tokens=20), 12) == right
    assert begun + [int(token) for token in stream] == expected[0]
    found = {}

    def work(index):
        mine = other if index % 2 else session
        for _ in range(3):
            found.setdefault(index, []).append(new_tokens(mine.generate(PROMPTS, max_new_tokens=20), 12))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    short = [row[:20] for row in expected]
    assert found == {index: [right if index % 2 else short] * 3 for index in range(4)}


def test_devices_and_options(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with pytest.raises(UnknownNameError, match=r"has the devices tpu, cpu and null \(for tests\), got 'cuda'"):
        open_backend("xla", "cuda")
    with pytest.raises(
        BackendUnavailableError, match=r"mesh='4', but backend 'xla' runs on one chip; a bundle for several .*'jax'"
    ):
        open_backend("xla", "null", {"mesh": "4"})
    with pytest.raises(ValueError, match="unknown option 'attention' for backend 'xla'; expected flags of the TPU's"):
        open_backend("xla", "null", {"attention": "sdpa"})
    backend = open_backend("xla", "NULL", {"mesh": "1"})
    assert (backend.device, backend.emulated, backend.made_for) == (
        "null",
        True,
        {"backend": "xla", "device": "null"},
    )
    assert isinstance(backend.engine, Engine)


@pytest.mark.skipif(HAS_XLA, reason="torch-xla is here")
def test_without_torch_xla():
    for device in (None, "tpu", "cpu"):
        with pytest.raises(BackendUnavailableError, match=r"pip install 'staticgen\[xla\]'.*Alternatives: .*jax"):
            open_backend("xla", device)
    assert importlib.util.find_spec("torch_xla") is None


@needs_xla
def test_one_kind_of_device_in_a_process():
    assert open_backend("xla", "cpu").device == "cpu"
    with pytest.raises(BackendUnavailableError, match="has torch-xla's device 'CPU', not 'tpu'; set PJRT_DEVICE=TPU"):
        open_backend("xla", "tpu")
    assert open_backend("xla").device == "cpu"  # by PJRT_DEVICE


# Any session.


@cache
def model(kind):
    return {"llama": models.llama, "gpt2": models.gpt2, "mistral": lambda: models.mistral(sliding_window=5)}[kind]()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    kind=st.sampled_from(["llama", "gpt2", "mistral"]),
    prompts=st.lists(st.lists(st.integers(3, 127), min_size=1, max_size=30), min_size=1, max_size=3),
    count=st.integers(1, 20),
    room=st.integers(0, 9),
    spare_rows=st.integers(0, 2),
    buckets=st.sets(st.integers(1, 24), min_size=1, max_size=2),
    sizes=st.sets(st.integers(1, 50), max_size=3),
    layout=st.sampled_from(["ring", "shift", "sink", "none"]),
)
def test_any_session_gives_the_tokens_of_transformers(
    one_thread, kind, prompts, count, room, spare_rows, buckets, sizes, layout
):
    width = max(map(len, prompts))
    length = max(2, width + count + room)
    layout = "ring" if layout == "sink" and kind == "gpt2" else layout  # whose keys cannot move
    session = Session(
        model(kind),
        max_length=length,
        batch_size=len(prompts) + spare_rows,
        layout=layout,
        layout_options={"num_sink_tokens": 1} if layout == "sink" else {},  # a cache of two slots has room for no more
        overflow="error",
        prefill_buckets=[min(size, length) for size in buckets],
        cache_sizes=[min(size, length) for size in sizes],
        backend="xla",
        device="null",
    )
    for _ in range(2):
        output = session.generate(prompts, max_new_tokens=count)
        assert new_tokens(output, width) == [reference(model(kind), prompt, count) for prompt in prompts]
