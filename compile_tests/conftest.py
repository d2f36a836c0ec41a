"""Fixtures of the compiled tests: a fresh compiler each, few threads, a device."""

import logging

import pytest
import torch

from compile_tests.common import fresh_compiler

# pytest listens to every logger that does not propagate, and torch, once anyone listens to this
# one, writes a trace of each compilation to it.
logging.getLogger("torch.__trace").propagate = True

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with fresh_compiler():
        yield
