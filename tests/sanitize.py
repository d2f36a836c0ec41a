"""Every kernel on small inputs, for `make sanitize`: compute-sanitizer runs this file.

    compute-sanitizer --tool racecheck python tests/sanitize.py            # all of it
    compute-sanitizer --tool racecheck python tests/sanitize.py "few rows" shards

No pytest, and few launches: the tools slow each of them down. All tensors are made on the CPU and
copied, so that torch launches nothing: initcheck then sees the project's kernels alone. It sees
what they leave unwritten, too, when the results are copied back. Every tensor is an allocation of
its own, so that a read past a tensor's end is one past the end of an allocation.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, Optional

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # is read at the first allocation
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = torch.ops.rl_logp


class Place(NamedTuple):
    """Where a matrix lies in its allocation, in elements."""

    before: int = 0
    gap: int = 0  # between rows
    after: int = 0


class Case(NamedTuple):
    rows: int
    columns: int
    logits: Place = Place()
    dlogits: Place = Place()


def cases() -> Iterator[tuple[str, Case]]:
    """Shapes for every launch of csrc/cuda/*.cu. Odd rows bring every alignment."""
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    many = 4 * processors + 2  # rows, for the forward and the backward
    yield "a row over 8 blocks", Case(2, 64 * 512 + 5)
    yield "a row over 4 blocks", Case(processors // 4, 32 * 512 + 3)
    yield "a row over 2 blocks", Case(2, 16 * 512)
    yield "few rows", Case(9, 1031)
    yield "many rows", Case(many, 523)
    yield "rows a warp each", Case(48 * processors + 2, 67)
    yield "many tiles", Case(processors + 1, 4 * 4096 + 1)
    yield "rows shorter than a group", Case(many, 7)
    yield "rows of one column", Case(many, 1)
    yield "more rows than a grid has", Case(65537, 1)
    yield "strided, aligned", Case(many, 520, Place(gap=8), Place(gap=16))
    yield "logits misaligned", Case(9, 1040, Place(before=3, gap=8), Place())
    yield "gradient misaligned", Case(9, 1040, Place(), Place(before=5, gap=8, after=1))
    yield "both, not alike", Case(many, 520, Place(1, 9, 2), Place(before=6, gap=3))


def placed(values: Tensor, place: Place) -> Tensor:
    """The matrix on the GPU, at its place in an allocation that is full of zeros otherwise."""
    rows, columns = values.shape
    stride = columns + place.gap
    size = place.before + (rows - 1) * stride + columns + place.after
    base = torch.zeros(size, dtype=values.dtype)
    at = (values.shape, (stride, 1), place.before)
    base.as_strided(*at).copy_(values)
    return base.cuda().as_strided(*at)


def logits_of(case: Case, dtype: torch.dtype) -> Tensor:
    """Rows of every kind: plain, masked, beyond the fast arithmetic, infinite and NaN."""
    values = 4 * torch.randn(case.rows, case.columns)
    values[1::8, 1:] = -torch.inf
    values[2::8] *= 2000
    values[3::8] *= 2.0**30
    values[4::16, 0] = torch.nan
    values[12::16, 0] = torch.inf
    return placed(values.to(dtype), case.logits)


def launch(case: Case, dtype: torch.dtype, divisor: Optional[Tensor], flip: bool) -> int:
    """A forward, a backward, states and their sum, or two of each where rows are few.

    Then the same with an entropy, and a backward in place: with one if ``flip``, else without.
    Returns how many launches."""
    logits = logits_of(case, dtype)
    target = torch.arange(case.rows) * 7 % (case.columns + 2) - 1  # some are ignored
    target = target.to(torch.int64 if flip else torch.int32).cuda()
    grad_logp = torch.randn(case.rows)
    grad_lse = torch.randn(case.rows, dtype=torch.float64)
    for grad in (grad_logp, grad_lse):
        grad[::3] = 0
    grads = [(grad_logp.cuda(), grad_lse.cuda()), (grad_logp.cuda(), None)]
    logp = lse = dlogits = torch.empty(0)
    ways = (False, True) if case.rows < 100 else (flip,)
    for all_rows in ways:
        logp, lse = of_rows(case.rows, 2)
        OPS._fused_logp_forward_out(logits, target, divisor, all_rows, logp, lse)
        dlogits = gradient_buffer(case, dtype)
        OPS._fused_logp_backward_out(
            *grads[all_rows], logits, target, divisor, lse, 0, case.columns, dlogits
        )
        assert bool((logp.cpu()[target.cpu() < 0] == 0).all())
        lse.cpu()
        assert bool((allocation(dlogits)[::3] == 0).all())
        of_states, *_ = of_whole_states(logits, target, divisor, all_rows, 8)
        assert_same_bits(of_states, logp)
    entropy_grads = (*grads[flip], grad_entropy_of(grad_logp).cuda())
    with_entropy = launch_weighted(case, logits, (target, divisor), entropy_grads, logp, flip)
    if flip:
        return 4 * len(ways) + with_entropy
    last = grads[ways[-1]]
    OPS._fused_logp_backward_out(*last, logits, target, divisor, lse, 0, case.columns, logits)
    scored = (target.cpu() >= 0) & (target.cpu() < case.columns)  # others may have no lse
    assert_same_bits(allocation(logits)[scored], allocation(dlogits)[scored])
    return 4 * len(ways) + with_entropy + 1


def grad_entropy_of(grad_logp: Tensor) -> Tensor:
    """0 in some of the rows whose other gradients are, and in some of those whose are not."""
    grad_entropy = torch.ones_like(grad_logp)
    grad_entropy[::3], grad_entropy[::6], grad_entropy[1::6] = 2, 0, 0
    return grad_entropy


def launch_weighted(
    case: Case,
    logits: Tensor,
    row: tuple[Tensor, Optional[Tensor]],
    grads: tuple[Tensor, Optional[Tensor], Tensor],
    logp_alone: Tensor,
    in_place: bool,
) -> int:
    """With an entropy: a forward, states and their sum, and a backward."""
    logp, lse, entropy, mean = of_rows(case.rows, 4)
    OPS._fused_logp_forward_out(logits, *row, True, logp, lse, entropy, mean)
    assert_same_bits(logp, logp_alone)
    of_states = of_whole_states(logits, *row, True, 13)
    for actual, expected in zip(of_states, (logp, lse, entropy, mean), strict=True):
        assert_same_bits(actual, expected)
    dlogits = logits if in_place else gradient_buffer(case, logits.dtype)
    OPS._fused_logp_backward_out(
        *grads[:2], logits, *row, lse, 0, case.columns, dlogits, grads[2], mean
    )
    assert bool((allocation(dlogits)[::6] == 0).all())
    return 4


def of_rows(rows: int, count: int) -> tuple[Tensor, ...]:
    """logp and lse, or those, entropy and mean: not written yet."""
    dtypes = (torch.float32, torch.float64) * (count // 2)
    return tuple(torch.empty(rows, dtype=dtype, device="cuda") for dtype in dtypes)


def of_whole_states(
    logits: Tensor, target: Tensor, divisor: Optional[Tensor], all_rows: bool, words: int
) -> tuple[Tensor, ...]:
    """Results through the states of a shard that is the whole vocabulary."""
    rows, columns = logits.shape
    states = torch.empty(1, rows, words, dtype=torch.int64, device="cuda")
    OPS._fused_logp_partial_out(logits, target, divisor, all_rows, 0, columns, states)
    results = of_rows(rows, 4 if words == 13 else 2)
    OPS._fused_logp_combine_out(states, target, columns, *results)
    return tuple(result.cpu() for result in results)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Compared on the CPU, so that torch launches nothing."""
    assert_bitwise_equal(actual.cpu(), expected.cpu(), any_nan=True)


def gradient_buffer(case: Case, dtype: torch.dtype) -> Tensor:
    """Not written yet, where nothing lies between its rows: initcheck sees what remains so."""
    if case.dlogits == Place():
        return torch.empty(case.rows, case.columns, dtype=dtype, device="cuda")
    return placed(torch.full((case.rows, case.columns), torch.nan, dtype=dtype), case.dlogits)


def allocation(matrix: Tensor) -> Tensor:
    """A copy on the CPU of all its allocation, which needs no kernel; then the matrix in it."""
    at = (matrix.shape, matrix.stride(), matrix.storage_offset())
    size = matrix.untyped_storage().nbytes() // matrix.element_size()
    return matrix.as_strided((size,), (1,), 0).cpu().as_strided(*at)


def temperatures(rows: int) -> Tensor:
    """One a row, the last beyond what the fast division takes."""
    temperature = torch.linspace(0.5, 2.0, rows)
    temperature[-1] = 2.0**-30
    return temperature.cuda()


def shard(dtype: torch.dtype, divisor: Optional[Tensor]) -> int:
    """Columns 16 to 64 of 80, whose target may lie elsewhere; their states, merged with others."""
    logits = placed(torch.randn(9, 48).to(dtype), Place(before=16, gap=32, after=16))
    dlogits = torch.empty(9, 48, dtype=dtype, device="cuda")
    target = (torch.arange(9) * 11).cuda()
    grad, lse = torch.randn(9).cuda(), torch.full((9,), 5.0, dtype=torch.float64).cuda()
    OPS._fused_logp_backward_out(grad, None, logits, target, divisor, lse, 16, 80, dlogits)
    assert bool(dlogits.cpu().isfinite().all())
    mean = torch.full((9,), 1.0, dtype=torch.float64).cuda()
    entropies = (torch.ones(9).cuda(), mean)
    OPS._fused_logp_backward_out(
        grad, None, logits, target, divisor, lse, 16, 80, dlogits, *entropies
    )
    assert bool(dlogits.cpu().isfinite().all())
    for words in (8, 13):
        states = torch.empty(2, 9, words, dtype=torch.int64, device="cuda")
        OPS._fused_logp_partial_out(logits, target, divisor, words == 13, 16, 80, states[0])
        OPS._fused_logp_partial_out(logits, target, divisor, True, 64, 112, states[1])
        logp, *others = of_rows(9, 4 if words == 13 else 2)
        OPS._fused_logp_combine_out(states, target, 80, logp, *others)
        assert bool((logp.cpu()[target.cpu() >= 80] == 0).all())
        for result in others:
            result.cpu()
    return 8


def of_case(case: Case) -> int:
    launches = 0
    for index, (dtype, divided) in enumerate(product(DTYPES, (False, True))):
        divisor = temperatures(case.rows) if divided else None
        launches += launch(case, dtype, divisor, flip=(index + index // 2) % 2 == 1)
        if case.rows > 65535:
            break  # the loop over rows is the same for all, and blocks are slow under a tool
    return launches


def of_shards() -> int:
    divisors = (None, torch.linspace(0.5, 2.0, 9).cuda())
    return sum(shard(dtype, divisor) for dtype, divisor in product(DTYPES, divisors))


def main(wanted: list[str]) -> None:
    """``wanted``: names of what to launch; none: everything."""
    torch.manual_seed(0)
    rl_logp.require_kernel("cuda", torch.bfloat16)
    runs: dict[str, Callable[[], int]] = {name: partial(of_case, case) for name, case in cases()}
    runs["shards"] = of_shards
    unknown = set(wanted) - runs.keys()
    if unknown:
        sys.exit(f"sanitize.py: expected names among {list(runs)}, got {sorted(unknown)}")
    launches = 0
    for name in wanted or runs:
        print(name, flush=True)
        launches += runs[name]()
    print(f"{launches} launches")


if __name__ == "__main__":
    main(sys.argv[1:])
