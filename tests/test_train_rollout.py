"""C3: training with the vocabulary over 1 to 8 shards has the bits of a rollout that has it whole.

The trainer has low-precision logits, a padded vocabulary and a temperature, and arranges its rows
as it likes. The rollout divides fp32 logits by its temperature, as a sampler does, and scores all
rows at once. 48 configurations of 25 rows, 1200 rows: 0 differ.

Shards are on one device here, and then on two GPUs, which NCCL joins.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from calls import (
    Result,
    assert_same_bits,
    call,
    call_with_entropy,
    kernel_serves,
    rows_of,
)
from shards import call_in_shards, call_in_shards_with_entropy, even_cuts
from torch import Tensor

import rl_logp
from compile_tests.processes import ON_GPUS, run_processes
from rl_logp.testing import bits

SEEDS = (0, 1, 2)
TRAINING_DTYPES = (torch.bfloat16, torch.float32)
TEMPERATURES = (1.0, 0.7)
MASKS = ("none", "padding", "support", "padding and support")
CONFIGURATIONS = list(product(SEEDS, TRAINING_DTYPES, TEMPERATURES, MASKS))
SHARDS = (1, 2, 4, 8)
ROWS, COLUMNS, PADDING = 25, 1024, 103


def configurations(function):
    function = pytest.mark.parametrize("mask", MASKS)(function)
    function = pytest.mark.parametrize("temperature", TEMPERATURES)(function)
    function = pytest.mark.parametrize("dtype", TRAINING_DTYPES, ids=str)(function)
    # The two GPUs below have the entropy of all seeds.
    seeds = [(seed, False) for seed in SEEDS] + [(SEEDS[0], True)]
    ids = [f"{seed}{', with entropy' * weighted}" for seed, weighted in seeds]
    return pytest.mark.parametrize(("seed", "weighted"), seeds, ids=ids)(function)


class Scored(NamedTuple):
    """What vocab_parallel_logp_entropy gives: there is no lse beside an entropy."""

    logp: Tensor
    entropy: Tensor
    dlogits: Tensor


class Batch:
    """What a trainer has of its rows; ``vocab_size`` columns are no padding."""

    def __init__(
        self, seed: int, dtype: torch.dtype, temperature: float, mask: str, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = COLUMNS - PADDING if "padding" in mask else COLUMNS
        logits = torch.randn(ROWS, COLUMNS, generator=generator).mul_(5).to(dtype)
        target = torch.randint(self.vocab_size, (ROWS,), generator=generator)
        if "support" in mask:  # as a sampler with top-k or top-p leaves it
            dropped = torch.rand(ROWS, COLUMNS, generator=generator) > 0.05
            dropped[torch.arange(ROWS), target] = False
            logits[dropped] = -torch.inf
        logits[:, self.vocab_size :] = -torch.inf
        self.active = torch.rand(ROWS, generator=generator) > 0.4
        target[~self.active] = -100
        self.logits, self.target = logits.to(device), target.to(device)
        self.temperature = torch.tensor(temperature, device=device)
        self.grad_logp = torch.randn(ROWS, generator=generator).to(device)
        self.grad_lse = torch.randn(ROWS, generator=generator, dtype=torch.float64).to(device)

    def rollout(self) -> tuple[Tensor, Tensor]:
        """The arguments of a score of the same rows by the engine that sampled them."""
        return self.logits[:, : self.vocab_size].float() / self.temperature, self.target

    def arguments(self, index: Any = slice(None), weighted: bool = False) -> tuple[Tensor, ...]:
        """For ``call`` and its like, of these rows alone; the entropy's gradient is that of lse."""
        grads = (self.grad_logp, self.grad_lse) if weighted else (self.grad_logp,)
        rows = (self.logits, self.target)
        return (*(t[index] for t in rows), self.temperature, *(t[index] for t in grads))

    def train(self, index, shards: int, weighted: bool = False) -> Any:
        """logp, lse and gradient of these rows alone, or the entropy too."""
        score = call_in_shards_with_entropy if weighted else call_in_shards
        return score(*self.arguments(index, weighted), cuts=even_cuts(COLUMNS, shards))


def in_chunks(batch: Batch, rows: int, shards: int, weighted: bool) -> Any:
    chunks = [
        batch.train(slice(start, start + rows), shards, weighted)
        for start in range(0, len(batch.target), rows)
    ]
    return type(chunks[0])(*map(torch.cat, zip(*chunks, strict=True)))


@configurations
def test_training_in_shards_scores_as_the_rollout_did(
    device: str, seed: int, dtype: torch.dtype, temperature: float, mask: str, weighted: bool
) -> None:
    batch = Batch(seed, dtype, temperature, mask, device)
    whole_call = call_with_entropy if weighted else call
    one_shard = call_in_shards_with_entropy if weighted else call_in_shards
    rollout: Any = one_shard(*batch.rollout())
    if kernel_serves(device, torch.float32):
        whole: Any = whole_call(*batch.rollout())
        assert_same_bits(whole, rollout, "whole rows and one shard")
    trained = batch.train(slice(None), 1, weighted)
    everything = rollout._replace(dlogits=trained.dlogits)
    if kernel_serves(device, dtype):
        whole = whole_call(*batch.arguments(weighted=weighted))
        assert_same_bits(whole, everything, "whole rows in training")

    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).to(device)
    compacted = batch.active.nonzero().squeeze(-1).to(device)
    for shards in SHARDS:
        trained = batch.train(slice(None), shards, weighted)
        assert_same_bits(trained, everything, f"{shards} shards")
    permuted = batch.train(order, 4, weighted)
    assert_same_bits(permuted, rows_of(everything, order), "permuted rows")
    active = batch.train(compacted, 8, weighted)
    assert_same_bits(active, rows_of(everything, compacted), "the active rows")
    assert_same_bits(in_chunks(batch, 7, 8, weighted), everything, "chunks of seven rows")
    assert_same_bits(in_chunks(batch, 1, 2, weighted), everything, "rows alone")


def test_the_configurations_are_the_1200_rows() -> None:
    assert len(SEEDS) * len(TRAINING_DTYPES) * len(TEMPERATURES) * len(MASKS) * ROWS == 1200


def test_the_experiment_tells_another_score_from_the_same(device: str) -> None:
    """Or equal bits would say nothing: one unit in one logit of the last shard shows."""
    batch = Batch(0, torch.float32, 0.7, "none", device)
    before = batch.train(slice(None), 4)
    batch.logits[3, -1] = batch.logits[3].amax()
    after = batch.train(slice(None), 4)
    assert (before.lse != after.lse).nonzero().tolist() == [[3]]
    assert before.logp[4] != 0, "an active row"


class Differences:
    """Counts the rows of each result that differ in a bit from what was expected."""

    def __init__(self) -> None:
        self.compared = 0
        self.rows: dict[str, int] = {}

    def add(self, actual: Any, expected: Any) -> None:
        self.compared += len(expected.logp)
        for name, a, e in zip(expected._fields, actual, expected, strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            differing = int((bits(a) != bits(e)).reshape(len(a), -1).any(-1).sum())
            self.rows[name] = self.rows.get(name, 0) + differing


def train_in_a_group(
    batch: Batch, index: Any, rank: int, size: int, kernel: bool, weighted: bool
) -> Any:
    """logp, lse or entropy, and this rank's columns of the gradient, of these rows alone."""
    start, end = even_cuts(COLUMNS, size)[rank : rank + 2]
    options: dict[str, Any] = {
        "group": dist.group.WORLD,
        "vocab_start": start,
        "vocab_size": COLUMNS,
        "require_aligned": True,
        "require_kernel": kernel,
    }
    if weighted:
        score = partial(rl_logp.vocab_parallel_logp_entropy, **options)
        return scored(score, batch, index, slice(start, end))
    leaf = batch.logits[index, start:end].clone().requires_grad_()
    logp, lse = rl_logp.vocab_parallel_logp(
        leaf, batch.target[index], temperature=batch.temperature, return_lse=True, **options
    )
    (dlogits,) = torch.autograd.grad(logp, leaf, batch.grad_logp[index])
    return Result(logp.detach(), lse.detach(), dlogits)


def scored(score: Callable, batch: Batch, rows: Any, columns: slice) -> Scored:
    """By a function that returns logp and entropy, and their gradients'."""
    leaf = batch.logits[rows, columns].clone().requires_grad_()
    outputs = score(leaf, batch.target[rows], temperature=batch.temperature)
    grads = (batch.grad_logp[rows], batch.grad_lse[rows].float())
    (dlogits,) = torch.autograd.grad(outputs, leaf, grads)
    return Scored._make([*(t.detach() for t in outputs), dlogits])


def of_one_process(batch: Batch, kernel: bool, weighted: bool) -> tuple[Any, Any]:
    """The rollout's results, and those of training, with all columns."""
    if weighted:
        score = rl_logp.fused_logp_entropy if kernel else rl_logp.vocab_parallel_logp_entropy
        whole = scored(score, batch, slice(None), slice(None))
        logits, target = batch.rollout()
        logp, entropy = score(logits, target)
        return Scored(logp, entropy, whole.dlogits), whole
    score = call if kernel else call_in_shards
    whole = score(*batch.arguments())
    return score(*batch.rollout())._replace(dlogits=whole.dlogits), whole


def experiment(
    rank: int, size: int, device: str, kernel: bool, weighted: bool
) -> dict[str, dict[str, int]]:
    """What differs where each process has a shard from what one that has all columns gets.

    "rollout": logp, and lse or entropy, from those of the rollout; "training": all from those of
    one process.
    """
    rollouts, training = Differences(), Differences()
    start, end = even_cuts(COLUMNS, size)[rank : rank + 2]
    for seed, dtype, temperature, mask in CONFIGURATIONS:
        batch = Batch(seed, dtype, temperature, mask, device)
        rollout, whole = (
            results._replace(dlogits=results.dlogits[:, start:end])
            for results in of_one_process(batch, kernel, weighted)
        )
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).to(device)
        active = batch.active.nonzero().squeeze(-1).to(device)
        for index in (slice(None), order, active, slice(7, 14)):
            trained = train_in_a_group(batch, index, rank, size, kernel, weighted)
            training.add(trained, rows_of(whole, index))
        trained = train_in_a_group(batch, slice(None), rank, size, kernel, weighted)
        rollouts.add(trained, rollout)
    found = {"rollout": rollouts, "training": training}
    return {name: {**of.rows, "compared": of.compared} for name, of in found.items()}


@pytest.mark.parametrize("weighted", [False, True], ids=["lse", "entropy"])
@pytest.mark.parametrize("device", [ON_GPUS])
def test_processes_with_a_gpu_each_train_as_the_rollout_scored(
    device: str, weighted: bool, tmp_path: Path
) -> None:
    """1200 rows of two GPUs against one, in both processes; by kernels, or it fails."""
    found = run_processes(2, device, tmp_path, experiment, True, weighted)
    beside = "entropy" if weighted else "lse"
    for rank, differences in enumerate(found):
        assert differences["rollout"].pop("compared") == 1200
        assert differences["training"].pop("compared") > 3000
        for what, rows in differences.items():
            assert rows == {"logp": 0, beside: 0, "dlogits": 0}, f"{what} on rank {rank}"
