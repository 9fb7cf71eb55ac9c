"""Backend ``inductor``: the step compiled by ``torch.compile`` for the CPU, one graph of its own for each size.

The model's Python runs once, when the step is exported; what torch compiles has no break and no dynamic size. The
step reads the cache where it stands and gives the new keys and values only, so that one slot is written per token,
in place.

Compiled ahead of time, a program is a package with a shared library in it: machine code, which loading it runs, as a
blob of OpenVINO's is. A bundle's loader has compared it with the manifest before; who made the bundle must be trusted.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from staticgen.backends.base import Backend, Program, ProgramFiles, apart, write_experts_plainly
from staticgen.cache import KVBuffers, KVCache
from staticgen.errors import BackendUnavailableError, CompileError, RecompileError, UnknownNameError
from staticgen.facts import StepFacts
from staticgen.profiles import load_profile
from staticgen.shapes import StepShape

if TYPE_CHECKING:
    from staticgen.step import Step

WEIGHTS = "weights.safetensors"
_PROFILE = "generic-cpu-inductor"
_MODEL = "model"  # what torch calls the one model of a package
_KEPT = (".so", ".pyd", ".dll", ".json")  # of what inductor writes; the rest is source
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
                exported = _export(step, shape)
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
        from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415 - a second, and packages run without it

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
        torch._foreach_copy_([*self._new.keys, *self._new.values], new)
        return logits, self._new


class PackagedProgram(Program):
    """A package that :meth:`InductorBackend.write` wrote, over weights that all packages share."""

    def __init__(self, step: StepFacts, files: ProgramFiles, weights: Mapping[str, torch.Tensor]):
        super().__init__(files.shape)
        package = str(files.paths["package"])
        try:
            # Not aoti_load_package, which imports all of torch's compilers, and reads the tree of inputs in every call.
            loader: Any = torch._C._aoti.AOTIModelPackageLoader
            written = loader.load_metadata_from_package(package, _MODEL).get("shape")
            self._loader = loader(package, _MODEL, False, 1, -1)
            needed = self._loader.get_constant_fqns()
        except Exception as error:  # of torch's loader, which raises anything
            raise CompileError(f"torch {torch.__version__} cannot load {package!r}: {error}") from error
        missing = sorted(set(needed) - set(weights))
        if written != str(files.shape) or missing:
            raise CompileError(
                f"{package!r} is of the step {written}, expected {files.shape}, and lacks of its weights "
                f"{', '.join(missing[:3]) or 'none'}; its files have been mixed up: make the bundle anew with `staticgen compile`"
            )
        self._weights = {name: weights[name] for name in needed}  # the package only points to them
        self._loader.load_constants(self._weights, False, True, True)
        self._new = KVBuffers(step.cache_spec, files.shape.batch, files.shape.tokens)

    @torch.no_grad()
    def _run(self, inputs: tuple[torch.Tensor, ...], cache: KVCache) -> tuple[torch.Tensor, KVBuffers]:
        given = [tensor.contiguous() for tensor in inputs]
        logits, *new = self._loader.boxed_run(
            [*given, *cache.slot_positions, *cache.buffers.keys, *cache.buffers.values]
        )
        torch._foreach_copy_([*self._new.keys, *self._new.values], new)
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
        profile = load_profile(_PROFILE)
        self.form, self.prefill_buckets, self.cache_sizes = profile.form, profile.prefill_buckets, profile.cache_sizes
        self._options = inductor_options({**profile.compile_options, **(options or {})})
        self._weights: dict[Path, dict[str, torch.Tensor]] = {}

    @property
    def made_for(self) -> dict[str, Any]:
        return {
            **super().made_for,
            "torch": torch.__version__,  # whose library the code calls
            "system": platform.system(),
            "machine": platform.machine(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "instructions": _instructions(),
            "options": dict(sorted(self._options.items())),
        }

    def compile(self, step: Step, shape: StepShape) -> Program:
        require_compiler()  # packages are loaded without one
        return InductorProgram(step, shape, self._options)

    def write(
        self,
        step: Step,
        shapes: Mapping[str, StepShape],
        folder: Path,
        report: Callable[[str], None] = lambda name: None,
    ) -> list[ProgramFiles]:
        """Compile ahead of time: a package for each size, by the names of ``shapes``, over one file of weights.

        The files are ``programs/NAME.pt2`` in ``folder``, which exists, and :data:`WEIGHTS`; :meth:`load` reads them,
        without the model and without a compiler, on a CPU that has all instructions of this one, with the same torch.

        Args:
            step: what to write.
            shapes: the sizes, by their programs' names.
            folder: of the bundle.
            report: called with the name of each program before it is compiled.

        Raises:
            BackendUnavailableError: there is no C++ compiler, or this torch does not say what instructions there are.
            CompileError: the step cannot be exported or compiled, or torch does not keep the weights apart.
        """
        require_compiler()
        write_experts_plainly(step)
        if not _instructions():
            raise BackendUnavailableError(
                f"torch {torch.__version__} does not say which instructions the CPU has (torch.cpu.get_capabilities), so that "
                "nobody could tell where a package runs; install a newer torch"
            )
        (folder / "programs").mkdir(exist_ok=True)
        written, weights, made_for = [], folder / WEIGHTS, self.made_for
        held: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            report(name)
            path = folder / "programs" / f"{name}.pt2"
            for key, tensor in _write_package(step, shape, path, self._options).items():
                if not _are_same(held.setdefault(key, tensor), tensor):
                    raise CompileError(
                        f"constant {key!r} has other numbers in {path.name!r} than in the programs before, so that they "
                        "cannot share one file of them; use backend='inductor' without a bundle"
                    )
            written.append(ProgramFiles(name, shape, {"package": path, "weights": weights}, ((path, made_for),)))
        safetensors.torch.save_file(apart(held), weights)
        return written

    def must_compile(self, files: ProgramFiles) -> bool:
        return False

    def require_fit(self, files: ProgramFiles) -> None:
        known = {path: made_for for path, made_for in files.compiled}
        if {"package", "weights"} - files.paths.keys() or files.paths["package"] not in known:
            raise CompileError(
                f"program {files.name!r} has the files {dict(files.paths)}, expected 'package' and 'weights', and what the "
                "package is compiled for"
            )
        package = files.paths["package"]
        if differing := _differing(known[package], self.made_for):
            raise BackendUnavailableError(
                f"{str(package)!r} was compiled for {differing}: make the bundle anew with `staticgen compile` on a machine "
                "like this one, with this torch"
            )

    def load(self, step: StepFacts, files: ProgramFiles) -> Program:
        self.require_fit(files)
        path = files.paths["weights"]
        if path not in self._weights:
            try:
                self._weights[path] = safetensors.torch.load_file(path)
            except (OSError, safetensors.SafetensorError) as error:
                raise CompileError(f"{str(path)!r} cannot be read: {error}") from error
        return PackagedProgram(step, files, self._weights[path])


def _export(step: Step, shape: StepShape) -> torch.export.ExportedProgram:
    """The step at one size, its matrices times one row written so that inductor reads them at the memory's speed."""
    exported = torch.export.export(step, step.example_inputs(shape), strict=False)
    aten = torch.ops.aten
    rewritten = {aten.linear.default: _linear, aten.addmm.default: _addmm}
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*LeafSpec.* is deprecated", FutureWarning
        )  # of torch's own code, about itself
        return exported.run_decompositions(rewritten)


def _linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer; one row of it is a sum of products, of which inductor makes a loop, twice as fast as a library."""
    if given.numel() != given.shape[-1]:
        return NotImplemented
    wide = torch.promote_types(given.dtype, torch.float32)
    found = (weight.to(wide) * given.reshape(-1).to(wide)).sum(-1).to(given.dtype)
    return (found if bias is None else found + bias).reshape(*given.shape[:-1], -1)


def _addmm(
    bias: torch.Tensor, given: torch.Tensor, matrix: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """The same, as GPT-2 writes it."""
    return NotImplemented if (beta, alpha) != (1, 1) else _linear(given, matrix.t(), bias)


def _write_package(step: Step, shape: StepShape, path: Path, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Compile one size into a package, and give the weights that it needs, by the names that it has for them."""
    import torch._inductor  # noqa: PLC0415 - see PackagedProgram
    from torch._inductor.package.package import package_aoti  # noqa: PLC0415

    settings = {
        "cpp.dynamic_threads": True,  # of the machine that runs it
        "aot_inductor.enable_line_tables": False,
        **options,
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.metadata": {"shape": str(shape)},
    }
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), TemporaryDirectory(prefix="staticgen-") as folder:
            exported = _export(step, shape)
            _require_torchs_own(exported.graph)
            module, example = exported.module(check_guards=False), step.example_inputs(shape)
            made: Any = torch._inductor.aot_compile(module, example, options=settings)
            kept = [_without_places(Path(file), Path(folder)) for file in made if Path(file).suffix in _KEPT]
            package_aoti(str(path), [str(file) for file in kept])
            needed = torch._C._aoti.AOTIModelPackageLoader(str(path), _MODEL, False, 1, -1).get_constant_fqns()
    except Exception as error:  # of export, of inductor and of the C++ compiler
        raise CompileError(f"inductor refused the step {shape} in {step.dtype}: {error}") from error
    held = {**exported.state_dict, **exported.constants}
    strange = [name for name in needed if name not in held or not held[name].is_contiguous()]
    if strange:
        raise CompileError(
            f"inductor has weights for the step {shape} that are not those of the model, {', '.join(strange[:3])} among them, "
            "so that programs cannot share one file of them; leave out the option freezing"
        )
    return {name: held[name].detach() for name in needed}


def _require_torchs_own(graph: torch.fx.Graph) -> None:
    """Refuse operations that are written in Python, which would not be there where a package runs."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
            raise ValueError(f"{node.target} is an operation of a library's own, which a package cannot call")


def _without_places(file: Path, folder: Path) -> Path:
    """A copy of what a compiler made, without the folders of this machine, which a library has in its messages."""
    content = file.read_bytes()
    for place in (file.parent.parent, Path(torch.__file__).parent.parent):
        content = content.replace(str(place).encode(), b"/" * len(str(place).encode()))
    (folder / file.name).write_bytes(content)
    return folder / file.name


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


def _instructions() -> list[str]:
    """What inductor's code may use of this CPU, by torch's names; empty where torch is too old to say."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    lengths = [f"{name}={value}" for name, value in known.items() if name.endswith("max_length")]
    return sorted([name for name, has in known.items() if has is True] + lengths)


def _differing(made_for: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """In what a package's machine differs from this one so that it cannot run here; empty where it can."""
    names = [name for name in {**made_for, **mine} if name != "instructions" and made_for.get(name) != mine.get(name)]
    words = [f"{name} {made_for.get(name)}, and this is {mine.get(name)}" for name in names]
    missing = sorted(set(_texts(made_for.get("instructions"))) - set(mine["instructions"]))
    if missing:
        words.append(f"a CPU with {', '.join(missing)}, which this one has not")
    return "; ".join(words)


def _texts(value: Any) -> Sequence[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CompileError(f"a package says of the instructions that it needs {value!r}, expected a list of names")
    return value


def require_compiler() -> None:
    """Refuse a machine where inductor finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415 - see PackagedProgram

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
    if not given:
        return {}
    import torch._inductor.config  # noqa: PLC0415 - see PackagedProgram

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
