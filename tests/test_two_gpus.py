"""The benchmark of a vocabulary that two GPUs share, as far as one process can show it."""

import pytest
import torch
import torch.distributed as dist
from calls import call, sample

from benchmarks import two_gpus, vocab_parallel


@pytest.fixture
def two_processes():
    """A group of two, of which this process is one and the other says nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "sent"), [("rl_logp", 6 * 64), ("gather", 6 * 32 * 4), ("all_reduces", 6 * 12)]
)
def test_what_a_shared_vocabulary_sends_is_counted(name, sent, two_processes):
    case = sample((6, 32))
    with vocab_parallel.Traffic(2) as traffic:
        vocab_parallel.FUNCTIONS[name](case.logits, case.target, 0, 64, two_processes)
    assert traffic.bytes == sent
    assert traffic.calls == (3 if name == "all_reduces" else 1)


def test_a_collective_that_is_not_known_is_not_counted_as_nothing(two_processes):
    with vocab_parallel.Traffic(2), pytest.raises(NotImplementedError, match="got broadcast_"):
        dist.broadcast(torch.zeros(1), 0)


@pytest.mark.parametrize("name", vocab_parallel.FUNCTIONS)
def test_ways_to_share_a_vocabulary_score_the_same(name):
    case = sample((6, 64))
    target = case.target.clamp(0)
    leaf = case.logits.clone().requires_grad_()
    logp = vocab_parallel.FUNCTIONS[name](leaf, target, 0, 64, None)
    (dlogits,) = torch.autograd.grad(logp, leaf, case.grad_logp)
    expected = call(case.logits, target, None, case.grad_logp)
    torch.testing.assert_close(logp, expected.logp)
    torch.testing.assert_close(dlogits, expected.dlogits)


def test_a_table_of_two_gpus():
    row = {"provider": "rl_logp", "N": 8, "tp": 2, "fwd_ms": 1.0, "fwd_bwd_ms": 2.5}
    row |= {"bytes_moved": 512, "peak_bytes": 2_000_000, "differing_rows": 0}
    last = two_gpus.table([row]).splitlines()[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == [
        "8", "`rl_logp`", "1.000", "2.500", "0.000512", "0.002", "0",
    ]  # fmt: skip
