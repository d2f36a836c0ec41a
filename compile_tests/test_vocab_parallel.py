"""C3: processes that share a vocabulary score and train as one that has it, to the bit.

Plain shards and DTensors, eager and compiled; FSDP2 and tensor parallelism together.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import Replicate

from compile_tests import dtensor_training, fsdp_tp
from compile_tests.common import assert_same_bits
from compile_tests.processes import DEVICES, ON_CPUS, run_processes
from compile_tests.vocab_parallel import (
    CUTS,
    LAYOUTS,
    NOT_ALIGNED,
    SCENARIOS,
    backends,
    cuts_of,
    layouts,
    one_process,
    run,
    score_rows,
    score_shard,
)

SIZES = {"cpu": 4, "cuda": 4 if torch.cuda.device_count() >= 4 else 2}
NEED_FOUR = ("refusals",)
GATHER = "c10d_functional.all_gather_into_tensor"


class Processes(NamedTuple):
    device: str
    found: list[dict[str, Any]]  # of each rank, by scenario


@pytest.fixture(scope="module")
def processes_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Processes]:
    """One set of processes on a device runs everything."""

    @cache
    def run_once(device: str) -> Processes:
        folder = tmp_path_factory.mktemp("vocab_parallel")
        scenarios = [name for name in SCENARIOS if SIZES[device] == 4 or name not in NEED_FOUR]
        return Processes(device, run_processes(SIZES[device], device, folder, run, scenarios))

    return run_once


@pytest.fixture
def processes(device: str, processes_on: Callable[[str], Processes]) -> Processes:
    return processes_on(device)


def entropy_backends(name: str, size: int) -> list[str]:
    return backends(name, size, "entropy")


def cases(names_of_size, backends=backends) -> list:
    return [
        pytest.param(device, name, backend, marks=param.marks)
        for device, param in DEVICES.items()
        for name in names_of_size(SIZES[device])
        for backend in backends(name, SIZES[device])
    ]


def check_plain_shards(name: str, backend: str, processes: Processes, of: str) -> None:
    scenario = "plain shards" if of == "logp" else "plain shards, entropy"
    cuts = CUTS[name]
    *of_rows, dlogits = (tensor.cpu() for tensor in one_process(cuts[-1], processes.device, of))
    for rank, found in enumerate(processes.found):
        start, end = list(pairwise(cuts))[rank % (len(cuts) - 1)]
        actual, gathers = found[scenario][name, backend]
        assert_same_bits(actual, [*of_rows, dlogits[..., start:end]], f"rank {rank}")
        assert gathers == (0 if backend == "eager" else 1), "in the one graph"


@pytest.mark.parametrize(("device", "name", "backend"), cases(cuts_of))
def test_plain_shards(name: str, backend: str, processes: Processes) -> None:
    check_plain_shards(name, backend, processes, "logp")


@pytest.mark.parametrize(("device", "name", "backend"), cases(cuts_of, entropy_backends))
def test_entropies_of_plain_shards(name: str, backend: str, processes: Processes) -> None:
    check_plain_shards(name, backend, processes, "entropy")


@pytest.mark.parametrize(("device", "name", "backend"), cases(layouts))
def test_dtensors(name: str, backend: str, processes: Processes) -> None:
    check_dtensors(name, backend, processes, "logp")


@pytest.mark.parametrize(("device", "name", "backend"), cases(layouts, entropy_backends))
def test_entropies_of_dtensors(name: str, backend: str, processes: Processes) -> None:
    check_dtensors(name, backend, processes, "entropy")


def check_dtensors(name: str, backend: str, processes: Processes, of: str) -> None:
    scenario = "dtensors" if of == "logp" else "dtensors, entropy"
    _, placements, vocab_size = LAYOUTS[name]
    over_vocabulary = sum(placement.is_shard(2) for placement in placements)
    # Otherwise they are rows of fused_logp.
    score = score_shard if over_vocabulary else score_rows
    expected = one_process(vocab_size, processes.device, of, score)
    expected = tuple(tensor.cpu() for tensor in expected)
    of_rows = tuple(Replicate() if p.is_shard(2) else p for p in placements)
    for rank, found in enumerate(processes.found):
        actual, placed, communication = found[scenario][name, backend]
        if name in NOT_ALIGNED:  # the groups of columns are others, and so are their roundings
            logp, other, dlogits = actual
            torch.testing.assert_close(logp, expected[0], rtol=3e-7, atol=3e-7)
            torch.testing.assert_close(other, expected[1], rtol=0, atol=3e-7)
            torch.testing.assert_close(dlogits, expected[2], rtol=2**-7, atol=0)
        else:
            assert_same_bits(actual, expected, f"rank {rank}")
        assert placed == [str(p) for p in (of_rows, of_rows, tuple(placements))]
        if backend == "eager":
            assert communication == ({GATHER: over_vocabulary} if over_vocabulary else {})


@pytest.mark.parametrize("device", [ON_CPUS])
def test_dtensors_that_cannot_be_scored_as_they_are(processes: Processes) -> None:
    for rank, found in enumerate(processes.found):
        said = found["refusals"]
        assert said["plain"] == "True"
        assert (
            "fused_logp: expected logits that are not sharded on the vocabulary, got"
            " (Shard(dim=2),): call rl_logp.fused_logp" in said["operator"]
        )
        assert said["layout"] == (
            "vocab_parallel_logp: expected no group, vocab_start or vocab_size beside a DTensor,"
            " whose placements say them, got (None, 0, None)"
        )
        assert said["order"].startswith("fused_logp: expected the vocabulary in order, got")
        assert "not sharded on the vocabulary" in said["operator, order"]
        start, end = 18 * rank, min(18 * (rank + 1), 70)
        assert said["alignment"] == (
            "vocab_parallel_logp: expected shards that start at multiples of 16 columns, got"
            f" columns {start} to {end} of 70"
        )
        assert said["target"] == (
            "fused_logp: expected target as a DTensor, where rows are sharded as"
            " (Shard(dim=0), Replicate()), got a plain tensor"
        )


@pytest.mark.parametrize("device", DEVICES.values())
def test_fsdp_and_tensor_parallel_train_as_one_process(processes: Processes) -> None:
    of_parts = fsdp_tp.one_process(len(processes.found), processes.device)
    for rank, found in enumerate(processes.found):
        actual, expected = found["fsdp and tp"], of_parts[rank // fsdp_tp.SHARDS]
        assert_same_bits(actual["losses"], expected["losses"], f"losses of rank {rank}")
        for kind in ("gradients", "parameters"):
            assert actual[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                assert_same_bits(actual[kind][name], tensor, f"{kind} of {name} on rank {rank}")


@pytest.mark.parametrize(
    ("device", "name", "backend"),
    cases(dtensor_training.meshes, lambda *_: dtensor_training.BACKENDS),
)
def test_a_step_on_dtensors_is_that_of_one_process(
    name: str, backend: str, processes: Processes
) -> None:
    expected = dtensor_training.one_process(name, processes.device)
    for rank, found in enumerate(processes.found):
        for what, actual, wanted in zip(
            ("losses", "gradient", "weight"),
            found["training"][name, backend],
            expected,
            strict=True,
        ):
            assert_same_bits(actual, wanted.cpu(), f"{what} on rank {rank}")
