"""C11 on the kernels: more elements, rows and distance between rows than 32 or 16 bits can count.

tests/test_c11_offsets.py has the row of more than 2^31 columns.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import DTYPES, Result, assert_same_bits, call_with_entropy, rows_of, sample
from cuda_calls import (
    Tally,
    WeightedResult,
    alone,
    call_out,
    choice,
    cuda_kernel,
    every_kind,
    grad_entropy_of,
    poisoned,
    run,
    varied_rows,
)
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal

pytestmark = cuda_kernel

OPS = torch.ops.rl_logp


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


@every_kind
@pytest.mark.parametrize(("rows", "vocab_size", "dtype"), LARGE)
def test_every_row_of_a_large_batch_has_its_bits(
    kind: type, rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    """And again where the gradient takes the logits' place."""
    need(2 * rows * vocab_size * dtype.itemsize + 2**33)
    pool = varied_rows(vocab_size, dtype)
    expected = alone(pool, kind=kind)
    index = choice(rows)
    chunks = [slice(start, start + 4096) for start in range(0, rows, 4096)]
    logits = torch.empty(rows, vocab_size, dtype=dtype, device="cuda")
    for chunk in chunks:
        logits[chunk] = pool.logits[index[chunk]]
    case = pool._replace(logits=logits, **{n: getattr(pool, n)[index] for n in pool._fields[1:]})
    tally = Tally()
    actual: Any = run(case, kind=kind)
    for in_place in (False, True):
        if in_place:
            actual = poisoned(actual._replace(dlogits=torch.empty(0, device="cuda")))
            actual = actual._replace(dlogits=logits)
            call_out(case, actual, temperature=case.temperature)
        for chunk in chunks:
            what = f"rows {chunk}{', in place' * in_place}"
            tally.add(rows_of(actual, chunk), rows_of(expected, index[chunk]), what)
    tally.check(2 * rows)


@every_kind
@pytest.mark.parametrize("rows", [2**20 + 3, 2**27 + 5], ids=["past 2^20", "past the grid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_column(kind: type, rows: int, dtype: torch.dtype) -> None:
    """logp is 0, lse is the column, and what is left of the gradient is that of lse."""
    need(120 * rows + 2**31)
    arange = torch.arange(rows, device="cuda")
    logits = (arange % 251 - 125).to(dtype).unsqueeze(-1)
    target = (arange % 3).sub_(1).int()  # two of three are ignored
    grad_logp = (arange % 5 - 2).float()
    grad_lse = (arange % 7 - 3).double()
    del arange
    row = (logits, target, None)
    if kind is WeightedResult:
        logp, entropy, lse, mean = OPS.fused_logp_entropy_forward(*row)
        assert not entropy.any()
        assert torch.equal(mean, lse)
        grads = (grad_logp, grad_logp, grad_lse)
        dlogits = OPS.fused_logp_entropy_backward(*grads, *row, lse, mean, 0, 1)
        del entropy, mean
    else:
        logp, lse = OPS.fused_logp_forward(*row, True)
        dlogits = OPS.fused_logp_backward(grad_logp, grad_lse, *row, lse, 0, 1)
    assert not logp.any()
    assert torch.equal(lse, logits.squeeze(-1).double())
    del logp, lse, row
    assert torch.equal(dlogits.squeeze(-1), grad_lse.to(dtype))
    del dlogits
    lse = logits.squeeze(-1).double()
    OPS.fused_logp_backward_(grad_logp, grad_lse, logits, target, None, lse, 0, 1)
    assert torch.equal(logits.squeeze(-1), grad_lse.to(dtype)), "in place"


def test_as_many_columns_as_an_entropy_may_have() -> None:
    """All but the last are 0, so that what they weigh is known."""
    columns = 2**30
    need(3 * 2 * columns + 2**30)
    last = 20.75  # a number of bf16, and about the logarithm of the others' number
    logits = torch.zeros(1, columns, dtype=torch.bfloat16, device="cuda")
    logits[0, -1] = last
    target = torch.tensor([columns - 1], device="cuda")
    g = torch.ones(1, device="cuda")
    logp, entropy, lse, dlogits = call_with_entropy(logits, target, None, 0 * g, None, g)
    total = columns - 1 + math.exp(last)
    p = math.exp(last) / total
    mean = last * p
    assert lse.item() == pytest.approx(math.log(total), abs=1e-7)
    assert logp.item() == pytest.approx(math.log(p), rel=3e-7)
    assert entropy.item() == pytest.approx(math.log(total) - mean, rel=3e-7)
    assert dlogits[0, -1].item() == pytest.approx(-p * (last - mean), rel=2**-8)
    first = dlogits[0, 0].item()
    assert first == pytest.approx(mean / total, rel=2**-8)
    for piece in dlogits[0, :-1].split(2**27):
        assert bool((piece == first).all())
    halves = [logits[:, : columns // 2], logits[:, columns // 2 :]]
    starts = (0, columns // 2)
    states = torch.stack(
        [
            OPS.fused_logp_entropy_partial(half, target, None, start, columns)
            for half, start in zip(halves, starts, strict=True)
        ]
    )
    merged = OPS.fused_logp_entropy_combine(states, target, columns)
    whole = {"logp": logp, "entropy": entropy, "lse": lse}
    for (name, wanted), actual in zip(whole.items(), merged[:3], strict=True):
        assert_bitwise_equal(actual, wanted, f"{name} of two halves")


def test_an_entropy_of_more_columns_is_refused() -> None:
    columns = 2**30 + 1
    need(2 * columns + 2**30)
    logits = torch.empty(1, columns, dtype=torch.bfloat16, device="cuda")
    target = torch.tensor([0], device="cuda")
    message = f"fused_logp: expected at most 2\\^30 columns for an entropy, got {columns}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        rl_logp.fused_logp_entropy(logits, target)
    with pytest.raises(ValueError, match=f"^{message}$"):
        rl_logp.fused_entropy(logits)
    with pytest.raises(ValueError, match=f"^{message}$"):
        rl_logp.vocab_parallel_logp_entropy(logits, target)


GAP = 2**31 + 8  # elements from a row to the next


def far_apart(tensor: Tensor) -> Tensor:
    """The same rows, each further from the last than an int can say."""
    columns = tensor[0].numel()
    need((GAP + columns) * tensor.element_size() + 2**30)  # most of which is never touched
    base = torch.empty(GAP + columns, dtype=tensor.dtype, device="cuda")
    view = base.as_strided(tensor.shape, (GAP, 1)[: tensor.dim()])
    return view.copy_(tensor)


@every_kind
@pytest.mark.parametrize("argument", ["logits", "target", "temperature", "grad_logp", "grad_lse"])
def test_rows_of_any_argument_far_apart(kind: type, argument: str) -> None:
    case = sample((2, 515), torch.bfloat16, "cuda")
    case = case._replace(target=case.target.int())
    expected = run(case, kind=kind)
    distant = case._replace(**{argument: far_apart(getattr(case, argument))})
    assert getattr(distant, argument).stride(0) == GAP
    assert_same_bits(run(distant, kind=kind), expected, f"rows of {argument} far apart")


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        pytest.param(Result, "lse", id="lse"),
        pytest.param(WeightedResult, "lse", id="lse, for the entropy"),
        pytest.param(WeightedResult, "mean", id="mean"),
        pytest.param(WeightedResult, "grad_entropy", id="grad_entropy"),
    ],
)
def test_rows_of_what_the_backward_alone_takes_far_apart(kind: type, argument: str) -> None:
    case = sample((2, 515), torch.bfloat16, "cuda")
    expected = run(case, kind=kind)
    taken = {"lse": expected.lse, "grad_entropy": grad_entropy_of(case)}
    taken["mean"] = getattr(expected, "mean", expected.lse)
    taken[argument] = far_apart(taken[argument])
    assert taken[argument].stride(0) == GAP
    lse, grad_entropy, mean = taken.values()
    row = (*case[:3], lse)
    if kind is WeightedResult:
        grads = (case.grad_logp, grad_entropy, case.grad_lse)
        dlogits = OPS.fused_logp_entropy_backward(*grads, *row, mean, 0, 515)
    else:
        dlogits = OPS.fused_logp_backward(*case[3:], *row, 0, 515)
    assert_same_bits(expected._replace(dlogits=dlogits), expected, f"rows of {argument} far apart")


@every_kind
@pytest.mark.parametrize("in_place", [False, True], ids=["beside the logits", "in their place"])
def test_rows_of_the_gradient_far_apart(kind: type, in_place: bool) -> None:
    case = sample((2, 515), torch.bfloat16, "cuda")
    expected = run(case, kind=kind)
    results = poisoned(expected)
    results = results._replace(dlogits=far_apart(results.dlogits))
    if in_place:
        case = case._replace(logits=results.dlogits.copy_(case.logits))
    call_out(case, results, temperature=case.temperature)
    assert_same_bits(results, expected, "rows of dlogits far apart")
