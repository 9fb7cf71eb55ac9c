"""Bundles of StableHLO on XLA's CPU client through torch-xla: written here, run by another process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import bundles
import models
import pytest
import safetensors
import torch
from models import new_tokens, random_prompt, reference
from on_xla import needs_xla

import staticgen
from staticgen import BackendUnavailableError, BundleError, Session, cli

TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
ON_CPU = {"backend": "xla", "device": "cpu"}
PROMPTS = [random_prompt(length) for length in (3, 12)]


pytestmark = [needs_xla, pytest.mark.usefixtures("one_thread")]


def compile_for_tpu(folder, model, **arguments):
    """A bundle of 32 slots; without the TPU compiler's account of it, which tests of its own are about."""
    bundles.compile_tiny(folder, model, profile="tpu-v5e", blobs=False, **arguments)
    return folder


@pytest.fixture(scope="module")
def made(tiny_llama, tmp_path_factory):
    return compile_for_tpu(tmp_path_factory.mktemp("xla") / "bundle", tiny_llama)


def run(code, *arguments, timeout=300):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


ANOTHER = """
import json, sys
from torch_xla.debug import metrics
from staticgen import Session

class NoModels:
    def find_spec(self, name, path=None, target=None):
        if ".modeling_" in name and name.startswith("transformers.models"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, NoModels())
prompts = json.loads(sys.argv[2])
session = Session(sys.argv[1], backend="xla", device="cpu")
session.generate(prompts, max_new_tokens=20)
compiled = metrics.metric_data("CompileTime")[0]
for layout in ("ring", "shift", "sink"):
    session.set_cache_implementation(layout)
    print(session.generate(prompts, max_new_tokens=20)[:, 12:].tolist(), session.stats.last.loop)
session.set_cache_implementation("ring")
print(session.generate(prompts, max_new_tokens=20, do_sample=True, temperature=1.3, seed=2**40 + 3)[:, 12:].tolist())
print(session.generate(prompts[1], max_new_tokens=15, prefix=session.prefix(prompts[1][:7]))[:, 12:].tolist())
print([int(token) for token in session.stream(prompts[0], max_new_tokens=20)])
print([text.tolist() for text in session.generate_many([*prompts, prompts[0]], max_new_tokens=9)])
assert metrics.metric_data("CompileTime")[0] == compiled == session.backend.engine.compiles
assert not [name for name in metrics.counter_names() if name.startswith("aten::")]
assert not [name for name in sys.modules if ".modeling_" in name and name.startswith("transformers.models")]
print(session.stats.loads, session.stats.compiles)
"""


def test_another_process_needs_no_model(made, tiny_llama):
    said = run(ANOTHER, made, json.dumps(PROMPTS))
    expected = [reference(tiny_llama, prompt, 20) for prompt in PROMPTS]
    assert said[:3] == [f"{expected} device", f"{expected} device", f"{expected} host"]
    null = Session(
        tiny_llama, max_length=32, batch_size=2, prefill_buckets=[8], cache_sizes=[16], backend="xla", device="null"
    )
    sampled = null.generate(PROMPTS, max_new_tokens=20, do_sample=True, temperature=1.3, seed=2**40 + 3)
    assert said[3] == str(sampled[:, 12:].tolist())
    assert said[4:6] == [str([expected[1][:15]]), str(expected[0])]
    many = [prompt + row[:9] for prompt, row in zip(PROMPTS, expected, strict=True)]
    assert said[6] == str([*many, many[0]])
    assert said[7] == "3 3"  # HLO is compiled where it runs


def gemma3():
    return models.gemma3(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize("build", [gemma3, models.mixtral, models.gpt2], ids=lambda build: build.__name__)
def test_families(build, tmp_path):
    """Windows of two sizes, experts, learned positions."""
    model = build()
    session = Session(compile_for_tpu(tmp_path / "bundle", model), **ON_CPU)
    expected = [reference(model, prompt, 20) for prompt in PROMPTS]
    for layout in ("ring", "shift", *([] if build is models.gpt2 else ["sink"])):
        session.set_cache_implementation(layout, **({"num_sink_tokens": 0} if layout == "sink" else {}))
        assert new_tokens(session.generate(PROMPTS, max_new_tokens=20), 12) == expected
    if build is models.gpt2:
        with pytest.raises(staticgen.UnsupportedModelError, match="cannot move its cached keys"):
            session.set_cache_implementation("sink")
    session.set_cache_implementation("ring")
    output = session.generate(PROMPTS[1], max_new_tokens=20, prefix=session.prefix(PROMPTS[1][:10]))
    assert new_tokens(output, 12) == expected[1:]


def test_keys_that_turn_beyond_the_cache(made, tiny_llama):
    """Layout "sink" of a bundle drops and turns as the live one on the eager backend does."""
    found = []
    for session in (
        Session(tiny_llama, max_length=32, batch_size=2, prefill_buckets=[8], backend="eager"),
        Session(made, **ON_CPU),
    ):
        session.set_cache_implementation("sink", window_length=16, num_sink_tokens=2)
        found.append(session.generate(PROMPTS, max_new_tokens=40).tolist())
    assert found[0] == found[1]


def test_weights_are_written_once_and_in_the_models_dtype(tmp_path):
    model = models.llama(tie_word_embeddings=True).to(torch.bfloat16)
    folder = compile_for_tpu(tmp_path / "bundle", model, cache_sizes=[])
    held = sum(tensor.nbytes for tensor in model.parameters())
    assert held <= (folder / "weights.safetensors").stat().st_size <= 1.1 * held
    with safetensors.safe_open(folder / "weights.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    assert shapes.count((128, 64)) == 1 + 2 * 2  # the embedding, which is the head, and two MLPs' of this shape
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values() if tensor.numel() > 100)
    for path in (folder / "programs").iterdir():  # nor in the programs
        assert path.stat().st_size < held
    session = Session(folder, **ON_CPU)
    live = Session(model, max_length=32, batch_size=2, prefill_buckets=[8], cache_sizes=[], **ON_CPU)
    assert torch.equal(session.generate(PROMPTS, max_new_tokens=16), live.generate(PROMPTS, max_new_tokens=16))
    assert session.stats.last.loop == "device"


def test_the_layout_that_recomputes(tmp_path):
    model = models.llama(num_hidden_layers=1)
    folder = compile_for_tpu(tmp_path / "bundle", model, layout="none")
    session = Session(folder, **ON_CPU)
    assert session.layout == "none"
    assert new_tokens(session.generate(PROMPTS, max_new_tokens=12), 12) == [reference(model, p, 12) for p in PROMPTS]
    with pytest.raises(BundleError, match="has no program for the step"):
        session.set_cache_implementation("ring")


def test_the_wrong_place(made):
    with pytest.raises(BackendUnavailableError, match=r"compiled for device 'TPU'.* of backend 'xla'.*another"):
        Session(made)
    with pytest.raises(BundleError, match=r"backend is 'openvino', but bundle .* was compiled for 'xla'"):
        Session(made, backend="openvino")
    with pytest.raises(BackendUnavailableError, match=r"mesh='4', but backend 'xla' runs on one chip"):
        Session(made, backend_options={"mesh": "4"}, **ON_CPU)
    with pytest.raises(staticgen.CompileError, match="device 'null' runs no compiled programs"):
        Session(made, backend="xla", device="null").generate([5, 6, 7])


# Files that do not belong together, in a bundle whose hashes are right. One process for each kind, since it might end
# in XLA's C++; what is not refused gives the right tokens.


def swap(folder, one, other):
    first, second = (folder / "programs" / one).read_bytes(), (folder / "programs" / other).read_bytes()
    bundles.replace(folder / "programs" / one, second)
    bundles.replace(folder / "programs" / other, first)


def edit(name, change):
    def forge(folder):
        path = folder / "programs" / f"{name}.json"
        table = json.loads(path.read_bytes())
        change(table)
        bundles.replace(path, json.dumps(table).encode())

    return forge


def cut(name, content=None):
    def forge(folder):
        path = folder / name
        held = path.read_bytes()
        bundles.replace(path, held[: len(held) // 2] if content is None else content)

    return forge


def weights(change):
    def forge(folder):
        path = folder / "weights.safetensors"
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        change(tensors)
        bundles.replace(path, safetensors.torch.save(tensors))

    return forge


def first_of(tensors, shape):
    return next(name for name, tensor in tensors.items() if tuple(tensor.shape) == shape)


def shorter(table, kind):
    entry = next(entry for entry in table["greedy"][kind] if entry[0] == "keys.0")
    entry[1][3] -= 1


FORGERIES = {
    "hlo that is none": cut("programs/decode_16.greedy.hlo", b"nothing"),
    "hlo that is empty": cut("programs/decode_16.greedy.hlo", b""),
    "hlo cut off": cut("programs/decode_16.greedy.hlo"),
    "hlo of another function": lambda folder: swap(folder, "decode_16.greedy.hlo", "decode_16.row.hlo"),
    "hlo of another size": lambda folder: swap(folder, "decode_16.greedy.hlo", "decode_32.greedy.hlo"),
    "put of another size": lambda folder: swap(folder, "decode_32.put.hlo", "prefill_8_32.put.hlo"),
    "functions of another size": lambda folder: swap(folder, "decode_16.json", "decode_32.json"),
    "functions that are no json": cut("programs/decode_16.json"),
    "functions that are a list": cut("programs/decode_16.json", b"[]"),
    "no function put": edit("prefill_8_32", lambda table: table.pop("put")),
    "no function move_32": edit("decode_16", lambda table: table.pop("move_32")),
    "an unknown function": edit("decode_16", lambda table: table.update(other=table["row"])),
    "an input of another shape": edit("decode_16", lambda table: shorter(table, "inputs")),
    "an output of another shape": edit("decode_16", lambda table: shorter(table, "outputs")),
    "inputs in another order": edit("decode_16", lambda table: table["greedy"]["inputs"].reverse()),
    "outputs in another order": edit("decode_16", lambda table: table["greedy"]["outputs"].reverse()),
    "no aliases": edit("decode_16", lambda table: table["greedy"]["aliases"].clear()),
    "an output too many": edit("decode_16", lambda table: table["row"]["outputs"].append(["x", [1], "int32"])),
    "a weight that is missing": weights(lambda tensors: tensors.pop(first_of(tensors, (64, 64)))),
    "a weight of another shape": weights(
        lambda tensors: tensors.update({first_of(tensors, (64, 64)): torch.zeros(64, 65)})
    ),
    "a weight of another dtype": weights(
        lambda tensors: tensors.update({first_of(tensors, (64, 64)): torch.zeros(64, 64, dtype=torch.bfloat16)})
    ),
    "weights that are none": cut("weights.safetensors"),
}
FORGED = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(120, exit=True)  # where a thread waits for ever
import staticgen
prompts, expected = json.loads(sys.argv[2])
try:
    session = staticgen.Session(sys.argv[1], backend="xla", device="cpu")
    found = session.generate(prompts[:1], max_new_tokens=20)[:, 3:].tolist()
    found += session.generate(prompts[1:], max_new_tokens=20)[:, 12:].tolist()
except (staticgen.BundleError, staticgen.CompileError) as error:
    print("refused", type(error).__name__, " ".join(str(error).split())[:800])
else:
    print("right" if found == expected else "wrong", found)
"""


@pytest.mark.parametrize("forgery", list(FORGERIES))
def test_files_that_do_not_belong_together(made, tiny_llama, tmp_path, forgery):
    folder = bundles.copy(made, tmp_path / "forged")
    FORGERIES[forgery](folder)
    bundles.reseal(folder)
    expected = [reference(tiny_llama, prompt, 20) for prompt in PROMPTS]
    said = run(FORGED, folder, json.dumps([PROMPTS, expected]))
    assert said[-1].startswith("refused") or (forgery == "no aliases" and said[-1].startswith("right")), said[-1][:500]
    if said[-1].startswith("refused"):
        assert "decode_" in said[-1] or "prefill_" in said[-1] or "function" in said[-1]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler: the extra tpu-aot")
def test_a_bundle_for_several_chips_holds_their_compilers_account(tiny_llama, tmp_path, capsys):
    folder = tmp_path / "bundle"
    bundles.compile_tiny(folder, tiny_llama, profile="tpu-v5e-4")
    target = json.loads((folder / "manifest.json").read_bytes())["target"]
    assert target["compile_options"]["mesh"] == "4"
    decode = {f"decode_{length}.{name}" for length in (16, 32) for name in ("step", "greedy", "sampled")}
    functions = {"prefill_8_32.step", *decode}
    assert set(target["compiled"]) == functions
    for name, found in target["compiled"].items():
        assert (found["target"], found["chips"], found["fits"]) == ("tpu-v5e-4", 4, True)
        assert found["bytes_accessed"] > found["weights"] > 0 and found["flops"] > 0
        # The loop keeps the cache where it is; a step reads it.
        assert (found["aliased"] >= found["cache"] > 0) == (not name.endswith("step"))
    with pytest.raises(
        BackendUnavailableError, match=r"mesh='4', but backend 'xla' runs on one chip; .* for backend='jax'"
    ):
        Session(folder, **ON_CPU)
    session = Session(folder, **ON_CPU, backend_options={"mesh": "1"})
    assert new_tokens(session.generate(PROMPTS, max_new_tokens=9), 12) == [
        reference(tiny_llama, prompt, 9) for prompt in PROMPTS
    ]
    with pytest.raises(SystemExit) as ended:
        cli.app(["inspect", str(folder)])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert all(name in out for name in functions)
