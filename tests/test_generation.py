import copy
import gc
import weakref

import models
import numpy as np
import pytest
import torch
from models import new_tokens, random_prompt, reference

import staticgen
from staticgen.generation import SESSIONS_PER_MODEL, _sessions


@pytest.fixture
def compiled(monkeypatch):
    """The sizes that were compiled since the test began."""
    shapes = []
    from staticgen.backends.eager import EagerBackend

    original = EagerBackend.compile

    def count(self, step, shape):
        shapes.append(shape)
        return original(self, step, shape)

    monkeypatch.setattr(EagerBackend, "compile", count)
    return shapes


@pytest.fixture
def model(tiny_llama):
    return copy.deepcopy(tiny_llama)


def test_generate_is_model_generate(model, backend):
    ids, mask = models.left_padded([random_prompt(3), random_prompt(11)])
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_length=40)
    assert staticgen.generate(model, ids, mask, max_length=40, **backend).tolist() == expected.tolist()
    assert staticgen.generate(model, ids.numpy(), mask.numpy(), max_length=40, **backend).tolist() == expected.tolist()
    # and transformers' own way is not disturbed
    assert model.generate(ids, attention_mask=mask, do_sample=False, max_length=40).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_one_prompt_without_a_batch_dimension(model, kind):
    prompt = random_prompt(5)
    output = staticgen.generate(model, kind(prompt), max_new_tokens=8, backend="eager")
    assert new_tokens(output, 5) == [reference(model, prompt, 8)]


def test_stream_yields_the_tokens_of_generate(model):
    prompt = random_prompt(5)
    tokens = list(staticgen.stream(model, prompt, max_new_tokens=8, backend="eager"))
    assert [t.shape for t in tokens] == [(1,)] * 8
    assert torch.cat(tokens).tolist() == reference(model, prompt, 8)


def test_a_stream_checks_its_input_at_once(model):
    with pytest.raises(ValueError, match="vocabulary"):
        staticgen.stream(model, [500], max_new_tokens=8, backend="eager")


def test_a_second_call_compiles_nothing(model, compiled):
    staticgen.generate(model, random_prompt(5), max_length=64, backend="eager")
    sizes = len(compiled)
    assert sizes > 0
    for length, settings in [(40, {}), (3, {"do_sample": True, "temperature": 2.0}), (20, {"max_new_tokens": 7})]:
        staticgen.generate(model, random_prompt(length), max_length=64, backend="eager", **settings)
    assert len(compiled) == sizes
    staticgen.generate(model, random_prompt(5), max_length=65, backend="eager")
    assert len(compiled) > sizes


def test_max_new_tokens_alone_shares_buffers_between_prompt_lengths(model, compiled):
    for length in (3, 20, 44):
        prompt = random_prompt(length)
        output = staticgen.generate(model, prompt, max_new_tokens=20, backend="eager")
        assert new_tokens(output, length) == [reference(model, prompt, 20)]
    assert {shape.cache_length for shape in compiled} == {64}
    assert len(compiled) == len(set(compiled))


def test_max_length_sizes_the_buffers_and_max_new_tokens_says_how_many(model, compiled):
    """C18."""
    prompt = random_prompt(9)
    output = staticgen.generate(model, prompt, max_length=100, max_new_tokens=4, backend="eager")
    assert output.shape == (1, 13)
    assert {shape.cache_length for shape in compiled} == {100}
    for max_length, words in [(2, "at least 10"), (9, "at least 10"), (11, "together 13, more than max_length=11")]:
        with pytest.raises(ValueError, match=words):
            staticgen.generate(model, prompt, max_length=max_length, max_new_tokens=4, backend="eager")


def test_a_prompt_longer_than_the_models_positions_cannot_be_helped_by_max_length(compiled):
    with pytest.raises(ValueError, match="40 tokens, but model_type 'gpt2' has 32 positions; shorten the prompt"):
        staticgen.generate(models.gpt2(n_positions=32), random_prompt(40), max_length=50, backend="eager")
    assert compiled == []


def test_numpy_numbers_are_numbers(model):
    five = np.int64(5)
    assert staticgen.generate(model, [[5, 6]], max_new_tokens=five, backend="eager").shape == (1, 7)
    assert staticgen.generate(model, [[5, 6]], max_length=five, backend="eager").shape == (1, 5)
    session = staticgen.Session(
        model, max_length=np.int64(32), prefill_buckets=[five], cache_sizes=[five], backend="eager"
    )
    assert session.generate([5, 6], eos_token_id=five).shape[1] <= 32


def test_without_a_length_the_default_is_bounded_and_said(model):
    model.generation_config.max_length = None
    with pytest.warns(UserWarning, match="neither max_length nor max_new_tokens .* max_length=512"):
        output = staticgen.generate(model, random_prompt(5), eos_token_id=list(range(64)), backend="eager")
    assert output.shape[1] <= 512
    short = models.gpt2(n_positions=32)
    with pytest.warns(UserWarning, match="max_length=33"):
        assert staticgen.generate(short, random_prompt(5), backend="eager").shape == (1, 33)


def test_the_models_own_length_is_honoured(model):
    model.generation_config.max_new_tokens = 6
    assert staticgen.generate(model, random_prompt(5), backend="eager").shape == (1, 11)


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "dtype"])
def test_changed_weights_are_seen(model, change):
    prompt = random_prompt(5)
    before = staticgen.generate(model, prompt, max_length=32, backend="openvino")
    if change == "in place":
        with torch.no_grad():
            model.lm_head.weight.mul_(torch.randn(128, 1))
    elif change == "replaced":
        model.lm_head = torch.nn.Linear(64, 128, bias=False)
        torch.nn.init.normal_(model.lm_head.weight)
    elif change == "loaded":
        model.load_state_dict(models.llama(seed=9).state_dict())
    else:
        model.to(torch.float64).to(torch.float32)
        model.lm_head.weight.data = torch.randn(128, 64)
    after = staticgen.generate(model, prompt, max_length=32, backend="openvino")
    assert after.tolist() != before.tolist()
    assert new_tokens(after, 5) == [reference(model, prompt, 27)]


def test_training_mode_and_grad_mode_stay(model):
    model.config.attention_dropout = 0.9
    prompt = random_prompt(5)
    model.train()
    output = staticgen.generate(model, prompt, max_new_tokens=8, backend="eager")
    assert model.training
    assert torch.is_grad_enabled()
    model.eval()
    assert new_tokens(output, 5) == [reference(model, prompt, 8)]


def test_sessions_are_bounded_and_die_with_their_model(backend):
    """C55."""
    model = models.llama(seed=4)
    for length in range(16, 16 + SESSIONS_PER_MODEL + 2):
        staticgen.generate(model, [5, 6], max_length=length, **backend)
    kept = list(_sessions[model].values())
    assert [session.max_length for session in kept] == list(range(18, 18 + SESSIONS_PER_MODEL))
    session = kept.pop()
    assert session.stats.replays > 0
    watched = [weakref.ref(thing) for thing in (model, session, session._context._caches.current, session._step)]
    del model, session, kept
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_a_session_frees_its_cache(tiny_llama, backend):
    session = staticgen.Session(tiny_llama, max_length=64, **backend)
    session.generate([5, 6])
    cache = weakref.ref(session._context._caches.current)
    del session
    gc.collect()
    assert cache() is None


def test_the_cache_follows_max_length_not_the_models_positions():
    model = models.llama(max_position_embeddings=131072)
    session = staticgen.Session(model, max_length=32, backend="eager")
    assert session.stats.cache_bytes == 2 * 2 * 2 * 16 * 32 * 4


def test_a_model_can_be_copied_and_pickled_after_use(model):
    import pickle

    prompt = random_prompt(5)
    output = staticgen.generate(model, prompt, max_new_tokens=8, backend="openvino")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert staticgen.generate(other, prompt, max_new_tokens=8, backend="openvino").tolist() == output.tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ids": [500]}, "outside the model's vocabulary"),
        ({"ids": []}, "ids is empty"),
        ({"attention_mask": [[1, 0]]}, "left padding"),
        ({"attention_mask": [[1]]}, "shape"),
        ({"max_length": 2}, "max_length is 2"),
        ({"backend": "tpu"}, "unknown backend 'tpu'"),
        ({"layout": "pages"}, "unknown layout 'pages'"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_compiles(tiny_llama, compiled, arguments, words):
    with pytest.raises(ValueError, match=words):
        staticgen.generate(tiny_llama, **{"ids": [5, 6], "max_length": 32, "backend": "eager", **arguments})
    assert compiled == []


def test_an_unknown_argument_is_refused(tiny_llama, compiled):
    with pytest.raises(
        TypeError, match=r"unknown argument 'max_tokens'; it is called max_new_tokens here; known .*do_sample"
    ):
        staticgen.generate(tiny_llama, [5, 6], max_tokens=3, backend="eager")
    with pytest.raises(TypeError, match="PreTrainedModel"):
        staticgen.generate(torch.nn.Linear(2, 2), [5, 6], max_length=8)
    assert compiled == []
