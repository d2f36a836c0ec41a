"""Where the contract is tested: on a CPU and on a GPU, through the kernels and without them."""

from collections.abc import Iterator

import calls
import pytest
import shards
import torch
from hypothesis import HealthCheck, settings

from rl_logp import _library

# The same examples in every run; a failure prints the line that reproduces it.
settings.register_profile(
    "rl_logp",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("rl_logp")

# Small tensors gain nothing from a second thread, and on a busy machine each operator would wait
# for it. test_c01_row_alone.py shows that the number of threads does not reach the bits.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = torch.cuda.device_count()
    for marker, needed in (("two_gpus", 2), ("cuda", 1)):
        skip = pytest.mark.skip(reason=f"needs CUDA devices: {needed}, and torch sees {seen}")
        for item in items:
            if seen < needed and item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(
    params=[
        "cpu",
        "cpu-chunked",
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("cuda-chunked", marks=pytest.mark.cuda),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device type; ``-chunked`` is the device with its kernels hidden, so the fallback runs."""
    name, _, chunked = request.param.partition("-")
    if not chunked:
        yield name
        return
    if name not in _library._loaded:
        pytest.skip(f"no {name} kernel is loaded, so the {name} case runs the fallback already")
    with _library.hidden(name):
        yield name


@pytest.fixture(
    params=[calls.call, calls.call_with_entropy], ids=["fused_logp", "fused_logp_entropy"]
)
def call(request: pytest.FixtureRequest) -> calls.Call:
    """One call of an operator with everything it computes: what both of them promise."""
    return request.param


@pytest.fixture(
    params=[shards.call_in_shards, shards.call_in_shards_with_entropy],
    ids=["fused_logp", "fused_logp_entropy"],
)
def call_in_shards(request: pytest.FixtureRequest) -> calls.Call:
    """The same over shards of the vocabulary."""
    return request.param
