"""C15: the fallback has the bits of torch's unchunked fp32 functions, for any chunk size."""

from math import prod
from typing import Optional

import pytest
import torch
from calls import DTYPES, LAYOUTS, Result, Sample, assert_same_bits, relaid, sample
from torch import Tensor

from rl_logp import chunked

# 130 = 43 * 3 + 1 = 18 * 7 + 4 = 2 * 64 + 2 rows: every size but 1 leaves an uneven tail.
CHUNK_ROWS = [1, 3, 7, 64, 1000]
SHAPES = [(130,), (2, 65), (26, 5), (2, 5, 13), (65, 1, 2)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_chunk = pytest.mark.parametrize("chunk_rows", CHUNK_ROWS)


def unchunked(case: Sample, temperature: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """logp and dlogits by torch on all rows at once, written as the contract writes them."""
    y = case.logits.float()
    divisor = None if temperature is None else temperature.unsqueeze(-1)
    if divisor is not None:
        y = y / divisor
    ignored = (case.target < 0).unsqueeze(-1)
    column = case.target.unsqueeze(-1).masked_fill(ignored, 0)
    logp = torch.log_softmax(y, -1).gather(-1, column).masked_fill(ignored, 0).squeeze(-1)
    one_hot = torch.zeros_like(y, memory_format=torch.contiguous_format).scatter_(-1, column, 1)
    dlogits = (torch.softmax(y, -1) - one_hot) * -case.grad_logp.unsqueeze(-1)
    if divisor is not None:
        dlogits = dlogits / divisor
    unreached = ignored | (case.grad_logp == 0).unsqueeze(-1)
    return logp, dlogits.masked_fill(unreached, 0).to(case.logits.dtype)


def in_chunks(
    case: Sample, temperature: Optional[Tensor], chunk_rows: Optional[int], grad_lse: bool = False
) -> Result:
    """The fallback itself, which need not be what serves this device."""
    logp, lse = torch.full_like(case.grad_logp, 7), torch.full_like(case.grad_lse, 7)
    dlogits = torch.full(case.logits.shape, 7, dtype=case.logits.dtype, device=case.logits.device)
    arguments = (case.logits, case.target, temperature)
    chunked.forward(*arguments, logp, lse, chunk_rows)
    chunked.backward(
        case.grad_logp,
        case.grad_lse if grad_lse else None,
        *arguments,
        lse,
        0,
        case.logits.shape[-1],
        dlogits,
        chunk_rows,
    )
    return Result(logp, lse, dlogits)


@every_dtype
@every_chunk
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["no temperature", "0-dim", "per row"])
def test_any_chunk_has_the_bits_of_torch_on_all_rows(
    device: str, dtype: torch.dtype, chunk_rows: int, shape: tuple[int, ...], form: str
) -> None:
    case = sample((*shape, 257), dtype, device)
    assert prod(shape) == 130
    temperature = {
        "no temperature": None,
        "0-dim": case.temperature[(0,) * len(shape)],
        "per row": case.temperature,
    }[form]
    result = in_chunks(case, temperature, chunk_rows)
    logp, dlogits = unchunked(case, temperature)
    assert_same_bits(result, Result(logp, result.lse, dlogits), f"chunks of {chunk_rows}")


@every_dtype
@every_chunk
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_logits_too(device: str, dtype: torch.dtype, chunk_rows: int, layout: str) -> None:
    case = sample((10, 13, 2051), dtype, device)
    logp, dlogits = unchunked(case, case.temperature)
    case = case._replace(logits=relaid(case.logits, layout))
    result = in_chunks(case, case.temperature, chunk_rows)
    assert_same_bits(result, Result(logp, result.lse, dlogits), layout)


@every_dtype
@every_chunk
def test_lse_and_its_gradient_do_not_see_the_chunks(
    device: str, dtype: torch.dtype, chunk_rows: int
) -> None:
    case = sample((130, 257), dtype, device)
    whole = in_chunks(case, case.temperature, None, grad_lse=True)
    cut = in_chunks(case, case.temperature, chunk_rows, grad_lse=True)
    assert_same_bits(cut, whole, f"chunks of {chunk_rows}")


@every_chunk
@pytest.mark.parametrize("start", [0, 48])
def test_a_shards_gradient_does_not_see_the_chunks(
    device: str, chunk_rows: int, start: int
) -> None:
    case = sample((130, 96), torch.bfloat16, device)
    lse = in_chunks(case, case.temperature, None).lse
    results = []
    for rows in (None, chunk_rows):
        shard = case.logits[:, start : start + 48]
        dlogits = torch.full_like(shard, 7)
        chunked.backward(
            *case[3:], shard, case.target, case.temperature, lse, start, 96, dlogits, rows
        )
        results.append(Result(lse, lse, dlogits))
    assert_same_bits(results[1], results[0], f"chunks of {chunk_rows}")


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 4, 5, 6, 7, 64])
@pytest.mark.parametrize(
    "shape", [*SHAPES, (3, 4), (1, 1, 7), (3, 0), (0,), (0, 3), (4, 2, 0)], ids=str
)
def test_chunks_are_all_rows_in_order_and_few(shape: tuple[int, ...], chunk_rows: int) -> None:
    index = torch.arange(prod(shape)).view(shape)
    pieces = [index[rows].flatten() for rows in chunked.row_chunks(shape, chunk_rows)]
    assert torch.equal(torch.cat([index.new_empty(0), *pieces]), index.flatten())
    assert all(0 < piece.numel() <= chunk_rows for piece in pieces)
    # Rows of a strided tensor need not fold into one dimension, so a chunk stays in one slice.
    smallest = next(
        (prod(shape[i:]) for i in range(len(shape)) if prod(shape[i:]) <= chunk_rows), 1
    )
    assert not pieces or len(pieces) <= 2 * prod(shape) / max(smallest, chunk_rows // 2, 1) + 1
