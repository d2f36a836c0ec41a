"""vocab_parallel_logp in one process: what it returns, and every way to call it wrong.

Processes that really are several are in compile_tests/test_vocab_parallel.py.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from calls import DTYPES, assert_same_bits, call, kernel_serves, sample
from shards import OPS, call_in_shards
from torch import Tensor

import rl_logp
from rl_logp import _library, _shard
from rl_logp.testing import assert_bitwise_equal

LOGITS = torch.zeros(4, 32)
TARGET = torch.zeros(4, dtype=torch.long)
STATES = torch.zeros(2, 4, 8, dtype=torch.long)


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for a group of two; nothing that raises before it communicates needs a real one."""
    group = object()
    monkeypatch.setattr(dist, "get_world_size", lambda of=None: 2 if of is group else 1)

    def gather(states: Tensor, group: object) -> Tensor:
        raise AssertionError("there was communication before the error")

    monkeypatch.setattr(_shard, "all_gather", gather)
    return group


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [{}, {"vocab_start": 0, "vocab_size": 515}], ids=str)
def test_without_a_group_the_shard_is_the_vocabulary(
    device: str, dtype: torch.dtype, layout: dict[str, Any]
) -> None:
    case = sample((13, 515), dtype, device)
    leaf = case.logits.detach().requires_grad_()
    logp, lse = rl_logp.vocab_parallel_logp(
        leaf, case.target, temperature=case.temperature, return_lse=True, **layout
    )
    (dlogits,) = torch.autograd.grad([logp, lse], leaf, [case.grad_logp, case.grad_lse])
    expected = call_in_shards(*case)
    assert_bitwise_equal(logp.detach(), expected.logp, "logp")
    assert_bitwise_equal(lse.detach(), expected.lse, "lse")
    assert_bitwise_equal(dlogits, expected.dlogits, "dlogits")
    if kernel_serves(device, dtype):
        assert_same_bits(expected, call(*case), "fused_logp")
    alone = rl_logp.vocab_parallel_logp(leaf, case.target, temperature=case.temperature)
    assert_bitwise_equal(alone.detach(), expected.logp, "logp without lse")


@pytest.mark.parametrize("cut", [32, 0, 96], ids=["", "the first is empty", "the second is empty"])
def test_nothing_but_the_states_is_gathered(
    device: str, cut: int, two_processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards, one after the other in this process: 64 bytes a row go from each to the other."""
    case = sample((3, 5, 96), torch.bfloat16, device)
    sent: list[Tensor] = []
    shards = [(0, case.logits[..., :cut]), (cut, case.logits[..., cut:])]

    def score(start: int, logits: Tensor) -> Tensor:
        return rl_logp.vocab_parallel_logp(
            logits,
            case.target,
            group=two_processes,
            vocab_start=start,
            vocab_size=96,
            temperature=case.temperature,
            require_aligned=True,
        )

    def keep(states: Tensor, group: object) -> Tensor:
        sent.append(states)
        return torch.cat([states, states])

    monkeypatch.setattr(_shard, "all_gather", keep)
    for shard in shards:
        score(*shard)
    assert [states.nbytes for states in sent] == [15 * 64, 15 * 64]
    monkeypatch.setattr(_shard, "all_gather", lambda states, group: torch.cat(sent))
    expected = call_in_shards(*case[:3]).logp
    for shard in shards:
        assert_bitwise_equal(score(*shard), expected, "logp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            pytest.param(
                given,
                "vocab_parallel_logp: expected vocab_start and vocab_size, as 2 processes share the"
                f" vocabulary, got {given.get('vocab_start')} and {given.get('vocab_size')}",
                id=f"a group and {' '.join(given) or 'neither'}",
            )
            for given in ({}, {"vocab_start": 32}, {"vocab_size": 64})
        ),
        pytest.param(
            {"vocab_start": 16, "vocab_size": 64},
            "vocab_parallel_logp: expected the first or the last of 2 shards, got columns 16 to 48"
            " of 64",
            id="two shards and one in the middle",
        ),
        pytest.param(
            {"vocab_start": 48, "vocab_size": 64},
            "fused_logp: expected columns 48 to 80 within a vocabulary of 64",
            id="past the end",
        ),
        pytest.param(
            {"vocab_start": -16, "vocab_size": 64},
            "fused_logp: expected columns -16 to 16 within a vocabulary of 64",
            id="a negative start",
        ),
        pytest.param(
            {"vocab_start": 24, "vocab_size": 56, "require_aligned": True},
            "vocab_parallel_logp: expected shards that start at multiples of 16 columns, got"
            " columns 24 to 56 of 56",
            id="this shard is not aligned",
        ),
        pytest.param(
            {"vocab_start": 0, "vocab_size": 56, "require_aligned": True, "columns": 24},
            "vocab_parallel_logp: expected shards that start at multiples of 16 columns, got"
            " columns 0 to 24 of 56",
            id="the next shard is not aligned",
        ),
    ],
)
def test_a_layout_that_one_shard_shows_to_be_wrong(
    two_processes: Any, arguments: dict[str, Any], message: str
) -> None:
    logits = LOGITS[:, : arguments.pop("columns", 32)]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rl_logp.vocab_parallel_logp(logits, TARGET, group=two_processes, **arguments)


def test_a_shard_without_a_group() -> None:
    message = (
        "vocab_parallel_logp: expected the whole vocabulary where no group shares it, got columns"
        " 0 to 32 of 64"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rl_logp.vocab_parallel_logp(LOGITS, TARGET, vocab_start=0, vocab_size=64)


def test_fp64_has_no_states() -> None:
    message = "expected a shard of logits of dtype bfloat16 or float16 or float32, got float64"
    with pytest.raises(TypeError, match=f"^fused_logp: {message}$"):
        rl_logp.vocab_parallel_logp(LOGITS.double(), TARGET)


def test_a_temperature_that_requires_grad() -> None:
    temperature = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="expected a temperature that does not require grad"):
        rl_logp.vocab_parallel_logp(
            LOGITS.clone().requires_grad_(), TARGET, temperature=temperature
        )


def test_a_kernel_that_is_required_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_loaded", {})
    with pytest.raises(RuntimeError, match="expected a compiled kernel"):
        rl_logp.vocab_parallel_logp(LOGITS, TARGET, require_kernel=True)


def test_a_second_derivative_and_forward_mode_are_errors(device: str) -> None:
    logits = torch.randn(4, 32, device=device, requires_grad=True)
    target = TARGET.to(device)
    logp = rl_logp.vocab_parallel_logp(logits, target)
    (grad,) = torch.autograd.grad(logp.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: rl_logp.vocab_parallel_logp(x, target).sum())(logits)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            rl_logp.vocab_parallel_logp(dual, target)


def test_vmap_without_a_group(device: str) -> None:
    case = sample((3, 5, 32), device=device)

    def score(*case: Tensor) -> tuple[Tensor, Tensor]:
        logits, target, temperature = case
        return rl_logp.vocab_parallel_logp(logits, target, temperature=temperature, return_lse=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no batching rule: torch loops, and says so
        actual = torch.vmap(score)(*case[:3])
    for of_samples, expected in zip(actual, score(*case[:3]), strict=True):
        assert_bitwise_equal(of_samples, expected, "vmap")


@pytest.mark.parametrize(
    ("states", "target", "error", "message"),
    [
        (STATES.int(), TARGET, TypeError, "expected states of dtype int64, got int32"),
        (STATES, TARGET.float(), TypeError, "expected target of dtype int32 or int64, got float32"),
        (
            STATES[0],
            TARGET,
            ValueError,
            "expected states of shape ('S', 4, 8), of S shards, got (4, 8)",
        ),
        (
            STATES[:0],
            TARGET,
            ValueError,
            "expected states of shape ('S', 4, 8), of S shards, got (0, 4, 8)",
        ),
        (
            STATES,
            TARGET[:3],
            ValueError,
            "expected states of shape ('S', 3, 8), of S shards, got (2, 4, 8)",
        ),
        (
            STATES,
            TARGET.to("meta"),
            ValueError,
            "expected target on cpu, the device of states, got meta",
        ),
    ],
    ids=["states of int32", "target of floats", "one shard", "none", "other rows", "other device"],
)
def test_states_that_cannot_be_combined(
    states: Tensor, target: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'fused_logp: {message}')}$"):
        OPS.fused_logp_combine(states, target, 64)
    if target.device == LOGITS.device and target.dtype == TARGET.dtype and len(target) == 4:
        with pytest.raises(error, match=f"^{re.escape(f'fused_logp: {message}')}$"):
            OPS.fused_logp_shard(LOGITS, target, None, states, 0, 64)


def test_the_documented_merge_of_pieces_is_the_whole_vocabulary() -> None:
    text = (Path(__file__).parent.parent / "docs" / "distributed.md").read_text()
    (code,) = re.findall(r"^```python\n(states = .*?)^```", text, re.MULTILINE | re.DOTALL)
    weight = torch.randn(100, 8)
    named: dict[str, Any] = {
        "torch": torch,
        "hidden": torch.randn(5, 8),
        "weight": weight,
        "vocab_size": len(weight),
        "columns": 48,
        "target": torch.tensor([0, 47, 48, 99, -100]),
    }
    exec(code, named)
    pieces = [named["hidden"] @ piece.t() for piece in weight.split(48)]
    expected = call_in_shards(torch.cat(pieces, -1), named["target"])
    assert_bitwise_equal(named["logp"], expected.logp, "logp")
    assert_bitwise_equal(named["lse"], expected.lse, "lse")
