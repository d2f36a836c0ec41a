"""The fp64 oracle against Python's own arithmetic, which shares nothing with it."""

import math
from fractions import Fraction

import pytest
import torch

from rl_logp.reference import entropy, reference, scaled

ROWS = [
    [0.0, 2.0, -1.5],
    [30.0, 29.75, 0.0],
    [0.0, 0.0, -math.inf],
    [-40.0, 40.0, 39.0],
]


def by_hand(row: list[float], target: int, t: float, g: float, g_lse: float):
    """One row with math.fsum; ``row`` is y already."""
    top = max(row)
    lse = top + math.log(math.fsum(math.exp(y - top) for y in row))
    p = [math.exp(y - lse) for y in row]
    ignored = not 0 <= target < len(row)
    g = 0 if ignored else g
    d = [(g * ((i == target) - q) + g_lse * q) / t for i, q in enumerate(p)]
    return 0.0 if ignored else row[target] - lse, lse, d


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("target", [0, 1, 2, -100, 3, 2**32 + 1])
@pytest.mark.parametrize(("g", "g_lse"), [(1.0, 0.0), (-0.7, 0.3), (0.0, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_row_by_hand(
    row: list[float], target: int, g: float, g_lse: float, temperature: float
) -> None:
    actual = reference(
        torch.tensor([row]),
        torch.tensor([target]),
        temperature=temperature,
        grad_logp=torch.tensor([g], dtype=torch.float64),
        grad_lse=torch.tensor([g_lse], dtype=torch.float64),
    )
    y = [x / temperature for x in row]  # exact: a power of two
    logp, lse, dlogits = by_hand(y, target, temperature, g, g_lse)
    assert actual.logp.item() == pytest.approx(logp, rel=1e-14, abs=1e-14)
    assert actual.lse.item() == pytest.approx(lse, rel=1e-15)
    assert actual.dlogits[0].tolist() == pytest.approx(dlogits, rel=1e-13, abs=1e-16)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("target", [0, 2, -100])
@pytest.mark.parametrize(("g", "g_lse", "g_entropy"), [(1, 0, -0.5), (0, 0, 2), (-0.7, 0.3, 1)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_an_entropy_by_hand(
    row: list[float], target: int, g: float, g_lse: float, g_entropy: float, temperature: float
) -> None:
    y = [x / temperature for x in row]  # exact: a power of two
    top = max(y)
    total = math.fsum(math.exp(x - top) for x in y)
    p = [math.exp(x - top) / total for x in y]
    mean = math.fsum(q * x for q, x in zip(p, y, strict=True) if q)
    expected = math.log(total) - math.fsum(q * (x - top) for q, x in zip(p, y, strict=True) if q)
    logits = torch.tensor([row])
    assert entropy(logits, temperature=temperature).item() == pytest.approx(
        expected, rel=1e-13, abs=1e-15
    )
    upstream = (torch.tensor([value], dtype=torch.float64) for value in (g, g_lse, g_entropy))
    grad_logp, grad_lse, grad_entropy = upstream
    actual = reference(
        logits,
        torch.tensor([target]),
        temperature=temperature,
        grad_logp=grad_logp,
        grad_lse=grad_lse,
        grad_entropy=grad_entropy,
    )
    _, _, d = by_hand(y, target, temperature, g, g_lse)
    of_entropy = [
        g_entropy * q * (mean - x) / temperature if q else 0.0 for q, x in zip(p, y, strict=True)
    ]
    d = [a + b for a, b in zip(d, of_entropy, strict=True)]
    assert actual.dlogits[0].tolist() == pytest.approx(d, rel=1e-12, abs=1e-15)


def test_the_defaults_are_an_upstream_gradient_of_one_for_logp() -> None:
    logits, target = torch.tensor(ROWS), torch.tensor([0, 1, 2, -1])
    explicit = reference(
        logits, target, temperature=torch.ones(4), grad_logp=torch.ones(4), grad_lse=torch.zeros(4)
    )
    for a, e in zip(reference(logits, target), explicit, strict=True):
        assert torch.equal(a, e)
    assert not explicit.dlogits[3].any()


def test_y_is_rounded_once_to_fp32() -> None:
    logits, temperature = torch.tensor([30.0, 29.75]), torch.tensor(0.7)
    y = scaled(logits, temperature)
    assert y.dtype == torch.float64
    assert torch.equal(y.float().double(), y), "more digits than fp32 has"
    for x, rounded in zip(logits.tolist(), y.tolist(), strict=True):
        quotient = Fraction(x) / Fraction(temperature.item())
        neighbours = [
            Fraction(torch.nextafter(torch.tensor(rounded), torch.tensor(to)).item())
            for to in (-math.inf, math.inf)
        ]
        error = abs(quotient - Fraction(rounded))
        assert all(error <= abs(quotient - n) for n in neighbours)
    assert torch.equal(scaled(logits.double(), 0.7), logits.double() / temperature.double())


def test_rows_that_nothing_reaches_are_zero_whatever_they_hold() -> None:
    logits = torch.tensor([[math.nan, 0.0], [-math.inf, -math.inf], [math.inf, 0.0]])
    ignored = reference(logits, torch.tensor([-100, 2, -1]))
    assert not ignored.logp.any()
    assert not ignored.dlogits.any()
    unreached = reference(logits, torch.tensor([0, 1, 1]), grad_logp=torch.zeros(3))
    assert not unreached.dlogits.any()
    assert not unreached.logp.isfinite().any()
