"""C1: a row's bits are a function of that row alone: values, target, temperature, upstream."""

import calls
import pytest
import torch
from calls import DTYPES, LAYOUTS, Call, Sample, assert_same_bits, relaid, rows_of, sample
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal

N = 37
# One column; fewer than a vector register; odd and past torch's one-warp softmax; a multiple of 16.
VOCAB_SIZES = [1, 7, 2051, 4096]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_vocab = pytest.mark.parametrize("vocab_size", VOCAB_SIZES)


@every_dtype
@every_vocab
def test_a_row_alone_has_the_bits_it_has_among_others(
    call: Call, device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    case = sample((N, vocab_size), dtype, device)
    whole = call(*case)
    for row in range(N):
        alone = call(*case.rows(slice(row, row + 1)))
        assert_same_bits(alone, rows_of(whole, slice(row, row + 1)), f"row {row}")


@every_dtype
@every_vocab
def test_rows_keep_their_bits_in_any_order_and_company(
    call: Call, device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    case = sample((N, vocab_size), dtype, device)
    whole = call(*case)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).to(device)
    assert_same_bits(call(*case.rows(order)), rows_of(whole, order), "permuted")
    kept = order[: N // 3]
    assert_same_bits(call(*case.rows(kept)), rows_of(whole, kept), "others dropped")
    others = torch.full_like(case.logits, torch.nan)
    others[kept] = case.logits[kept]
    among_nan = rows_of(call(others, *case[1:]), kept)
    assert_same_bits(among_nan, rows_of(whole, kept), "the others set to NaN")


@every_dtype
@every_vocab
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_reach_the_bits(
    call: Call, device: str, dtype: torch.dtype, vocab_size: int, layout: str
) -> None:
    case = sample((5, 7, vocab_size), dtype, device)
    whole = call(*case)
    assert_same_bits(call(relaid(case.logits, layout), *case[1:]), whole, layout)


@pytest.mark.parametrize("rows", [(35,), (1, 35), (7, 5), (5, 1, 7)], ids=str)
def test_leading_dimensions_do_not_reach_the_bits(
    call: Call, device: str, rows: tuple[int, ...]
) -> None:
    case = sample((5, 7, 257), torch.bfloat16, device)
    whole = call(*case)
    folded = call(case.logits.reshape(*rows, 257), *(t.reshape(rows) for t in case[1:]))
    flat = type(whole)(
        *(t.reshape(whole_t.shape) for t, whole_t in zip(folded, whole, strict=True))
    )
    assert_same_bits(flat, whole, f"rows {rows}")


@pytest.mark.parametrize(
    ("dtype", "value", "temperature"),
    [
        (torch.float32, "0x1.c57166p+0", "0x1.e75296p+0"),
        (torch.bfloat16, "0x1.8ep+0", "0x1.a15686p+0"),
    ],
    ids=["fp32", "bf16"],
)
def test_a_quotient_near_halfway_has_one_gradient_wherever_its_row_begins(
    device: str, dtype: torch.dtype, value: str, temperature: str
) -> None:
    """x / T is as near to halfway between two fp32 numbers as a quotient can be."""
    vocab_size, lse = 300, 4.0
    divisor = torch.tensor(float.fromhex(temperature), dtype=torch.float32, device=device)
    base = torch.full((vocab_size + 64,), float.fromhex(value), dtype=dtype, device=device)
    row = {"dtype": torch.float64, "device": device}
    gradients = {
        offset: torch.ops.rl_logp.fused_logp_backward(
            None, torch.ones(1, **row), base[offset : offset + vocab_size].unsqueeze(0),
            torch.full((1,), -1, device=device), divisor, torch.full((1,), lse, **row),
            0, vocab_size,
        )
        for offset in range(64)
    }  # fmt: skip
    for offset, gradient in gradients.items():
        assert_bitwise_equal(gradient, gradients[0], f"{offset} elements further")
        columns = gradient[:, :1].expand_as(gradient)
        assert_bitwise_equal(gradient, columns, f"equal columns, {offset} elements further")


def test_one_dimensional_logits_have_the_bits_of_a_row(call: Call, device: str) -> None:
    case = sample((3, 257), torch.bfloat16, device)
    for row in range(3):
        assert_same_bits(call(*case.rows(row)), rows_of(call(*case), row), f"row {row} as 1-D")


@every_dtype
def test_expanded_arguments_have_the_bits_of_their_copies(
    call: Call, device: str, dtype: torch.dtype
) -> None:
    one = sample((1, 257), dtype, device)
    expanded = Sample(one.logits.expand(9, 257), *(t.expand(9) for t in one[1:]))
    copied = Sample(*(t.contiguous() for t in expanded))
    assert expanded.logits.stride(0) == 0
    assert_same_bits(call(*expanded), call(*copied), "expanded")


def test_strided_row_arguments_have_the_bits_of_their_copies(call: Call, device: str) -> None:
    case = sample((8, 257), torch.bfloat16, device)
    every_third = (torch.stack([t] * 3, dim=-1).flatten()[::3] for t in case[1:])
    assert_same_bits(call(case.logits, *every_third), call(*case), "strided row arguments")


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64], ids=str)
def test_target_dtype_does_not_reach_the_bits(
    call: Call, device: str, target_dtype: torch.dtype
) -> None:
    case = sample((N, 257), torch.bfloat16, device)
    other = case._replace(target=case.target.to(target_dtype))
    assert_same_bits(call(*other), call(*case), str(target_dtype))


@every_dtype
def test_grad_mode_and_return_lse_do_not_reach_the_bits(device: str, dtype: torch.dtype) -> None:
    case = sample((N, 257), dtype, device)
    expected = calls.call(*case)

    def logp(logits: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, case.target, temperature=case.temperature)

    assert_bitwise_equal(logp(case.logits), expected.logp, "no leaf requires grad")
    leaf = case.logits.clone().requires_grad_()
    assert_bitwise_equal(logp(leaf).detach(), expected.logp, "a leaf requires grad")
    with torch.no_grad():
        assert_bitwise_equal(logp(leaf), expected.logp, "no_grad")
    with torch.inference_mode():
        assert_bitwise_equal(logp(leaf), expected.logp, "inference_mode")
        assert_bitwise_equal(logp(case.logits + 0), expected.logp, "an inference tensor")


@pytest.mark.parametrize("way", ["again", "deterministic algorithms", "two threads", "autocast"])
def test_the_run_does_not_reach_the_bits(call: Call, device: str, way: str) -> None:
    case = sample((N, 2051), torch.bfloat16, device)
    expected = call(*case)
    threads = torch.get_num_threads()
    try:
        if way == "deterministic algorithms":
            torch.use_deterministic_algorithms(True)
        elif way == "two threads":
            torch.set_num_threads(2)
        with torch.autocast(device, torch.bfloat16, enabled=way == "autocast"):
            assert_same_bits(call(*case), expected, way)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


@every_dtype
def test_a_zero_lse_gradient_has_the_bits_of_none(
    call: Call, device: str, dtype: torch.dtype
) -> None:
    """Whether other rows need the gradient of lse must not be seen in this one."""
    case = sample((N, 257), dtype, device)
    case.logits[0, 3] = 300.0 if dtype == torch.float16 else 3e4  # p is exactly 1
    case.target[0] = 3
    none = call(*case[:4])
    zero = call(*case._replace(grad_lse=torch.zeros_like(case.grad_lse)))
    assert_same_bits(zero, none, "grad_lse of 0")
    some = torch.zeros_like(case.grad_lse)
    some[N // 2 :] = 1
    half = slice(0, N // 2)
    assert_same_bits(
        rows_of(call(*case._replace(grad_lse=some)), half), rows_of(none, half), "others' grad_lse"
    )
