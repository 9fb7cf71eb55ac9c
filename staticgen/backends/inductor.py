"""Backend ``inductor``: the step compiled by ``torch.compile`` for the CPU, one graph of its own for each size.

The model's Python runs once, when the step is exported; what torch compiles has no break and no dynamic size. The
step reads the cache where it stands and gives the new keys and values only, so that one slot is written per token,
in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
import torch._inductor.config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cpp_builder import get_cpp_compiler

from staticgen.backends.base import Backend, Program, ProgramFiles
from staticgen.cache import KVBuffers, KVCache
from staticgen.errors import BackendUnavailableError, CompileError, RecompileError, UnknownNameError
from staticgen.facts import StepFacts
from staticgen.shapes import StepShape

if TYPE_CHECKING:
    from pathlib import Path

    from staticgen.step import Step

WEIGHTS = "inductor.safetensors"
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class InductorProgram(Program):
    """What inductor made of the step at one size; it is made here, and never again.

    Attributes:
        graphs: that torch compiled; 1.
    """

    def __init__(self, step: Step, shape: StepShape, options: Mapping[str, Any]):
        super().__init__(shape)
        self.graphs = 0
        self._options = options
        self._new = KVBuffers(step.cache_spec, shape.batch, shape.tokens)
        example = step.example_inputs(shape)
        self._inputs = example[:3]  # a caller's may be columns of larger ones, which torch would compile anew for
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                exported = torch.export.export(step, example, strict=False)
                # A module of this size's own: torch counts what it compiles by the code that it came from.
                self._compiled: Callable[..., Any] = torch.compile(
                    exported.module(), backend=self._compile, fullgraph=True, dynamic=False
                )
                self._compiled(*example)
        except Exception as error:  # of export, of dynamo, of inductor and of the C++ compiler
            raise CompileError(f"inductor refused the step {shape} in {step.dtype}: {error}") from error

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """What torch calls for each graph that it finds: for the first, and for no other."""
        if self.graphs:
            raise RecompileError("a second graph")
        self.graphs += 1
        return compile_fx(graph, inputs, config_patches=dict(self._options))

    @torch.no_grad()
    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        try:
            with torch.autocast("cpu", enabled=False):
                logits, *new = self._compiled(
                    *self._inputs, *cache.slot_positions, *cache.buffers.keys, *cache.buffers.values
                )
        except Exception as error:
            if not _is_recompile(error):
                raise
            raise RecompileError(
                f"the step {self.shape} was compiled for {torch.get_num_threads()} threads or for another global setting of "
                "torch (number of threads, default dtype, deterministic algorithms), which has changed since; set it back, or "
                "make a new staticgen.Session"
            ) from error
        for buffer, tensor in zip((*self._new.keys, *self._new.values), new, strict=True):
            buffer.copy_(tensor)
        return logits, self._new


class PackagedProgram(Program):
    """A package that :meth:`InductorBackend.write` wrote, over weights that all packages share."""

    def __init__(self, step: StepFacts, shape: StepShape, package: Path, weights: Mapping[str, torch.Tensor]):
        super().__init__(shape)
        try:
            self._loaded = torch._inductor.aoti_load_package(str(package))
            written = self._loaded.get_metadata().get("shape")
            needed = set(self._loaded.get_constant_fqns())
        except Exception as error:  # of torch's loader, which raises anything
            raise CompileError(f"torch {torch.__version__} cannot load {str(package)!r}: {error}") from error
        if written != str(shape) or not needed <= set(weights):
            missing = ", ".join(sorted(needed - set(weights))[:3]) or "none"
            raise CompileError(
                f"{str(package)!r} is of the step {written}, expected {shape}, and lacks of its weights {missing}; its files "
                "have been mixed up: make the bundle anew with `staticgen compile`"
            )
        chosen = {name: weights[name] for name in needed}
        self._loaded.load_constants(chosen, check_full_update=True, user_managed=True)
        self._weights = chosen  # the package only points to them
        self._new = KVBuffers(step.cache_spec, shape.batch, shape.tokens)

    @torch.no_grad()
    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        given = [tensor.contiguous() for tensor in inputs]
        logits, *new = self._loaded(*given, *cache.slot_positions, *cache.buffers.keys, *cache.buffers.values)
        for buffer, tensor in zip((*self._new.keys, *self._new.values), new, strict=True):
            buffer.copy_(tensor)
        return logits, self._new


class InductorBackend(Backend):
    """``device`` is ``cpu``; ``options`` are inductor's settings, ``{"freezing": "true"}`` or ``{"max_autotune": "true"}``.

    With ``freezing`` the weights are rearranged for each size, which takes their memory once more for every program.
    """

    name = "inductor"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        super().__init__(device.lower() if device else None, options)
        if self.device != "cpu":
            raise UnknownNameError(f"backend 'inductor' runs on device 'cpu' only, got device={device!r}")
        self._options = inductor_options(options or {})
        self._weights: dict[Path, dict[str, torch.Tensor]] = {}

    @property
    def made_for(self) -> dict[str, Any]:
        # Packages hold machine code for these instructions, over torch's own library.
        cpu, options = torch.backends.cpu.get_cpu_capability(), dict(sorted(self._options.items()))
        return {**super().made_for, "torch": torch.__version__, "cpu": cpu, "options": options}

    def compile(self, step: Step, shape: StepShape) -> Program:
        require_compiler()  # packages are loaded without one
        return InductorProgram(step, shape, self._options)

    def write(self, step: Step, shapes: Mapping[str, StepShape], folder: Path) -> list[ProgramFiles]:
        """Compile ahead of time: a package for each size, by the names of ``shapes``, over one file of weights.

        The files are ``NAME.pt2`` in ``folder``, which exists, and :data:`WEIGHTS`; :meth:`load` reads them, without the
        model, on a CPU with the same instructions and with the same torch.

        Raises:
            CompileError: the step cannot be exported or compiled, or this torch cannot keep the weights apart.
        """
        written, weights = [], folder / WEIGHTS
        constants: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            path = folder / f"{name}.pt2"
            settings = {
                **self._options,
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.metadata": {"shape": str(shape)},
            }
            try:
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    exported = torch.export.export(step, step.example_inputs(shape), strict=False)
                    torch._inductor.aoti_compile_and_package(
                        exported, package_path=str(path), inductor_configs=settings
                    )
                    needed = torch._inductor.aoti_load_package(str(path)).get_constant_fqns()
            except Exception as error:  # of export, of inductor and of the C++ compiler
                raise CompileError(f"inductor refused the step {shape} in {step.dtype}: {error}") from error
            held = {**exported.state_dict, **exported.constants}
            constants.update({key: held[key].detach() for key in needed})
            paths = {"package": path, "weights": weights}
            written.append(ProgramFiles(name, shape, paths, ((path, self.made_for),)))
        safetensors.torch.save_file({key: held.clone().contiguous() for key, held in constants.items()}, weights)
        return written

    def must_compile(self, files: ProgramFiles) -> bool:
        return False

    def load(self, step: StepFacts, files: ProgramFiles) -> Program:
        package, mine = files.paths["package"], self.made_for
        for path, made_for in files.compiled:
            if path == package and made_for != mine:
                raise CompileError(
                    f"{str(package)!r} was compiled for {made_for}, and this is {mine}: make the bundle anew with "
                    "`staticgen compile` on this machine and with this torch"
                )
        if files.paths["weights"] not in self._weights:
            try:
                read = safetensors.torch.load_file(files.paths["weights"])
            except (OSError, safetensors.SafetensorError) as error:
                raise CompileError(f"{str(files.paths['weights'])!r} cannot be read: {error}") from error
            self._weights[files.paths["weights"]] = read
        return PackagedProgram(step, files.shape, package, self._weights[files.paths["weights"]])


def require_compiler() -> None:
    """Refuse a machine where inductor finds no C++ compiler."""
    try:
        get_cpp_compiler()
    except Exception as error:  # of torch's own class, which differs between releases
        raise BackendUnavailableError(
            f"backend 'inductor' needs a C++ compiler, and torch finds none here ({error}); install g++ or clang++, or set "
            "the environment variable CXX to one. Alternatives: backend='openvino' or backend='eager'"
        ) from error


def inductor_options(given: Mapping[str, str]) -> dict[str, Any]:
    """Settings of inductor by its own names, as its own types.

    Raises:
        ValueError: there is no such setting, or the value is none for it.
    """
    known, found = torch._inductor.config.get_config_copy(), {}
    for name, text in given.items():
        if name not in known:
            raise ValueError(
                f"backend_options has the unknown option {name!r} for inductor; its settings are those of "
                "torch._inductor.config, freezing and max_autotune among them"
            )
        kind = type(known[name])
        value: Any = _TRUTHS.get(str(text).lower()) if kind is bool else text
        if kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                value = None
        if kind not in (bool, int, float, str) or value is None:
            raise ValueError(f"backend_options has {name}={text!r}, expected a {kind.__name__} for this setting")
        found[name] = value
    return found


def _is_recompile(error: BaseException | None) -> bool:
    """Whether torch found that it would have to compile again; it wraps errors in its own."""
    while error is not None:
        if isinstance(error, RecompileError) or isinstance(getattr(error, "inner_exception", None), RecompileError):
            return True
        error = error.__cause__
    return False
