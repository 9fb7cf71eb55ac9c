"""Many prompts through few rows: every text is what its prompt alone gives."""

import models
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import random_prompt, reference

from staticgen import Session

LENGTHS = (3, 70, 1, 12, 20, 33, 7, 8, 9, 50, 5, 2)


@pytest.mark.parametrize("model", [models.llama(), models.gpt2(), models.gemma3()], ids=["llama", "gpt2", "gemma3"])
def test_rows_that_end_take_the_next_prompt(model, backend):
    """Very different lengths through four rows; the cache grows and shrinks, and nothing is compiled."""
    session = Session(model, max_length=96, batch_size=4, cache_sizes=[16, 40], prefill_buckets=[8, 32], **backend)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    eos = reference(model, prompts[0], 5)[-1]
    expected = [prompt + reference(model, prompt, 20, eos_token_id=eos) for prompt in prompts]
    for layout in ("ring", "shift", "none"):
        session.set_cache_implementation(layout)
        compiles = session.stats.compiles
        texts = session.generate_many(prompts, max_new_tokens=20, eos_token_id=eos)
        assert [text.tolist() for text in texts] == expected
        assert session.stats.compiles == compiles
        call = session.stats.last
        assert call.new_tokens == [len(text) - length for text, length in zip(expected, LENGTHS, strict=True)]
        assert call.finish_reasons == ["eos" if text[-1] == eos else "length" for text in expected]
        # Four rows are kept busy: fewer steps than batches of four would take.
        assert call.steps < sum(max(call.new_tokens[i : i + 4]) for i in range(0, 12, 4)) + 1
    # What was inserted leaves nothing behind.
    session.set_cache_implementation("ring")
    session.generate_many(prompts, max_new_tokens=20)
    output = session.generate(prompts[0], max_new_tokens=20)
    assert output[0].tolist() == prompts[0] + reference(model, prompts[0], 20)


SESSIONS = {}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(st.lists(st.integers(3, 127), min_size=1, max_size=40), max_size=7),
    rows=st.integers(1, 3),
    count=st.integers(1, 12),
    kind=st.sampled_from(["llama", "mistral"]),
)
def test_any_prompts(prompts, rows, count, kind):
    model = SESSIONS.setdefault(kind, models.llama() if kind == "llama" else models.mistral(sliding_window=5))
    if (kind, rows) not in SESSIONS:
        SESSIONS[kind, rows] = Session(
            model, max_length=52, batch_size=rows, cache_sizes=[9, 21], prefill_buckets=[3, 16], backend="eager"
        )
    texts = SESSIONS[kind, rows].generate_many(prompts, max_new_tokens=count)
    assert [text.tolist() for text in texts] == [prompt + reference(model, prompt, count) for prompt in prompts]


def test_a_seed_gives_each_prompt_what_it_gives_alone(tiny_llama):
    session = Session(tiny_llama, max_length=64, batch_size=2, backend="eager")
    prompts = [random_prompt(length) for length in (3, 9, 16)]
    arguments = {"do_sample": True, "temperature": 2.0, "seed": 5, "max_new_tokens": 12, "repetition_penalty": 1.2}
    texts = session.generate_many(prompts, **arguments)
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.tolist() == session.generate(prompt, **arguments)[0].tolist()


def test_a_bar_is_drawn_when_asked_for(tiny_llama, capsys):
    session = Session(tiny_llama, max_length=32, batch_size=2, backend="eager")
    session.generate_many([[5], [6], [7]], max_new_tokens=2)
    assert capsys.readouterr() == ("", "")
    session.generate_many([[5], [6], [7]], max_new_tokens=2, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[5], [], [6]], {}, r"prompts\[1\]: "),
        ([[5], [500]], {}, r"prompts\[1\]: ids\[0, 0\] is 500"),
        ([[5], list(range(3, 40))], {}, r"prompts\[1\]: ids has 37 tokens"),
        ([[5]], {"num_beams": 2}, "num_beams is 2: generate_many makes one text per prompt"),
        ([[5]], {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
        ([[5]], {"return_dict_in_generate": True}, "return_dict_in_generate is not for generate_many"),
        ([[[5], [6]]], {}, r"prompts\[0\] holds 2 prompts"),
        ([[5]], {"overflow": "slide"}, "overflow='slide' is not for generate_many"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(tiny_llama, prompts, arguments, message):
    session = Session(tiny_llama, max_length=32, batch_size=2, backend="eager")
    with pytest.raises(ValueError, match=message):
        session.generate_many(prompts, **arguments)
    assert session.stats.replays == 0
    session.set_cache_implementation("sink")
    with pytest.raises(ValueError, match="layout 'sink' cannot give one row another text"):
        session.generate_many([[5]])


def test_an_error_in_the_middle_leaves_the_session_usable(tiny_llama):
    session = Session(tiny_llama, max_length=32, batch_size=2, backend="eager")

    def failing(ids, scores):
        if ids.shape[1] == 7:
            raise RuntimeError("by the caller")
        return scores

    with pytest.raises(RuntimeError, match="by the caller"):
        session.generate_many([random_prompt(5), random_prompt(3)], max_new_tokens=8, logits_processor=[failing])
    prompt = random_prompt(5)
    assert session.generate(prompt, max_new_tokens=8)[0].tolist() == prompt + reference(tiny_llama, prompt, 8)
    assert session.generate_many([]) == []
    assert torch.is_tensor(session.generate_many([prompt], max_new_tokens=1)[0])
