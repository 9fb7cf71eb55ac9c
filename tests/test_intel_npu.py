"""The adapter to Intel's archived NPU library.

The library has wheels for Windows only. Where it is missing, a stand-in takes its place in a process of its own: a
package with the library's name and with those of its names that the adapter uses, over plain torch.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from staticgen import BackendUnavailableError, UnknownNameError
from staticgen.backends import AUTO_ORDER, open_backend

INSTALLED = importlib.util.find_spec("intel_npu_acceleration_library") is not None
missing = pytest.mark.skipif(INSTALLED, reason="intel-npu-acceleration-library is installed")

# What the library does, by its source (1.4.0): layers round to float16 and multiply; a layer with an id has the weights
# of the next layer of its size loaded, and the process ends when another one comes; importing it warns and edits sys.path.
STAND_IN = {
    "__init__.py": """
        from . import backend, nn
    """,
    "backend.py": """
        import os, sys, warnings
        import torch

        NPU = os.environ["STAND_IN_NPU"] == "1"
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "external"))
        if not NPU:
            warnings.warn("NPU is not available in your system. Library will fallback to AUTO device selection mode")
        rows, orders, waiting = set(), {}, {}

        def npu_available():
            return NPU

        @torch.no_grad()
        def run_matmul(x, weights, scale=None, op_id=None):
            size = (x.numel() // x.shape[-1], *weights.shape)
            rows.add(size[0])
            if op_id is not None:
                if waiting.get(size, op_id) != op_id:
                    os.abort()
                order = orders.setdefault(size, [])
                if op_id in order:
                    waiting[size] = order[(order.index(op_id) + 1) % len(order)]
                else:
                    order.append(op_id)
            held = weights.float() if scale is None else weights.float() * scale.float()
            return (x.half().float() @ held.T).half().to(x.dtype)
    """,
    "nn.py": """
        import uuid
        import torch
        from .backend import run_matmul

        class Linear(torch.nn.Module):
            def __init__(self, weight, scale, bias):
                super().__init__()
                if scale is None:
                    weight = torch.nn.Parameter(weight)
                self.weight, self.scale, self.bias, self.op_id = weight, scale, bias, str(uuid.uuid4())

            def forward(self, x):
                if self.training:
                    raise RuntimeError("not in training mode")
                out = run_matmul(x, self.weight, self.scale, self.op_id)
                return out if self.bias is None else out + self.bias

            @staticmethod
            def fromTorch(layer, dtype=torch.float16):
                if any(dim > 2**17 for dim in layer.weight.shape):
                    return layer
                bias = None if layer.bias is None else layer.bias.to(torch.float16)
                if dtype == torch.float16:
                    return Linear(layer.weight.to(dtype), None, bias)
                scale = (layer.weight.abs().amax(-1, keepdim=True) / 127).half()
                return Linear(torch.floor(layer.weight / scale).to(torch.int8), scale, bias)
    """,
}


def run(tmp_path, code, npu=True, broken=None):
    """What a process says that has the stand-in: the last line of JSON on its standard output."""
    package = tmp_path / "intel_npu_acceleration_library"
    package.mkdir(exist_ok=True)
    for name, text in STAND_IN.items():
        lines = (broken or text).split("\n") if name == "__init__.py" else text.split("\n")
        (package / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines), encoding="utf-8")
    path = [str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "STAND_IN_NPU": str(int(npu))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@missing
def test_without_the_library_the_error_says_what_replaces_it():
    with pytest.raises(
        BackendUnavailableError,
        match=r"not installed and which Intel archived in April 2025: backend='npu'.*pip install intel-npu-.*no wheels for Linux",
    ):
        open_backend("intel_npu")


def test_auto_never_takes_it(tmp_path):
    assert "intel_npu" not in AUTO_ORDER
    code = """
import json, sys
from staticgen.backends import open_backend
name = open_backend("auto").name
print(json.dumps([name, "intel_npu_acceleration_library" in sys.modules]))
"""
    name, imported = run(tmp_path, code)
    assert name in AUTO_ORDER
    assert not imported


def test_devices_and_options():
    with pytest.raises(UnknownNameError, match="NPU only, got device='GPU'"):
        open_backend("intel_npu", "GPU")
    with pytest.raises(ValueError, match=r"unknown option 'precision'.*knows dtype only"):
        open_backend("intel_npu", None, {"precision": "f16"})
    with pytest.raises(ValueError, match="dtype='int4', expected one of float16, int8"):
        open_backend("intel_npu", None, {"dtype": "int4"})


@missing
@pytest.mark.parametrize("raised", ["OSError('libopenvino.so: cannot open')", "ImportError('no WeightOnlyLinear')"])
def test_a_library_that_cannot_be_imported_is_no_missing_one(tmp_path, raised):
    code = """
import json
from staticgen.backends import open_backend
try:
    open_backend("intel_npu")
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
    kind, message = run(tmp_path, code, broken=f"raise {raised}")
    assert kind == "BackendUnavailableError"
    assert "is installed but cannot be imported" in message
    assert raised.split("'")[1] in message
    assert "'neural-compressor<3.8'" in message
    assert "backend='npu'" in message


@missing
def test_without_an_npu_it_refuses_to_run_on_the_cpu(tmp_path):
    code = """
import json, warnings
from staticgen.backends import open_backend
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        open_backend("intel_npu")
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error), [str(one.message) for one in warned]]))
"""
    kind, message, warned = run(tmp_path, code, npu=False)
    assert kind == "BackendUnavailableError"
    assert "finds no NPU" in message
    assert not any("fallback" in one for one in warned)


RUN_MODELS = """
import json, sys, warnings
import models, torch
from models import random_prompt, reference
from staticgen import Session
from staticgen.backends import open_backend

path = list(sys.path)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for _ in range(2):
        open_backend("intel_npu", "npu")
library = sys.modules["intel_npu_acceleration_library"]
said = {"path": path == sys.path, "warned": [str(one.message) for one in warned]}
prompts = [random_prompt(length) for length in (3, 9, 20)]
kinds = {"llama": models.llama(), "qwen2": models.qwen2(), "opt": models.opt(), "mistral": models.mistral()}
kinds["half"] = models.llama(seed=1).half()
sessions, before = {}, {}
for name, model in kinds.items():
    before[name] = [[type(m).__name__ for m in model.modules()], [p.clone() for p in model.parameters()]]
    sessions[name] = Session(model, max_length=64, batch_size=3, backend="intel_npu", prefill_buckets=[8, 16])
compiled = {"rows": sorted(library.backend.rows)}
tokens = {name: [] for name in kinds}
for _ in range(2):  # in turns: layers of one size come from several models
    for name, session in sessions.items():
        tokens[name] = session.generate(prompts, max_new_tokens=24)[:, 20:].tolist()
compiled["later"] = sorted(library.backend.rows)
said["expected"] = {name: [reference(model, p, 24) for p in prompts] for name, model in kinds.items()}
said["tokens"], said["compiled"] = tokens, compiled
said["untouched"] = [
    before[name][0] == [type(m).__name__ for m in model.modules()]
    and all(torch.equal(old, new) for old, new in zip(before[name][1], model.parameters()))
    for name, model in kinds.items()
]
# Another backend for the same model, with the same form of the step, gets none of it.
eager = Session(kinds["llama"], max_length=64, batch_size=3, backend="eager")
said["eager"] = eager.generate(prompts, max_new_tokens=24)[:, 20:].tolist()
program = next(iter(sessions["half"]._programs._programs.values()))
places = {t.data_ptr() for t in kinds["half"].parameters()}
said["shared"] = all(t.data_ptr() in places for t in program._step.parameters())
said["layers"] = sorted({type(m).__module__ for m in program._step.modules() if "Linear" in type(m).__name__})
int8 = Session(kinds["llama"], max_length=64, batch_size=3, backend="intel_npu", backend_options={"dtype": "int8"})
said["int8"] = [int8.backend.description, int8.generate(prompts, max_new_tokens=24)[:, 20:].tolist()]

refused = {
    "bfloat16": models.llama().bfloat16(),
    "gpt2": models.gpt2(),
    "mixtral": models.mixtral(),
    "wide": models.llama(vocab_size=2**17 + 1, num_hidden_layers=1, hidden_size=8, intermediate_size=8),
    "large": models.llama(),
}
with torch.no_grad():
    refused["large"].model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
for name, model in refused.items():
    try:
        Session(model, max_length=32, backend="intel_npu")
    except Exception as error:
        refused[name] = [type(error).__name__, str(error)]
said["refused"] = refused
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    if INSTALLED:
        pytest.skip("intel-npu-acceleration-library is installed")
    return run(tmp_path_factory.mktemp("stand-in"), RUN_MODELS)


def test_the_tokens_are_those_of_transformers(said):
    """Also with several models in turns, which the library's ids do not bear."""
    assert said["tokens"] == said["expected"]
    assert said["layers"] == ["intel_npu_acceleration_library.nn"]


def test_matmuls_of_all_sizes_are_compiled_before_the_first_call(said):
    """Rows of a matmul: the tokens of a step, or of its head."""
    assert said["compiled"] == {"rows": [3, 24, 48], "later": [3, 24, 48]}


def test_the_model_and_other_backends_are_left_alone(said):
    assert said["untouched"] == [True] * 5
    assert said["eager"] == said["expected"]["llama"]
    assert said["shared"]


def test_int8_is_asked_for_by_name_and_is_another_computation(said):
    description, tokens = said["int8"]
    assert description == "intel_npu on NPU: linear layers in int8, all else by torch on the CPU"
    assert tokens != said["expected"]["llama"]
    assert [len(row) for row in tokens] == [24, 24, 24]


def test_it_says_once_that_it_is_archived(said):
    (warning,) = said["warned"]
    assert "archived by Intel in April 2025" in warning
    assert "backend='npu'" in warning
    assert said["path"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bfloat16", ["float16 or float32, got torch.bfloat16", "dtype=torch.float16"]),
        ("gpt2", ["model_type 'gpt2'", "Conv1D", "torch.nn.Linear only", "backend='npu'"]),
        ("mixtral", ["model_type 'mixtral'", "Mixtral", "would stay on the CPU"]),
        ("wide", ["lm_head is [131073, 8]", "131072"]),
        ("large", ["layers.1.mlp.up_proj", "float16 cannot hold", "int8"]),
    ],
)
def test_what_would_run_elsewhere_or_as_something_else_is_refused(said, name, words):
    kind, message = said["refused"][name]
    assert kind == "CompileError"
    assert all(word in message for word in words), message
