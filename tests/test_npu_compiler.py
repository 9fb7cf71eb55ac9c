"""Intel's real NPU compiler where one is at hand, and what is said where none is."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import models
import numpy as np
import openvino as ov
import pytest
from staticgen.compile import PLATFORMS, compile_blob, compile_bundle, find_compiler
from staticgen.compile.npu import COMPILER_VARIABLE

import staticgen
from staticgen import BackendUnavailableError, CompileError, UnknownNameError
from staticgen.backends.ir import static_model, write_ir
from staticgen.profiles import load_profile
from staticgen.shapes import StepForm, StepShape
from staticgen.step import Step

PROMPT = [5, 6, 7, 8, 9]
ROOT = Path(__file__).parent.parent
FORM = load_profile("intel-npu").form
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


def compiler_at_hand():
    """The compiler that the environment names, or the project's own where wine and mingw are."""
    if named := os.environ.get(COMPILER_VARIABLE):
        return Path(named)
    wine = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine") or shutil.which("wine")
    return ROOT / ".ci" / "npu-compile" if wine and shutil.which("x86_64-w64-mingw32-gcc") else None


@pytest.fixture(scope="module")
def compiler():
    found = compiler_at_hand()
    if found is None:
        pytest.skip(f"needs an NPU compiler: {COMPILER_VARIABLE}, or wine64 and mingw's gcc")
    return found


@pytest.fixture(scope="module")
def step():
    return Step(models.llama(**SIZES), FORM)


@pytest.fixture
def script(tmp_path):
    """An executable that does what a test says in place of a compiler."""

    def write(body):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture(scope="module")
def files(step, tmp_path_factory):
    shapes = {"decode": StepShape(1, 1, 32), "prefill_16": StepShape(1, 16, 32)}
    return write_ir(step, shapes, tmp_path_factory.mktemp("ir"), compress_to_fp16=True)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decode_and_prefill_compile_for_every_generation(compiler, files, platform, tmp_path):
    """C61: 3720 takes prefill only with late heads, 4000 and 5010 take no split attention."""
    for program in files:
        blob = tmp_path / f"{program.name}.blob"
        made = compile_blob(program.paths["model"], blob, platform, weights=program.paths["weights"], compiler=compiler)
        assert made.nbytes == blob.stat().st_size > 100_000
        assert b"ELF" in blob.read_bytes()[:4096]


def test_what_the_compiler_refuses_is_said_in_its_words(compiler, tmp_path):
    """Prefill as transformers writes it; when 3720 takes this, late_heads has no use any more."""
    plain = Step(models.llama(**SIZES), StepForm("concat"))
    (program,) = write_ir(plain, {"prefill_16": StepShape(1, 16, 32)}, tmp_path, compress_to_fp16=True)
    with pytest.raises(CompileError, match=r"refused .*prefill_16\.xml' on NPU 3720: .*UnrollPermuteDMA"):
        compile_blob(
            program.paths["model"], tmp_path / "x.blob", "3720", weights=program.paths["weights"], compiler=compiler
        )
    assert not (tmp_path / "x.blob").exists()


def test_late_heads_change_no_number(step):
    shape = StepShape(2, 5, 16)
    plain = Step(models.llama(**SIZES), StepForm("concat", fed=True))
    from staticgen.fed import fed_inputs

    generator = np.random.default_rng(0)
    inputs = [tensor.numpy() for tensor in fed_inputs(step, shape)]
    inputs = [generator.normal(size=one.shape).astype(one.dtype) if one.dtype == np.float32 else one for one in inputs]
    core, options = ov.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    late, early = (core.compile_model(static_model(each, shape), "CPU", options)(inputs) for each in (step, plain))
    for mine, own in zip(late.values(), early.values(), strict=True):
        np.testing.assert_allclose(mine, own, rtol=1e-4, atol=1e-5)


def test_late_heads_leave_no_rotation_behind_a_transposition(step):
    """Every transposition to [B, H, T, D] is read by attention, the cache or an output, by nothing that computes."""
    model = static_model(step, StepShape(1, 16, 32))
    transpositions = [op for op in model.get_ops() if op.get_type_name() == "Transpose"]
    readers = [
        target.get_node().get_type_name()
        for op in transpositions
        if op.input_value(1).get_node().get_data().tolist() == [0, 2, 1, 3]
        for target in op.output(0).get_target_inputs()
    ]
    assert len(readers) >= 3
    assert not {"Add", "Multiply", "Slice", "VariadicSplit"} & set(readers)


def test_without_a_compiler_the_error_says_what_is_needed(files, tmp_path, monkeypatch):
    monkeypatch.delenv(COMPILER_VARIABLE, raising=False)
    libraries = Path(ov.__file__).parent / "libs"
    if "NPU" in ov.Core().available_devices or list(libraries.glob("*npu_compiler*")):
        pytest.skip("this machine has the NPU plugin's own compiler")
    with pytest.raises(BackendUnavailableError, match=f"driver with its compiler.*{COMPILER_VARIABLE}"):
        compile_blob(files[0].paths["model"], tmp_path / "x.blob", "4000", weights=files[0].paths["weights"])


def test_bad_arguments(files, tmp_path, monkeypatch, script):
    model, weights = files[0].paths["model"], files[0].paths["weights"]
    with pytest.raises(UnknownNameError, match=r"unknown NPU platform '4010': expected one of 3720 \(Meteor Lake\)"):
        compile_blob(model, tmp_path / "x.blob", "4010", weights=weights)
    with pytest.raises(FileNotFoundError, match=r"decode\.bin' is missing"):
        compile_blob(model, tmp_path / "x.blob", "4000")
    with pytest.raises(BackendUnavailableError, match="compiler is 'nowhere', which is no executable file"):
        compile_blob(model, tmp_path / "x.blob", "4000", weights=weights, compiler="nowhere")
    monkeypatch.setenv(COMPILER_VARIABLE, str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=f"{COMPILER_VARIABLE} is .*no executable file"):
        find_compiler()
    monkeypatch.setenv(COMPILER_VARIABLE, str(script("exit 0")))
    assert find_compiler() == script("exit 0")


def test_how_an_executable_answers(files, tmp_path, script):
    """It gets the model with its weights beside it; 69 is no refusal, and neither is an answer without a blob."""
    model, weights = files[0].paths["model"], files[0].paths["weights"]
    blob = tmp_path / "x.blob"

    def compile_with(body):
        return compile_blob(model, blob, "4000", weights=weights, compiler=script(body))

    made = compile_with('cat "$1" "${1%.xml}.bin" > "$2"; echo "$3" >> "$2"')
    assert made.nbytes == model.stat().st_size + weights.stat().st_size + 5
    with pytest.raises(CompileError, match=r"refused .* on NPU 4000: it cannot"):
        compile_with("echo it cannot; exit 4")
    assert not blob.exists()
    with pytest.raises(BackendUnavailableError, match="cannot run here: no wine"):
        compile_with("echo no wine; exit 69")
    with pytest.raises(CompileError, match="wrote no blob"):
        compile_with("exit 0")


def test_the_check_says_when_it_is_skipped_and_fails_when_it_must(script, monkeypatch, capsys):
    """A compiler that cannot run is a skip; one that refuses is a failure, with its words in the table."""
    spec = importlib.util.spec_from_file_location("npu_check", ROOT / "benchmarks" / "npu_check.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    arguments = [
        "--short",
        "--platform",
        "4000",
        "--weights",
        "f16",
        "--cache",
        "32",
        "--family",
        "GPT-2",
        "--compiler",
    ]

    def run(body):
        monkeypatch.setattr(sys, "argv", ["npu_check.py", *arguments, str(script(body))])
        return check.main(), capsys.readouterr().out

    status, said = run("echo there is no wine; exit 69")
    assert status == 0
    assert "SKIPPED: the NPU compiler" in said and "there is no wine" in said
    status, said = run("echo it cannot; exit 4")
    assert status == 1
    assert "0 of 3 programs compiled" in said and "it cannot" in said
    status, said = run('echo blob > "$2"')
    assert (status, said.splitlines()[-1]) == (0, "3 of 3 programs compiled")


def test_a_bundle_has_blobs_where_the_compiler_is_at_hand(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv(COMPILER_VARIABLE, str(compiler))
    model, stages = models.llama(**SIZES), []
    made = compile_bundle(
        model, tmp_path / "b", profile="intel-npu-4000", max_length=32, prefill_buckets=[16],
        report=lambda stage, detail, part: stages.append(stage),
    )  # fmt: skip
    assert stages.count("blobs") == 2
    for program in made.programs.values():
        ((blob, made_for),) = program.compiled
        assert made_for == {"npu_platform": "4000"}
        assert blob.stat().st_size > 100_000
    # Without that NPU the model is what runs.
    session = staticgen.load(tmp_path / "b", backend_options={"NPUW_DEVICES": "CPU"})
    assert session.stats.compiles == 2
    assert session.generate([PROMPT], max_new_tokens=8)[0].tolist() == PROMPT + models.reference(model, PROMPT, 8)
    plain = compile_bundle(model, tmp_path / "p", profile="intel-npu-4000", max_length=32, blobs=False)
    assert not any(program.compiled for program in plain.programs.values())
