"""C6: a target outside [0, V) makes logp and the row's gradient exactly 0, and nothing looks at it
from the host."""

import pytest
import torch
from calls import DTYPES, Call, OperatorsSeen, assert_same_bits, call, rows_of, sample
from torch import Tensor

import rl_logp

V = 33
OUTSIDE = {
    "the usual mark": -100,
    "first past the end": V,
    "past the end": V + 5,
    "just before the start": -1,
    "5 in its low 32 bits": 2**32 + 5,
    "5 in its low 32 bits, negative": -(2**32) + 5,
    "largest int64": 2**63 - 1,
    "smallest int64": -(2**63),
}
OUTSIDE_INT32 = {
    "the usual mark": -100,
    "first past the end": V,
    "just before the start": -1,
    "largest int32": 2**31 - 1,
    "smallest int32": -(2**31),
}
TARGETS = [
    pytest.param(value, dtype, id=f"{dtype} {name}")
    for dtype, values in ((torch.int64, OUTSIDE), (torch.int32, OUTSIDE_INT32))
    for name, value in values.items()
]


def assert_zero(tensor: Tensor, what: str) -> None:
    assert bool((tensor == 0).all()), f"{what}: {tensor[tensor != 0]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("value", "target_dtype"), TARGETS)
def test_any_target_outside_the_vocabulary_is_ignored(
    call: Call, device: str, value: int, target_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    case = sample((9, V), dtype, device)
    case = case._replace(target=case.target.clamp(min=0).to(target_dtype))
    expected = call(*case[:4])
    case.target[2::3] = value
    result = call(*case[:4])
    ignored = torch.arange(9, device=device) % 3 == 2
    assert_zero(result.logp[ignored], "logp")
    assert_zero(result.dlogits[ignored], "dlogits")
    others = ~ignored
    assert_same_bits(rows_of(result, others), rows_of(expected, others), "the other rows")


ROWS = {
    "all -inf": -torch.inf,
    "all NaN": torch.nan,
    "all +inf": torch.inf,
    "largest": torch.finfo(torch.bfloat16).max,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("upstream", [1.0, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("with_temperature", [False, True], ids=["no temperature", "temperature"])
def test_whatever_the_row_and_its_upstream_gradient_hold(
    call: Call, device: str, dtype: torch.dtype, row: str, upstream: float, with_temperature: bool
) -> None:
    logits = torch.full((3, V), ROWS[row], device=device).to(dtype)
    target = torch.tensor([-100, V, 2**32 + 5], device=device)
    temperature = torch.full((3,), 0.5, device=device) if with_temperature else None
    result = call(logits, target, temperature, torch.full((3,), upstream, device=device))
    assert_zero(result.logp, "logp")
    assert_zero(result.dlogits, "dlogits")


def test_the_lse_of_an_ignored_row_is_known_and_differentiable(device: str) -> None:
    """Ignoring is about logp: lse and its gradient are of every row."""
    logits = torch.zeros(2, 4, device=device)
    target = torch.tensor([-100, 1], device=device)
    ones = torch.ones(2, dtype=torch.float64, device=device)
    result = call(logits, target, None, torch.zeros(2, device=device), ones)
    torch.testing.assert_close(result.lse, torch.full_like(ones, 4).log(), rtol=1e-7, atol=0)
    torch.testing.assert_close(result.dlogits, torch.full_like(logits, 0.25), rtol=1e-6, atol=0)


def waits(op: torch._ops.OpOverload) -> bool:
    """Whether an operator's result is a number (item, is_nonzero, equal) or of a shape that only
    the values tell."""
    numbers = any(
        str(value.type) in ("bool", "int", "float", "number") for value in op._schema.returns
    )
    return numbers or torch.Tag.dynamic_output_shape in op.tags


def test_no_operator_looks_at_the_targets_from_the_host(device: str) -> None:
    case = sample((9, V), torch.bfloat16, device)
    leaf = case.logits.requires_grad_()
    with OperatorsSeen() as operators:
        logp, lse = rl_logp.fused_logp(leaf, case.target, return_lse=True)
        (logp.sum() + lse.sum()).backward()
        rl_logp.fused_logp(leaf, case.target).sum().backward()
    assert len(operators.seen) > 10, "the mode was not shown what is inside ours"
    assert not [op for op in operators.seen if waits(op)]
