"""C1 and C2 on the kernels: 0 differing rows among tens of thousands, whatever surrounds a row.

Every comparison is counted, and made with the row's results in a call of its own.
"""

import pytest
import torch
from calls import DTYPES, LAYOUTS, LOW_DTYPES, Result, relaid, rows_of
from cuda_calls import (
    ROWS,
    Guarded,
    Tally,
    alone,
    call_out,
    choice,
    cuda_kernel,
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
# One that runs as few rows, one that runs as many, on any GPU of up to 320 multiprocessors.
FEW, MANY = ROWS, 641


def launch_sizes() -> list[int]:
    """Numbers of rows at which csrc/cuda/*.cu changes the launch on this GPU, and the next ones."""
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    edges = [multiprocessors * factor // 4 for factor in (1, 2, 4, 8, 16, 192)]
    return [edge + d for edge in edges for d in (0, 1)]


@every_dtype
@with_and_without
@pytest.mark.parametrize("vocab_size", WIDTHS)
def test_any_number_of_rows_in_any_place(
    dtype: torch.dtype, temperature: bool, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype)
    expected = alone(case, temperature)
    sizes = [size for size in (*SIZES, *launch_sizes()) if size <= WIDTHS[vocab_size]]
    assert sum(sizes) >= 10_000
    tally = Tally()
    for seed, size in enumerate(sizes):
        rows = choice(size, seed)
        actual = run(case.rows(rows), temperature)
        tally.add(actual, rows_of(expected, rows), f"{size} rows")
    tally.check(sum(sizes))


@every_dtype
@with_and_without
@pytest.mark.parametrize("vocab_size", [7, 2051, 50257])
@pytest.mark.parametrize("shape", [(8, 8), (2, 17, 19)], ids=["few rows", "many rows"])
def test_any_layout(
    dtype: torch.dtype, temperature: bool, vocab_size: int, shape: tuple[int, ...]
) -> None:
    case = varied_rows(vocab_size, dtype)
    expected = alone(case, temperature)
    rows = choice(torch.Size(shape).numel()).view(shape)
    tally = Tally()
    for layout in ["contiguous", *LAYOUTS]:
        strided = case.rows(rows)
        strided = strided._replace(logits=relaid(strided.logits, layout))
        tally.add(run(strided, temperature), rows_of(expected, rows), layout)
    tally.check((1 + len(LAYOUTS)) * rows.numel())


@every_dtype
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("vocab_size", [7, 2048, 2051])
def test_any_alignment_of_the_logits(
    dtype: torch.dtype, temperature: bool, size: int, vocab_size: int
) -> None:
    """Every place in a 128-byte line, which copies start at."""
    case = varied_rows(vocab_size, dtype)
    rows = choice(size)
    expected = rows_of(alone(case, temperature), rows)
    case = case.rows(rows)
    offsets = range(128 // dtype.itemsize + 1)
    tally = Tally()
    for offset in offsets:
        shifted = Guarded((size, vocab_size), dtype, before=offset).tensor.copy_(case.logits)
        actual = run(case._replace(logits=shifted), temperature)
        tally.add(actual, expected, f"{offset} elements past a line")
    tally.check(len(offsets) * size)


@every_dtype
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
def test_any_alignment_of_the_gradient_beside_that_of_the_logits(
    dtype: torch.dtype, temperature: bool, size: int
) -> None:
    vocab_size = 2051
    case = varied_rows(vocab_size, dtype)
    rows = choice(size)
    expected = rows_of(alone(case, temperature), rows)
    case = case.rows(rows)
    results = Result(*(torch.full_like(t, torch.nan) for t in expected))
    tally = Tally()
    for offset in range(9):
        logits = Guarded((size, vocab_size), dtype, before=offset).tensor.copy_(case.logits)
        for place in range(9):
            # Rows 2056 elements apart keep their alignment.
            dlogits = Guarded((size, vocab_size), dtype, before=place, stride=2056).tensor
            actual = results._replace(dlogits=dlogits)
            divisor = case.temperature if temperature else None
            call_out(case._replace(logits=logits), *actual, temperature=divisor)
            tally.add(actual, expected, f"logits {offset}, dlogits {place} past a line")
    tally.check(81 * size)


@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("vocab_size", [7, 2051, 50257])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_any_dtype_that_holds_the_values(
    dtype: torch.dtype, vocab_size: int, size: int, temperature: bool
) -> None:
    case = varied_rows(vocab_size, torch.float32).rows(choice(size))
    # Multiples of 1/8 below 16 are numbers of all three.
    eighths = case.logits.clamp(-15, 15).mul(8).round().div(8)
    case = case._replace(logits=torch.where(case.logits.isinf(), case.logits, eighths))
    low = case._replace(logits=case.logits.to(dtype))
    assert torch.equal(low.logits.float(), case.logits)
    expected = run(case, temperature)
    expected = expected._replace(dlogits=expected.dlogits.to(dtype))  # rounded once
    tally = Tally()
    tally.add(run(low, temperature), expected, str(dtype))
    tally.check(size)


@every_dtype
@with_and_without
@pytest.mark.parametrize("size", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("vocab_size", [1, 7, 2051, 50257])
def test_any_padding_of_the_vocabulary(
    dtype: torch.dtype, temperature: bool, size: int, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype)
    rows = choice(size)
    expected = rows_of(alone(case, temperature), rows)
    case = case.rows(rows)
    widths = [1, 3, 16, 61, 1000]
    tally = Tally()
    for padding in widths:
        padded = torch.nn.functional.pad(case.logits, (0, padding), value=-torch.inf)
        actual = run(case._replace(logits=padded), temperature)
        assert not actual.dlogits[:, vocab_size:].any(), "the padding has a gradient"
        actual = actual._replace(dlogits=actual.dlogits[:, :vocab_size])
        tally.add(actual, expected, f"{padding} columns of padding")
    tally.check(len(widths) * size)
