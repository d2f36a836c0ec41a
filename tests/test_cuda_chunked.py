"""C15 on CUDA at the width of a vocabulary: there torch's softmax is another kernel than the ones
that tests/test_c15_chunked.py sees, which has the rest on CUDA too."""

import pytest
import torch
from calls import DTYPES, Result, assert_same_bits, sample
from test_c15_chunked import CHUNK_ROWS, in_chunks, unchunked

from rl_logp import chunked

pytestmark = pytest.mark.cuda

# Where rows have an odd number of columns, torch's kernel sums a row in an order that depends on
# its alignment. Chunks of a multiple of 4 rows, as the default ones are, leave every row its own.
WIDTHS = [
    (vocab_size, chunk_rows)
    for vocab_size in (8191, 16384, 50257, 151936)
    for chunk_rows in (CHUNK_ROWS if vocab_size % 4 == 0 else [4, 64, 1000])
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "chunk_rows"), WIDTHS)
@pytest.mark.parametrize("form", ["no temperature", "a row"])
def test_any_chunk_has_the_bits_of_torch_on_all_rows(
    dtype: torch.dtype, vocab_size: int, chunk_rows: int, form: str
) -> None:
    case = sample((130, vocab_size), dtype, "cuda")
    temperature = case.temperature if form == "a row" else None
    result = in_chunks(case, temperature, chunk_rows)
    logp, dlogits = unchunked(case, temperature)
    assert_same_bits(result, Result(logp, result.lse, dlogits), f"chunks of {chunk_rows}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_more_rows_than_a_default_chunk(dtype: torch.dtype) -> None:
    rows = chunked.default_chunk_rows(50257, dtype) + 5
    case = sample((rows, 50257), dtype, "cuda")
    result = in_chunks(case, None, None)
    logp, dlogits = unchunked(case, None)
    assert_same_bits(result, Result(logp, result.lse, dlogits), f"{rows} rows")
