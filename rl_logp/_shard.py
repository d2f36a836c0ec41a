"""What plain tensors and DTensors that hold a shard of the vocabulary have in common."""

from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from rl_logp._state import GROUP
from rl_logp.entropy_ops import no_target, of_targets


def score(
    logits: Tensor,
    target: Optional[Tensor],
    temperature: Optional[Tensor],
    gather: Optional[Callable[[Tensor], Tensor]],
    vocab_start: int,
    vocab_size: int,
    all_rows: bool = True,
    with_entropy: bool = False,
) -> tuple[Tensor, ...]:
    """logp and lse, or logp, entropy and lse; with a target of None every row is ignored.

    ``gather`` makes the states of all shards ``[S, ...]`` of those of this one. None: this is the
    only shard.
    """
    operators: Any = torch.ops.rl_logp
    rows = (no_target(logits) if target is None else target, temperature)
    vocabulary = (vocab_start, vocab_size)
    operators._check_transforms(logits, *rows, gather is not None)
    if with_entropy:
        states = operators.fused_logp_entropy_partial(logits.detach(), *rows, *vocabulary)
    else:
        states = operators.fused_logp_partial(logits.detach(), *rows, all_rows, *vocabulary)
    states = states.unsqueeze(0)
    if gather is not None:
        states = gather(states)
    if with_entropy:
        logp, *others, _ = operators.fused_logp_entropy_shard(logits, *rows, states, *vocabulary)
        return logp, *(others if all_rows else of_targets(rows[0], vocab_size, *others))
    return operators.fused_logp_shard(logits, *rows, states, *vocabulary)


def all_gather(states: Tensor, group: Any) -> Tensor:
    """The states of every process of a group (or of a mesh and one of its dimensions)."""
    import torch.distributed._functional_collectives as collectives

    # all_gather_single is what all_gather_tensor became in torch 2.13.
    name = "all_gather_single" if hasattr(collectives, "all_gather_single") else "all_gather_tensor"
    return collectives.wait_tensor(getattr(collectives, name)(states, 0, group))


def is_dtensor(tensor: Optional[Tensor]) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def check_plain(caller: str, **of_rows: Optional[Tensor]) -> None:
    """Raises ValueError for a DTensor beside logits that are none."""
    for name in of_rows:  # not .items(): Dynamo would name the graph's tensors after the variable
        if is_dtensor(of_rows[name]):
            raise ValueError(
                f"{caller}: expected {name} as a plain tensor, as logits are, got a DTensor"
            )


def check(caller: str, vocab_start: int, columns: int, vocab_size: int, shards: int) -> None:
    """Raises ValueError where one shard shows that shards overlap or are missing."""
    vocab_end = vocab_start + columns
    if vocab_start < 0 or vocab_end > vocab_size:
        return  # which the operators say
    got = f"got columns {vocab_start} to {vocab_end} of {vocab_size}"
    if shards == 1 and columns != vocab_size:
        raise ValueError(f"{caller}: expected the whole vocabulary where no group shares it, {got}")
    if shards == 2 and columns and vocab_start > 0 and vocab_end < vocab_size:
        raise ValueError(f"{caller}: expected the first or the last of 2 shards, {got}")


def check_aligned(caller: str, vocab_start: int, columns: int, vocab_size: int) -> None:
    """Raises ValueError unless this shard and the next start at a group of columns."""
    vocab_end = vocab_start + columns
    if columns == 0:
        return
    if vocab_start % GROUP or (vocab_end % GROUP and vocab_end != vocab_size):
        raise ValueError(
            f"{caller}: expected shards that start at multiples of {GROUP}"
            f" columns, got columns {vocab_start} to {vocab_end} of {vocab_size}"
        )
