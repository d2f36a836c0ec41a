"""DTensors whose rows are sharded, or that are not: what is scored, and that nothing is sent.

The other processes are not there: what this one sends is counted, and what it would get is not
looked at. Processes that really are several are in compile_tests/test_vocab_parallel.py.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Replicate()]],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, "per row"], ids=str)
def test_entropies_are_those_of_the_rows_that_are_here(
    mesh: DeviceMesh, placements: list[Placement], temperature: Any
) -> None:
    logits: Any = distribute_tensor(LOGITS, mesh, placements).requires_grad_()
    target: Any = distribute_tensor(TARGET, mesh, placements)
    scale = here = temperature
    if temperature == "per row":
        # Cut here: what the other processes would send is not looked at, and may be anything.
        whole = torch.linspace(0.5, 2, 24).view(4, 6)
        scale = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        here = scale.to_local()
    leaf = logits.to_local().detach().requires_grad_()
    for both in (True, False):
        if both:
            score: Any = rl_logp.fused_logp_entropy
            args, local_args = (logits, target), (leaf, target.to_local())
        else:
            score = rl_logp.fused_entropy
            args, local_args = (logits,), (leaf,)
        with CommDebugMode() as communication:
            outputs = score(*args, temperature=scale)
            outputs = outputs if both else (outputs,)
            (dlogits,) = torch.autograd.grad(outputs, logits, [torch.ones_like(o) for o in outputs])
        assert communication.get_total_counts() == 0
        local = score(*local_args, temperature=here)
        local = local if both else (local,)
        local += torch.autograd.grad(local, leaf, [torch.ones_like(out) for out in local])
        for actual, expected in zip((*outputs, dlogits), local, strict=True):
            assert actual.placements == tuple(placements)
            assert_bitwise_equal(actual.to_local().detach(), expected.detach(), "its part")


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Replicate()]], ids=str)
def test_a_gradient_of_lse_alone(mesh: DeviceMesh, placements: list[Placement]) -> None:
    logits: Any = distribute_tensor(LOGITS, mesh, placements).requires_grad_()
    target: Any = distribute_tensor(TARGET, mesh, placements)
    _, lse = rl_logp.fused_logp(logits, target, return_lse=True)
    with CommDebugMode() as communication:
        (dlogits,) = torch.autograd.grad(lse, logits, torch.ones_like(lse))
    assert communication.get_total_counts() == 0
    leaf = logits.to_local().detach().requires_grad_()
    _, lse = rl_logp.fused_logp(leaf, target.to_local(), return_lse=True)
    (expected,) = torch.autograd.grad(lse, leaf, torch.ones_like(lse))
    assert_bitwise_equal(dlogits.to_local(), expected, "dlogits")


def test_entropies_of_plain_targets_and_temperatures(mesh: DeviceMesh) -> None:
    logits: Any = distribute_tensor(LOGITS, mesh, [Replicate(), Replicate()])
    per_row = torch.linspace(0.5, 2, 24).view(4, 6)
    actual: Any = rl_logp.fused_logp_entropy(logits, TARGET, temperature=per_row)
    alone: Any = rl_logp.fused_entropy(logits, temperature=per_row)
    expected = rl_logp.fused_logp_entropy(LOGITS, TARGET, temperature=per_row)
    for of_dtensors, plain in zip((*actual, alone), (*expected, expected[1]), strict=True):
        assert_bitwise_equal(of_dtensors.to_local(), plain, "of all rows")


def test_lse_beside_the_entropy_of_a_sharded_vocabulary(mesh: DeviceMesh) -> None:
    """One shard, which needs nothing of the processes that are not there."""
    one_shard = init_device_mesh("cpu", (4, 1))
    logits: Any = DTensor.from_local(LOGITS, one_shard, [Replicate(), Shard(2)], run_check=False)
    actual: Any = rl_logp.fused_logp_entropy(logits, TARGET, return_lse=True)
    expected = rl_logp.fused_logp_entropy(LOGITS, TARGET, return_lse=True)
    for of_dtensors, plain in zip(actual, expected, strict=True):
        assert of_dtensors.placements == (Replicate(), Replicate())
        assert_bitwise_equal(of_dtensors.to_local(), plain, "of all rows")


IN_ORDER, STRIDED = Shard(0), _StridedShard(0, split_factor=2)
SUMS, EVERYWHERE = Partial(), Replicate()


@pytest.mark.parametrize(
    "score",
    [
        rl_logp.fused_logp,
        rl_logp.fused_logp_entropy,
        rl_logp.vocab_parallel_logp,
        rl_logp.vocab_parallel_logp_entropy,
    ],
)
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


@pytest.mark.parametrize("name", ["target", "temperature"])
@pytest.mark.parametrize(
    "score",
    [
        rl_logp.fused_logp,
        rl_logp.fused_logp_entropy,
        rl_logp.fused_entropy,
        rl_logp.vocab_parallel_logp,
        rl_logp.vocab_parallel_logp_entropy,
        rl_logp.vocab_parallel_entropy,
    ],
)
def test_a_dtensor_beside_plain_logits(mesh: DeviceMesh, score: Callable, name: str) -> None:
    plain = {"target": TARGET, "temperature": torch.ones(4, 6)}
    if score in (rl_logp.fused_entropy, rl_logp.vocab_parallel_entropy):
        del plain["target"]
    if name not in plain:
        pytest.skip("it takes no target")
    given = {**plain, name: distribute_tensor(plain[name], mesh, [Replicate(), Replicate()])}
    message = f"{score.__name__}: expected {name} as a plain tensor, as logits are, got a DTensor"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        score(LOGITS, **given)


# --- inplace_backward=True ------------------------------------------------------------------------
ROWS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(1), Shard(0)),
]


def placed(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Any, Any]:
    """Logits that something computed, and their targets."""
    logits: Any = distribute_tensor(LOGITS, mesh, placements)
    rows = [Replicate() if placement.is_shard(2) else placement for placement in placements]
    return logits.requires_grad_() * 1.5, distribute_tensor(TARGET, mesh, rows)


def logp_and_lse(logits: Any, target: Any, inplace_backward: bool = False) -> Any:
    return rl_logp.fused_logp(
        logits, target, temperature=0.7, return_lse=True, inplace_backward=inplace_backward
    )


def logp_and_entropy(logits: Any, target: Any, inplace_backward: bool = False) -> Any:
    return rl_logp.fused_logp_entropy(
        logits, target, temperature=0.7, inplace_backward=inplace_backward
    )


def entropy(logits: Any, target: Any, inplace_backward: bool = False) -> Any:
    return (rl_logp.fused_entropy(logits, temperature=0.7, inplace_backward=inplace_backward),)


inplace = partial(logp_and_lse, inplace_backward=True)
every_score = pytest.mark.parametrize("score", [logp_and_lse, logp_and_entropy, entropy])


@pytest.mark.parametrize("placements", ROWS, ids=str)
@every_score
def test_the_gradient_is_written_over_each_process_part(
    mesh: DeviceMesh, placements: tuple[Placement, ...], score: Callable
) -> None:
    logits, target = placed(mesh, placements)
    version = logits._version
    with torch.no_grad():
        local = logits.to_local()
    expected = local.clone().requires_grad_()
    outputs = score(logits, target, inplace_backward=True)
    with CommDebugMode() as communication:
        (dlogits,) = torch.autograd.grad(outputs, logits, [torch.ones_like(o) for o in outputs])
    assert communication.get_total_counts() == 0
    assert dlogits.placements == placements
    assert dlogits.to_local().data_ptr() == local.data_ptr()
    assert logits._version > version
    outputs = score(expected, target.to_local())
    (expected,) = torch.autograd.grad(outputs, expected, [torch.ones_like(o) for o in outputs])
    assert_bitwise_equal(local, expected, "this process's part")


def test_rows_that_are_sharded_for_the_op_alone(mesh: DeviceMesh) -> None:
    """Each process has all logits, and scores some rows: what is written is all of them."""
    logits, _ = placed(mesh, [Replicate(), Replicate()])
    target = distribute_tensor(TARGET, mesh, [Shard(0), Replicate()])
    (dlogits,) = torch.autograd.grad(inplace(logits, target)[0].sum(), logits)
    assert dlogits.placements == (Replicate(), Replicate())
    assert dlogits.to_local().shape == LOGITS.shape


@pytest.mark.parametrize(
    "other", [lambda logits: logits.to_local().sin().sum(), lambda logits: logits.sin().sum()]
)
@pytest.mark.parametrize("called", ["before", "after"])
@every_score
def test_what_has_saved_the_dtensor_or_its_local_tensor_raises(
    mesh: DeviceMesh, other: Callable, called: str, score: Callable
) -> None:
    logits, target = placed(mesh, [Shard(0), Replicate()])
    first = other(logits) if called == "before" else None
    logp = score(logits, target, inplace_backward=True)[0].sum()
    saved = other(logits) if first is None else first
    logp.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        saved.backward()


LEAF = "expected logits that were computed where inplace_backward=True, got a leaf"
LOCAL = "expected a DTensor itself where inplace_backward=True, got its local tensor"


@pytest.mark.parametrize(
    ("relay", "message"),
    [
        pytest.param(lambda x: x.detach().requires_grad_(), LEAF, id="a leaf"),
        pytest.param(lambda x: x.detach().requires_grad_()[:, :3], LEAF, id="a view of a leaf"),
        pytest.param(lambda x: x.to_local(), LOCAL, id="the local tensor"),
        pytest.param(lambda x: x.to_local()[:, :3], LOCAL, id="a view of the local tensor"),
    ],
)
def test_what_could_be_overwritten_unseen_is_refused(
    mesh: DeviceMesh, relay: Callable[[Any], Any], message: str
) -> None:
    logits, target = placed(mesh, [Shard(0), Replicate()])
    logits = relay(logits)
    target = target if isinstance(logits, DTensor) else target.to_local()
    with pytest.raises(ValueError, match=f"^fused_logp: {message}"):
        inplace(logits, target[:, : logits.shape[1]])


def test_what_is_computed_from_a_local_tensor_is_not(mesh: DeviceMesh) -> None:
    logits, target = placed(mesh, [Shard(0), Replicate()])
    logits = (logits.to_local() * 2)[:, :3]
    (dlogits,) = torch.autograd.grad(inplace(logits, target.to_local()[:, :3])[0].sum(), logits)
    assert dlogits.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Replicate(), Shard(2)), "logits that are not sharded on the vocabulary"),
        ((Partial(), Replicate()), "no partial sums"),
    ],
    ids=["vocabulary", "sums"],
)
@every_score
def test_dtensors_without_a_gradient_in_place(
    mesh: DeviceMesh, placements: tuple[Placement, ...], message: str, score: Callable
) -> None:
    logits: Any = DTensor.from_local(LOGITS, mesh, placements, run_check=False).requires_grad_()
    target = distribute_tensor(TARGET, mesh, [Replicate(), Replicate()])
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"fused_logp: expected {message} where inplace_backward=True, got {placements}"
        ),
    ):
        score(logits * 2, target, inplace_backward=True)
