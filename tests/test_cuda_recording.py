"""What the caller and other threads do while backend ``cuda`` records: no concern of what is recorded."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import pytest
import torch
from models import new_tokens, random_prompt, reference

from staticgen import Session
from staticgen.graphs import NullGraphs

NULL = {"backend": "cuda", "device": "null", "prefill_buckets": [8]}

pytestmark = pytest.mark.usefixtures("one_thread")


def test_autocast_of_the_caller_is_no_concern_of_the_step():
    model, prompt = models.gpt2(), random_prompt(5)  # whose step is made here, too
    expected = reference(model, prompt, 12)
    with torch.autocast("cpu", torch.bfloat16):
        session = Session(model, max_length=24, **NULL)
        assert torch.is_autocast_enabled("cpu")
    assert new_tokens(session.generate(prompt, max_new_tokens=12), 5) == [expected]


SETTING = """
import sys
import torch
import models
from staticgen import Session
from staticgen.backends import cuda

where = torch.backends if sys.argv[1] == "fp32_precision" else torch.backends.cuda.matmul
value = "tf32" if sys.argv[1] == "fp32_precision" else True
setattr(where, sys.argv[1], value)
seen, exported = [], cuda.exported

def watched(step, shape):
    seen.append(getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"))
    return exported(step, shape)

cuda.exported = watched
session = Session(models.llama(), max_length=24, backend="cuda", device="null", prefill_buckets=[8])
assert getattr(where, sys.argv[1]) == value
print(*seen)
"""


@pytest.mark.parametrize("name", ["fp32_precision", "allow_tf32"])
def test_rounded_products_of_the_caller_are_no_concern_of_the_step(name):
    """By torch's newer and by its older name, each in a process of its own: torch bears no mix of them."""
    if name == "fp32_precision" and not hasattr(torch.backends, name):
        pytest.skip(f"torch {torch.__version__} has no such setting")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SETTING, name],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["ieee", "ieee"]


def test_two_threads_do_not_record_at_once(tiny_llama, monkeypatch):
    """A recording is broken by what another one begins with, and both want settings of the whole process."""
    running, most, record = [], [], NullGraphs._record

    def watched(self, *given):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        try:
            return record(self, *given)
        finally:
            running.pop()

    monkeypatch.setattr(NullGraphs, "_record", watched)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(Session, model, max_length=24, **NULL) for model in (tiny_llama, models.gpt2())]
        [session.result() for session in found]
    assert max(most) == 1
    assert len(most) == 8
