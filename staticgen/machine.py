"""Facts about the machine at hand: packages, device nodes, drivers, and what OpenVINO and torch find.

Nothing raises, whatever is missing or broken. No model runs; of the vendors' libraries OpenVINO is imported, and torch
where there is an NVIDIA GPU.
"""

from __future__ import annotations

import getpass
import importlib
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "openvino", "torch_xla", "jax", "libtpu", "intel-npu-acceleration-library")
_LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "usr/local/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/intel-opencl", "usr/lib/intel-opencl", "usr/lib64/intel-opencl",
)  # fmt: skip


@dataclass(frozen=True)
class PCIDevice:
    """A PCI device as Linux writes it, in hexadecimal: ``slot`` 0000:00:0b.0, ``device`` 0x643e, ``kind`` 0x120000."""

    slot: str
    device: str
    kind: str


@dataclass(frozen=True)
class Machine:
    """Facts about a machine.

    Attributes:
        root: the folder that stands for ``/``.
        platform: what ``sys.platform`` says.
        python: its version.
        versions: of :data:`PACKAGES`, without those that are not installed.
        ranges: the versions that staticgen supports, by package and for ``python``.
        openvino: OpenVINO's devices by its names: ``name``, ``precisions``, and ``compiler_error`` where an NPU has none.
        openvino_error: why they could not be asked for.
        openvino_libraries: the folder of OpenVINO's libraries.
        cuda: the GPUs that torch can use, in words.
        compiler: the C++ compiler that inductor would take, a path; empty where there is none.
        user: the user's name; ``uid`` and ``gids`` are the numbers of user and groups.
        environment: the variables.
    """

    root: Path = Path("/")
    platform: str = "linux"
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, str] = field(default_factory=dict)
    openvino: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    openvino_error: str = ""
    openvino_libraries: Path | None = None
    cuda: tuple[str, ...] = ()
    compiler: str = ""
    user: str = ""
    uid: int = 0
    gids: frozenset[int] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)

    def text(self, path: str | Path) -> str:
        """What a file below the root holds, stripped; empty where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def glob(self, pattern: str) -> list[Path]:
        """What there is below the root, in order; without links that lead nowhere."""
        try:
            return [path for path in sorted(self.root.glob(pattern)) if path.exists()]
        except OSError:
            return []

    def libraries(self, *patterns: str) -> list[Path]:
        """Shared libraries where the linker looks for them, or OpenVINO."""
        folders = [self.root / folder for folder in _LIBRARY_FOLDERS]
        folders += [Path(folder) for folder in self.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
        folders += [self.openvino_libraries] if self.openvino_libraries else []
        try:
            return [path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern))]
        except OSError:
            return []

    def pci(self, vendor: str) -> list[PCIDevice]:
        """PCI devices of a vendor, 0x8086 say."""
        folders = [path.parent for path in self.glob("sys/bus/pci/devices/*/vendor") if self.text(path) == vendor]
        return [PCIDevice(one.name, self.text(one / "device"), self.text(one / "class")) for one in folders]

    def nodes(self, pattern: str, kind: str, vendor: str) -> list[Path]:
        """Device nodes of a vendor, or of one that Linux does not tell; ``kind`` is their folder in sys/class."""
        paths = self.glob(pattern)
        return [one for one in paths if self.text(f"sys/class/{kind}/{one.name}/device/vendor") in (vendor, "")]

    def may_open(self, path: Path) -> bool:
        """Whether the user may read and write a file."""
        try:
            about = path.stat()
        except OSError:
            return False
        if self.uid == 0:
            return True
        if self.uid == getattr(os, "getuid", lambda: -1)() and os.access(path, os.R_OK | os.W_OK):
            return True  # access lists are not in the mode
        both = stat.S_IROTH | stat.S_IWOTH
        shift = 6 if about.st_uid == self.uid else 3 if about.st_gid in self.gids else 0
        return (about.st_mode >> shift) & both == both

    def group(self, number: int) -> tuple[str, list[str]]:
        """The name of a group, and who is in it."""
        for line in self.text("etc/group").splitlines():
            name, _, gid, members = (line.split(":") + [""] * 4)[:4]
            if gid == str(number):
                return name, members.split(",")
        return str(number), []

    @property
    def container(self) -> bool:
        """Whether Docker or Podman runs this."""
        return bool(self.glob(".dockerenv") or self.glob("run/.containerenv"))


def read_machine(root: Path = Path("/")) -> Machine:
    """The facts about this machine. Files are read below ``root``."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    devices, error, libraries = _openvino_devices() if "openvino" in versions else ({}, "", None)
    # torch takes seconds, so it is asked where the answer can be another than none.
    has_cuda = "torch" in versions and "+cpu" not in versions["torch"] and (root / "dev/nvidia0").exists()
    return Machine(
        root=root,
        platform=sys.platform,
        python=".".join(map(str, sys.version_info[:3])),
        versions=versions,
        ranges=_supported(),
        openvino=devices,
        openvino_error=error,
        openvino_libraries=libraries,
        cuda=_cuda_devices() if has_cuda else (),
        compiler=shutil.which(os.environ.get("CXX", "g++")) or "",
        user=_user(),
        uid=os.getuid() if hasattr(os, "getuid") else 0,
        gids=frozenset([*os.getgroups(), os.getegid()]) if hasattr(os, "getgroups") else frozenset(),
        environment=dict(os.environ),
    )


def within(wanted: str, version: str) -> bool:
    """Whether a version is in a range such as ``>=2026.4``."""
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - transformers needs it, so that it is there

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except Exception:  # a broken installation is as good as none
        return None


def _supported() -> dict[str, str]:
    """Versions that staticgen's own metadata asks for."""
    ranges: dict[str, str] = {}
    try:
        from packaging.requirements import Requirement  # noqa: PLC0415 - as above

        ranges["python"] = metadata.metadata("staticgen")["Requires-Python"] or ""
        for line in metadata.requires("staticgen") or ():
            requirement = Requirement(line)
            if requirement.marker is None:
                ranges[requirement.name] = str(requirement.specifier)
    except Exception:  # run from a folder that is not installed: any version will do
        return ranges
    return ranges


def _openvino_devices() -> tuple[dict[str, dict[str, Any]], str, Path | None]:
    """OpenVINO's devices, why they cannot be asked for, and the folder of its libraries."""
    devices: dict[str, dict[str, Any]] = {}
    try:
        openvino: Any = importlib.import_module("openvino")
        libraries = Path(openvino.__file__).parent / "libs"
        core = openvino.Core()
        for name in core.available_devices:
            able = core.get_property(name, "OPTIMIZATION_CAPABILITIES")
            precisions = [one for one in able if one.startswith(("FP", "BF", "INT"))]
            devices[name] = {"name": core.get_property(name, "FULL_DEVICE_NAME").strip(), "precisions": precisions}
            if name.split(".")[0] == "NPU":
                try:
                    core.get_property(name, "NPU_COMPILER_VERSION")
                except RuntimeError as error:
                    devices[name]["compiler_error"] = _last_line(error)
    except Exception as error:  # a driver may fail in any way
        return devices, f"{type(error).__name__}: {_last_line(error)}", None
    return devices, "", libraries


def _cuda_devices() -> tuple[str, ...]:
    try:
        cuda: Any = importlib.import_module("torch").cuda
        return tuple(
            f"{cuda.get_device_name(index)} ({'.'.join(map(str, cuda.get_device_capability(index)))})"
            for index in range(cuda.device_count())
        )
    except Exception:  # as above
        return ()


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[-1]


def _user() -> str:
    try:
        return getpass.getuser()
    except Exception:  # a user without a name
        return str(os.getuid()) if hasattr(os, "getuid") else ""
