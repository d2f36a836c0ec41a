"""C7: a row whose upstream gradient is exactly 0 gets an exactly zero gradient, never NaN."""

import pytest
import torch
from calls import DTYPES, Call, assert_same_bits, rows_of, sample

ROWS = {
    "all -inf": [-torch.inf] * 4,
    "NaN": [0.0, torch.nan, 0.0, 0.0],
    "+inf": [0.0, torch.inf, 0.0, 0.0],
    "target -inf": [0.0, 0.0, -torch.inf, 0.0],
    "finite": [1.0, 2.0, 3.0, 4.0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("zero", [0.0, -0.0], ids=str)
@pytest.mark.parametrize("lse_too", [False, True], ids=["logp", "logp and lse"])
@pytest.mark.parametrize("with_temperature", [False, True], ids=["no temperature", "temperature"])
def test_a_zero_upstream_gradient_gives_exactly_zero(
    call: Call,
    device: str,
    dtype: torch.dtype,
    row: str,
    zero: float,
    lse_too: bool,
    with_temperature: bool,
) -> None:
    logits = torch.tensor([ROWS[row]], device=device).to(dtype)
    target = torch.tensor([2], device=device)
    temperature = torch.tensor(0.5, device=device) if with_temperature else None
    g = torch.tensor([zero], device=device)
    dlogits = call(logits, target, temperature, g, g.double() if lse_too else None).dlogits
    assert bool((dlogits == 0).all()), dlogits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_rows_leave_the_others_their_bits(call: Call, device: str, dtype: torch.dtype) -> None:
    case = sample((12, 257), dtype, device)
    expected = call(*case)
    masked = torch.arange(12, device=device) % 2 == 0
    case.grad_logp[masked] = 0
    case.grad_lse[masked] = 0
    case.logits[masked] = torch.nan
    result = call(*case)
    assert bool((result.dlogits[masked] == 0).all())
    others = ~masked
    assert_same_bits(
        rows_of(result, others), rows_of(expected, others), "rows with an upstream gradient"
    )


def test_a_masked_loss_over_masked_logits_is_finite(device: str) -> None:
    """The way it comes up: the sampled token was filtered out, and the loss masks that row."""
    logits = torch.zeros(2, 3, device=device)
    logits[0, 2] = -torch.inf
    logits.requires_grad_()
    logp = torch.ops.rl_logp.fused_logp(logits, torch.tensor([2, 2], device=device))
    torch.where(torch.tensor([False, True], device=device), logp, 0).sum().backward()
    third = 1 / 3
    expected = torch.tensor([[0, 0, 0], [-third, -third, 1 - third]], device=device)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-6, atol=0)
