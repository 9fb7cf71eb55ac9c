import copy

import models
import pytest
import torch
import transformers as tf

from staticgen import UnsupportedModelError
from staticgen.cache import KVCache
from staticgen.shapes import StepForm, StepShape
from staticgen.step import Step, position_limit, step_for

FORMS = [StepForm("split", False), StepForm("split", True), StepForm("concat", False)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_step_gives_the_models_logits_and_only_new_keys(tiny_llama, form):
    step = Step(tiny_llama, form)
    ids = torch.tensor([models.random_prompt(6)])
    inputs = step.example_inputs(StepShape(1, 6, 10))
    with torch.no_grad():
        logits, *new = step(ids, torch.arange(6)[None], *inputs[2:])
        expected = tiny_llama(ids)
    torch.testing.assert_close(logits, expected.logits[:, -1])
    assert [tuple(t.shape) for t in new] == [(1, 2, 6, 16)] * 4
    for index in range(2):
        torch.testing.assert_close(new[index], expected.past_key_values.layers[index].keys)
        torch.testing.assert_close(new[2 + index], expected.past_key_values.layers[index].values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [1, 13, 29, 62])
def test_padding_of_any_width_leaves_no_nan(dtype, padding):
    """C05: pad queries see nothing; neither logits nor keys and values may become NaN, in any row."""
    model = models.llama().to(dtype)
    step = Step(model, FORMS[0])
    prompt = models.random_prompt(3)
    ids = torch.tensor([[0] * padding + prompt, [0] * (padding + 3)])
    positions = torch.tensor([[-1] * padding + [0, 1, 2], [-1] * (padding + 3)])
    inputs = step.example_inputs(StepShape(2, padding + 3, 8))
    with torch.no_grad():
        logits, *new = step(ids, positions, *inputs[2:])
    assert all(torch.isfinite(tensor).all() for tensor in (logits, *new))
    if dtype == torch.float32:
        torch.testing.assert_close(logits[0], model(torch.tensor([prompt])).logits[0, -1])


def test_a_row_of_padding_changes_no_other_row(tiny_llama):
    step = Step(tiny_llama, FORMS[0])
    ids = torch.tensor([models.random_prompt(5), models.random_prompt(5, seed=1)])
    positions = torch.tensor([list(range(5)), [-1] * 5])
    with torch.no_grad():
        both = step(ids, positions, *step.example_inputs(StepShape(2, 5, 8))[2:])[0]
        alone = step(ids[:1], positions[:1], *step.example_inputs(StepShape(1, 5, 8))[2:])[0]
    torch.testing.assert_close(both[:1], alone)


def test_the_model_stays_as_it_was(tiny_llama):
    model = copy.deepcopy(tiny_llama).train()
    before = (
        model.config.to_dict(),
        model.config._attn_implementation,
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    step = Step(model, FORMS[0])
    assert (model.config.to_dict(), model.config._attn_implementation) == before[:2]
    assert all(torch.equal(value, before[2][name]) for name, value in model.state_dict().items())
    assert model.training
    assert not step.model.training
    shared = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in step.model.parameters()} == shared  # no second copy of the weights


def test_the_cache_spec_is_measured():
    spec = Step(models.gemma3(), FORMS[0]).cache_spec
    assert len(spec.layers) == 6
    assert {(layer.heads, layer.key_dim, layer.value_dim) for layer in spec.layers} == {(2, 16, 16)}
    assert [layer.window for layer in spec.layers] == [8] * 5 + [None]
    assert spec.windows == (8, None)
    assert spec.nbytes(batch=1, cache_length=64) == (5 * 8 + 64) * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (tf.MambaForCausalLM, tf.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128)),
        (tf.T5ForConditionalGeneration, tf.T5Config(d_model=64, num_layers=2, num_heads=4, vocab_size=128)),
        (tf.BertForMaskedLM, tf.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)),
        (tf.BertLMHeadModel, tf.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)),
        (tf.BartForCausalLM, tf.BartConfig(d_model=64, encoder_layers=2, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=128, vocab_size=128, init_std=0.2, is_encoder_decoder=False)),
        (tf.LlamaModel, tf.LlamaConfig(**models.SIZES)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_what_cannot_be_a_static_step_is_refused_by_name(model_class, config):
    """C13, C14: never wrong tokens. The error comes before anything is compiled."""
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match=config.model_type):
        Step(model_class(config).eval(), FORMS[0])


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "llama", None])
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(TypeError, match="PreTrainedModel"):
        Step(thing, FORMS[0])


def test_position_limits():
    assert position_limit(models.llama()) is None
    assert position_limit(models.gpt2(n_positions=32)) == 32
    assert position_limit(models.opt(max_position_embeddings=32)) == 32
    # Tables that are a buffer, or a tensor that is none.
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 128}
    assert position_limit(tf.GPTJForCausalLM(tf.GPTJConfig(**sizes, rotary_dim=8))) == 32
    assert position_limit(tf.CTRLLMHeadModel(tf.CTRLConfig(**sizes, dff=128))) == 32
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert position_limit(models.llama(rope_parameters=dynamic, max_position_embeddings=24)) == 24


def test_a_window_that_attention_is_not_told_of_limits_the_length():
    """PhiMoE applies its window in its mask only; within the window it is right."""
    config = tf.PhimoeConfig(**{**models.SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 70})
    torch.manual_seed(0)
    assert Step(tf.PhimoeForCausalLM(config).eval(), FORMS[0]).position_limit == 70
    assert Step(models.mistral(sliding_window=70), FORMS[0]).position_limit is None


def test_rope_of_one_type_of_layer_counts_too():
    rope = {
        "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert position_limit(models.gemma3(rope_parameters=rope, max_position_embeddings=24)) == 24


def test_a_step_is_made_once_for_the_same_weights_and_again_for_others(tiny_llama):
    model = copy.deepcopy(tiny_llama)
    first = step_for(model, FORMS[0])
    assert step_for(model, FORMS[0]) is first
    assert step_for(model, FORMS[1]) is not first
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert step_for(model, FORMS[0]) is not first


def test_chunks_and_single_tokens_give_the_logits_of_the_whole(tiny_llama):
    step = Step(tiny_llama, StepForm("split", True))
    prompt = models.random_prompt(11)
    cache = KVCache(step.cache_spec, 1, 16, transposed_keys=True)
    from staticgen.backends.eager import EagerProgram

    done = 0
    for count in (4, 1, 6):
        program = EagerProgram(step, StepShape(1, count, 16))
        positions = torch.arange(done, done + count)[None]
        ids = torch.tensor([prompt[done : done + count]])
        logits, new = program(ids, positions, torch.zeros_like(ids), cache)
        cache.write(new, positions)
        done += count
        torch.testing.assert_close(logits, tiny_llama(torch.tensor([prompt[:done]])).logits[:, -1])
