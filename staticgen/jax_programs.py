"""StableHLO programs as jitted functions of jax, on one device or divided over several.

jax is imported on first use, and none of its settings is changed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from staticgen.errors import BackendUnavailableError
from staticgen.functions import DTYPES, WEIGHT, Function, Lowered, TensorSpec

CACHE = ("keys.", "values.", "exact.")  # inputs whose names begin so are caches, [layers, B, K, slots, D]
# The name that the devices of a mesh are divided by.
AXIS = "model"

# Weights of which every device keeps some rows, or columns, by the end of their names in transformers. A projection
# into heads or into the MLP is divided by what it gives, the one back by what it takes: between the two nothing is
# exchanged, and after the second one sum. Embedding and head are divided by the vocabulary.
_ROWS = re.compile(
    r"(^|\.)(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$|(^|\.)(embed_tokens|lm_head)\.weight$"
)
_COLUMNS = re.compile(r"(^|\.)(o_proj|down_proj)\.weight$")
_CACHE_HEADS = 2  # K, of [layers, B, K, slots, D]


def import_jax() -> Any:
    """The module jax.

    Raises:
        BackendUnavailableError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise BackendUnavailableError(
            f"jax cannot be imported ({error}); install staticgen with the extra jax: pip install 'staticgen[jax]'"
        ) from error


def divided(name: str, shape: Sequence[int], parts: int) -> int | None:
    """The dimension by which a tensor is divided over devices; None where every device has all of it.

    Whatever is divided, the result is the same: the compiler adds the exchange that is needed. Fused weights, those
    with other names, and those whose sizes do not divide are kept whole.

    Args:
        name: of an input of a function: ``weights.`` and the name of a parameter in transformers, or ``keys.0``.
        shape: of the whole tensor.
        parts: how many devices there are.
    """
    place = None
    if name.startswith(WEIGHT):
        if _ROWS.search(name):
            place = 0
        elif _COLUMNS.search(name) and len(shape) == 2:
            place = 1
    elif name.startswith(CACHE) and len(shape) == 5:
        place = _CACHE_HEADS
    if parts == 1 or place is None or shape[place] % parts:
        return None
    return place


def sharding(name: str, shape: Sequence[int], devices: Sequence[Any]) -> Any:
    """Where an input or output of this name is on these devices of jax, as its ``Sharding``."""
    jax = import_jax()
    if len(devices) == 1:
        return jax.sharding.SingleDeviceSharding(devices[0])
    place = divided(name, shape, len(devices))
    parts = () if place is None else (*[None] * place, AXIS)
    mesh = jax.sharding.Mesh(list(devices), (AXIS,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))


def shardings(function: Function, devices: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where inputs and outputs are; an output is where the input is whose memory it takes."""
    inputs = {name: sharding(name, spec.shape, devices) for name, spec in function.inputs.items()}
    outputs = [
        inputs[function.aliases[name]] if name in function.aliases else sharding(name, spec.shape, devices)
        for name, spec in function.outputs.items()
    ]
    return tuple(inputs.values()), tuple(outputs)


def avals(specs: Mapping[str, TensorSpec]) -> list[Any]:
    """Shapes and dtypes as jax has them.

    Raises:
        ValueError: a dtype that may not cross the border of a function.
    """
    jax = import_jax()
    return [jax.ShapeDtypeStruct(spec.shape, dtype_name(spec.dtype)) for spec in specs.values()]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, the same in torch and jax.

    Raises:
        ValueError: it may not cross the border of a function; see :data:`staticgen.functions.DTYPES`.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {dtype}, expected one of {', '.join(DTYPES)}")
    return name


def lower_program(lowered: Lowered, devices: Sequence[Any]) -> Any:
    """A program as jax's ``Lowered`` for these devices; its ``compile`` calls the compiler of their platform.

    Inputs whose memory an output takes are donated. Inputs and outputs of the compiled function are lists of arrays in
    the order of the function's, and lie where :func:`shardings` says.

    Args:
        lowered: function and StableHLO; the program is for one device, and is divided here.
        devices: of one platform: this machine's, or those of a topology that is not here.

    Raises:
        BackendUnavailableError: jax is not installed.
        Exception: jax has several classes for what it cannot read.
    """
    jax, export = import_jax(), importlib.import_module("jax.export")
    numpy = importlib.import_module("jax.numpy")
    function, platform = lowered.function, devices[0].platform
    given, results = avals(function.inputs), avals(function.outputs)

    def template(*_: Any) -> tuple[Any, ...]:
        return tuple(numpy.zeros(one.shape, one.dtype) for one in results)

    # jax reads StableHLO as part of what it has exported itself: a function of these inputs and outputs is exported,
    # and what it does is replaced. Every parameter of the program is one that the exported function keeps.
    exported = export.export(jax.jit(template), platforms=[platform])(*given)
    exported = replace(exported, mlir_module_serialized=lowered.stablehlo, module_kept_var_idx=tuple(range(len(given))))
    into, out = shardings(function, devices)
    call = jax.jit(exported.call, donate_argnums=function.donated, in_shardings=into, out_shardings=out)
    return call.trace(*given).lower(lowering_platforms=(platform,))


def serialize(compiled: Any) -> bytes:
    """What jax's ``Compiled`` of :func:`lower_program` is as bytes, to be run elsewhere without its compiler."""
    return importlib.import_module("jax.experimental.serialize_executable").serialize(compiled)[0]


def deserialize(serialized: bytes, function: Function, devices: Sequence[Any]) -> Any:
    """The ``Compiled`` of which :func:`serialize` made these bytes, on devices of the kind that it is for.

    They hold a pickle: reading them runs what their maker wants. Take them from nobody whom you would not let run code.

    Raises:
        Exception: of jax's classes, where they are for other devices, or from other versions.
    """
    jax, its = import_jax(), importlib.import_module("jax.experimental.serialize_executable")
    given = jax.tree_util.tree_structure((tuple(function.inputs), {}))
    results = jax.tree_util.tree_structure(tuple(function.outputs))
    return its.deserialize_and_load(
        serialized, given, results, backend=devices[0].client, execution_devices=list(devices)
    )
