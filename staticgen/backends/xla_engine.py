"""torch-xla: lowers functions of torch to StableHLO, and replays programs on its devices.

Everything that knows torch-xla is here. Of its interface below Python it uses what its own dynamo bridge does: a graph
is traced and compiled once, and run again by its hash.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch_xla
import torch_xla.runtime
from torch_xla.debug import metrics

from staticgen.compile_cache import user_cache
from staticgen.device_functions import Draft, Tensors
from staticgen.engines import Buffer, Engine, Executable
from staticgen.errors import CompileError, RecompileError
from staticgen.functions import WEIGHT, Function, Lowered, TensorSpec

_XLAC: Any = torch_xla._XLAC
_serial = count()
# torch-xla traces into one graph for the whole process, and bundles are loaded in a thread.
_LOCK = threading.RLock()


class TorchXlaEngine(Engine):
    """The device of this process that torch-xla has.

    On a TPU, programs are kept in torch-xla's own cache below staticgen's, unless the process has one already or
    ``STATICGEN_CACHE`` says off. The CPU cannot read what it has kept.
    """

    def __init__(self) -> None:
        kept = user_cache()
        if kept is not None and os.environ.get("PJRT_DEVICE", "").upper() == "TPU" and not _has_cache():
            torch_xla.runtime.initialize_cache(str(kept.library("torch_xla")))
        self.device = torch_xla.device()
        self._weights: dict[str, Buffer] = {}
        self.name = str(torch_xla.runtime.device_type())

    def upload(self, tensor: torch.Tensor, name: str = "") -> Buffer:
        with _LOCK:
            buffer = tensor.detach().clone().to(self.device)  # a device that is the CPU may read it where it is
        if name.startswith(WEIGHT):
            self._weights[name] = buffer
        return buffer

    def download(self, buffer: Buffer) -> torch.Tensor:
        return buffer.cpu()

    def load(self, lowered: Lowered) -> Executable:
        if not lowered.hlo:
            raise CompileError(
                f"function {lowered.function.name!r} has no HLO module beside its StableHLO, and torch-xla compiles StableHLO "
                "anew for every call: make the bundle anew with `staticgen compile`, or run it with backend 'jax'"
            )
        self.compiles += 1
        with _LOCK:
            return _Replay(self, lowered)

    def stand_in(self, name: str, spec: TensorSpec) -> Buffer:
        """A buffer to trace and compile an input with; weights are there already, and large."""
        weight = self._weights.get(name)
        fits = weight is not None and TensorSpec.of(weight) == spec
        return weight if fits else self.zeros(spec)

    def zeros(self, spec: TensorSpec) -> Buffer:
        """A buffer that nothing else holds."""
        return torch.zeros(spec.shape, dtype=spec.dtype, device="cpu").to(self.device)


class _Replay(Executable):
    """A program, compiled by torch-xla and run again by the hash that it has there."""

    def __init__(self, engine: TorchXlaEngine, lowered: Lowered):
        super().__init__(lowered.function)
        function = lowered.function
        self._donated = function.donated
        # The name is part of what torch-xla tells graphs apart by.
        name = f"staticgen::{function.name}_{next(_serial)}"
        inputs = [engine.stand_in(name, spec) for name, spec in function.inputs.items()]
        torch_xla.sync()  # or a number without dimensions that is 0 is a constant of the graph, and no input
        with _donation():
            for place in self._donated:
                _XLAC._set_buffer_donation(inputs[place], True)
            try:
                program = _XLAC._xla_op_computation_from_module_proto(name, lowered.hlo)
                outputs = _XLAC._xla_user_computation(name, inputs, program)
            except RuntimeError as error:
                raise CompileError(f"torch-xla cannot read function {function.name!r}: {error}") from error
            given = [TensorSpec.of(tensor) for tensor in outputs]
            if given != list(function.outputs.values()):
                raise CompileError(
                    f"the program of function {function.name!r} gives {given}, expected {list(function.outputs.values())}"
                )
            # torch-xla numbers parameters in an order of its own, and gives the memory of a parameter to the next output
            # of its kind: outputs that take memory go first, in the order of the parameters whose memory they take.
            found, _ = _XLAC._get_tensors_xla_device_data_node(outputs)
            places = {_XLAC._xla_get_tensor_id(tensor): place for place, tensor in enumerate(inputs)}
            self._parameters = [places[number] for number in found]
            if len(found) != len(inputs):
                raise CompileError(
                    f"torch-xla takes {len(found)} of {len(inputs)} inputs of function {function.name!r}"
                )
            names, results = list(function.inputs), list(function.outputs)
            taking = {names.index(given): results.index(output) for output, given in function.aliases.items()}
            first = [taking[place] for place in self._parameters if place in taking]
            self._order = first + [place for place in range(len(results)) if place not in first]
            ordered = [outputs[place] for place in self._order]
            try:
                self._hash = _XLAC._get_graph_hash(ordered)
                _XLAC._xla_warm_up_cache(ordered, [])
            except RuntimeError as error:
                raise CompileError(f"{engine.name} refused function {function.name!r}: {error}") from error

    def __call__(self, inputs: Sequence[Buffer]) -> list[Buffer]:
        with _LOCK, _donation():
            for place in self._donated:
                _XLAC._set_buffer_donation(inputs[place], True)
            try:
                given = _XLAC._run_cached_graph(self._hash, [inputs[place] for place in self._parameters])
            except RuntimeError as error:
                if "computation by hash" not in str(error):
                    raise
                raise RecompileError(
                    f"function {self.function.name!r} is gone: torch-xla keeps the newest XLA_COMPILATION_CACHE_SIZE programs of a "
                    "process, and more were compiled since. Make a new session, or set that environment variable higher"
                ) from error
        outputs: list[Any] = [None] * len(given)
        for place, tensor in zip(self._order, given, strict=True):
            outputs[place] = tensor
        return outputs


def _has_cache() -> bool:
    return bool(os.environ.get("XLA_PERSISTENT_CACHE_PATH")) or _XLAC._xla_computation_cache_is_initialized()


def lower(engine: TorchXlaEngine, draft: Draft, weights: Mapping[str, Buffer]) -> tuple[Lowered, Tensors]:
    """Trace a function into StableHLO.

    Args:
        draft: the function.
        weights: those it may read, on the device, by the names of inputs.

    Returns:
        the program, and weights besides the given ones: tensors that the function makes from numbers, by name.

    Raises:
        CompileError: it does something that torch-xla leaves to the CPU, or cannot write.
    """
    with _LOCK:
        return _lower(engine, draft, weights)


def _lower(engine: TorchXlaEngine, draft: Draft, weights: Mapping[str, Buffer]) -> tuple[Lowered, Tensors]:
    torch_xla.sync()  # what others have begun is not part of it
    inputs = {name: engine.zeros(spec) for name, spec in draft.inputs.items()}
    names = {_XLAC._xla_get_tensor_id(tensor): name for name, tensor in inputs.items()}
    names |= {_XLAC._xla_get_tensor_id(tensor): name for name, tensor in weights.items()}
    before = _left_to_the_cpu()
    with _exact_products(), torch.no_grad():
        try:
            outputs = draft.call(dict(inputs))
            missing = sorted(name for name, times in _left_to_the_cpu().items() if times != before.get(name))
            if missing:
                raise CompileError(
                    f"function {draft.name!r} uses {', '.join(missing)}, which torch-xla {torch_xla.__version__} leaves to the CPU"
                )
            results = list(outputs.values())
            numbers, tensors = _XLAC._get_tensors_xla_device_data_node(results)
            stablehlo = _XLAC._get_stablehlo(results, str(engine.device), [], True)
            hlo = _XLAC._get_xla_tensors_hlo_proto(results)
        except CompileError:
            raise
        except RuntimeError as error:
            raise CompileError(f"torch-xla cannot lower function {draft.name!r}: {error}") from error
    constants: Tensors = {}
    parameters: dict[str, TensorSpec] = {}
    for number, tensor in zip(numbers, tensors, strict=True):
        name = names.get(number, "")
        if not name:  # made from numbers of the host
            constant = f"constants.{draft.name}.{len(constants)}.{next(_serial)}"
            constants[constant] = tensor.cpu()
            name = WEIGHT + constant
        parameters[name] = TensorSpec.of(tensor)
    specs = {name: TensorSpec.of(tensor) for name, tensor in outputs.items()}
    aliases = {name: name for name in draft.kept if name in parameters}
    return Lowered(Function(draft.name, parameters, specs, aliases), stablehlo, hlo), constants


def _left_to_the_cpu() -> dict[str, int]:
    """Operations that torch-xla computed on the CPU, and how often."""
    return {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}


@contextmanager
def _exact_products() -> Iterator[None]:
    """Products of float32 as such, which a TPU would round to bfloat16; and numbers of Python as constants."""
    before = _XLAC._xla_get_mat_mul_precision()  # what torch_xla.backends calls, and warns of changes
    _XLAC._xla_set_mat_mul_precision("highest")
    _XLAC._set_xla_all_numbers_special_scalars(True)
    try:
        yield
    finally:
        _XLAC._set_xla_all_numbers_special_scalars(False)
        _XLAC._xla_set_mat_mul_precision(before)


@contextmanager
def _donation() -> Iterator[None]:
    """Give away the memory of inputs that say so."""
    before = _XLAC._xla_get_enable_alias_with_buffer_donor_config()
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
    try:
        yield
    finally:
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(before)
