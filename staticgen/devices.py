"""What this machine has for each target, what it lacks, and what to type about it."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from staticgen.errors import UnknownNameError
from staticgen.machine import Machine, read_machine, within

_INTEL, _GOOGLE = "0x8086", "0x1ae0"
_ACCELERATOR = "0x1200"  # how the PCI class of a processing accelerator begins
# Devices of Linux's intel_vpu driver: what they are, OpenVINO's name of the platform, and how their firmware's name begins.
_NPUS = {
    "0x7d1d": ("Meteor Lake", "3720", "vpu_37xx"),
    "0xad1d": ("Arrow Lake", "3720", "vpu_37xx"),
    "0x643e": ("Lunar Lake", "4000", "vpu_40xx"),
    "0xb03e": ("Panther Lake", "5010", "vpu_50xx"),
    "0xfd3e": ("Wildcat Lake", "", "vpu_50xx"),
}
_CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16",
)  # fmt: skip
_NPU_RELEASES = "of github.com/intel/linux-npu-driver/releases"
_NPU_COMPILER = f"`sudo dpkg -i intel-driver-compiler-npu_*.deb` {_NPU_RELEASES}"


@dataclass(frozen=True)
class Finding:
    """One thing that a target needs, or that is good to know.

    Attributes:
        what: the thing.
        status: ``"missing"`` keeps the target from being used, ``"note"`` does not.
        found: what there is of it.
        fix: a command to type, or what to do; empty where nothing is to be done.
    """

    what: str
    status: Literal["ok", "missing", "note"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Target:
    """Something that could run the step.

    Attributes:
        name: what ``staticgen devices`` calls it.
        usable: staticgen can run on it, here and now.
        findings: what was looked at.
        next: the command to type next.
    """

    name: str
    usable: bool
    findings: tuple[Finding, ...]
    next: str


def find_devices(name: str | None = None, root: Path = Path("/")) -> list[Target]:
    """Targets of this machine: all, or the one called ``name``. Files are read below ``root``.

    Raises:
        UnknownNameError: no target has this name; the message lists what there is.
    """
    key = None if name is None else name.strip().lower()
    if key is not None and key not in _CHECKS:
        raise UnknownNameError(f"unknown target {name!r}: expected one of {', '.join(_CHECKS)}")
    machine = read_machine(root)
    return judge(machine) if key is None else [_CHECKS[key](machine)]


def judge(machine: Machine) -> list[Target]:
    """What each target has and lacks on a machine."""
    return [check(machine) for check in _CHECKS.values()]


def _eager(machine: Machine) -> Target:
    return _target("eager", _packages(machine))


def _inductor(machine: Machine) -> Target:
    compiler = Finding("C++ compiler", "ok", machine.compiler)
    if not machine.compiler:
        fix = "`sudo apt install g++`, or set CXX to a compiler"
        compiler = Finding("C++ compiler", "missing", "no g++, and CXX names none", fix)
    return _target("inductor", [*_packages(machine), compiler])


def _openvino(machine: Machine) -> Target:
    line = re.search(r"^flags\s*:(.*)$", machine.text("proc/cpuinfo"), re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    known = ", ".join(flag for flag in _CPU_FLAGS if flag in flags)
    notes = [Finding("CPU instructions", "note", known)] if known else []
    return _target("openvino", [*_runtime(machine), _device(machine, "CPU"), *notes])


def _gpu(machine: Machine) -> Target:
    files = []
    if machine.platform == "linux":
        nodes = machine.nodes("dev/dri/renderD*", "drm", _INTEL)
        runtime, loader = machine.libraries("libigdrcl.so*"), machine.libraries("libOpenCL.so*")
        files = [
            _node(machine, "GPU node", nodes, "dev/dri/renderD*", "`lspci -k` shows an Intel GPU and its kernel driver, if any"),
            _file(
                "OpenCL runtime", runtime, "no libigdrcl.so",
                "`sudo apt install intel-opencl-icd`, or Intel's compute runtime of github.com/intel/compute-runtime/releases",
            ),
            _file("OpenCL loader", loader, "no libOpenCL.so", "`sudo apt install ocl-icd-libopencl1`"),
        ]  # fmt: skip
    findings = [*_runtime(machine), *_unless_seen(machine, "GPU", files), _device(machine, "GPU")]
    return _target("gpu", findings, "openvino", flags="--device GPU")


def _npu(machine: Machine) -> Target:
    options = '--backend-options \'{"NPUW_DEVICES": "CPU"}\''
    findings = [*_runtime(machine), *_unless_seen(machine, "NPU", _npu_files(machine)), _device(machine, "NPU")]
    return _target("npu", findings, otherwise=f"its code path runs on the CPU with {_generate('npu', options)}")


def _npu_files(machine: Machine) -> list[Finding]:
    """What Linux has of an Intel NPU, from the chip up."""
    if machine.platform != "linux":
        return []
    chip, firmware = _npu_chip(machine)
    kernel = machine.text("proc/sys/kernel/osrelease") or "unknown"
    module = Finding("kernel module", "ok", f"intel_vpu, kernel {kernel}")
    if not machine.glob("sys/module/intel_vpu"):
        module = Finding(
            "kernel module", "missing", f"intel_vpu is not loaded, kernel {kernel}", "`sudo modprobe intel_vpu`"
        )
    folders = ("lib/firmware", "lib/firmware/updates", "usr/lib/firmware")
    blobs = [blob for folder in folders for blob in machine.glob(f"{folder}/intel/vpu/{firmware}*.bin*")]
    nodes = machine.nodes("dev/accel/accel*", "accel", _INTEL)
    rest = [
        module,
        _file(
            "firmware", blobs, f"no {firmware}*.bin in /lib/firmware/intel/vpu",
            f"`sudo dpkg -i intel-fw-npu_*.deb` {_NPU_RELEASES}, or `sudo apt install linux-firmware`; then "
            "`sudo modprobe -r intel_vpu && sudo modprobe intel_vpu`",
        ),
        _node(machine, "NPU node", nodes, "dev/accel/accel*", "`sudo dmesg | grep -i vpu` shows what the driver says"),
        _file(
            "Level Zero loader", machine.libraries("libze_loader.so*"), "no libze_loader.so",
            "`sudo apt install libze1`, or level-zero of github.com/oneapi-src/level-zero/releases",
        ),
        _file(
            "NPU driver", machine.libraries("libze_intel_npu.so*"), "no libze_intel_npu.so",
            f"`sudo dpkg -i intel-level-zero-npu_*.deb` {_NPU_RELEASES}",
        ),
        _file(
            "NPU compiler", machine.libraries("libopenvino_intel_npu_compiler*.so*", "libnpu_driver_compiler.so*"),
            "no libopenvino_intel_npu_compiler*.so or libnpu_driver_compiler.so; without it OpenVINO compiles nothing "
            'for an NPU ("VCL compiler loading failed")',
            _NPU_COMPILER,
        ),
    ]  # fmt: skip
    if chip.status == "missing" and not nodes:  # advice about drivers would lead nowhere
        rest = [replace(one, status="note", fix="") if one.status == "missing" else one for one in rest]
    elif chip.status == "missing":  # where PCI devices are hidden, the node is proof enough
        chip = replace(chip, status="note")
    return [chip, *rest]


def _npu_chip(machine: Machine) -> tuple[Finding, str]:
    """The NPU among the PCI devices, and how the name of its firmware begins."""
    for pci in machine.pci(_INTEL):
        if pci.device in _NPUS or pci.kind.startswith(_ACCELERATOR):
            what, platform, firmware = _NPUS.get(pci.device, ("unknown to staticgen", "", "vpu"))
            name = (
                f"{what}, platform {platform}, profile intel-npu-{platform}"
                if platform
                else f"{what}, profile intel-npu"
            )
            return Finding("NPU", "ok", f"{name} (PCI {pci.slot}, {_INTEL[2:]}:{pci.device[2:]})"), firmware
    absent = "no Intel NPU among the PCI devices (Core Ultra processors have one; the BIOS may have it switched off)"
    return Finding("NPU", "missing", absent), "vpu"


def _intel_npu(machine: Machine) -> Target:
    package = "intel-npu-acceleration-library"
    version = machine.versions.get(package)
    install = (
        f"on Windows with Python 3.12 or older: `pip install {package}==1.4.0 'neural-compressor<3.8' 'setuptools<81'`"
    )
    findings = [
        Finding("support", "note", "archived by Intel in April 2025; backend npu replaces it"),
        *_packages(machine),
        Finding(package, "ok", version) if version else Finding(package, "missing", "not installed", install),
        _npu_chip(machine)[0] if machine.platform == "linux" else _device(machine, "NPU"),
    ]
    target = _target("intel_npu", findings)
    return target if target.usable else replace(target, next="`staticgen devices npu`")


def _cuda(machine: Machine) -> Target:
    torch, driver = machine.versions.get("torch", ""), machine.text("proc/driver/nvidia/version")
    build = Finding("CUDA in torch", "ok", torch)
    if "+cpu" in torch:
        build = Finding(
            "CUDA in torch", "missing", f"torch {torch} is built without it", "`pip install --force-reinstall torch`"
        )
    files = []
    if machine.platform == "linux":
        number = re.search(r"\b\d+\.\d+(\.\d+)?\b", driver)
        found = f"NVIDIA's, {number[0]}" if number else "NVIDIA's, of an unknown version"
        nodes, install = machine.glob("dev/nvidia[0-9]*"), "install NVIDIA's driver; then `nvidia-smi` shows the GPU"
        files = [
            Finding("driver", "ok", found) if driver else Finding("driver", "missing", "no NVIDIA driver", install),
            _node(machine, "GPU node", nodes, "dev/nvidia*", install),
        ]
    seen = Finding("torch's devices", "ok", ", ".join(machine.cuda))
    if not machine.cuda:
        why = "`python -c 'import torch; torch.cuda.init()'` says why"
        seen = Finding("torch's devices", "missing", "torch finds no GPU", why)
    return _target("cuda", [*_packages(machine), *files, build, seen])


def _xla(machine: Machine) -> Target:
    xla, torch = machine.versions.get("torch_xla", ""), machine.versions.get("torch", "")
    series = ".".join(xla.split(".")[:2]) or "2.9"
    install = "in an environment of its own: `pip install 'staticgen[xla]'`"
    package = Finding("torch_xla", "ok", xla)
    if not xla:
        package = Finding("torch_xla", "missing", "not installed", install)
    elif ".".join(torch.split(".")[:2]) != series:
        package = Finding("torch_xla", "missing", f"{xla} needs torch {series}, got {torch or 'none'}", install)
    device, chips = machine.environment.get("PJRT_DEVICE"), machine.pci(_GOOGLE)
    findings = [
        *_packages(machine),
        package,
        Finding("PJRT device", "note", device or "left to torch_xla; `export PJRT_DEVICE=TPU` or CPU names it"),
        Finding("TPU", "note", f"{len(chips)} PCI devices of Google's" if chips else "none among the PCI devices"),
    ]
    return _target("xla", findings)


def _jax(machine: Machine) -> Target:
    """Backend ``jax``, which runs bundles that were compiled for XLA."""
    found, chips = machine.versions.get("jax", ""), machine.pci(_GOOGLE)
    library = machine.versions.get("libtpu", "")
    findings = [
        *_packages(machine),
        Finding("jax", "ok", found)
        if found
        else Finding("jax", "missing", "not installed", "`pip install 'staticgen[jax]'`"),
        Finding("libtpu", "note", library or "not installed; a TPU needs it: `pip install 'jax[tpu]'`"),
        Finding("TPU", "note", f"{len(chips)} PCI devices of Google's" if chips else "none among the PCI devices"),
    ]
    return _target("jax", findings)


_CHECKS: dict[str, Callable[[Machine], Target]] = {
    "npu": _npu, "gpu": _gpu, "openvino": _openvino, "cuda": _cuda, "xla": _xla, "jax": _jax, "intel_npu": _intel_npu, "inductor": _inductor,
    "eager": _eager,
}  # fmt: skip


def _target(
    name: str, findings: Iterable[Finding], backend: str | None = None, *, flags: str = "", otherwise: str = ""
) -> Target:
    """Put findings together. The next command is for the first thing that is missing."""
    findings = list(findings)
    # One backend is one file with its name. Asking the registry would import torch.
    if not (Path(__file__).parent / "backends" / f"{backend or name}.py").is_file():
        here = Finding("staticgen", "missing", f"no backend {backend or name} yet", "`staticgen devices openvino`")
        findings.insert(0, here)
    missing = [finding for finding in findings if finding.status == "missing"]
    if not missing:
        return Target(name, True, tuple(findings), _generate(backend or name, flags))
    fixes = [finding.fix for finding in missing if finding.fix][:1]
    return Target(name, False, tuple(findings), "; ".join([*fixes, *([otherwise] if otherwise else [])]))


def _generate(backend: str, flags: str = "") -> str:
    return " ".join(["`staticgen generate --backend", backend, *([flags] if flags else []), '--prompt "Hello"`'])


def _packages(machine: Machine) -> list[Finding]:
    """Python and the packages that every backend needs."""
    return [
        _in_range(machine, "python", machine.python),
        *(_in_range(machine, name, machine.versions.get(name)) for name in ("torch", "transformers")),
    ]


def _runtime(machine: Machine) -> list[Finding]:
    """Those, and OpenVINO."""
    found = [*_packages(machine), _in_range(machine, "openvino", machine.versions.get("openvino"))]
    if machine.openvino_error:
        fix = "`pip install --force-reinstall openvino`"
        found.append(Finding("OpenVINO", "missing", f"it cannot tell its devices: {machine.openvino_error}", fix))
    return found


def _in_range(machine: Machine, package: str, version: str | None) -> Finding:
    """Whether a version is one that staticgen supports."""
    wanted = machine.ranges.get(package, "")
    fix = f"`pip install '{package}{wanted}'`" if package != "python" else f"install Python {wanted}"
    if not version:
        return Finding(package, "missing", "not installed", fix)
    if not wanted:
        return Finding(package, "ok", version)
    if not within(wanted, version):
        return Finding(package, "missing", f"{version} is not {wanted}", fix)
    return Finding(package, "ok", f"{version} ({wanted})")


def _device(machine: Machine, family: str) -> Finding:
    """What OpenVINO says of a kind of device."""
    what = f"OpenVINO device {family}"
    devices = {name: about for name, about in machine.openvino.items() if name.split(".", maxsplit=1)[0] == family}
    if not devices:
        fix = "" if machine.platform == "linux" or family == "CPU" else f"install or update Intel's {family} driver"
        return Finding(what, "missing", f"OpenVINO finds {', '.join(machine.openvino) or 'none'}", fix)
    found = "; ".join(f"{name}: {about['name']} ({', '.join(about['precisions'])})" for name, about in devices.items())
    for about in devices.values():
        if error := about.get("compiler_error"):
            fix = _NPU_COMPILER if machine.platform == "linux" else "update Intel's NPU driver"
            return Finding(what, "missing", f"{found}, without a compiler: {error}", fix)
    return Finding(what, "ok", found)


def _unless_seen(machine: Machine, family: str, findings: list[Finding]) -> list[Finding]:
    """Files that are not where they usually are do not matter once OpenVINO has the device."""
    if not any(name.split(".", maxsplit=1)[0] == family for name in machine.openvino):
        return findings
    return [replace(one, status="note", fix="") if one.status == "missing" else one for one in findings]


def _file(what: str, paths: list[Path], absent: str, fix: str) -> Finding:
    return Finding(what, "ok", str(paths[0])) if paths else Finding(what, "missing", absent, fix)


def _node(machine: Machine, what: str, nodes: list[Path], pattern: str, fix: str) -> Finding:
    """A device node, and whether the user may open it."""
    if not nodes:
        if machine.container:
            flag = "--gpus all" if "nvidia" in pattern else f"--device /{Path(pattern).parent}"
            fix += f"; a container gets it with `docker run {flag}`"
        return Finding(what, "missing", f"no /{pattern}", fix)
    path = next((node for node in nodes if machine.may_open(node)), nodes[0])
    shown, about = f"/{path.relative_to(machine.root)}", path.stat()
    name, members = machine.group(about.st_gid)
    found = f"{shown} (group {name}, mode {stat.S_IMODE(about.st_mode):o})"
    if machine.may_open(path):
        return Finding(what, "ok", f"{found}, open to {machine.user}")
    both = stat.S_IRGRP | stat.S_IWGRP
    if name == "root" or about.st_mode & both != both:
        fix = f"`sudo chgrp render {shown} && sudo chmod g+rw {shown} && sudo usermod -a -G render {machine.user}`"
    elif machine.user in members:
        return Finding(what, "missing", f"{found}: {machine.user} joined {name} after this login", f"`newgrp {name}`")
    else:
        fix = f"`sudo usermod -a -G {name} {machine.user}`"
    return Finding(what, "missing", f"{found}, closed to {machine.user}", f"{fix}, then log out and in again")
