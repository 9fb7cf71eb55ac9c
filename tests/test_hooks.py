"""A caller's own processors, criteria and streamers, samples, and what comes back."""

import models
import pytest
import torch
import transformers as tf
from models import left_padded, new_tokens, random_prompt, reference
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from staticgen import Session


@pytest.fixture(scope="module")
def tokenizer():
    """Three special tokens and the 256 symbols of byte-level BPE, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    inner = Tokenizer(tokenizer_models.BPE(vocabulary, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


class Scripted(tf.LogitsProcessor):
    """Forces the next tokens of every row."""

    def __init__(self, rows, width):
        self.rows, self.width = rows, width

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        for row, script in enumerate(self.rows):
            forced[row, script[(input_ids.shape[1] - self.width) % len(script)]] = 0
        return forced


class Recorder(tf.LogitsProcessor):
    """Keeps what it is given, and bans in each row another id."""

    def __init__(self):
        self.seen, self.copies = [], []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids, scores))
        self.copies.append((input_ids.clone(), scores.clone()))
        banned = scores.clone()
        banned[torch.arange(len(scores)), 10 + torch.arange(len(scores))] = -torch.inf
        return banned


def test_a_processor_sees_each_step_once_and_may_keep_what_it_gets(tiny_llama, backend):
    """C40."""
    prompts = [random_prompt(3), random_prompt(9)]
    session = Session(tiny_llama, max_length=48, batch_size=3, **backend)
    for _ in range(2):
        recorder = Recorder()
        output = session.generate(prompts, max_new_tokens=12, logits_processor=[recorder])
        assert [tuple(ids.shape) for ids, _ in recorder.seen] == [(2, 9 + step) for step in range(12)]
        for (ids, scores), (ids_then, scores_then) in zip(recorder.seen, recorder.copies, strict=True):
            assert torch.equal(ids, ids_then)
            assert torch.equal(scores, scores_then)
            assert torch.equal(ids[:, 9:], output[:, 9 : ids.shape[1]])
            assert ids[0, :6].tolist() == [0] * 6  # padding, whatever stood there
        for row, prompt in enumerate(prompts):
            ban = tf.SuppressTokensLogitsProcessor([10 + row])
            expected = reference(tiny_llama, prompt, 12, logits_processor=tf.LogitsProcessorList([ban]))
            assert new_tokens(output, 9)[row] == expected


class Ends(tf.StoppingCriteria):
    """Ends each row when its newest token is even; remembers how it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(tuple(input_ids.shape))
        return input_ids[:, -1] % 2 == 0


def test_stopping_criteria_end_rows_one_by_one(tiny_llama, backend):
    prompts = [random_prompt(9, seed) for seed in range(3)]
    ids = torch.tensor(prompts)
    mine, theirs = Ends(), Ends()
    session = Session(tiny_llama, max_length=48, batch_size=3, **backend)
    output = session.generate(ids, max_new_tokens=12, pad_token_id=0, stopping_criteria=[mine])
    expected = tiny_llama.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0, do_sample=False,
        stopping_criteria=tf.StoppingCriteriaList([theirs]),
    )  # fmt: skip
    assert output.tolist() == expected.tolist()
    assert mine.calls == theirs.calls
    assert set(session.stats.last.finish_reasons) == {"stop"}
    assert session.generate(ids, max_new_tokens=5, max_time=1e-9).shape[1] == 10


@pytest.mark.parametrize(
    ("texts", "stops"),
    [
        (["ab 世界 more text", "nothing here at all"], ["世界"]),
        (["the brown fox jumps", "own foxes"], ["own fox"]),
        (["aaa x b x", "b b b b b b"], ["x"]),
        (["one two three", "two one two"], ["two", "wo"]),
    ],
)
def test_stop_strings_end_where_transformers_ends(tokenizer, texts, stops):
    """C43: at the token that completes a match, across characters that are several tokens."""
    try:
        tf.StopStringCriteria(tokenizer, stops)
    except ValueError as error:
        pytest.skip(f"transformers {tf.__version__} has no such stop string: {error}")
    model = models.llama(vocab_size=len(tokenizer))
    scripts = [tokenizer(text).input_ids for text in texts]
    prompts = [tokenizer("x two 世").input_ids, tokenizer("other").input_ids]
    ids, mask = left_padded(prompts)
    script = tf.LogitsProcessorList([Scripted(scripts, ids.shape[1])])
    # transformers fills rows that have ended only where there is an EOS; this one never comes.
    arguments = {
        "max_new_tokens": 24,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "stop_strings": stops,
        "tokenizer": tokenizer,
    }
    expected = model.generate(ids, attention_mask=mask, do_sample=False, logits_processor=script, **arguments)
    session = Session(model, max_length=64, batch_size=2, backend="eager")
    output = session.generate(ids, mask, logits_processor=script, **arguments)
    assert output.tolist() == expected.tolist()
    assert "stop" in session.stats.last.finish_reasons
    with pytest.raises(ValueError, match="stop_strings needs the model's tokenizer"):
        session.generate(ids, mask, max_new_tokens=4, stop_strings=stops)


class Keeper:
    """A streamer that remembers."""

    def __init__(self):
        self.put_, self.ended = [], False

    def put(self, value):
        self.put_.append(value)

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_prompt_and_every_token(tiny_llama, backend):
    session = Session(tiny_llama, max_length=48, **backend)
    prompt, keeper = random_prompt(5), Keeper()
    output = session.generate(prompt, max_new_tokens=8, streamer=keeper)
    assert keeper.ended
    assert keeper.put_[0].tolist() == [prompt]
    assert [value.item() for value in keeper.put_[1:]] == output[0, 5:].tolist()


@pytest.mark.parametrize("what", ["logits_processor", "stopping_criteria", "streamer"])
def test_an_exception_of_the_callers_object_leaves_the_session_usable(tiny_llama, backend, what):
    class Failing:
        def put(self, value):
            raise RuntimeError("by the caller")

        def end(self):
            pass

        def __call__(self, *args):
            raise RuntimeError("by the caller")

    session = Session(tiny_llama, max_length=48, **backend)
    prompt = random_prompt(5)
    with pytest.raises(RuntimeError, match="by the caller"):
        session.generate(prompt, max_new_tokens=8, **{what: Failing() if what == "streamer" else [Failing()]})
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) == [reference(tiny_llama, prompt, 8)]


def test_several_samples_come_from_one_prefill(tiny_llama, backend, layout):
    """C33."""
    prompts = [random_prompt(length) for length in (3, 9, 16)]
    session = Session(tiny_llama, max_length=48, batch_size=9, layout=layout, cache_sizes=[20], **backend)
    compiles = session.stats.compiles
    arguments = {"max_new_tokens": 12, "num_return_sequences": 3, "do_sample": True}
    output = session.generate(prompts, temperature=3.0, top_k=0, seed=1, **arguments)
    replays = session.stats.replays
    assert output.shape == (9, 28)
    for index, prompt in enumerate(prompts):
        rows = output[3 * index : 3 * index + 3]
        assert (rows[:, 16 - len(prompt) : 16] == torch.tensor(prompt)).all()
        assert len({str(row) for row in rows.tolist()}) == 3
    assert replays == 1 + 11  # one prefill of 16 tokens for all
    greedy = session.generate(prompts, top_k=1, **arguments)
    assert new_tokens(greedy, 16) == [reference(tiny_llama, prompt, 12) for prompt in prompts for _ in range(3)]
    assert session.stats.compiles == compiles
    with pytest.raises(ValueError, match=r"3 prompts with num_return_sequences=4, more than .* batch_size of 9"):
        session.generate(prompts, do_sample=True, num_return_sequences=4)


def test_scores_and_logits_come_when_asked_for(tiny_llama):
    prompt = torch.tensor([random_prompt(9), random_prompt(9, 1)])
    arguments = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    settings = {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3}
    session = Session(tiny_llama, max_length=48, batch_size=2, backend="eager")
    torch.manual_seed(0)
    output = session.generate(prompt, **settings, **arguments)
    torch.manual_seed(0)
    expected = tiny_llama.generate(
        prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings, **arguments
    )
    assert isinstance(output, type(expected))
    assert output.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(output.scores, expected.scores)
    torch.testing.assert_close(output.logits, expected.logits)
    kept = [step.clone() for step in output.logits]
    session.generate(prompt, **settings, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(kept, output.logits, strict=True))
    assert session.generate(prompt, max_new_tokens=2, return_dict_in_generate=True).scores is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits_processor": 3}, TypeError, "logits_processor has a int"),
        ({"stopping_criteria": [print, 3]}, TypeError, "stopping_criteria has a int"),
        ({"streamer": print}, TypeError, "streamer is a builtin_function_or_method"),
        ({"bad_words_ids": "x"}, ValueError, "decoding settings: .*bad_words_ids"),
        ({"suppress_tokens": "x"}, ValueError, "decoding settings"),
        ({"sequence_bias": {5: 1.0}}, ValueError, "decoding settings: .*sequence_bias"),
    ],
)
def test_objects_that_do_not_fit_are_refused(tiny_llama, arguments, error, message):
    session = Session(tiny_llama, max_length=48, backend="eager")
    with pytest.raises(error, match=message):
        session.generate(random_prompt(5), max_new_tokens=4, **arguments)
    assert session.stats.replays == 0
