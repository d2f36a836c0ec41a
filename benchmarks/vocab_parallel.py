"""Ways to score logits whose vocabulary is cut over a group, and what they send.

Each is a function (shard [N, C], target [N], first column of the shard, vocabulary, group) -> logp
[N], with autograd; a group of None is one process with all columns.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rl_logp

Function = Callable[[Tensor, Tensor, int, int, Any], Tensor]


def ours(shard: Tensor, target: Tensor, start: int, vocab_size: int, group: Any) -> Tensor:
    return rl_logp.vocab_parallel_logp(
        shard, target, group=group, vocab_start=start, vocab_size=vocab_size
    )


class _Gather(torch.autograd.Function):
    """All columns in every process, whose gradient of them is the same: each keeps its own."""

    @staticmethod
    def forward(ctx, shard: Tensor, start: int, group: Any) -> Tensor:
        rows, ctx.columns = shard.shape
        ctx.start, size = start, dist.get_world_size(group)
        shards = shard.new_empty(size * rows, ctx.columns)
        dist.all_gather_into_tensor(shards, shard, group=group)
        return torch.cat(shards.chunk(size), -1)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        mine = grads[0][:, ctx.start : ctx.start + ctx.columns]
        return mine.contiguous(), None, None


def gather(shard: Tensor, target: Tensor, start: int, vocab_size: int, group: Any) -> Tensor:
    """The logits of all shards, then fused_logp. Shards must be of equal size."""
    whole = shard if group is None else _Gather.apply(shard, start, group)
    return rl_logp.fused_logp(whole, target)  # pyright: ignore[reportArgumentType]


class _AllReduces(torch.autograd.Function):
    """The textbook in fp32: all-reduce the maximum, the target's logit, the sum of exponentials."""

    @staticmethod
    def forward(ctx, shard: Tensor, target: Tensor, start: int, group: Any) -> Tensor:
        def all_reduce(values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
            if group is not None:
                dist.all_reduce(values, op, group=group)
            return values

        logits = shard.to(torch.float32, copy=True)
        largest = all_reduce(logits.amax(-1), dist.ReduceOp.MAX)
        logits.sub_(largest.unsqueeze(-1))
        column = target - start
        here = (column >= 0) & (column < shard.shape[-1])
        column = column.clamp(0, shard.shape[-1] - 1).unsqueeze(-1)
        chosen = logits.gather(-1, column).squeeze(-1)
        chosen = all_reduce(torch.where(here, chosen, 0.0))
        exponentials = logits.exp_()
        total = all_reduce(exponentials.sum(-1))
        p = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(p, column, here)
        ctx.dtype = shard.dtype
        return chosen - total.log()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        p, column, here = ctx.saved_tensors
        grad = grads[0].unsqueeze(-1)
        gradient = p.mul_(-grad)  # in the memory of p: this backward runs once
        gradient.scatter_add_(-1, column, torch.where(here.unsqueeze(-1), grad, 0.0))
        return gradient.to(ctx.dtype), None, None, None


def all_reduces(shard: Tensor, target: Tensor, start: int, vocab_size: int, group: Any) -> Tensor:
    return _AllReduces.apply(shard, target, start, group)  # pyright: ignore[reportReturnType]


FUNCTIONS: dict[str, Function] = {"rl_logp": ours, "gather": gather, "all_reduces": all_reduces}


class Traffic(TorchDispatchMode):
    """Adds up what collectives on tensors make this process send, at least.

    Of ``size`` processes: an all-gather of B bytes from each sends B to every other; an all-reduce
    of B bytes in a ring sends ``2 * B * (size - 1) / size``. Any other collective is an error.
    """

    _SEND_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.bytes, self.calls = size, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().split(".")[0].partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in self._SEND_NOTHING:
            self._add(name, args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: tuple) -> None:
        others = self.size - 1
        if name == "all_gather_into_tensor":
            sent = args[0].nbytes * others
        elif name == "_allgather_base_":
            sent = args[1].nbytes * others
        elif name == "allreduce_":
            sent = sum(2 * tensor.nbytes * others // self.size for tensor in args[0])
        else:
            raise NotImplementedError(f"Traffic: expected a collective that it knows, got {name}")
        self.bytes += sent
        self.calls += 1
