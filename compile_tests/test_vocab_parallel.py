"""C3: processes that share a vocabulary score and train as one that has it, to the bit.

Plain shards and DTensors, eager and compiled; FSDP2 and tensor parallelism together.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import rl_logp
from compile_tests import fsdp_tp
from compile_tests.common import assert_same_bits, gradients
from compile_tests.vocab_parallel import (
    CUTS,
    LAYOUTS,
    NOT_ALIGNED,
    SCENARIOS,
    TEMPERATURE,
    arguments,
    backends,
    one_process,
    run_processes,
)

SIZE = 4
GATHER = "c10d_functional.all_gather_into_tensor"

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs torch.distributed with gloo",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Of each rank: what it found. One set of processes runs everything."""
    folder = tmp_path_factory.mktemp("vocab_parallel")
    return run_processes(SIZE, "cpu", folder, list(SCENARIOS))


def cases(names) -> list:
    return [pytest.param(name, backend) for name in names for backend in backends(name)]


def assert_plain_shards_are_one_process(
    results: list[dict[Any, Any]], name: str, backend: str, device: str
) -> None:
    cuts = CUTS[name]
    logp, lse, dlogits = (tensor.cpu() for tensor in one_process(cuts[-1], device))
    for rank, found in enumerate(results):
        start, end = list(pairwise(cuts))[rank % (len(cuts) - 1)]
        actual, gathers = found["plain shards"][name, backend]
        assert_same_bits(actual, [logp, lse, dlogits[..., start:end]], f"rank {rank}")
        assert gathers == (0 if backend == "eager" else 1), "in the one graph"


@needs_gloo
@pytest.mark.parametrize(("name", "backend"), cases(CUTS))
def test_plain_shards(name: str, backend: str, results: list[dict[Any, Any]]) -> None:
    assert_plain_shards_are_one_process(results, name, backend, "cpu")


@pytest.mark.cuda
def test_plain_shards_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and there is {torch.cuda.device_count()}")
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs torch.distributed with NCCL")
    size = 4 if torch.cuda.device_count() >= 4 else 2
    results = run_processes(size, "cuda", tmp_path, ["plain shards"])
    for name, backend in results[0]["plain shards"]:
        assert_plain_shards_are_one_process(results, name, backend, "cuda")


@needs_gloo
@pytest.mark.parametrize(("name", "backend"), cases(LAYOUTS))
def test_dtensors(name: str, backend: str, results: list[dict[Any, Any]]) -> None:
    _, placements, vocab_size = LAYOUTS[name]
    over_vocabulary = sum(placement.is_shard(2) for placement in placements)
    if over_vocabulary:
        expected = one_process(vocab_size)
    else:  # which are rows of fused_logp
        logits, target = arguments(vocab_size)
        outputs = rl_logp.fused_logp(
            logits.requires_grad_(), target, temperature=TEMPERATURE, return_lse=True
        )
        expected = (*(out.detach() for out in outputs), *gradients(outputs, logits))
    of_rows = tuple(Replicate() if p.is_shard(2) else p for p in placements)
    for rank, found in enumerate(results):
        actual, placed, communication = found["dtensors"][name, backend]
        if name in NOT_ALIGNED:  # the groups of columns are others, and so are their roundings
            logp, lse, dlogits = actual
            torch.testing.assert_close(logp, expected[0], rtol=3e-7, atol=3e-7)
            torch.testing.assert_close(lse, expected[1], rtol=0, atol=3e-7)
            torch.testing.assert_close(dlogits, expected[2], rtol=2**-7, atol=0)
        else:
            assert_same_bits(actual, expected, f"rank {rank}")
        assert placed == [str(p) for p in (of_rows, of_rows, tuple(placements))]
        if backend == "eager":
            assert communication == ({GATHER: over_vocabulary} if over_vocabulary else {})


@needs_gloo
def test_dtensors_that_cannot_be_scored_as_they_are(results: list[dict[Any, Any]]) -> None:
    for rank, found in enumerate(results):
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
        start, end = 18 * rank, min(18 * (rank + 1), 70)
        assert said["alignment"] == (
            "vocab_parallel_logp: expected shards that start at multiples of 16 columns, got"
            f" columns {start} to {end} of 70"
        )
        assert said["target"] == (
            "vocab_parallel_logp: expected target as a DTensor, where rows are sharded as"
            " (Shard(dim=0), Replicate()), got a plain tensor"
        )


@needs_gloo
def test_fsdp_and_tensor_parallel_train_as_one_process(results: list[dict[Any, Any]]) -> None:
    of_halves = fsdp_tp.one_process()
    for rank, found in enumerate(results):
        actual, expected = found["fsdp and tp"], of_halves[rank // fsdp_tp.SHARDS]
        assert_same_bits(actual["losses"], expected["losses"], f"losses of rank {rank}")
        for kind in ("gradients", "parameters"):
            assert actual[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                assert_same_bits(actual[kind][name], tensor, f"{kind} of {name} on rank {rank}")
