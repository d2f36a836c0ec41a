"""States of shards: what they hold, what they combine to, and that their order is nothing."""

import itertools
import math

import calls
import pytest
import torch
from calls import (
    DTYPES,
    LAYOUTS,
    Call,
    Result,
    Sample,
    assert_same_bits,
    call,
    exact,
    kernel_serves,
    relaid,
    rows_of,
    sample,
)
from shards import EMPTY, OPS, call_in_shards, even_cuts, states_of
from test_c08_special_values import ROWS, row_of
from test_c09_memory import peak_bytes
from torch import Tensor

from rl_logp import chunked, partial
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal

# From 2^29, |y| is beyond what sums are kept for: largest values are counted instead.
WIDE = 2.0**29


def words(states: Tensor, dtype: torch.dtype, index: int) -> Tensor:
    """One field of states: words, or halves of words, lower first."""
    return states.contiguous().view(dtype)[..., index]


def sum_of(state: list[int]) -> float:
    """The sum that a state's counters hold, in Python's integers, relative to 2^(32 * top)."""
    return math.fsum([state[1], state[2] * 2.0**-32, state[3] * 2.0**-64])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1, 25, 2000], ids=["usual", "wide", "beyond the fast range"])
def test_a_state_holds_what_is_documented(device: str, dtype: torch.dtype, scale: int) -> None:
    case = sample((11, 96), dtype, device)
    logits = case.logits * scale
    states = states_of(logits, case.target, case.temperature, (0, 32, 96))
    assert states.shape == (2, 11, 8)
    assert states.dtype == torch.int64
    y = logits.float() / case.temperature.unsqueeze(-1)
    for shard, (start, end) in enumerate([(0, 32), (32, 96)]):
        state, here = states[shard], (case.target >= start) & (case.target < end)
        of_shard = y[:, start:end]
        largest, column = of_shard.max(-1)
        group = (start + column) // 16
        assert_bitwise_equal(words(state, torch.float32, 8), largest + 0.0, "largest")
        assert torch.equal(words(state, torch.int32, 1).long(), group), "the largest column's group"
        target_y = y.gather(-1, case.target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        assert_bitwise_equal(
            words(state, torch.float32, 9), target_y.where(here, 0), "the target's y"
        )
        assert torch.equal(words(state, torch.int64, 7), here.long()), "whether the target is here"
        of_group = y.unflatten(-1, (-1, 16))[torch.arange(11, device=device), group].double()
        relative = (of_group - largest.double().unsqueeze(-1)).exp().sum(-1)
        torch.testing.assert_close(
            words(state, torch.float64, 6), relative - 1, rtol=1e-9, atol=1e-15
        )
        # value * 2^exponent is the group's term, and 2^(32 * (top - 1)) the bin of the top counter.
        term = words(state, torch.float32, 10).double().log2() + words(state, torch.int32, 11)
        expected = relative.log2() + largest.double() / math.log(2)
        # On a GPU exp2 is off by up to two ulps.
        torch.testing.assert_close(term, expected, rtol=0, atol=6e-7)
        for row, of_row in enumerate(state.tolist()):
            top = int(words(state[row], torch.int32, 0))
            total = math.log(sum_of(of_row)) + 32 * top * math.log(2)
            assert total == pytest.approx(of_shard[row].double().logsumexp(-1).item(), abs=3e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(0, 515), (0, 16, 515), (0, 160, 320, 515)], ids=str)
def test_results_are_as_accurate_as_torch(
    device: str, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    case = sample((64, 515), dtype, device)
    actual, expected = call_in_shards(*case, cuts=cuts), exact(case)
    y = case.logits.float() / case.temperature.unsqueeze(-1)
    here = case.target >= 0
    logp = torch.log_softmax(y, -1).gather(-1, case.target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert_as_accurate(actual.logp, logp * here, expected.logp, "logp")
    assert_as_accurate(actual.lse, torch.logsumexp(y, -1), expected.lse, "lse")
    whole = call(*case).dlogits
    assert_as_accurate(actual.dlogits, whole, expected.dlogits, "dlogits", roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_order_of_shards_and_no_cut_reaches_the_bits(
    call_in_shards: Call, device: str, dtype: torch.dtype
) -> None:
    case = sample((13, 128), dtype, device)
    whole = call_in_shards(*case)
    if kernel_serves(device, dtype):
        unsharded = calls.call if isinstance(whole, Result) else calls.call_with_entropy
        assert_same_bits(whole, unsharded(*case), "one operator")
    for cuts in (even_cuts(128, 2), even_cuts(128, 8), (0, 16, 96, 112, 128), (0, 0, 48, 48, 128)):
        assert_same_bits(call_in_shards(*case, cuts=cuts), whole, f"cuts {cuts}")
    states = states_of(*case[:3], (0, 16, 48, 112, 128))
    for order in itertools.permutations(range(4)):
        logp, lse = OPS.fused_logp_combine(states[list(order)], case.target, 128)
        assert_bitwise_equal(logp, whole.logp, f"logp, order {order}")
        assert_bitwise_equal(lse, whole.lse, f"lse, order {order}")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("temperature", [None, 0.5], ids=str)
def test_special_rows_give_what_torch_gives_wherever_they_are_cut(
    device: str, name: str, temperature: float | None
) -> None:
    row = row_of(name, torch.float32, device)
    row = torch.nn.functional.pad(row, (14, 46), value=-torch.inf if "all" in name else 0.0)
    logits, target = row.expand(4, -1), torch.arange(14, 18, device=device)  # over a boundary
    divisor = None if temperature is None else torch.tensor(temperature, device=device)
    y = (row if divisor is None else row / divisor).double()
    expected = torch.log_softmax(y, -1)[0, 14:18]
    lse = torch.logsumexp(y, -1).expand(4)
    whole = call_in_shards(logits, target, divisor)
    for actual in (whole, call_in_shards(logits, target, divisor, cuts=(0, 16, 32, 64))):
        torch_logp = torch.log_softmax(y.float(), -1)[0, 14:18]
        assert_as_accurate(actual.logp, torch_logp, expected, "logp")
        torch.testing.assert_close(actual.lse, lse, rtol=1e-7, atol=1e-7, equal_nan=True)
        for a, e in zip(actual, whole, strict=True):
            assert_bitwise_equal(a, e, "cut", any_nan=True)
    leaf = logits.clone().requires_grad_()
    y = leaf if divisor is None else leaf / divisor
    torch.log_softmax(y, -1).gather(-1, target.unsqueeze(-1)).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(whole.dlogits, leaf.grad, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [1, 17, 2051])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_its_bits_alone_in_any_layout_and_in_either_dtype(
    call_in_shards: Call, device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    case = sample((5, 7, vocab_size), dtype, device)
    whole = call_in_shards(*case)
    for layout in LAYOUTS:
        assert_same_bits(call_in_shards(relaid(case.logits, layout), *case[1:]), whole, layout)
    for row in itertools.product(range(5), range(7)):
        assert_same_bits(call_in_shards(*case.rows(row)), rows_of(whole, row), f"row {row}")
    in_fp32 = call_in_shards(case.logits.float(), *case[1:])
    assert_same_bits(in_fp32._replace(dlogits=in_fp32.dlogits.to(dtype)), whole, "upcast")
    padded = torch.nn.functional.pad(case.logits, (0, 21), value=-torch.inf)
    ignored = case.target.where(case.target >= 0, -1)
    results = call_in_shards(padded, ignored, *case[2:])
    assert not results.dlogits[..., vocab_size:].any()
    trimmed = results._replace(dlogits=results.dlogits[..., :vocab_size])
    assert_same_bits(trimmed, whole, "padded")


def test_threads_do_not_reach_the_bits(call_in_shards: Call) -> None:
    case = sample((64, 2051), torch.float32)
    whole = call_in_shards(*case)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same_bits(call_in_shards(*case), whole, "two threads")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("at", "padding"), [(0, 16), (0, 48), (160, 32), (515, 3), (515, 16)])
def test_where_columns_of_minus_infinity_change_nothing(
    call_in_shards: Call, device: str, at: int, padding: int
) -> None:
    case = sample((11, 515), device=device)
    nothing = case.logits.new_full((11, padding), -torch.inf)
    padded = torch.cat([case.logits[:, :at], nothing, case.logits[:, at:]], -1)
    moved = torch.where(case.target >= at, case.target + padding, case.target)
    if at == 515:  # a target that was past the end would be one of the padding
        moved = torch.where(case.target >= at, -100, case.target)
    expected, actual = call_in_shards(*case), call_in_shards(padded, moved, *case[2:])
    kept = [actual.dlogits[:, :at], actual.dlogits[:, at + padding :]]
    assert_same_bits(actual._replace(dlogits=torch.cat(kept, -1)), expected, "padded")


def test_an_empty_shard_and_rows_that_are_not_asked_for_are_empty(device: str) -> None:
    case = sample((5, 3, 32), torch.bfloat16, device)
    empty = torch.tensor(EMPTY, device=device)
    states = states_of(*case[:3], (0, 0, 32))
    assert torch.equal(states[0], empty.expand(5, 3, 8))
    states = states_of(*case[:3], (0, 16, 32), all_rows=False)
    ignored = case.target < 0
    assert torch.equal(states[:, ignored], empty.expand(2, int(ignored.sum()), 8))
    whole = call_in_shards(*case)
    logp, lse = OPS.fused_logp_combine(states, case.target, 32)
    assert_bitwise_equal(logp, whole.logp, "logp")
    assert_bitwise_equal(lse[~ignored], whole.lse[~ignored], "lse of the rows that were asked for")


@pytest.mark.parametrize("target", [-1, -100, 64, 2**31, 2**32 + 5, -(2**40)])
def test_a_target_outside_the_vocabulary_is_ignored_by_every_shard(
    call_in_shards: Call, device: str, target: int
) -> None:
    logits = torch.full((2, 64), torch.nan, device=device)
    logits[0] = -torch.inf
    result = call_in_shards(
        logits, torch.tensor([target, target], device=device), cuts=even_cuts(64, 4)
    )
    assert result.logp.tolist() == [0, 0]
    assert not result.dlogits.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_target_that_no_shard_or_two_hold_has_no_logp(device: str, dtype: torch.dtype) -> None:
    logits, target = torch.zeros(3, 64, device=device), torch.tensor([5, 20, 50], device=device)
    states = states_of(logits, target.to(dtype), None, even_cuts(64, 4))
    missing = OPS.fused_logp_combine(states[[0, 2, 3]], target.to(dtype), 64)[0]
    assert missing.isnan().tolist() == [False, True, False]
    twice = OPS.fused_logp_combine(states[[0, 1, 1, 2, 3]], target.to(dtype), 64)[0]
    assert twice.isnan().tolist() == [False, True, False]


def test_equal_columns_in_several_shards(call_in_shards: Call, device: str) -> None:
    """The first of the largest groups is the one that is summed again, whichever shard has it."""
    case = sample((4, 256), torch.bfloat16, device)
    logits = case.logits.clone()
    logits[:, [3, 40, 77, 200]] = 30.0
    case = Sample(logits, *case[1:])
    whole = call_in_shards(*case)
    for shards in (2, 4, 8):
        assert_same_bits(call_in_shards(*case, cuts=even_cuts(256, shards)), whole, f"{shards}")


def test_a_confident_row_keeps_its_small_logp(call_in_shards: Call, device: str) -> None:
    """Where one column is nearly all of the sum, logp is what a sum in fp32 would lose."""
    logits = torch.zeros(1, 64, device=device)
    logits[0, 20] = 25.0
    result = call_in_shards(logits, torch.tensor([20], device=device), cuts=even_cuts(64, 4))
    expected = -math.log1p(63 * math.exp(-25.0))
    assert result.logp.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sign", [1, -1])
def test_wide_values_are_counted(call_in_shards: Call, device: str, sign: int, count: int) -> None:
    logits = torch.full((1, 96), -torch.inf, device=device)
    logits[0, [7, 39, 71][:count]] = sign * 2 * WIDE
    target = torch.tensor([7], device=device)
    whole = call_in_shards(logits, target)
    assert whole.logp.item() == pytest.approx(-math.log(count), abs=1e-7)
    assert_same_bits(call_in_shards(logits, target, cuts=even_cuts(96, 6)), whole, "cut")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_wide_value_just_below_the_largest_is_nothing_beside_it(device: str, sign: int) -> None:
    largest = torch.tensor(sign * 2 * WIDE, device=device)
    below = torch.nextafter(largest, torch.tensor(-torch.inf, device=device))
    logits = torch.full((1, 48), -torch.inf, device=device)
    logits[0, [3, 20, 37]] = torch.stack([below, largest, below])
    target = torch.tensor([20], device=device)
    states = states_of(logits, target, None, (0, 48))
    assert states[0, 0, 1:4].tolist() == [0, 1, 0], "the largest is counted, and nothing else"
    for cuts in ((0, 48), (0, 16, 48), (0, 16, 32, 48)):
        assert call_in_shards(logits, target, cuts=cuts).logp.item() == 0


def test_what_is_dropped_does_not_tell_what_had_come_together(
    call_in_shards: Call, device: str
) -> None:
    """Beside one large column, shards that hold only small ones: their sums reach further down.

    If a counter carried before its bin is dropped, cuts would show in what is left of the sum
    without the largest group.
    """
    generator = torch.Generator().manual_seed(0)
    logits = -20 - 40 * torch.rand(64, 2048, generator=generator)
    logits[:, :16] = -torch.inf
    logits[:, 0] = 0
    logits, target = logits.to(device), torch.zeros(64, dtype=torch.long, device=device)
    whole = call_in_shards(logits, target)
    assert (whole.logp < 0).all()
    for cuts in ((0, 16, 2048), (0, 1024, 2048), even_cuts(2048, 8), even_cuts(2048, 128)):
        assert_same_bits(call_in_shards(logits, target, cuts=cuts), whole, f"{len(cuts) - 1}")


def test_pieces_of_a_vocabulary_merge_on_one_device(device: str) -> None:
    """For who makes logits piece by piece: no more than one piece of them needs to exist."""
    case = sample((9, 1000), torch.bfloat16, device)
    whole = call_in_shards(*case)
    states = []
    for start in range(0, 1000, 192):
        piece = case.logits[:, start : start + 192].clone()
        states.append(
            OPS.fused_logp_partial(piece, case.target, case.temperature, True, start, 1000)
        )
    logp, lse = OPS.fused_logp_combine(torch.stack(states), case.target, 1000)
    assert_bitwise_equal(logp, whole.logp, "logp")
    assert_bitwise_equal(lse, whole.lse, "lse")


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 1000])
def test_chunks_of_rows_do_not_reach_the_bits_of_the_torch_version(
    device: str, chunk_rows: int
) -> None:
    case = sample((5, 3, 257), torch.bfloat16, device)
    states = [torch.empty(5, 3, 8, dtype=torch.int64, device=device) for _ in range(2)]
    partial.partial(*case[:3], True, 0, 257, states[0])
    partial.partial(*case[:3], True, 0, 257, states[1], chunk_rows)
    assert torch.equal(*states)


def test_a_default_dtype_does_not_reach_the_bits(call_in_shards: Call, device: str) -> None:
    case = sample((5, 100), torch.float32, device)
    case = case._replace(logits=case.logits + 20000)  # bins of numbers that bf16 does not hold
    whole = call_in_shards(*case)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same_bits(call_in_shards(*case), whole, "default dtype bf16")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shape", [(512, 2048), (2**16, 1), (4096, 33)], ids=str)
def test_the_torch_version_stays_within_the_workspace(
    device: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same promise as the fallback's (C9), with a smaller workspace."""
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", 2**19)
    monkeypatch.setattr(partial, "_CPU_ELEMENTS", 2**19)
    rows, columns = shape
    logits = torch.randn(shape, dtype=torch.bfloat16, device=device)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    temperature = torch.ones((), device=device)
    states = torch.empty(rows, 8, dtype=torch.int64, device=device)
    peak = peak_bytes(
        device, lambda: partial.partial(logits, target, temperature, True, 0, columns, states)
    )
    assert peak <= 4 * 2**19
