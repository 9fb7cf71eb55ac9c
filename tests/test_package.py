"""The shape of the package: import direction, version, and that the wheel holds everything."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import staticgen

ROOT = Path(__file__).parent.parent
# Each module may import those before it, never one after it.
ORDER = [
    "errors", "machine", "devices", "shapes", "masks", "feeds", "spans", "registry", "stats", "layouts", "rotary", "cache", "device_loop", "graphs", "growth", "prompts", "ready", "prefix_cache",
    "decoding", "constraints", "sampling", "calls", "profiles", "identity", "facts", "attention", "legacy", "step", "fed", "backends.base", "bundle", "compile_cache", "functions", "device_functions", "engines", "device_memory", "jax_programs", "jax_engine", "compiled", "models", "backends",
    "backends.eager", "backends.inductor", "backends.cuda", "backends.hlo", "backends.xla_engine", "backends.xla", "backends.jax", "backends.intel_npu", "backends.ir_rewrites", "backends.ir", "backends.openvino", "backends.npu", "limits", "sources", "programs", "contexts", "loops", "prefixes",
    "request", "beams", "many", "progress", "holding", "session", "certificate", "generation", "custom", "text", "detokenize", "completions", "outline", "buckets", "measuring", "planning", "", "flags", "terminal",
    "cli_devices", "cli_targets", "compile.compress", "compile.npu", "compile.tpu_worker", "compile.tpu", "compile.writers", "compile.openvino_writer", "compile.inductor_writer", "compile.xla_writer", "compile.bundles", "compile", "inspection", "cli_bundles", "cli",
]  # fmt: skip


def modules():
    """Name below ``staticgen`` and syntax tree of every module of the package."""
    for top, prefix in ((ROOT / "staticgen", ()), (ROOT / "compile", ("compile",))):
        for path in sorted(top.rglob("*.py")):
            parts = (*prefix, *path.relative_to(top).with_suffix("").parts)
            yield ".".join(part for part in parts if part != "__init__"), ast.parse(path.read_text(encoding="utf-8"))


def test_imports_only_go_down():
    found = dict(modules())
    assert set(found) == set(ORDER)
    for name, tree in found.items():
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                # only compile/, which is installed below the package, imports relatively
                relative = node.level == 1 and name.partition(".")[0] == "compile"
                assert node.level == 0 or relative, f"{name} imports relatively"
                imported = [node.module if node.level == 0 else f"staticgen.compile.{node.module}"]
                if node.module == "staticgen":
                    imported = [
                        f"staticgen.{alias.name}" if alias.name in ORDER else "staticgen" for alias in node.names
                    ]
            for target in imported:
                if target == "staticgen" or target.startswith("staticgen."):
                    inner = target.removeprefix("staticgen").removeprefix(".")
                    assert inner in ORDER, f"{name} imports {target}"
                    assert ORDER.index(inner) < ORDER.index(name), f"{name} imports {target}, which is above it"


def test_only_a_backend_and_the_compiler_import_openvino():
    for name, tree in modules():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(imported.startswith("openvino") for imported in names):
                assert name in (
                    "backends.ir",
                    "backends.ir_rewrites",
                    "backends.openvino",
                    "compile.compress",
                    "compile.npu",
                )


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == staticgen.__version__
    assert f"## {staticgen.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_wheel_holds_the_package_and_works_from_elsewhere(tmp_path):
    """A subpackage that setuptools is not told of works in editable mode and is missing from the wheel."""
    source = tmp_path / "source"  # a copy, so that nothing is built in the tree and nothing old is picked up
    for name in ("staticgen", "compile", "hw_profiles"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("staticgen-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "staticgen").rglob("*.py")}
    profiles = {
        f"staticgen/hw_profiles/{path.name}"
        for path in (ROOT / "hw_profiles").iterdir()
        if path.suffix in (".py", ".toml")
    }
    compilers = {f"staticgen/compile/{path.name}" for path in (ROOT / "compile").glob("*.py")}
    assert names >= sources | profiles | compilers | {"staticgen/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    code = (
        "import staticgen, staticgen.compile, staticgen.profiles as p; print(staticgen.__file__); [p.load_profile(n) for n in p.profile_names()];"
        "from staticgen.backends import open_backend; print(open_backend('openvino').description)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert output == [str(tmp_path / "site" / "staticgen" / "__init__.py"), "openvino on CPU"]
