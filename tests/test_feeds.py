"""What the host feeds to a step, judged by the step that works it out itself, and by transformers."""

import json
import subprocess
import sys
import textwrap

import models
import openvino as ov
import pytest
import torch
from families import FAMILIES
from models import new_tokens, random_prompt, reference

from staticgen import Session, UnsupportedModelError
from staticgen.backends.ir import static_model
from staticgen.fed import FedStep, fed_inputs, find_feeds
from staticgen.feeds import Feeds, HostInputs, read_feeds, write_feeds
from staticgen.shapes import StepForm, StepShape, slots_of
from staticgen.step import Step

FORM = StepForm("concat", late_heads=True, fed=True)
NAMES = {family.name: family for family in FAMILIES}
ROTARY = ["embeddings", "cos.0", "sin.0", "mask.0"]


def step_inputs(step, batch=2, tokens=4, length=16):
    """Token ids and positions of a padded row and a full one, slots that are partly empty, and random keys and values."""
    torch.manual_seed(0)
    shape = StepShape(batch, tokens, length)
    ids = torch.randint(3, step.vocab_size, (batch, tokens))
    positions = torch.tensor([[-1, -1, 6, 7], [9, 10, 11, 12]])
    first = torch.tensor([[0, 0, 0, 0], [0, 0, 3, 3]])
    slots = []
    for window in step.cache_spec.windows:
        held = torch.full((batch, slots_of(window, length)), -1)
        held[0, :6], held[1, :8] = torch.arange(6), torch.arange(1, 9)
        slots.append(held)
    past = step.example_inputs(shape)[3 + len(slots) :]
    return shape, HostInputs(ids, positions, first, slots), [torch.randn_like(tensor) for tensor in past]


def step_of(family, variant):
    """The fed step of a family's variant, where this version of transformers has one."""
    if family.model_class is None:
        pytest.skip(f"this version of transformers has no {family.model}")
    try:
        return Step(family.build(variant), FORM)
    except UnsupportedModelError as error:
        if not family.recent:
            raise
        pytest.skip(f"this version of transformers writes it in another way: {error}")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_a_fed_step_equals_the_step_itself(family):
    """Every family, windows, ALiBi and all, with padding and empty slots: logits, keys and values."""
    step = step_of(family, next(iter(family.variants)))
    shape, inputs, past = step_inputs(step)
    feeds = find_feeds(step)
    buffers = feeds.buffers(shape)
    feeds.write_(buffers, inputs)
    found = FedStep(step)(*buffers, *past)
    expected = step(inputs.token_ids, inputs.position_ids, inputs.first_positions, *inputs.slot_positions, *past)
    assert len(found) == len(expected)
    real = inputs.position_ids[0] >= 0
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    for mine, own in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine[1], own[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine[0][:, real], own[0][:, real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "variant", "parts"),
    [
        ("Llama", "default rope", ROTARY),
        ("Llama", "yarn", ROTARY),
        ("Gemma 3", "", ["embeddings", "cos.0", "sin.0", "cos.1", "sin.1", "mask.0", "mask.1"]),
        ("Bloom", "4 heads", ["embeddings", "alibi.0", "mask.0"]),
        ("GPT-2", "", ["position_ids", "embeddings", "mask.0"]),
        ("GPT-J", "", ["position_ids", "embeddings", "mask.0"]),
        ("Gemma 4", "own keys", ["token_ids", "embeddings", "cos.0", "sin.0", "cos.1", "sin.1", "mask.0", "mask.1"]),
    ],
)
def test_what_is_fed_is_found_by_looking(name, variant, parts):
    assert find_feeds(step_of(NAMES[name], variant)).names == parts


def test_scales_come_from_the_model():
    """Gemma multiplies its embeddings, YaRN its cosines; both on the model's side of what is fed."""
    gemma = find_feeds(Step(NAMES["Gemma 3"].build(), FORM))
    assert gemma.parts[0].scale == pytest.approx(8.0)  # the root of 64
    yarn = Step(NAMES["Llama"].build("yarn"), FORM)
    rotary = find_feeds(yarn).parts[1]
    assert rotary.scale == pytest.approx(yarn.model.model.rotary_emb.attention_scaling)
    assert find_feeds(Step(models.llama(), FORM)).parts[0].scale is None


def test_the_embedding_is_not_copied(tiny_llama):
    assert find_feeds(Step(tiny_llama, FORM)).tensors["embedding"].data_ptr() == (
        tiny_llama.model.embed_tokens.weight.data_ptr()
    )


def test_no_position_and_no_embedding_is_in_the_compiled_model():
    """Every input that is left is a number that float16 can hold, and the table of embeddings is nowhere."""
    step = Step(models.llama(tie_word_embeddings=True, vocab_size=320), FORM)
    model = static_model(step, StepShape(1, 4, 32))
    kinds = {port.get_element_type() for port in model.inputs}
    assert kinds == {ov.Type.f32, ov.Type.boolean}
    assert [port.get_any_name() for port in model.inputs[:4]] == ROTARY
    tables = [op for op in model.get_ops() if op.get_type_name() == "Constant" and list(op.shape) == [320, 64]]
    assert len(tables) == 1  # the head's
    assert not any(op.get_type_name() in ("Sin", "Cos") for op in model.get_ops())


@pytest.mark.parametrize("name", ["Gemma 3", "GPT-2", "MPT", "Phi-3", "Qwen3"])
def test_the_npu_plugin_gives_the_tokens_of_transformers(name):
    family = NAMES[name]
    model = family.build(next(iter(family.variants)))
    prompts = [random_prompt(length) for length in (3, 12, 20)]
    options = {"backend": "npu", "backend_options": {"NPUW_DEVICES": "CPU"}}
    session = Session(model, max_length=64, batch_size=3, prefill_buckets=[8, 32], **options)
    assert new_tokens(session.generate(prompts, max_new_tokens=24), 20) == [reference(model, p, 24) for p in prompts]


@pytest.mark.parametrize("name", ["Bloom", "Gemma 3", "GPT-2"])
def test_files_feed_the_same_without_the_model(tmp_path, name):
    """In another process, which imports no model class."""
    family = NAMES[name]
    step = Step(family.build(next(iter(family.variants))), FORM)
    feeds = find_feeds(step)
    shape, inputs, _ = step_inputs(step)
    expected = feeds.buffers(shape)
    feeds.write_(expected, inputs)
    write_feeds(feeds, tmp_path)
    torch.save([inputs.token_ids, inputs.position_ids, inputs.first_positions, *inputs.slot_positions], tmp_path / "in")
    code = f"""
        import sys
        from pathlib import Path
        import torch
        from staticgen.feeds import HostInputs, read_feeds
        from staticgen.shapes import StepShape
        folder = Path({str(tmp_path)!r})
        ids, positions, first, *slots = torch.load(folder / "in")
        feeds = read_feeds(folder / "feeds.json", folder / "feeds.safetensors")
        out = feeds.buffers(StepShape(2, 4, 16))
        feeds.write_(out, HostInputs(ids, positions, first, slots))
        torch.save(out, folder / "out")
        print([name for name in sys.modules if name.startswith("transformers.models.")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    found = torch.load(tmp_path / "out")
    assert len(found) == len(expected)
    assert all(torch.equal(mine, own) for mine, own in zip(found, expected, strict=True))


def test_a_broken_description_is_refused(tiny_llama):
    feeds = find_feeds(Step(tiny_llama, FORM))
    described = json.loads(json.dumps(feeds.describe()))
    assert Feeds.load(described, feeds.tensors).parts == feeds.parts
    with pytest.raises(ValueError, match="kind 'magic', expected one of token_ids"):
        Feeds.load([{"kind": "magic"}], {})
    with pytest.raises(ValueError, match="is not a mask"):
        Feeds.load([{"kind": "mask", "nope": 1}], {})
    with pytest.raises(ValueError, match=r"tensor 'embedding' is missing; there are \['frequencies\.0'\]"):
        Feeds.load(described, {"frequencies.0": feeds.tensors["frequencies.0"]})


def test_a_table_that_is_mapped_from_its_file_is_read(tmp_path, tiny_llama):
    feeds = find_feeds(Step(tiny_llama, FORM))
    paths = write_feeds(feeds, tmp_path)
    again = read_feeds(paths["feeds"], paths["feed_tensors"])
    assert torch.equal(again.tensors["embedding"], tiny_llama.model.embed_tokens.weight)
    shape = StepShape(1, 2, 16)
    assert [tuple(one.shape) for one in again.example(shape)] == [
        tuple(one.shape) for one in fed_inputs(Step(tiny_llama, FORM), shape)[:4]
    ]
