import models
import numpy as np
import openvino as ov
import pytest
import staticgen.compile
import torch
from models import random_prompt, reference

from staticgen import UnknownNameError
from staticgen.feeds import HostInputs, read_feeds
from staticgen.shapes import StepShape


@pytest.mark.parametrize("profile", ["intel-npu", "generic-cpu"])
@pytest.mark.parametrize("family", [models.llama(), models.gpt2(), models.mistral()], ids=["llama", "gpt2", "mistral"])
def test_the_files_alone_give_the_tokens(tmp_path, family, profile):
    """C61: read back, every shape is static, nothing is stateful, and a plain OpenVINO loop decodes with them."""
    folder = tmp_path / "Qwen2.5-x 0.5B é"
    made = staticgen.compile.compile_bundle(family, folder, profile=profile, max_length=32, prefill_buckets=[8])
    files = {program.shape.tokens: program.paths for program in made.programs.values()}
    assert sorted(files) == [1, 8]
    assert (folder / "feeds.json").exists() == (profile == "intel-npu")
    core = ov.Core()
    decode, prefill = (core.read_model(files[tokens]["model"], files[tokens]["weights"]) for tokens in (1, 8))
    for model in (decode, prefill):
        assert not {"ReadValue", "Assign"} & {operation.get_type_name() for operation in model.get_ops()}
        assert all(port.get_partial_shape().is_static for op in model.get_ops() for port in op.outputs())
    # Compiling may add aliases to a port, so that names are taken from the file and values are fed in its order.
    names = [port.get_any_name() for port in decode.inputs]
    results = [port.get_any_name() for port in decode.outputs]
    inputs = {
        name: np.zeros(port.shape, port.element_type.to_dtype())
        for name, port in zip(names, decode.inputs, strict=True)
    }
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    decode, prefill = (core.compile_model(model, "CPU", options) for model in (decode, prefill))
    length = inputs["past_value.0"].shape[2]  # of a model with a window: that
    slots = np.full((1, length), -1)
    prompt, tokens = random_prompt(5), []
    feeds = read_feeds(folder / "feeds.json", folder / "feeds.safetensors") if profile == "intel-npu" else None

    def run(program, ids, positions):
        given = {"token_ids": np.array([ids]), "position_ids": np.array([positions])}
        given["first_positions"] = np.zeros_like(given["position_ids"])
        if feeds is None:
            feed = {**inputs, **given, "slot_positions.0": slots}
        else:
            buffers = feeds.buffers(StepShape(1, len(ids), 32))
            held = [torch.from_numpy(slots)]
            feeds.write_(buffers, HostInputs(*(torch.from_numpy(array) for array in given.values()), held))
            feed = {**inputs, **{name: one.numpy() for name, one in zip(feeds.names, buffers, strict=True)}}
        output = dict(zip(results, program([feed[name] for name in names]).values(), strict=True))
        for column, position in enumerate(positions):
            if position >= 0:
                place = position % length
                slots[0, place] = position
                for name in (name for name in names if name.startswith("past_")):
                    turned = name.startswith("past_key") and inputs[name].shape[-1] == length
                    slot = (..., place) if turned else (slice(None), slice(None), place)
                    inputs[name][slot] = output[name.replace("past", "new")][:, :, column]
        tokens.append(int(output["logits"][0].argmax()))

    run(prefill, [0, 0, 0, *prompt], [-1, -1, -1, 0, 1, 2, 3, 4])
    for position in range(5, 16):
        run(decode, [tokens[-1]], [position])
    assert tokens == reference(family, prompt, 12)


def test_nothing_is_left_of_a_compile_that_failed(tiny_llama, tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(ov, "save_model", full_disk)
    with pytest.raises(OSError, match="No space left"):
        staticgen.compile.compile_bundle(tiny_llama, tmp_path / "out", max_length=32)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tiny_llama, tmp_path):
    with pytest.raises(FileExistsError, match="exists already"):
        staticgen.compile.compile_bundle(tiny_llama, tmp_path)
    with pytest.raises(UnknownNameError, match="unknown profile 'npu'"):
        staticgen.compile.compile_bundle(tiny_llama, tmp_path / "out", profile="npu")
    with pytest.raises(ValueError, match="33 or less"):
        staticgen.compile.compile_bundle(models.gpt2(n_positions=32), tmp_path / "out", max_length=34)
    assert list(tmp_path.iterdir()) == []


def test_half_precision_weights_halve_the_files(tiny_llama, tmp_path):
    sizes = []
    for weights in (None, "float16"):
        staticgen.compile.compile_bundle(tiny_llama, tmp_path / str(weights), max_length=16, weights=weights)
        sizes.append((tmp_path / str(weights) / "weights.bin").stat().st_size)
    assert sizes[1] < 0.6 * sizes[0]
    assert torch.get_default_dtype() == torch.float32
