"""What torch-xla counts while backend ``xla`` generates, and what XLA makes of the decode loop."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import left_padded, new_tokens, random_prompt, reference
from on_xla import counts, grown, needs_xla

from staticgen import Session

pytestmark = [needs_xla, pytest.mark.usefixtures("one_thread")]

LAYOUTS = {"sink": {"window_length": 24, "num_sink_tokens": 2}, "none": {}, "shift": {}, "ring": {}}


@pytest.fixture(scope="module")
def session(tiny_llama):
    session = Session(
        tiny_llama,
        max_length=64,
        batch_size=3,
        prefill_buckets=[8],
        cache_sizes=[16],
        overflow="error",
        backend="xla",
        device="cpu",
    )
    for layout, options in LAYOUTS.items():  # some have programs or a function of their own
        session.set_cache_implementation(layout, **options)
    return session


def calls(session):
    """Calls of all kinds, until 1,000 tokens have been made."""
    made, seed = 0, 0
    prompts = [random_prompt(12) + random_prompt(length, seed=3) for length in (2, 9)]
    prefix = session.prefix(random_prompt(12))
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    kinds = [
        {},
        sampled,
        {**sampled, "temperature": 1.9, "top_k": 50, "num_return_sequences": 3},
        {"repetition_penalty": 1.2},
        {"logits_processor": [lambda ids, scores: scores * 0.5]},
        {"token_mask": torch.arange(128) % 2 == 0},
        {"num_beams": 3},
        {"eos_token_id": [5, 9, 17]},
    ]
    while made < 1000:
        for layout, options in LAYOUTS.items():
            session.set_cache_implementation(layout, **options)
            for kind in kinds:
                seed += 1
                lengths = [1 + seed * 7 % 33] if len(kind) in (6, 1) else [1 + seed * 5 % 21, 1 + seed * 11 % 29, 4]
                ids, mask = left_padded([random_prompt(length, seed) for length in lengths])
                output = session.generate(ids, mask, max_new_tokens=5 + seed % 17, seed=seed, **kind)
                made += output[:, ids.shape[1] :].numel()
            if layout != "none":
                output = session.generate(prompts, prefix=prefix, max_new_tokens=9)
                made += output[:, 21:].numel()
        session.set_cache_implementation("ring")
        stream = session.stream(prompts, max_new_tokens=30)
        made += sum(len(tokens) for tokens, _ in zip(stream, range(11), strict=False))
        stream.close()
        made += sum(len(text) for text in session.generate_many([random_prompt(n) for n in range(1, 9)], max_length=30))
    return made


def test_nothing_is_traced_or_compiled_after_warm_up(tiny_llama, session):
    """And nothing is left to the CPU, or run on the device but the functions."""
    before, compiled = counts(), (session.stats.compiles, session.backend.engine.compiles)
    assert before["CompileTime"] == before["UncachedCompile"] >= 19
    executions, functions = [], session.backend.function
    session.backend.function = lambda shape, name: executions.append(name) or functions(shape, name)
    try:
        assert calls(session) >= 1000
    finally:
        del session.backend.function
    found = grown(before)
    assert not {"CompileTime", "UncachedCompile", "CachedCompile", "MarkStep", "TensorsGraphSize"} & found.keys()
    assert not [name for name in found if name.startswith(("aten::", "xla::add", "xla::index", "xla::mm"))]
    assert found["ExecuteTime"] == len(executions) > 1000
    assert {"step", "put", "greedy", "sampled", "arrange", "row", "turn", "move_16", "move_64"} == {*executions}
    assert (session.stats.compiles, session.backend.engine.compiles) == compiled
    session.set_cache_implementation("ring")
    prompt = random_prompt(9)
    assert new_tokens(session.generate(prompt), 9) == [reference(tiny_llama, prompt, 55)]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_look_every_few_steps_is_all_that_comes_back(session, sampled):
    session.set_cache_implementation("ring")
    session.generate(random_prompt(20), max_new_tokens=3)
    before = counts()
    session.generate([random_prompt(20, 1), random_prompt(18, 1)], max_new_tokens=42, do_sample=sampled, seed=1)
    found = grown(before)
    assert session.stats.last.loop == "device"
    # Logits of three prefill steps, six looks at up to eight tokens, and the positions when the loop has ended.
    assert found["TransferFromDeviceTime"] == 3 + 6 + 1
    assert found["ExecuteTime"] == 3 * 2 + 41
    assert not [name for name in found if name.startswith("aten::")]


DUMP = """
import sys
import models
from staticgen.backends import open_backend, xla_engine
from staticgen.device_functions import Drafts
from staticgen import device_functions
from staticgen.shapes import StepForm, StepShape
from staticgen.step import step_for
from torch_xla.debug import metrics

if sys.argv[1] == "early":
    advance = device_functions.advance
    device_functions.advance = lambda *given, writes_last: advance(*given)
backend, step = open_backend("xla", "cpu"), step_for(getattr(models, sys.argv[2])(), StepForm())
drafts = Drafts(step, StepShape(3, 1, 48), backend.take(step)[0])
backend._make(drafts.loop(sampled=sys.argv[3] == "sampled"))
print(metrics.metric_data("InputOutputAliasCount")[1])
"""


def dumped(folder, *arguments):
    """The optimised module of the loop, as text, and how many inputs it takes the memory of."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", DUMP, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    modules = [path.read_text() for path in folder.glob("*after_optimizations.txt")]
    return max(modules, key=len), float(run.stdout.split()[-1])


@pytest.mark.parametrize(
    ("kind", "choice"), [("llama", "greedy"), ("llama", "sampled"), ("gemma3", "greedy"), ("gpt2", "greedy")]
)
def test_the_loop_writes_in_place(tmp_path, kind, choice):
    """The optimised program copies no cache, and takes the memory of all that it changes."""
    module, aliases = dumped(tmp_path / "late", "late", kind, choice)
    stacks = re.findall(r"(f32\[\d+,3,\d+,\d+,16\])", re.search(r"entry_computation_layout=\{\((.*?)\)->", module)[1])
    assert len(stacks) == (4 if kind == "gemma3" else 2)
    copies = [copy for copy in re.findall(r"= (f32\[[\d,]+\])\S* copy", module) if copy in stacks]
    assert not copies
    groups = 2 if kind == "gemma3" else 1
    assert aliases == 5 + 2 * groups + len(stacks)  # ids, positions, finished, column, drawn; slots and what is in them


def test_the_check_sees_copies(tmp_path):
    """With the slots written as soon as they can be, XLA does not know that the last layer has read them."""
    module, _ = dumped(tmp_path, "early", "llama", "greedy")
    assert len(re.findall(r"= \(?f32\[2,3,2,48,16\]\S* copy", module)) >= 2


def test_a_program_that_torch_xla_has_dropped_is_an_error_that_says_so():
    """It keeps so many of a process; where there were none too many, a session of this size has eight."""
    code = (
        "import models; from staticgen import RecompileError, Session\n"
        "session = Session(models.llama(), backend='xla', device='cpu', max_length=24, prefill_buckets=[8], cache_sizes=[])\n"
        "try: session.generate([5, 6, 7], max_new_tokens=3)\n"
        "except RecompileError as error: print(error)"
    )
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "XLA_COMPILATION_CACHE_SIZE": "4", "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "is gone: torch-xla keeps the newest XLA_COMPILATION_CACHE_SIZE programs" in done.stdout
