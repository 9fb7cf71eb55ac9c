"""Backend ``intel_npu``: Intel's archived NPU acceleration library, for those who have it installed.

The library puts matmuls on the NPU one by one and leaves all else to torch. Its own ``compile`` also replaces Llama's
and Gemma's attention by classes written for transformers before 4.48, which fails; so what is used of it is what
``compile`` ends with, ``nn.Linear.fromTorch`` for every linear layer.

Importing it changes torch for the whole process (a function mode, and ``Module.to``), and it writes a folder named
``cache`` where the process runs. Both are the library's doing, and the reason why nothing else here imports it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from staticgen.backends.base import Backend, Program
from staticgen.backends.eager import EagerProgram
from staticgen.errors import BackendUnavailableError, CompileError, UnknownNameError
from staticgen.shapes import StepShape

if TYPE_CHECKING:
    from staticgen.step import Step

LIBRARY = "intel_npu_acceleration_library"
# Version 2 of neural-compressor's interface, which it imports, ended with 3.7; that imports pkg_resources.
INSTALL = "`pip install intel-npu-acceleration-library==1.4.0 'neural-compressor<3.8' 'setuptools<81'`"
INSTEAD = "backend='npu', OpenVINO's own NPU plugin, replaces it"
_WEIGHTS = {"float16": torch.float16, "int8": torch.int8}
_LARGEST = 2**17  # rows or columns of a matrix; the library hands larger ones back as they are

# Steps with their layers replaced, by the dtype of the weights, kept as long as the step itself.
_lowered: weakref.WeakKeyDictionary[Step, dict[str, Step]] = weakref.WeakKeyDictionary()


class IntelNPUBackend(Backend):
    """``device`` is NPU; the one option is ``dtype``, float16 or int8, in which the matrices are held.

    The model is in float32 or float16; what the matrices are multiplied with is rounded to float16. int8 is the
    library's own: symmetric, one scale per row, rounded down.
    """

    name = "intel_npu"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        super().__init__((device or "NPU").upper(), options)
        if self.device != "NPU":
            raise UnknownNameError(f"backend 'intel_npu' runs on device NPU only, got device={device!r}")
        for name in options or ():
            if name != "dtype":
                raise ValueError(
                    f"backend_options has the unknown option {name!r}: backend 'intel_npu' knows dtype only"
                )
        self._dtype = (options or {}).get("dtype", "float16")
        if self._dtype not in _WEIGHTS:
            raise ValueError(f"backend_options has dtype={self._dtype!r}, expected one of {', '.join(_WEIGHTS)}")
        self._library = _import_library()
        if not self._library.backend.npu_available():
            raise BackendUnavailableError(
                "backend 'intel_npu': the library finds no NPU, and would run on the CPU instead without a word; "
                f"`staticgen devices npu` says what is missing ({INSTEAD})"
            )

    @property
    def description(self) -> str:
        return f"intel_npu on NPU: linear layers in {self._dtype}, all else by torch on the CPU"

    def compile(self, step: Step, shape: StepShape) -> Program:
        held = _lowered.setdefault(step, {})
        if self._dtype not in held:
            held[self._dtype] = self._lower(step)
        lowered = held[self._dtype]
        try:
            with torch.no_grad():
                lowered(*step.example_inputs(shape))  # the library compiles a matmul when it first meets its size
        except RuntimeError as error:
            raise CompileError(f"intel-npu-acceleration-library refused the step {shape}: {error}") from error
        return EagerProgram(lowered, shape)

    @torch.no_grad()
    def _lower(self, step: Step) -> Step:
        """A copy of the step that shares its tensors and has its linear layers on the NPU."""
        places = _linear_places(step)
        lowered = copy.deepcopy(step, {id(tensor): tensor for tensor in step.parameters()})
        replaced: dict[nn.Module, nn.Module] = {}  # a layer that stands in several places is replaced by one
        for path, attribute in places:
            parent = lowered.get_submodule(path)
            layer = getattr(parent, attribute)
            if layer not in replaced:
                replaced[layer] = self._replacement(f"{path}.{attribute}", layer)
            setattr(parent, attribute, replaced[layer])
        return lowered.eval()

    def _replacement(self, name: str, layer: nn.Linear) -> nn.Module:
        if max(layer.weight.shape) > _LARGEST:
            raise CompileError(
                f"backend 'intel_npu': {name} is {list(layer.weight.shape)}, and the library leaves matrices of more than "
                f"{_LARGEST} rows or columns to the CPU ({INSTEAD})"
            )
        try:
            new: Any = self._library.nn.Linear.fromTorch(layer, _WEIGHTS[self._dtype])
        except RuntimeError as error:
            raise CompileError(f"intel-npu-acceleration-library refused {name} in {self._dtype}: {error}") from error
        # With an id, the library loads the next layer's weights in a thread, and ends the process when another layer
        # comes instead: that of a second model, or the head of a model whose other matrices have its size.
        new.op_id = None
        if new.weight.is_floating_point() and not torch.isfinite(new.weight).all():
            raise CompileError(
                f"backend 'intel_npu': {name} has weights that float16 cannot hold; try backend_options={{'dtype': 'int8'}}"
            )
        return new


def _linear_places(step: Step) -> list[tuple[str, str]]:
    """Module and attribute of every linear layer.

    Raises:
        CompileError: the model has a dtype that the library does not keep, or matrices that it would leave to the CPU.
    """
    dtypes = {tensor.dtype for tensor in step.parameters() if tensor.is_floating_point()}
    if not dtypes <= {torch.float32, torch.float16}:
        raise CompileError(
            f"backend 'intel_npu' takes models in float16 or float32, got {', '.join(sorted(map(str, dtypes)))}: "
            "load it with dtype=torch.float16"
        )
    kind, places = step.model.config.model_type, []
    for path, module in step.named_modules():
        for name, layer in module._modules.items():  # named_children leaves out the second place of a shared layer
            if isinstance(layer, nn.Linear):
                places.append((path, name))
        if isinstance(module, nn.Linear | nn.Embedding):
            continue
        matrices = [name for name, tensor in module.named_parameters(recurse=False) if tensor.dim() > 1]
        if matrices:
            raise CompileError(
                f"backend 'intel_npu' cannot run model_type {kind!r}: {path}.{matrices[0]} is a matrix of "
                f"{type(module).__name__}, and the library moves torch.nn.Linear only; the rest would stay on the CPU ({INSTEAD})"
            )
    return places


@functools.cache
def _import_library() -> Any:
    """The library, imported once in a process, with a warning that it is archived."""
    path = list(sys.path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no NPU, which is an error here
            library = importlib.import_module(LIBRARY)
            for part in ("backend", "nn"):
                importlib.import_module(f"{LIBRARY}.{part}")
    except ModuleNotFoundError as error:
        if error.name == LIBRARY:
            raise BackendUnavailableError(
                "backend 'intel_npu' needs intel-npu-acceleration-library, which is not installed and which Intel archived in "
                f"April 2025: {INSTEAD}. For the library itself, on Windows with Python 3.12 or older: {INSTALL}. There are no wheels for Linux, where pip "
                "builds it from source and downloads OpenVINO 2024.4 for that"
            ) from error
        raise _broken(error) from error
    except (ImportError, OSError, AttributeError, RuntimeError) as error:  # OSError: its native part
        raise _broken(error) from error
    finally:
        sys.path[:] = path  # it puts an OpenVINO of its own before the installed one
    warnings.warn(
        f"intel-npu-acceleration-library was archived by Intel in April 2025 and gets no fixes: {INSTEAD}", stacklevel=3
    )
    return library


def _broken(error: Exception) -> BackendUnavailableError:
    return BackendUnavailableError(
        "backend 'intel_npu': intel-npu-acceleration-library is installed but cannot be imported "
        f"({type(error).__name__}: {error}). It needs its native library, which only Windows wheels hold, and old versions "
        f"of what it imports: {INSTALL} ({INSTEAD})"
    )
