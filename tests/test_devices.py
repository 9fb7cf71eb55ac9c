"""What ``staticgen devices`` says: about this machine, and about others as files and facts."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import openvino as ov
import pytest

from staticgen import BackendUnavailableError, UnknownNameError, cli
from staticgen.backends import BACKENDS, open_backend
from staticgen.devices import find_devices, judge
from staticgen.machine import Machine, read_machine
from staticgen.profiles import profile_names

STRANGER = 54321  # a user that owns none of the files here
USER_FILES = (
    "usr/lib/x86_64-linux-gnu/libze_loader.so.1",
    "usr/lib/x86_64-linux-gnu/libze_intel_npu.so.1",
    "usr/lib/x86_64-linux-gnu/libopenvino_intel_npu_compiler.so",
    "lib/firmware/intel/vpu/vpu_40xx_v1.bin.zst",
    "usr/lib/x86_64-linux-gnu/intel-opencl/libigdrcl.so",
    "usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def laptop(tmp_path):
    """A Lunar Lake laptop with all drivers, and a user who may use them; what OpenVINO says there is not known here."""
    pci = {"0000:00:02.0": ("0x64a0", "0x030000"), "0000:00:0b.0": ("0x643e", "0x120000")}
    write(tmp_path, dict.fromkeys(USER_FILES, ""))
    for slot, (device, kind) in pci.items():
        folder = f"sys/bus/pci/devices/{slot}"
        write(tmp_path, {f"{folder}/vendor": "0x8086\n", f"{folder}/device": device, f"{folder}/class": kind})
    for node, kind in {"accel/accel0": "accel", "dri/renderD128": "drm"}.items():
        write(tmp_path, {f"dev/{node}": "", f"sys/class/{kind}/{Path(node).name}/device/vendor": "0x8086\n"})
        (tmp_path / "dev" / node).chmod(0o660)
    (tmp_path / "sys/module/intel_vpu").mkdir(parents=True)
    gid = (tmp_path / "dev/accel/accel0").stat().st_gid
    write(
        tmp_path,
        {
            "proc/sys/kernel/osrelease": "6.17.0-29-generic\n",
            "proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 avx_vnni\n",
            "etc/group": f"root:x:99999:\nrender:x:{gid}:ann\n",
        },
    )
    versions = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "openvino": "2026.4.1"}
    devices = {"CPU": {"name": "Core Ultra 7", "precisions": ["FP32"]}}
    ranges = {"torch": ">=2.6", "python": ">=3.11"}
    return Machine(
        root=tmp_path, python="3.12.1", versions=versions, ranges=ranges, openvino=devices, user="ann", uid=STRANGER,
        gids=frozenset([gid]),
    )  # fmt: skip


def with_device(machine, name, **about):
    devices = {**machine.openvino, name: {"name": f"Intel {name}", "precisions": ["FP16", "INT8"], **about}}
    return replace(machine, openvino=devices)


def target(machine, name):
    (found,) = [one for one in judge(machine) if one.name == name]
    return found


def finding(machine, name, what):
    (found,) = [one for one in target(machine, name).findings if one.what == what]
    return found


@pytest.mark.parametrize("name", ["npu", "gpu"])
def test_a_machine_that_has_everything(laptop, name):
    found = target(with_device(laptop, name.upper()), name)
    assert found.usable
    assert {one.status for one in found.findings} == {"ok"}
    flags = {"npu": "--backend npu", "gpu": "--backend openvino --device GPU"}[name]
    assert found.next == f'`staticgen generate {flags} --prompt "Hello"`'


def test_the_npu_is_named_with_its_platform_and_profile(laptop):
    found = finding(laptop, "npu", "NPU").found
    assert found == "Lunar Lake, platform 4000, profile intel-npu-4000 (PCI 0000:00:0b.0, 8086:643e)"
    for device in ("0x7d1d", "0xad1d", "0x643e", "0xb03e", "0xfd3e", "0xffff"):  # the last is one to come
        write(laptop.root, {"sys/bus/pci/devices/0000:00:0b.0/device": device})
        profile = finding(laptop, "npu", "NPU").found.split("profile ")[1].split()[0]
        assert profile in profile_names()


def remove(*names):
    def change(machine):
        for name in names:
            (machine.root / name).unlink()
        return machine

    return change


def not_in_group(machine):
    return replace(machine, gids=frozenset(), user="bob")


def since_this_login(machine):
    return replace(machine, gids=frozenset())


def owned_by_root(machine):
    (machine.root / "dev/accel/accel0").chmod(0o600)
    return machine


def unload(machine):
    (machine.root / "sys/module/intel_vpu").rmdir()
    return machine


def boxed(machine):
    write(machine.root, {".dockerenv": ""})
    return remove("dev/accel/accel0")(machine)


@pytest.mark.parametrize(
    ("change", "what", "found", "fix"),
    [
        (unload, "kernel module", "intel_vpu is not loaded, kernel 6.17.0-29-generic", "`sudo modprobe intel_vpu`"),
        (remove(USER_FILES[3]), "firmware", "no vpu_40xx*.bin", "intel-fw-npu"),
        (remove("dev/accel/accel0"), "NPU node", "no /dev/accel/accel*", "dmesg | grep -i vpu"),
        (boxed, "NPU node", "no /dev/accel/accel*", "docker run --device /dev/accel`"),
        (
            not_in_group, "NPU node", "/dev/accel/accel0 (group render, mode 660), closed to bob",
            "`sudo usermod -a -G render bob`, then log out and in again",
        ),
        (since_this_login, "NPU node", "ann joined render after this login", "`newgrp render`"),
        (owned_by_root, "NPU node", "mode 600), closed to ann", "`sudo chgrp render /dev/accel/accel0 && sudo chmod g+rw"),
        (remove(USER_FILES[0]), "Level Zero loader", "no libze_loader.so", "`sudo apt install libze1`"),
        (remove(USER_FILES[1]), "NPU driver", "no libze_intel_npu.so", "intel-level-zero-npu_"),
        (remove(USER_FILES[2]), "NPU compiler", '"VCL compiler loading failed"', "`sudo dpkg -i intel-driver-compiler-npu_*.deb`"),
    ],
)  # fmt: skip
def test_what_an_npu_lacks_is_named_with_what_to_do(laptop, change, what, found, fix):
    machine = change(laptop)
    said = finding(machine, "npu", what)
    assert said.status == "missing"
    assert found in said.found
    assert fix in said.fix
    judged = target(machine, "npu")
    assert not judged.usable
    assert judged.next.startswith(said.fix)
    assert [one.what for one in judged.findings if one.status == "missing"] == [what, "OpenVINO device NPU"]


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        (remove("dev/dri/renderD128"), "GPU node", "lspci"),
        (not_in_group, "GPU node", "usermod -a -G render bob"),
        (remove(USER_FILES[4]), "OpenCL runtime", "intel-opencl-icd"),
        (remove(USER_FILES[5]), "OpenCL loader", "ocl-icd-libopencl1"),
    ],
)
def test_what_a_gpu_lacks_is_named_with_what_to_do(laptop, change, what, fix):
    said = finding(change(laptop), "gpu", what)
    assert (said.status, fix in said.fix) == ("missing", True)
    assert not target(laptop, "gpu").usable


def test_a_node_of_another_vendor_is_none_of_intels(laptop):
    write(
        laptop.root,
        {"sys/class/drm/renderD128/device/vendor": "0x10de", "sys/class/accel/accel0/device/vendor": "0x1ae0"},
    )
    assert finding(laptop, "gpu", "GPU node").status == "missing"
    assert finding(laptop, "npu", "NPU node").status == "missing"


def test_drivers_in_other_places_do_not_matter_once_openvino_has_the_device(laptop):
    machine = with_device(remove(*USER_FILES[:4])(laptop), "NPU")
    assert finding(machine, "npu", "NPU driver").status == "note"
    assert target(machine, "npu").usable


def test_an_npu_without_a_compiler_cannot_be_used(laptop):
    machine = with_device(laptop, "NPU", compiler_error="Cannot load library")
    assert "without a compiler: Cannot load library" in finding(machine, "npu", "OpenVINO device NPU").found
    assert "intel-driver-compiler-npu" in target(machine, "npu").next


def test_libraries_are_looked_for_where_the_user_says(laptop, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "libze_intel_npu.so.1").touch()
    machine = remove(USER_FILES[1])(laptop)
    assert finding(machine, "npu", "NPU driver").status == "missing"
    machine = replace(machine, environment={"LD_LIBRARY_PATH": f"/nowhere{os.pathsep}{elsewhere}"})
    assert finding(machine, "npu", "NPU driver").found == str(elsewhere / "libze_intel_npu.so.1")


def test_without_an_npu_nobody_is_sent_for_its_drivers(tmp_path):
    write(
        tmp_path,
        {"sys/bus/pci/devices/0000:00:0b.0/vendor": "0x10de", "sys/bus/pci/devices/0000:00:0b.0/class": "0x120000"},
    )
    machine = Machine(
        root=tmp_path, python="3.12", versions={"torch": "2.9", "transformers": "5.24", "openvino": "2026.4"}
    )
    judged = target(machine, "npu")
    assert [one.what for one in judged.findings if one.status == "missing"] == ["NPU", "OpenVINO device NPU"]
    assert "sudo" not in judged.next
    assert "NPUW_DEVICES" in judged.next


def test_windows_is_judged_by_openvino_alone(tmp_path):
    versions = {"torch": "2.9", "transformers": "5.24", "openvino": "2026.4", "intel-npu-acceleration-library": "1.4.0"}
    machine = Machine(root=tmp_path, platform="win32", python="3.12", versions=versions)
    assert target(machine, "npu").next.startswith("install or update Intel's NPU driver")
    assert not target(machine, "intel_npu").usable
    machine = with_device(machine, "NPU")
    assert target(machine, "npu").usable
    assert target(machine, "intel_npu").usable


@pytest.mark.parametrize(
    ("versions", "what", "found", "fix"),
    [
        ({"torch": "2.5.1"}, "torch", "2.5.1 is not >=2.6", "`pip install 'torch>=2.6'`"),
        ({}, "torch", "not installed", "`pip install 'torch>=2.6'`"),
    ],
)
def test_versions_outside_the_range(versions, what, found, fix):
    machine = Machine(python="3.12", versions=versions, ranges={"torch": ">=2.6"})
    said = finding(machine, "eager", what)
    assert (said.status, said.found, said.fix) == ("missing", found, fix)
    assert finding(replace(machine, ranges={"python": ">=3.13"}), "eager", "python").found == "3.12 is not >=3.13"


def test_torch_xla_and_torch_must_match():
    machine = Machine(python="3.12", versions={"torch": "2.13.0", "torch_xla": "2.9.0", "transformers": "5.24"})
    said = finding(machine, "xla", "torch_xla")
    assert said.found == "2.9.0 needs torch 2.9, got 2.13.0"
    assert "`pip install 'staticgen[xla]'`" in said.fix
    machine = replace(machine, versions={**machine.versions, "torch": "2.9.1+cpu"}, environment={"PJRT_DEVICE": "TPU"})
    assert finding(machine, "xla", "torch_xla").status == "ok"
    assert finding(machine, "xla", "PJRT device").found == "TPU"


def test_jax_needs_libtpu_for_a_tpu_only():
    machine = Machine(python="3.12", versions={"torch": "2.13.0", "transformers": "5.24"})
    assert "`pip install 'staticgen[jax]'`" in finding(machine, "jax", "jax").fix
    machine = replace(machine, versions={**machine.versions, "jax": "0.10.2"})
    assert finding(machine, "jax", "jax").status == "ok"
    assert "pip install 'jax[tpu]'" in finding(machine, "jax", "libtpu").found


def test_cuda_says_what_is_in_the_way(tmp_path):
    machine = Machine(
        root=tmp_path, python="3.12", versions={"torch": "2.13.0+cpu", "transformers": "5.24"}, user="ann"
    )
    missing = {one.what for one in target(machine, "cuda").findings if one.status == "missing"}
    assert missing >= {"CUDA in torch", "GPU node", "driver", "torch's devices"}
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun",
            "dev/nvidia0": "",
        },
    )
    machine = replace(machine, versions={"torch": "2.13.0+cu130", "transformers": "5.24"}, cuda=("NVIDIA H200 (9.0)",))
    found = {one.what: one.found for one in target(machine, "cuda").findings if one.status == "ok"}
    assert found["driver"] == "NVIDIA's, 580.65.06"
    assert found["torch's devices"] == "NVIDIA H200 (9.0)"
    assert found["CUDA in torch"] == "2.13.0+cu130"


def test_the_cpu_is_told_with_what_it_computes_in(laptop):
    assert finding(laptop, "openvino", "OpenVINO device CPU").found == "CPU: Core Ultra 7 (FP32)"
    assert finding(laptop, "openvino", "CPU instructions").found == "avx2, avx_vnni"


def test_nothing_known_and_nothing_readable_is_no_error(tmp_path):
    for machine in (Machine(root=tmp_path / "nowhere"), Machine(root=tmp_path)):
        judged = judge(machine)
        assert not any(one.usable for one in judged)
        assert all(one.next for one in judged)
    for name in ("proc/cpuinfo", "etc/group", "sys/bus/pci/devices/0000:00:0b.0/vendor"):  # folders, not files
        (tmp_path / name).mkdir(parents=True)
    for name in ("dev/accel", "dev/dri"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ("accel0" if "accel" in name else "renderD128")).symlink_to(tmp_path / "gone")
    write(tmp_path, {"proc/driver/nvidia/version": "\x00\xff", "lib/firmware/intel/vpu": "a file"})
    assert [one.name for one in judge(Machine(root=tmp_path, uid=STRANGER))] == [one.name for one in judged]


def test_this_machine_is_judged_as_its_backends_judge_it():
    """Against what happens when each backend is opened, and what OpenVINO itself says."""
    judged = {one.name: one for one in find_devices()}
    assert set(judged) >= set(BACKENDS.names())
    for name in BACKENDS.names():
        try:
            open_backend(name)
        except BackendUnavailableError:
            assert not judged[name].usable, name
        else:
            assert judged[name].usable, name
    core = ov.Core()
    machine = read_machine()
    assert list(machine.openvino) == core.available_devices
    about = finding(machine, "openvino", "OpenVINO device CPU").found
    assert core.get_property("CPU", "FULL_DEVICE_NAME").strip() in about
    for precision in ("FP32", "BF16", "FP16"):
        assert (precision in about) == (precision in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert machine.ranges["python"] == project["requires-python"]
    for package in ("torch", "openvino"):  # one bound each, which leaves no order to differ in
        assert f"{package}{machine.ranges[package]}" in project["dependencies"]
    assert machine.ranges["transformers"]


def test_a_broken_openvino_is_told_of(monkeypatch):
    def broken():
        raise RuntimeError("first line\nthe driver is gone")

    monkeypatch.setattr(ov, "Core", broken)
    said = [one.found for one in find_devices("openvino")[0].findings if one.what == "OpenVINO"]
    assert said == ["it cannot tell its devices: RuntimeError: the driver is gone"]


def run(capsys, *arguments):
    code = 0
    try:
        cli.app(["devices", *arguments], standalone_mode=True)
    except SystemExit as exit_:
        code = exit_.code or 0
    return code, *capsys.readouterr()


def test_the_command(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    for one in find_devices():
        assert f"{one.name}: {'can be used' if one.usable else 'cannot be used here'}" in out.splitlines()
        assert f"  next: {one.next}" in out.splitlines()
        assert all(finding.found in out for finding in one.findings)
    assert run(capsys, "eager")[0] == 0
    code, out, _ = run(capsys, "intel_npu")
    assert (code, "archived by Intel" in out) == (int(not find_devices("intel_npu")[0].usable), True)
    assert not out.startswith("npu")
    code, out, err = run(capsys, "toaster")
    assert (code, out) == (1, "")
    assert (
        "unknown target 'toaster': expected one of npu, gpu, openvino, cuda, xla, jax, intel_npu, inductor, eager"
        in err
    )
    with pytest.raises(UnknownNameError):
        find_devices("toaster")


def test_json_holds_the_records(capsys):
    code, out, _ = run(capsys, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps([asdict(one) for one in find_devices()]))
    code, out, _ = run(capsys, "NPU", "--json")
    (found,) = json.loads(out)
    assert (found["name"], code) == ("npu", int(not found["usable"]))


def test_the_command_imports_neither_torch_nor_transformers():
    if any(Path("/dev").glob("nvidia0")):
        pytest.skip("this machine has an NVIDIA GPU, about which torch is asked")
    code = (
        "import sys; from staticgen import cli\n"
        "try: cli.app(['devices', 'eager'])\n"
        "except SystemExit: print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
