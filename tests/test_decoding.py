import models
import pytest
import torch
import transformers as tf
from models import new_tokens, random_prompt, reference

from staticgen import Session
from staticgen.decoding import read_decoding


def with_config(**fields):
    model = models.llama()
    model.generation_config = tf.GenerationConfig(**fields)
    return model


def test_arguments_win_over_the_config_given_and_that_over_the_models_own():
    """C37."""
    model = with_config(do_sample=True, temperature=0.7, top_k=5, eos_token_id=7)
    own = read_decoding(model, None, {})
    assert (own.do_sample, own.temperature, own.top_k, own.eos_token_ids, own.pad_token_id) == (True, 0.7, 5, (7,), 7)
    given = read_decoding(model, tf.GenerationConfig(top_k=9), {"temperature": 2})
    assert (given.do_sample, given.temperature, given.top_k) == (True, 2, 9)
    assert read_decoding(model, None, {"do_sample": False}).do_sample is False
    assert read_decoding(model, None, {"top_k": 0}).top_k == 0
    assert read_decoding(model, None, {"eos_token_id": None}).eos_token_ids == ()


def test_unset_fields_have_transformers_defaults_and_none_turns_a_filter_off():
    unset = read_decoding(with_config(), None, {"do_sample": True})
    assert (unset.temperature, unset.top_k, unset.top_p, unset.min_p) == (1.0, 50, 1.0, None)
    assert read_decoding(with_config(), None, {"top_k": None}).top_k == 0


def test_greedy_wins_over_a_sampling_config():
    model = with_config(do_sample=True, temperature=0.7, top_k=5)
    prompt = random_prompt(6)
    session = Session(model, max_length=64, backend="eager")
    for _ in range(2):
        output = session.generate(prompt, do_sample=False, max_new_tokens=12)
        assert new_tokens(output, 6) == [reference(model, prompt, 12)]


def test_lengths_of_the_models_own_config_are_cut_to_the_session():
    model = with_config(max_new_tokens=5)
    session = Session(model, max_length=16, backend="eager")
    assert session.generate(random_prompt(4)).shape == (1, 9)
    assert session.generate(random_prompt(14)).shape == (1, 16)
    assert session.generate(random_prompt(4), max_length=14).shape == (1, 14)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 0},
        {"temperature": 0.7},
        {"temperature": 5.0, "top_k": 7},
        {"top_p": 0.8, "top_k": 0},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3, "temperature": 1.5},
        {"min_new_tokens": 6, "eos_token_id": list(range(40))},
        {"min_length": 12, "eos_token_id": list(range(40))},
        {"repetition_penalty": 1.3, "do_sample": False},
        {"typical_p": 0.6, "top_k": 0},
        {"epsilon_cutoff": 0.02, "top_k": 0},
        {"eta_cutoff": 0.05, "top_k": 0},
        {"top_h": 0.4, "top_k": 0},
        {"no_repeat_ngram_size": 2, "do_sample": False},
        {"bad_words_ids": [[7], [9, 12], [50, 51, 52]], "temperature": 3.0, "eos_token_id": 99},
        {"sequence_bias": [[[7], 8.0], [[9, 12], -9.0]]},
        {"suppress_tokens": list(range(20, 90)), "do_sample": False},
        {"begin_suppress_tokens": list(range(0, 100)), "do_sample": False},
        {"forced_eos_token_id": 5, "eos_token_id": 5},
        {"exponential_decay_length_penalty": (4, 1.8), "eos_token_id": 77, "do_sample": False},
        {"renormalize_logits": True, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4},
        {"remove_invalid_values": True},
    ],
    ids=str,
)
def test_draws_equal_transformers_from_the_same_global_seed(settings, backend):
    model = models.llama(seed=2, initializer_range=0.1)  # repeats itself, so that penalties matter
    prompts = torch.tensor([random_prompt(6), random_prompt(6, seed=1)])
    arguments = {"do_sample": True, "max_new_tokens": 20, **settings}
    torch.manual_seed(7)
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **arguments)
    session = Session(model, max_length=64, batch_size=2, **backend)
    torch.manual_seed(7)
    assert session.generate(prompts, **arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("pad", range(3, 128, 25))
def test_penalties_never_count_padding(pad):
    """C30: each row equals its solo run, whatever the pad id."""
    model = models.llama(seed=2, initializer_range=0.1)
    prompts = [random_prompt(5), random_prompt(16)]
    ids, mask = models.left_padded(prompts, pad=pad)
    session = Session(model, max_length=64, batch_size=2, backend="eager")
    output = session.generate(ids, mask, pad_token_id=pad, repetition_penalty=1.3, max_new_tokens=16)
    expected = [reference(model, prompt, 16, repetition_penalty=1.3) for prompt in prompts]
    assert expected != [reference(model, prompt, 16) for prompt in prompts]
    assert new_tokens(output, 16) == expected


def test_a_seed_repeats_exactly_and_leaves_the_global_generator_alone(tiny_llama):
    """C34."""
    session = Session(tiny_llama, max_length=64, backend="eager")
    settings = {"do_sample": True, "temperature": 5.0, "top_k": 0, "max_new_tokens": 32}
    prompt, state = random_prompt(5), torch.get_rng_state()
    first, again = (session.generate(prompt, seed=7, **settings).tolist() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    other = session.generate(prompt, seed=8, **settings).tolist()
    free, freely = (session.generate(prompt, **settings).tolist() for _ in range(2))
    assert first == again
    assert len({str(tokens) for tokens in (first, other, free, freely)}) == 4
    assert len(set(first[0][5:])) > 10


@pytest.mark.parametrize(
    "settings", [{"temperature": 1e-6}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}]
)
def test_sampling_at_its_narrowest_is_greedy(tiny_llama, settings):
    """C31, C32."""
    session = Session(tiny_llama, max_length=64, backend="eager")
    prompt = random_prompt(5)
    output = session.generate(prompt, do_sample=True, max_new_tokens=12, **{"top_k": 0, **settings})
    assert new_tokens(output, 5) == [reference(tiny_llama, prompt, 12)]


def test_top_k_above_the_vocabulary_filters_nothing(tiny_llama):
    session = Session(tiny_llama, max_length=64, backend="eager")
    outputs = [
        session.generate(random_prompt(5), do_sample=True, top_k=k, seed=1, max_new_tokens=20).tolist()
        for k in (0, 128, 129, 10**6)
    ]
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"do_sample": True, "temperature": 0.0}, "temperature is 0.0, expected a number above 0"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "min_p": 1.5}, "min_p is 1.5"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"num_beam_groups": 3}, "num_beam_groups=3 is not supported.*num_beam_groups=1"),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6 is not supported"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"output_scores": True}, "output_scores=True needs return_dict_in_generate=True"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2, but greedy decoding has one result"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3, expected at most num_beams=2"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"stop_strings": [""]}, r"stop_strings is \[''\], expected a string or a list of strings, none of them empty"),
        ({"stop_strings": 3}, "stop_strings is 3"),
        ({"frequency_penalty": 11}, "frequency_penalty is 11"),
        ({"presence_penalty": "much"}, "presence_penalty is 'much'"),
        ({"typical_p": 0, "do_sample": True}, "typical_p is 0"),
        ({"max_time": -1}, "max_time is -1"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"seed": 2**70}, "seed is"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments, words):
    """C31, C32, C41."""
    with pytest.raises(ValueError, match=words):
        read_decoding(models.llama(), None, arguments)
    if len(arguments) == 1 and "seed" not in arguments:  # in a config it is refused just the same
        name, value = next(iter(arguments.items()))
        config = tf.GenerationConfig()
        setattr(config, name, value)
        with pytest.raises(ValueError, match=words):
            read_decoding(models.llama(), config, {})


def test_an_unknown_argument_lists_the_known_ones():
    for name in ("tempreature", "assistant_model"):
        with pytest.raises(TypeError, match=rf"unknown argument '{name}'; .*max_new_tokens.*temperature"):
            read_decoding(models.llama(), None, {name: 1})
    with pytest.raises(TypeError, match="generation_config must be"):
        read_decoding(models.llama(), {"top_k": 3}, {})
