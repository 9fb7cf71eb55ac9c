"""Layouts by name: switching them, layouts from outside the package, keys and values that a caller has already."""

import inspect

import models
import pytest
import torch
from models import left_padded, new_tokens, random_prompt, reference
from transformers import DynamicCache

import staticgen
from staticgen import Layout, Placement, RowSegment, Segment, Session, SessionBusyError, UnknownNameError
from staticgen.layouts import LAYOUTS


class Backwards(Layout):
    """Fills the slots from the last to the first, one token at a time, and then begins anew."""

    overflow = ("error", "stop", "slide")

    def reset(self):
        self.next = 0

    def place(self, positions, source=0):
        columns = range(source, positions.shape[1])
        slots = [self.length - 1 - (self.next + i) % self.length for i in range(len(columns))]
        self.next += len(columns)
        return Placement(0, tuple(Segment(slot, column, 1) for slot, column in zip(slots, columns, strict=True)))


class ByPosition(Layout):
    """Every row's token goes to the slot of its own position, so that rows of a batch use different slots."""

    def reset(self):
        pass

    def place(self, positions, source=0):
        cells = [(row, column) for row, column in (positions >= 0).nonzero().tolist() if column >= source]
        return Placement(0, (), tuple(RowSegment(row, int(positions[row, column]), column) for row, column in cells))


class Strided(Backwards):
    """With a parameter: every ``step``-th slot first."""

    overflow = ("stop", "error")

    def __init__(self, length, step=1):
        super().__init__(length)
        if length % step == 0:
            raise ValueError(f"step is {step}, expected no divisor of {length}")
        self.step = step

    def place(self, positions, source=0):
        columns = range(source, positions.shape[1])
        slots = [(self.next + i) * self.step % self.length for i in range(len(columns))]
        self.next += len(columns)
        return Placement(0, tuple(Segment(slot, column, 1) for slot, column in zip(slots, columns, strict=True)))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(LAYOUTS, "_entries", dict(LAYOUTS._entries))
    staticgen.register_layout("Backwards", Backwards)
    staticgen.register_layout("by position", ByPosition)
    staticgen.register_layout("strided", Strided)


def test_layouts_from_outside(backend):
    """Also of a model with windows, for which the layout gets the window's slots, or a ring of them."""
    for model in (models.llama(), models.gemma3()):
        prompts = [random_prompt(length) for length in (3, 12, 20)]
        expected = [reference(model, prompt, 24) for prompt in prompts]
        session = Session(model, max_length=48, batch_size=3, layout="backwards", prefill_buckets=[8, 32], **backend)
        compiles = session.stats.compiles
        for name, options in [("BACKWARDS", {}), ("by position", {}), (" Strided ", {"step": 7}), ("ring", {})]:
            session.set_cache_implementation(name, **options)
            assert session.layout == name.strip().lower()
            assert new_tokens(session.generate(prompts, max_new_tokens=24), 20) == expected
        assert session.stats.compiles == compiles


def test_a_layout_from_outside_may_slide(tiny_llama, backend):
    prompt = random_prompt(30)
    session = Session(tiny_llama, max_length=24, overflow="slide", prefill_buckets=[8], **backend)
    expected = session.generate(prompt, max_new_tokens=40)
    session.set_cache_implementation("backwards")
    assert session.overflow == "slide"
    assert torch.equal(session.generate(prompt, max_new_tokens=40), expected)


def test_switching_and_its_policies(tiny_llama, backend):
    prompts = [random_prompt(length) for length in (3, 9, 16)]
    expected = [reference(tiny_llama, prompt, 24) for prompt in prompts]
    session = Session(tiny_llama, max_length=64, batch_size=3, **backend)
    compiles = session.stats.compiles
    session.set_cache_implementation("sink", window_length=50, num_sink_tokens=4)
    assert (session.layout, session.layout_options) == ("sink", {"window_length": 50, "num_sink_tokens": 4})
    assert session.overflow == "sink"
    assert new_tokens(session.generate(prompts, max_new_tokens=24), 16) == expected
    first = session.generate(prompts, max_new_tokens=100)
    session.set_cache_implementation("Sink", window_length=20)
    assert new_tokens(session.generate(prompts, max_new_tokens=8), 16) == [row[:8] for row in expected]
    assert not torch.equal(session.generate(prompts, max_new_tokens=100), first)
    session.set_cache_implementation("shift")
    assert session.overflow == "error"
    assert new_tokens(session.generate(prompts, max_new_tokens=24), 16) == expected
    assert session.stats.compiles == compiles
    session.set_cache_implementation("none")
    assert session.stats.compiles == compiles + 1
    assert new_tokens(session.generate(prompts, max_new_tokens=24), 16) == expected
    session.set_cache_implementation("ring")
    session.set_cache_implementation("NONE")
    assert session.stats.compiles == compiles + 1


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("Sinks", {}, UnknownNameError, "unknown layout 'Sinks': expected one of ring, shift, sink, none, backwards"),
        ("static", {}, UnknownNameError, r"unknown layout 'static'.*\(every cache here is static, and layout 'ring'"),
        ("Dynamic", {}, UnknownNameError, r"unknown layout 'Dynamic'.*layout 'ring' gives the same tokens"),
        (None, {}, UnknownNameError, "unknown layout None"),
        ("sink", {"window_length": 64}, ValueError, "are 68 slots together, more than max_length=64; lower either"),
        ("sink", {"window": 8}, TypeError, "layout 'sink' cannot be made with window=8"),
        ("shift", {"window_length": 8}, TypeError, "layout 'shift' cannot be made with window_length=8"),
        ("strided", {"step": 8}, ValueError, "step is 8, expected no divisor of 64"),
    ],
)
def test_what_cannot_be_switched_to_leaves_the_session_as_it_was(tiny_llama, name, options, error, message):
    session = Session(tiny_llama, max_length=64, layout="shift", backend="eager")
    context, prompt = session._context, random_prompt(5)
    with pytest.raises(error, match=message):
        session.set_cache_implementation(name, **options)
    assert (session._context, session.layout, session.overflow) == (context, "shift", "error")
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) == [reference(tiny_llama, prompt, 8)]


def test_an_open_stream_keeps_its_layout(tiny_llama):
    session = Session(tiny_llama, max_length=64, backend="eager")
    prompt = random_prompt(5)
    stream = session.stream(prompt, max_new_tokens=8)
    tokens = [next(stream).item()]
    with pytest.raises(SessionBusyError):
        session.set_cache_implementation("sink")
    tokens += [token.item() for token in stream]
    assert tokens == reference(tiny_llama, prompt, 8)
    session.set_cache_implementation("sink")


@pytest.mark.parametrize("thing", [dict, object(), "ring"])
def test_what_is_no_layout_is_not_registered(thing):
    with pytest.raises(TypeError, match=r"expected a subclass of staticgen\.Layout"):
        staticgen.register_layout("thing", thing)
    with pytest.raises(ValueError, match="already taken"):
        staticgen.register_layout("RING", Backwards)


def ready(model, prompts, count):
    """What transformers caches of the first ``count`` columns of left-padded prompts."""
    ids, mask = left_padded(prompts)
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :count]
    with torch.no_grad():
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        model(ids[:, :count], attention_mask=mask[:, :count], position_ids=positions, **{name: cache})
    return ids, mask, cache


@pytest.mark.parametrize("model", [models.llama(), models.gpt2(), models.gemma3()], ids=["llama", "gpt2", "gemma3"])
def test_ready_keys_and_values_are_not_computed_again(model, backend, layout):
    prompts = [random_prompt(length) for length in (20, 6, 17)]
    expected = [reference(model, prompt, 16) for prompt in prompts]
    session = Session(model, max_length=48, batch_size=3, layout=layout, prefill_buckets=[4, 8], **backend)
    for count in (1, 8, 16, 19):
        ids, mask, cache = ready(model, prompts, count)
        kept = [layer.keys.clone() for layer in cache.layers]
        replays = session.stats.replays
        output = session.generate(ids, mask, max_new_tokens=16, past_key_values=cache)
        assert new_tokens(output, 20) == expected
        assert session.stats.replays - replays < 15 + -(-(20 - count) // 8) + 2
        assert all(torch.equal(a, layer.keys) for a, layer in zip(kept, cache.layers, strict=True))
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        assert torch.equal(session.generate(ids, mask, max_new_tokens=16, past_key_values=pairs), output)


def test_ready_keys_win_over_a_named_implementation(tiny_llama):
    prompt = random_prompt(12)
    ids, mask, cache = ready(tiny_llama, [prompt], 8)
    session = Session(tiny_llama, max_length=32, backend="eager")
    said = r"both cache_implementation='shift' and past_key_values are given: past_key_values wins.*layout 'ring'"
    for call in (session.generate, lambda *a, **k: staticgen.generate(tiny_llama, *a, backend="eager", **k)):
        with pytest.warns(UserWarning, match=said):
            output = call(ids, mask, max_new_tokens=8, past_key_values=cache, cache_implementation="shift")
        assert new_tokens(output, 12) == [reference(tiny_llama, prompt, 8)]


def test_an_implementation_named_in_a_call(tiny_llama):
    session = Session(tiny_llama, max_length=32, backend="eager")
    prompt = random_prompt(5)
    expected = [reference(tiny_llama, prompt, 8)]
    assert new_tokens(session.generate(prompt, max_new_tokens=8, cache_implementation="RING"), 5) == expected
    with pytest.raises(ValueError, match=r"keeps its tokens by layout 'ring': call .*\('shift'\) first"):
        session.generate(prompt, max_new_tokens=8, cache_implementation="shift")
    with pytest.raises(UnknownNameError, match="layout 'ring' gives the same tokens"):
        session.generate(prompt, cache_implementation="dynamic")
    output = staticgen.generate(tiny_llama, prompt, max_new_tokens=8, cache_implementation="None", backend="eager")
    assert new_tokens(output, 5) == expected
    with pytest.raises(ValueError, match="layout='ring' and cache_implementation='shift' differ"):
        staticgen.generate(tiny_llama, prompt, layout="ring", cache_implementation="shift", backend="eager")


def test_ready_keys_that_do_not_fit_are_refused(tiny_llama):
    prompt = random_prompt(12)
    ids, mask, cache = ready(tiny_llama, [prompt], 8)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    session = Session(tiny_llama, max_length=32, backend="eager")
    for past, error, message in [
        (pairs[:1], ValueError, "past_key_values has 1 layers, the model caches 2"),
        (
            [(k[:, :1], v) for k, v in pairs],
            ValueError,
            r"keys of layer 0 are \[1, 1, 8, 16\], expected \[1, 2, 8, 16\]",
        ),
        ([(k, v[:, :, :7]) for k, v in pairs], ValueError, r"values of layer 0 are \[1, 2, 7, 16\]"),
        ([(k.half(), v) for k, v in pairs], ValueError, "keys of layer 0 are torch.float16, expected torch.float32"),
        (5, TypeError, "past_key_values is a int"),
        ([1, 2], TypeError, "layer 0 must be a pair"),
        (DynamicCache(), ValueError, "past_key_values has 0 layers"),
        (ready(tiny_llama, [prompt], 12)[2], ValueError, "holds 12 tokens and ids has 12: .* at least one more"),
    ]:
        with pytest.raises(error, match=message):
            session.generate(ids, mask, max_new_tokens=8, past_key_values=past)
    assert session.stats.replays == 0
    session.set_cache_implementation("none")
    with pytest.raises(ValueError, match="layout 'none' keeps no keys and values"):
        session.generate(ids, mask, max_new_tokens=8, past_key_values=cache)
    session.set_cache_implementation("sink", window_length=2)
    with pytest.raises(ValueError, match="holds 8 tokens, more than the 6 that layout 'sink' keeps"):
        session.generate(ids, mask, max_new_tokens=8, past_key_values=cache)
