"""The TPU's own compiler, run without a TPU. That it compiles, and what it counts, is all this shows."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from device_programs import Decoder
from staticgen.compile import tpu
from staticgen.compile.tpu import account, account_all

from staticgen.errors import BackendUnavailableError, CompileError
from staticgen.functions import Function, Lowered, TensorSpec
from staticgen.jax_engine import JaxEngine
from staticgen.profiles import Figure, Topology, load_profile

MISSING = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
needs_libtpu = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} missing: the extra tpu-aot")
# Sizes that a TPU does not pad much, and that divide by 16.
BIG = Decoder(
    layers=1, heads=32, kv_heads=16, head_dim=128, hidden=512, intermediate=2048, vocabulary=4096, slots=512,
    dtype=torch.bfloat16,
)  # fmt: skip


@pytest.fixture(scope="module")
def big():
    return BIG.lowered()


@pytest.fixture(scope="module")
def small():
    return Decoder().lowered()


@pytest.fixture(scope="module")
def weights():
    return sum(tensor.nbytes for tensor in BIG.weights().values())


CACHE = 2 * 1 * 16 * 512 * 128 * 2  # keys and values, layers, heads, slots, numbers of a head, bytes of a number


@needs_libtpu
@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"])
def test_a_step_for_one_chip(big, weights, name):
    found = account(big, name)
    assert (found.target, found.chips, found.weights, found.cache) == (name, 1, weights, CACHE)
    assert "libtpu" in found.compiler and found.seconds > 0
    assert weights + CACHE <= found.arguments <= 1.1 * (weights + CACHE)
    assert found.aliased >= CACHE, "the cache is not updated in place"
    assert found.temporary < 0.1 * weights
    assert found.memory == found.arguments + found.outputs + found.temporary + found.code
    assert found.fits
    # Every weight but the embeddings is read, which are a lookup, and both caches.
    embeddings = 4096 * 512 * 2
    assert weights + CACHE - embeddings <= found.bytes_accessed <= 1.25 * (weights + CACHE)
    least = 2 * (weights - embeddings) / 2  # a multiplication and an addition for each number of two bytes
    assert least <= found.flops <= 4 * least  # it counts conversions too
    assert found.to_dict() == {
        **{name: getattr(found, name) for name in found.__dataclass_fields__},
        "memory": found.memory,
        "fits": True,
    }


@needs_libtpu
@pytest.mark.parametrize(("name", "chips"), [("tpu-v5e-4", 4), ("tpu-v5e-16", 16)])
def test_a_step_divided_over_chips(big, weights, name, chips):
    found = account(big, name)
    assert found.chips == chips
    assert (found.weights, found.cache) == (weights // chips, CACHE // chips)  # all of them divide
    assert (weights + CACHE) / chips <= found.arguments <= 1.2 * (weights + CACHE) / chips
    assert found.aliased >= CACHE // chips
    embeddings = 4096 * 512 * 2
    assert (weights + CACHE - embeddings) / chips <= found.bytes_accessed <= 1.5 * (weights + CACHE) / chips


@needs_libtpu
def test_several_programs_in_one_process(big, small, weights, tmp_path):
    kept = tmp_path / "decode_24.executable"
    found = account_all({"decode_512": big, "decode_24": small}, "tpu-v5e", {"decode_24": kept})
    assert kept.stat().st_size > 10_000
    with pytest.raises(CompileError, match=r"compiled for something else than cpu:0, .*compile it here"):
        JaxEngine("cpu").load_compiled(small.function, kept.read_bytes())
    assert list(found) == ["decode_512", "decode_24"]
    assert found["decode_512"].weights == weights
    assert found["decode_24"].weights == sum(tensor.nbytes for tensor in Decoder().weights().values())
    assert found["decode_24"].memory < found["decode_512"].memory


@needs_libtpu
def test_two_processes_compile_at_once(small):
    """A TPU is one process's at a time, its compiler is not."""
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda name: account(small, name), ["tpu-v5e", "tpu-v5e"])
    assert replace(first, seconds=0) == replace(second, seconds=0)


@needs_libtpu
def test_what_does_not_fit_the_profile(small):
    profile = replace(load_profile("tpu-v5e"), memory=Figure(100e3, "a smaller chip"))
    found = account(small, profile)
    assert found.fits is False and found.memory > found.capacity == 100e3
    assert replace(found, capacity=None).fits is None


@needs_libtpu
def test_what_the_chip_has_no_room_for_is_refused(small):
    import jax
    import jax.export

    shape = (8, 1 << 29)  # 16 GiB
    exported = jax.export.export(jax.jit(lambda x: x + 1), platforms=["cpu"])(jax.ShapeDtypeStruct(shape, "float32"))
    spec = {"x": TensorSpec(shape, torch.float32)}
    lowered = Lowered(Function("add", spec, spec, {"x": "x"}), exported.mlir_module_serialized)
    with pytest.raises(CompileError, match=r"refused program 'large', function 'add' for tpu-v5e: .*HBM"):
        account_all({"small": small, "large": lowered}, "tpu-v5e")
    assert account(lowered, "tpu-v5p").fits  # which has more


@needs_libtpu
def test_a_program_that_is_none_is_refused(small):
    with pytest.raises(CompileError, match=r"refused function 'greedy' for tpu-v5e: \S+"):
        account(Lowered(small.function, small.stablehlo[:-50]), "tpu-v5e")


@needs_libtpu
def test_options_are_the_compilers(small):
    with pytest.raises(CompileError, match="no_such_option"):
        account(small, replace(load_profile("tpu-v5e"), compile_options={"no_such_option": "1"}))


@needs_libtpu
def test_a_compiler_that_dies_takes_nobody_along(small):
    """This check of the compiler ends its process."""
    profile = replace(load_profile("tpu-v5p"), compile_options={"xla_tpu_sliced_prefetch_max_slices": "2"})
    with pytest.raises(CompileError, match=r"gave up on function 'greedy' for tpu-v5p: .*Check failed"):
        account(small, profile)


@needs_libtpu
def test_a_topology_that_there_is_not(small):
    profile = replace(load_profile("tpu-v5e"), tpu=Topology("v5e:1x1"))
    with pytest.raises(BackendUnavailableError, match=r"libtpu does not start for topology 'v5e:1x1': .*not divisible"):
        account(small, profile)


def test_a_profile_of_something_else():
    lowered = Lowered(Function("none", {}, {}), b"")
    with pytest.raises(ValueError, match="profile 'generic-cpu' is no TPU's; expected one with an entry tpu"):
        account(lowered, "generic-cpu")


@pytest.mark.parametrize("missing", ["jax", "libtpu"])
def test_a_missing_package_is_said(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None if name == missing else find("json"))
    with pytest.raises(BackendUnavailableError, match=rf"needs {missing}, .* pip install 'staticgen\[tpu-aot\]'"):
        account(Lowered(Function("none", {}, {}), b""), "tpu-v5e")
