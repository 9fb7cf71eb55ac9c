"""What backend ``cuda`` has torch.compile rewrite before it is recorded: all of it here but the GPU and the recording.

Inductor writes for the CPU, and a replay is the work done again.
"""

import logging
import time

import pytest
import torch
from models import new_tokens, random_prompt, reference

from staticgen import CompileError, Session
from staticgen.backends import cuda
from staticgen.graphs import Graph, Graphs

SIZES = {"backend": "cuda", "device": "cuda", "prefill_buckets": [8], "cache_sizes": [24], "max_length": 48}
AUTO = {**SIZES, "backend_options": {"compile": "auto"}}

pytestmark = pytest.mark.usefixtures("one_thread")


class Again(Graph):
    def run(self):
        with torch.no_grad():
            self._work()


class AgainGraphs(Graphs):
    """Replays by doing the work again, whatever is in it."""

    def __init__(self, device):
        self.device = device

    def _record(self, work, inputs, outputs):
        return Again(work, inputs)

    def free_bytes(self):
        return None


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "CudaGraphs", AgainGraphs)
    monkeypatch.setattr(cuda, "_find_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(cuda, "_profile_of", lambda device: "nvidia")


def graphs_made():
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def check(session, tiny_llama):
    """The tokens of transformers, at every size, on the device's loop and the host's; and nothing compiles."""
    before = graphs_made()
    for lengths in ((3, 7), (20, 9)):
        prompts = [random_prompt(length) for length in lengths]
        expected = [reference(tiny_llama, prompt, 12) for prompt in prompts]
        for arguments in ({}, {"max_time": 1000.0}):
            output = session.generate(prompts, max_new_tokens=12, **arguments)
            assert session.stats.last.loop == ("host" if arguments else "device")
            assert new_tokens(output, max(lengths)) == expected
    assert graphs_made() == before


def test_inductor_rewrites_every_size(tiny_llama):
    made, breaks = graphs_made()
    session = Session(tiny_llama, batch_size=2, backend_options={"compile": "inductor"}, **SIZES)
    assert graphs_made() == (made + 3, breaks)  # prefill, and decode over 24 and 48 slots
    check(session, tiny_llama)


def test_none_rewrites_nothing(tiny_llama):
    before = graphs_made()
    Session(tiny_llama, **SIZES)  # the default
    assert graphs_made() == before


@pytest.mark.parametrize("faster", ["as it is written", "as torch.compile rewrites it"])
def test_auto_keeps_of_each_decode_step_what_replays_faster(tiny_llama, monkeypatch, caplog, faster):
    measured = []

    def seconds(self, graphs):
        measured.append(graphs)
        return [1e-3, 2e-3] if faster == "as it is written" else [2e-3, 1e-3]

    monkeypatch.setattr(Graphs, "seconds", seconds)
    made, breaks = graphs_made()
    with caplog.at_level(logging.INFO, logger="staticgen"):
        session = Session(tiny_llama, batch_size=2, **AUTO)
    assert graphs_made() == (made + 2, breaks)  # decode only
    kept = [program.graph for shape, program in session._programs._programs.items() if shape.tokens == 1]
    assert kept == [graphs[faster != "as it is written"] for graphs in measured]
    assert sum("2.000 ms" in record.message and "1.000 ms" in record.message for record in caplog.records) == 2
    check(session, tiny_llama)


def test_auto_measures(tiny_llama, monkeypatch):
    """A graph that is slow on purpose is not kept."""
    runs = []

    def slowed(module):
        def run(*given):
            runs.append(1)
            time.sleep(0.02)
            return module(*given)

        return run

    monkeypatch.setattr(cuda, "_rewritten", slowed)
    session = Session(tiny_llama, **{**AUTO, "cache_sizes": []})
    count = len(runs)
    assert count > 20
    prompt = random_prompt(5)
    assert new_tokens(session.generate(prompt, max_new_tokens=8), 5) == [reference(tiny_llama, prompt, 8)]
    assert len(runs) == count


def test_what_torch_cannot_rewrite(tiny_llama, monkeypatch, caplog):
    def refuse(*given):
        raise RuntimeError("no compiler is here")

    monkeypatch.setattr(cuda, "_rewritten", lambda module: refuse)
    with caplog.at_level(logging.WARNING, logger="staticgen"):
        session = Session(tiny_llama, batch_size=2, **AUTO)
    assert sum("cannot rewrite it: no compiler is here" in record.message for record in caplog.records) == 2
    check(session, tiny_llama)
    with pytest.raises(CompileError, match=r"cannot record the step .* no compiler is here"):
        Session(tiny_llama, backend_options={"compile": "inductor"}, **SIZES)
