"""Weights as whole numbers: what NNCF does to a step, and what is left of its accuracy."""

import os
import subprocess
import sys
import textwrap

import models
import numpy as np
import openvino as ov
import pytest
import torch
from staticgen.compile import WEIGHT_MODES, compress_weights

from staticgen import BackendUnavailableError, UnknownNameError
from staticgen.backends.ir import convert_step, static_model, write_ir
from staticgen.bundle import sha256_of
from staticgen.profiles import load_profile
from staticgen.shapes import StepShape
from staticgen.step import Step

pytest.importorskip("nncf", reason="needs NNCF: pip install 'staticgen[nncf]'")
SHAPES = {"decode": StepShape(1, 1, 32), "prefill_8": StepShape(1, 8, 32), "prefill_16": StepShape(1, 16, 64)}


@pytest.fixture(scope="module")
def step():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 512, "num_attention_heads": 2}
    return Step(models.llama(**sizes), load_profile("intel-npu").form)


def logits_of(model, step):
    inputs = [tensor.numpy() for tensor in model_inputs(step)]
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    return ov.Core().compile_model(model, "CPU", options)(inputs)[0]


def model_inputs(step):
    from staticgen.fed import fed_inputs

    torch.manual_seed(0)
    embeddings, *rest = fed_inputs(step, SHAPES["prefill_8"])
    return torch.randn_like(embeddings) * 0.2, *rest


@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_weights_are_symmetric_whole_numbers_and_logits_near(step, mode):
    converted = convert_step(step)
    before = [op.get_element_type() for op in converted.get_ops() if op.get_type_name() == "Constant"]
    small = compress_weights(converted, mode)
    kinds = [op.get_element_type() for op in small.get_ops() if op.get_type_name() == "Constant"]
    wanted = {"int8": {ov.Type.i8}, "int4": {ov.Type.i4, ov.Type.i8}, "int4-g64": {ov.Type.i4, ov.Type.i8}}[mode]
    assert {kind for kind in kinds if kind in (ov.Type.i8, ov.Type.u8, ov.Type.i4, ov.Type.u4)} == wanted
    matmuls = sum(op.get_type_name() == "MatMul" for op in small.get_ops())
    attention = 2 * step.layers
    assert sum(kinds.count(kind) for kind in wanted) == matmuls - attention  # every weight, the head's too
    assert before == [op.get_element_type() for op in converted.get_ops() if op.get_type_name() == "Constant"]
    exact, found = (logits_of(static_model(step, SHAPES["prefill_8"], model), step) for model in (converted, small))
    # The spacing of the numbers is 1/127 or 1/7 of the largest weight of a channel.
    limit = {"int8": 0.06, "int4": 0.8, "int4-g64": 0.8}[mode]
    assert 0 < np.abs(found - exact).max() < limit * exact.std() * 4


@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_all_programs_have_one_file_of_weights_and_it_is_always_the_same(step, mode, tmp_path):
    digests = set()
    for turn in ("first", "second"):
        folder = tmp_path / turn
        folder.mkdir()
        files = write_ir(step, SHAPES, folder, compress_weights(convert_step(step), mode), compress_to_fp16=True)
        assert {file.paths["weights"] for file in files} == {folder / "weights.bin"}
        digests.add(sha256_of(folder / "weights.bin"))
    assert len(digests) == 1


def test_files_shrink(step, tmp_path):
    sizes = {}
    for mode in (None, *WEIGHT_MODES):
        folder = tmp_path / str(mode)
        folder.mkdir()
        model = None if mode is None else compress_weights(convert_step(step), mode)
        write_ir(step, SHAPES, folder, model, compress_to_fp16=True)
        sizes[mode] = (folder / "weights.bin").stat().st_size
    assert sizes["int8"] < 0.6 * sizes[None]
    assert sizes["int4"] < 0.8 * sizes["int8"]
    assert sizes["int4"] < sizes["int4-g64"] < sizes["int8"]


def test_bad_modes_and_a_missing_nncf(step, monkeypatch):
    converted = convert_step(step)
    with pytest.raises(UnknownNameError, match="unknown weight mode 'int3': expected one of int8, int4, int4-g64"):
        compress_weights(converted, "int3")
    monkeypatch.setitem(sys.modules, "nncf", None)  # as Python marks a module that cannot be imported
    with pytest.raises(BackendUnavailableError, match=r"needs NNCF: pip install 'staticgen\[nncf\]'"):
        compress_weights(converted, "int8")


PROCESS = """
    import sys
    import numpy as np, openvino as ov
    from openvino import opset13 as ops
    from openvino_telemetry.utils.sender import TelemetrySender
    sent = []
    TelemetrySender.send = lambda self, backend, message: sent.append(message)
    data = ops.parameter([-1, 64], np.float32)
    weight = ops.constant(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))
    model = ov.Model([ops.matmul(data, weight, False, True)], [data])
    if sys.argv[1] == "nncf":
        import nncf
        small = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    else:
        from staticgen.compile import compress_weights
        small = compress_weights(model, "int8")
    assert any(op.get_element_type() == ov.Type.i8 for op in small.get_ops())
    print(len(sent), "sent")
"""


@pytest.mark.parametrize("caller", ["nncf", "staticgen"])
def test_nothing_is_sent_and_nothing_is_said(caller, tmp_path):
    """NNCF sends what it is used for and shows its progress, here not. In a process of its own: under pytest it differs."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROCESS), caller]
    environment = {**os.environ, "HOME": str(tmp_path)}
    for name in [name for name in environment if name.startswith(("CI", "NNCF", "PYTEST"))]:
        del environment[name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *said, sent = done.stdout.splitlines()
    if caller == "staticgen":
        assert (said, sent) == ([], "0 sent")
    else:
        assert said, "NNCF says nothing any more: _quiet has no use"
        if sent == "0 sent":
            pytest.skip("NNCF sends nothing from this machine")
