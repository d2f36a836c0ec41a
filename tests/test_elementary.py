"""exp and log1p of the torch version: as good as torch's, and the same wherever an element is."""

import pytest
import torch
from torch import Tensor

from rl_logp._elementary import exp, log1p
from rl_logp.testing import assert_bitwise_equal

INF, NAN = torch.inf, torch.nan


def ulps(actual: Tensor, exact: Tensor) -> float:
    """The largest error, in units of the last place that a number of this size has at the least."""
    error = (actual.double() - exact.double()).abs() / exact.double().abs()
    return error.max().item() / torch.finfo(actual.dtype).eps


def test_exp_of_fp32(device: str) -> None:
    x = torch.linspace(-87, 88, 100_003, device=device)
    assert ulps(exp(x), x.double().exp()) < 2


def test_exp_of_fp64(device: str) -> None:
    x = torch.linspace(-700, 700, 100_003, dtype=torch.float64, device=device)
    assert ulps(exp(x), x.exp()) < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_where_results_are_not_ordinary(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-INF, -1e30, -800, 0, 800, 1e30, INF, NAN], dtype=dtype, device=device)
    expected = torch.tensor([0, 0, 0, 1, INF, INF, INF, NAN], dtype=dtype, device=device)
    assert_bitwise_equal(exp(x), expected, "exp", any_nan=True)


def test_log1p_keeps_what_is_small(device: str) -> None:
    x = torch.logspace(-300, 18, 100_003, dtype=torch.float64, device=device)
    assert ulps(log1p(x), x.log1p()) < 3
    assert log1p(torch.zeros(1, dtype=torch.float64, device=device)).item() == 0


@pytest.mark.parametrize("function", [exp, log1p])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_place_does_not_reach_the_bits(device: str, function, dtype: torch.dtype) -> None:
    if function is log1p and dtype == torch.float32:
        pytest.skip("log1p is of fp64 alone")
    x = torch.rand(331, dtype=dtype, device=device) * 3
    whole = function(x)
    for start, end in [(0, 1), (1, 330), (7, 8), (300, 331), (3, 100)]:
        assert_bitwise_equal(function(x[start:end]), whole[start:end], f"[{start}:{end}]")
    strided = torch.stack([x, x], -1)[:, 0]
    assert_bitwise_equal(function(strided), whole, "strided")
