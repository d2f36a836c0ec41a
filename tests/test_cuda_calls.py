"""What the CUDA tests share does what it says. It needs no GPU."""

import pytest
import torch
from calls import DTYPES, Result
from cuda_calls import (
    ROWS,
    Guarded,
    Tally,
    WeightedResult,
    alone,
    choice,
    every_kind,
    grad_entropy_of,
    run,
    varied_rows,
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in (Result, WeightedResult) for name in kind._fields],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_tally_finds_a_row_that_differs_in_one_bit(kind: type, name: str) -> None:
    """A comparison that could not fail would count as well."""
    expected = run(varied_rows(257, torch.bfloat16, "cpu"), kind=kind)
    actual = kind(*(t.clone() for t in expected))
    getattr(actual, name).view(torch.uint8).reshape(ROWS, -1)[5, 0] ^= 1
    tally = Tally()
    tally.add(actual, expected, "planted")
    with pytest.raises(AssertionError, match=f"1 of 64 rows differ; first: planted: {name}: 1 of"):
        tally.check(ROWS)


def test_the_tally_misses_what_was_not_compared() -> None:
    result = run(varied_rows(257, torch.bfloat16, "cpu"))
    tally = Tally()
    tally.add(result, result, "the same")
    tally.check(ROWS)
    with pytest.raises(AssertionError, match="comparisons are missing"):
        tally.check(ROWS + 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("place", ["before", "after", "between rows", "not written"])
def test_a_guard_sees_one_wrong_element(dtype: torch.dtype, place: str) -> None:
    guard = Guarded((3, 5), dtype, before=9, stride=8, device="cpu")
    assert not dtype.is_floating_point or bool(guard.tensor.isnan().all()), "the poison is a number"
    guard.tensor.zero_()
    guard.check("planted")
    row = 9 + 8
    at = {"before": 8, "after": row + 8 + 5, "between rows": row + 6, "not written": row + 4}[place]
    guard.buffer[at] = guard.guard if place == "not written" else 0
    with pytest.raises(AssertionError, match="not written" if "not" in place else f"at .{at}. of"):
        guard.check("planted")


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)], ids=str)
def test_a_guarded_tensor_has_its_rows_one_stride_apart(shape: tuple[int, ...]) -> None:
    tensor = Guarded(shape, torch.float32, stride=8, device="cpu").tensor
    assert tensor.shape == shape
    assert tensor.stride() == {1: (1,), 2: (8, 1), 3: (24, 8, 1)}[len(shape)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 2051])
def test_the_rows_are_of_the_kinds_that_they_should_be(dtype: torch.dtype, vocab_size: int) -> None:
    """Without slow, masked, ignored and zero rows a comparison would say less than it seems to."""
    case = varied_rows(vocab_size, dtype, "cpu")
    row = torch.arange(ROWS)
    assert torch.equal(case.target < 0, row % 5 == 4)
    assert torch.equal(case.grad_logp == 0, row % 7 == 6)
    without_entropy = grad_entropy_of(case) == 0
    assert bool((without_entropy & (case.grad_logp != 0)).any())
    assert bool((~without_entropy & (case.grad_logp == 0)).any())
    assert not any(
        t.isnan().any() for kind in (Result, WeightedResult) for t in run(case, kind=kind)
    )
    if vocab_size < 2051:
        return
    largest = case.logits.float().abs().masked_fill(case.logits.isinf(), 0).amax(-1)
    assert bool((largest[7::8] > (2.0**14 if dtype == torch.float16 else 2.0**29)).all())
    assert bool((largest[3::8] > 4096).all())
    assert bool(case.logits[1::8].isinf().any(-1).all())
    assert bool((case.logits[5::8] == 1.5).all())


@every_kind
def test_a_row_alone_is_what_all_others_are_compared_with(kind: type) -> None:
    case = varied_rows(257, torch.float32, "cpu")
    rows = choice(100, device="cpu")
    tally = Tally()
    expected = kind(*(t[rows] for t in alone(case, kind=kind)))
    tally.add(run(case.rows(rows), kind=kind), expected, "100 rows")
    tally.check(100)
