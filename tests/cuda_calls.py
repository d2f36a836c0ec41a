"""What the CUDA tests share: rows of every kind, buffers between guard bands, a count of rows."""

import math
from typing import Any, NamedTuple, Optional

import pytest
import torch
from calls import Call, Result, Sample, call, kernel_serves, no_host_sync, sample
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
OPS = torch.ops.rl_logp


class WeightedResult(NamedTuple):
    """What the kernels write where an entropy is wanted; ``mean`` is E[y]."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor
    mean: Tensor
    dlogits: Tensor


# For a parameter ``kind``: what is computed, and so which kernels are launched.
KINDS = {"fused_logp": Result, "fused_logp_entropy": WeightedResult}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

# A NaN of each size that nothing computes.
_GUARD = {2: 0x7FDE, 4: 0x7FDEAD0D, 8: 0x7FFEAD0DDEADBEEF}


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


def grad_entropy_of(case: Sample) -> Tensor:
    """The entropy's upstream gradient: of a third of the rows 0, whatever the others of a row."""
    return (case.temperature - 1).masked_fill(case.target % 3 == 0, 0)


def call_weighted(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    grad_logp: Tensor,
    grad_lse: Tensor,
    grad_entropy: Tensor,
) -> WeightedResult:
    """As calls.call_with_entropy, by the operators themselves, which return the mean too."""
    row = (logits, target, temperature)
    with no_host_sync(logits.device):
        logp, entropy, lse, mean = OPS.fused_logp_entropy_forward(*row)
        grads = (grad_logp, grad_entropy, grad_lse)
        dlogits = OPS.fused_logp_entropy_backward(*grads, *row, lse, mean, 0, logits.shape[-1])
    return WeightedResult(logp, lse, entropy, mean, dlogits)


def run(case: Sample, temperature: bool = True, kind: type = Result) -> Any:
    """All of a kind, with the sample's temperature or without one: a kernel each."""
    divisor = case.temperature if temperature else None
    args = (case.logits, case.target, divisor, case.grad_logp, case.grad_lse)
    return call(*args) if kind is Result else call_weighted(*args, grad_entropy_of(case))


def each_row_alone(case: Sample, function: Call) -> Any:
    """Every row's results in a call of its own: what all others are compared with."""
    rows = [function(case.rows(slice(row, row + 1))) for row in range(len(case.target))]
    return type(rows[0])(*(torch.cat(tensors) for tensors in zip(*rows, strict=True)))


def alone(case: Sample, temperature: bool = True, kind: type = Result) -> Any:
    return each_row_alone(case, lambda row: run(row, temperature, kind))


def choice(rows: int, seed: int = 0, device: str = "cuda") -> Tensor:
    """Which of 64 rows stands where in a batch of ``rows``."""
    return torch.randint(ROWS, (rows,), generator=torch.Generator().manual_seed(seed)).to(device)


def launch_sizes() -> list[int]:
    """Numbers of rows at which csrc/cuda/*.cu changes the launch on this GPU, and the next ones."""
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    edges = [multiprocessors * factor // 4 for factor in (1, 2, 4, 8, 16, 192)]
    return [edge + d for edge in edges for d in (0, 1)]


def call_out(
    case: Sample,
    results: Any,
    *,
    temperature: Optional[Tensor] = None,
    all_rows: bool = True,
    grad_entropy: Optional[Tensor] = None,
) -> None:
    """Has the kernels write these results. The temperature is not the sample's.

    The gradient may be the logits themselves, which are read before they are written.
    """
    row = (case.target, temperature)
    shard = (0, case.logits.shape[-1])
    means, entropies = (), ()
    if isinstance(results, WeightedResult):
        means = (results.entropy, results.mean)
        upstream = grad_entropy_of(case) if grad_entropy is None else grad_entropy
        entropies = (upstream, results.mean)
    OPS._fused_logp_forward_out(case.logits, *row, all_rows, results.logp, results.lse, *means)
    OPS._fused_logp_backward_out(
        case.grad_logp,
        case.grad_lse,
        case.logits,
        *row,
        results.lse,
        *shard,
        results.dlogits,
        *entropies,
    )


def poisoned(results: Any) -> Any:
    """As many results, all NaN."""
    return type(results)(*(torch.full_like(t, torch.nan) for t in results))


class Tally:
    """Counts the rows that were compared, and those of which any bit differs.

    A comparison is all results of one row in one call against the same row's in another.
    """

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0
        self.first = ""

    def add(self, actual: Any, expected: Any, what: str) -> None:
        assert type(actual) is type(expected), what
        rows = expected.logp.numel()
        same = torch.ones(rows, dtype=torch.bool, device=expected.logp.device)
        for name, a, e in zip(expected._fields, actual, expected, strict=True):
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


def first_difference(actual: Any, expected: Any, what: str) -> str:
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
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
