"""What is found without weights, against the models themselves."""

import models
import pytest
import torch
import transformers
from families import FAMILIES, REFUSED
from transformers import AutoConfig

from staticgen import UnsupportedModelError
from staticgen.outline import load_outline, outline_of
from staticgen.shapes import StepForm
from staticgen.step import Step

CASES = [(family, variant) for family in FAMILIES for variant in family.variants]
REFUSED_CASES = [(family, variant) for family in REFUSED for variant in family.variants]
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)


def names(cases):
    return [" ".join(filter(None, (family.name, variant))) for family, variant in cases]


def without_weights(family, variant):
    if family.model_class is None:
        pytest.skip(f"this version of transformers has no {family.model}")
    settings = {**family.base, **family.settings, **family.variants[variant]}
    with torch.device("meta"):
        return family.model_class(family.model_class.config_class(**settings))


def expected_parameters(model):
    """Numbers of what reads text, the head included."""
    if model.config is model.config.get_text_config():
        return sum(tensor.numel() for tensor in model.parameters())
    parts = [*model.get_decoder().parameters(), model.get_output_embeddings().weight]
    return sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in parts}.values())


@pytest.mark.parametrize(("family", "variant"), CASES, ids=names(CASES))
def test_it_is_what_a_step_finds_by_running(family, variant):
    model = family.build(variant)
    try:
        step = Step(model, StepForm())
        outline = outline_of(without_weights(family, variant))
    except UnsupportedModelError as error:
        if OLD and variant in family.recent:
            pytest.skip(f"transformers {transformers.__version__}: {error}")
        raise
    assert outline.cache_spec == step.cache_spec
    assert (outline.logits_size, outline.position_limit) == (step.logits_size, step.position_limit)
    assert outline.parameters == expected_parameters(model)
    assert outline.active_parameters <= outline.parameters
    assert outline.model_type == model.config.model_type


@pytest.mark.parametrize(("family", "variant"), REFUSED_CASES, ids=names(REFUSED_CASES))
def test_what_cannot_be_a_static_step_is_refused(family, variant):
    if OLD and variant in family.recent:
        pytest.skip(f"transformers {transformers.__version__} writes it in a way that can run")
    with pytest.raises(UnsupportedModelError, match="model_type '"):
        outline_of(without_weights(family, variant))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_counted_once_and_read_as_the_head(tied):
    model = models.llama(tie_word_embeddings=tied)
    config = model.config
    with torch.device("meta"):
        outline = outline_of(type(model)(config))
    assert outline.tied == tied
    assert outline.head.numbers == model.lm_head.weight.numel()
    assert outline.tables.numbers == (0 if tied else model.lm_head.weight.numel())
    assert outline.parameters == sum(tensor.numel() for tensor in model.parameters())


def test_experts_are_told_from_the_rest():
    model = models.mixtral(num_experts_per_tok=1)
    with torch.device("meta"):
        outline = outline_of(type(model)(model.config))
    of_experts = sum(tensor.numel() for name, tensor in model.named_parameters() if ".experts." in name)
    assert of_experts > 0.5 * outline.parameters
    assert (outline.experts.numbers, outline.expert_count, outline.experts_per_token) == (of_experts, 4, 1)
    assert outline.active_parameters == outline.parameters - 3 * of_experts // 4


def test_a_config_is_enough(tmp_path):
    models.llama().config.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    outline = load_outline(tmp_path, torch.bfloat16)
    assert (outline.dtype, outline.cache_spec.dtype) == (torch.bfloat16, torch.bfloat16)
    assert outline.cache_spec.layers == Step(models.llama(), StepForm()).cache_spec.layers


def test_a_model_too_large_for_this_machine(tmp_path):
    """405 billion parameters, as its authors count them."""
    config = AutoConfig.for_model(
        "llama", hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    outline = load_outline(tmp_path, torch.bfloat16)
    assert round(outline.parameters / 1e9) == 406
    assert outline.trained_length == 131072


def test_a_model_with_weights_is_not_for_this(tiny_llama):
    with pytest.raises(ValueError, match="model is on cpu, expected one that was built on"):
        outline_of(tiny_llama)


def test_a_path_that_does_not_exist():
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_outline("./nowhere")
