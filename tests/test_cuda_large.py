"""C11 on the kernels: more elements, rows and distance between rows than 32 or 16 bits can count.

tests/test_c11_offsets.py has the row of more than 2^31 columns.
"""

from collections.abc import Iterator

import pytest
import torch
from calls import DTYPES, Result, assert_same_bits, call, rows_of, sample
from cuda_calls import Tally, alone, call_out, choice, cuda_kernel, run, varied_rows
from torch import Tensor

pytestmark = cuda_kernel


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """These tests need most of a GPU, and leave none of it reserved."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def need(size: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size} bytes of GPU memory, {free} are free")


LARGE = [
    pytest.param(16400, 131072, torch.float32, id="N*V past 2^31, fp32"),
    pytest.param(65539, 65539, torch.bfloat16, id="N*V past 2^32, unaligned rows"),
    pytest.param(65537, 131072, torch.bfloat16, id="N*V past 2^33, N past 65535"),
    pytest.param(200_003, 33, torch.float32, id="N past 3 * 65535"),
    pytest.param(200_003, 33, torch.bfloat16, id="N past 3 * 65535, unaligned rows"),
]


@pytest.mark.parametrize(("rows", "vocab_size", "dtype"), LARGE)
def test_every_row_of_a_large_batch_has_its_bits(
    rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    need(2 * rows * vocab_size * dtype.itemsize + 2**33)
    pool = varied_rows(vocab_size, dtype)
    expected = alone(pool)
    index = choice(rows)
    chunks = [slice(start, start + 4096) for start in range(0, rows, 4096)]
    logits = torch.empty(rows, vocab_size, dtype=dtype, device="cuda")
    for chunk in chunks:
        logits[chunk] = pool.logits[index[chunk]]
    actual = call(logits, *(t[index] for t in pool[1:]))
    tally = Tally()
    for chunk in chunks:
        tally.add(rows_of(actual, chunk), rows_of(expected, index[chunk]), f"rows {chunk}")
    tally.check(rows)


@pytest.mark.parametrize("rows", [2**20 + 3, 2**27 + 5], ids=["past 2^20", "past the grid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_column(rows: int, dtype: torch.dtype) -> None:
    """logp is 0, lse is the column, and what is left of the gradient is that of lse."""
    need(80 * rows + 2**31)
    arange = torch.arange(rows, device="cuda")
    logits = (arange % 251 - 125).to(dtype).unsqueeze(-1)
    target = (arange % 3).sub_(1).int()  # two of three are ignored
    grad_logp = (arange % 5 - 2).float()
    grad_lse = (arange % 7 - 3).double()
    del arange
    logp, lse, dlogits = call(logits, target, None, grad_logp, grad_lse)
    assert not logp.any()
    assert torch.equal(lse, logits.squeeze(-1).double())
    del logp, lse, logits
    assert torch.equal(dlogits.squeeze(-1), grad_lse.to(dtype))


GAP = 2**31 + 8  # elements from a row to the next


def far_apart(tensor: Tensor) -> Tensor:
    """The same rows, each further from the last than an int can say."""
    columns = tensor[0].numel()
    need((GAP + columns) * tensor.element_size() + 2**30)  # most of which is never touched
    base = torch.empty(GAP + columns, dtype=tensor.dtype, device="cuda")
    view = base.as_strided(tensor.shape, (GAP, 1)[: tensor.dim()])
    return view.copy_(tensor)


@pytest.mark.parametrize("argument", ["logits", "target", "temperature", "grad_logp", "grad_lse"])
def test_rows_of_any_argument_far_apart(argument: str) -> None:
    case = sample((2, 515), torch.bfloat16, "cuda")
    case = case._replace(target=case.target.int())
    expected = call(*case)
    distant = case._replace(**{argument: far_apart(getattr(case, argument))})
    assert getattr(distant, argument).stride(0) == GAP
    assert_same_bits(run(distant), expected, f"rows of {argument} far apart")


def test_rows_of_the_saved_lse_far_apart() -> None:
    case = sample((2, 515), torch.bfloat16, "cuda")
    expected = call(*case)
    row = (case.target, case.temperature, far_apart(expected.lse))
    dlogits = torch.ops.rl_logp.fused_logp_backward(*case[3:], case.logits, *row, 0, 515)
    assert_same_bits(expected._replace(dlogits=dlogits), expected, "rows of lse far apart")


def test_rows_of_the_gradient_far_apart() -> None:
    case = sample((2, 515), torch.bfloat16, "cuda")
    expected = call(*case)
    results = Result(*(torch.full_like(t, torch.nan) for t in expected))
    results = results._replace(dlogits=far_apart(results.dlogits))
    call_out(case, *results, temperature=case.temperature)
    assert_same_bits(results, expected, "rows of dlogits far apart")
