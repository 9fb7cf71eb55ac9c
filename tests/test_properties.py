"""hypothesis draws models, batches, lengths, buckets and layouts; transformers is the judge."""

import functools

import models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import new_tokens, reference

from staticgen import Session


@functools.cache
def model(kind, seed):
    if kind == "gpt2":
        return models.gpt2()
    if kind == "mistral":
        return models.mistral(sliding_window=5)
    return models.llama(seed, num_key_value_heads={"mha": 4, "gqa": 2, "mqa": 1}[kind], tie_word_embeddings=seed == 1)


KINDS = st.sampled_from(["mha", "gqa", "mqa", "gpt2", "mistral"])
PROMPTS = st.lists(st.lists(st.integers(3, 127), min_size=1, max_size=40), min_size=1, max_size=4)
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(RELAXED, max_examples=60)
@given(
    kind=KINDS,
    seed=st.integers(0, 2),
    prompts=PROMPTS,
    count=st.integers(1, 20),
    room=st.integers(0, 9),
    spare_rows=st.integers(0, 2),
    buckets=st.sets(st.integers(1, 24), min_size=1, max_size=3),
    sizes=st.sets(st.integers(1, 60), max_size=3),
    layout=st.sampled_from(["ring", "shift"]),
)
def test_any_batch_equals_its_rows_alone(kind, seed, prompts, count, room, spare_rows, buckets, sizes, layout):
    width = max(map(len, prompts))
    length = width + count + room
    session = Session(
        model(kind, seed),
        max_length=length,
        batch_size=len(prompts) + spare_rows,
        backend="eager",
        layout=layout,
        prefill_buckets=[min(size, length) for size in buckets],
        cache_sizes=[min(size, length) for size in sizes],
    )
    output = session.generate(prompts, max_new_tokens=count)
    assert new_tokens(output, width) == [reference(model(kind, seed), prompt, count) for prompt in prompts]


@functools.cache
def compiled(kind, layout):
    return Session(
        model(kind, 0),
        max_length=64,
        batch_size=4,
        backend="openvino",
        layout=layout,
        prefill_buckets=[5, 24],
        cache_sizes=[16],
    )


@settings(RELAXED, max_examples=40)
@given(kind=KINDS, prompts=PROMPTS, count=st.integers(1, 24), layout=st.sampled_from(["ring", "shift"]))
def test_any_batch_on_a_compiled_session(kind, prompts, count, layout):
    """One session for all examples, so that whatever a call leaves behind shows in the next one."""
    session = compiled(kind, layout)
    output = session.generate(prompts, max_new_tokens=count)
    width = max(map(len, prompts))
    assert new_tokens(output, width) == [reference(model(kind, 0), prompt, count) for prompt in prompts]
