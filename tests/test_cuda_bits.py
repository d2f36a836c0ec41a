"""C1 and C2 on the kernels: 0 differing rows among tens of thousands, whatever surrounds a row.

Every comparison is counted, and made with the row's results in a call of its own.
"""

from itertools import product

import pytest
import torch
from calls import DTYPES, LAYOUTS, LOW_DTYPES, Result, relaid, rows_of
from cuda_calls import (
    ROWS,
    Guarded,
    Tally,
    WeightedResult,
    alone,
    call_out,
    call_weighted,
    choice,
    cuda_kernel,
    every_kind,
    launch_sizes,
    poisoned,
    run,
    varied_rows,
)

pytestmark = cuda_kernel

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_and_without = pytest.mark.parametrize(
    "temperature", [False, True], ids=["no temperature", "temperature"]
)

SIZES = [*range(1, 65), *(2**k + d for k in range(7, 16) for d in (-1, 0, 1))]
# Columns, and the most rows that are tried of them. Rows of 50257 and 151936 are long enough to be
# cut over 8 blocks; 7 columns are fewer than one thread moves.
WIDTHS = {1: 32769, 7: 32769, 2051: 32769, 50257: 4097, 151936: 2049}
# The launches are chosen as those without an entropy are: fewer sizes, but every launch, and
# 10,000 rows of each width on any GPU.
WEIGHTED_SIZES = [*range(1, 10), 15, 16, 17, 63, 64, 4095, 8193]
WEIGHTED_WIDTHS = [7, 2051, 50257]
# One that runs as few rows and one that does not, on any GPU of up to 320 multiprocessors. Those
# of which a warp or two take one each are in launch_sizes().
FEW, MANY = ROWS, 641


def row_counts(kind: type, vocab_size: int) -> list[int]:
    if kind is WeightedResult:
        sizes = [*WEIGHTED_SIZES, *launch_sizes()]
        # One row over a cluster, and more than 48 for each multiprocessor.
        assert min(sizes) == 1
        assert launch_sizes()[-1] in sizes
        return sizes
    return [size for size in (*SIZES, *launch_sizes()) if size <= WIDTHS[vocab_size]]


@every_dtype
@with_and_without
@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [*product([Result], WIDTHS), *product([WeightedResult], WEIGHTED_WIDTHS)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_any_number_of_rows_in_any_place(
    dtype: torch.dtype, temperature: bool, kind: type, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype)
    expected = alone(case, temperature, kind)
    sizes = row_counts(kind, vocab_size)
    assert sum(sizes) >= 10_000
    tally = Tally()
    for seed, size in enumerate(sizes):
        rows = choice(size, seed)
        actual = run(case.rows(rows), temperature, kind)
        tally.add(actual, rows_of(expected, rows), f"{size} rows")
    tally.check(sum(sizes))


@every_kind
@every_dtype
@with_and_without
@pytest.mark.parametrize("vocab_size", [7, 2051, 50257])
@pytest.mark.parametrize("shape", [(8, 8), (2, 17, 19)], ids=["few rows", "many rows"])
def test_any_layout(
    kind: type, dtype: torch.dtype, temperature: bool, vocab_size: int, shape: tuple[int, ...]
) -> None:
    case = varied_rows(vocab_size, dtype)
    expected = alone(case, temperature, kind)
    rows = choice(torch.Size(shape).numel()).view(shape)
    tally = Tally()
    for layout in ["contiguous", *LAYOUTS]:
        strided = case.rows(rows)
        strided = strided._replace(logits=relaid(strided.logits, layout))
        tally.add(run(strided, temperature, kind), rows_of(expected, rows), layout)
    tally.check((1 + len(LAYOUTS)) * rows.numel())


@every_dtype
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [(Result, 7), (Result, 2048), (Result, 2051), (WeightedResult, 7), (WeightedResult, 2051)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_any_alignment_of_the_logits(
    dtype: torch.dtype, temperature: bool, size: int, kind: type, vocab_size: int
) -> None:
    """Every place in a 128-byte line, which copies start at."""
    case = varied_rows(vocab_size, dtype)
    rows = choice(size)
    expected = rows_of(alone(case, temperature, kind), rows)
    case = case.rows(rows)
    offsets = range(128 // dtype.itemsize + 1)
    tally = Tally()
    for offset in offsets:
        shifted = Guarded((size, vocab_size), dtype, before=offset).tensor.copy_(case.logits)
        actual = run(case._replace(logits=shifted), temperature, kind)
        tally.add(actual, expected, f"{offset} elements past a line")
    tally.check(len(offsets) * size)


@every_kind
@every_dtype
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
def test_any_alignment_of_the_gradient_beside_that_of_the_logits(
    kind: type, dtype: torch.dtype, temperature: bool, size: int
) -> None:
    vocab_size = 2051
    case = varied_rows(vocab_size, dtype)
    rows = choice(size)
    expected = rows_of(alone(case, temperature, kind), rows)
    case = case.rows(rows)
    results = poisoned(expected)
    tally = Tally()
    for offset in range(9):
        logits = Guarded((size, vocab_size), dtype, before=offset).tensor.copy_(case.logits)
        for place in range(9):
            # Rows 2056 elements apart keep their alignment.
            dlogits = Guarded((size, vocab_size), dtype, before=place, stride=2056).tensor
            actual = results._replace(dlogits=dlogits)
            divisor = case.temperature if temperature else None
            call_out(case._replace(logits=logits), actual, temperature=divisor)
            tally.add(actual, expected, f"logits {offset}, dlogits {place} past a line")
    tally.check(81 * size)


@every_kind
@every_dtype
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("vocab_size", [1, 7, 2048, 2051, 50257])
def test_the_gradient_where_the_logits_are(
    kind: type, dtype: torch.dtype, temperature: bool, size: int, vocab_size: int
) -> None:
    """At every place in a chunk, rows aligned alike and not, with room between them or none."""
    case = varied_rows(vocab_size, dtype)
    rows = choice(size)
    expected = rows_of(alone(case, temperature, kind), rows)
    case = case.rows(rows)
    divisor = case.temperature if temperature else None
    aligned = -(-vocab_size // 8) * 8
    places = list(product(range(9), sorted({vocab_size, vocab_size + 1, aligned})))
    tally = Tally()
    for before, stride in places:
        logits = Guarded((size, vocab_size), dtype, before=before, stride=stride).tensor
        logits.copy_(case.logits)
        actual = poisoned(expected)._replace(dlogits=logits)
        call_out(case._replace(logits=logits), actual, temperature=divisor)
        tally.add(actual, expected, f"{before} elements past a line, rows {stride} apart")
    tally.check(len(places) * size)
    assert len(places) >= 18


@every_dtype
@with_and_without
@pytest.mark.parametrize("vocab_size", [1, 7, 2051, 50257])
def test_what_an_entropy_is_beside_has_the_bits_that_it_has_without(
    dtype: torch.dtype, temperature: bool, vocab_size: int
) -> None:
    """logp and lse of every row, and the gradient where the entropy's upstream gradient is 0."""
    case = varied_rows(vocab_size, dtype)
    tally = Tally()
    sizes = [1, FEW, MANY, launch_sizes()[-1]]
    for size in sizes:
        batch = case.rows(choice(size, size))
        args = batch if temperature else batch._replace(temperature=None)
        weighted = call_weighted(*args, torch.zeros_like(batch.grad_logp))
        actual = Result(weighted.logp, weighted.lse, weighted.dlogits)
        tally.add(actual, run(batch, temperature), f"{size} rows")
    tally.check(sum(sizes))


@every_kind
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("vocab_size", [7, 2051, 50257])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_any_dtype_that_holds_the_values(
    kind: type, dtype: torch.dtype, vocab_size: int, size: int, temperature: bool
) -> None:
    case = varied_rows(vocab_size, torch.float32).rows(choice(size))
    # Multiples of 1/8 below 16 are numbers of all three.
    eighths = case.logits.clamp(-15, 15).mul(8).round().div(8)
    case = case._replace(logits=torch.where(case.logits.isinf(), case.logits, eighths))
    low = case._replace(logits=case.logits.to(dtype))
    assert torch.equal(low.logits.float(), case.logits)
    expected = run(case, temperature, kind)
    expected = expected._replace(dlogits=expected.dlogits.to(dtype))  # rounded once
    tally = Tally()
    tally.add(run(low, temperature, kind), expected, str(dtype))
    tally.check(size)


@every_kind
@every_dtype
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("vocab_size", [1, 7, 2051, 50257])
def test_any_padding_of_the_vocabulary(
    kind: type, dtype: torch.dtype, temperature: bool, size: int, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype)
    rows = choice(size)
    expected = rows_of(alone(case, temperature, kind), rows)
    case = case.rows(rows)
    widths = [1, 3, 16, 61, 1000]
    tally = Tally()
    for padding in widths:
        padded = torch.nn.functional.pad(case.logits, (0, padding), value=-torch.inf)
        actual = run(case._replace(logits=padded), temperature, kind)
        assert not actual.dlogits[:, vocab_size:].any(), "the padding has a gradient"
        actual = actual._replace(dlogits=actual.dlogits[:, :vocab_size])
        tally.add(actual, expected, f"{padding} columns of padding")
    tally.check(len(widths) * size)
