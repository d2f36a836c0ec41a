"""What the kernels write: every element of their results, nothing beside them, and zeros where a
row's logits are not needed. The buffers are the caller's and hold NaN before."""

import pytest
import torch
from calls import DTYPES, Result, Sample, assert_same_bits, rows_of
from cuda_calls import Guarded, call_out, choice, cuda_kernel, run, varied_rows
from torch import Tensor

pytestmark = cuda_kernel

ops = torch.ops.rl_logp

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
few_and_many = pytest.mark.parametrize("rows", [9, 641], ids=["few rows", "many rows"])
with_and_without = pytest.mark.parametrize(
    "temperature", [False, True], ids=["no temperature", "temperature"]
)

# One column; less than what a thread moves; about a line; a tile and more, odd and even.
VOCAB_SIZES = [1, 2, 7, 15, 16, 17, 63, 64, 65, 511, 512, 513, 2051, 4096, 8200]


def guarded(case: Sample, *, before: int = 64, stride: int | None = None) -> list[Guarded]:
    """Buffers for logp, lse and dlogits."""
    rows = tuple(case.target.shape)
    return [
        Guarded((1, *rows), torch.float32, before=before),
        Guarded((1, *rows), torch.float64, before=before),
        Guarded(tuple(case.logits.shape), case.logits.dtype, before=before, stride=stride),
    ]


def fill(case: Sample, buffers: list[Guarded], temperature: bool, all_rows: bool = True) -> Result:
    logp, lse, dlogits = (buffer.tensor for buffer in buffers)
    result = Result(logp[0], lse[0], dlogits)
    divisor = case.temperature if temperature else None
    call_out(case, *result, temperature=divisor, all_rows=all_rows)
    return result


def check(buffers: list[Guarded]) -> None:
    for name, buffer in zip(Result._fields, buffers, strict=True):
        buffer.check(name)


@every_dtype
@few_and_many
@with_and_without
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_everything_is_written_and_nothing_beside_it(
    dtype: torch.dtype, rows: int, temperature: bool, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case, temperature)
    line = 128 // dtype.itemsize
    gaps = [(64, 0), (65, 1), (63, 3), (70, 8), (64 + line // 2, line - 1), (1, 64)]
    for before, gap in gaps:
        buffers = guarded(case, before=before, stride=vocab_size + gap)
        result = fill(case, buffers, temperature)
        check(buffers)
        assert_same_bits(result, expected, f"{before} elements in, {gap} between rows")


@every_dtype
@with_and_without
@pytest.mark.parametrize("shape", [(1, 9), (7, 5), (3, 17, 13)], ids=str)
def test_so_it_is_in_more_dimensions(
    dtype: torch.dtype, temperature: bool, shape: tuple[int, ...]
) -> None:
    case = varied_rows(515, dtype).rows(choice(torch.Size(shape).numel()).view(shape))
    buffers = guarded(case, before=67, stride=531)
    result = fill(case, buffers, temperature)
    check(buffers)
    assert_same_bits(result, run(case, temperature), str(shape))


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


@every_dtype
@few_and_many
@with_and_without
@pytest.mark.parametrize("why", ["ignored", "no upstream gradient"])
@pytest.mark.parametrize("which", ["half", "all", "all but one"])
@pytest.mark.parametrize("vocab_size", [7, 515, 8200])
def test_rows_that_need_not_be_read_are_written_with_zeros(
    dtype: torch.dtype, rows: int, temperature: bool, why: str, which: str, vocab_size: int
) -> None:
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case, temperature)
    index = torch.arange(rows, device="cuda")
    masked = {"half": index % 2 == 1, "all": index >= 0, "all but one": index != 4}[which]
    buffers = guarded(case, before=69, stride=vocab_size + 11)
    # Otherwise the lse of ignored rows is asked for, and they are NaN.
    result = fill(without(case, masked, why), buffers, temperature, all_rows=False)
    buffers[0].check("logp")
    buffers[2].check("dlogits")
    assert not result.dlogits[masked].any()
    if why == "ignored":
        assert not result.logp[masked].any()
    read = ~masked & (case.target >= 0)
    assert_same_bits(rows_of(result, read), rows_of(expected, read), "the rows that are read")


@every_dtype
@few_and_many
def test_the_backward_alone_writes_any_part_of_the_vocabulary(
    dtype: torch.dtype, rows: int
) -> None:
    vocab_size = 528
    case = varied_rows(vocab_size, dtype).rows(choice(rows))
    expected = run(case)
    shards = [(0, 16), (16, 48), (48, 512), (512, 528)]
    for start, end in shards:
        buffer = Guarded((rows, end - start), dtype, before=66, stride=vocab_size + 3)
        ops._fused_logp_backward_out(
            case.grad_logp,
            case.grad_lse,
            case.logits[:, start:end],
            case.target,
            case.temperature,
            expected.lse,
            start,
            vocab_size,
            buffer.tensor,
        )
        buffer.check(f"columns {start} to {end}")
        actual = expected._replace(dlogits=buffer.tensor)
        whole = expected._replace(dlogits=expected.dlogits[:, start:end])
        assert_same_bits(actual, whole, f"columns {start} to {end}")


@every_dtype
@pytest.mark.parametrize("temperature", ["none", "0-dim", "a row"])
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64], ids=str)
def test_the_schemas_say_what_is_written(
    dtype: torch.dtype, temperature: str, target_dtype: torch.dtype
) -> None:
    """opcheck of the two operators that tests/test_opcheck.py cannot run without a kernel."""
    case = varied_rows(19, dtype)
    divisor = {"none": None, "0-dim": case.temperature[0], "a row": case.temperature}[temperature]
    row = (case.target.to(target_dtype), divisor)
    logp, lse, dlogits = run(case)
    for all_rows in (False, True):
        forward = (case.logits, *row, all_rows, logp, lse)
        opcheck(ops._fused_logp_forward_out.default, *forward)
    for grads in (case[3:], (None, case.grad_lse), (case.grad_logp, None), (None, None)):
        backward = (*grads, case.logits, *row, lse, 0, 19, dlogits)
        opcheck(ops._fused_logp_backward_out.default, *backward)


def opcheck(op, *args: Tensor | int | bool | None) -> None:
    torch.library.opcheck(op, args, test_utils=("test_schema",))
