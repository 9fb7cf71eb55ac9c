"""Rewrites of a converted step that give the same numbers in a form that a target's compiler takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

_HEADS_FIRST = [0, 2, 1, 3]  # [B, T, H, D] -> [B, H, T, D]
_BY_NUMBER = {
    "Add", "Convert", "Divide", "Maximum", "Minimum", "Multiply", "Negative", "Power", "Relu", "Sigmoid", "Sqrt",
    "SquaredDifference", "Subtract", "Tanh",
}  # fmt: skip
# What works along one axis, and which of its inputs names that axis; None where an attribute does.
_ALONG_AXIS = {"Concat": None, "ReduceMean": 1, "ReduceSum": 1, "Slice": 4, "Split": 1, "VariadicSplit": 1}


def transpose_heads_late(model: ov.Model) -> None:
    """Let a static model turn, norm and scale its queries and keys before heads and tokens change places, in place.

    Models of transformers do it after. The NPU 3720's compiler then fails for every step of more than one token, in
    its pass UnrollPermuteDMA ("merged sub output shape"); the numbers are the same in both orders.
    """
    for operation in model.get_ordered_ops():
        if _can_wait(operation):
            _move_behind(operation)
    model.validate_nodes_and_infer_types()


def _can_wait(operation: Any) -> bool:
    """Whether an operation on [B, H, T, D] can as well be done on [B, T, H, D]."""
    kind = operation.get_type_name()
    sources = operation.input_values()
    turned = [_is_turned(source) for source in sources]
    if not any(turned):
        return False
    if kind in _BY_NUMBER:
        return all(known or _broadcasts(source) for known, source in zip(turned, sources, strict=True))
    if kind not in _ALONG_AXIS:
        return False
    place = _ALONG_AXIS[kind]
    if place is None:
        return all(turned) and operation.get_attributes()["axis"] in (-1, 3)
    if operation.get_attributes().get("keep_dims") is False or len(sources) <= place:
        return False
    axis = sources[place].get_node()
    return axis.get_type_name() == "Constant" and [int(number) % 4 for number in axis.get_data().flatten()] == [3]


def _is_turned(source: ov.Output) -> bool:
    node = source.get_node()
    if node.get_type_name() != "Transpose":
        return False
    order = node.input_value(1).get_node()
    return order.get_type_name() == "Constant" and order.get_data().tolist() == _HEADS_FIRST


def _broadcasts(source: ov.Output) -> bool:
    """Whether a factor is the same for all heads, so that only its own axes need to change places."""
    shape = list(source.get_shape())
    if len(shape) == 4 and source.get_node().get_type_name() != "Constant":
        return shape[1] == 1
    return all(size == 1 for size in shape[:-1])


def _move_behind(operation: Any) -> None:
    """Do ``operation`` before the transposition that its inputs come from, and transpose its outputs instead."""
    readers = [(output, list(output.get_target_inputs())) for output in operation.outputs()]
    for place in operation.inputs():
        source = place.get_source_output()
        if _is_turned(source):
            place.replace_source_output(source.get_node().input_value(0))
        elif len(source.get_shape()) == 4 and source.get_node().get_type_name() != "Constant":
            # [B, 1, T, D] to [B, T, 1, D] in words that do not name T, and for one token as well: programs of all sizes
            # have the same constants then, and one file of them.
            size = ops.constant(np.array([0, -1, 1, 0], dtype=np.int64))
            place.replace_source_output(ops.reshape(source, size, special_zero=True).output(0))
    operation.validate_and_infer_types()
    for output, targets in readers:
        turned = ops.transpose(output, ops.constant(np.array(_HEADS_FIRST, dtype=np.int64)))
        names = output.get_tensor().get_names()
        if any(target.get_node().get_type_name() == "Result" for target in targets):
            output.get_tensor().set_names(set())
            turned.output(0).get_tensor().set_names(names)
        for target in targets:
            target.replace_source_output(turned.output(0))
