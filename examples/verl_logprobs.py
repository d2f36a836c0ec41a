"""verl's functions that score tokens, by rl_logp, beside verl's own, on made logits.

    python examples/verl_logprobs.py

The functions `logprobs_from_logits` and `vocab_parallel_log_probs_from_logits` of this file take
the place of verl's of these names (docs/integration.md says where). verl's own are called where
the packages verl and megatron-core can be imported, on a CPU too; elsewhere stand-ins in torch,
which do what verl documents.

Exits with 1 if a token has other bits by rl_logp on two processes than on one.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from op_cost import peak_bytes, seconds
from scoring import compare, served_by
from tabulate import tabulate
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import rl_logp
from rl_logp.reference import reference

VOCAB_SIZE = 32000
TEMPERATURE = 0.7
PROCESSES = 2


# --- what takes the place of verl's ---------------------------------------------------------------
def logprobs_from_logits(
    logits: Tensor, labels: Tensor, inplace_backward: bool = True, temperature: Any = 1.0
) -> Tensor:
    """For verl.utils.torch_functional. fp32; the gradient takes the logits' place, as in verl.

    So nothing may read them once the backward has begun, and a leaf is refused: pass
    inplace_backward=False there, as verl does where it takes an entropy of the same logits.

    The temperature is what verl has no argument for: it divides the logits beforehand, in their own
    dtype.
    """
    return rl_logp.fused_logp(
        logits, labels, temperature=temperature, inplace_backward=inplace_backward
    )


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """For verl.utils.megatron.tensor_parallel, where group is the tensor-parallel one."""
    columns = logits.shape[-1]
    return rl_logp.vocab_parallel_logp(
        logits,
        labels,
        group=group,
        vocab_start=dist.get_rank(group) * columns,
        vocab_size=dist.get_world_size(group) * columns,
    )


# --- verl's, or what stands in for them -----------------------------------------------------------
def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


def verl_whole() -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    if installed("verl"):
        from verl.utils.torch_functional import (  # pyright: ignore[reportMissingImports]
            logprobs_from_logits,
        )

        return "verl", logprobs_from_logits
    return (
        "stand-in for verl",
        lambda logits, labels: logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1),
    )


def verl_parallel(group: Any) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """verl's function is one call of Megatron-LM's, which needs its groups to be set up."""
    if installed("megatron"):
        from megatron.core import (  # pyright: ignore[reportMissingImports]
            parallel_state,
            tensor_parallel,
        )

        parallel_state.initialize_model_parallel(dist.get_world_size(group))
        loss = tensor_parallel.vocab_parallel_cross_entropy
        # It writes logits that are fp32, as those of a training step may be: they are scratch.
        return "verl with Megatron-LM", lambda logits, labels: -loss(logits.clone(), labels)
    return "stand-in for verl", lambda logits, labels: _StandIn.apply(logits, labels, group)


class _StandIn(torch.autograd.Function):
    """Reductions of the largest logit, the sum of exponentials and the target's logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        largest = logits.float().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits.float() - largest.unsqueeze(-1)
        total = shifted.exp().sum(-1)
        dist.all_reduce(total, group=group)
        column = labels - dist.get_rank(group) * logits.shape[-1]
        here = (column >= 0) & (column < logits.shape[-1])
        column = column.where(here, 0).unsqueeze(-1)
        target = shifted.gather(-1, column).squeeze(-1).where(here, 0.0)
        dist.all_reduce(target, group=group)
        ctx.save_for_backward(shifted.exp() / total.unsqueeze(-1), column, here)
        ctx.dtype = logits.dtype
        return target - total.log()

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax, column, here = ctx.saved_tensors
        upstream = grad_logp.unsqueeze(-1)
        grad = -softmax * upstream
        grad.scatter_add_(-1, column, upstream * here.unsqueeze(-1))
        return grad.to(ctx.dtype), None, None


# --- a vocabulary that several processes share ----------------------------------------------------
def made(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, VOCAB_SIZE, generator=generator)
    return logits.to(dtype), torch.randint(VOCAB_SIZE, (rows,), generator=generator)


def in_process(rank: int, rows: int, size: int, folder: str) -> None:
    """Saves, by the way to score: what this process scored, and what it cost."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{size}", rank=rank, world_size=size
    )
    group = dist.group.WORLD
    logits, labels = made(rows, torch.bfloat16)
    shard = logits.chunk(size, dim=-1)[rank].clone().requires_grad_()
    name, theirs = verl_parallel(group)
    ways = {
        name: theirs,
        "rl_logp": lambda x, t: vocab_parallel_log_probs_from_logits(x, t, group),
    }
    found = {}
    for way, score in ways.items():

        def step(score: Callable[[Tensor, Tensor], Tensor] = score) -> None:
            shard.grad = None
            score(shard, labels).sum().backward()

        step()  # warm up
        elapsed = seconds(step, "cpu", repeats=5)
        shard.grad = None
        peak = peak_bytes(step, "cpu") / shard.nbytes
        found[way] = score(shard, labels).detach().float(), elapsed, peak
    torch.save(found, f"{folder}/{size}.{rank}")
    dist.barrier()
    dist.destroy_process_group()
    # Once, a process with all its work done aborted on its way out ("terminate called without an
    # active exception"): torch's threads are not waited for.
    os._exit(0)


def shared_vocabulary(rows: int) -> int:
    """Prints what several processes found beside what one did; how many bits rl_logp missed."""
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, PROCESSES):
            spawn(in_process, (rows, size, folder), nprocs=size)
        alone, together = (torch.load(Path(folder, f"{size}.0")) for size in (1, PROCESSES))
    exact = reference(*made(rows, torch.bfloat16)).logp
    lines = []
    differing = 0
    for way, (logp, elapsed, peak) in together.items():
        one = alone[way][0]
        differing = int((logp.view(torch.int32) != one.view(torch.int32)).sum())
        apart, error = (logp - one).abs().max(), (logp.double() - exact).abs().max()
        line = [way, f"{differing} of {rows}", f"{apart:.1e}", f"{error:.1e}"]
        lines.append([*line, f"{elapsed * 1e3:.4g}", f"{peak:.2f}"])
    headers = [
        f"{PROCESSES} processes", "differ in bits from 1 process", "by at most",
        "from exact at most", "time (ms)", "peak memory, x the shard",
    ]  # fmt: skip
    align = ["left"] + ["right"] * (len(headers) - 1)
    print(f"\nA vocabulary of {VOCAB_SIZE} shared, bf16, forward + backward")
    print(tabulate(lines, headers, colalign=align, disable_numparse=True))
    return differing  # of the last way, rl_logp


def main() -> int:
    parser = argparse.ArgumentParser(description="verl's scoring functions beside rl_logp's")
    parser.add_argument("--rows", type=int, default=512, help="tokens to score (default 512)")
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    name, theirs = verl_whole()
    print(f"torch {torch.__version__}; {served_by('cpu', torch.bfloat16)}")
    for dtype in (torch.float32, torch.bfloat16):  # of a leaf, which cannot be overwritten
        logits, labels = made(rows, dtype)
        ways = {name: theirs, "rl_logp": partial(logprobs_from_logits, inplace_backward=False)}
        compare(f"logprobs_from_logits of [{rows}, {VOCAB_SIZE}], {dtype}", ways, logits, labels)
    ways = {
        f"{name}, of logits / T": lambda x, t: theirs(x / torch.tensor(TEMPERATURE).to(x.dtype), t),
        "rl_logp, temperature=T": partial(
            logprobs_from_logits, inplace_backward=False, temperature=TEMPERATURE
        ),
    }
    compare(f"The same at T = {TEMPERATURE}", ways, logits, labels, TEMPERATURE)
    return 1 if shared_vocabulary(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
