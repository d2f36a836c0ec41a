"""Shards of a vocabulary on one device: what every process of a group would compute, in turn."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from calls import EntropyResult, Result, no_host_sync
from torch import Tensor

OPS = torch.ops.rl_logp
WORDS = 8
WEIGHTED_WORDS = 13
# Words 0 and 4 of an empty row: nothing seen, in no group; the largest value is -inf.
EMPTY = [-(2**31), 0, 0, 0, 0xFF800000, 0, 0, 0]


def even_cuts(vocab_size: int, shards: int) -> tuple[int, ...]:
    """As many shards of equal size, whose starts are multiples of 16 if the size allows it."""
    assert vocab_size % (16 * shards) == 0
    return tuple(range(0, vocab_size + 1, vocab_size // shards))


def states_of(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    cuts: Sequence[int],
    all_rows: bool = True,
) -> Tensor:
    """The states of all shards ``[S, ..., 8]``, as the all-gather would bring them together."""
    return torch.stack(
        [
            OPS.fused_logp_partial(
                logits[..., start:end], target, temperature, all_rows, start, cuts[-1]
            )
            for start, end in pairwise(cuts)
        ]
    )


def weighted_states_of(
    logits: Tensor, target: Tensor, temperature: Tensor | None, cuts: Sequence[int]
) -> Tensor:
    """The same with what an entropy needs, ``[S, ..., 13]``."""
    return torch.stack(
        [
            OPS.fused_logp_entropy_partial(
                logits[..., start:end], target, temperature, start, cuts[-1]
            )
            for start, end in pairwise(cuts)
        ]
    )


def call_in_shards(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None = None,
    grad_logp: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    cuts: Sequence[int] | None = None,
) -> Result:
    """As calls.call, over shards; each has its own logits, and gets its own gradient of them."""
    cuts = (0, logits.shape[-1]) if cuts is None else cuts
    with no_host_sync(logits.device):
        states = states_of(logits, target, temperature, cuts)
        dlogits = []
        logp = lse = torch.empty(0)
        for start, end in pairwise(cuts):
            leaf = logits[..., start:end].detach().requires_grad_()
            logp, lse = OPS.fused_logp_shard(leaf, target, temperature, states, start, cuts[-1])
            outputs, grads = [logp], [torch.ones_like(logp) if grad_logp is None else grad_logp]
            if grad_lse is not None:
                outputs, grads = [logp, lse], [grads[0], grad_lse]
            dlogits += torch.autograd.grad(outputs, leaf, grads)
    return Result(logp.detach(), lse.detach(), torch.cat(dlogits, -1))


def call_in_shards_with_entropy(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None = None,
    grad_logp: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    cuts: Sequence[int] | None = None,
) -> EntropyResult:
    """As calls.call_with_entropy, over shards."""
    cuts = (0, logits.shape[-1]) if cuts is None else cuts
    with no_host_sync(logits.device):
        states = weighted_states_of(logits, target, temperature, cuts)
        dlogits = []
        logp = entropy = lse = torch.empty(0)
        for start, end in pairwise(cuts):
            leaf = logits[..., start:end].detach().requires_grad_()
            logp, entropy, lse, _ = OPS.fused_logp_entropy_shard(
                leaf, target, temperature, states, start, cuts[-1]
            )
            outputs, grads = [logp], [torch.ones_like(logp) if grad_logp is None else grad_logp]
            if grad_lse is not None:
                outputs, grads = [logp, entropy, lse], [grads[0], grad_lse.float(), grad_lse]
            dlogits += torch.autograd.grad(outputs, leaf, grads)
    return EntropyResult(logp.detach(), entropy.detach(), lse.detach(), torch.cat(dlogits, -1))
