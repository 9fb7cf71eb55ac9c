"""The step as OpenVINO IR: converted once, fixed to each size, written to files that share their weights.

Conversion leaves every size open: for a 30-layer model it takes seconds, where fixing a size takes a part of one.
"""

from __future__ import annotations

import hashlib
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

import openvino as ov
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from openvino.passes import ConstantFolding, Manager

from staticgen.backends.base import ProgramFiles, write_experts_plainly
from staticgen.backends.ir_rewrites import transpose_heads_late
from staticgen.errors import CompileError
from staticgen.fed import FedStep, fed_inputs, find_feeds
from staticgen.feeds import Feeds, write_feeds
from staticgen.shapes import StepShape
from staticgen.step import Step

_ALIGNMENT = 64  # of what is added to a common weights file

# Converted steps with open sizes, kept as long as the step itself.
_converted: weakref.WeakKeyDictionary[Step, ov.Model] = weakref.WeakKeyDictionary()


def write_ir(
    step: Step,
    shapes: Mapping[str, StepShape],
    folder: Path,
    model: ov.Model | None = None,
    compress_to_fp16: bool = False,
    fold: bool = False,
    report: Callable[[str], None] = lambda name: None,
) -> list[ProgramFiles]:
    """Write the step at some sizes into ``programs/NAME.xml``, with one ``weights.bin`` for all of them.

    What the host feeds to a fed step goes beside them, see :func:`staticgen.feeds.write_feeds`.

    Args:
        step: what to write.
        shapes: the sizes, by their programs' names.
        folder: of the bundle; it exists.
        model: the step with open sizes, if something was done to its weights; None for :func:`convert_step`.
        compress_to_fp16: store float32 weights as float16; they are computed with in the step's own dtype.
        fold: work out what follows from the sizes, which saves every load a fifth of its time. It would undo the
            compression of weights, too.
        report: called with the name of each program before it is written.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    feeds = feeds_of(step)
    shared = {} if feeds is None else write_feeds(feeds, folder)
    weights = _Weights(folder / "weights.bin")
    written = []
    for name, shape in shapes.items():
        report(name)
        path = programs / f"{name}.xml"
        static = static_model(step, shape, model)
        if fold:
            folding = Manager()
            folding.register_pass(ConstantFolding())
            folding.run_passes(static)
        ov.save_model(static, path, compress_to_fp16=compress_to_fp16)
        weights.take_over(path)
        written.append(ProgramFiles(name, shape, {"model": path, "weights": weights.path, **shared}))
    return written


class _Weights:
    """One file for the constants of several models in IR, each constant once.

    IR says of a constant where in the model's ``.bin`` file it is. The first model's file becomes the common one; of
    the others, what is not there yet is added, and their IR is made to say where it is.
    """

    def __init__(self, path: Path):
        self.path = path
        self._places: dict[tuple[int, bytes], int] = {}

    def take_over(self, model: Path) -> None:
        """Put the constants of a model into the common file; its own is gone then."""
        own = model.with_suffix(".bin")
        tree = ElementTree.parse(model)
        constants = [data for data in tree.iter("data") if "offset" in data.attrib and "size" in data.attrib]
        if not self._places:
            own.rename(self.path)
            with self.path.open("rb") as file:
                for data in constants:
                    self._places.setdefault(_constant(file, data), int(data.attrib["offset"]))
            return
        with own.open("rb") as file, self.path.open("r+b") as common:
            for data in constants:
                key = _constant(file, data)
                if key not in self._places:
                    end = common.seek(0, os.SEEK_END)
                    self._places[key] = common.seek(-end % _ALIGNMENT, os.SEEK_CUR)
                    file.seek(int(data.attrib["offset"]))
                    common.write(file.read(key[0]))
                data.set("offset", str(self._places[key]))
        own.unlink()
        tree.write(model, encoding="utf-8", xml_declaration=True)


def _constant(file: BinaryIO, data: ElementTree.Element) -> tuple[int, bytes]:
    """Size and digest of a constant."""
    size = int(data.attrib["size"])
    file.seek(int(data.attrib["offset"]))
    return size, hashlib.sha256(file.read(size)).digest()


def write_open(step: Step, folder: Path) -> None:
    """Write the step with open sizes: ``step.xml`` and ``step.bin``."""
    ov.save_model(convert_step(step), folder / "step.xml", compress_to_fp16=False)


def read_open(core: ov.Core, folder: Path) -> ov.Model:
    """What :func:`write_open` wrote."""
    try:
        return core.read_model(folder / "step.xml")
    except RuntimeError as error:
        raise CompileError(f"OpenVINO cannot read {str(folder / 'step.xml')!r}: {error}") from error


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
        write_experts_plainly(step)
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
