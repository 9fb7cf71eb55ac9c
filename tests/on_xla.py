"""Where backend ``xla`` is tested: on device ``null`` everywhere, and on XLA's CPU client where torch-xla is."""

import importlib.util
import os

import pytest

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
needs_xla = pytest.mark.skipif(not HAS_XLA, reason="needs torch-xla: the extra xla")
DEVICES = ["null", pytest.param("cpu", marks=needs_xla)]
if HAS_XLA:
    # A program compiles in a third of the time, and is run here a few times only.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


def counts():
    """What torch-xla has counted so far, by name; of a metric, how many samples it has."""
    from torch_xla.core import xla_model
    from torch_xla.debug import metrics

    xla_model.wait_device_ops()  # an execution is counted when it has ended
    found = {name: metrics.counter_value(name) for name in metrics.counter_names()}
    return found | {name: metrics.metric_data(name)[0] for name in metrics.metric_names()}


def grown(before):
    """What has been counted since, where it is not nothing."""
    return {name: value - before.get(name, 0) for name, value in counts().items() if value != before.get(name, 0)}
