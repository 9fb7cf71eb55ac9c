import models
import pytest
import torch
import transformers as tf

from staticgen import UnsupportedModelError
from staticgen.rotary import Rotation
from staticgen.shapes import StepForm
from staticgen.step import Step

FORM = StepForm()
SMALL = {**models.SIZES, "num_key_value_heads": 2}


def build(model_class, config):
    torch.manual_seed(0)
    return model_class(config).eval()


# Half of a key or all of it turns, its pairs lie side by side or half a key apart, and frequencies are scaled.
ROTARY = {
    "llama": models.llama,
    "llama linear": lambda: models.llama(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama yarn": lambda: models.llama(
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    ),
    "gemma3, two bases": models.gemma3,
    "neox, a quarter": lambda: build(
        tf.GPTNeoXForCausalLM,
        tf.GPTNeoXConfig(**{**models.SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ),
    "cohere, interleaved": lambda: build(tf.CohereForCausalLM, tf.CohereConfig(**SMALL)),
    "glm, interleaved half": lambda: build(tf.GlmForCausalLM, tf.GlmConfig(**SMALL, head_dim=16)),
    "falcon": lambda: build(
        tf.FalconForCausalLM,
        tf.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, initializer_range=0.2),
    ),
}  # fmt: skip


def keys_at(step, ids, position):
    from staticgen.attention import StepCache

    cache = StepCache(FORM, torch.full_like(ids, position))
    with torch.no_grad():
        step._run(ids, torch.full_like(ids, position), cache)
    return [cache.new_keys[index] for index in sorted(cache.new_keys)]


@pytest.mark.parametrize("kind", list(ROTARY))
@pytest.mark.parametrize("token_dim", [-2, -1])
def test_turned_keys_are_the_keys_of_another_position(kind, token_dim):
    step = Step(ROTARY[kind](), FORM)
    rotations = step.rotations()
    ids = torch.tensor([[11], [12]])
    for before, after in ((0, 1), (3, 40), (40, 39), (200, 20)):
        for rotation, key, expected in zip(
            rotations, keys_at(step, ids, before), keys_at(step, ids, after), strict=True
        ):
            turned = key.clone() if token_dim == -2 else key.transpose(2, 3).contiguous()
            rotation.apply_(turned, after - before, token_dim)
            turned = turned if token_dim == -2 else turned.transpose(2, 3)
            torch.testing.assert_close(turned, expected, atol=1e-4, rtol=1e-4)


def test_layers_without_rotary_embedding_turn_nothing():
    config = tf.SmolLM3Config(**{**SMALL, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]})
    rotations = Step(build(tf.SmolLM3ForCausalLM, config), FORM).rotations()
    assert [rotation is None for rotation in rotations] == [False, True, False, True]


def test_sixteen_bit_models_are_recognised_too():
    for dtype in (torch.bfloat16, torch.float16):
        rotations = Step(models.llama().to(dtype), FORM).rotations()
        expected = Step(models.llama(), FORM).rotations()
        for found, right in zip(rotations, expected, strict=True):
            assert found.interleaved == right.interleaved
            torch.testing.assert_close(found.frequencies, right.frequencies, rtol=1e-2, atol=0)


@pytest.mark.parametrize("model", [models.gpt2(), models.opt()], ids=["gpt2", "opt"])
def test_other_positions_are_refused_by_name(model):
    with pytest.raises(UnsupportedModelError, match=f"{model.config.model_type}.* cannot move its cached keys"):
        Step(model, FORM).rotations()


def test_what_is_not_rotary_stays():
    keys = torch.arange(8.0).reshape(1, 1, 8)
    turned = keys.clone()
    Rotation(torch.tensor([torch.pi / 2], dtype=torch.float64), interleaved=False).apply_(turned, 1)
    torch.testing.assert_close(turned[0, 0], torch.tensor([-1.0, 0, 2, 3, 4, 5, 6, 7]))
