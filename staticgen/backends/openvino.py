"""Backend ``openvino``: the step compiled by OpenVINO, on the CPU unless another device is named.

The cache and the outputs are host memory that OpenVINO reads and writes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from staticgen.backends.base import Backend, Program, ProgramFiles
from staticgen.cache import KVBuffers, KVCache
from staticgen.errors import BackendUnavailableError, CompileError, UnknownNameError
from staticgen.facts import StepFacts
from staticgen.feeds import Feeds, HostInputs, read_feeds
from staticgen.profiles import load_profile
from staticgen.shapes import StepShape, slots_of

try:
    import openvino as ov
except ImportError as error:  # pragma: no cover - openvino is a dependency of the package
    raise BackendUnavailableError("OpenVINO is not installed: pip install openvino") from error

# OpenVINO's name of a precision, and of a device's capability to compute in it.
_PRECISION = {torch.float32: ("f32", "FP32"), torch.float16: ("f16", "FP16"), torch.bfloat16: ("bf16", "BF16")}
# Properties of a device that tell its driver.
_DRIVER = ("NPU_DRIVER_VERSION", "NPU_COMPILER_VERSION", "GPU_DRIVER_VERSION")
_PROFILES = {"CPU": "generic-cpu", "GPU": "intel-gpu", "NPU": "intel-npu"}

if TYPE_CHECKING:
    from pathlib import Path

    from staticgen.step import Step


class OpenVINOProgram(Program):
    """An infer request over buffers that are bound once."""

    def __init__(self, compiled: ov.CompiledModel, step: StepFacts, shape: StepShape, feeds: Feeds | None):
        super().__init__(shape)
        self._request = compiled.create_infer_request()
        self._feeds = feeds
        size = (shape.batch, shape.tokens)
        if feeds is None:
            self._inputs = [torch.zeros(size, dtype=torch.int64, device="cpu") for _ in range(3)]
        else:
            self._inputs = feeds.buffers(shape)
        _require_ports(compiled, step, shape, self._inputs, feeds is None)
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
    _stand_in = ""  # the device in whose place another one is named

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
        # A stand-in, or several devices under one name, give nothing that can be taken back. A CPU compiles in a second,
        # and a blob would be as large as the weights: without them (CACHE_MODE=OPTIMIZE_SIZE) it gave wrong logits.
        self.keeps_blobs = not self.emulated and self.device.split(".")[0] in ("GPU", "NPU")

    def compile(self, step: Step, shape: StepShape) -> Program:
        from staticgen.backends.ir import feeds_of, static_model  # noqa: PLC0415 - it needs the model's classes

        model = static_model(step, shape)
        return OpenVINOProgram(self._compile(model, step, shape), step, shape, feeds_of(step))

    def _compile(self, model: ov.Model, step: StepFacts, shape: StepShape) -> ov.CompiledModel:
        try:
            return self._core.compile_model(model, self.device, self._all_options(step))
        except RuntimeError as error:
            raise CompileError(
                f"OpenVINO device {self.device} refused the step {shape} in {step.dtype}: {error}"
            ) from error

    def _all_options(self, step: StepFacts) -> dict[str, str]:
        return {**self._precision(step.dtype), **self._options}

    @property
    def made_for(self) -> dict[str, Any]:
        device = self.device.split(":")[-1].split(",")[0]
        found: dict[str, Any] = {"backend": self.name, "device": self.device, "openvino": ov.get_version()}
        known = [] if self.emulated else self._core.get_property(device, "SUPPORTED_PROPERTIES")
        for name in ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "OPTIMIZATION_CAPABILITIES", *_DRIVER):
            if name in known:
                found[name.lower()] = _as_json(self._core.get_property(device, name))
        return {**found, "options": dict(sorted(self._options.items()))}

    @property
    def conversion(self) -> dict[str, Any]:
        return {"backend": "openvino", "openvino": ov.get_version()}

    def convert(self, step: Step, folder: Path) -> None:
        from staticgen.backends.ir import write_open  # noqa: PLC0415 - it needs the model's classes

        write_open(step, folder)

    def read_converted(self, folder: Path) -> ov.Model:
        from staticgen.backends.ir import read_open  # noqa: PLC0415 - it needs the model's classes

        return read_open(self._core, folder)

    def compile_converted(self, step: Step, converted: ov.Model, shape: StepShape, blob: Path | None = None) -> Program:
        from staticgen.backends.ir import feeds_of, static_model  # noqa: PLC0415 - it needs the model's classes

        compiled = self._compile(static_model(step, shape, converted), step, shape)
        if blob is not None:
            blob.write_bytes(compiled.export_model().getvalue())
        return OpenVINOProgram(compiled, step, shape, feeds_of(step))

    def load_blob(self, step: Step, shape: StepShape, blob: Path) -> Program:
        from staticgen.backends.ir import feeds_of  # noqa: PLC0415 - it needs the model's classes

        return OpenVINOProgram(self._import(step, blob), step, shape, feeds_of(step))

    def _import(self, step: StepFacts, blob: Path) -> ov.CompiledModel:
        try:
            return self._core.import_model(blob.read_bytes(), self.device, self._all_options(step))
        except RuntimeError as error:
            raise CompileError(f"OpenVINO device {self.device} does not take {str(blob)!r}: {error}") from error

    def precompile(self, step: StepFacts, files: ProgramFiles) -> ProgramFiles:
        """Compile a program from its files for this device, and keep what came out beside its model."""
        if not self.keeps_blobs:
            return files
        compiled = self._compile(self._read(files), step, files.shape)
        blob = files.paths["model"].with_suffix(".blob")
        blob.write_bytes(compiled.export_model().getvalue())
        return replace(files, compiled=(*files.compiled, (blob, self.made_for)))

    def must_compile(self, files: ProgramFiles) -> bool:
        return self._blob(files) is None

    def load(self, step: StepFacts, files: ProgramFiles) -> Program:
        blob = self._blob(files)
        compiled = self._compile(self._read(files), step, files.shape) if blob is None else self._import(step, blob)
        return OpenVINOProgram(compiled, step, files.shape, _read_feeds(step, files))

    def _blob(self, files: ProgramFiles) -> Path | None:
        """What is compiled for this device: by it, or by Intel's compiler for its generation of NPU."""
        mine = self.made_for
        fitting = (mine, {"npu_platform": mine.get("device_architecture")})
        return next((path for path, made_for in files.compiled if made_for in fitting), None)

    def _read(self, files: ProgramFiles) -> ov.Model:
        if {"model", "weights"} - files.paths.keys():
            raise CompileError(
                f"program {files.name!r} has the files {dict(files.paths)}, expected 'model' and 'weights'"
            )
        try:
            return self._core.read_model(files.paths["model"], files.paths["weights"])
        except RuntimeError as error:
            raise CompileError(
                f"OpenVINO cannot read {str(files.paths['model'])!r}, which another version may have written: {error}; make "
                "the bundle anew with `staticgen compile`"
            ) from error

    def _precision(self, dtype: torch.dtype) -> dict[str, str]:
        """The step's own precision, or float32 on a device that has it not: OpenVINO would take a coarser one.

        An NPU computes in float16 whatever the model's dtype, and its plugin has no such option.
        """
        precision, capability = _PRECISION[dtype]
        device = self._stand_in if self.emulated else self.device.split(":")[-1].split(",")[0]
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
        "GPU": " `staticgen devices gpu` says what is missing",
        "NPU": " `staticgen devices npu` says what is missing; without an NPU, backend_options={'NPUW_DEVICES': 'CPU'} runs the NPU "
        "plugin on the CPU",
    }.get(device.split(".", maxsplit=1)[0], "")
    return (
        f"backend {backend!r} wants OpenVINO device {device}, but OpenVINO finds {', '.join(present) or 'none'} here. "
        f"Alternatives: backend='openvino' (the CPU) or backend='auto'.{hint}"
    )


def _read_feeds(step: StepFacts, files: ProgramFiles) -> Feeds | None:
    """What the host feeds to a program from files."""
    if not step.form.fed:
        return None
    if {"feeds", "feed_tensors"} - files.paths.keys():
        raise CompileError(
            f"program {files.name!r} has the files {dict(files.paths)}, expected 'feeds' and 'feed_tensors' among them"
        )
    try:
        return read_feeds(files.paths["feeds"], files.paths["feed_tensors"])
    except ValueError as error:
        raise CompileError(f"program {files.name!r}: {error}") from error


def _require_ports(
    compiled: ov.CompiledModel, step: StepFacts, shape: StepShape, first: Sequence[torch.Tensor], slotted: bool
) -> None:
    """Refuse a program that is none of this step and size: its files may have been mixed up."""
    layers, windows = step.cache_spec.layers, step.cache_spec.windows

    def sizes(counts: Sequence[int], transposed_keys: bool) -> list[list[int]]:
        pairs = list(zip(layers, counts, strict=True))
        keys = [[layer.key_dim, count] if transposed_keys else [count, layer.key_dim] for layer, count in pairs]
        values = [[count, layer.value_dim] for layer, count in pairs]
        return [
            [shape.batch, layer.heads, *size]
            for part in (keys, values)
            for layer, size in zip(layers, part, strict=True)
        ]

    slots = [[shape.batch, slots_of(window, shape.cache_length)] for window in windows if slotted]
    past = sizes([layer.slots(shape.cache_length) for layer in layers], step.form.transposed_keys)
    new = sizes([shape.tokens] * len(layers), False)
    expected = [list(tensor.shape) for tensor in first] + slots + past, [[shape.batch, step.logits_size]] + new
    found = tuple([list(port.get_shape()) for port in ports] for ports in (compiled.inputs, compiled.outputs))
    if found != expected:
        raise CompileError(
            f"a program for the step {shape} has inputs and outputs of sizes {found}, expected {expected}; if it is a "
            "bundle's, make that anew with `staticgen compile`"
        )


def _share(tensor: torch.Tensor) -> Any:
    """An OpenVINO tensor over the memory of a contiguous torch tensor."""
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        return ov.Tensor(tensor.view(torch.uint16).numpy(), ov.Shape(list(tensor.shape)), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _as_json(value: Any) -> Any:
    """A property as JSON has it."""
    if isinstance(value, str | int | float | bool):
        return value
    return sorted(map(str, value)) if isinstance(value, list | tuple | set) else str(value)
