"""Text longer than the cache: what each policy does, against references that share no code with it."""

import functools
import gc

import models
import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import new_tokens, random_prompt, reference
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import staticgen
from staticgen import Session, UnknownNameError, UnsupportedModelError

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def windowed(window, seed=0):
    """The tiny Llama's weights in a model whose layers see ``window`` positions."""
    config = tf.MistralConfig(**{**models.SIZES, "num_key_value_heads": 2, "sliding_window": window})
    model = tf.MistralForCausalLM(config).eval()
    model.load_state_dict(models.llama(seed).state_dict())
    return model


def last_window(model, prompt, count, window):
    """Greedy tokens when the last ``window`` tokens are run from scratch each time."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids[-window:]])).logits[0, -1].argmax().item())
    return ids[len(prompt) :]


def with_sinks(model, prompt, count, sinks, window):
    """:func:`_with_sinks`, once for all backends."""
    return _with_sinks(model, tuple(prompt), count, sinks, window)


@functools.cache
@torch.no_grad()
def _with_sinks(model, prompt, count, sinks, window):
    """Greedy tokens of a Llama that caches keys before they are rotated, and numbers them by their place."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    cache = [([], []) for _ in model.model.layers]
    ids, step = list(prompt), 0
    while len(ids) < len(prompt) + count:
        hidden = model.model.embed_tokens(torch.tensor([[ids[step]]]))
        for layer, (keys, values) in zip(model.model.layers, cache, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query = attention.q_proj(normed).view(1, 1, heads, -1).transpose(1, 2)
            if len(keys) == sinks + window:
                del keys[sinks], values[sinks]
            keys.append(attention.k_proj(normed).view(1, 1, kv_heads, -1).transpose(1, 2))
            values.append(attention.v_proj(normed).view(1, 1, kv_heads, -1).transpose(1, 2))
            cos, sin = model.model.rotary_emb(hidden, torch.arange(len(keys))[None])
            _, key = apply_rotary_pos_emb(torch.cat(keys, 2), torch.cat(keys, 2), cos, sin)
            query, _ = apply_rotary_pos_emb(query, query, cos[:, -1:], sin[:, -1:])
            key = key.repeat_interleave(heads // kv_heads, 1)
            value = torch.cat(values, 2).repeat_interleave(heads // kv_heads, 1)
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            hidden = hidden + attention.o_proj(output.transpose(1, 2).reshape(1, 1, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        step += 1
        if step == len(ids):
            ids.append(model.lm_head(model.model.norm(hidden))[0, -1].argmax().item())
    return ids[len(prompt) :]


LENGTHS = [(10,), (10, 15, 3), (23, 24, 25), (70, 40, 5)]


def test_slide_is_attention_of_that_width(tiny_llama, backend, layout):
    """C27: more than two full wraps, prompts shorter and longer than the cache, chunks across its end."""
    session = Session(
        tiny_llama, max_length=24, batch_size=3, layout=layout, overflow="slide", prefill_buckets=[8, 16], **backend
    )
    compiles = session.stats.compiles
    for lengths in LENGTHS:
        prompts = [random_prompt(length) for length in lengths]
        output = session.generate(prompts, max_new_tokens=60)
        assert new_tokens(output, max(lengths)) == [reference(windowed(24), prompt, 60) for prompt in prompts]
        assert session.stats.last.finish_reasons == ["length"] * len(prompts)
    assert session.stats.compiles == compiles


@settings(RELAXED, max_examples=20)
@given(
    prompts=st.lists(st.lists(st.integers(3, 127), min_size=1, max_size=40), min_size=1, max_size=3),
    window=st.integers(2, 16),
    buckets=st.sets(st.integers(1, 16), min_size=1, max_size=2),
    layout=st.sampled_from(["ring", "shift"]),
    sizes=st.sets(st.integers(1, 16), max_size=2),
)
def test_slide_with_any_sizes(prompts, window, buckets, layout, sizes):
    session = Session(
        models.llama(),
        max_length=window,
        batch_size=len(prompts),
        layout=layout,
        overflow="slide",
        prefill_buckets=[min(size, window) for size in buckets],
        cache_sizes=[min(size, window) for size in sizes],
        backend="eager",
    )
    output = session.generate(prompts, max_new_tokens=20)
    width = max(map(len, prompts))
    assert new_tokens(output, width) == [reference(windowed(window), prompt, 20) for prompt in prompts]


def test_sink_keeps_the_first_and_the_newest_tokens(tiny_llama, backend):
    """C28: keys re-rotated, and no position ever reaches the capacity; before it is full nothing differs."""
    session = Session(
        tiny_llama,
        max_length=20,
        batch_size=3,
        overflow="sink",
        layout_options={"num_sink_tokens": 2, "window_length": 12},
        prefill_buckets=[4, 8],
        **backend,
    )
    compiles, fed, run = session.stats.compiles, [], session._programs.run

    def spy(token_ids, position_ids, first_positions, cache):
        fed.append(int(position_ids.max()))
        assert int(cache.slot_positions[0].max()) < 14
        return run(token_ids, position_ids, first_positions, cache)

    session._programs.run = spy
    for lengths in [(10,), (10, 3, 14), (30, 5, 1), (13, 14, 15)]:
        prompts = [random_prompt(length) for length in lengths]
        output = session.generate(prompts, max_new_tokens=60)
        assert new_tokens(output, max(lengths)) == [with_sinks(tiny_llama, prompt, 60, 2, 12) for prompt in prompts]
    assert max(fed) == 13
    assert session.stats.compiles == compiles
    prompt = random_prompt(5)
    assert new_tokens(session.generate(prompt, max_new_tokens=10), 5) == [reference(tiny_llama, prompt, 10)]


@settings(RELAXED, max_examples=15)
@given(
    prompts=st.lists(st.lists(st.integers(3, 127), min_size=1, max_size=30), min_size=1, max_size=3),
    sinks=st.integers(0, 4),
    window=st.integers(1, 12),
    spare=st.integers(0, 3),
    bucket=st.integers(1, 8),
)
def test_sink_with_any_sizes(prompts, sinks, window, spare, bucket):
    length = max(2, sinks + window + spare)
    session = Session(
        models.llama(),
        max_length=length,
        batch_size=len(prompts),
        overflow="sink",
        layout_options={"num_sink_tokens": sinks, "window_length": window},
        prefill_buckets=[min(bucket, length)],
        backend="eager",
    )
    output = session.generate(prompts, max_new_tokens=16)
    width = max(map(len, prompts))
    assert new_tokens(output, width) == [with_sinks(models.llama(), prompt, 16, sinks, window) for prompt in prompts]


def test_sinks_of_layers_with_windows(backend):
    """The windows see the same distances at the lower positions; none of them reaches a sink."""
    model = models.gemma3()
    session = Session(model, max_length=40, overflow="sink", layout_options={"num_sink_tokens": 2}, **backend)
    prompt = random_prompt(9)
    output = new_tokens(session.generate(prompt, max_new_tokens=70), 9)[0]
    assert output[:31] == reference(model, prompt, 31)
    # Full layers see other tokens than with slide, sliding layers the same ones.
    slid = Session(model, max_length=40, overflow="slide", **backend)
    assert output != new_tokens(slid.generate(prompt, max_new_tokens=70), 9)[0]
    with pytest.raises(ValueError, match="window of 8 positions, which would see some of the 4 sinks"):
        Session(model, max_length=40, layout="sink", layout_options={"window_length": 5}, **backend)


def test_sixteen_bit_keys_are_not_rounded_at_every_turn():
    """A key is turned once per token; hundreds of roundings in bfloat16 would leave little of it."""
    session = Session(models.llama().bfloat16(), max_length=64, overflow="sink", backend="eager")
    for _ in session.stream(random_prompt(60), max_new_tokens=120):
        pass
    buffers = session._context._caches.current.buffers
    for keys, exact in zip(buffers.keys, next(iter(buffers._exact.values())), strict=True):
        torch.testing.assert_close(keys.float(), exact, atol=0, rtol=2**-8)


@pytest.mark.parametrize(
    "family",
    [models.gpt2(n_positions=32), models.opt(max_position_embeddings=32), models.llama()],
    ids=["gpt2", "opt", "llama"],
)
def test_none_and_slide_recompute_the_last_window(family, backend):
    """The way past the end of a table of learned positions."""
    session = Session(family, max_length=40, batch_size=3, layout="none", overflow="slide", cache_sizes=[16], **backend)
    window = session.max_length if session._step.position_limit is None else 32
    compiles = session.stats.compiles
    prompts = [random_prompt(length) for length in (5, 28, 60)]
    output = session.generate(prompts, max_new_tokens=60)
    assert new_tokens(output, 60) == [last_window(family, prompt, 60, window) for prompt in prompts]
    assert session.stats.compiles == compiles


def test_none_gives_the_tokens_of_a_cache(tiny_llama, backend):
    session = Session(tiny_llama, max_length=48, batch_size=3, layout="none", cache_sizes=[20], **backend)
    prompts = [random_prompt(length) for length in (3, 9, 16)]
    eos = reference(tiny_llama, prompts[0], 5)[-1]
    output = session.generate(prompts, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
    for row, prompt in zip(new_tokens(output, 16), prompts, strict=True):
        expected = reference(tiny_llama, prompt, 24, eos_token_id=eos)
        assert row == expected + [0] * (len(row) - len(expected))


def test_stop_ends_at_max_length(tiny_llama, backend, layout):
    session = Session(tiny_llama, max_length=24, layout=layout, overflow="stop", **backend)
    prompt = random_prompt(10)
    expected = [reference(tiny_llama, prompt, 14)]
    for lengths in ({"max_new_tokens": 500}, {"max_length": 500}, {}):
        assert new_tokens(session.generate(prompt, **lengths), 10) == expected
        assert session.stats.last.finish_reasons == ["length"]
    assert new_tokens(session.generate(prompt, max_new_tokens=3), 10) == [expected[0][:3]]
    with pytest.raises(ValueError, match="ids has 24 tokens"):
        session.generate(random_prompt(24))


def test_error_is_the_default_and_a_call_may_say_otherwise(tiny_llama, backend):
    session = Session(tiny_llama, max_length=24, **backend)
    prompt = random_prompt(10)
    before = session.stats.replays
    with pytest.raises(ValueError, match="more than max_length=24"):
        session.generate(prompt, max_new_tokens=60)
    assert session.stats.replays == before
    assert session.overflow == "error"
    assert session.generate(prompt, max_new_tokens=60, overflow="stop").shape == (1, 24)
    slid = session.generate(prompt, max_new_tokens=60, overflow="SLIDE")
    assert new_tokens(slid, 10) == [reference(windowed(24), prompt, 60)]
    streamed = list(session.stream(prompt, max_new_tokens=60, overflow="slide"))
    assert torch.stack(streamed, 1).tolist() == new_tokens(slid, 10)
    # What slid leaves no trace in the next call.
    assert new_tokens(session.generate(prompt, max_new_tokens=14), 10) == [reference(tiny_llama, prompt, 14)]


def test_lengths_of_an_endless_call(tiny_llama):
    session = Session(tiny_llama, max_length=24, overflow="slide", backend="eager")
    prompt = random_prompt(10)
    assert session.generate(prompt).shape == (1, 24)
    assert session.generate(prompt, max_length=40).shape == (1, 40)
    assert session.generate(prompt, max_length=40, max_new_tokens=50).shape == (1, 60)
    with pytest.raises(ValueError, match=r"ids has 30 tokens and max_length is 24, .* give max_new_tokens"):
        session.generate(random_prompt(30))


def test_generate_takes_a_policy(tiny_llama, backend):
    prompt = random_prompt(10)
    slid = staticgen.generate(tiny_llama, prompt, max_length=24, max_new_tokens=40, overflow="slide", **backend)
    assert new_tokens(slid, 10) == [reference(windowed(24), prompt, 40)]
    stopped = staticgen.generate(tiny_llama, prompt, max_length=24, max_new_tokens=40, overflow="stop", **backend)
    assert new_tokens(stopped, 10) == [reference(tiny_llama, prompt, 14)]
    sunk = staticgen.stream(
        tiny_llama,
        prompt,
        max_length=14,
        max_new_tokens=40,
        overflow="sink",
        layout_options={"num_sink_tokens": 2},
        **backend,
    )
    assert [token.item() for token in sunk] == with_sinks(tiny_llama, prompt, 40, 2, 12)
    learned = models.gpt2(n_positions=32)
    settings = {"layout": "none", "overflow": "slide", "max_new_tokens": 20}
    output = staticgen.generate(learned, random_prompt(40), max_length=32, **settings, **backend)
    assert new_tokens(output, 40) == [last_window(learned, random_prompt(40), 20, 32)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"overflow": "wrap"}, UnknownNameError, "unknown overflow 'wrap': expected one of error, stop, slide, sink"),
        ({"overflow": 3}, UnknownNameError, "unknown overflow 3"),
        ({"overflow": "sink", "layout": "ring"}, ValueError, "overflow='sink' is not for layout 'ring'.*layout='sink'"),
        ({"overflow": "slide", "layout": "sink"}, ValueError, "overflow='slide' is not for layout 'sink'.*'ring'"),
        ({"layout": "sink", "layout_options": {"sinks": 2}}, TypeError, "layout 'sink' cannot be made with sinks=2"),
        ({"layout": "ring", "layout_options": {"window_length": 2}}, TypeError, "'ring' cannot be made with window"),
    ],
)
def test_what_does_not_go_together_is_refused(tiny_llama, arguments, error, message):
    with pytest.raises(error, match=message):
        Session(tiny_llama, max_length=24, backend="eager", **arguments)


@pytest.mark.parametrize(
    "family", [models.gpt2(n_positions=32), models.opt(max_position_embeddings=32)], ids=["gpt2", "opt"]
)
def test_learned_positions_refuse_to_go_on_in_a_cache(family):
    kind = family.config.model_type
    with pytest.raises(ValueError, match=f"'{kind}' has 32 positions; use layout='none'"):
        Session(family, max_length=24, overflow="slide", backend="eager")
    session = Session(family, max_length=24, backend="eager")
    with pytest.raises(ValueError, match=f"'{kind}' has 32 positions; use layout='none'"):
        session.generate(random_prompt(5), max_new_tokens=40, overflow="slide")
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' cannot move its cached keys"):
        Session(family, max_length=24, overflow="sink", backend="eager")


def test_frequencies_that_change_with_length_stay_in_their_range():
    """C25, C26: with sinks positions stay in the trained range, so that text may go on for ever."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = models.llama(rope_parameters=rope, max_position_embeddings=24)
    plain = models.llama()
    session = Session(model, max_length=24, overflow="sink", backend="eager")
    prompt = random_prompt(5)
    assert new_tokens(session.generate(prompt, max_new_tokens=60), 5) == [with_sinks(plain, prompt, 60, 4, 20)]
    with pytest.raises(ValueError, match="'slide' lets positions go on"):
        session.set_cache_implementation("ring")
        session.generate(prompt, overflow="slide")
    with pytest.raises(ValueError, match=r"with 30 positions .* too long for model_type 'llama', which has 24"):
        Session(model, max_length=30, overflow="sink", backend="eager")


@pytest.mark.parametrize("policy", ["slide", "sink"])
def test_ten_thousand_tokens_through_a_small_cache(policy):
    """Flat memory, no recompile, and the last tokens are those of a reference that began shortly before them."""
    model = models.llama(num_hidden_layers=1)
    session = Session(model, max_length=256, overflow=policy, backend="openvino")
    compiles, size = session.stats.compiles, session.stats.cache_bytes
    prompt, tokens, objects = random_prompt(20), [], []
    for token in session.stream(prompt, max_new_tokens=10_000):
        tokens.append(token.item())
        if len(tokens) in (2_000, 10_000):
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert len(tokens) == 10_000
    assert session.stats.compiles == compiles
    assert session._context.nbytes == size
    assert objects[1] - objects[0] < 200
    # One layer looks at no more than the cache; so do these.
    if policy == "slide":
        for begin in (300, 5_000, 9_900):
            assert last_window(model, tokens[begin - 256 : begin], 1, 256) == [tokens[begin]]
    else:
        for begin in (300, 5_000, 9_900):
            seen = (prompt + tokens)[:4] + tokens[begin - 252 : begin]
            assert last_window(model, seen, 1, 256) == [tokens[begin]]


def test_the_reference_of_sliding_models_is_the_model_itself(backend):
    """A model whose layers all have windows forgets by itself; slide changes nothing and ends nowhere."""
    model = models.mistral()
    session = Session(model, max_length=16, overflow="slide", **backend)
    prompt = random_prompt(6)
    assert new_tokens(session.generate(prompt, max_new_tokens=60), 6) == [reference(model, prompt, 60)]
    assert session.stats.last.finish_reasons == ["length"]
