"""What inductor makes of a decode step for an NVIDIA GPU, without one: kernels, bytes, and what Triton's compiler says.

    python benchmarks/gpu_kernels.py [--model 8B] [--rows 1 8] [--cache 2048 16384] [--attention spread split concat]

Needs a CUDA build of torch, such as the README's environment for torch-xla has, and no driver. Steps of two and of four
layers are lowered for a GPU that is not there, over weights that hold no numbers; the difference is what a layer costs.
Attention "sdpa" is missing, because torch asks the GPU which of its kernels to take.
*Bytes* is inductor's own count of what its kernels read and write, and *ideal* what a layer must read: its weights and its
cache. Every Triton kernel is compiled to machine code for the chips named; nothing runs.
"""

from __future__ import annotations

import argparse
import re
from collections import namedtuple
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch
from gpu import LLAMAS, bytes_per_step, random_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from staticgen.backends import cuda
from staticgen.shapes import StepForm, StepShape
from staticgen.step import step_for

# Compute capability, multiprocessors, registers of each: A100, L4, H100 and H200.
CHIPS = {"sm_80": (8, 0, 108), "sm_89": (8, 9, 58), "sm_90": (9, 0, 132)}
Properties = namedtuple(
    "Properties", "name major minor multi_processor_count regs_per_multiprocessor max_threads_per_multi_processor warp_size "
    "max_threads_per_block shared_memory_per_block_optin total_memory L2_cache_size",
)  # fmt: skip


# Operations that run nothing: they look at a tensor another way.
_FREE = {torch.ops.aten._unsafe_view.default, torch.ops.aten._assert_tensor_metadata.default}


class Lowered(Exception):
    """Ends the compilation where it would load what it made."""


@dataclass
class Account:
    """Of one step. ``kernels`` are Triton's, ``calls`` those of a library, ``operations`` those without inductor."""

    kernels: int
    calls: int
    operations: int
    bytes: int
    ideal: int
    source: str


class Counted(TorchDispatchMode):
    """Counts operations that a GPU would run a kernel for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "aten" and not (func.is_view or func in _FREE)
        return func(*args, **(kwargs or {}))


@contextmanager
def absent(chip):
    """Have torch and Triton lower for a chip that is not there."""
    import torch._inductor.fx_passes.fuse_attention as attention  # noqa: PLC0415 - after the check for CUDA
    from torch._dynamo.device_interface import CudaInterface  # noqa: PLC0415
    from torch._inductor import config  # noqa: PLC0415
    from torch._inductor.runtime import triton_helpers  # noqa: PLC0415
    from torch._inductor.runtime.hints import DeviceProperties  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415

    major, minor, processors = CHIPS[chip]
    found = Properties(chip, major, minor, processors, 65536, 2048, 32, 1024, 163840, 80 * 10**9, 40 << 20)
    answers = {
        "get_device_properties": lambda device=None: found,
        "get_compute_capability": lambda device=None: 10 * major + minor,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=False: True,
        "synchronize": lambda device=None: None,
    }
    target = GPUTarget("cuda", 10 * major + minor, 32)
    stand_in = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    settings = {  # what would compute or measure on the GPU while it compiles, and what would outlive this run
        "force_disable_caches": True, "compile_threads": 1, "joint_graph_constant_folding": False, "shape_padding": False,
    }  # fmt: skip
    # Or it would load what it compiled; by its names in torch 2.9 and later.
    launchers = ("use_static_cuda_launcher", "use_static_triton_launcher")
    settings |= {name: False for name in launchers if hasattr(config, name)}
    DeviceProperties.create.cache_clear()
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(answer)))
        for name in ("get_device_properties", "current_device"):
            stack.enter_context(patch.object(CudaInterface.Worker, name, staticmethod(answers[name])))
        for name in ("get_device_properties", "current_device", "device_count"):
            stack.enter_context(patch.object(torch.cuda, name, answers[name]))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device=None: (major, minor)))
        stack.enter_context(patch.object(attention, "_sfdp_init", lambda *given: None))  # makes its patterns on the GPU
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(config.patch(settings))
        before = driver._active
        driver.set_active(stand_in)
        try:
            yield
        finally:
            driver._active = before
            DeviceProperties.create.cache_clear()


@torch.no_grad()
def lowered(step, shape, chip, ideal):
    """The account of a step at one size."""
    from torch._inductor import compile_fx, config, graph  # noqa: PLC0415 - after the check for CUDA

    exported, device, made = cuda.exported(step, shape), torch.device("cuda", 0), {}
    with absent(chip):
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes, Counted() as counted:
            for name, constant in exported.constants.items():
                exported.constants[name] = fakes.from_tensor(constant)
            module = cuda.on_device(exported, device, {})
            inputs = [fakes.from_tensor(tensor).to(device) for tensor in step.example_inputs(shape)]
            counted.count = 0
            module(*inputs)

        def stop(lowering):
            wrapper = lowering.codegen()[0]
            made["source"], made["bytes"] = getattr(wrapper, "value", wrapper), lowering.count_bytes()[0]
            raise Lowered

        with patch.object(graph.GraphLowering, "compile_to_module", stop), config.patch(cuda.INDUCTOR):
            try:
                compile_fx.compile_fx(module, inputs)
            except Exception:  # inductor wraps what is raised in it
                if not made:
                    raise
    calls = made["source"][made["source"].index("def call(") :]
    kernels, library = len(re.findall(r"\w\.run\(", calls)), len(re.findall(r"extern_kernels\.|torch\.ops\.", calls))
    return Account(kernels, library, counted.count, made["bytes"], ideal, made["source"])


def machine_code(source, chip):
    """The kernels of what inductor wrote for a chip, each compiled by Triton's compiler: the size of its machine code."""
    from torch._inductor.async_compile import CompiledTritonKernels  # noqa: PLC0415 - after the check for CUDA
    from torch._inductor.codecache import PyCodeCache  # noqa: PLC0415 - after the check for CUDA
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: PLC0415

    kernels = {}

    def keep(tuner, *given, **named):
        tuner._precompile_worker()
        kernels[tuner.fn.__name__] = max(len(result.kernel.asm["cubin"]) for result in tuner.compile_results)

    PyCodeCache.cache_clear()
    CompiledTritonKernels.cache_clear()
    with absent(chip), patch.object(CachingAutotuner, "precompile", keep):
        PyCodeCache.load(source)
    return kernels


def account(name, rows, cache, attention, chips, compiled):
    """A line of the table: kernels of a layer and besides, bytes, and chips that all kernels were compiled for."""
    found, sizes = {}, LLAMAS[name]
    shape = StepShape(rows, 1, cache)
    for layers in (2, 4):
        model = random_model({**sizes, "num_hidden_layers": layers})
        step = step_for(model, StepForm(attention=attention))
        found[layers] = lowered(step, shape, chips[-1], bytes_per_step(model, rows, cache))
    few, many = found[2], found[4]
    count = sizes["num_hidden_layers"]

    def a_layer(field):
        return (getattr(many, field) - getattr(few, field)) / 2

    def all_layers(field):
        return getattr(few, field) + (count - 2) * a_layer(field)

    taken = "not asked"
    if compiled:
        kernels = {chip: machine_code(lowered(step, shape, chip, 0).source, chip) for chip in chips}
        taken = ", ".join(f"{len(names)} for {chip}" for chip, names in kernels.items())
    return [
        name, str(rows), str(cache), attention,
        f"{a_layer('operations'):g}", f"{a_layer('kernels'):g} + {a_layer('calls'):g}",
        f"{all_layers('operations'):g}", f"{all_layers('kernels') + all_layers('calls'):g}",
        f"{a_layer('bytes') / a_layer('ideal'):.3f}", taken,
    ]  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["8B"], choices=list(LLAMAS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--cache", nargs="+", type=int, default=[2048])
    parser.add_argument("--attention", nargs="+", default=["spread", "split", "concat"])
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("--lower-only", action="store_true", help="ask inductor, and not Triton's compiler")
    options = parser.parse_args(arguments)
    if torch.version.cuda is None:
        parser.error(
            f"torch {torch.__version__} is no CUDA build; the environment of the README's torch-xla tests has one"
        )
    table = Table(title=f"decode step, bfloat16, torch {torch.__version__}")
    for column in (
        "model", "rows", "cache", "attention", "operations a layer", "kernels + library calls", "operations in all",
        "kernels and calls in all", "bytes / ideal, a layer", "compiled to machine code",
    ):  # fmt: skip
        table.add_column(column)
    cases = [
        (name, rows, cache, attention)
        for name in options.model
        for rows in options.rows
        for cache in options.cache
        for attention in options.attention
    ]
    for case in track(cases, "lowering"):
        table.add_row(*account(*case, options.chips, not options.lower_only))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
