"""return_lse: logsumexp(y) in fp64 of every row, differentiable."""

import pytest
import torch
from calls import DTYPES, call, exact, kernel_serves, sample

import rl_logp
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_lse_is_that_of_y_for_ignored_rows_too(device: str, dtype: torch.dtype) -> None:
    case = sample((3, 7, 257), dtype, device)
    lse = call(*case).lse
    assert lse.dtype == torch.float64
    assert lse.shape == case.target.shape
    y = case.logits if dtype == torch.float64 else case.logits.float()
    y = y / case.temperature.unsqueeze(-1).to(y.dtype)
    by_torch = torch.logsumexp(y, -1)
    if dtype == torch.float64:  # log_softmax, which the fallback goes through, rounds once more
        torch.testing.assert_close(lse, by_torch, rtol=1e-14, atol=0)
    else:
        assert_as_accurate(lse.float(), by_torch, exact(case).lse, "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradients_of_logp_and_lse_add_up(device: str, dtype: torch.dtype) -> None:
    case = sample((3, 7, 257), dtype, device)
    leaf = case.logits.float().requires_grad_()
    y = leaf / case.temperature.unsqueeze(-1)
    column = case.target.clamp(min=0).unsqueeze(-1)
    logp = torch.log_softmax(y, -1).gather(-1, column).squeeze(-1)
    g = case.grad_logp.masked_fill(case.target < 0, 0)
    by_torch = torch.autograd.grad(
        [logp, torch.logsumexp(y, -1)], leaf, [g, case.grad_lse.float()]
    )[0]
    # The fallback's product, sum and quotient were 5% beyond one rounding on an H200, in fp32.
    on_cuda = torch.device(device).type == "cuda"
    roundings = 2 if on_cuda and not kernel_serves(device, dtype) and dtype == torch.float32 else 1
    assert_as_accurate(
        call(*case).dlogits, by_torch.to(dtype), exact(case).dlogits, "dlogits", roundings
    )


def test_lse_alone_can_be_differentiated(device: str) -> None:
    case = sample((7, 33), torch.float32, device)
    leaf = case.logits.requires_grad_()
    _, lse = rl_logp.fused_logp(leaf, case.target, return_lse=True)
    (dlogits,) = torch.autograd.grad(lse, leaf, case.grad_lse)
    zero = torch.zeros_like(case.grad_logp)
    both = call(case.logits, case.target, None, zero, case.grad_lse).dlogits
    assert_bitwise_equal(dlogits, both, "grad_logp of None and of 0")
    z_loss = torch.autograd.grad(torch.logsumexp(leaf, -1), leaf, case.grad_lse.float())[0]
    torch.testing.assert_close(dlogits, z_loss, rtol=1e-5, atol=1e-7)


def test_what_is_not_used_gets_no_gradient(device: str) -> None:
    case = sample((7, 33), torch.float32, device)
    leaf = case.logits.requires_grad_()
    logp, lse = rl_logp.fused_logp(leaf, case.target, return_lse=True)
    assert logp.requires_grad
    assert lse.requires_grad
    with torch.no_grad():
        logp, lse = rl_logp.fused_logp(leaf, case.target, return_lse=True)
    assert not logp.requires_grad
    assert not lse.requires_grad
