"""C15 on CUDA at the width of a vocabulary: there torch's softmax is another kernel than the ones
that tests/test_c15_chunked.py sees, which has the rest on CUDA too."""

import pytest
import torch
from calls import DTYPES, Result, assert_same_bits, sample
from test_c15_chunked import CHUNK_ROWS, in_chunks, unchunked
from torch import Tensor

from rl_logp import chunked
from rl_logp.testing import assert_bitwise_equal

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


def entropy_in_chunks(logits: Tensor, target: Tensor, chunk_rows: int | None) -> dict[str, Tensor]:
    logp, entropy = (target.new_full(target.shape, 7, dtype=torch.float32) for _ in range(2))
    lse, mean = (target.new_full(target.shape, 7, dtype=torch.float64) for _ in range(2))
    row, dlogits, g = (logits, target, None), torch.full_like(logits, 7), torch.ones_like(logp)
    chunked.forward(*row, logp, lse, chunk_rows, entropy, mean)
    shard = (0, logits.shape[-1])
    chunked.backward(g, None, *row, lse, *shard, dlogits, chunk_rows, grad_entropy=g, mean=mean)
    return {"logp": logp, "entropy": entropy, "lse": lse, "mean": mean, "dlogits": dlogits}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [8191, 50257])
@pytest.mark.parametrize("chunk_rows", CHUNK_ROWS)
def test_no_chunk_reaches_an_entropy(dtype: torch.dtype, vocab_size: int, chunk_rows: int) -> None:
    case = sample((2, 65, vocab_size), dtype, "cuda")
    whole = entropy_in_chunks(*case[:2], None)
    cut = entropy_in_chunks(*case[:2], chunk_rows)
    assert whole.keys() == cut.keys()
    for name, expected in whole.items():
        assert_bitwise_equal(cut[name], expected, f"{name} in chunks of {chunk_rows}")
