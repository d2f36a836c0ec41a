"""C3, backward: a shard of the vocabulary gets the gradient its columns have in the whole row."""

from itertools import pairwise

import pytest
import torch
from calls import DTYPES, Sample, call, exact, kernel_serves, sample
from torch import Tensor

from rl_logp.testing import assert_as_accurate, assert_bitwise_equal


def shard_gradient(case: Sample, lse: Tensor, start: int, end: int) -> Tensor:
    return torch.ops.rl_logp.fused_logp_backward(
        case.grad_logp,
        case.grad_lse,
        case.logits[..., start:end],
        case.target,
        case.temperature,
        lse,
        start,
        case.logits.shape[-1],
        True,
    )


@pytest.mark.parametrize("cuts", [(0, 96), (0, 48, 96), (0, 16, 32, 80, 96), (0, 16, 91)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_together_are_the_gradient_of_the_row(
    device: str, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    case = sample((13, cuts[-1]), dtype, device)
    whole = call(*case)
    parts = [shard_gradient(case, whole.lse, start, end) for start, end in pairwise(cuts)]
    dlogits = torch.cat(parts, dim=-1)
    in_one = shard_gradient(case, whole.lse, 0, cuts[-1])
    assert_bitwise_equal(dlogits, in_one, "the gradient of one shard that is the whole row")
    if kernel_serves(device, dtype):
        assert_bitwise_equal(dlogits, whole.dlogits, "the kernel's gradient")
    # The fallback's shards round exp(y - lse), its fused_logp torch's softmax: equal to rounding.
    assert_as_accurate(dlogits, whole.dlogits, exact(case).dlogits, "dlogits")


def test_a_target_on_another_shard_is_not_an_ignored_one(device: str) -> None:
    logits = torch.zeros(2, 8, device=device)
    target = torch.tensor([5, 8], device=device)
    lse = torch.full((2,), 16.0, dtype=torch.float64, device=device).log()
    dlogits = torch.ops.rl_logp.fused_logp_backward(
        torch.ones(2, device=device), None, logits, target, None, lse, 8, 16, True
    )
    expected = torch.full((2, 8), -0.0625, device=device)
    expected[1, 0] = 0.9375
    torch.testing.assert_close(dlogits, expected, rtol=1e-6, atol=0)
