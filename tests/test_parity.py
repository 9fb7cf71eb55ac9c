"""Token for token against transformers, on every backend and layout."""

import models
import pytest
import torch
from models import new_tokens, random_prompt, reference

from staticgen import Session
from staticgen.shapes import StepShape

BUCKETS = [8, 32]


LENGTHS = [1, 7, 8, 9, 31, 32, 33, 70]  # 1, bucket - 1, bucket, bucket + 1, many chunks


LLAMAS = {
    "gqa": models.llama(),
    "mha tied": models.llama(1, num_key_value_heads=4, tie_word_embeddings=True),
    "mqa": models.llama(2, num_key_value_heads=1),
}


@pytest.fixture(params=list(LLAMAS))
def model(request):
    return LLAMAS[request.param]


def test_every_prompt_length_alone(model, backend, layout):
    session = Session(model, max_length=96, layout=layout, prefill_buckets=BUCKETS, **backend)
    for length in LENGTHS:
        prompt = random_prompt(length)
        output = session.generate(prompt, max_new_tokens=20)
        assert new_tokens(output, length) == [reference(model, prompt, 20)]
        assert output[0, :length].tolist() == prompt


def test_ragged_batches_up_to_exactly_max_length(model, backend, layout):
    """C01, C04: every row equals its solo run, whatever its neighbours, their order and the buffers."""
    prompts = [random_prompt(length) for length in (3, 9, 40)]
    expected = [reference(model, prompt, 24) for prompt in prompts]
    session = Session(model, max_length=64, batch_size=3, layout=layout, prefill_buckets=BUCKETS, **backend)
    for order in ([0, 1, 2], [2, 0, 1], [0, 0, 0], [1], [0, 2]):  # fewer rows than the session has, too: C50
        output = session.generate([prompts[index] for index in order], max_new_tokens=24)
        width = max(len(prompts[index]) for index in order)
        assert new_tokens(output, width) == [expected[index] for index in order]
    assert session.generate(prompts).shape == (3, 64)
    assert new_tokens(session.generate(prompts), 40) == expected


@pytest.mark.parametrize("width", [20, 32, 64, 128])
def test_the_size_of_the_buffers_changes_nothing(tiny_llama, backend, width):
    prompt = random_prompt(3)
    session = Session(tiny_llama, max_length=width, **backend)
    assert new_tokens(session.generate(prompt, max_new_tokens=16), 3) == [reference(tiny_llama, prompt, 16)]


@pytest.mark.parametrize(
    "family",
    [
        models.gpt2(),
        models.opt(),
        models.mistral(),
        models.gemma3(),
        models.qwen2(use_sliding_window=False, sliding_window=8),
        models.qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        models.mixtral(),
        models.gpt_oss(),
    ],
    ids=["gpt2", "opt", "mistral", "gemma3", "qwen2", "qwen2 window", "mixtral", "gpt-oss"],
)
def test_families(family, backend, layout):
    """C03, C20 to C24: learned positions see a shifted position, windows an edge that is off by one."""
    prompts = [random_prompt(length) for length in (3, 12, 20)]
    session = Session(family, max_length=64, batch_size=3, layout=layout, prefill_buckets=BUCKETS, **backend)
    output = session.generate(prompts, max_new_tokens=24)
    assert new_tokens(output, 20) == [reference(family, prompt, 24) for prompt in prompts]


def test_positions_advance_by_one(tiny_llama):
    """C02."""
    session = Session(tiny_llama, max_length=64, backend="eager")
    seen, shape = [], StepShape(1, 1, 64)
    program = session._programs._programs[shape]

    def spy(token_ids, position_ids, *rest):
        seen.append(position_ids[0, 0].item())
        return program(token_ids, position_ids, *rest)

    session._programs._programs[shape] = spy
    session.generate(random_prompt(5), max_new_tokens=24)
    assert seen == list(range(5, 28))


def test_the_cache_grows_with_what_is_live(tiny_llama, backend, layout):
    """The same tokens as with one size, at steps that cost the smallest size with room; nothing is compiled."""
    sizes = [8, 13, 24]
    session = Session(
        tiny_llama, max_length=48, batch_size=2, layout=layout, prefill_buckets=[4, 16], cache_sizes=sizes, **backend
    )
    assert session.cache_sizes == (8, 13, 24, 48)
    assert session.stats.compiles == 2 + 4
    ran, original = [], session._programs.run

    def spy(token_ids, position_ids, first_positions, cache):
        ran.append((token_ids.shape[1], cache.length))
        return original(token_ids, position_ids, first_positions, cache)

    session._programs.run = spy
    for length in (2, 7, 8, 12, 13, 24, 40, 3):
        prompts = [random_prompt(length), random_prompt(max(1, length - 5), seed=1)]
        ran.clear()
        output = session.generate(prompts)
        expected = [reference(tiny_llama, prompt, 48 - length) for prompt in prompts]
        assert new_tokens(output, length) == expected
        decode = [cache_length for tokens, cache_length in ran if tokens == 1]
        fits = [min(size for size in session.cache_sizes if size > used) for used in range(length, 47)]
        assert decode == fits
        assert {cache_length for tokens, cache_length in ran if tokens > 1} == {48}
    assert session.stats.compiles == 2 + 4


@pytest.mark.parametrize(
    "family", [models.gpt2(n_positions=32), models.opt(max_position_embeddings=32)], ids=["gpt2", "opt"]
)
def test_learned_positions_end(family, backend):
    """C15: the table is never indexed outside; the last token is never fed, so 33 tokens fit 32 positions."""
    prompt = random_prompt(28)
    session = Session(family, max_length=33, **backend)
    assert new_tokens(session.generate(prompt), 28) == [reference(family, prompt, 5)]
    with pytest.raises(ValueError, match=r"max_length .* is 34, .* has 32 positions; use max_length=33 or less"):
        Session(family, max_length=34, **backend)


def test_frequencies_that_change_with_length_are_kept_to_the_trained_length(backend):
    """C26: dynamic NTK equals transformers up to the trained length in any buffer, and is refused beyond."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = models.llama(rope_parameters=rope, max_position_embeddings=24)
    prompt = random_prompt(3)
    session = Session(model, max_length=25, **backend)
    assert new_tokens(session.generate(prompt, max_new_tokens=12), 3) == [reference(model, prompt, 12)]
    with pytest.raises(ValueError, match="24 positions"):
        Session(model, max_length=128, **backend)


@pytest.fixture
def ends(tiny_llama):
    """Prompts, their greedy tokens, and EOS ids that stop row 0 after 5 tokens and row 1 after 7."""
    prompts = [random_prompt(length, seed=3) for length in (3, 9, 16)]
    free = [reference(tiny_llama, prompt, 16) for prompt in prompts]
    first = next(token for index, token in enumerate(free[0]) if index == 4)
    second = free[1][6]
    return prompts, free, [first, second]


@pytest.mark.parametrize("how", ["argument", "config"])
def test_rows_end_at_any_eos_and_are_padded(tiny_llama, backend, ends, how):
    """C36, C38: and when all have ended, no further step runs."""
    prompts, _, eos = ends
    ids, mask = models.left_padded(prompts)
    config = {"generation_config": {"eos_token_id": eos}}
    for settings in ({}, {"min_new_tokens": 8}, {"pad_token_id": 5}, {"max_new_tokens": 4}):
        arguments = {"max_new_tokens": 16, "do_sample": False, **settings}
        expected = tiny_llama.generate(ids, attention_mask=mask, eos_token_id=eos, **arguments)
        session = Session(tiny_llama, max_length=64, batch_size=3, **backend)
        if how == "argument":
            output = session.generate(ids, mask, eos_token_id=eos, **arguments)
        else:
            import transformers

            given = transformers.GenerationConfig(**config["generation_config"], **arguments)
            before = given.to_dict()
            output = session.generate(ids, mask, generation_config=given)
            assert given.to_dict() == before
        assert output.tolist() == expected.tolist()
        call = session.stats.last
        for row, reason in enumerate(call.finish_reasons):
            generated = expected[row, 16:].tolist()
            stop = next(
                (i for i, token in enumerate(generated) if token in eos and i >= settings.get("min_new_tokens", 0)),
                None,
            )
            assert reason == ("length" if stop is None else "eos")
            assert call.new_tokens[row] == (len(generated) if stop is None else stop + 1)


def test_no_step_runs_after_all_rows_have_ended(tiny_llama, ends):
    prompts, free, _ = ends
    session = Session(tiny_llama, max_length=64, batch_size=3, backend="eager")
    output = session.generate(prompts, eos_token_id=[row[0] for row in free], max_new_tokens=40)
    assert output.shape[1] == 17
    assert session.stats.last.steps == 0
    session.generate(prompts, eos_token_id=[], max_new_tokens=6)
    assert session.stats.last.finish_reasons == ["length"] * 3


def test_large_scores_do_not_shine_through_the_mask():
    model = models.llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(60)
            layer.self_attn.k_proj.weight.mul_(60)
    prompts = [random_prompt(3), random_prompt(12)]
    session = Session(model, max_length=64, batch_size=2, backend="eager")
    output = session.generate(prompts, max_new_tokens=16)
    assert new_tokens(output, 12) == [reference(model, prompt, 16) for prompt in prompts]


def test_what_stands_under_the_mask_is_never_seen(tiny_llama, backend):
    """C08, C10, C12: pads outside the vocabulary, a pad that is a genuine EOS of the prompt, a hole in the mask."""
    session = Session(tiny_llama, max_length=32, batch_size=2, **backend)
    prompts = [[5, 7, 9, 7, 33, 7], [7, 9]]
    settings = {"max_new_tokens": 8, "pad_token_id": 7, "eos_token_id": 7}
    expected = [reference(tiny_llama, prompt, 8, eos_token_id=7) for prompt in prompts]
    expected = [row + [7] * (max(map(len, expected)) - len(row)) for row in expected]
    for pad in (7, 0, 128, -1):
        ids, mask = models.left_padded(prompts, pad=pad)
        assert new_tokens(session.generate(ids, mask, **settings), 6) == expected
    assert new_tokens(session.generate(prompts, **settings), 6) == expected
    holed, mask = torch.tensor([[5, 7, 1, 2, 9, 7, 33, 7]]), torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1]])
    output = session.generate(holed, mask, max_new_tokens=8)
    assert new_tokens(output, 8) == [reference(tiny_llama, prompts[0], 8)]


def test_a_windowed_model_runs_on_far_past_its_window(backend, layout):
    """C24, C52: positions go on after the window is full, and one program serves every position."""
    session = Session(models.mistral(), max_length=80, layout=layout, **backend)
    compiles, prompt = session.stats.compiles, random_prompt(6)
    assert new_tokens(session.generate(prompt, max_new_tokens=60), 6) == [reference(models.mistral(), prompt, 60)]
    assert session.stats.compiles == compiles
