"""Decode steps lowered by inductor for an NVIDIA GPU that is not there, and their kernels compiled by Triton's compiler."""

import sys
from pathlib import Path

import models
import pytest
import torch
from families import FAMILIES

from staticgen.shapes import StepForm, StepShape
from staticgen.step import step_for

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason=f"needs a CUDA build of torch, and this is {torch.__version__}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU here: tests marked gpu run on it"),
]  # fmt: skip
# Windows and softcap, shared keys, learned positions, experts, a sink score. Not ALiBi: inductor wants the numbers of its
# slopes, and tensors of a GPU that is not there have none.
CHOSEN = [
    ("Llama", "longrope"), ("Gemma 2", ""), ("Gemma 4", "shared keys"), ("GPT-2", ""), ("Mixtral", ""), ("GPT-OSS", ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    """The benchmark, whose account is tested."""
    folder = str(Path(__file__).parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import gpu_kernels

        yield gpu_kernels
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize(("name", "variant"), CHOSEN, ids=[" ".join(filter(None, case)) for case in CHOSEN])
def test_families(kernels, name, variant):
    model = next(family for family in FAMILIES if family.name == name).build(variant)
    step = step_for(model, StepForm("spread"))
    account = kernels.lowered(step, StepShape(2, 1, 256), "sm_90", ideal=1)
    compiled = kernels.machine_code(account.source, "sm_90")
    assert 0 < len(compiled) <= account.kernels  # some are launched more than once
    assert account.kernels + account.calls < 0.6 * account.operations


def test_a_layer_of_an_8b_llama(kernels):
    """One row in bfloat16: every product with weights is Triton's, and nothing is read twice."""
    found = {}
    for layers in (1, 2):
        sizes = {**kernels.LLAMAS["8B"], "vocab_size": 64, "num_hidden_layers": layers}
        model, shape = kernels.random_model(sizes), StepShape(1, 1, 2048)
        ideal = kernels.bytes_per_step(model, 1, 2048)
        found[layers] = kernels.lowered(step_for(model, StepForm("spread")), shape, "sm_90", ideal)
    few, many = found[1], found[2]
    assert many.kernels - few.kernels <= 12
    assert many.calls - few.calls == 2  # attention's products with the past, and no others
    assert many.operations - few.operations > 50
    assert many.bytes - few.bytes < 1.01 * (many.ideal - few.ideal)


def test_nothing_of_the_absent_gpu_stays(kernels):
    with kernels.absent("sm_80"):
        assert torch.cuda.get_device_capability() == (8, 0)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.get_device_capability()


def test_each_chip_has_its_own_code(kernels):
    step, shape = step_for(models.llama(), StepForm("spread")), StepShape(1, 1, 128)
    codes = {
        chip: kernels.machine_code(kernels.lowered(step, shape, chip, 1).source, chip) for chip in ("sm_80", "sm_90")
    }
    assert all(min(sizes.values()) > 1000 for sizes in codes.values())
    assert tuple(codes["sm_80"].values()) != tuple(codes["sm_90"].values())
