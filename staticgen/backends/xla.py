"""Backend ``xla``: XLA through torch-xla, for TPUs. Each function is traced and compiled once and then only replayed."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from staticgen.backends.base import write_experts_plainly
from staticgen.backends.hlo import HloBackend
from staticgen.device_functions import Draft, RunStep, Tensors
from staticgen.engines import Engine, Executable, NullEngine
from staticgen.errors import BackendUnavailableError, UnknownNameError
from staticgen.functions import WEIGHT, Lowered
from staticgen.profiles import load_profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from staticgen.step import Step

_DEVICES = ("tpu", "cpu", "null")
_FLAGS = "xla_tpu_"
_PROFILE = "tpu-v5e"  # all TPUs have these sizes
Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]  # of a tensor in memory


class XlaBackend(HloBackend):
    """``device`` is ``tpu`` or ``cpu``, or ``null`` for tests; ``options`` are flags of the TPU's compiler, ``xla_tpu_...``.

    The flags go to libtpu with ``LIBTPU_INIT_ARGS``, which it reads when a process first uses it.

    torch-xla has one kind of device in a process. It is the one asked for first; the environment variable
    ``PJRT_DEVICE``, where it is set, must name the same.
    """

    name = "xla"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        chosen = (device or os.environ.get("PJRT_DEVICE") or "tpu").lower()
        unknown = {
            name: value
            for name, value in (options or {}).items()
            if not name.startswith(_FLAGS) and (name, value) != ("mesh", "1")
        }
        if "mesh" in unknown:
            raise BackendUnavailableError(
                f"backend_options has mesh={unknown['mesh']!r}, but backend 'xla' runs on one chip; a bundle for several is "
                "for backend='jax'"
            )
        if unknown:
            raise ValueError(
                f"backend_options has the unknown option {next(iter(unknown))!r} for backend 'xla'; expected flags of the TPU's "
                f"compiler, {_FLAGS}..."
            )
        if chosen == "tpu":
            flags = " ".join(f"--{name}={value}" for name, value in (options or {}).items() if name != "mesh")
            os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
        if chosen not in _DEVICES:
            raise UnknownNameError(f"backend 'xla' has the devices tpu, cpu and null (for tests), got {chosen!r}")
        engine: Engine = NullEngine() if chosen == "null" else _open_engine(chosen)
        super().__init__(chosen, None, engine)
        self.emulated = chosen != "tpu"
        if not self.emulated:
            profile = load_profile(_PROFILE)
            self.form, self.prefill_buckets, self.cache_sizes = (
                profile.form,
                profile.prefill_buckets,
                profile.cache_sizes,
            )

    @property
    def made_for(self) -> dict[str, Any]:
        found = {"backend": self.name, "device": self.device}
        return found if self.device == "null" else {**found, "torch_xla": version("torch_xla")}

    def _runner(self, step: Step) -> RunStep:
        return step if isinstance(self.engine, NullEngine) else self.take(step)[0]

    def take(self, step: Step) -> tuple[Step, Tensors]:
        """A copy of the step over weights on the device; and those weights on the CPU, by the first name of each."""
        names = names_of(step)
        tensors = {name: tensor for tensor, name in names.values()}
        for name, tensor in tensors.items():
            self.weights[WEIGHT + name] = self.engine.upload(tensor, WEIGHT + name)
        moved = _moved(step, {place: self.weights[WEIGHT + name] for place, (_, name) in names.items()})
        _ask_for_no_numbers(moved.model)
        write_experts_plainly(moved)  # the other ways ask how many tokens each expert has
        return moved, tensors

    def _make(self, draft: Draft) -> Executable:
        if isinstance(self.engine, NullEngine):
            return self.engine.take(draft)
        lowered, constants = self.lower(draft)
        self.weights |= {WEIGHT + name: self.engine.upload(tensor, WEIGHT + name) for name, tensor in constants.items()}
        return self.engine.load(lowered)

    def lower(self, draft: Draft) -> tuple[Lowered, Tensors]:
        """A function of the step in use as StableHLO; and the weights that it has besides the step's, by name."""
        from staticgen.backends import xla_engine  # noqa: PLC0415 - it imports torch-xla

        assert isinstance(self.engine, xla_engine.TorchXlaEngine)
        return xla_engine.lower(self.engine, draft, self.weights)


def names_of(step: Step) -> dict[Place, tuple[torch.Tensor, str]]:
    """The tensors of a step by where they are, each with the first of its names: tied ones are there once."""
    found: dict[Place, tuple[torch.Tensor, str]] = {}
    for names in (step.named_parameters(remove_duplicate=False), step.named_buffers(remove_duplicate=False)):
        for name, tensor in names:
            found.setdefault(_place(tensor), (tensor.detach(), name))
    return found


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _moved(step: Step, tensors: Mapping[Place, torch.Tensor]) -> Step:
    """A copy of the step over other tensors in the place of its own."""
    mine = [*step.parameters(), *step.buffers()]
    copied = copy.deepcopy(step, {id(tensor): tensor for tensor in mine})
    for module in copied.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = tensors[_place(tensor)]  # type: ignore[assignment]
    return copied


def _ask_for_no_numbers(model: PreTrainedModel) -> None:
    """Have a model of our own do nothing that depends on a tensor's numbers, which are not there while it is traced."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *tokens: None  # type: ignore[assignment]


def _open_engine(device: str) -> Engine:
    """The engine of torch-xla on its one kind of device."""
    if importlib.util.find_spec("torch_xla") is None:
        raise BackendUnavailableError(
            "backend 'xla' needs torch-xla, whose last release needs torch 2.9: `pip install 'staticgen[xla]'` in an "
            "environment of its own. Alternatives: a bundle with backend='jax', or backend='openvino'"
        )
    set_by_user = os.environ.setdefault("PJRT_DEVICE", device.upper())
    if device == "cpu":
        # torch-xla keeps the programs of sessions that are gone. On the CPU each takes some hundred of the 65530 mappings
        # that Linux grants a process, and XLA crashes where there are no more: after some 600 programs, as it was seen.
        os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "500")
    try:
        from staticgen.backends.xla_engine import TorchXlaEngine  # noqa: PLC0415 - it imports torch-xla

        engine = TorchXlaEngine()
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"backend 'xla': torch-xla cannot open {set_by_user!r} ({error}); see `staticgen devices xla`"
        ) from error
    if engine.name.lower() != device:
        raise BackendUnavailableError(
            f"backend 'xla': this process has torch-xla's device {engine.name!r}, not {device!r}; set PJRT_DEVICE={device.upper()} "
            "before torch_xla is used, or leave device out"
        )
    return engine
