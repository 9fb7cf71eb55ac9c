import models
import pytest
import torch
import transformers as tf
from transformers import LogitsProcessorList

from staticgen.decoding import read_decoding
from staticgen.sampling import GeneratedPenalty, Sampler

MODEL = models.llama()
ROWS = [torch.tensor([5, 6, 5, 7]), torch.tensor([7])]


def sampler(rows=ROWS, processors=(), **settings):
    return Sampler(read_decoding(MODEL, None, settings), rows, 8, processors)


def test_a_sampler_leaves_the_logits_alone():
    logits = torch.randn(2, 128)
    before = logits.clone()
    for settings in (
        {"repetition_penalty": 1.5, "do_sample": True},
        {"suppress_tokens": [5]},
        {"top_k": 3, "do_sample": True},
    ):
        chooser = sampler(**settings)
        chooser.choose(chooser.process(logits, None))
        assert torch.equal(logits, before)


CHAIN = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 9,
    "top_p": 0.95,
    "min_p": 0.02,
    "typical_p": 0.9,
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[9]],
    "sequence_bias": [[[11], 3.0]],
    "suppress_tokens": [12, 13],
}


@pytest.mark.parametrize("left_out", [None, *CHAIN])
def test_every_processor_of_a_chain_does_what_transformers_does(left_out):
    """The scores after transformers' own chain for a row alone, with one processor less each time."""
    settings = {name: value for name, value in CHAIN.items() if name != left_out or name == "do_sample"}
    logits = torch.randn(1, 128, generator=torch.Generator().manual_seed(3))
    found = sampler([ROWS[0]], **settings).process(logits, ROWS[0][None])
    config = tf.GenerationConfig(**{"top_k": 50, **settings})  # transformers' default
    MODEL._prepare_special_tokens(config, device="cpu")
    chain = MODEL._get_logits_processor(
        config, input_ids_seq_length=4, logits_processor=LogitsProcessorList(), device="cpu"
    )
    expected = chain(ROWS[0][None], logits.clone())
    torch.testing.assert_close(found, expected)
    assert torch.isinf(found).any()


def test_draws_follow_the_distribution():
    """A chi-square test against the probabilities that transformers' processors leave."""
    logits = torch.randn(1, 128, generator=torch.Generator().manual_seed(5))
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 12, "top_p": 0.97}
    chain = LogitsProcessorList([tf.TemperatureLogitsWarper(0.9), tf.TopKLogitsWarper(12), tf.TopPLogitsWarper(0.97)])
    probabilities = torch.softmax(chain(None, logits.clone()), -1)[0]
    draws = 20_000
    rows = [torch.tensor([5])] * draws
    chooser = sampler(rows, seed=11, **settings)
    counts = torch.bincount(chooser.choose(chooser.process(logits.expand(draws, -1), None)), minlength=128)
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * draws
    statistic = ((counts[kept] - expected) ** 2 / expected).sum().item()
    freedom = int(kept.sum()) - 1
    assert freedom >= 8
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations
    flat = torch.full_like(expected, draws / len(expected))
    assert ((counts[kept] - flat) ** 2 / flat).sum().item() > 1000  # and it would see another distribution


def test_frequency_and_presence_count_what_was_generated_only():
    scores = torch.zeros(1, 10)
    ids = torch.tensor([[3, 3, 5, 4, 5, 5]])
    penalised = GeneratedPenalty(prompt_length=2, frequency=0.5, presence=2.0)(ids, scores)
    assert penalised[0].tolist() == [0, 0, 0, 0, -2.5, -3.5, 0, 0, 0, 0]


def test_a_callers_processor_takes_the_place_of_one_of_its_kind():
    logits = torch.randn(2, 128)
    own = tf.TopKLogitsWarper(2)
    scores = sampler(processors=[own], do_sample=True, top_k=50).process(logits, torch.zeros(2, 4, dtype=torch.long))
    assert (torch.isfinite(scores).sum(1) == 2).all()
