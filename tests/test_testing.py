"""The assertions that the other tests rest on: each passes what is right and names what is not."""

import math
import re

import pytest
import torch

from rl_logp.testing import (
    assert_as_accurate,
    assert_bitwise_equal,
    correctly_rounded_percent,
    rounded,
)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32], ids=str
)
def test_equal_bits_pass(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, -3], [5, 7, 9]]).to(dtype)
    assert_bitwise_equal(x, x.clone())
    assert_bitwise_equal(x.t(), x.t().contiguous())
    assert_bitwise_equal(x[:0], x[:0].clone())
    assert_bitwise_equal(x[0, 0], x[0, 0].clone())


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        pytest.param(
            torch.tensor([[1.0, 2.0], [1.0, 1 + 2**-23]]),
            torch.tensor([[1.0, 2.0], [1.0, 1.0]]),
            "logp: 1 of 4 values differ in bits, first at (1, 1):"
            " got 0x3f800001 (1.0000001192092896), expected 0x3f800000 (1.0)",
            id="one bit",
        ),
        pytest.param(
            torch.tensor([0.0, -0.0, -0.0], dtype=torch.bfloat16),
            torch.zeros(3, dtype=torch.bfloat16),
            "logp: 2 of 3 values differ in bits, first at (1,):"
            " got 0x8000 (-0.0), expected 0x0000 (0.0)",
            id="the sign of zero",
        ),
        pytest.param(
            torch.tensor(math.nan, dtype=torch.float64),
            torch.tensor(1.0, dtype=torch.float64),
            "logp: 1 of 1 values differ in bits, first at ():"
            " got 0x7ff8000000000000 (nan), expected 0x3ff0000000000000 (1.0)",
            id="NaN, 0-dim",
        ),
        pytest.param(
            torch.zeros(2),
            torch.zeros(2, dtype=torch.float64),
            "logp: got torch.float32 of shape (2,), expected torch.float64 of shape (2,)",
            id="dtype",
        ),
        pytest.param(
            torch.zeros(2),
            torch.zeros(2, 1),
            "logp: got torch.float32 of shape (2,), expected torch.float32 of shape (2, 1)",
            id="shape",
        ),
        pytest.param(
            torch.zeros(2),
            torch.zeros(2, device="meta"),
            "logp: got it on cpu, expected meta",
            id="device",
        ),
    ],
)
def test_differing_bits_are_named(
    actual: torch.Tensor, expected: torch.Tensor, message: str
) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_bitwise_equal(actual, expected, "logp")


def test_which_nan_counts_unless_told() -> None:
    quiet = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    negative = torch.tensor([-0x400000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert bool(negative[0].isnan())
    with pytest.raises(AssertionError, match="got 0x7fc00000"):
        assert_bitwise_equal(quiet, negative)
    assert_bitwise_equal(quiet, negative, any_nan=True)
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_bitwise_equal(quiet, negative.nan_to_num(), any_nan=True)


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a 16-bit dtype by search, ties to the even pattern."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).double()
    finite = torch.where(every.isfinite(), every, torch.inf)
    distance = (finite - value).abs()
    closest = (distance == distance.min()).nonzero().flatten().tolist()
    numbers = {finite[i].item(): i for i in closest}
    if len(numbers) == 2:
        return next(number for number, pattern in numbers.items() if pattern % 2 == 0)
    return next(iter(numbers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_to_16_bits_is_right_where_two_roundings_are_not(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps
    values = [
        sign * scale * (1 + steps * ulp / 2 + nudge)
        for sign in (1, -1)
        for scale in (1.0, 2.0**-12, 2.0**-14 if dtype == torch.float16 else 2.0**-126, 3.0)
        for steps in (0, 1, 2, 3)
        for nudge in (0, 2.0**-40, -(2.0**-40), 2.0**-25, -(2.0**-25))
    ]
    exact = torch.tensor(values, dtype=torch.float64)
    expected = [nearest(v, dtype) for v in values]
    assert rounded(exact, dtype).tolist() == expected
    assert exact.to(dtype).tolist() != expected, "these values do not tell the two apart"


def test_rounding_keeps_what_is_special() -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e300, -1e300, 1e-300])
    exact = special.double()
    exact[5:] = torch.tensor([1e300, -1e300, 1e-300], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert str(rounded(exact, dtype).tolist()) == str(
            [math.inf, -math.inf, math.nan, 0.0, -0.0, math.inf, -math.inf, 0.0]
        )


def test_the_percentage_of_correctly_rounded_values() -> None:
    exact = torch.tensor([1.0, 1 + 2**-9, math.nan, -0.0], dtype=torch.float64)
    right = torch.tensor([1.0, 1.0, math.nan, 0.0], dtype=torch.bfloat16)
    assert correctly_rounded_percent(right, exact) == 100
    one_wrong = torch.tensor([1.0, 1 + 2**-7, math.nan, 0.0], dtype=torch.bfloat16)
    assert correctly_rounded_percent(one_wrong, exact) == 75
    assert correctly_rounded_percent(right[:0], exact[:0]) == 100
    with pytest.raises(ValueError, match="expected fp64 of shape"):
        correctly_rounded_percent(right, exact.float())


EXACT = torch.tensor([[0.5, -3.0], [1e-3, 2.0]], dtype=torch.float64)


def test_an_error_like_torchs_passes() -> None:
    by_torch = (EXACT + 1e-6).float()
    assert_as_accurate((EXACT - 1e-6).float(), by_torch, EXACT)
    assert_as_accurate(EXACT.float(), by_torch, EXACT)
    assert_as_accurate(EXACT.float(), EXACT.float(), EXACT)
    assert_as_accurate(EXACT.bfloat16(), EXACT.bfloat16(), EXACT)


def test_a_larger_error_is_named() -> None:
    off = EXACT.clone()
    off[1, 0] += 1e-5
    message = "dlogits: error 1.000e-05 at (1, 0), where torch's largest plus one rounding is"
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}"):
        assert_as_accurate(off.float(), (EXACT + 1e-6).float(), EXACT, "dlogits")


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (1.0, math.nan),
        (math.nan, 1.0),
        (math.inf, 1.0),
        (math.inf, -math.inf),
        (-math.inf, math.nan),
    ],
)
def test_other_infinities_and_nans_are_named(ours: float, torchs: float) -> None:
    a, b = EXACT.float(), EXACT.float()
    a[0, 1], b[0, 1] = ours, torchs
    with pytest.raises(AssertionError, match=re.escape(f"logp: at (0, 1) got {ours}")):
        assert_as_accurate(a, b, EXACT, "logp")
    assert_as_accurate(b, b, EXACT)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match="got shape"):
        assert_as_accurate(EXACT[0].float(), EXACT.float(), EXACT)
