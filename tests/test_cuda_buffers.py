"""What the kernels write: every element of their results, nothing beside them, and zeros where a
row's logits are not needed. The buffers are the caller's and hold NaN before."""

from typing import Any

import pytest
import torch
from calls import DTYPES, Sample, assert_same_bits, rows_of
from cuda_calls import (
    Guarded,
    WeightedResult,
    call_out,
    choice,
    cuda_kernel,
    every_kind,
    grad_entropy_of,
    launch_sizes,
    poisoned,
    run,
    varied_rows,
)
from torch import Tensor

pytestmark = cuda_kernel

ops = torch.ops.rl_logp
OF_ROWS = {
    "logp": torch.float32,
    "lse": torch.float64,
    "entropy": torch.float32,
    "mean": torch.float64,
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
few_and_many = pytest.mark.parametrize("rows", [9, 641], ids=["few rows", "many rows"])
with_and_without = pytest.mark.parametrize(
    "temperature", [False, True], ids=["no temperature", "temperature"]
)

# One column; less than what a thread moves; about a line; a tile and more, odd and even.
VOCAB_SIZES = [1, 2, 7, 15, 16, 17, 63, 64, 65, 511, 512, 513, 2051, 4096, 8200]


def guarded(
    case: Sample, kind: Any, *, before: int = 64, stride: int | None = None
) -> dict[str, Guarded]:
    """A buffer for each result of a kind."""
    rows = tuple(case.target.shape)
    buffers = {
        name: Guarded((1, *rows), OF_ROWS[name], before=before) for name in kind._fields[:-1]
    }
    dlogits = Guarded(tuple(case.logits.shape), case.logits.dtype, before=before, stride=stride)
    return buffers | {"dlogits": dlogits}


def fill(
    case: Sample,
    kind: Any,
    buffers: dict[str, Guarded],
    temperature: bool,
    all_rows: bool = True,
    grad_entropy: Tensor | None = None,
) -> Any:
    *of_rows, dlogits = (buffers[name].tensor for name in kind._fields)
    result = kind(*(tensor[0] for tensor in of_rows), dlogits)
    divisor = case.temperature if temperature else None
    call_out(case, result, temperature=divisor, all_rows=all_rows, grad_entropy=grad_entropy)
    return result


def check(buffers: dict[str, Guarded]) -> None:
    for name, buffer in buffers.items():
        buffer.check(name)


@every_kind
@every_dtype
@few_and_many
@with_and_without
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_everything_is_written_and_nothing_beside_it(
    kind: Any, dtype: torch.dtype, rows: int, temperature: bool, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case, temperature, kind)
    line = 128 // dtype.itemsize
    gaps = [(64, 0), (65, 1), (63, 3), (70, 8), (64 + line // 2, line - 1), (1, 64)]
    for before, gap in gaps:
        buffers = guarded(case, kind, before=before, stride=vocab_size + gap)
        result = fill(case, kind, buffers, temperature)
        check(buffers)
        assert_same_bits(result, expected, f"{before} elements in, {gap} between rows")


@every_kind
@every_dtype
@with_and_without
def test_so_it_is_of_rows_that_a_warp_or_two_take(
    kind: Any, dtype: torch.dtype, temperature: bool
) -> None:
    rows = launch_sizes()[-1]
    case = varied_rows(67, dtype).rows(choice(rows))
    buffers = guarded(case, kind, before=65, stride=71)
    result = fill(case, kind, buffers, temperature)
    check(buffers)
    assert_same_bits(result, run(case, temperature, kind), f"{rows} rows")


@every_kind
@every_dtype
@with_and_without
@pytest.mark.parametrize("shape", [(1, 9), (7, 5), (3, 17, 13)], ids=str)
def test_so_it_is_in_more_dimensions(
    kind: Any, dtype: torch.dtype, temperature: bool, shape: tuple[int, ...]
) -> None:
    case = varied_rows(515, dtype).rows(choice(torch.Size(shape).numel()).view(shape))
    buffers = guarded(case, kind, before=67, stride=531)
    result = fill(case, kind, buffers, temperature)
    check(buffers)
    assert_same_bits(result, run(case, temperature, kind), str(shape))


@every_kind
@every_dtype
@few_and_many
@with_and_without
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_in_place_only_the_logits_are_written(
    kind: Any, dtype: torch.dtype, rows: int, temperature: bool, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case, temperature, kind)
    divisor = case.temperature if temperature else None
    for before, gap in [(64, 0), (65, 1), (63, 8), (1, 61)]:
        buffer = Guarded((rows, vocab_size), dtype, before=before, stride=vocab_size + gap)
        buffer.tensor.copy_(case.logits)
        result = poisoned(expected)._replace(dlogits=buffer.tensor)
        call_out(case._replace(logits=buffer.tensor), result, temperature=divisor)
        buffer.check("the logits")
        assert_same_bits(result, expected, f"{before} elements in, {gap} between rows")


@every_kind
@every_dtype
@few_and_many
@with_and_without
@pytest.mark.parametrize("vocab_size", [7, 515, 8200])
def test_states_and_their_sum_are_written_and_nothing_beside_them(
    kind: Any, dtype: torch.dtype, rows: int, temperature: bool, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case, temperature, kind)
    divisor = case.temperature if temperature else None
    words = 13 if kind is WeightedResult else 8
    for before in (64, 63):  # a state is a multiple of 8 bytes, and no more
        states = Guarded((rows, words), torch.int64, before=before)
        ops._fused_logp_partial_out(
            case.logits, case.target, divisor, True, 0, vocab_size, states.tensor
        )
        states.check("states")
        buffers = guarded(case, kind, before=before)
        of_rows = [buffers[name].tensor[0] for name in kind._fields[:-1]]
        ops._fused_logp_combine_out(states.tensor[None], case.target, vocab_size, *of_rows)
        buffers.pop("dlogits")
        check(buffers)
        actual = kind._make([*of_rows, expected.dlogits])
        assert_same_bits(actual, expected, f"states {before} words in")


def without(case: Sample, rows: Tensor, why: str) -> Sample:
    """Some rows ignored or without an upstream gradient. Those that need not be read are NaN."""
    logits = case.logits.masked_fill(rows.unsqueeze(-1), torch.nan)
    if why == "ignored":
        return case._replace(
            logits=logits,
            target=case.target.masked_fill(rows, -100),
            grad_lse=case.grad_lse.masked_fill(rows, 0),
        )
    zero = [t.masked_fill(rows, 0) for t in (case.grad_logp, case.grad_lse)]
    return case._replace(logits=logits, grad_logp=zero[0], grad_lse=zero[1])


@every_kind
@every_dtype
@few_and_many
@with_and_without
@pytest.mark.parametrize("why", ["ignored", "no upstream gradient"])
@pytest.mark.parametrize("which", ["half", "all", "all but one"])
@pytest.mark.parametrize("vocab_size", [7, 515, 8200])
def test_rows_that_need_not_be_read_are_written_with_zeros(
    kind: Any,
    dtype: torch.dtype,
    rows: int,
    temperature: bool,
    why: str,
    which: str,
    vocab_size: int,
) -> None:
    """The entropy's forward reads all rows; its backward, what has an upstream gradient."""
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case, temperature, kind)
    index = torch.arange(rows, device="cuda")
    masked = {"half": index % 2 == 1, "all": index >= 0, "all but one": index != 4}[which]
    weighted = kind is WeightedResult
    buffers = guarded(case, kind, before=69, stride=vocab_size + 11)
    # Otherwise the lse of ignored rows is asked for, and they are NaN.
    result = fill(
        without(case, masked, why),
        kind,
        buffers,
        temperature,
        all_rows=weighted,
        grad_entropy=grad_entropy_of(case).masked_fill(masked, 0),
    )
    for name, buffer in buffers.items():
        if weighted or name != "lse":
            buffer.check(name)
    assert not result.dlogits[masked].any()
    if why == "ignored":
        assert not result.logp[masked].any()
    if weighted:
        assert bool(result.entropy[masked].isnan().all()), "a row of NaN is not an entropy"
    read = ~masked if weighted else ~masked & (case.target >= 0)
    assert_same_bits(rows_of(result, read), rows_of(expected, read), "the rows that are read")


@every_kind
@every_dtype
@few_and_many
def test_the_backward_alone_writes_any_part_of_the_vocabulary(
    kind: Any, dtype: torch.dtype, rows: int
) -> None:
    vocab_size = 528
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case, kind=kind)
    weighted = kind is WeightedResult
    entropies = (grad_entropy_of(case), expected.mean) if weighted else ()
    shards = [(0, 16), (16, 48), (48, 512), (512, 528)]
    for start, end in shards:
        shard = case.logits[:, start:end]
        buffer = Guarded((rows, end - start), dtype, before=66, stride=vocab_size + 3)
        in_place = Guarded((rows, end - start), dtype, before=66, stride=vocab_size + 3)
        in_place.tensor.copy_(shard)
        for logits, dlogits in ((shard, buffer), (in_place.tensor, in_place)):
            ops._fused_logp_backward_out(
                case.grad_logp,
                case.grad_lse,
                logits,
                case.target,
                case.temperature,
                expected.lse,
                start,
                vocab_size,
                dlogits.tensor,
                *entropies,
            )
            dlogits.check(f"columns {start} to {end}")
            actual = expected._replace(dlogits=dlogits.tensor)
            whole = expected._replace(dlogits=expected.dlogits[:, start:end])
            assert_same_bits(actual, whole, f"columns {start} to {end}")


@every_kind
@every_dtype
@pytest.mark.parametrize("temperature", ["none", "0-dim", "a row"])
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64], ids=str)
def test_the_schemas_say_what_is_written(
    kind: Any, dtype: torch.dtype, temperature: str, target_dtype: torch.dtype
) -> None:
    """opcheck of the operators that tests/test_opcheck.py cannot run without a kernel."""
    case = varied_rows(19, dtype)
    divisor = {"none": None, "0-dim": case.temperature[0], "a row": case.temperature}[temperature]
    row = (case.target.to(target_dtype), divisor)
    results = run(case, kind=kind)
    of_rows = [getattr(results, name) for name in kind._fields[:-1]]
    entropies = (grad_entropy_of(case), results.mean) if kind is WeightedResult else ()
    for all_rows in (False, True):
        forward = (case.logits, *row, all_rows, *of_rows)
        opcheck(ops._fused_logp_forward_out.default, *forward)
        states = torch.empty(len(case.target), 13 if entropies else 8, dtype=torch.int64)
        partial = (case.logits, *row, all_rows, 0, 19, states.to(case.logits.device))
        opcheck(ops._fused_logp_partial_out.default, *partial)
    ops._fused_logp_partial_out(*partial)
    opcheck(ops._fused_logp_combine_out.default, partial[-1][None], row[0], 19, *of_rows)
    for grads in (case[3:], (None, case.grad_lse), (case.grad_logp, None), (None, None)):
        backward = (*grads, case.logits, *row, results.lse, 0, 19, results.dlogits, *entropies)
        opcheck(ops._fused_logp_backward_out.default, *backward)


def opcheck(op, *args: Tensor | int | bool | None) -> None:
    torch.library.opcheck(op, args, test_utils=("test_schema",))
