"""Backend ``openvino``: the step compiled by OpenVINO, on the CPU unless another device is named.

The step is converted once, with every size left open, and then fixed to each size that is compiled:
for a 30-layer model conversion takes seconds where compiling one size takes two. The cache and the
outputs are host memory that OpenVINO reads and writes in place.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from staticgen.backends.base import Backend, Program
from staticgen.backends.openvino_graph import transpose_heads_late
from staticgen.cache import KVBuffers, KVCache
from staticgen.errors import BackendUnavailableError, CompileError, UnknownNameError
from staticgen.fed import FedStep, fed_inputs, feeds_of
from staticgen.feeds import Feeds, HostInputs
from staticgen.profiles import load_profile
from staticgen.shapes import StepShape
from staticgen.step import Step

try:
    import openvino as ov
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
except ImportError as error:  # pragma: no cover - openvino is a dependency of the package
    raise BackendUnavailableError("OpenVINO is not installed: pip install openvino") from error

# OpenVINO's name of a precision, and of a device's capability to compute in it.
_PRECISION = {torch.float32: ("f32", "FP32"), torch.float16: ("f16", "FP16"), torch.bfloat16: ("bf16", "BF16")}
_PROFILES = {"CPU": "generic-cpu", "GPU": "intel-gpu", "NPU": "intel-npu"}

# Converted steps with open sizes, kept as long as the step itself.
_converted: weakref.WeakKeyDictionary[Step, ov.Model] = weakref.WeakKeyDictionary()


class OpenVINOProgram(Program):
    """An infer request over buffers that are bound once."""

    def __init__(self, compiled: ov.CompiledModel, step: Step, shape: StepShape, feeds: Feeds | None = None):
        super().__init__(shape)
        self._request = compiled.create_infer_request()
        self._feeds = feeds
        size = (shape.batch, shape.tokens)
        if feeds is None:
            self._inputs = [torch.zeros(size, dtype=torch.int64, device="cpu") for _ in range(3)]
        else:
            self._inputs = feeds.buffers(shape)
        self._logits = torch.zeros(shape.batch, step.logits_size, dtype=torch.float32, device="cpu")
        self._new = KVBuffers(step.cache_spec, shape.batch, shape.tokens)
        self._cache: KVCache | None = None
        for index, tensor in enumerate(self._inputs):
            self._request.set_input_tensor(index, _share(tensor))
        for index, tensor in enumerate((self._logits, *self._new.keys, *self._new.values)):
            self._request.set_output_tensor(index, _share(tensor))

    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        if cache is not self._cache:
            slots = cache.slot_positions if self._feeds is None else ()
            past = (*slots, *cache.buffers.keys, *cache.buffers.values)
            for index, tensor in enumerate(past, start=len(self._inputs)):
                self._request.set_input_tensor(index, _share(tensor))
            self._cache = cache
        if self._feeds is None:
            for own, given in zip(self._inputs, inputs, strict=True):
                own.copy_(given)
        else:
            self._feeds.write_(self._inputs, HostInputs(inputs[0], inputs[1], inputs[2], cache.slot_positions))
        self._request.infer()
        return self._logits, self._new


class OpenVINOBackend(Backend):
    """``device`` is OpenVINO's: CPU, GPU, GPU.1, AUTO:GPU,CPU ...; ``options`` are its properties."""

    name = "openvino"
    default_device = "CPU"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        super().__init__((device or self.default_device).upper(), options)
        self._core = ov.Core()
        self._require_devices()
        profile = load_profile(_PROFILES.get(self.device.split(":")[-1].split(",")[0].split(".")[0], "generic-cpu"))
        self.form = profile.form
        self.prefill_buckets = profile.prefill_buckets
        self.cache_sizes = profile.cache_sizes
        self._check_options(options or {})
        self._options = {**profile.compile_options, **(options or {})}

    def compile(self, step: Step, shape: StepShape) -> Program:
        model = static_model(step, shape)
        options = {**self._precision(step.dtype), **self._options}
        try:
            compiled = self._core.compile_model(model, self.device, options)
            return OpenVINOProgram(compiled, step, shape, feeds_of(step) if step.form.fed else None)
        except RuntimeError as error:
            raise CompileError(
                f"OpenVINO device {self.device} refused the step {shape} in {step.dtype}: {error}"
            ) from error

    def _precision(self, dtype: torch.dtype) -> dict[str, str]:
        """The step's own precision, or float32 on a device that has it not: OpenVINO would take a coarser one.

        An NPU computes in float16 whatever the model's dtype, and its plugin has no such option.
        """
        precision, capability = _PRECISION[dtype]
        device = self.device.split(":")[-1].split(",")[0]
        if not self.emulated:
            if device.split(".", maxsplit=1)[0] == "NPU":
                return {}
            if capability not in self._core.get_property(device, "OPTIMIZATION_CAPABILITIES"):
                precision = "f32"
        return {"INFERENCE_PRECISION_HINT": precision}

    def _require_devices(self) -> None:
        """Every device named must be here: OpenVINO's own fallback to another one would be silent."""
        present = list(self._core.available_devices)
        wanted = [part for part in self.device.replace(":", ",").split(",") if part not in ("AUTO", "HETERO", "MULTI")]
        for device in wanted:
            family = device.split(".")[0]
            if family not in _PROFILES:
                raise UnknownNameError(f"unknown OpenVINO device {device!r}: expected one of {', '.join(_PROFILES)}")
            # A single device has no number in OpenVINO's list, and may be asked for as the first one.
            numbered = family != "CPU" and device == f"{family}.0" and family in present
            if device not in present and not numbered:
                raise BackendUnavailableError(missing_device_message(self.name, device, present))

    def _check_options(self, options: Mapping[str, str]) -> None:
        if self.device not in _PROFILES:
            return  # several devices: OpenVINO says itself what none of them knows
        known = {str(name) for name in self._core.get_property(self.device, "SUPPORTED_PROPERTIES")}
        for name in options:
            if name not in known and not name.startswith("NPU"):  # the NPU plugin does not list all of its own
                raise ValueError(
                    f"backend_options has the unknown option {name!r} for OpenVINO device {self.device}; "
                    f"known are {', '.join(sorted(known))}"
                )


def missing_device_message(backend: str, device: str, present: list[str]) -> str:
    """What is missing, what was found, and what can be done about it."""
    hint = {
        "GPU": " For a GPU, install Intel's compute runtime (OpenCL) and let this user open /dev/dri/render*",
        "NPU": " For an NPU, install Intel's NPU driver with its compiler and let this user open /dev/accel/accel0; without an NPU, "
        "backend_options={'NPUW_DEVICES': 'CPU'} runs the NPU plugin on the CPU",
    }.get(device.split(".", maxsplit=1)[0], "")
    return (
        f"backend {backend!r} wants OpenVINO device {device}, but OpenVINO finds {', '.join(present) or 'none'} here. "
        f"Alternatives: backend='openvino' (the CPU) or backend='auto'.{hint}"
    )


def static_model(step: Step, shape: StepShape) -> ov.Model:
    """The step as an OpenVINO model in which every dimension is fixed to ``shape``.

    Raises:
        CompileError: a dimension stayed open; the message names the operation.
    """
    model = convert_step(step).clone()
    sizes = [tuple(tensor.shape) for tensor in _example_inputs(step, shape)]
    model.reshape({port: ov.PartialShape(list(size)) for port, size in zip(model.inputs, sizes, strict=True)})
    for operation in model.get_ops():
        for output in operation.outputs():
            if output.get_partial_shape().is_dynamic:
                raise CompileError(
                    f"the step {shape} is not static: {operation.get_friendly_name()} has shape {output.get_partial_shape()}"
                )
    if step.form.late_heads:
        transpose_heads_late(model)
    return model


def _example_inputs(step: Step, shape: StepShape) -> tuple[torch.Tensor, ...]:
    return fed_inputs(step, shape) if step.form.fed else step.example_inputs(shape)


def convert_step(step: Step) -> ov.Model:
    """The step as an OpenVINO model with open sizes; converted once per step.

    It goes through a trace, which records sizes as operations; torch.export would fix or guard them and took
    five times as long for open sizes.
    """
    if step not in _converted:
        example = _example_inputs(step, StepShape(batch=2, tokens=3, cache_length=16))
        traced = FedStep(step) if step.form.fed else step
        config = step.model.config.get_text_config()
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            # OpenVINO has no operation for the grouped matmul that transformers takes by default.
            step.model.set_experts_implementation("batched_mm")
        kind = step.model.config.model_type
        with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")  # the tracer warns of every size that it records
            try:
                # Tracing again to check the trace would take a third of the time; parity is what the tests check.
                decoder = TorchScriptPythonDecoder(traced, example_input=example, trace_kwargs={"check_trace": False})
                # What ov.convert_model does too; that would send usage data besides.
                front_end = FrontEndManager().load_by_framework("pytorch")
                model = front_end.convert(front_end.load(decoder))
            except RuntimeError as error:
                raise CompileError(f"OpenVINO cannot convert model_type {kind!r}: {error}") from error
        fixed = [str(one.message).strip() for one in warned if "to a Python list" in str(one.message)]
        if fixed:
            raise CompileError(
                f"OpenVINO cannot convert model_type {kind!r}: it reads numbers out of its tensors, which would stay what "
                f"they are in the trace ({fixed[0].splitlines()[0]}); use backend='eager'"
            )
        _name_ports(model, step)
        _converted[step] = model
    return _converted[step]


def _name_ports(model: ov.Model, step: Step) -> None:
    layers = range(step.layers)
    if step.form.fed:
        inputs = feeds_of(step).names
    else:
        inputs = ["token_ids", "position_ids", "first_positions"]
        inputs += [f"slot_positions.{index}" for index in range(len(step.cache_spec.windows))]
    inputs += [f"past_key.{index}" for index in layers] + [f"past_value.{index}" for index in layers]
    outputs = ["logits"] + [f"new_key.{index}" for index in layers] + [f"new_value.{index}" for index in layers]
    for ports, names in ((model.inputs, inputs), (model.outputs, outputs)):
        if len(ports) != len(names):
            raise CompileError(f"conversion gave {len(ports)} ports where the step has {len(names)}")
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})


def _share(tensor: torch.Tensor) -> Any:
    """An OpenVINO tensor over the memory of a contiguous torch tensor."""
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        return ov.Tensor(tensor.view(torch.uint16).numpy(), ov.Shape(list(tensor.shape)), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)
