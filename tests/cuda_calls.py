"""What the CUDA tests share: rows of every kind, buffers between guard bands, a count of rows."""

import math
from typing import Optional

import pytest
import torch
from calls import Result, Sample, call, kernel_serves, sample
from torch import Tensor

from rl_logp.testing import assert_bitwise_equal, bits

# For `pytestmark` of a file whose tests are about the compiled kernels.
cuda_kernel = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not kernel_serves("cuda", torch.bfloat16),
        reason="the CUDA kernels are not built: make build-cuda",
    ),
]

ROWS = 64

# A NaN of each size that nothing computes.
_GUARD = {2: 0x7FDE, 4: 0x7FDEAD0D, 8: 0x7FDEAD0DDEADBEEF}


def varied_rows(vocab_size: int, dtype: torch.dtype, device: str = "cuda", seed: int = 0) -> Sample:
    """64 rows of every kind that the kernels treat apart, none of which makes a NaN.

    Every fifth is ignored, and every seventh has no upstream gradient (calls.sample).
    """
    case = sample((ROWS, vocab_size), torch.float32, seed=seed)
    logits = case.logits
    logits[2::8] *= 64  # one column is nearly all of the row
    logits[3::8] *= 2000  # beyond what the fast arithmetic takes
    logits[4::8] += 300
    logits[5::8] = 1.5  # all equal
    logits[6::8, 0] = 200  # one column is all of the row
    logits[7::8] *= 2.0**30  # beyond what differences of y can say
    limit = torch.finfo(dtype).max
    logits.clamp_(-limit, limit)
    masked = torch.rand(logits[1::8].shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    masked[:, 0] = False
    logits[1::8] = logits[1::8].masked_fill(masked, -torch.inf)
    return Sample(*(t.to(device) for t in case._replace(logits=logits.to(dtype))))


def run(case: Sample, temperature: bool = True) -> Result:
    """``call`` with the sample's temperature or without one: two kernels."""
    divisor = case.temperature if temperature else None
    return call(case.logits, case.target, divisor, case.grad_logp, case.grad_lse)


def alone(case: Sample, temperature: bool = True) -> Result:
    """Every row's results in a call of its own: what all others are compared with."""
    rows = (run(case.rows(slice(row, row + 1)), temperature) for row in range(len(case.target)))
    return Result(*(torch.cat(tensors) for tensors in zip(*rows, strict=True)))


def choice(rows: int, seed: int = 0, device: str = "cuda") -> Tensor:
    """Which of 64 rows stands where in a batch of ``rows``."""
    return torch.randint(ROWS, (rows,), generator=torch.Generator().manual_seed(seed)).to(device)


def call_out(
    case: Sample,
    logp: Tensor,
    lse: Tensor,
    dlogits: Tensor,
    *,
    temperature: Optional[Tensor] = None,
    all_rows: bool = True,
) -> None:
    """Has the kernels write these tensors. The temperature is not the sample's."""
    row = (case.target, temperature)
    columns = case.logits.shape[-1]
    torch.ops.rl_logp._fused_logp_forward_out(case.logits, *row, all_rows, logp, lse)
    torch.ops.rl_logp._fused_logp_backward_out(
        case.grad_logp, case.grad_lse, case.logits, *row, lse, 0, columns, dlogits
    )


class Tally:
    """Counts the rows that were compared, and those of which any bit differs.

    A comparison is one row's logp, lse and dlogits in one call against the same row's in another.
    """

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0
        self.first = ""

    def add(self, actual: Result, expected: Result, what: str) -> None:
        rows = expected.logp.numel()
        same = torch.ones(rows, dtype=torch.bool, device=expected.logp.device)
        for name, a, e in zip(Result._fields, actual, expected, strict=True):
            assert a.shape == e.shape, f"{what}: {name} of shape {a.shape}, expected {e.shape}"
            assert a.dtype == e.dtype, f"{what}: {name} of {a.dtype}, expected {e.dtype}"
            same &= (bits(a) == bits(e)).reshape(rows, -1).all(-1)
        self.compared += rows
        differing = rows - int(same.sum())
        self.differing += differing
        if differing and not self.first:
            self.first = first_difference(actual, expected, what)

    def check(self, expected: int) -> None:
        assert self.compared == expected, "comparisons are missing"
        assert not self.differing, (
            f"{self.differing} of {self.compared} rows differ; first: {self.first}"
        )


def first_difference(actual: Result, expected: Result, what: str) -> str:
    for name, a, e in zip(Result._fields, actual, expected, strict=True):
        try:
            assert_bitwise_equal(a, e, f"{what}: {name}")
        except AssertionError as error:
            return str(error)
    return ""


class Guarded:
    """A tensor within a larger buffer that is filled with one NaN, which nothing else makes.

    ``stride`` counts elements from a row to the next, which are all in one dimension; ``before``
    elements lie before the first.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        before: int = 64,
        stride: Optional[int] = None,
        device: str = "cuda",
    ) -> None:
        *rows, columns = shape
        stride = columns if stride is None else stride
        count = math.prod(rows)
        self.guard = _GUARD[dtype.itemsize]
        integers = bits(torch.empty(0, dtype=dtype)).dtype
        size = before + max(0, count - 1) * stride + columns + 64
        self.buffer = torch.full((size,), self.guard, dtype=integers, device=device)
        strides = [stride * math.prod(rows[dim + 1 :]) for dim in range(len(rows))]
        self.place = (shape, (*strides, 1), before)
        self.tensor = self.buffer.view(dtype).as_strided(*self.place)

    def check(self, what: str) -> None:
        """Raises AssertionError unless all of the tensor was written, and nothing around it."""
        kept = self.buffer == self.guard
        unwritten = int(kept.as_strided(*self.place).sum())
        assert not unwritten, f"{what}: {unwritten} of {self.tensor.numel()} values not written"
        kept.as_strided(*self.place).fill_(True)
        written = (~kept).nonzero().flatten().tolist()
        assert not written, f"{what}: written outside of it, at {written[:8]} of {self.place}"
