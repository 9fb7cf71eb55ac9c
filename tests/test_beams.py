"""Beam search against transformers' own, from each prompt alone."""

import models
import pytest
import torch
import transformers as tf
from models import random_prompt

from staticgen import Session, generate


def expected(model, prompt, **arguments):
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False, "max_new_tokens": 14}
    return model.generate(ids, **{**given, **arguments})


SETTINGS = [
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 3, "eos_token_id": list(range(40, 60)), "length_penalty": 2.0},
    {"num_beams": 3, "eos_token_id": list(range(40, 60)), "early_stopping": True, "length_penalty": -1.0},
    {"num_beams": 2, "eos_token_id": 7, "early_stopping": "never", "min_new_tokens": 5},
    {"num_beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("arguments", SETTINGS, ids=str)
def test_beams_equal_transformers(tiny_llama, backend, arguments):
    session = Session(tiny_llama, max_length=48, batch_size=5, **backend)
    compiles = session.stats.compiles
    for length in (1, 9, 20):
        prompt = random_prompt(length)
        output = session.generate(prompt, max_new_tokens=14, pad_token_id=0, do_sample=False, **arguments)
        assert output.tolist() == expected(tiny_llama, prompt, **arguments).tolist()
    assert session.stats.compiles == compiles


@pytest.mark.parametrize("layout", ["ring", "shift", "none", "sink"])
@pytest.mark.parametrize("model", [models.llama(), models.gemma3()], ids=["llama", "gemma3"])
def test_every_layout_reorders_its_rows(model, layout):
    session = Session(
        model, max_length=48, batch_size=4, layout=layout, cache_sizes=[16], overflow="error", backend="eager"
    )
    for length in (3, 15):
        output = session.generate(random_prompt(length), num_beams=4, max_new_tokens=14)
        assert output.tolist() == expected(model, random_prompt(length), num_beams=4).tolist()


def test_scores_come_with_the_sequences(tiny_llama):
    session = Session(tiny_llama, max_length=48, batch_size=3, backend="eager")
    arguments = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    prompt = random_prompt(9)
    output, right = session.generate(prompt, max_new_tokens=14, **arguments), expected(tiny_llama, prompt, **arguments)
    assert isinstance(output, type(right))
    assert output.sequences.tolist() == right.sequences.tolist()
    torch.testing.assert_close(output.sequences_scores, right.sequences_scores)
    torch.testing.assert_close(output.scores, right.scores)
    torch.testing.assert_close(output.logits, right.logits)
    assert output.beam_indices.tolist() == right.beam_indices.tolist()


def test_sampled_beams_and_processors_of_the_caller(tiny_llama):
    prompt, state = random_prompt(9), torch.get_rng_state()
    session = Session(tiny_llama, max_length=48, batch_size=3, backend="eager")
    arguments = {"num_beams": 3, "do_sample": True, "temperature": 1.5}
    output = session.generate(prompt, max_new_tokens=14, seed=3, **arguments)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert output.tolist() == expected(tiny_llama, prompt, **arguments).tolist()
    custom = tf.LogitsProcessorList([tf.SuppressTokensLogitsProcessor(list(range(60)))])
    output = session.generate(prompt, num_beams=3, max_new_tokens=14, logits_processor=custom)
    assert output.tolist() == expected(tiny_llama, prompt, num_beams=3, logits_processor=custom).tolist()
    assert int(output[0, 9:].min()) >= 60


def test_a_batch_is_searched_prompt_by_prompt(tiny_llama, backend):
    """So that no prompt's padding, or its neighbours' end, changes its beams."""
    prompts = [random_prompt(length) for length in (3, 9, 16)]
    eos = list(range(40, 50))
    output = generate(
        tiny_llama,
        prompts,
        num_beams=3,
        num_return_sequences=2,
        eos_token_id=eos,
        pad_token_id=0,
        max_new_tokens=14,
        **backend,
    )
    assert output.shape[0] == 6
    for index, prompt in enumerate(prompts):
        right = expected(tiny_llama, prompt, num_beams=3, num_return_sequences=2, eos_token_id=eos)[:, len(prompt) :]
        new = output[2 * index : 2 * index + 2, 16:]
        assert new[:, : right.shape[1]].tolist() == right.tolist()
        assert not new[:, right.shape[1] :].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 5}, "num_beams is 5, more than the session's batch_size of 4"),
        ({"num_beams": 2, "overflow": "slide"}, "num_beams above 1 does not go with overflow='slide'"),
        ({"num_beams": 2, "max_new_tokens": 99}, "more than max_length=48"),
    ],
)
def test_what_beams_cannot_do_is_refused(tiny_llama, arguments, message):
    session = Session(tiny_llama, max_length=48, batch_size=4, backend="eager")
    with pytest.raises(ValueError, match=message):
        session.generate(random_prompt(5), **arguments)
    with pytest.raises(ValueError, match="num_beams is 2, but a stream yields tokens as they come"):
        session.stream(random_prompt(5), num_beams=2)
    assert session.stats.replays == 0
