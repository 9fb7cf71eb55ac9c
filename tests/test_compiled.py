"""Bundles give what the model gives, without it; and however a compile ends, there is a whole bundle or none."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bundles
import models
import pytest
import texts
import torch
from models import left_padded, random_prompt, reference

import staticgen
from staticgen import BundleError
from staticgen.certificate import compare, load_golden, stand_in_arguments
from staticgen.compiled import CompiledModel, open_compiled

KILLS = int(os.environ.get("STATICGEN_KILLS", "8"))
TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}


def qwen3_moe():
    from families import FAMILIES

    return next(family for family in FAMILIES if family.name == "Qwen3-MoE").build()


BUILD = {
    "llama": models.llama,
    "llama-bfloat16": lambda: models.llama().to(torch.bfloat16),
    "llama-float16": lambda: models.llama().to(torch.float16),
    "gpt2": lambda: models.gpt2(n_positions=32),
    "gemma3": lambda: models.gemma3(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
    "qwen3-moe": qwen3_moe,
}
# How each target runs a bundle here, and what a session of the model itself, which is compared with it, runs on.
NPU = {"backend": "npu", "backend_options": {"NPUW_DEVICES": "CPU"}}
RUNS = {
    "generic-cpu": ({"backend": "openvino"}, {"backend": "openvino"}),
    "intel-npu": (NPU, NPU),
    "generic-cpu-inductor": ({"backend": "inductor"}, {"backend": "eager"}),  # compiling takes it ten times as long
}
CASES = [
    *((name, "generic-cpu") for name in BUILD),
    *((name, "intel-npu") for name in ("llama", "gemma3")),
    *((name, "generic-cpu-inductor") for name in ("llama", "gpt2", "gemma3")),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def trio(request, tmp_path_factory):
    """A model, a session of its bundle and one of itself, and arguments of more of them."""
    name, profile = request.param
    model = BUILD[name]()
    folder = tmp_path_factory.mktemp(name) / "bundle"
    made = bundles.compile_tiny(folder, model, profile=profile)
    sizes = {"max_length": 32, "batch_size": 2, "prefill_buckets": [8], "cache_sizes": [16]}
    options = stand_in_arguments(made) if profile == "intel-npu" else {}
    its, own = RUNS[profile][0], {**sizes, **RUNS[profile][1]}
    return model, staticgen.load(folder, **options), staticgen.Session(model, **own), (its, own)


@pytest.fixture(scope="module")
def small():
    return models.llama(num_hidden_layers=1)


def test_a_bundle_gives_the_tokens_of_transformers(trio):
    model, session, live, _ = trio
    for length in (1, 5, 8, 13):
        prompt = random_prompt(length)
        found = session.generate([prompt], max_new_tokens=12)
        assert torch.equal(found, live.generate([prompt], max_new_tokens=12))
        if model.dtype != torch.bfloat16:  # eight bits of a number: rounded in another order, they give other tokens
            assert found[0, length:].tolist() == reference(model, prompt, 12)


def test_a_bundle_gives_what_a_session_of_the_model_gives(trio):
    _, session, live, _ = trio
    ids, mask = left_padded([random_prompt(3), random_prompt(9)])
    calls = [
        {"max_new_tokens": 9},
        {"max_new_tokens": 9, "do_sample": True, "temperature": 1.3, "top_k": 20, "seed": 5},
        {"max_new_tokens": 9, "repetition_penalty": 1.4},
    ]
    for arguments in calls:
        expected = live.generate(ids, mask, **arguments)
        assert torch.equal(session.generate(ids, mask, **arguments), expected), arguments
        streamed = torch.stack(list(session.stream(ids, mask, **arguments)), dim=1)
        assert torch.equal(streamed, expected[:, ids.shape[1] :]), arguments
    beams = {"max_new_tokens": 6, "num_beams": 2}
    assert torch.equal(session.generate(ids, mask, **beams), live.generate(ids, mask, **beams))
    many = [random_prompt(length) for length in (4, 7, 2)]
    for mine, its in zip(
        session.generate_many(many, max_new_tokens=5), live.generate_many(many, max_new_tokens=5), strict=True
    ):
        assert torch.equal(mine, its)
    prompt = random_prompt(11)
    for one in (session, live):
        whole = one.generate([prompt], max_new_tokens=6)
        assert torch.equal(one.generate([prompt], prefix=session.prefix(prompt[:5]), max_new_tokens=6), whole)
    assert torch.equal(session.generate([prompt], prefix=live.prefix(prompt[:5]), max_new_tokens=6), whole)


def test_what_a_model_cannot_a_bundle_cannot(trio):
    """Longer than the cache: the same tokens, or the same words."""
    _, session, live, _ = trio
    ids = [random_prompt(6)]

    def outcome(one, **arguments):
        try:
            return one.generate(ids, **arguments).tolist()
        except ValueError as error:
            return str(error)

    for arguments in ({"max_new_tokens": 40}, {"max_new_tokens": 40, "overflow": "slide"}, {"max_length": 64}):
        assert outcome(session, **arguments) == outcome(live, **arguments), arguments


def test_sink_and_shift(trio):
    """Other layouts run the same programs."""
    model, session, _, (its, own) = trio
    folder, ids = session._source.model.bundle.folder, [random_prompt(6)]

    def outcome(given, layout, arguments):
        try:
            return (
                staticgen.Session(given, layout=layout, **arguments)
                .generate(ids, max_new_tokens=40, overflow="sink" if layout == "sink" else "slide")
                .tolist()
            )
        except ValueError as error:
            return str(error)

    for layout in ("shift", "sink"):
        assert outcome(folder, layout, its) == outcome(model, layout, own), layout
    with pytest.raises(BundleError, match=r"no program for .*compile another bundle"):
        staticgen.Session(folder, layout="none", **its)


def test_weights_are_written_once(trio):
    model, session, _, _ = trio
    bundle = session._source.model.bundle
    (weights,) = {entry["files"]["weights"] for entry in bundle.manifest["programs"]}
    assert [name for name in bundle.manifest["files"] if name.startswith("weights.") or name.endswith(".bin")] == [
        weights
    ]
    if session.backend.name == "inductor":  # OpenVINO's are besides what follows from them and the sizes
        assert bundle.manifest["files"][weights]["bytes"] < 1.1 * sum(tensor.nbytes for tensor in model.parameters())
    assert len(bundle.manifest["programs"]) > 1


@pytest.mark.parametrize("profile", ["generic-cpu", "generic-cpu-inductor"])
def test_the_layout_that_recomputes_has_bundles_too(small, tmp_path, profile):
    made = bundles.compile_tiny(tmp_path / "bundle", small, layout="none", profile=profile)
    assert {shape.cache_length for shape in made.programs} == {1}
    session, prompt = staticgen.load(tmp_path / "bundle"), random_prompt(7)
    assert session.layout == "none"
    assert session.generate([prompt], max_new_tokens=20)[0, 7:].tolist() == reference(small, prompt, 20)


@pytest.mark.parametrize("max_length", [2, 4, 9])
def test_short_bundles(small, tmp_path, max_length):
    bundles.compile_tiny(tmp_path / "bundle", small, max_length=max_length, prefill_buckets=[2], cache_sizes=[2])
    found = staticgen.generate(tmp_path / "bundle", [[5]], max_new_tokens=max_length - 1)
    assert found[0, 1:].tolist() == reference(small, [5], max_length - 1)


def test_half_precision_weights(small, tmp_path):
    made = bundles.compile_tiny(tmp_path / "bundle", small, weights="float16")
    whole = bundles.compile_tiny(tmp_path / "whole", small)
    size, full = ((one.bundle.folder / "weights.bin").stat().st_size for one in (made, whole))
    assert size < 0.6 * full
    assert made.bundle.manifest["weights"] == "float16"


def test_a_compile_that_computes_something_else_leaves_nothing(small, tmp_path, monkeypatch):
    import staticgen.compile.bundles as compiler

    def other(model, prompts, steps):
        return compiler_reference(models.llama(seed=1), prompts, steps)

    compiler_reference = compiler.ask_reference
    monkeypatch.setattr(compiler, "ask_reference", other)
    with pytest.raises(staticgen.CompileError, match="does not compute what the model does"):
        bundles.compile_tiny(tmp_path / "bundle", small)
    assert not list(tmp_path.iterdir())


def test_numbers_that_are_none_are_seen(small, tmp_path):
    """A comparison with NaN is no agreement."""
    made = bundles.compile_tiny(tmp_path / "bundle", small)
    golden = load_golden(made.bundle)
    session = staticgen.load(tmp_path / "bundle")
    for one in compare(session, golden, 128):
        assert one.kl < 1e-6 and one.diverges_at is None
    golden[0].logits[2, 3] = float("nan")
    assert not compare(session, golden, 128)[0].kl < 1e-6


@pytest.mark.parametrize("profile", ["generic-cpu", "generic-cpu-inductor"])
def test_nothing_of_this_machine_is_in_a_bundle(tmp_path, profile):
    """A model and a tokenizer that were read from a folder: its path is nobody's business."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    secret = tmp_path / "a-secret-place"
    models.llama(vocab_size=259, num_hidden_layers=1).save_pretrained(secret)
    texts.byte_level().save_pretrained(secret)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(secret).eval(), AutoTokenizer.from_pretrained(secret)
    made = bundles.compile_tiny(tmp_path / "bundle", model, tokenizer=tokenizer, profile=profile)
    places = [tmp_path, Path.home(), Path(torch.__file__).parent, tempfile.gettempdir()]
    for name in bundles.names(made.bundle.folder):
        content = (made.bundle.folder / name).read_bytes()
        assert not [place for place in places if f"{place}{os.sep}".encode() in content], name


@pytest.mark.parametrize("kind", ["byte-level with added tokens", "byte fallback", "metaspace"])
def test_the_tokenizer_of_a_bundle_is_the_models(tmp_path, kind):
    tokenizer = texts.TOKENIZERS[kind]()
    made = bundles.compile_tiny(
        tmp_path / "bundle", models.llama(vocab_size=400, num_hidden_layers=1), tokenizer=tokenizer
    )
    found = made.tokenizer
    for text in ("the brown fox jumps", " é 世 \n", ""):
        ids = tokenizer(text).input_ids
        assert found(text).input_ids == ids and found.decode(ids) == tokenizer.decode(ids)
    assert (found.eos_token_id, found.chat_template) == (tokenizer.eos_token_id, tokenizer.chat_template)
    said = staticgen.completion(tmp_path / "bundle", max_tokens=4)("the fox")
    assert said == staticgen.completion(
        models.llama(vocab_size=400, num_hidden_layers=1), tokenizer, max_length=32, max_tokens=4
    )("the fox")


# No class of a model can be imported, nor what makes bundles, and nothing can be unpickled.
_WITHOUT = """
import importlib.abc, pickle, sys
import torch

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        last = name.rpartition(".")[2]
        model = name.startswith("transformers.models.") and last.startswith("modeling_") and last != "modeling_auto"
        if model or name in ("transformers.modeling_utils", "staticgen.step", "staticgen.compile"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Finder())

def refuse(*_, **__):
    raise AssertionError("something is unpickled")

torch.load = pickle.load = pickle.loads = refuse
import staticgen

folder = sys.argv[1]
session = staticgen.load(folder)
print(session.generate([[5, 6, 7]], max_new_tokens=6)[0, 3:].tolist())
print([int(token) for token in staticgen.stream(folder, [[5, 6, 7]], max_new_tokens=6)])
print(staticgen.generate(folder, [[5, 6, 7]], max_new_tokens=6)[0, 3:].tolist())
print(repr(staticgen.completion(folder, max_tokens=6)("hé")))
print(session.stats.loads, session.stats.compile_seconds)
assert not [name for name in sys.modules if "modeling_utils" in name or "modeling_llama" in name]
"""


@pytest.mark.parametrize("profile", ["generic-cpu", "generic-cpu-inductor"])
def test_a_bundle_runs_where_no_model_can_be_imported(tmp_path, profile):
    model = models.llama(vocab_size=259, num_hidden_layers=1, eos_token_id=2)
    bundles.compile_tiny(tmp_path / "bundle", batch_size=1, profile=profile)
    process = _run(_WITHOUT, tmp_path / "bundle")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    tokens = reference(model, [5, 6, 7], 6)
    said = staticgen.completion(model, texts.byte_level(), max_length=32, max_tokens=6)("hé")
    assert out.splitlines() == [*[str(tokens)] * 3, repr(said), "3 0.0"]


_RACE = """
import os, sys
import torch
torch.set_num_threads(1)
import bundles

def begin():
    if child := os.fork():
        return child
    try:
        bundles.compile_tiny(sys.argv[1])
    except FileExistsError as error:
        assert "exists already" in str(error)
        os._exit(3)
    os._exit(0)

print(sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in [begin(), begin()]))
"""

# A child is forked for each compile, because importing takes longer than compiling.
_KILL = """
import os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import bundles, staticgen
from staticgen.bundle import read_bundle

root, kills = Path(sys.argv[1]), int(sys.argv[2])

def begin(name):
    if child := os.fork():
        return child
    bundles.compile_tiny(root / name)
    os._exit(0)

start = time.monotonic()
assert os.waitpid(begin("measured"), 0)[1] == 0
whole, killed = time.monotonic() - start, 0
for kill in range(kills):
    child = begin("bundle")
    time.sleep(whole * kill / kills)
    os.kill(child, signal.SIGKILL)
    killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    if (root / "bundle").exists():  # it was faster than the one that was measured
        read_bundle(root / "bundle")
        (root / "bundle").rename(root / f"whole {kill}")
        continue
    try:
        staticgen.load(root / "bundle")
    except FileNotFoundError as error:
        assert "staticgen compile" in str(error)
    else:
        raise AssertionError("there is no bundle, and it was loaded")
print(killed, len(list(root.glob(".bundle.*.tmp"))))
"""


def _run(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_compile_that_is_killed_leaves_nothing_that_loads(tmp_path):
    """At moments spread over the whole run; what is left stops no later compile."""
    process = _run(_KILL, tmp_path, KILLS)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    killed, left = map(int, out.split())
    assert killed > KILLS / 2 and left  # some had begun to write
    bundles.compile_tiny(tmp_path / "bundle")
    assert staticgen.load(tmp_path / "bundle").generate([[5, 6]], max_new_tokens=2).shape == (1, 4)


def test_of_two_compiles_to_one_folder_one_wins(tmp_path):
    out, err = _run(_RACE, tmp_path / "bundle").communicate(timeout=600)
    assert out == "[0, 3]\n", err[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert staticgen.load(tmp_path / "bundle").generate([[5, 6]], max_new_tokens=2).shape == (1, 4)


OLD = TESTS / "data" / "bundle-v1"


def test_a_bundle_of_the_first_version_still_runs():
    """Made by ``python tests/test_compiled.py`` with staticgen 0.1.0; it gives the tokens that it holds itself."""
    model = open_compiled(OLD)
    assert isinstance(model, CompiledModel) and model.bundle.manifest["version"] == 1
    golden = load_golden(model.bundle)
    session = staticgen.load(OLD)
    for one in golden:
        found = session.generate(one.prompt[None], max_new_tokens=len(one.tokens), eos_token_id=[])
        assert found[0, len(one.prompt) :].tolist() == one.tokens.tolist()
    assert all(result.kl < 1e-3 for result in compare(session, golden, model.step.vocab_size))
    assert sum(path.stat().st_size for path in OLD.rglob("*")) < 400_000
    assert staticgen.completion(OLD, max_tokens=3)("x") is not None


if __name__ == "__main__":
    from staticgen.compile.bundles import compile_bundle

    small = models.llama(vocab_size=259, num_hidden_layers=1, hidden_size=32, intermediate_size=32, eos_token_id=2)
    compile_bundle(small, OLD, tokenizer=texts.byte_level(), max_length=32, prefill_buckets=[8])
