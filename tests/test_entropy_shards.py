"""The entropy from shards of a vocabulary: the states, what they combine to, and who shares them.

What it shares with logp is in test_partial.py (the ``call_in_shards`` fixture).
"""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import DTYPES, assert_same_bits, call_with_entropy, kernel_serves, sample
from shards import (
    EMPTY,
    OPS,
    WEIGHTED_WORDS,
    call_in_shards,
    call_in_shards_with_entropy,
    even_cuts,
    states_of,
    weighted_states_of,
)
from test_c08_special_values import ROWS, row_of
from test_c09_memory import peak_bytes
from test_entropy import by_torch
from test_partial import words
from torch import Tensor

import rl_logp
from rl_logp import _shard, chunked, partial
from rl_logp.reference import entropy as exact_entropy
from rl_logp.reference import reference
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def weighted_sum_of(state: list[int]) -> float:
    """Of a state, sum(exp(y) * (z - 32 * top)) with z = y * log2(e), relative to 2^(32 * top)."""
    return math.fsum([state[8], state[9] * 2.0**-32, state[10] * 2.0**-64])


@every_dtype
@pytest.mark.parametrize("scale", [1, 25, 2000], ids=["usual", "wide", "beyond the fast range"])
def test_a_state_holds_what_is_documented(device: str, dtype: torch.dtype, scale: int) -> None:
    case = sample((11, 96), dtype, device)
    args = (case.logits * scale, case.target, case.temperature, (0, 32, 96))
    states = weighted_states_of(*args)
    assert states.shape == (2, 11, WEIGHTED_WORDS)
    assert torch.equal(states[..., :8], states_of(*args)), "the first 8 words are logp's"
    assert not words(states, torch.int32, 25).any(), "the unused half of a word"
    y = args[0].float() / case.temperature.unsqueeze(-1)
    for shard, (start, end) in enumerate([(0, 32), (32, 96)]):
        state, of_shard = states[shard], y[:, start:end].double()
        largest, column = of_shard.max(-1, keepdim=True)
        group = of_shard.unflatten(-1, (-1, 16))[torch.arange(11), column.squeeze(-1) // 16]
        difference = group - largest
        powers = difference.exp()
        torch.testing.assert_close(
            words(state, torch.float64, 11), (powers * difference).sum(-1), rtol=1e-9, atol=1e-15
        )
        # In the units of the term: powers of two of the columns, times their exponents.
        exponent = words(state, torch.int32, 11).double()
        z = group * math.log2(math.e) - exponent.unsqueeze(-1)
        weight = (z.exp2() * z).sum(-1)
        torch.testing.assert_close(
            words(state, torch.float32, 24).double(), weight, rtol=2e-6, atol=2e-6
        )
        for row, of_row in enumerate(state.tolist()):
            top = int(words(state[row], torch.int32, 0))
            z = of_shard[row] * math.log2(math.e) - 32 * top
            total = weighted_sum_of(of_row)
            assert total == pytest.approx((z.exp2() * z).sum().item(), rel=3e-6)


@every_dtype
@pytest.mark.parametrize("cuts", [(0, 515), (0, 16, 515), (0, 160, 320, 515)], ids=str)
def test_results_are_as_accurate_as_torch(
    device: str, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    case = sample((64, 515), dtype, device)
    actual = call_in_shards_with_entropy(*case, cuts=cuts)
    args = (case.logits, case.target, case.temperature)
    truth = exact_entropy(case.logits, temperature=case.temperature)
    _, entropy, _ = by_torch(*args, case.grad_logp, case.grad_lse.float())
    assert_as_accurate(actual.entropy, entropy, truth, "entropy")
    # Every value of a row's entropy and gradient is torch's to rounding as well.
    exact = reference(
        *args[:2],
        temperature=case.temperature,
        grad_logp=case.grad_logp,
        grad_lse=case.grad_lse,
        grad_entropy=case.grad_lse.float(),
    )
    whole = call_with_entropy(*case)
    assert_as_accurate(actual.dlogits, whole.dlogits, exact.dlogits, "dlogits", roundings=3)
    assert_as_accurate(actual.lse.float(), whole.lse.float(), exact.lse, "lse")


@every_dtype
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [1, 25, 2000], ids=str)
def test_no_number_or_order_of_shards_reaches_the_bits(
    device: str, dtype: torch.dtype, shards: int, scale: float
) -> None:
    case = sample((13, 1024), dtype, device)
    case = case._replace(logits=case.logits * scale)
    whole = call_with_entropy(*case) if kernel_serves(device, dtype) else None
    whole = whole or call_in_shards_with_entropy(*case)
    cuts = even_cuts(1024, shards)
    cut = call_in_shards_with_entropy(*case, cuts=cuts)
    assert_same_bits(cut, whole, f"{shards} shards")
    unweighted = call_in_shards(*case[:4], cuts=cuts)
    assert_bitwise_equal(cut.logp, unweighted.logp, "logp of vocab_parallel_logp")
    in_one = weighted_states_of(*case[:3], (0, 1024))
    _, _, _, mean = OPS.fused_logp_entropy_combine(in_one, case.target, 1024)
    states = weighted_states_of(*case[:3], cuts)
    for order in itertools.islice(itertools.permutations(range(shards)), 24):
        results = OPS.fused_logp_entropy_combine(states[list(order)], case.target, 1024)
        expected = (whole.logp, whole.entropy, whole.lse, mean)
        for name, a, e in zip(("logp", "entropy", "lse", "mean"), results, expected, strict=True):
            assert_bitwise_equal(a, e, f"{name}, order {order}")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("temperature", [None, 0.5], ids=str)
def test_special_rows_give_what_torch_gives_wherever_they_are_cut(
    device: str, name: str, temperature: float | None
) -> None:
    row = row_of(name, torch.float32, device)
    row = torch.nn.functional.pad(row, (14, 46), value=-torch.inf if "all" in name else 0.0)
    logits, target = row.expand(4, -1), torch.arange(14, 18, device=device)  # over a boundary
    divisor = None if temperature is None else torch.tensor(temperature, device=device)
    g = torch.tensor([1.0, -2.0, 0.5, 0.0], device=device)
    zero = torch.zeros_like(g)
    whole = call_in_shards_with_entropy(logits, target, divisor, zero, g.double())
    for cuts in ((0, 16, 32, 64), (0, 16, 64)):
        cut = call_in_shards_with_entropy(logits, target, divisor, zero, g.double(), cuts=cuts)
        for field, a, e in zip(whole._fields, cut, whole, strict=True):
            assert_bitwise_equal(a, e, f"{field}, cuts {cuts}", any_nan=True)
    _, entropy, _ = by_torch(logits, target, divisor, zero, g)
    truth = exact_entropy(logits, temperature=divisor)
    assert_as_accurate(whole.entropy, entropy, truth, "entropy")
    exact = reference(
        logits, target, temperature=divisor, grad_logp=zero, grad_lse=g, grad_entropy=g
    )
    alone = call_with_entropy(logits, target, divisor, zero, g.double())
    assert_as_accurate(whole.dlogits, alone.dlogits, exact.dlogits, "dlogits", roundings=2)


def test_an_empty_shard_is_empty(device: str) -> None:
    case = sample((5, 3, 32), torch.bfloat16, device)
    states = weighted_states_of(*case[:3], (0, 0, 32))
    empty = torch.tensor([*EMPTY, *[0] * (WEIGHTED_WORDS - 8)], device=device)
    assert torch.equal(states[0], empty.expand(5, 3, WEIGHTED_WORDS))
    cut = call_in_shards_with_entropy(*case, cuts=(0, 0, 32, 32))
    assert_same_bits(cut, call_in_shards_with_entropy(*case), "with shards of nothing")


def test_many_small_terms_far_below_the_top_keep_their_weight(device: str) -> None:
    """Their bins are the last ones kept; from the top, they weigh 20 to 60 times their sum."""
    generator = torch.Generator().manual_seed(0)
    logits = -20 - 40 * torch.rand(64, 2048, generator=generator)
    logits[:, 0] = 0
    logits, target = logits.to(device), torch.zeros(64, dtype=torch.long, device=device)
    whole = call_in_shards_with_entropy(logits, target)
    torch.testing.assert_close(whole.entropy.double(), exact_entropy(logits), rtol=3e-7, atol=0)
    for cuts in ((0, 16, 2048), (0, 1024, 2048), even_cuts(2048, 8), even_cuts(2048, 128)):
        cut = call_in_shards_with_entropy(logits, target, cuts=cuts)
        assert_same_bits(cut, whole, f"{len(cuts) - 1}")


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_tops_that_rise_shard_by_shard(device: str, order: str) -> None:
    """Each shard's largest value is in another bin than the last one's: all weights are moved."""
    steps = torch.arange(8).repeat_interleave(16) * 12.0
    generator = torch.Generator().manual_seed(0)
    logits = (steps + torch.randn(32, 128, generator=generator)).to(device)
    logits = logits.flip(-1) if order == "descending" else logits
    target = torch.zeros(32, dtype=torch.long, device=device)
    g = torch.ones(32, dtype=torch.float64, device=device)
    whole = call_in_shards_with_entropy(logits, target, None, None, g)
    for shards in (2, 4, 8):
        cut = call_in_shards_with_entropy(
            logits, target, None, None, g, cuts=even_cuts(128, shards)
        )
        assert_same_bits(cut, whole, f"{shards}")
    torch.testing.assert_close(whole.entropy.double(), exact_entropy(logits), rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 1000])
def test_chunks_of_rows_do_not_reach_the_bits_of_the_torch_version(
    device: str, chunk_rows: int
) -> None:
    case = sample((5, 3, 257), torch.bfloat16, device)
    states = [torch.full((5, 3, 13), 7, dtype=torch.int64, device=device) for _ in range(2)]
    partial.partial(*case[:3], True, 0, 257, states[0])
    partial.partial(*case[:3], True, 0, 257, states[1], chunk_rows)
    assert torch.equal(*states)


@pytest.mark.parametrize("shape", [(512, 2048), (2**16, 1), (4096, 33)], ids=str)
def test_the_torch_version_stays_within_the_workspace(
    device: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", 2**19)
    monkeypatch.setattr(partial, "_CPU_ELEMENTS", 2**19)
    rows, columns = shape
    logits = torch.randn(shape, dtype=torch.bfloat16, device=device)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    temperature = torch.ones((), device=device)
    states = torch.empty(rows, 13, dtype=torch.int64, device=device)
    peak = peak_bytes(
        device, lambda: partial.partial(logits, target, temperature, True, 0, columns, states)
    )
    assert peak <= 4 * 2**19


# --- vocab_parallel_logp_entropy ------------------------------------------------------------------
@every_dtype
def test_without_a_group_the_shard_is_the_vocabulary(device: str, dtype: torch.dtype) -> None:
    case = sample((13, 515), dtype, device)
    leaf = case.logits.detach().requires_grad_()
    outputs = rl_logp.vocab_parallel_logp_entropy(leaf, case.target, temperature=case.temperature)
    upstream = [case.grad_logp, case.grad_lse.float()]
    (dlogits,) = torch.autograd.grad(outputs, leaf, upstream)
    expected = call_in_shards_with_entropy(*case)
    assert_bitwise_equal(outputs[0].detach(), expected.logp, "logp")
    assert_bitwise_equal(outputs[1].detach(), expected.entropy, "entropy")
    if kernel_serves(device, dtype):
        whole = call_with_entropy(*case[:4], None, upstream[1])
        assert_bitwise_equal(dlogits, whole.dlogits, "dlogits")
        assert_bitwise_equal(outputs[1].detach(), whole.entropy, "fused_logp_entropy")


@pytest.mark.parametrize("cut", [32, 0, 96], ids=["", "the first is empty", "the second is empty"])
def test_nothing_but_the_states_is_gathered(
    device: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards, one after the other in this process: each sends 104 bytes a row."""
    case = sample((3, 5, 96), torch.bfloat16, device)
    group: Any = object()
    monkeypatch.setattr(dist, "get_world_size", lambda of=None: 2 if of is group else 1)
    sent: list[Tensor] = []
    shards = [(0, case.logits[..., :cut]), (cut, case.logits[..., cut:])]

    options: dict[str, Any] = {
        "group": group,
        "vocab_size": 96,
        "temperature": case.temperature,
        "require_aligned": True,
    }

    def score(start: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        return rl_logp.vocab_parallel_logp_entropy(
            logits, case.target, vocab_start=start, **options
        )

    def keep(states: Tensor, group: object) -> Tensor:
        sent.append(states)
        return torch.cat([states, states])

    monkeypatch.setattr(_shard, "all_gather", keep)
    for shard in shards:
        score(*shard)
    assert [states.nbytes for states in sent] == [15 * 104, 15 * 104]
    monkeypatch.setattr(_shard, "all_gather", lambda states, group: torch.cat(sent))
    expected = call_in_shards_with_entropy(*case[:3])
    for shard in shards:
        logp, entropy = score(*shard)
        assert_bitwise_equal(logp, expected.logp, "logp")
        assert_bitwise_equal(entropy, expected.entropy, "entropy")
    sent.clear()
    monkeypatch.setattr(_shard, "all_gather", keep)
    for start, logits in shards:
        rl_logp.vocab_parallel_entropy(logits, vocab_start=start, **options)
    monkeypatch.setattr(_shard, "all_gather", lambda states, group: torch.cat(sent))
    for start, logits in shards:
        alone = rl_logp.vocab_parallel_entropy(logits, vocab_start=start, **options)
        assert_bitwise_equal(alone, expected.entropy, "entropy alone")


def test_errors_name_the_function_that_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    two: Any = object()
    monkeypatch.setattr(dist, "get_world_size", lambda of=None: 2 if of is two else 1)
    logits, target = torch.zeros(4, 32), torch.zeros(4, dtype=torch.long)
    score = rl_logp.vocab_parallel_logp_entropy
    with pytest.raises(ValueError, match=r"^vocab_parallel_logp_entropy: expected the whole voc"):
        score(logits, target, vocab_start=0, vocab_size=64)
    with pytest.raises(ValueError, match=r"^vocab_parallel_logp_entropy: expected shards that st"):
        score(logits, target, group=two, vocab_start=8, vocab_size=40, require_aligned=True)
    with pytest.raises(TypeError, match=r"^fused_logp: expected a shard of logits of dtype"):
        score(logits.double(), target)
    with pytest.raises(ValueError, match=r"^vocab_parallel_entropy: expected the whole voc"):
        rl_logp.vocab_parallel_entropy(logits, vocab_start=0, vocab_size=64)


@pytest.mark.parametrize("width", [8, 12, 14])
def test_states_of_another_width_are_refused(width: int) -> None:
    target = torch.zeros(4, dtype=torch.long)
    states = torch.zeros(2, 4, width, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^fused_logp: expected states of shape \('S', 4, 13\)"):
        OPS.fused_logp_entropy_combine(states, target, 64)
    weighted = torch.zeros(2, 4, 13, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^fused_logp: expected states of shape \('S', 4, 8\)"):
        OPS.fused_logp_combine(weighted, target, 64)
