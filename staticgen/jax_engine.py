"""The engine of jax: StableHLO programs on the CPU here, on a TPU there, or divided over several devices."""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from staticgen.compile_cache import user_cache
from staticgen.engines import Buffer, Engine, Executable
from staticgen.errors import BackendUnavailableError, CompileError
from staticgen.functions import Function, Lowered
from staticgen.jax_programs import deserialize, dtype_name, import_jax, lower_program, sharding

_DEVICE = re.compile(r"([a-z]+)(?::(\d+))?")
_CACHE_SETTING = "jax_compilation_cache_dir"
# Numbers of 16 bits that numpy does not know cross as these.
_BITS = torch.uint16
_LARGE = 1 << 24  # bytes of a tensor that is worth waiting for
_LOCK = threading.Lock()  # jax has one compilation cache for the whole process


class JaxEngine(Engine):
    """One device of jax, or several that share every program.

    What jax compiles is kept in jax's own compilation cache: where the user has set one, or in staticgen's cache folder
    while staticgen compiles, unless ``STATICGEN_CACHE`` says off.

    Args:
        device: ``"cpu"``, ``"gpu"``, ``"tpu"``, or one of several as ``"tpu:1"``, in any letter case; None for the one
            that jax takes by default.
        options: for the device's compiler, by XLA's names.
        mesh: over how many devices every program is divided; see :func:`staticgen.jax_programs.divided`.

    Raises:
        BackendUnavailableError: jax is not installed, or finds no such device, or not so many.
        ValueError: ``device`` or ``mesh`` is nothing that could be one.
    """

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None, mesh: int = 1):
        self._jax = import_jax()
        self.devices = find_devices(device, mesh)
        self.options = dict(options or {})
        self.compiles = 0
        first = self.devices[0]
        self.name = f"{first.platform}:{first.id}" if mesh == 1 else f"{mesh} of {first.platform}"
        if first.device_kind.lower() != first.platform:
            self.name += f" ({first.device_kind})"

    def upload(self, tensor: torch.Tensor, name: str = "") -> Buffer:
        """An array of jax; on several devices, divided as an input of this name is.

        Raises:
            ValueError: the dtype may not cross the border of a function.
        """
        wanted = dtype_name(tensor.dtype)
        # A copy that is nobody else's: where device and host share memory, jax goes on with it and makes none.
        held = tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        if tensor.dtype == torch.bfloat16:
            host = held.view(_BITS).numpy().view(self._jax.dtypes.canonicalize_dtype(wanted))
        else:
            host = held.numpy()
        array = self._jax.device_put(host, sharding(name, host.shape, self.devices))
        if host.nbytes >= _LARGE:
            array.block_until_ready()  # or the copies of all weights wait in memory for their transfer
        return array

    def download(self, buffer: Buffer) -> torch.Tensor:
        """A copy of an array, which may be divided over devices."""
        host = np.array(buffer)
        if str(host.dtype) == "bfloat16":
            return torch.from_numpy(host.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(host)

    def load(self, lowered: Lowered) -> Executable:
        try:
            with _compilation_cache(self._jax):
                compiled = lower_program(lowered, self.devices).compile(compiler_options=self.options or None)
        except Exception as error:  # jax and MLIR have several classes, RuntimeError and ValueError among them
            raise CompileError(
                f"jax could not compile function {lowered.function.name!r} for {self.name}: {error}"
            ) from error
        self.compiles += 1
        return _JaxExecutable(lowered.function, compiled)

    def load_compiled(self, function: Function, serialized: bytes) -> Executable:
        """A program that was compiled elsewhere; see :func:`staticgen.jax_programs.deserialize`, which runs its maker's code.

        Raises:
            CompileError: it is for another device, or from other versions of jax or its compiler.
        """
        try:
            compiled = deserialize(serialized, function, self.devices)
        except Exception as error:  # jax and pickle have many classes
            raise CompileError(
                f"function {function.name!r} was compiled for something else than {self.name}, or by other versions: "
                f"{error}; compile it here"
            ) from error
        self.compiles += 1
        return _JaxExecutable(function, compiled)


class _JaxExecutable(Executable):
    def __init__(self, function: Function, compiled: Any):
        super().__init__(function)
        self._compiled = compiled

    def __call__(self, inputs: Sequence[Buffer]) -> list[Buffer]:
        return list(self._compiled(*inputs))


def find_devices(device: str | None, count: int = 1) -> list[Any]:
    """Devices of jax by name; the first ``count`` of them.

    Args:
        device: as :class:`JaxEngine` takes it.
        count: how many.

    Raises:
        BackendUnavailableError: jax is not installed, or finds no such device, or not so many.
        ValueError: ``device`` or ``count`` is nothing that could be one.
    """
    jax = import_jax()
    match = _DEVICE.fullmatch(device.strip().lower()) if device is not None else None
    if device is not None and match is None:
        raise ValueError(f"device is {device!r}, expected cpu, gpu or tpu, or one of several as 'tpu:1'")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"mesh is {count!r}, expected how many devices share a program, from 1 on")
    platform, index = match.groups() if match is not None else (None, None)
    if index is not None and count > 1:
        raise ValueError(
            f"device is {device!r}, one device, but mesh is {count}; name the platform alone, as {platform!r}"
        )
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"jax finds no device {device!r} here: {error}; for a TPU it needs libtpu: pip install 'jax[tpu]'"
        ) from error
    place = int(index or 0)
    if place + count > len(found):
        names = ", ".join(f"{one.platform}:{at}" for at, one in enumerate(found))
        wanted = f"no device {device!r}" if count == 1 else f"not {count} devices to share a program"
        raise BackendUnavailableError(f"jax finds {wanted} here, only {names}")
    return list(found[place : place + count])


@contextlib.contextmanager
def _compilation_cache(jax: Any) -> Iterator[None]:
    """Let jax keep what it compiles in staticgen's cache folder, unless it keeps it elsewhere or nothing is to be kept."""
    cache = user_cache()
    if cache is None:
        yield
        return
    with _LOCK:
        if getattr(jax.config, _CACHE_SETTING) is not None:  # the user's own
            yield
            return
        its = importlib.import_module("jax.experimental.compilation_cache.compilation_cache")
        jax.config.update(_CACHE_SETTING, str(cache.library("jax")))
        its.reset_cache()  # jax has made up its mind about it when it compiled something before
        try:
            yield
        finally:
            jax.config.update(_CACHE_SETTING, None)
            its.reset_cache()
