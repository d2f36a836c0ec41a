"""C3: training with the vocabulary over 1 to 8 shards has the bits of a rollout that has it whole.

The trainer has low-precision logits, a padded vocabulary and a temperature, and arranges its rows
as it likes. The rollout divides fp32 logits by its temperature, as a sampler does, and scores all
rows at once. 48 configurations of 25 rows, 1200 rows: 0 differ.

Shards are on one device here, and then on two GPUs, which NCCL joins.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import Result, assert_same_bits, call, kernel_serves, rows_of
from shards import call_in_shards, even_cuts
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
    return pytest.mark.parametrize("seed", SEEDS)(function)


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

    def rollout(self) -> tuple[Tensor, Tensor]:
        """The arguments of a score of the same rows by the engine that sampled them."""
        return self.logits[:, : self.vocab_size].float() / self.temperature, self.target

    def train(self, index, shards: int) -> Result:
        """logp, lse and gradient of these rows alone."""
        return call_in_shards(
            self.logits[index],
            self.target[index],
            self.temperature,
            self.grad_logp[index],
            cuts=even_cuts(COLUMNS, shards),
        )


def in_chunks(batch: Batch, rows: int, shards: int) -> Result:
    chunks = [
        batch.train(slice(start, start + rows), shards)
        for start in range(0, len(batch.target), rows)
    ]
    return Result(*map(torch.cat, zip(*chunks, strict=True)))


@configurations
def test_training_in_shards_scores_as_the_rollout_did(
    device: str, seed: int, dtype: torch.dtype, temperature: float, mask: str
) -> None:
    batch = Batch(seed, dtype, temperature, mask, device)
    rollout = call_in_shards(*batch.rollout())
    if kernel_serves(device, torch.float32):
        whole = call(*batch.rollout())
        assert_same_bits(whole, rollout, "fused_logp and one shard")
    trained = batch.train(slice(None), 1)
    everything = Result(rollout.logp, rollout.lse, trained.dlogits)
    if kernel_serves(device, dtype):
        whole = call(batch.logits, batch.target, batch.temperature, batch.grad_logp)
        assert_same_bits(whole, everything, "fused_logp in training")

    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).to(device)
    compacted = batch.active.nonzero().squeeze(-1).to(device)
    for shards in SHARDS:
        assert_same_bits(batch.train(slice(None), shards), everything, f"{shards} shards")
    assert_same_bits(batch.train(order, 4), rows_of(everything, order), "permuted rows")
    active = batch.train(compacted, 8)
    assert_same_bits(active, rows_of(everything, compacted), "the active rows")
    assert_same_bits(in_chunks(batch, 7, 8), everything, "chunks of seven rows")
    assert_same_bits(in_chunks(batch, 1, 2), everything, "rows alone")


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
        self.rows = dict.fromkeys(Result._fields, 0)

    def add(self, actual: Result, expected: Result) -> None:
        self.compared += len(expected.logp)
        for name, a, e in zip(Result._fields, actual, expected, strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            self.rows[name] += int((bits(a) != bits(e)).reshape(len(a), -1).any(-1).sum())


def train_in_a_group(batch: Batch, index: Any, rank: int, size: int, kernel: bool) -> Result:
    """logp, lse and this rank's columns of the gradient, of these rows alone."""
    start, end = even_cuts(COLUMNS, size)[rank : rank + 2]
    leaf = batch.logits[index, start:end].clone().requires_grad_()
    logp, lse = rl_logp.vocab_parallel_logp(
        leaf,
        batch.target[index],
        group=dist.group.WORLD,
        vocab_start=start,
        vocab_size=COLUMNS,
        temperature=batch.temperature,
        return_lse=True,
        require_aligned=True,
        require_kernel=kernel,
    )
    (dlogits,) = torch.autograd.grad(logp, leaf, batch.grad_logp[index])
    return Result(logp.detach(), lse.detach(), dlogits)


def experiment(rank: int, size: int, device: str, kernel: bool) -> dict[str, dict[str, int]]:
    """What differs where each process has a shard from what one that has all columns gets.

    "rollout": logp and lse from those of the rollout; "training": all from those of one process.
    """
    rollouts, training = Differences(), Differences()
    start, end = even_cuts(COLUMNS, size)[rank : rank + 2]
    for seed, dtype, temperature, mask in CONFIGURATIONS:
        batch = Batch(seed, dtype, temperature, mask, device)
        score = call if kernel else call_in_shards
        rollout = score(*batch.rollout())
        whole = score(batch.logits, batch.target, batch.temperature, batch.grad_logp)
        whole = whole._replace(dlogits=whole.dlogits[:, start:end])
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).to(device)
        active = batch.active.nonzero().squeeze(-1).to(device)
        for index in (slice(None), order, active, slice(7, 14)):
            trained = train_in_a_group(batch, index, rank, size, kernel)
            training.add(trained, rows_of(whole, index))
        trained = train_in_a_group(batch, slice(None), rank, size, kernel)
        rollouts.add(trained, Result(rollout.logp, rollout.lse, whole.dlogits))
    found = {"rollout": rollouts, "training": training}
    return {name: {**of.rows, "compared": of.compared} for name, of in found.items()}


@pytest.mark.parametrize("device", [ON_GPUS])
def test_processes_with_a_gpu_each_train_as_the_rollout_scored(device: str, tmp_path: Path) -> None:
    """1200 rows of two GPUs against one, in both processes; by kernels, or it fails."""
    found = run_processes(2, device, tmp_path, experiment, True)
    for rank, differences in enumerate(found):
        assert differences["rollout"].pop("compared") == 1200
        assert differences["training"].pop("compared") > 3000
        for what, rows in differences.items():
            assert rows == {"logp": 0, "lse": 0, "dlogits": 0}, f"{what} on rank {rank}"
