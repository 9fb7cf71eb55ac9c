"""Fixtures shared by all tests."""

from __future__ import annotations

import os

import models
import pytest
import torch

# Thousands of tiny models would fill the cache of whoever runs the tests; those of the cache make their own.
os.environ["STATICGEN_CACHE"] = "off"
torch.set_num_threads(max(1, (os.cpu_count() or 2) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


def pytest_addoption(parser):
    parser.addoption("--write-families", action="store_true", help="write the README's table of model families")


@pytest.fixture(scope="session")
def tiny_llama():
    return models.llama()


@pytest.fixture(scope="module")
def one_thread():
    """Threads of tiny models would only wait for each other, longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Every backend that runs on a machine without an accelerator, as arguments of Session.
BACKENDS = {
    "eager": {"backend": "eager"},
    "openvino": {"backend": "openvino"},
    "npu": {"backend": "npu", "backend_options": {"NPUW_DEVICES": "CPU"}},
}


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    """Arguments of Session for one backend."""
    return BACKENDS[request.param]


@pytest.fixture(params=["ring", "shift"])
def layout(request):
    return request.param
