"""Assertions for tests and benchmarks: equal bits, correct rounding, and no worse than torch."""

from typing import Optional

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, as integers of the same size."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def assert_bitwise_equal(
    actual: Tensor, expected: Tensor, what: str = "tensors", *, any_nan: bool = False
) -> None:
    """Raises AssertionError unless shapes, dtypes and all bits agree.

    The message names the first differing coordinate and both bit patterns. With ``any_nan`` every
    NaN counts as the same, since which NaN an operation makes is the processor's choice.

    >>> assert_bitwise_equal(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "logp")
    Traceback (most recent call last):
    AssertionError: logp: 1 of 2 values differ in bits, first at (1,): \
got 0x00000000 (0.0), expected 0x80000000 (-0.0)
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: got {actual.dtype} of shape {tuple(actual.shape)},"
            f" expected {expected.dtype} of shape {tuple(expected.shape)}"
        )
    if actual.device != expected.device:
        raise AssertionError(f"{what}: got it on {actual.device}, expected {expected.device}")
    differs = bits(actual) != bits(expected)
    if any_nan and actual.is_floating_point():
        differs &= ~(actual.detach().isnan() & expected.detach().isnan())
    count = int(differs.sum())
    if not count:
        return
    where = tuple(differs.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {count} of {actual.numel()} values differ in bits, first at {where}:"
        f" got {_pattern(actual[where])}, expected {_pattern(expected[where])}"
    )


def _pattern(value: Tensor) -> str:
    size = value.element_size()
    pattern = int(bits(value.reshape(1))) & (1 << 8 * size) - 1
    return f"0x{pattern:0{2 * size}x} ({value.item()!r})"


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 values rounded once, to nearest even, to ``dtype``.

    torch's own cast to a 16-bit type goes through fp32 and so rounds twice. Rounding to odd on the
    way to fp32 (of the two neighbours, the one with the odd last bit) leaves the second rounding
    all it needs to be right.

    >>> halfway_and_a_bit = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    >>> halfway_and_a_bit.bfloat16().item(), rounded(halfway_and_a_bit, torch.bfloat16).item()
    (1.0, 1.0078125)
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return exact.to(dtype)
    single = exact.float()
    inexact = single.double() != exact  # NaN too, which stays NaN
    even = (single.view(torch.int32) & 1) == 0
    towards = torch.where(exact > single.double(), torch.inf, -torch.inf)
    odd = torch.nextafter(single, towards.float())
    return torch.where(inexact & even, odd, single).to(dtype)


def correctly_rounded_percent(actual: Tensor, exact: Tensor) -> float:
    """Percentage of values that are the fp64 ``exact`` ones rounded once to ``actual``'s dtype.

    Both NaN counts as right; so do zeros of either sign.

    >>> correctly_rounded_percent(torch.tensor([0.5, 0.25]), torch.tensor([0.5, 0.26]).double())
    50.0
    """
    if actual.shape != exact.shape or exact.dtype != torch.float64:
        raise ValueError(
            f"correctly_rounded_percent: expected fp64 of shape {tuple(actual.shape)},"
            f" got {exact.dtype} of shape {tuple(exact.shape)}"
        )
    actual = actual.detach()
    expected = rounded(exact, actual.dtype)
    right = (actual == expected) | (actual.isnan() & expected.isnan())
    return 100.0 * int(right.sum()) / right.numel() if right.numel() else 100.0


def assert_as_accurate(
    actual: Tensor,
    torch_result: Tensor,
    exact: Tensor,
    what: str = "values",
    roundings: int = 1,
) -> None:
    """Raises AssertionError unless ``actual`` is as accurate as torch, both against fp64.

    The same infinities and NaNs as torch, and elsewhere a largest error of at most torch's own plus
    a tiny term: half a unit in the last place, in ``actual``'s dtype, of the largest value, but not
    less than one in fp32 of it or of 1; that times ``roundings``, for a formula that rounds more
    often than torch's.
    """
    if not actual.shape == torch_result.shape == exact.shape:
        raise AssertionError(
            f"{what}: got shape {tuple(actual.shape)}, torch {tuple(torch_result.shape)},"
            f" exact {tuple(exact.shape)}"
        )
    ours, theirs = actual.detach().double(), torch_result.detach().double()
    special = _first(~_same_special(ours, theirs))
    if special is not None:
        raise AssertionError(
            f"{what}: at {special} got {ours[special].item()!r},"
            f" torch has {theirs[special].item()!r}"
        )
    finite = theirs.isfinite() & exact.isfinite()
    if not bool(finite.any()):
        return
    largest = exact[finite].abs().max().item()
    half_ulp = torch.finfo(actual.dtype).eps / 2
    tiny = max(largest * half_ulp, max(largest, 1) * torch.finfo(torch.float32).eps) * roundings
    error = torch.where(finite, (ours - exact).abs(), 0)
    allowed = torch.where(finite, (theirs - exact).abs(), 0).max().item() + tiny
    if error.max().item() <= allowed:
        return
    where = _first(error == error.max())
    assert where is not None
    terms = "one rounding" if roundings == 1 else f"{roundings} roundings"
    raise AssertionError(
        f"{what}: error {error[where].item():.3e} at {where}, where torch's largest plus {terms} is"
        f" {allowed:.3e}: got {ours[where].item()!r}, exact {exact[where].item()!r}"
    )


def _same_special(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors have the same infinity, both NaN, or both a finite value."""
    return (a.isfinite() & b.isfinite()) | (a == b) | (a.isnan() & b.isnan())


def _first(mask: Tensor) -> Optional[tuple[int, ...]]:
    found = mask.nonzero()
    return tuple(found[0].tolist()) if len(found) else None
