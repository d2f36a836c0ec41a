"""C5: the softmax in the backward is the one of the forward; both come from the saved lse."""

import math

import pytest
import torch
from calls import DTYPES, call, kernel_serves, sample
from torch.utils._python_dispatch import TorchDispatchMode

import rl_logp
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal


class BackwardArguments(TorchDispatchMode):
    """Keeps the arguments of every fused_logp_backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.rl_logp.fused_logp_backward.default:
            self.seen.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backward_gets_the_lse_that_the_forward_returned(
    device: str, dtype: torch.dtype
) -> None:
    case = sample((7, 33), dtype, device)
    leaf = case.logits.requires_grad_()
    logp, lse = rl_logp.fused_logp(leaf, case.target, return_lse=True)
    with BackwardArguments() as backward:
        logp.sum().backward()
    (arguments,) = backward.seen
    assert arguments[5].data_ptr() == lse.data_ptr()
    assert arguments[6:] == (0, 33)


@pytest.mark.parametrize("shard", [False, True], ids=["whole row", "shard"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backward_takes_its_softmax_from_lse(
    device: str, dtype: torch.dtype, shard: bool
) -> None:
    """An lse that is larger by log(2) halves p exactly as far as lse can say so."""
    if not shard and not kernel_serves(device, dtype):
        pytest.skip(
            f"the chunked fallback serves {dtype} on {device}: C15 has its whole rows take"
            " torch's softmax of the same y, which it cannot have both ways"
        )
    case = sample((7, 64), dtype, device)
    larger = call(*case).lse + math.log(2)
    start, end = (16, 48) if shard else (0, 64)
    dlogits = torch.ops.rl_logp.fused_logp_backward(
        None,
        torch.ones_like(case.grad_lse),
        case.logits[:, start:end],
        case.target,
        case.temperature,
        larger,
        start,
        64,
    )
    temperature = case.temperature.unsqueeze(-1)
    y = case.logits.float() / temperature
    torch_half = (torch.softmax(y, -1) / 2 / temperature).to(dtype)
    exact_half = (y.double() - larger.unsqueeze(-1)).exp() / temperature.double()
    shard_of = (slice(None), slice(start, end))
    assert_as_accurate(dlogits, torch_half[shard_of], exact_half[shard_of], "p at a larger lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_p_at_the_target_is_exp_of_logp(device: str, dtype: torch.dtype) -> None:
    """grad_lse alone is p, whose value at the target the forward knows as exp(logp)."""
    case = sample((64, 257), dtype, device)
    rows = case.target >= 0
    case = case.rows(rows)
    p = call(
        case.logits,
        case.target,
        None,
        torch.zeros_like(case.grad_logp),
        torch.ones_like(case.grad_lse),
    ).dlogits
    logp = call(case.logits, case.target).logp
    column = case.target.unsqueeze(-1)
    torch_p = torch.softmax(case.logits.float(), -1).to(dtype).gather(-1, column).squeeze(-1)
    assert_as_accurate(p.gather(-1, column).squeeze(-1), torch_p, logp.double().exp(), "p")
    assert_bitwise_equal(torch.isnan(p), torch.zeros_like(p, dtype=torch.bool), "NaN in p")
