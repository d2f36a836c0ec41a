"""C11: offsets are 64-bit: row strides, N*V and V itself. (N*V past 2^31 is in test_cases.py.)"""

from itertools import pairwise

import pytest
import torch
from calls import Call, assert_same_bits, sample

from rl_logp import chunked


@pytest.mark.parametrize("gap", [2**30, 2**31 - 8, 2**31 + 8])
def test_rows_further_apart_than_an_int_can_say(call: Call, device: str, gap: int) -> None:
    """bf16 rows whose offsets in bytes or elements pass 2^31, in memory that is never touched."""
    case = sample((2, 64), torch.bfloat16, device)
    try:
        base = torch.empty(gap + 64, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError, or the CPU allocator's plain one
        pytest.skip(f"this machine cannot reserve {2 * gap} bytes: {error}")
    logits = base.as_strided((2, 64), (gap, 1))
    logits.copy_(case.logits)
    assert_same_bits(call(logits, *case[1:]), call(*case), f"rows {gap} elements apart")


def test_chunks_of_more_rows_than_an_int_can_say() -> None:
    rows = list(chunked.row_chunks((2**40, 3), 2**39))
    assert rows[0] == (slice(0, 2**39 // 3),)
    assert rows[-1][0].stop == 2**40
    assert all(a[0].stop == b[0].start for a, b in pairwise(rows))


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [2**31 - 1, 2**31 + 5])
def test_a_vocabulary_of_more_columns_than_an_int_can_say(columns: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * 2 * columns:
        pytest.skip(f"needs {10 * columns} bytes of GPU memory, {free} are free")
    logits = torch.full((1, columns), -torch.inf, dtype=torch.bfloat16, device="cuda")
    logits[0, 0] = logits[0, -1] = 1.0
    target = torch.tensor([columns - 1], device="cuda")
    leaf = logits.requires_grad_()
    logp, lse = torch.ops.rl_logp.fused_logp_forward(leaf, target, None, True)
    torch.testing.assert_close(logp.item(), -0.6931472, rtol=0, atol=1e-7)
    torch.testing.assert_close(lse.item(), 1.6931472, rtol=0, atol=1e-6)
    (dlogits,) = torch.autograd.grad(logp.sum(), leaf)
    assert dlogits[0, [0, 1, columns // 2, columns - 2, columns - 1]].tolist() == [
        -0.5,
        0,
        0,
        0,
        0.5,
    ]
