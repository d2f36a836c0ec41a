"""DTensors whose rows are sharded, or that are not: what is scored, and that nothing is sent.

The other processes are not there: what this one sends is counted, and what it would get is not
looked at. Processes that really are several are in compile_tests/test_vocab_parallel.py.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

LOGITS = torch.randn(4, 6, 32)
TARGET = torch.randint(-1, 32, (4, 6))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements",
    [[Shard(1), Replicate()], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)]],
    ids=str,
)
def test_rows_that_were_flattened_are_scored_where_they_are(
    mesh: DeviceMesh, placements: list[Placement]
) -> None:
    logits: Any = distribute_tensor(LOGITS, mesh, placements)
    target: Any = distribute_tensor(TARGET, mesh, placements)
    try:
        logits, target = logits.flatten(0, 1).requires_grad_(), target.flatten(0, 1)
    except RuntimeError as error:
        pytest.skip(f"this torch does not flatten them: {str(error)[:60]}")
    with CommDebugMode() as communication:
        outputs: Any = rl_logp.fused_logp(logits, target, temperature=0.7, return_lse=True)
        (dlogits,) = torch.autograd.grad(outputs, logits, [torch.ones_like(o) for o in outputs])
    assert communication.get_total_counts() == 0
    leaf = logits.to_local().detach().requires_grad_()
    local = rl_logp.fused_logp(leaf, target.to_local(), temperature=0.7, return_lse=True)
    local += torch.autograd.grad(local, leaf, [torch.ones_like(out) for out in local])
    for actual, expected in zip((*outputs, dlogits), local, strict=True):
        assert actual.placements == logits.placements
        assert_bitwise_equal(actual.to_local().detach(), expected.detach(), "this process's part")


@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp and lse"])
@pytest.mark.parametrize(
    "temperature",
    [0.7, torch.tensor(0.7), torch.linspace(0.5, 2, 24).view(4, 6)],
    ids=["number", "0-dim", "per row"],
)
def test_plain_tensors_are_taken_where_each_process_has_all_rows(
    mesh: DeviceMesh, temperature: float | Tensor, return_lse: bool
) -> None:
    def score(logits: Any) -> Any:
        outputs = rl_logp.fused_logp(logits, TARGET, temperature=temperature, return_lse=return_lse)
        return outputs if return_lse else (outputs,)

    everywhere = (Replicate(), Replicate())
    outputs = score(distribute_tensor(LOGITS, mesh, everywhere))
    for actual, expected in zip(outputs, score(LOGITS), strict=True):
        assert actual.placements == everywhere
        assert_bitwise_equal(actual.to_local(), expected, "of all rows")


IN_ORDER, STRIDED = Shard(0), _StridedShard(0, split_factor=2)
SUMS, EVERYWHERE = Partial(), Replicate()


@pytest.mark.parametrize("score", [rl_logp.fused_logp, rl_logp.vocab_parallel_logp])
@pytest.mark.parametrize(
    ("placements", "message"),
    [
        pytest.param(
            (rows, vocabulary),
            f"expected target as a DTensor, where rows are sharded as {(rows, EVERYWHERE)}, got a"
            " plain tensor",
            id=f"{rows} and {vocabulary}",
        )
        for rows in (IN_ORDER, STRIDED)
        for vocabulary in (EVERYWHERE, Shard(2))
    ]
    + [
        pytest.param(
            (SUMS, Shard(2)), f"expected no partial sums, got {(SUMS, Shard(2))}", id="sums"
        ),
        pytest.param(
            (_StridedShard(2, split_factor=2), EVERYWHERE),
            f"expected the vocabulary in order, got {_StridedShard(2, split_factor=2)}",
            id="the vocabulary in another order",
        ),
    ],
)
def test_what_cannot_be_scored_is_said_of_the_function_that_was_called(
    mesh: DeviceMesh, score: Callable, placements: tuple[Placement, ...], message: str
) -> None:
    logits = DTensor.from_local(LOGITS, mesh, placements, run_check=False)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{score.__name__}: {message}')}$"):
        score(logits, TARGET)
