"""The gradient in the memory of the logits: what it refuses, and what it falls back on.

Autograd learns of it by the version of the logits, which is counted up: whatever else has saved
them raises when it takes them out. So the logits are written only where that can be relied on.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from rl_logp import _checks


def prepare(ctx, logits: Tensor, inplace_backward: bool) -> None:
    """Says in ``ctx`` whether a backward is to overwrite the logits: ValueError if none ever could.

    It does not where something else than autograd keeps what autograd saves: a compiler, which
    hands the backward inputs of its graphs, or hooks (activation checkpointing), which hand out one
    tensor for all who saved it and see no version. There the gradient is a new tensor.
    """
    ctx.overwrites = ctx.overwritten = False
    if not (inplace_backward and ctx.needs_input_grad[0]):
        return
    if torch.compiler.is_compiling() or is_fake(logits):
        return
    base = logits._base
    of_leaf = base is not None and base.is_leaf and base.requires_grad
    if logits.is_leaf or of_leaf or _lies_in_a_leaf(logits):
        raise ValueError(
            "fused_logp: expected logits that were computed where inplace_backward=True, got a leaf"
            " that requires grad, or a view of one: its values would be lost"
        )
    made_by = logits.grad_fn if base is None else base.grad_fn
    if made_by is not None and made_by.name().startswith("UnsafeSplit"):
        raise ValueError(
            "fused_logp: expected logits that share versions with what shares their memory where"
            " inplace_backward=True, got a result of unsafe_split or unsafe_chunk"
        )
    if base is not None and not base.requires_grad and _is_of_dtensor(logits):
        raise ValueError(
            "fused_logp: expected a DTensor itself where inplace_backward=True, got its local"
            " tensor: what else has saved the DTensor would not know"
        )
    from rl_logp import _shard  # which imports the operators, and they this

    ctx.local = None
    if _shard.is_dtensor(logits):
        from rl_logp import _dtensor

        ctx.local = _dtensor.writable(logits)
    _checks.writable(logits if ctx.local is None else ctx.local)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    ctx.overwrites = hooks is None and not logits.is_neg()


def _lies_in_a_leaf(logits: Tensor) -> bool:
    """Whether logits lie in the memory of the leaf they come from, though they are no view of it.

    So do those of unsafe_split, or of an autograd.Function that detaches what it was given.
    """
    node, memory = logits.grad_fn, _of_process(logits)
    while node is not None:
        inputs: list[Any] = [given for given, _ in node.next_functions if given is not None]
        leaves = [x.variable for x in inputs if x.name() == "torch::autograd::AccumulateGrad"]
        if any(torch._C._is_alias_of(memory, _of_process(leaf)) for leaf in leaves):  # pyright: ignore[reportAttributeAccessIssue]
            return True
        node = inputs[0] if len(inputs) == 1 else None
    return False


def _of_process(tensor: Any) -> Tensor:
    """The tensor; of a DTensor, the part that this process holds."""
    from rl_logp import _shard

    if not _shard.is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _is_of_dtensor(logits: Tensor) -> bool:
    """Whether a view that some autograd.Function made is one of a DTensor's memory."""
    node = logits.grad_fn
    while node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        inputs = [function for function, _ in node.next_functions if function is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return node is not None and node.name() == "_ToTorchTensorBackward"


def overwrites(ctx) -> bool:
    """Whether this backward is to overwrite the logits; compiled autograd traces a ``ctx`` too."""
    return ctx.overwrites and not torch.compiler.is_compiling()


def overwrite(
    ctx,
    grad_logp: Optional[Tensor],
    grad_lse: Optional[Tensor],
    grad_entropy: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """The saved logits, overwritten with their gradient."""
    if grad_logp is None and grad_lse is None and grad_entropy is None:
        return None
    if ctx.overwritten:
        raise RuntimeError(
            "fused_logp: expected one backward where inplace_backward=True, got a second one: the"
            " logits hold the gradient of the first"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused_logp: expected a backward without create_graph=True where inplace_backward=True,"
            " got one with it"
        )
    logits, target, temperature, lse, *mean = ctx.saved_tensors
    ctx.overwritten = True
    arguments = (target, temperature, lse, *ctx.shard, False, grad_entropy, *mean)
    if ctx.local is None:
        torch.ops.rl_logp.fused_logp_backward_(grad_logp, grad_lse, logits.detach(), *arguments)
    else:
        from rl_logp import _dtensor

        _dtensor.backward_(ctx.local, grad_logp, grad_lse, logits, *arguments)
        ctx.local = None
    return logits.detach()
