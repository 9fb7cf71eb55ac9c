"""The loop on a device: its sampling against transformers' own, its random numbers, and when a call uses it."""

import time

import models
import pytest
import torch
from models import new_tokens, random_prompt, reference
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from staticgen import Session
from staticgen.cache import KVBuffers, KVMemory
from staticgen.device_loop import (
    BROKEN,
    LOOK_EVERY,
    MOST_EOS,
    NO_LIMIT,
    LoopState,
    advance,
    draw,
    restrict,
    signed,
    uniform,
)
from staticgen.shapes import StepForm
from staticgen.step import step_for

NULL = {"backend": "cuda", "device": "null", "prefill_buckets": [8], "max_length": 48}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def session(tiny_llama):
    return Session(tiny_llama, batch_size=3, **NULL)


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.4},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_may_be_drawn_is_what_transformers_leaves(settings):
    """Its warpers are the reference: the same tokens stay, with the same scores, ties of the k-th one included."""
    generator = torch.Generator().manual_seed(0)
    plain = 3 * torch.randn(4, 97, generator=generator)
    tied = plain.mul(4).round().div(4)
    chain = LogitsProcessorList([TemperatureLogitsWarper(settings.get("temperature", 1.0))])
    if "top_k" in settings:
        chain.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        chain.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        chain.append(MinPLogitsWarper(settings["min_p"]))
    given = {"temperature": 1.0, "top_k": 2**62, "top_p": 1.0, "min_p": 0.0, **settings}
    kinds = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    tensors = [torch.tensor([given[name]], dtype=kind) for name, kind in kinds.items()]
    ordered, order = restrict(plain, *tensors)
    assert torch.equal(torch.empty_like(plain).scatter(1, order, ordered), chain(None, plain.clone()))
    # Which of several equals top-p drops is not said; how many is.
    assert torch.equal(restrict(tied, *tensors)[0], chain(None, tied.clone()).sort(dim=-1).values)


def test_what_is_just_at_a_limit_is_what_transformers_leaves():
    """Four equal shares: a sum of 0.5 is not above it, and a share that is the best one's is not below it."""
    equal, off = torch.zeros(1, 4), torch.tensor([NO_LIMIT])
    for top_p, min_p in ((0.5, 0.0), (1.0, 1.0)):
        left = restrict(equal, torch.ones(1), off, torch.tensor([top_p]), torch.tensor([min_p]))[0].isfinite().sum()
        chain = LogitsProcessorList([TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)])
        assert left == chain(None, equal.clone()).isfinite().sum()


def splitmix64(state, count):
    """The ``count``-th number, from 1 on, after Steele, Lea and Flood, by whole numbers of Python."""
    mask = 2**64 - 1
    mixed = (state + 0x9E3779B97F4A7C15 * count) & mask
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
    return mixed ^ mixed >> 31


@pytest.mark.parametrize("seed", [0, 1234567, -3, 2**40 + 1, 2**63 + 9])
def test_random_numbers_are_those_of_splitmix64(seed):
    """The number of a row is drawn from a state that is drawn for the step; so it is on every device and for ever."""
    assert splitmix64(1234567, 1) == 6457827717110365317  # as published
    for drawn in (0, 1, 77):
        found = uniform(torch.tensor([signed(seed)]), torch.tensor([drawn]), 3)
        state = splitmix64(seed, drawn + 1)
        assert found.tolist() == [(splitmix64(state, row + 1) >> 11) / 2**53 for row in range(3)]


def test_random_numbers_are_uniform_and_follow_from_seed_and_count():
    seed = torch.tensor([7])
    numbers = torch.stack([uniform(seed, torch.tensor([count]), 50) for count in range(400)])
    assert numbers.dtype == torch.float64 and bool(((numbers >= 0) & (numbers < 1)).all())
    assert len(numbers.unique()) == numbers.numel()
    counts = torch.histc(numbers.float(), 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 45  # chi squared, 19 degrees of freedom: 1 in 1000
    pairs = torch.corrcoef(torch.stack([numbers[:-1].flatten(), numbers[1:].flatten()]))
    across = torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]))
    assert abs(pairs[0, 1]) < 0.03 and abs(across[0, 1]) < 0.03
    assert torch.equal(uniform(seed, torch.tensor([3]), 2), numbers[3, :2])
    assert not torch.equal(uniform(torch.tensor([8]), torch.tensor([3]), 2), numbers[3, :2])


def test_a_number_chooses_by_the_distribution():
    scores = torch.tensor([[0.1, 0.0, 0.5, 0.4]]).log()
    shares = [0, 0, 0, 0]
    for number in torch.arange(0.0005, 1, 0.001, dtype=torch.float64):
        shares[int(draw(scores, number[None]))] += 1
    assert shares == pytest.approx([100, 0, 500, 400], abs=1)
    for edge in (0.0, 1 - 2.0**-53):
        assert int(draw(scores, torch.tensor([edge], dtype=torch.float64))) != 1
        many = torch.randn(500, 33, generator=torch.Generator().manual_seed(0))
        best = draw(many, torch.full((500,), edge, dtype=torch.float64))
        assert torch.equal(best, many.argmax(dim=-1) if edge else many.argmin(dim=-1))


def test_sampling_on_the_device_is_sampling_on_the_host(tiny_llama, session):
    """The same seed gives the same tokens in both loops; a processor of one's own asks for the host's."""
    prompts = [random_prompt(length) for length in (3, 9, 12)]
    settings = {"do_sample": True, "max_new_tokens": 12, "temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
    found = session.generate(prompts, seed=5, **settings)
    assert session.stats.last.loop == "device"
    same = session.generate(prompts, seed=5, logits_processor=[lambda ids, scores: scores], **settings)
    assert session.stats.last.loop == "host"
    assert found.tolist() == same.tolist()
    assert session.generate(prompts, seed=5, **settings).tolist() == found.tolist()
    assert session.generate(prompts, seed=6, **settings).tolist() != found.tolist()
    torch.manual_seed(3)
    first = session.generate(prompts, **settings)
    torch.manual_seed(3)
    assert session.generate(prompts, **settings).tolist() == first.tolist()
    assert session.generate(prompts, **settings).tolist() != first.tolist()
    alone = session.generate(prompts[0], seed=5, **settings)
    (many,) = session.generate_many([prompts[0]], seed=5, **settings)
    assert many.tolist() == alone[0].tolist()
    assert session.stats.compiles == 2


HOST_TOO = {"logits_processor": [lambda ids, scores: scores]}  # changes nothing, and runs on the host


@pytest.mark.parametrize("seed", [0, -1, 2**31 + 5, 2**63 + 7, 2**64 - 1])
def test_any_seed_is_the_same_on_host_and_device(session, seed):
    arguments = {"do_sample": True, "max_new_tokens": 10, "temperature": 1.5, "seed": seed}
    found = session.generate(random_prompt(5), **arguments)
    assert session.stats.last.loop == "device"
    assert found.tolist() == session.generate(random_prompt(5), **arguments, **HOST_TOO).tolist()
    assert found.tolist() != session.generate(random_prompt(5), **{**arguments, "seed": 3}).tolist()


def test_a_call_knows_nothing_of_the_settings_of_the_last(session):
    """Every setting is turned on and off again, and so are greedy calls and ends, in one session."""
    prompts = [random_prompt(length) for length in (3, 9, 12)]
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "seed": 1}
    turns = [
        {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.6}, {"top_k": 127}, {"do_sample": False},
        {"eos_token_id": list(range(40, 40 + MOST_EOS)), "pad_token_id": 1000}, {"eos_token_id": list(range(60, 68))},
    ]  # fmt: skip
    seen = []
    for turn in [each for one in turns for each in (one, {})]:
        arguments = {**plain, "max_new_tokens": 14, "temperature": 2.0, **turn}
        found = session.generate(prompts, **arguments)
        assert session.stats.last.loop == "device"
        assert found.tolist() == session.generate(prompts, **arguments, **HOST_TOO).tolist(), turn
        seen.append(found.tolist())
    assert all(other == seen[1] for other in seen[3::2])
    assert all(
        seen[index] != seen[1] for index in range(0, len(seen), 2) if index != 8
    )  # 127 of 128 may as well be all


def test_several_samples_of_one_prompt_differ(session):
    prompt = random_prompt(5)
    output = session.generate(prompt, do_sample=True, num_return_sequences=3, max_new_tokens=20, seed=1)
    assert session.stats.last.loop == "device"
    assert len(set(map(tuple, output.tolist()))) == 3


@pytest.mark.parametrize("new", [1, 2, LOOK_EVERY, LOOK_EVERY + 1, LOOK_EVERY + 2, 25])
def test_any_number_of_tokens(tiny_llama, session, new):
    prompt, begin = random_prompt(6), time.perf_counter()
    assert new_tokens(session.generate(prompt, max_new_tokens=new), 6) == [reference(tiny_llama, prompt, new)]
    call = session.stats.last
    taken = time.perf_counter() - begin
    assert 0 < call.decode_seconds <= taken or (new, call.decode_seconds) == (
        1,
        0,
    )  # a step's is its share of a launch's
    assert (call.loop, call.steps, call.surplus_steps, call.new_tokens) == ("device", new - 1, 0, [new])


@pytest.mark.parametrize("every", [1, 3, 5])
def test_tokens_may_be_looked_at_before_all_rows_of_them_are_full(tiny_llama, session, monkeypatch, every):
    """The rows that they go to are a ring."""
    monkeypatch.setattr("staticgen.loops.LOOK_EVERY", every)
    prompts = [random_prompt(length) for length in (4, 7)]
    output = session.generate(prompts, max_new_tokens=20)
    assert new_tokens(output, 7) == [reference(tiny_llama, prompt, 20) for prompt in prompts]


def test_rows_end_at_their_eos_and_what_is_made_after_is_dropped(tiny_llama, session):
    prompts = [random_prompt(length, seed=3) for length in (3, 9, 16)]
    free = [reference(tiny_llama, prompt, 24) for prompt in prompts]
    ids, mask = models.left_padded(prompts)
    for eos in ([free[0][4], free[1][6]], [free[0][0], free[1][3], free[2][9]], [row[0] for row in free]):
        arguments = {"eos_token_id": eos, "pad_token_id": 5, "max_new_tokens": 24, "do_sample": False}
        expected = tiny_llama.generate(ids, attention_mask=mask, **arguments)
        output = session.generate(ids, mask, **arguments)
        assert output.tolist() == expected.tolist()
        call, steps = session.stats.last, output.shape[1] - 17
        assert (call.loop, call.steps) == ("device", steps)
        looked = -(-steps // LOOK_EVERY) * LOOK_EVERY  # the steps up to the end, and those ahead of it
        assert call.steps + call.surplus_steps == (min(23, looked + LOOK_EVERY) if steps else 0)


def test_a_stream_yields_every_token_and_can_be_closed(tiny_llama, session):
    prompts = [random_prompt(5), random_prompt(8)]
    expected = [reference(tiny_llama, prompt, 20) for prompt in prompts]
    replays = session.stats.replays
    stream = session.stream(prompts, max_new_tokens=20)
    seen = [next(stream)]
    assert session.stats.replays == replays + 1  # prefill only: the first token waits for no other
    kept = [token.clone() for token in seen]
    seen += list(stream)
    assert torch.stack(seen, 1).tolist() == expected
    assert torch.equal(kept[0], seen[0])
    stream = session.stream(prompts, max_new_tokens=20)
    begun = [next(stream) for _ in range(4)]
    stream.close()
    assert torch.stack(begun, 1).tolist() == [row[:4] for row in expected]
    call = session.stats.last
    assert (call.new_tokens, call.finish_reasons, call.steps) == ([4, 4], ["", ""], 3)
    assert call.surplus_steps == 2 * LOOK_EVERY - 3
    assert new_tokens(session.generate(prompts[0], max_new_tokens=20), 5) == expected[:1]


HOST = [
    ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
    ({"do_sample": True, "typical_p": 0.9}, "typical_p"),
    ({"do_sample": True, "top_h": 0.5}, "top_h"),
    ({"do_sample": True, "epsilon_cutoff": 0.01}, "epsilon_cutoff"),
    ({"do_sample": True, "eta_cutoff": 0.01}, "eta_cutoff"),
    ({"renormalize_logits": True}, "renormalize_logits"),
    ({"return_dict_in_generate": True, "output_logits": True}, "output_logits"),
    ({"max_time": 100.0}, "max_time"),
    ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor"),
    ({"stopping_criteria": [lambda ids, scores: False]}, "stopping_criteria"),
    ({"token_mask": torch.ones(128, dtype=torch.bool)}, "token_mask"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ({"eos_token_id": list(range(100, 101 + MOST_EOS))}, f"eos_token_id with {MOST_EOS + 1} ids"),
]


@pytest.mark.parametrize(("arguments", "reason"), HOST, ids=[reason for _, reason in HOST])
def test_what_the_device_does_not_know_runs_on_the_host(tiny_llama, session, arguments, reason):
    prompt = random_prompt(4)
    output = session.generate(prompt, max_new_tokens=10, seed=1, **arguments)
    assert session.stats.last.loop == "host"
    assert reason in session.stats.last.loop_reason
    eager = Session(tiny_llama, max_length=48, backend="eager")
    if not arguments.get("do_sample"):
        other = eager.generate(prompt, max_new_tokens=10, seed=1, **arguments)
        left, right = (getattr(one, "sequences", one) for one in (output, other))
        assert left.tolist() == right.tolist()
    assert eager.stats.last.loop_reason in ("", "backend 'eager' has no loop of its own")


def test_a_streamer_is_put_each_step_on_the_host(session):
    class Streamer:
        puts = 0

        def put(self, tokens):
            self.puts += 1

        def end(self):
            pass

    streamer = Streamer()
    session.generate(random_prompt(4), max_new_tokens=10, streamer=streamer)
    assert streamer.puts == 11
    assert session.stats.last.loop_reason == "streamer"


def test_layouts_that_choose_on_the_host(tiny_llama):
    session, prompt = Session(tiny_llama, **{**NULL, "max_length": 16}), random_prompt(4)
    for layout, loop in (("ring", "device"), ("shift", "device"), ("sink", "host"), ("none", "host")):
        session.set_cache_implementation(layout)
        session.generate(prompt, generation_config=GenerationConfig(max_new_tokens=4, do_sample=False))
        assert session.stats.last.loop == loop


@pytest.mark.parametrize("sampled", [False, True])
def test_one_logit_that_is_nan_marks_its_row(tiny_llama, sampled):
    step = step_for(tiny_llama, StepForm())
    state = LoopState(2, step.cache_spec.windows, torch.device("cpu"))
    state.begin(torch.zeros(2, 1).long(), torch.zeros(2, 1).long(), eos=(), fill=0, window=None)
    logits = torch.full((2, 128), -torch.inf)
    logits[:, 9] = 1.0
    if not sampled:
        logits[:, 20] = 1.0  # of equals, the first
    logits[1, 3] = torch.nan
    new = KVBuffers(step.cache_spec, 2, 1)
    advance(lambda *_: (logits, *new.keys, *new.values), state, KVMemory(step.cache_spec, 2, 8), sampled)
    assert state.snapshot(1)().tolist() == [[9, BROKEN]]


def test_nan_logits_are_an_error_on_the_device_too(tiny_llama):
    """They come after the first token, out of a position that prefill does not reach."""
    model = models.gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight[12:] = torch.nan
    # A launch goes from one size to the next, so that both have seen NaN.
    session, prompt = Session(model, cache_sizes=[14, 20], prefix_cache=1 << 20, **NULL), random_prompt(4)
    expected = reference(model, prompt, 8)
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 4) == [expected]
    other = random_prompt(4, seed=1)
    with pytest.raises(ArithmeticError, match=r"tokens 1, cache 20\] gave NaN logits on cuda on null"):
        session.generate(other, max_new_tokens=20)
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 4) == [expected]
    # What the failed call has made is not known: its cache is gone.
    known, expected = other + reference(model, other, 4), reference(model, other, 7)
    assert new_tokens(session.generate(known, max_new_tokens=3), 8) == [expected[4:]]
    assert session.stats.last.reused_tokens <= 4


def test_a_window_is_the_call_s_own(tiny_llama):
    """In one session, as on the eager backend."""
    prompt, found = random_prompt(11), []
    for target in ({"backend": "eager", "prefill_buckets": [8]}, {**NULL}):
        session = Session(tiny_llama, **{**target, "max_length": 16})
        found.append(
            [
                new_tokens(session.generate(prompt, max_new_tokens=count, overflow=overflow), 11)
                for count, overflow in ((5, "error"), (24, "slide"), (5, "error"), (9, "slide"))
            ]
        )
    assert session.stats.last.loop == "device"
    assert found[0] == found[1]


def test_the_caller_s_inference_mode_may_change_on_the_way(tiny_llama, session):
    prompt = random_prompt(5)
    expected = reference(tiny_llama, prompt, 20)
    for begun, ended in ((True, False), (False, True)):
        stream = session.stream(prompt, max_new_tokens=20)
        with torch.inference_mode(begun):
            seen = [next(stream) for _ in range(3)]
        with torch.inference_mode(ended):
            seen += list(stream)
        assert [int(token) for token in seen] == expected
