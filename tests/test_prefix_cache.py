"""The prefix cache: what is found, what is forgotten, and that the tokens are those of a session without one."""

import models
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import new_tokens, random_prompt, reference
from test_cache_implementation import Backwards, ByPosition

import staticgen
from staticgen import Session
from staticgen.layouts import LAYOUTS
from staticgen.prefix_cache import PrefixCache
from staticgen.shapes import CacheSpec, LayerSpec
from staticgen.spans import KVSpan, usable_lengths
from staticgen.stats import SessionStats

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
COMMON = random_prompt(12)
MODELS = {"llama": models.llama, "gpt2": models.gpt2, "gemma3": models.gemma3}
PLENTY = 10**8


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    return MODELS[request.param]()


def counters(session):
    return session.stats.prefix_hits, session.stats.prefix_misses, session.stats.last.reused_tokens


@pytest.mark.parametrize("backend", ["eager", "openvino"])
def test_turns_of_a_conversation(model, backend):
    """C58: a common prefix, suffixes of three lengths in a batch, a second turn, a short overlap, other sampling."""
    windows = model.config.model_type.startswith("gemma3")
    session = Session(model, max_length=64, batch_size=3, prefill_buckets=[8], prefix_cache=PLENTY, backend=backend)
    plain = Session(model, max_length=64, batch_size=3, backend="eager")
    compiles = session.stats.compiles

    def check(prompts, count, **arguments):
        output = session.generate(prompts, max_new_tokens=count, **arguments)
        assert torch.equal(output, plain.generate(prompts, max_new_tokens=count, **arguments))
        found = new_tokens(output, max(map(len, prompts)))
        if not arguments:
            assert found == [reference(model, prompt, count) for prompt in prompts]
        return found

    check([COMMON], 1)
    assert counters(session) == (0, 1, 0)
    prompts = [COMMON + random_prompt(length, seed=3) for length in (2, 5, 9)]
    answers = check(prompts, 6)
    # Of full attention, the tokens in the columns before the one where the longest prompt goes on.
    assert counters(session) == (3, 1, 36 if windows else 12 + 8 + 5)
    turns = [prompt + answer + random_prompt(3, seed=4) for prompt, answer in zip(prompts, answers, strict=True)]
    replays = session.stats.replays
    check(turns, 6)
    assert counters(session) == (6, 1, sum(len(prompt) + 5 for prompt in prompts))  # the last answer token is new
    assert session.stats.replays - replays == 1 + 5  # four tokens of each row in one step
    short = COMMON[:5] + random_prompt(6, seed=5)
    check([short], 6)
    assert counters(session) == ((6, 2, 0) if windows else (7, 1, 5))
    check(turns, 6, do_sample=True, seed=3, temperature=0.7, top_k=30)
    assert session.stats.last.reused_tokens == sum(map(len, turns)) - 3  # the whole prompts, but for the last token
    check(turns, 6, repetition_penalty=1.4)
    check([turns[1], [7, 8, 9]], 6)
    assert session.stats.compiles == compiles


def test_a_prompt_again_runs_one_token(model):
    session = Session(model, max_length=64, prefill_buckets=[4, 8], prefix_cache=PLENTY, backend="eager")
    prompt = random_prompt(20)
    output = session.generate(prompt, max_new_tokens=4)
    for _ in range(2):
        replays = session.stats.replays
        assert torch.equal(session.generate(prompt, max_new_tokens=4), output)
        assert (session.stats.last.reused_tokens, session.stats.replays - replays) == (19, 1 + 3)
    held = session.stats.prefix_bytes
    session.generate(output[0], max_new_tokens=1)  # of 24 tokens, all but the last have run
    assert session.stats.last.reused_tokens == 23
    assert session.stats.prefix_bytes > held


def test_one_differing_token_is_not_reused(tiny_llama):
    session = Session(tiny_llama, max_length=64, prefix_cache=PLENTY, backend="eager")
    session.generate(COMMON, max_new_tokens=1)
    for at in (11, 0, 6, 1):
        other = [*COMMON]
        other[at] = 3 if other[at] != 3 else 4
        output = session.generate(other, max_new_tokens=8)
        assert session.stats.last.reused_tokens == at
        assert new_tokens(output, 12) == [reference(tiny_llama, other, 8)]


def test_off_unless_asked_for(tiny_llama):
    for budget in ({}, {"prefix_cache": 0}, {"prefix_cache": None}):
        session = Session(tiny_llama, max_length=32, backend="eager", **budget)
        for _ in range(2):
            session.generate(COMMON, max_new_tokens=2)
            assert counters(session) == (0, 0, 0)
            assert session.stats.prefix_bytes == 0
    for budget in (-1, 1.5, "1GB", True):
        with pytest.raises(ValueError, match=f"prefix_cache is {budget!r}, expected a whole number of at least 0"):
            Session(tiny_llama, max_length=32, backend="eager", prefix_cache=budget)


def test_a_layout_that_keeps_nothing_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="layout 'none' keeps no keys and values, so that prefix_cache is of no use"):
        Session(tiny_llama, max_length=32, backend="eager", prefix_cache=PLENTY, layout="none")
    session = Session(tiny_llama, max_length=32, backend="eager", prefix_cache=PLENTY)
    with pytest.raises(ValueError, match="prefix_cache is of no use"):
        session.set_cache_implementation("none")
    assert session.layout == "ring"
    output = session.generate(COMMON, max_new_tokens=8)
    session.set_cache_implementation("shift")
    assert torch.equal(session.generate(COMMON, max_new_tokens=8), output)
    assert session.stats.last.reused_tokens == 11


def held_bytes(cache):
    """What the tensors of a tree really hold, each memory once."""
    storages = {}
    for node in cache._nodes():
        for tensor in (tensor for pair in node.span.parts.values() for tensor in pair):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        storages[node.tokens.ctypes.data] = (node.tokens if node.tokens.base is None else node.tokens.base).nbytes
    return sum(storages.values())


def test_the_budget_holds_and_what_is_used_stays(model):
    probe = Session(model, max_length=64, backend="eager", prefix_cache=PLENTY)
    probe.generate(random_prompt(20), max_new_tokens=1)
    one = probe.stats.prefix_bytes
    session = Session(model, max_length=256, backend="eager", prefix_cache=4 * one)
    cache = session._prefix_cache
    for seed in range(12):
        session.generate(COMMON + random_prompt(8, seed=100), max_new_tokens=1)
        assert session.stats.last.reused_tokens == (19 if seed else 0)
        session.generate(random_prompt(20, seed=seed), max_new_tokens=1)
        assert held_bytes(cache) == cache.nbytes == session.stats.prefix_bytes <= 4 * one
    assert session.stats.prefix_bytes > 2 * one
    session.generate(random_prompt(20, seed=11), max_new_tokens=1)
    assert session.stats.last.reused_tokens == 19
    session.generate(random_prompt(20, seed=1), max_new_tokens=1)
    assert session.stats.last.reused_tokens < 19
    held = set(map(id, cache._nodes()))
    session.generate(random_prompt(210), max_new_tokens=2)  # more than the budget by itself
    assert set(map(id, cache._nodes())) == held


def test_equal_beginnings_are_held_once(tiny_llama):
    session = Session(tiny_llama, max_length=64, batch_size=4, backend="eager", prefix_cache=PLENTY)
    common = random_prompt(40)
    prompts = [[*common, last] for last in (3, 4, 5, 6)]
    session.generate(prompts, max_new_tokens=1)
    a_token = 2 * 2 * 2 * 16 * 4 + 8  # layers, keys and values, heads, numbers of four bytes; and the id
    assert session.stats.prefix_bytes == 44 * a_token


PROMPTS = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=20), min_size=1, max_size=3)


@settings(RELAXED, max_examples=40)
@given(
    calls=st.lists(st.tuples(PROMPTS, st.integers(1, 6), st.booleans()), min_size=2, max_size=6),
    budget=st.sampled_from([3_000, 20_000, 60_000, PLENTY]),
    name=st.sampled_from(list(MODELS)),
    options=st.sampled_from(
        [{}, {"layout": "shift"}, {"cache_sizes": [6, 12]}, {"overflow": "slide"}, {"overflow": "sink"}]
    ),
)
def test_any_prompts(calls, budget, name, options):
    """Prompts over an alphabet of three share beginnings of all lengths; whatever is known, the tokens are the same."""
    if name == "gpt2" and "overflow" in options:
        options = {}
    if name == "gemma3" and options.get("overflow") == "sink":
        options = {**options, "layout_options": {"num_sink_tokens": 0}}
    length = 18 if options.get("overflow") else 26
    arguments = {"max_length": length, "batch_size": 3, "prefill_buckets": [3, 8], "backend": "eager", **options}
    session, plain = (Session(FIXED[name], **arguments, prefix_cache=size) for size in (budget, 0))
    for prompts, most, again in calls:
        texts = prompts
        for _ in range(1 + again):
            count = most if options.get("overflow") else min(most, length - max(map(len, texts)))
            output = session.generate(texts, max_new_tokens=count)
            assert torch.equal(output, plain.generate(texts, max_new_tokens=count))
            assert held_bytes(session._prefix_cache) == session._prefix_cache.nbytes <= budget
            texts = [row.tolist()[:20] for row in output]


FIXED = {name: make() for name, make in MODELS.items()}


# Sequences that have a beginning in common, and of which one may end within another.
CUT = st.builds(
    lambda count, end: [0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1, 2][:count] + end,
    st.integers(1, 12),
    st.lists(st.integers(0, 2), max_size=2),
)


@settings(RELAXED, max_examples=200)
@given(
    sequences=st.lists(CUT, min_size=1, max_size=8),
    asked=CUT,
    windows=st.sampled_from([(None,), (3, None), (1,), (4, 2)]),
    budget=st.sampled_from([150, 400, PLENTY]),
)
def test_the_tree_gives_the_keys_of_the_very_tokens(sequences, asked, windows, budget):
    """Keys that say all tokens up to theirs: what is found for a prompt must be that of the prompt."""
    spec = CacheSpec(tuple(LayerSpec(1, 1, 1, window) for window in windows), torch.float64)
    cache = PrefixCache(budget, spec, SessionStats())

    def numbers(tokens, start, stop):
        code = [sum((token + 1) * 5**i for i, token in enumerate(tokens[: at + 1])) for at in range(len(tokens))]
        return torch.tensor(code[start:stop], dtype=torch.float64)[None, None, :, None]

    def read(tokens, start):
        stop, parts = len(tokens), {}
        for layer in spec.layers:
            first = start if layer.window is None else max(0, stop - layer.window)
            part = numbers(tokens, first, stop)
            parts[layer] = part, -part
        return KVSpan(stop, parts)

    for tokens in sequences:
        cache.add(np.array(tokens), lambda start, tokens=tokens: read(tokens, start))
        assert cache.nbytes <= budget
    ready = cache.find([torch.tensor(asked)], 1, len(asked))
    shared = [
        next((i for i, (a, b) in enumerate(zip(s, asked, strict=False)) if a != b), min(len(s), len(asked)))
        for s in sequences
    ]
    if budget == PLENTY:
        ends = [len(s) for s, n in zip(sequences, shared, strict=True) if n == len(s) < len(asked)]
        longest = max(ends, default=0) if max(w or 1 for w in windows) > 1 else min(max(shared), len(asked) - 1)
        assert (ready.counts[0] if ready else 0) >= longest
    if ready is not None:
        count = ready.counts[0]
        assert count <= min(max(shared), len(asked) - 1)
        for layer, keys, values in zip(spec.layers, ready.buffers.keys, ready.buffers.values, strict=True):
            first = 0 if layer.window is None else max(0, count - layer.window + 1)
            expected = numbers(asked, first, count)
            assert torch.equal(keys[:, :, first:count], expected)
            assert torch.equal(values[:, :, first:count], -expected)


@given(
    held=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=4),
    window=st.integers(1, 6),
)
def test_usable_lengths(held, window):
    spans, here, stop = [], set(), 0
    layer = LayerSpec(1, 1, 1, window)
    for length, most in held:
        stop, count = stop + length, min(length, most)
        spans.append(KVSpan(stop, {layer: (torch.zeros(1, 1, count, 1),) * 2}))
        here |= set(range(stop - count, stop))
    expected = [set(range(max(0, n - window + 1), n)) <= here for n in range(stop + 1)]
    assert usable_lengths(spans, stop).tolist() == expected


def test_layouts_from_outside(tiny_llama, monkeypatch):
    monkeypatch.setattr(LAYOUTS, "_entries", dict(LAYOUTS._entries))
    staticgen.register_layout("backwards", Backwards)
    staticgen.register_layout("by position", ByPosition)
    for layout in ("backwards", "by position"):
        prompts = [random_prompt(length) for length in (5, 14)]
        session = Session(tiny_llama, max_length=48, batch_size=2, layout=layout, prefix_cache=PLENTY, backend="eager")
        for _ in range(3):
            output = session.generate(prompts, max_new_tokens=6)
            found = new_tokens(output, max(map(len, prompts)))
            assert found == [reference(tiny_llama, prompt, 6) for prompt in prompts]
            prompts = [[*prompt, *answer, 9] for prompt, answer in zip(prompts, found, strict=True)]
        assert session.stats.last.reused_tokens == sum(map(len, prompts)) - 2 * 7 - 2 * 2
        prefix = session.prefix(prompts[0][:9])
        assert new_tokens(session.generate(prompts[0], max_new_tokens=4, prefix=prefix), len(prompts[0])) == [
            reference(tiny_llama, prompts[0], 4)
        ]


def test_what_sliding_dropped_is_not_kept(tiny_llama):
    """Keys that are gone or turned, or that saw fewer tokens, are those of no prompt."""
    for options in ({"overflow": "slide"}, {"overflow": "sink"}):
        session = Session(tiny_llama, max_length=24, prefix_cache=PLENTY, backend="eager", **options)
        plain = Session(tiny_llama, max_length=24, backend="eager", **options)
        prompt = random_prompt(20)
        for _ in range(2):
            output = session.generate(prompt, max_new_tokens=30)
            assert torch.equal(output, plain.generate(prompt, max_new_tokens=30))
        assert session.stats.last.reused_tokens == 19
        long = output[0, :40]
        output = session.generate(long, max_new_tokens=10)
        assert session.stats.last.reused_tokens == 20  # the first prompt, and not what came after
        assert torch.equal(output, plain.generate(long, max_new_tokens=10))


def test_a_layout_that_holds_less(tiny_llama):
    """What is known of a prompt is more than the layout in use can hold."""
    session = Session(tiny_llama, max_length=48, prefix_cache=PLENTY, backend="eager")
    plain = Session(tiny_llama, max_length=48, backend="eager")
    prompt = random_prompt(30)
    session.generate(prompt, max_new_tokens=8)
    for one in (session, plain):
        one.set_cache_implementation("sink", window_length=9, num_sink_tokens=2)
    output = session.generate(prompt, max_new_tokens=8)
    assert session.stats.last.reused_tokens == 11
    assert torch.equal(output, plain.generate(prompt, max_new_tokens=8))


def test_a_text_that_ends_within_another(model):
    """Of windows, only the newest tokens are held: those at the end of the shorter text are held too from then on."""
    session = Session(model, max_length=48, prefix_cache=PLENTY, backend="eager")
    text = random_prompt(30)
    session.generate(text, max_new_tokens=1)
    session.generate(text[:20], max_new_tokens=1)
    prompt = text[:20] + random_prompt(5, seed=7)
    output = session.generate(prompt, max_new_tokens=8)
    assert session.stats.last.reused_tokens == 20
    assert new_tokens(output, 25) == [reference(model, prompt, 8)]


def test_a_stream_that_is_closed_keeps_what_ran(tiny_llama):
    session = Session(tiny_llama, max_length=64, prefix_cache=PLENTY, backend="eager")
    stream = session.stream(COMMON, max_new_tokens=30)
    tokens = [next(stream).item() for _ in range(5)]
    stream.close()
    prompt = COMMON + tokens + [9]
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 18) == [reference(tiny_llama, prompt, 8)]
    assert session.stats.last.reused_tokens == 12 + 4


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_nothing_wrong(tiny_llama, monkeypatch, error):
    """Also between the two halves of a write."""
    session = Session(tiny_llama, max_length=64, prefix_cache=PLENTY, backend="eager")
    owner = session._programs if error is ArithmeticError else session._context._caches.current.buffers
    name = "run" if error is ArithmeticError else "write_"
    for after in (0, 1, 4):
        calls = [0]
        original = getattr(owner, name)

        def fail(*args, calls=calls, original=original, after=after):
            calls[0] += 1
            if calls[0] > after:
                raise error("a fault")
            return original(*args)

        prompt = random_prompt(9, seed=after)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(error):
                session.generate(prompt, max_new_tokens=8)
        again = prompt + reference(tiny_llama, prompt, 8)
        for text in (prompt, again):
            output = session.generate(text, max_new_tokens=8)
            assert new_tokens(output, len(text)) == [reference(tiny_llama, text, 8)]


def test_a_prefix_and_ready_keys_go_past_the_cache(tiny_llama):
    """Only what the session itself computed from the prompt's tokens is kept."""
    session = Session(tiny_llama, max_length=64, prefix_cache=PLENTY, backend="eager")
    prefix = session.prefix(COMMON)
    prompt = COMMON + [7, 8]
    session.generate(prompt, max_new_tokens=4, prefix=prefix)
    pairs = [(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16))] * 2
    session.generate(prompt, max_new_tokens=4, past_key_values=pairs)
    assert session.stats.last.reused_tokens == 4
    assert (session.stats.prefix_hits, session.stats.prefix_misses, session.stats.prefix_bytes) == (0, 0, 0)
    assert new_tokens(session.generate(prompt, max_new_tokens=4), 14) == [reference(tiny_llama, prompt, 4)]
