import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_programs import Decoder, decode, start

from staticgen.compile_cache import CompileCache
from staticgen.errors import BackendUnavailableError, CompileError
from staticgen.functions import DTYPES, Function, Lowered
from staticgen.jax_engine import JaxEngine, find_devices
from staticgen.jax_programs import divided

try:
    import jax
except ImportError:
    jax = None
needs_jax = pytest.mark.skipif(jax is None, reason="jax is not installed: the extra jax")
TESTS = Path(__file__).parent
STEPS = 16


def run_python(code, **environment):
    """What a program prints in a process of its own, where jax has settings of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def engine():
    return JaxEngine("cpu")


@needs_jax
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (5, 7), (2100, 4096)], ids=str)
def test_a_tensor_goes_there_and_back(engine, dtype, shape):
    torch.manual_seed(1)
    tensor = (torch.randn(shape) * 100).to(DTYPES[dtype])
    back = engine.download(engine.upload(tensor))
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@needs_jax
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_a_buffer_is_nobody_elses_memory(engine, dtype):
    """Not what was uploaded, whatever becomes of it, and not what was downloaded."""
    source = torch.arange(12, dtype=dtype).reshape(3, 4)
    expected = source.t().clone()
    buffer = engine.upload(source.t())
    source.fill_(7)
    first = engine.download(buffer)
    assert torch.equal(first, expected)
    first.fill_(9)
    assert torch.equal(engine.download(buffer), expected)


@needs_jax
def test_a_dtype_that_may_not_cross_is_refused(engine):
    with pytest.raises(ValueError, match=r"dtype is torch.int64, expected one of float32, bfloat16"):
        engine.upload(torch.zeros(2, dtype=torch.int64))


@needs_jax
@pytest.mark.parametrize("fused", [False, True])
def test_steps_give_the_tokens_of_torch(fused):
    engine, decoder = JaxEngine("cpu"), Decoder(fused=fused)
    executable = engine.load(decoder.lowered())
    tokens, logits = decode(engine, executable, start(engine, decoder, 5), STEPS)
    expected, reference = decoder.reference(5, STEPS)
    assert tokens == expected
    assert len(set(tokens)) > 3, "a decoder that says one thing shows nothing"
    for got, wanted in zip(logits, reference, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert engine.compiles == 1


@needs_jax
def test_steps_in_bfloat16(engine):
    decoder = Decoder(dtype=torch.bfloat16)
    logits = decode(engine, engine.load(decoder.lowered()), start(engine, decoder, 5), 1)[1][0]
    torch.testing.assert_close(logits, decoder.reference(5, 1)[1][0], rtol=0.1, atol=0.3)


@needs_jax
def test_the_memory_of_a_donated_input_is_the_outputs(engine):
    decoder = Decoder()
    executable = engine.load(decoder.lowered())
    buffers = start(engine, decoder, 5)
    decode(engine, executable, buffers, 1)  # from here on every buffer is one that jax made
    before = dict(buffers)
    place = before["keys.0"].unsafe_buffer_pointer()
    decode(engine, executable, buffers, 1)
    assert buffers["keys.0"].unsafe_buffer_pointer() == place
    assert before["weights.model.lm_head.weight"] is buffers["weights.model.lm_head.weight"]
    for name in executable.function.aliases.values():
        with pytest.raises(RuntimeError, match="deleted"):
            engine.download(before[name])


@needs_jax
def test_a_program_that_is_none_is_refused(engine):
    lowered = Decoder().lowered()
    with pytest.raises(CompileError, match=r"jax could not compile function 'greedy' for cpu:0: \S+"):
        engine.load(Lowered(lowered.function, lowered.stablehlo[:-100]))


@needs_jax
def test_a_program_of_another_function_is_refused(engine):
    lowered, other = Decoder().lowered(), Decoder(vocabulary=64).function()
    with pytest.raises(CompileError, match="could not compile function 'greedy'"):
        engine.load(Lowered(other, lowered.stablehlo))
    fewer = Function("fewer", dict(list(other.inputs.items())[1:]), other.outputs, other.aliases)
    with pytest.raises(CompileError, match="could not compile function 'fewer'"):
        engine.load(Lowered(fewer, lowered.stablehlo))


@needs_jax
def test_options_are_the_compilers():
    with pytest.raises(CompileError, match="no_such_option"):
        JaxEngine("cpu", {"no_such_option": "1"}).load(Decoder().lowered())
    engine, decoder = JaxEngine("cpu", {"xla_backend_optimization_level": "1"}), Decoder()
    assert decode(engine, engine.load(decoder.lowered()), start(engine, decoder, 5), 4)[0] == decoder.reference(5, 4)[0]


@needs_jax
def test_inputs_of_other_sizes_are_refused(engine):
    decoder = Decoder()
    executable, buffers = engine.load(decoder.lowered()), start(engine, decoder, 5)
    buffers["token_ids"] = engine.upload(torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"int32\[1,2\]"):
        decode(engine, executable, buffers, 1)


@needs_jax
@pytest.mark.parametrize(
    ("device", "count", "error", "words"),
    [
        ("cpu!", 1, ValueError, "device is 'cpu!', expected cpu, gpu or tpu"),
        ("", 1, ValueError, "device is ''"),
        ("cpu", 0, ValueError, "mesh is 0, expected"),
        ("cpu", True, ValueError, "mesh is True, expected"),
        ("cpu:0", 2, ValueError, "name the platform alone, as 'cpu'"),
        ("cpu:7", 1, BackendUnavailableError, "no device 'cpu:7' here, only cpu:0"),
        ("cpu", 64, BackendUnavailableError, "not 64 devices"),
        ("toaster", 1, BackendUnavailableError, "jax finds no device 'toaster' here"),
    ],
)
def test_a_device_that_there_is_not(device, count, error, words):
    with pytest.raises(error, match=words):
        find_devices(device, count)


@needs_jax
def test_a_device_by_name():
    assert find_devices(" CPU ") == find_devices("cpu:0") == jax.devices("cpu")[:1]
    assert find_devices(None) == jax.local_devices()[:1]
    assert JaxEngine("cpu").name == "cpu:0"


@needs_jax
def test_no_tpu_is_said_and_nothing_else_taken():
    code = (
        "from staticgen.jax_engine import JaxEngine; from staticgen.errors import BackendUnavailableError\n"
        "try: JaxEngine('tpu')\n"
        "except BackendUnavailableError as error: print(error)"
    )
    assert run_python(code).startswith("jax finds no device 'tpu' here: ")


def test_jax_that_is_missing_is_said():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from staticgen.jax_engine import JaxEngine; from staticgen.errors import BackendUnavailableError\n"
        "try: JaxEngine()\n"
        "except BackendUnavailableError as error: print(error)"
    )
    assert "install staticgen with the extra jax: pip install 'staticgen[jax]'" in run_python(code)


def test_importing_it_imports_no_jax():
    assert run_python("import sys, staticgen.jax_engine; print('jax' in sys.modules)").strip() == "False"


COMPILED_ELSEWHERE = """
import pathlib, sys
from device_programs import Decoder, decode, start
from staticgen.jax_engine import JaxEngine
from staticgen.jax_programs import lower_program, serialize
engine, decoder, path = JaxEngine("cpu", mesh={mesh}), Decoder(), pathlib.Path({path!r})
if {writes}:
    path.write_bytes(serialize(lower_program(decoder.lowered(), engine.devices).compile()))
else:
    executable = engine.load_compiled(decoder.function(), path.read_bytes())
    print(decode(engine, executable, start(engine, decoder, 5), 12)[0])
"""


@needs_jax
@pytest.mark.parametrize("mesh", [1, 4])
def test_what_was_compiled_elsewhere_runs(tmp_path, mesh):
    path = str(tmp_path / "executable")
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run_python(COMPILED_ELSEWHERE.format(mesh=mesh, path=path, writes=True), **environment)
    tokens = json.loads(run_python(COMPILED_ELSEWHERE.format(mesh=mesh, path=path, writes=False), **environment))
    assert tokens == Decoder().reference(5, 12)[0]


@needs_jax
def test_what_was_compiled_for_something_else_is_refused(engine):
    with pytest.raises(CompileError, match="function 'greedy' was compiled for something else than cpu:0"):
        engine.load_compiled(Decoder().function(), b"nothing")


KEPT = """
import jax, os
from device_programs import Decoder
from staticgen.jax_engine import JaxEngine
jax.jit(lambda x: x + 1)(1)  # jax has made up its mind about its cache
before = dict(jax.config.values)
JaxEngine("cpu").load(Decoder().lowered())
assert dict(jax.config.values) == before
jax.jit(lambda x: x + 2)(1)
print("kept")
"""
# By itself jax keeps what took a second to compile.
EVERYTHING = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@needs_jax
def test_compiled_programs_are_kept_in_the_cache_folder(tmp_path):
    for _ in range(2):  # the second time they are found
        assert run_python(KEPT, STATICGEN_CACHE=str(tmp_path), **EVERYTHING) == "kept\n"
        files = [path.name for path in (tmp_path / "jax").iterdir() if path.name.endswith("-cache")]
        assert len(files) == 1, "only what staticgen compiles, and once"
    cache = CompileCache(tmp_path)
    (entry,) = cache.entries()
    assert (entry.kind, entry.folder) == ("jax", tmp_path / "jax")
    assert entry.nbytes > 1000
    assert [one.kind for one in cache.clean()] == ["jax"] and cache.entries() == []


@needs_jax
def test_nothing_is_kept_where_the_cache_is_off(tmp_path):
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), **EVERYTHING}
    assert run_python(KEPT, STATICGEN_CACHE="off", **environment) == "kept\n"
    assert not list(tmp_path.rglob("*-cache"))


@needs_jax
def test_a_cache_of_the_users_own_stays_in_use(tmp_path):
    own, ours = tmp_path / "own", tmp_path / "ours"
    run_python(KEPT, STATICGEN_CACHE=str(ours), JAX_COMPILATION_CACHE_DIR=str(own), **EVERYTHING)
    assert list(own.rglob("*-cache")) and not ours.exists()


def test_a_library_that_keeps_nothing_has_no_folder(tmp_path):
    with pytest.raises(ValueError, match="library is 'numpy', expected one of jax"):
        CompileCache(tmp_path).library("numpy")
    assert CompileCache(tmp_path).library("jax") == tmp_path / "jax"
    assert CompileCache(tmp_path).entries() == []


AT = "weights.model.model.layers.3."
DIVIDED = [
    (AT + "self_attn.q_proj.weight", (64, 32), 4, 0),
    (AT + "self_attn.q_proj.bias", (64,), 4, 0),
    (AT + "self_attn.k_proj.weight", (6, 32), 4, None),  # does not divide
    (AT + "self_attn.o_proj.weight", (32, 64), 4, 1),
    (AT + "self_attn.o_proj.bias", (32,), 4, None),
    (AT + "self_attn.q_norm.weight", (64,), 4, None),
    (AT + "self_attn.qkv_proj.weight", (96, 32), 4, None),  # fused
    (AT + "mlp.gate_proj.weight", (64, 32), 4, 0),
    (AT + "mlp.up_proj.weight", (64, 32), 2, 0),
    (AT + "mlp.down_proj.weight", (32, 64), 4, 1),
    (AT + "mlp.experts.down_proj", (8, 32, 64), 4, None),
    (AT + "input_layernorm.weight", (32,), 4, None),
    ("weights.model.model.embed_tokens.weight", (96, 32), 4, 0),
    ("weights.model.lm_head.weight", (97, 32), 4, None),
    ("weights.w17", (64, 64), 4, None),
    ("keys.0", (2, 1, 4, 24, 8), 4, 2),
    ("values.0", (2, 1, 2, 24, 8), 4, None),
    ("values.0", (2, 1, 4, 24, 8), 1, None),
    ("new_keys.0", (2, 1, 4, 3, 8), 4, None),
    ("exact.0", (2, 1, 4, 24, 8), 4, 2),
    ("token_ids", (4, 4), 4, None),
]


@pytest.mark.parametrize(("name", "shape", "parts", "expected"), DIVIDED)
def test_by_what_a_tensor_is_divided(name, shape, parts, expected):
    assert divided(name, shape, parts) == expected


MESH = """
import json
from device_programs import Decoder, decode, start
from staticgen.jax_engine import JaxEngine
decoder = Decoder(**{sizes})
engine = JaxEngine("cpu", mesh=4)
assert engine.name == "4 of cpu" and len(engine.devices) == 4
executable = engine.load(decoder.lowered())
buffers = start(engine, decoder, 5)
first = dict(buffers)
tokens, logits = decode(engine, executable, buffers, {steps})
def part(array):
    shapes = {{tuple(one.data.shape) for one in array.addressable_shards}}
    assert len(array.addressable_shards) == 4 and len(shapes) == 1
    return shapes.pop()
print(json.dumps({{
    "tokens": tokens,
    "logits": [one.tolist() for one in logits],
    "parts": {{name: part(array) for name, array in buffers.items()}},
    "deleted": sorted(name for name, array in first.items() if array.is_deleted()),
    "compiles": engine.compiles,
}}))
"""


@needs_jax
@pytest.mark.parametrize(
    "sizes", [{}, {"kv_heads": 2}, {"fused": True}, {"vocabulary": 98, "heads": 6, "kv_heads": 3}], ids=str
)
def test_four_devices_give_what_one_gives(sizes):
    decoder = Decoder(**sizes)
    code = MESH.format(sizes=sizes, steps=STEPS)
    found = json.loads(run_python(code, XLA_FLAGS="--xla_force_host_platform_device_count=4"))
    expected, reference = decoder.reference(5, STEPS)
    assert found["tokens"] == expected
    for got, wanted in zip(found["logits"], reference, strict=True):
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-3, atol=1e-3)
    assert found["compiles"] == 1
    function = decoder.function()
    assert found["deleted"] == sorted(function.aliases.values()), "a donated input was not taken"
    for name, spec in function.inputs.items():
        place = divided(name, spec.shape, 4)
        assert found["parts"][name] == [size // 4 if at == place else size for at, size in enumerate(spec.shape)], name
    assert found["parts"]["weights.model.model.layers.1.mlp.down_proj.weight"] == [32, 16]
    if not sizes:
        assert found["parts"]["keys.0"] == [2, 1, 1, 24, 8]
