import functools
import subprocess
import sys

import models
import openvino as ov
import pytest
import torch
import transformers as tf
from models import new_tokens, random_prompt, reference

from staticgen import BackendUnavailableError, CompileError, Session, UnknownNameError
from staticgen.backends import BACKENDS, open_backend
from staticgen.backends.ir import static_model
from staticgen.backends.openvino import OpenVINOBackend
from staticgen.cache import KVCache
from staticgen.shapes import StepForm, StepShape
from staticgen.step import Step

DEVICES = ov.Core().available_devices


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import staticgen, staticgen.cli", ["torch", "transformers", "openvino"]),
        ("import staticgen; staticgen.generate, staticgen.Session", ["openvino", "torch_xla", "jax"]),
    ],
)
def test_imports_wait_for_their_use(code, absent):
    """Naming a backend imports no vendor library, and the command's help not even torch."""
    code += f"; import sys; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    import staticgen

    assert all(getattr(staticgen, name) for name in staticgen.__all__)
    assert set(staticgen.__all__) <= set(dir(staticgen))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        staticgen.nope  # noqa: B018


def test_auto_takes_the_best_that_is_present_and_says_which(caplog):
    with caplog.at_level("INFO", logger="staticgen"):
        backend = open_backend("auto")
    assert backend.name == ("npu" if "NPU" in DEVICES else "openvino")
    assert f"chose {backend.description}" in caplog.text


def test_auto_never_takes_a_stand_in(monkeypatch):
    monkeypatch.setenv("NPUW_DEVICES", "CPU")
    assert open_backend("npu").description == "npu plugin run on CPU"
    assert open_backend("auto").name == ("npu" if "NPU" in DEVICES else "openvino")
    with pytest.raises(ValueError, match="by name"):
        open_backend("auto", device="CPU")


def test_auto_without_openvino_is_eager(monkeypatch):
    from staticgen.registry import Registry

    def missing(*_):
        raise BackendUnavailableError("OpenVINO is not installed")

    entries = {"eager": BACKENDS.get("eager"), "openvino": missing, "npu": missing}
    monkeypatch.setattr("staticgen.backends.BACKENDS", Registry("backend", entries))
    assert open_backend("auto").name == "eager"


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("npu", None),
        ("openvino", "NPU"),
        ("openvino", "AUTO:NPU,CPU"),
        ("openvino", "GPU"),
        ("openvino", "GPU.1"),
    ],
)
def test_a_missing_device_is_an_error_with_what_there_is(name, device, monkeypatch):
    """C59: at once, before any model is touched, and never another device in silence."""
    wanted = (device or "NPU").split(":")[-1].split(",")[0]
    if any(wanted.split(".")[0] in present for present in DEVICES):
        pytest.skip(f"this machine has {wanted}")
    with pytest.raises(
        BackendUnavailableError,
        match=rf"{wanted}, but OpenVINO finds .*CPU.*backend='openvino'.*`staticgen devices [gn]pu`",
    ):
        open_backend(name, device)


def test_unknown_devices_and_options():
    with pytest.raises(BackendUnavailableError, match=r"wants OpenVINO device CPU\.7, but OpenVINO finds .*CPU"):
        open_backend("openvino", "CPU.7")
    with pytest.raises(UnknownNameError, match="unknown OpenVINO device 'TPU': expected one of CPU, GPU, NPU"):
        open_backend("openvino", "TPU")
    with pytest.raises(UnknownNameError, match="NPU only, got device='CPU'"):
        open_backend("npu", "CPU")
    with pytest.raises(UnknownNameError, match="'cpu' only"):
        open_backend("eager", "cuda")
    with pytest.raises(ValueError, match="no backend_options"):
        open_backend("eager", None, {"A": "B"})
    with pytest.raises(ValueError, match=r"unknown option 'NO_SUCH'.*INFERENCE_PRECISION_HINT"):
        open_backend("openvino", None, {"NO_SUCH": "1"})


def test_the_advice_for_a_missing_npu_works(tiny_llama):
    """C62: what an error tells people to do can be done."""
    prompt = random_prompt(5)
    session = Session(tiny_llama, max_length=32, backend="npu", backend_options={"NPUW_DEVICES": "CPU"})
    assert new_tokens(session.generate(prompt), 5) == [reference(tiny_llama, prompt, 27)]
    assert Session(tiny_llama, max_length=32, backend="openvino").backend.device == "CPU"


@pytest.mark.parametrize("family", [models.llama(), models.gpt2(), models.mistral()], ids=["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("form", [StepForm("concat", False), StepForm("split", True)], ids=str)
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_model_for_the_compiler_is_static_and_stateless(family, form, tokens):
    """C61: every dimension of every operation is fixed, nothing is stateful, ports have names and types."""
    step = Step(family, form)
    model = static_model(step, StepShape(2, tokens, 32))
    kinds = {operation.get_type_name() for operation in model.get_ops()}
    assert not kinds & {"ReadValue", "Assign"}
    for operation in model.get_ops():
        assert all(output.get_partial_shape().is_static for output in operation.outputs()), operation
    assert [port.get_any_name() for port in model.inputs[:4]] == [
        "token_ids",
        "position_ids",
        "first_positions",
        "slot_positions.0",
    ]
    slots = 32 if step.cache_spec.longest is None else 8  # a window of 8 has no more
    assert [list(port.shape) for port in model.inputs[:4]] == [[2, tokens]] * 3 + [[2, slots]]
    assert list(model.output("logits").shape) == [2, 128]
    assert len(model.inputs) == 4 + 4
    assert len(model.outputs) == 1 + 4


def test_a_dimension_that_stays_open_is_named(tiny_llama, monkeypatch):
    step = Step(tiny_llama, StepForm())
    monkeypatch.setattr(ov.Model, "reshape", lambda *_: None)
    with pytest.raises(CompileError, match=r"is not static: .* has shape"):
        static_model(step, StepShape(1, 1, 16))


def test_numbers_that_a_trace_would_fix_are_refused():
    """A size read out of a tensor stays what it was in the trace: right at that size, and wrong at others."""

    class Counting(tf.LlamaForCausalLM):
        @functools.wraps(tf.LlamaForCausalLM.forward)
        def forward(self, input_ids, **arguments):
            assert len(input_ids.flatten().tolist()) > 0
            return super().forward(input_ids=input_ids, **arguments)

    model = Counting(models.llama().config).eval()
    with pytest.raises(CompileError, match=r"'llama': it reads numbers out of its tensors.*use backend='eager'"):
        Session(model, max_length=32, backend="openvino")
    assert Session(model, max_length=32, backend="eager").generate([5, 6], max_new_tokens=2).shape == (1, 4)


def test_what_a_compiler_refuses_is_said_in_its_words(tiny_llama):
    with pytest.raises(CompileError, match=r"device CPU refused the step \[batch 1"):
        Session(tiny_llama, max_length=32, backend="openvino", backend_options={"INFERENCE_PRECISION_HINT": "f99"})


def test_fp32_is_fp32(tiny_llama):
    """C60: none of the CPU plugin's reduced precision defaults, unless asked for."""
    session = Session(tiny_llama, max_length=64, batch_size=3, backend="openvino")
    used = session._programs._programs[StepShape(3, 1, 64)]._request.get_compiled_model()
    assert used.get_property("INFERENCE_PRECISION_HINT") == ov.Type.f32
    assert used.get_property("KV_CACHE_PRECISION") == ov.Type.f32
    assert used.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0
    prompts = [random_prompt(length) for length in (3, 9, 16)]
    assert new_tokens(session.generate(prompts, max_new_tokens=32), 16) == [
        reference(tiny_llama, p, 32) for p in prompts
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["eager", "openvino"])
def test_half_precision_is_near_and_finite(tiny_llama, name, dtype):
    """Logits of one step against the float32 model: within what the dtype can hold."""
    import copy

    model = copy.deepcopy(tiny_llama).to(dtype)
    backend = open_backend(name)
    step = Step(model, backend.form)
    assert step.dtype == dtype
    prompt = random_prompt(12)
    program = backend.compile(step, StepShape(1, 12, 16))
    cache = KVCache(step.cache_spec, 1, 16, transposed_keys=backend.form.transposed_keys)
    positions = torch.arange(12)[None]
    logits, new = program(torch.tensor([prompt]), positions, torch.zeros_like(positions), cache)
    exact = copy.deepcopy(model).float()(torch.tensor([prompt])).logits[:, -1]
    assert logits.dtype == torch.float32
    assert new.keys[0].dtype == dtype
    assert all(torch.isfinite(tensor).all() for tensor in (logits, *new.keys, *new.values))
    limit = 0.02 if dtype == torch.float16 else 0.15
    assert (logits - exact).abs().max() < limit * exact.std()
    session = Session(model, max_length=32, backend=name)
    assert session.generate(prompt).shape == (1, 32)


def test_the_profile_of_each_device_exists():
    from staticgen.backends.openvino import _PROFILES
    from staticgen.profiles import load_profile, profile_names

    assert set(_PROFILES.values()) <= set(profile_names())
    assert load_profile("intel-npu").form == StepForm("concat", late_heads=True, fed=True)
    assert OpenVINOBackend().form == load_profile("generic-cpu").form
