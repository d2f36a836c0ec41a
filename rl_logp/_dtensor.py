"""DTensor: sharding rules for the operators, and logits whose vocabulary is sharded.

Rows are independent, so logits that are sharded on leading dimensions need no communication: that
is all the rules say. A sharded vocabulary goes through ``score`` below, which gathers states; an
operator that meets one raises, since DTensor would gather the logits.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard

from rl_logp import _shard

_OPS = torch.ops.rl_logp


def _shards(placement: Placement, dim: Optional[int] = None) -> bool:
    """Whether it shards this dimension, or any, in any order: ``is_shard`` knows one alone."""
    return isinstance(placement, (Shard, _StridedShard)) and dim in (None, placement.dim)


def _by_rows(logits, others: tuple, outputs: int) -> list:
    """Every dimension but the vocabulary may be sharded, of all tensors alike, or none."""
    if any(_shards(p, logits.ndim - 1) for p in logits.placements):
        raise ValueError(
            "fused_logp: expected logits that are not sharded on the vocabulary,"
            f" got {logits.placements}: call rl_logp.fused_logp"
        )

    def placed(placement: Placement, tensor) -> Optional[Placement]:
        if tensor is None:
            return None
        return placement if tensor.ndim else Replicate()

    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(logits.ndim - 1))]
    # What flattening rows makes of a shard. Where it is not on offer, DTensor gathers the logits.
    choices += [p for p in logits.placements if isinstance(p, _StridedShard)]
    return [([p] * outputs, [placed(p, tensor) for tensor in others]) for p in choices]


@register_sharding(_OPS.fused_logp_forward.default)
def _forward_sharding(logits, target, temperature, *options):
    strategies = _by_rows(logits, (logits, target, temperature), 2)
    return [(outputs, [*inputs, *[None] * len(options)]) for outputs, inputs in strategies]


@register_sharding(_OPS.fused_logp_backward.default)
def _backward_sharding(grad_logp, grad_lse, logits, target, temperature, lse, *numbers):
    tensors = (grad_logp, grad_lse, logits, target, temperature, lse)
    strategies = _by_rows(logits, tensors, 1)
    return [(outputs, [*inputs, *[None] * len(numbers)]) for outputs, inputs in strategies]


@register_sharding(_OPS.fused_logp_entropy_forward.default)
def _entropy_forward_sharding(logits, target, temperature, *options):
    strategies = _by_rows(logits, (logits, target, temperature), 4)
    return [(outputs, [*inputs, *[None] * len(options)]) for outputs, inputs in strategies]


@register_sharding(_OPS.fused_logp_entropy_backward.default)
def _entropy_backward_sharding(
    grad_logp, grad_entropy, grad_lse, logits, target, temperature, lse, mean, *numbers
):
    tensors = (grad_logp, grad_entropy, grad_lse, logits, target, temperature, lse, mean)
    strategies = _by_rows(logits, tensors, 1)
    return [(outputs, [*inputs, *[None] * len(numbers)]) for outputs, inputs in strategies]


def no_inplace_backward(logits: Any) -> ValueError:
    return ValueError(
        "fused_logp: expected logits that are not sharded on the vocabulary where"
        f" inplace_backward=True, got {logits.placements}"
    )


def writable(logits: Any) -> Tensor:
    """This process's part of logits that their gradient is to overwrite, where it could."""
    if any(placement.is_partial() for placement in logits.placements):
        raise ValueError(
            "fused_logp: expected no partial sums where inplace_backward=True,"
            f" got {logits.placements}"
        )
    with torch.no_grad():  # so that it is the tensor that others count the versions of
        return logits.to_local()


def backward_(local_logits: Tensor, *arguments: Any) -> None:
    """fused_logp_backward_ where the logits lie: all else is brought there, O(N) as it is."""
    logits = arguments[2]
    mesh, rows = logits.device_mesh, logits.placements

    def local(argument: Any) -> Any:
        if argument is logits:
            return local_logits
        is_tensor = isinstance(argument, Tensor)
        return _local("fused_logp", "", argument, mesh, rows) if is_tensor else argument

    torch.autograd.graph.increment_version(logits)  # beside that of its local tensor
    _OPS.fused_logp_backward_(*map(local, arguments))


def is_vocab_sharded(logits: Tensor) -> bool:
    return isinstance(logits, DTensor) and any(
        _shards(placement, logits.dim() - 1) for placement in logits.placements
    )


def vocab_range(
    caller: str, mesh: DeviceMesh, placements: tuple, dim: int, size: int
) -> tuple[int, int]:
    """Start and length of this rank's piece of a dimension, cut as DTensor and torch.chunk do."""
    start = 0
    for mesh_dim, placement in enumerate(placements):
        if not _shards(placement, dim):
            continue
        # Not `type(...) is Shard`, which Dynamo in torch 2.11 finds false of any.
        if isinstance(placement, _StridedShard):
            raise ValueError(f"{caller}: expected the vocabulary in order, got {placement}")
        piece = -(-size // mesh.size(mesh_dim))
        before = min(piece * mesh.get_local_rank(mesh_dim), size)
        start, size = start + before, min(piece, size - before)
    return start, size


def score(
    caller: str,
    logits: Any,
    target: Optional[Tensor],
    temperature: Optional[Tensor],
    *,
    require_aligned: bool = False,
    **wanted: bool,
) -> tuple[Tensor, ...]:
    """As ``_shard.score``, to DTensors whose rows are sharded as those of logits.

    ``caller`` is the function that errors are to name.
    """
    mesh, placements, dim = logits.device_mesh, logits.placements, logits.dim() - 1
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{caller}: expected no partial sums, got {placements}")
    rows = [Replicate() if p.is_shard(dim) else p for p in placements]
    vocab_start, columns = vocab_range(caller, mesh, placements, dim, logits.shape[dim])
    if require_aligned:
        _shard.check_aligned(caller, vocab_start, columns, logits.shape[dim])

    def gather(states: Tensor) -> Tensor:
        for mesh_dim, placement in enumerate(placements):
            if placement.is_shard(dim):
                states = _shard.all_gather(states, (mesh, mesh_dim))
        return states

    results = _shard.score(
        logits.to_local(),
        None if target is None else _local(caller, "target", target, mesh, rows),
        None if temperature is None else _local(caller, "temperature", temperature, mesh, rows),
        gather,
        vocab_start,
        logits.shape[dim],
        **wanted,
    )
    shape = logits.shape[:-1]
    stride = torch.empty(shape, device="meta").stride()
    return tuple(
        DTensor.from_local(result, mesh, rows, run_check=False, shape=shape, stride=stride)
        for result in results
    )


def per_row(caller: str, logits: Any, **of_rows: Optional[Tensor]) -> list[Any]:
    """target and temperature as DTensors beside logits; torch itself takes 0-dim ones."""
    mesh, rows = logits.device_mesh, logits.placements
    replicated = [Replicate()] * mesh.ndim

    def placed(name: str, tensor: Optional[Tensor]) -> Optional[Tensor]:
        if tensor is None or isinstance(tensor, DTensor) or not tensor.dim():
            return tensor
        whole = _local(caller, name, tensor, mesh, rows)
        return DTensor.from_local(whole, mesh, replicated, run_check=False)

    return [placed(name, tensor) for name, tensor in of_rows.items()]


def _local(
    caller: str, name: str, per_row: Tensor, mesh: DeviceMesh, rows: Sequence[Placement]
) -> Tensor:
    """This rank's part of a tensor with one element a row. A plain tensor has all of them."""
    if isinstance(per_row, DTensor):
        placements = rows if per_row.dim() else [Replicate()] * len(rows)
        return per_row.redistribute(mesh, placements).to_local()
    if per_row.dim() and any(_shards(placement) for placement in rows):
        raise ValueError(
            f"{caller}: expected {name} as a DTensor, where rows are sharded as"
            f" {tuple(rows)}, got a plain tensor"
        )
    return per_row
