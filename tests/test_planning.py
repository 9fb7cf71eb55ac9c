import json
import math

import models
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from staticgen import Session, UnknownNameError
from staticgen.cache import KVBuffers
from staticgen.planning import measured, plan, with_figures
from staticgen.profiles import load_profile, parse_profile
from staticgen.shapes import StepForm, StepShape
from staticgen.step import Step

TARGET = {
    "description": "a test",
    "backend": "xla",
    "device": "TPU",
    "dtypes": ["float32", "bfloat16"],
    "layout": "ring",
    "attention": "split",
    "transposed_keys": False,
    "prefill_buckets": [8, 32],
    "cache_sizes": [16],
    "compile_options": {},
    "memory": {"value": 1e12, "source": "a book"},
    "bandwidth": {"value": 1e9, "source": "a book"},
    "peak": {"float32": {"value": 1e12, "source": "a book"}},
}
MODELS = {
    "llama": models.llama,
    "tied": lambda: models.llama(tie_word_embeddings=True),
    "gpt2": models.gpt2,
    "gemma3": models.gemma3,
    "mixtral": models.mixtral,
}


def target(**changes):
    table = {**TARGET, **changes}
    return parse_profile("test", {key: value for key, value in table.items() if value is not None})


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Folders with a config each, and no weights."""
    root = tmp_path_factory.mktemp("configs")
    for name, make in MODELS.items():
        make().config.save_pretrained(root / name)
    return root


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_model_and_its_cache(configs, name):
    model = MODELS[name]()
    step = Step(model, StepForm())
    found = plan(configs / name, target(), max_length=40, batch_size=3)
    assert found.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert found.weights_bytes == sum(tensor.nbytes for tensor in model.parameters())
    lengths = sorted({program.cache_length for program in found.programs})
    buffers = [KVBuffers(step.cache_spec, 3, length, windowed=True) for length in lengths]
    assert found.cache_bytes == sum(held.nbytes for held in buffers)
    assert found.total_bytes == found.weights_bytes + found.cache_bytes + sum(each.nbytes for each in found.programs)
    assert plan(configs / name, target(), max_length=40, dtype="bfloat16").weights_bytes == found.weights_bytes // 2


@pytest.mark.parametrize("name", MODELS)
def test_programs_are_those_of_a_session(configs, name):
    profile = load_profile("generic-cpu")
    session = Session(MODELS[name](), max_length=200, backend="openvino", cache_sizes=[64])
    found = plan(configs / name, parse_profile("x", {**profile.to_dict(), "cache_sizes": [64]}), max_length=200)
    assert len(found.programs) == session.stats.compiles
    kinds = [(program.kind, program.tokens) for program in found.programs]
    assert kinds[:2] == [("prefill", 16), ("prefill", 128)]
    assert {kind for kind in kinds[2:]} == {("decode", 1)}
    assert found.loaded_model_bytes == found.weights_bytes
    assert all(program.nbytes > found.weights_bytes for program in found.programs)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 32), (3, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_torch_counts(configs, name, batch, tokens):
    """What torch counts besides are a router's products and the angles of rotary embeddings."""
    step = Step(MODELS[name](), StepForm())
    if name == "mixtral":
        step.model.set_experts_implementation("batched_mm")
    found = plan(configs / name, target(), max_length=40, batch_size=batch)
    program = next(each for each in found.programs if each.tokens == tokens and each.cache_length in (40, 8))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        step(*step.example_inputs(StepShape(batch, tokens, 40)))
    assert program.flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_step_reads_the_weights_and_all_slots_but_not_the_embeddings(configs):
    model = models.llama()
    found = plan(configs / "llama", target(), max_length=40, batch_size=2)
    read = sum(tensor.nbytes for tensor in model.parameters()) - model.get_input_embeddings().weight.nbytes
    for program in found.programs:
        cache = 2 * 2 * 2 * 2 * 16 * 4 * program.cache_length  # rows, layers, keys and values, heads, size, bytes
        assert program.read_bytes == read + cache
    tied = plan(configs / "tied", target(), max_length=40)
    assert tied.programs[0].read_bytes == tied.weights_bytes + tied.cache_bytes * 40 // 56


def test_a_step_takes_as_long_as_the_slower_of_reading_and_computing(configs):
    for bandwidth, peak in ((1e9, 1e12), (1e12, 1e9), (2e6, 3e6)):
        profile = with_figures(target(), bandwidth=bandwidth, peak=peak)
        for program in plan(configs / "llama", profile, max_length=40).programs:
            reading, computing = program.read_bytes / bandwidth, program.flops / peak
            assert program.seconds == max(reading, computing)
            assert program.bound == ("memory" if reading >= computing else "compute")
    bounds = {each.bound for each in plan(configs / "llama", with_figures(target(), peak=2e9), max_length=40).programs}
    assert bounds == {"memory", "compute"}


def test_chips_that_share_a_program_share_the_work(configs):
    one = plan(configs / "llama", target(), max_length=40)
    four = plan(configs / "llama", target(tpu={"topology": "v5e:2x2", "mesh": 4}), max_length=40)
    assert (four.total_bytes, four.memory) == (one.total_bytes, 4 * one.memory)
    for each, alone in zip(four.programs, one.programs, strict=True):
        assert (each.read_bytes, each.flops) == (alone.read_bytes, alone.flops)
        assert each.seconds == pytest.approx(alone.seconds / 4)
    assert any(note.startswith("4 chips share memory") for note in four.notes)
    assert not any("chips" in note for note in one.notes)


def test_without_figures_nothing_is_predicted(configs):
    found = plan(configs / "llama", target(memory=None, bandwidth=None, peak=None))
    assert {(program.seconds, program.bound) for program in found.programs} == {(None, None)}
    assert (found.memory, found.fits, found.largest_max_length, found.largest_batch_size) == (None,) * 4
    assert sum("has no" in note for note in found.notes) == 2
    no_peak = plan(configs / "llama", target(), dtype="bfloat16")
    assert {program.bound for program in no_peak.programs} == {"memory"}
    assert any("no peak for bfloat16" in note for note in no_peak.notes)


def test_the_boundary_of_what_fits(configs):
    total = plan(configs / "llama", target(), max_length=60, batch_size=2).total_bytes
    exact = plan(configs / "llama", with_figures(target(), memory=total), max_length=60, batch_size=2)
    assert (exact.fits, exact.largest_max_length, exact.largest_batch_size) == (True, 60, 2)
    short = plan(configs / "llama", with_figures(target(), memory=total - 1), max_length=60, batch_size=2)
    assert (short.fits, short.largest_max_length, short.largest_batch_size) == (False, 59, 1)
    none = plan(configs / "llama", with_figures(target(), memory=1000))
    assert (none.fits, none.largest_max_length, none.largest_batch_size) == (False, 0, 0)


def test_without_a_max_length_it_is_512_as_far_as_model_and_profile_allow(configs):
    assert plan(configs / "llama", target()).max_length == 512
    assert plan(configs / "gpt2", target()).max_length == 257
    assert plan(configs / "gpt2", target(limits={"max_length": 99})).max_length == 99


def test_what_fits_ends_where_the_positions_or_the_limits_do(configs):
    assert plan(configs / "gpt2", target(), max_length=8).largest_max_length == 257  # the last token is never fed
    assert plan(configs / "llama", target(), max_length=8).largest_max_length == 256  # trained on so many
    assert plan(configs / "llama", target(), max_length=300).largest_max_length == 300
    limited = target(limits={"batch_size": 3, "max_length": 100})
    found = plan(configs / "llama", limited, max_length=8)
    assert (found.largest_max_length, found.largest_batch_size) == (100, 3)


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4)])
def test_compressed_weights(configs, weights, bits):
    model = models.llama()
    expected = 0
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1:
            expected += tensor.nbytes
        else:
            of_one = 8 if "embed" in name or "lm_head" in name else bits
            expected += tensor.numel() * of_one // 8 + 2 * tensor.shape[0]
    found = plan(configs / "llama", target(), weights=weights)
    assert found.weights_bytes == expected
    assert any("a scale of two bytes" in note for note in found.notes)
    assert found.cache_bytes == plan(configs / "llama", target()).cache_bytes


def test_a_token_meets_its_experts_only(configs):
    model = models.mixtral()  # 2 of 4 experts
    experts = sum(tensor.nbytes for name, tensor in model.named_parameters() if ".experts." in name)
    found = {batch: plan(configs / "mixtral", target(), max_length=40, batch_size=batch) for batch in (1, 2, 3)}
    assert found[1].active_parameters == found[1].parameters - experts // 4 // 2
    read = {
        batch: one.programs[-1].read_bytes - one.cache_bytes * 40 * batch // (56 * batch)
        for batch, one in found.items()
    }
    assert read[2] - read[1] == experts // 2
    assert read[3] == read[2]
    assert any("2 of 4 experts" in note for note in found[1].notes)


def test_each_program_of_openvino_has_the_weights(configs):
    shared, own = target(), target(backend="openvino", device="GPU")
    one, other = (plan(configs / "llama", profile, max_length=40) for profile in (shared, own))
    copies = len(one.programs)
    assert other.total_bytes - one.total_bytes == (copies - 1) * one.weights_bytes
    head = models.llama().lm_head.weight.nbytes
    one, other = (plan(configs / "tied", profile, max_length=40) for profile in (shared, own))
    assert other.total_bytes - one.total_bytes == (copies - 1) * one.weights_bytes + copies * head


def test_a_program_that_is_fed_has_no_embedding(configs):
    fed, own = (target(backend="npu", device="NPU", fed=value) for value in (True, False))
    for name, made in (("llama", models.llama()), ("tied", models.llama(tie_word_embeddings=True))):
        one, other = (plan(configs / name, profile, max_length=40) for profile in (fed, own))
        copies, embedding = len(one.programs), made.get_input_embeddings().weight.nbytes
        assert other.total_bytes - one.total_bytes == copies * embedding


def test_buckets_are_proposed_for_the_prompts(configs):
    lengths = {20: 9, 45: 9, 90: 1}
    found = plan(configs / "llama", target(), max_length=100, prompt_lengths=lengths, buckets=3)
    assert found.own_buckets.buckets == (8, 32)
    assert found.proposed_buckets.waste < found.own_buckets.waste
    assert len(found.proposed_buckets.buckets) <= 3
    assert len(plan(configs / "llama", target(), max_length=100, prompt_lengths=lengths).proposed_buckets.buckets) == 2
    alone = plan(configs / "llama", target(), max_length=100)
    assert alone.proposed_buckets is None
    assert (alone.own_buckets.prompts, alone.own_buckets.prompt_tokens) == (99, sum(range(1, 100)))


def test_a_plan_is_json(configs):
    found = plan(configs / "llama", target(), max_length=60, prompt_lengths={20: 9})
    table = json.loads(json.dumps(found.to_dict()))
    assert table["total_bytes"] == found.total_bytes
    assert table["programs"][-1]["seconds"] == found.programs[-1].seconds
    assert math.isclose(table["own_buckets"]["waste"], found.own_buckets.waste)


@pytest.mark.parametrize("layout", ["shift", "sink"])
def test_other_layouts(configs, layout):
    found = plan(configs / "llama", target(layout=layout), max_length=40)
    lengths = [program.cache_length for program in found.programs if program.kind == "decode"]
    assert lengths == ([16, 40] if layout == "shift" else [40])


@pytest.mark.parametrize(
    ("profile", "arguments", "words"),
    [
        ({}, {"dtype": "float16"}, "dtype is 'float16', but profile 'test' has float32, bfloat16"),
        ({}, {"weights": "int2"}, "weights is 'int2', expected one of none, int8, int4"),
        ({}, {"max_length": 1}, "max_length is 1"),
        ({}, {"batch_size": 0}, "batch_size is 0"),
        ({"limits": {"batch_size": 1}}, {"batch_size": 2}, "batch_size is 2, but profile 'test' allows 1"),
        ({"limits": {"max_length": 99}}, {"max_length": 100}, "max_length is 100, but profile 'test' allows 99"),
        ({"layout": "none"}, {}, "layout 'none', which keeps no cache"),
        ({}, {"buckets": 2}, "buckets is given without prompt_lengths"),
        ({}, {"buckets": 0, "prompt_lengths": {3: 1}}, "buckets is 0"),
        ({}, {"prompt_lengths": {}}, "prompt_lengths is empty"),
        ({}, {"prompt_lengths": {0: 1}}, "a length which is 0, expected a whole number of at least 1"),
        ({}, {"prompt_lengths": {3: 0.5}}, r"prompt_lengths\[3\] is 0.5, expected a whole number"),
        ({}, {"prompt_lengths": {40: 1}, "max_length": 40}, "prompt of 40 tokens.*max_length=41"),
        ({}, {"max_length": 258}, "model_type 'gpt2' has 256 positions; use max_length=257 or less"),
    ],
)
def test_bad_arguments(configs, profile, arguments, words):
    with pytest.raises(ValueError, match=words):
        plan(configs / "gpt2", target(**profile), **{"max_length": 64, **arguments})


def test_an_unknown_profile(configs):
    with pytest.raises(UnknownNameError, match="unknown profile 'tpu'"):
        plan(configs / "llama", "tpu")


@pytest.mark.parametrize("name", ["memory", "bandwidth", "peak"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_figures_that_are_none(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, expected a number above 0"):
        with_figures(target(), **{name: value})


def test_this_machine_is_measured():
    profile = measured(load_profile("generic-cpu"), "bfloat16")
    figures = profile.figures()
    assert {"bandwidth", "peak.bfloat16"} <= set(figures)
    assert {figure.source for figure in figures.values()} == {"measured here"}
    assert profile.form == load_profile("generic-cpu").form
    assert 1e8 < profile.bandwidth.value < 1e13
    with pytest.raises(ValueError, match="is for device 'NPU', and only a CPU is measured"):
        measured(load_profile("intel-npu"))
    with pytest.raises(ValueError, match="dtype is 'float16', but profile 'cpu-amx' has"):
        measured(load_profile("cpu-amx"), "float16")
