"""Fixtures of the compiled tests: a fresh compiler each, few threads, a device."""

import logging
from collections.abc import Iterator

import pytest
import torch

from compile_tests.common import fresh_compiler
from rl_logp import _library

# pytest listens to every logger that does not propagate, and torch, once anyone listens to this
# one, writes a trace of each compilation to it.
logging.getLogger("torch.__trace").propagate = True

DEVICES = ("cpu", "cpu-chunked", pytest.param("cuda", marks=pytest.mark.cuda))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = torch.cuda.device_count()
    for marker, needed in (("two_gpus", 2), ("cuda", 1)):
        skip = pytest.mark.skip(reason=f"needs CUDA devices: {needed}, and torch sees {seen}")
        for item in items:
            if seen < needed and item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device type; ``cpu-chunked`` is the CPU with its kernel hidden, so the fallback runs."""
    name, _, chunked = request.param.partition("-")
    if not chunked:
        yield name
        return
    if name not in _library._loaded:
        pytest.skip("no CPU kernel is loaded, so the cpu case runs the fallback already")
    with _library.hidden(name):
        yield name


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with fresh_compiler():
        yield
