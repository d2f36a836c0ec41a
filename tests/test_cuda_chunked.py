"""C15 on CUDA at the width of a vocabulary: there torch's softmax is another kernel than the ones
that tests/test_c15_chunked.py sees, which has the rest on CUDA too."""

import pytest
import torch
from calls import DTYPES, Result, assert_same_bits, sample
from test_c15_chunked import CHUNK_ROWS, in_chunks, unchunked

from rl_logp import chunked

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [8191, 16384, 50257, 151936])
@pytest.mark.parametrize("chunk_rows", CHUNK_ROWS)
@pytest.mark.parametrize("shape", [(130,), (2, 65)], ids=str)
@pytest.mark.parametrize("form", ["no temperature", "a row"])
def test_any_chunk_has_the_bits_of_torch_on_all_rows(
    dtype: torch.dtype, vocab_size: int, chunk_rows: int, shape: tuple[int, ...], form: str
) -> None:
    """In an odd vocabulary torch sums a row in an order that depends on the row's alignment."""
    case = sample((*shape, vocab_size), dtype, "cuda")
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
