"""Layers that see a window of positions: its edge, prompts and chunks on either side of it, and its slots."""

import functools

import models
import pytest
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import new_tokens, random_prompt, reference

from staticgen import Session

WINDOW = 8


def gemma2():
    sizes = {**models.SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": WINDOW}
    return models._build(tf.Gemma2ForCausalLM, tf.Gemma2Config(**{**sizes, "tie_word_embeddings": False}))


def gpt_neo():
    config = tf.GPTNeoConfig(
        hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128, vocab_size=128, max_position_embeddings=256,
        attention_types=[[["global", "local"], 1]], window_size=WINDOW, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return models._build(tf.GPTNeoForCausalLM, config)


FAMILIES = {
    "mistral": models.mistral,
    "gemma2": gemma2,
    "gemma3": models.gemma3,
    "gpt-neo": gpt_neo,
    "gpt-oss": models.gpt_oss,
    "qwen2, one layer": lambda: models.qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
}
build = functools.cache(lambda family: FAMILIES[family]())


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return build(request.param)


@pytest.mark.parametrize("buckets", [[3], [8], [5, 21]], ids=["chunks below", "of the window", "and above it"])
def test_prompts_on_either_side_of_the_window(family, backend, layout, buckets):
    """C20 to C22, C29: one token off at the edge changes most of the tokens."""
    session = Session(family, max_length=48, batch_size=3, layout=layout, prefill_buckets=buckets, **backend)
    for lengths in [(WINDOW - 1, WINDOW, WINDOW + 1), (1, 2 * WINDOW, 30)]:
        prompts = [random_prompt(length) for length in lengths]
        output = session.generate(prompts, max_new_tokens=18)
        assert new_tokens(output, max(lengths)) == [reference(family, prompt, 18) for prompt in prompts]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(list(FAMILIES)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    buckets=st.sets(st.integers(1, 30), min_size=1, max_size=2),
    sizes=st.sets(st.integers(1, 40), max_size=2),
    layout=st.sampled_from(["ring", "shift", "sink", "none"]),
)
def test_any_lengths_chunks_and_cache_sizes(family, lengths, buckets, sizes, layout):
    model = build(family)
    if layout == "sink" and family == "gpt-neo":
        layout = "ring"  # learned positions
    prompts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    session = Session(
        model,
        max_length=max(lengths) + 12,
        batch_size=len(prompts),
        layout=layout,
        layout_options={"num_sink_tokens": 2} if layout == "sink" else {},
        prefill_buckets=[min(size, max(lengths) + 12) for size in buckets],
        cache_sizes=[min(size, max(lengths) + 12) for size in sizes],
        backend="eager",
    )
    output = session.generate(prompts, max_new_tokens=12)
    assert new_tokens(output, max(lengths)) == [reference(model, prompt, 12) for prompt in prompts]


def test_memory_follows_the_windows():
    one = 2 * 2 * 16 * 4  # bytes of a token in one layer
    assert Session(models.gemma3(), max_length=64, backend="eager").stats.cache_bytes == (5 * WINDOW + 64) * one
    assert Session(models.gemma3(), max_length=6, backend="eager").stats.cache_bytes == 6 * 6 * one
    mistral = Session(models.mistral(), max_length=4096, cache_sizes=[16, 64], backend="eager")
    assert mistral.stats.cache_bytes == 2 * WINDOW * one
    assert mistral.stats.compiles == len(mistral.prefill_buckets) + 1  # all sizes are the window's


def test_every_layer_has_its_window(family):
    """What transformers' own cache keeps of each layer after a long prompt."""
    import torch

    session = Session(family, max_length=64, backend="eager")
    windows = [layer.window for layer in session._step.cache_spec.layers]
    if family.config.model_type == "gpt_neo":  # its cache keeps all, and its mask forgets
        assert windows == [None, WINDOW]
        return
    with torch.no_grad():
        output = family(torch.tensor([random_prompt(30)]), use_cache=True)
    cache = getattr(output, "cache", None) or output.past_key_values
    kept = [layer.keys.shape[2] for layer in cache.layers]
    assert windows == [None if tokens == 30 else tokens + 1 for tokens in kept]
    assert WINDOW in windows
