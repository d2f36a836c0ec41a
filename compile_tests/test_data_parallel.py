"""DDP, FSDP1 and FSDP2 over two processes train as one process does, to the bit.

Why bits can be asked for is said in data_parallel.py.
"""

from typing import NamedTuple

import pytest
import torch

from compile_tests.common import HAS_COMPILER, INDUCTOR, assert_same_bits
from compile_tests.data_parallel import WORLD_SIZE, WRAPPERS, Result, one_process, train
from compile_tests.processes import DEVICES, run_processes

BACKENDS = ["eager", "aot_eager", INDUCTOR]


class Processes(NamedTuple):
    device: str
    found: list[dict[tuple[str, str], Result]]


@pytest.fixture(scope="module", params=DEVICES.values())
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Processes:
    """Of each rank: what every wrapper and backend came to. One pair of processes runs them all."""
    folder = tmp_path_factory.mktemp("data_parallel")
    backends = ["eager", "aot_eager", "inductor"] if HAS_COMPILER else ["eager", "aot_eager"]
    found = run_processes(WORLD_SIZE, request.param, folder, train, backends)
    return Processes(request.param, found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_trains_as_one_process_does(wrapper: str, backend: str, processes: Processes):
    dtype = torch.bfloat16 if wrapper.endswith("bf16") else torch.float32
    for rank, expected in enumerate(one_process(dtype, processes.device)):
        actual = processes.found[rank][wrapper, backend]
        assert_same_bits(actual["losses"], expected["losses"], f"losses of rank {rank}")
        for kind in ("gradients", "parameters"):
            assert actual[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                assert_same_bits(actual[kind][name], tensor, f"{kind} of {name} on rank {rank}")


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_op_was_compiled(wrapper: str, backend: str, processes: Processes):
    for result in processes.found:
        assert result[wrapper, backend]["compiled"] == 1


def test_the_training_moved():
    """Or equal bits would say nothing."""
    first, second = (one_process(dtype, "cpu")[0] for dtype in (torch.float32, torch.bfloat16))
    assert not torch.equal(first["losses"][0], first["losses"][-1])
    assert not torch.equal(first["losses"][0], second["losses"][0])
    assert all(gradient.any() for gradient in first["gradients"].values())
