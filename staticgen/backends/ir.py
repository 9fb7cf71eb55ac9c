"""The step as OpenVINO IR: converted once, fixed to each size, written to files that share their weights.

Conversion leaves every size open: for a 30-layer model it takes seconds, where fixing a size takes a part of one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path

import openvino as ov
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

from staticgen.backends.base import ProgramFiles
from staticgen.backends.ir_rewrites import transpose_heads_late
from staticgen.bundle import sha256_of
from staticgen.errors import CompileError
from staticgen.fed import FedStep, fed_inputs, find_feeds
from staticgen.feeds import Feeds, write_feeds
from staticgen.shapes import StepShape
from staticgen.step import Step

# Converted steps with open sizes, kept as long as the step itself.
_converted: weakref.WeakKeyDictionary[Step, ov.Model] = weakref.WeakKeyDictionary()


def write_ir(
    step: Step,
    shapes: Mapping[str, StepShape],
    folder: Path,
    model: ov.Model | None = None,
    compress_to_fp16: bool = False,
) -> list[ProgramFiles]:
    """Write the step at some sizes into ``programs/NAME.xml``, with one ``weights.bin`` for all of them.

    What the host feeds to a fed step goes beside them, see :func:`staticgen.feeds.write_feeds`.

    Args:
        step: what to write.
        shapes: the sizes, by their programs' names.
        folder: of the bundle; it exists.
        model: the step with open sizes, if something was done to its weights; None for :func:`convert_step`.
        compress_to_fp16: store float32 weights as float16; they are computed with in the step's own dtype.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    kept: dict[str, Path] = {}
    feeds = feeds_of(step)
    shared = {} if feeds is None else write_feeds(feeds, folder)
    written = []
    for name, shape in shapes.items():
        path = programs / f"{name}.xml"
        ov.save_model(static_model(step, shape, model), path, compress_to_fp16=compress_to_fp16)
        own = path.with_suffix(".bin")
        digest = sha256_of(own)
        if digest in kept:
            own.unlink()
        else:
            kept[digest] = own.rename(folder / ("weights.bin" if not kept else f"weights-{len(kept) + 1}.bin"))
        written.append(ProgramFiles(name, shape, {"model": path, "weights": kept[digest], **shared}))
    return written


def static_model(step: Step, shape: StepShape, model: ov.Model | None = None) -> ov.Model:
    """The step as an OpenVINO model in which every dimension is fixed to ``shape``.

    ``model`` is the step with open sizes, if it is not what :func:`convert_step` makes.

    Raises:
        CompileError: a dimension stayed open; the message names the operation.
    """
    model = (model or convert_step(step)).clone()
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


def feeds_of(step: Step) -> Feeds | None:
    """What the host feeds to the step; None where it gets token ids and positions."""
    return find_feeds(step) if step.form.fed else None


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
    feeds = feeds_of(step)
    if feeds is None:
        inputs = ["token_ids", "position_ids", "first_positions"]
        inputs += [f"slot_positions.{index}" for index in range(len(step.cache_spec.windows))]
    else:
        inputs = feeds.names
    inputs += [f"past_key.{index}" for index in layers] + [f"past_value.{index}" for index in layers]
    outputs = ["logits"] + [f"new_key.{index}" for index in layers] + [f"new_value.{index}" for index in layers]
    for ports, names in ((model.inputs, inputs), (model.outputs, outputs)):
        if len(ports) != len(names):
            raise CompileError(f"conversion gave {len(ports)} ports where the step has {len(names)}")
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
