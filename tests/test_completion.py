"""Text to text, against what transformers generates and decodes: C39, C42, C43, C45, C46, C47."""

import threading

import models
import pytest
import texts
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    SuppressTokensLogitsProcessor,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import staticgen
from staticgen.text import encode_prompt

CHAT = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def tokenizer():
    return texts.byte_level()


@pytest.fixture(scope="module")
def model():
    return models.llama(vocab_size=259, eos_token_id=2)


@pytest.fixture(scope="module", params=["eager", "openvino"])
def complete(request, model, tokenizer):
    return staticgen.completion(model, tokenizer, backend=request.param, max_length=64, batch_size=2, max_tokens=12)


@pytest.fixture(scope="module")
def eager(model, tokenizer):
    return staticgen.completion(model, tokenizer, backend="eager", max_length=64, batch_size=2, max_tokens=12)


def expected(model, tokenizer, prompt, new_tokens=12):
    """What transformers says to one prompt."""
    new = models.reference(model, encode_prompt(tokenizer, prompt), new_tokens)
    return tokenizer.decode(new, skip_special_tokens=True)


def saying(tokenizer, text, prompt="x", eos=True, **arguments):
    """A completion that answers ``prompt``, and all others of its length, with ``text``."""
    ids = tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else text
    ids = [*ids, tokenizer.eos_token_id] if eos else ids
    options = {"vocab_size": arguments.pop("vocab_size", len(tokenizer)), "eos_token_id": tokenizer.eos_token_id}
    model = texts.scripted({len(encode_prompt(tokenizer, prompt)): ids}, **options)
    return staticgen.completion(model, tokenizer, backend="eager", **arguments)


def test_a_string_gives_a_string_and_a_list_a_list(complete, model, tokenizer):
    """More prompts than rows run in turns, and give what each gives alone."""
    prompts = ["hello", "a much longer prompt", "x", "", "zwölf"]
    wanted = [expected(model, tokenizer, prompt) for prompt in prompts]
    assert len(set(wanted)) == len(wanted)
    assert [complete(prompt) for prompt in prompts] == wanted
    assert complete(prompts) == wanted
    assert complete(tuple(prompts[:1])) == wanted[:1]
    assert complete([]) == []


def test_completing_a_completion(complete, model, tokenizer):
    first = complete("say something")
    assert complete(first, max_tokens=6) == expected(model, tokenizer, first, 6)
    assert complete(complete(["a", "b"], max_tokens=5)) == [complete(complete(p, max_tokens=5)) for p in ("a", "b")]


def test_a_streamed_text_is_the_one_that_is_returned(complete):
    for prompt in ("hello", CHAT):
        chunks = list(complete.stream(prompt))
        assert "".join(chunks) == complete(prompt)
        assert all(chunks)


def test_chats(complete, model, tokenizer):
    """C47."""
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert encode_prompt(tokenizer, CHAT) == encode_prompt(tokenizer, rendered) == ids
    wanted = expected(model, tokenizer, CHAT)
    assert complete(CHAT) == complete(rendered) == wanted
    other = [*CHAT, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}]
    assert complete([CHAT, other, "hello"]) == [wanted, complete(other), complete("hello")]
    assert complete([CHAT]) == [wanted]


def test_what_is_given_for_one_call_wins(model, tokenizer):
    complete = staticgen.completion(
        model, tokenizer, backend="eager", max_length=40, max_tokens=3, stop=["q"], do_sample=True, seed=1
    )
    greedy = expected(model, tokenizer, "hello", 20)
    assert complete("hello") != greedy[:3]
    assert complete("hello", do_sample=False, max_tokens=20, stop=None) == greedy
    assert complete("hello", do_sample=False, max_new_tokens=20, stop=greedy[-3:]) in greedy[:-3]
    # a length of the call replaces the max_tokens of the completion
    (result,) = next(complete.results(["hello"], max_length=9, do_sample=False, stop=None))
    assert (result.prompt_tokens, result.new_tokens, result.finish_reason) == (6, 3, "length")
    assert complete("hello", do_sample=False, max_tokens=None, stop=None) == expected(model, tokenizer, "hello", 34)


def test_samples(eager):
    settings = {"do_sample": True, "temperature": 3.0, "seed": 5}
    several = eager("hello", samples=5, **settings)
    assert several == eager("hello", samples=5, **settings)
    assert len(set(several)) == 5  # rows and turns of one seed differ
    assert several != eager("hello", samples=5, **{**settings, "seed": 4})
    both = eager(["hello", CHAT], samples=2, **settings)
    assert [len(one) for one in both] == [2, 2]
    assert eager("hello", samples=1) == [eager("hello")]
    results = list(eager.results(["hello", "x"], samples=3, **settings))
    assert [[type(one) for one in row] for row in results] == [[staticgen.Completed] * 3] * 2


def test_two_samples_in_one_turn_are_those_of_the_session(eager, tokenizer):
    ids = encode_prompt(tokenizer, "hello")
    tokens = eager.session.generate([ids, ids], do_sample=True, seed=3, max_new_tokens=8)[:, len(ids) :]
    wanted = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens.tolist()]
    assert eager("hello", samples=2, do_sample=True, seed=3, max_tokens=8) == wanted


def test_beams(model, tokenizer):
    complete = staticgen.completion(model, tokenizer, backend="eager", max_length=64, max_tokens=8, num_beams=3)
    assert complete.session.batch_size == 3
    ids = torch.tensor([encode_prompt(tokenizer, "hello")])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8, "num_beams": 3}
    new = model.generate(ids, num_return_sequences=2, **settings)[:, ids.shape[1] :]
    best, second = (tokenizer.decode(row, skip_special_tokens=True) for row in new)
    assert complete("hello") == best != expected(model, tokenizer, "hello", 8)
    assert list(complete.stream("hello")) == [best]
    assert complete(["hello"], samples=2) == [[best, second]]
    assert complete("hello", stop=best[3:5]) == best[: best.index(best[3:5])]
    assert complete("hello", num_beams=1) == expected(model, tokenizer, "hello", 8)
    with pytest.raises(ValueError, match=r"^streamer takes one text as it comes, .* num_beams=3"):
        complete("hello", streamer=Recorder())
    with pytest.raises(ValueError, match=r"num_return_sequences is 4"):
        complete("hello", samples=4)


def test_beams_end_at_eos(tokenizer):
    complete = saying(tokenizer, "abc", num_beams=2, max_tokens=20)
    ((result,),) = complete.results(["x"])
    assert result == staticgen.Completed("abc", 2, 4, "eos")


def test_prefixes(eager, model, tokenizer):
    """What a session takes for a call, a completion takes too."""
    prompts = ["hello world", "hello there"]
    prefix = eager.session.prefix(encode_prompt(tokenizer, "hello "))
    wanted = [expected(model, tokenizer, prompt) for prompt in prompts]
    assert eager(prompts, prefix=prefix) == wanted
    assert eager.session.stats.last.reused_tokens == 2 * 7
    cached = staticgen.completion(model, tokenizer, backend="eager", max_length=64, max_tokens=12, prefix_cache=1 << 20)
    assert [cached(prompt) for prompt in prompts] == wanted
    assert cached.session.stats.last.reused_tokens == 7


TEXT = "ab 世界 é 🙂 end"


@pytest.mark.parametrize("make", [texts.byte_level, texts.unigram], ids=["byte-level", "byte fallback"])
def test_no_half_character_is_streamed(make):
    """C42."""
    complete = saying(make(), TEXT)
    chunks = list(complete.stream("x"))
    assert "".join(chunks) == complete("x") == TEXT
    assert not any("\ufffd" in chunk for chunk in chunks)
    assert len(chunks) > 5
    assert next(complete.results(["x"]))[0].finish_reason == "eos"


@pytest.mark.parametrize("new_tokens", [4, 5, 12, 14, 15])
def test_a_text_that_is_cut_within_a_character(tokenizer, new_tokens):
    """C42."""
    complete = saying(tokenizer, TEXT, max_tokens=new_tokens)
    wanted = tokenizer.decode(tokenizer(TEXT, add_special_tokens=False).input_ids[:new_tokens])
    *chunks, last = complete.stream("x")
    assert "".join(chunks) + last == complete("x") == wanted
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_an_id_that_the_tokenizer_does_not_have(tokenizer):
    """C39: the model's last layer is wider than the tokenizer."""
    a, b = tokenizer("ab", add_special_tokens=False).input_ids
    complete = saying(tokenizer, [a, len(tokenizer) + 5, b], vocab_size=len(tokenizer) + 61)
    assert complete("x") == "".join(complete.stream("x")) == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "wanted", "new_tokens"),
    [
        ("ab 世界 more", ["世界"], "ab ", 9),
        ("the brown fox jumps", ["own fox"], "the br", 13),
        ("aaa x b", ["x"], "aaa ", 5),
        ("say abc", ["bc", "abc"], "say ", 7),
        ("say abc", "nothing", "say abc", 8),
        ("say abc", "abcd", "say abc", 8),
    ],
)
def test_stop_strings(tokenizer, text, stop, wanted, new_tokens):
    """C43; the prompt is x, which is no match."""
    complete = saying(tokenizer, text)
    assert complete("x", stop=stop) == "".join(complete.stream("x", stop=stop)) == wanted
    ((result,),) = complete.results(["x"], stop=stop)
    reason = "eos" if wanted == text else "stop"
    assert result == staticgen.Completed(wanted, 2, new_tokens, reason)
    assert complete.session.stats.last.finish_reasons == [reason]
    assert complete.session.stats.last.steps == new_tokens - 1  # no step after the end


def test_one_row_of_a_batch_stops(tokenizer):
    """C43: the other goes on to its own end, and nothing runs beyond it."""
    scripts = {
        2: [*encode_prompt(tokenizer, "ab END cd")[1:], 2],
        101: [*encode_prompt(tokenizer, "0123456789")[1:], 2],
    }
    model = texts.scripted(scripts, eos_token_id=2)
    complete = staticgen.completion(model, tokenizer, backend="eager", batch_size=2, max_length=200, stop=["END"])
    prompts = ["x", "y" * 100]
    assert complete(prompts) == ["ab ", "0123456789"]
    assert complete.session.stats.last.steps == 10
    first, second = complete.results(prompts)
    assert (first[0].new_tokens, first[0].finish_reason) == (6, "stop")
    assert (second[0].new_tokens, second[0].finish_reason) == (11, "eos")
    assert complete(prompts, stop=["END", "3"]) == ["ab ", "012"]
    assert complete.session.stats.last.steps == 5


def test_a_row_that_stopped_asks_nothing_of_a_mask(tokenizer):
    """A pattern may leave it no token after the stop string, while the other row goes on."""
    scripts = {2: encode_prompt(tokenizer, "ab")[1:], 101: encode_prompt(tokenizer, "cdefgh")[1:]}
    complete = staticgen.completion(
        texts.scripted(scripts), tokenizer, backend="eager", batch_size=2, max_length=200, max_tokens=6
    )

    def nothing_in_row_0_after_two(history):
        mask = torch.ones(2, 259, dtype=torch.bool)
        mask[0] = history.shape[1] < 101 + 2
        return mask

    prompts = ["x", "y" * 100]
    assert complete(prompts, token_mask=nothing_in_row_0_after_two, stop=["b"]) == ["a", "cdefgh"]
    with pytest.raises(staticgen.NothingAllowedError, match="row 0 at step 2"):
        complete(prompts, token_mask=nothing_in_row_0_after_two)


class Recorder(BaseStreamer):
    """What a streamer is told."""

    def __init__(self, fail_at=None):
        self.calls, self._fail_at = [], fail_at

    def put(self, value):
        self.calls.append((tuple(value.shape), value.flatten().tolist()))
        if len(self.calls) == self._fail_at:
            raise RuntimeError("the callback is broken")

    def end(self):
        self.calls.append("end")


def test_a_streamer_is_told_what_transformers_tells_it(complete, model, tokenizer):
    theirs, ours = Recorder(), Recorder()
    ids = torch.tensor([encode_prompt(tokenizer, "hello")])
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, streamer=theirs)
    assert complete("hello", streamer=ours) == complete("hello")
    assert ours.calls == theirs.calls
    assert len(ours.calls) == 14


def test_text_streamer(tokenizer, capsys):
    complete = saying(tokenizer, TEXT)
    complete("x", streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    assert capsys.readouterr().out == TEXT + "\n"


def run_in_thread(complete, tokenizer, *arguments, **options):
    """What a consumer gets from TextIteratorStreamer, and what the thread raised or returned."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5, skip_special_tokens=True)
    outcome = []

    def work():
        try:
            outcome.append(complete(*arguments, streamer=streamer, **options))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join(5)
    assert not thread.is_alive()
    return text, outcome[0]


def test_text_iterator_streamer_in_a_thread(tokenizer):
    complete = saying(tokenizer, TEXT)
    assert run_in_thread(complete, tokenizer, "x") == (TEXT, TEXT)


@pytest.mark.parametrize(
    ("prompt", "options"), [("y" * 100, {}), ("x", {"temprature": 1}), (5, {}), (["x", "y"], {}), ("x", {"stop": ""})]
)
def test_a_consumer_does_not_wait_for_a_call_that_failed(eager, tokenizer, prompt, options):
    """C45."""
    text, error = run_in_thread(eager, tokenizer, prompt, **options)
    assert text == ""
    assert isinstance(error, (ValueError, TypeError))


def test_a_streamer_that_fails_ends_the_call(eager, model, tokenizer):
    """C45: the error reaches the caller, and the session serves the next call."""
    threads = threading.active_count()
    broken = Recorder(fail_at=4)
    with pytest.raises(RuntimeError, match="the callback is broken"):
        eager("hello", streamer=broken)
    assert broken.calls[-1] == "end"
    assert eager("hello") == expected(model, tokenizer, "hello")
    assert threading.active_count() == threads


class Failing(LogitsProcessor):
    """Raises at its third step."""

    def __init__(self):
        self.steps = 0

    def __call__(self, input_ids, scores):
        self.steps += 1
        if self.steps == 3:
            raise ArithmeticError("the processor is broken")
        return scores


def test_a_processor_that_fails_in_the_middle(eager, model, tokenizer):
    """C45: whoever reads the stream gets the very error, in this thread or through a streamer in another."""
    threads = threading.active_count()
    chunks = []
    with pytest.raises(ArithmeticError, match="the processor is broken"):
        for chunk in eager.stream("hello", logits_processor=[Failing()]):
            chunks.append(chunk)
    assert eager("hello").startswith("".join(chunks))
    text, error = run_in_thread(eager, tokenizer, "hello", logits_processor=[Failing()])
    assert isinstance(error, ArithmeticError)
    assert text == tokenizer.decode(models.reference(model, encode_prompt(tokenizer, "hello"), 2))
    assert eager("hello") == expected(model, tokenizer, "hello")
    assert threading.active_count() == threads


def test_a_criterion_of_the_caller_and_processors(eager, model, tokenizer):
    """They are the session's, and see one row each."""
    limit = len(encode_prompt(tokenizer, "hello")) + 4
    (result,) = next(eager.results(["hello"], stopping_criteria=[MaxLengthCriteria(limit)]))
    assert (result.new_tokens, result.finish_reason) == (4, "stop")
    banned = models.reference(model, encode_prompt(tokenizer, "hello"), 1)[0]
    processor = SuppressTokensLogitsProcessor([banned])
    wanted = models.reference(model, encode_prompt(tokenizer, "hello"), 12, suppress_tokens=[banned])
    wanted = tokenizer.decode(wanted, skip_special_tokens=True)
    assert eager("hello", logits_processor=[processor]) == eager("hello", suppress_tokens=[banned]) == wanted


def test_an_open_stream_holds_the_session_until_it_is_closed(eager):
    stream = eager.stream("hello")
    next(stream)
    with pytest.raises(staticgen.SessionBusyError):
        eager("x")
    stream.close()
    assert eager("x")
    for _ in eager.stream("hello"):
        break
    assert eager("x")


@pytest.mark.parametrize(
    ("prompt", "arguments", "error", "words"),
    [
        (["x", "y"], {}, ValueError, "stream makes one text"),
        ("x", {"samples": 2, "do_sample": True}, ValueError, "stream makes one text"),
        ("x", {"stop": ["a", ""]}, ValueError, "^stop is "),
        ("x", {"stop": 5}, ValueError, "^stop is 5"),
        ("x", {"samples": 0}, ValueError, "^samples is 0"),
        ("x", {"num_return_sequences": 2}, ValueError, "called samples here"),
        ("x", {"max_tokens": 2, "max_new_tokens": 2}, ValueError, "max_tokens and max_new_tokens"),
        ("x", {"max_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ("x", {"temprature": 2}, TypeError, "temprature"),
        ("x", {"backend": "openvino"}, TypeError, "^backend belongs to the session"),
        ("y" * 70, {}, ValueError, "71 tokens"),
        (5, {}, TypeError, "^prompt is a int"),
        (["x", 5], {}, TypeError, r"^prompt\[1\] is 5"),
        ([{"content": "x"}], {}, TypeError, r"^prompt\[0\] is "),
        ([[{"content": "x"}]], {}, TypeError, r"^prompt\[0\] is "),
        ([[]], {}, TypeError, r"^prompt\[0\] is \[\]"),
    ],
    ids=str,
)
def test_bad_calls_are_refused_before_anything_runs(eager, prompt, arguments, error, words):
    """C46 too: a batch cannot be streamed."""
    before = eager.session.stats.replays
    with pytest.raises(error, match=words):
        eager.stream(prompt, **arguments)
    if "stream makes" not in words:
        with pytest.raises(error, match=words):
            eager(prompt, **arguments)
    assert eager.session.stats.replays == before


def test_several_samples_of_greedy_decoding_are_refused(eager, model, tokenizer):
    words = r"^samples is 2, but greedy decoding makes one text: pass do_sample=True"
    with pytest.raises(ValueError, match=words):
        eager("x", samples=2)
    with pytest.raises(ValueError, match=words):
        staticgen.completion(model, tokenizer, backend="eager", samples=2)
    config = GenerationConfig(do_sample=True, max_new_tokens=3)
    assert len(eager("x", samples=2, generation_config=config, max_tokens=3)) == 2


def test_one_bad_prompt_of_many_is_named_and_none_runs(eager):
    before = eager.session.stats.replays
    with pytest.raises(ValueError, match=r"^prompt\[2\]: ids has 71 tokens"):
        eager(["fine", "fine", "y" * 70])
    with pytest.raises(ValueError, match=r"^max_new_tokens is 0"):  # which is no prompt's fault
        eager(["fine", "fine"], max_tokens=0)
    assert eager.session.stats.replays == before


def test_a_streamer_takes_one_text(eager):
    for prompt, samples in ((["x", "y"], None), ("x", 2), ([], None)):
        streamer = Recorder()
        with pytest.raises(ValueError, match=r"^streamer takes one text"):
            eager(prompt, samples=samples, do_sample=True, streamer=streamer)
        assert streamer.calls == ["end"]
    with pytest.raises(TypeError, match=r"^streamer is a int"):
        eager("x", streamer=5)
    with pytest.raises(TypeError, match=r"^prompts is one prompt"):
        eager.results("x")


def test_bad_completions_are_refused_when_they_are_made(model, tokenizer):
    with pytest.raises(TypeError, match=r"^tokenizer is a LlamaForCausalLM"):
        staticgen.completion(tokenizer, model)
    for arguments, error, words in (
        ({"stop": [""]}, ValueError, "^stop is "),
        ({"samples": -1}, ValueError, "^samples is -1"),
        ({"temprature": 1}, TypeError, "temprature"),
        ({"batch_size": 0}, ValueError, "^batch_size is 0"),
        ({"backend": "tpu"}, ValueError, "unknown backend 'tpu'"),
    ):
        with pytest.raises(error, match=words):
            staticgen.completion(model, tokenizer, **{"backend": "eager", **arguments})


def test_a_prompt_of_nothing(model):
    tokenizer = texts.byte_level()
    tokenizer.backend_tokenizer.post_processor = None
    complete = staticgen.completion(model, tokenizer, backend="eager", max_tokens=3, max_length=32)
    assert complete("") == expected(model, tokenizer, "<bos>", 3)
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match=r"^prompt is '', which has no tokens"):
        complete("")


def test_a_chat_that_cannot_be_rendered(eager, monkeypatch):
    monkeypatch.setattr(eager.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="chat template refuses the messages: no system role"):
        eager(CHAT)
    monkeypatch.setattr(eager.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="messages need a chat template"):
        eager(CHAT)


def test_special_tokens_stay_where_they_are_asked_for(tokenizer):
    complete = saying(tokenizer, "ab", skip_special_tokens=False)
    assert complete("x") == "ab<eos>"
    assert complete("x", skip_special_tokens=True) == "ab"
    assert complete("x", stop="<eos>", skip_special_tokens=True) == "ab"


def test_weights_that_changed_are_heard(tokenizer):
    model = models.llama(vocab_size=259)
    complete = staticgen.completion(model, tokenizer, backend="eager", max_length=32, max_tokens=8)
    before = complete("hello")
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert complete("hello") == expected(model, tokenizer, "hello", 8) != before
    assert "".join(complete.stream("hello")) == complete("hello")


def test_a_model_with_few_positions_sets_the_length(tokenizer):
    complete = staticgen.completion(models.gpt2(vocab_size=259, n_positions=32), tokenizer, backend="eager")
    assert complete.session.max_length == 33
    assert "max_length=33" in repr(complete)
