"""The operators that return a row's entropy (schemas: ops.py): composites, autograd, who serves.

The entropy is that of softmax(y), y = logits / temperature, in nats: lse - E[y]. It is of every
row, whatever its target; ``mean`` is E[y], which the gradient is computed from. With ``all_rows``
False, what fused_logp_entropy_forward returns of ignored rows beside logp, and what is computed
from its gradient, means nothing: ``of_targets`` takes both away.
"""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _checks, _inplace, _library, chunked
from rl_logp.ops import (
    _lib,
    backward_output,
    batched,
    forward_outputs,
    grad_logp_of,
    no_second_derivative,
    save_for_backward,
    write_dlogits,
)


# --- fused_logp_entropy, fused_logp_entropy_with_lse and fused_entropy: the composites ------------
def no_target(logits: Tensor) -> Tensor:
    """A target for rows of which only the entropy is wanted: all are ignored."""
    return logits.new_full((), -1, dtype=torch.int64).expand(logits.shape[:-1])


def of_targets(target: Tensor, vocab_size: int, *results: Tensor) -> tuple[Tensor, ...]:
    """0 for ignored rows, whatever their results are, and whatever gradient comes to these."""
    ignored = (target < 0) | (target >= vocab_size)
    return tuple(result.masked_fill(ignored, 0) for result in results)


def _fused_logp_entropy(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor] = None,
    inplace_backward: bool = False,
    all_rows: bool = True,
) -> tuple[Tensor, Tensor]:
    _checks.reverse_mode(logits)
    logp, entropy, _, _ = torch.ops.rl_logp.fused_logp_entropy_forward(
        logits, target, temperature, inplace_backward, all_rows
    )
    if not all_rows:
        (entropy,) = of_targets(target, logits.shape[-1], entropy)
    return logp, entropy


def _fused_logp_entropy_with_lse(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor] = None,
    inplace_backward: bool = False,
    all_rows: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.reverse_mode(logits)
    logp, entropy, lse, _ = torch.ops.rl_logp.fused_logp_entropy_forward(
        logits, target, temperature, inplace_backward, all_rows
    )
    if not all_rows:
        entropy, lse = of_targets(target, logits.shape[-1], entropy, lse)
    return logp, entropy, lse


def _fused_entropy(
    logits: Tensor, temperature: Optional[Tensor] = None, inplace_backward: bool = False
) -> Tensor:
    _checks.reverse_mode(logits)
    return torch.ops.rl_logp.fused_logp_entropy_forward(
        logits, no_target(logits), temperature, inplace_backward
    )[1]


def _fused_logp_entropy_vmap(info, in_dims, *args):
    return torch.ops.rl_logp.fused_logp_entropy(*batched(info, in_dims, *args)), (0, 0)


def _fused_logp_entropy_with_lse_vmap(info, in_dims, *args):
    results = torch.ops.rl_logp.fused_logp_entropy_with_lse(*batched(info, in_dims, *args))
    return results, (0, 0, 0)


def _fused_entropy_vmap(info, in_dims, logits: Tensor, *options):
    dim = None if in_dims[0] is None else 0
    logits = logits if dim is None else logits.movedim(in_dims[0], dim)
    in_dims = (dim, dim, *in_dims[1:])
    logits, _, *options = batched(info, in_dims, logits, no_target(logits), *options)
    return torch.ops.rl_logp.fused_entropy(logits, *options), 0


_lib.impl("fused_logp_entropy", _fused_logp_entropy, "CompositeImplicitAutograd")
_lib.impl("fused_logp_entropy_with_lse", _fused_logp_entropy_with_lse, "CompositeImplicitAutograd")
_lib.impl("fused_entropy", _fused_entropy, "CompositeImplicitAutograd")
torch.library.register_vmap("rl_logp::fused_logp_entropy", _fused_logp_entropy_vmap, lib=_lib)
torch.library.register_vmap(
    "rl_logp::fused_logp_entropy_with_lse", _fused_logp_entropy_with_lse_vmap, lib=_lib
)
torch.library.register_vmap("rl_logp::fused_entropy", _fused_entropy_vmap, lib=_lib)


# --- fused_logp_entropy_forward -------------------------------------------------------------------
def _outputs(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logp, lse = forward_outputs(logits, target)
    entropy, mean = forward_outputs(logits, target)
    return logp, entropy, lse, mean


def _forward(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    inplace_backward: bool = False,
    all_rows: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _checks.forward(logits, target, temperature)
    _checks.temperature_values(temperature)
    outputs = logp, entropy, lse, mean = _outputs(logits, target)
    if _library.kernel_for(logits.device.type, logits.dtype).available:
        _checks.entropy_columns(logits.shape[-1])
        torch.ops.rl_logp._fused_logp_forward_out(
            _checks.kernel_layout(logits), target, temperature, all_rows, logp, lse, entropy, mean
        )
    else:
        chunked.forward(logits, target, temperature, logp, lse, entropy=entropy, mean=mean)
    return outputs


def _forward_fake(logits, target, temperature, inplace_backward=False, all_rows=True):
    _checks.forward(logits, target, temperature)
    return _outputs(logits, target)


_lib.impl("fused_logp_entropy_forward", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_entropy_forward", _forward_fake, lib=_lib)


def dlogits_of(
    ctx,
    grad_logp: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    grad_lse: Optional[Tensor],
    grad_mean: Optional[Tensor],
) -> Optional[Tensor]:
    if grad_mean is not None:
        raise RuntimeError(
            "fused_logp: expected no gradient towards mean, which is not differentiable, got one:"
            " detach it, or differentiate lse - entropy"
        )
    if _inplace.overwrites(ctx):
        return _inplace.overwrite(ctx, grad_logp, grad_lse, grad_entropy)
    *saved, mean = ctx.saved_tensors
    other = grad_lse if grad_entropy is None else grad_entropy
    if other is not None:
        grad_logp = grad_logp_of(saved[0], grad_logp, other)
    if grad_entropy is not None:
        return torch.ops.rl_logp.fused_logp_entropy_backward(
            grad_logp, grad_entropy, grad_lse, *saved, mean, *ctx.shard
        )
    if grad_logp is None and grad_lse is None:
        return None
    return torch.ops.rl_logp.fused_logp_backward(grad_logp, grad_lse, *saved, *ctx.shard)


def _save_for_backward(ctx, inputs, output) -> None:
    columns = inputs[0].shape[-1]
    save_for_backward(ctx, inputs, output[2:], 0, columns, inplace_backward=inputs[3])


def _forward_autograd(ctx, *grads: Optional[Tensor]):
    return dlogits_of(ctx, *grads), None, None, None, None


torch.library.register_autograd(
    "rl_logp::fused_logp_entropy_forward",
    _forward_autograd,
    setup_context=_save_for_backward,
    lib=_lib,
)


# --- fused_logp_entropy_backward ------------------------------------------------------------------
def _backward(
    grad_logp: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    grad_lse: Optional[Tensor],
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    lse: Tensor,
    mean: Tensor,
    vocab_start: int,
    vocab_size: int,
    sharded: bool = False,
) -> Tensor:
    arguments = (logits, target, temperature, lse, vocab_start, vocab_size)
    _checks.backward(grad_logp, grad_lse, *arguments, grad_entropy, mean)
    dlogits = backward_output(logits)
    write_dlogits(grad_logp, grad_lse, arguments, sharded, dlogits, grad_entropy, mean)
    return dlogits


def _backward_fake(
    grad_logp,
    grad_entropy,
    grad_lse,
    logits,
    target,
    temperature,
    lse,
    mean,
    vocab_start,
    vocab_size,
    sharded=False,
):
    arguments = (logits, target, temperature, lse, vocab_start, vocab_size)
    _checks.backward(grad_logp, grad_lse, *arguments, grad_entropy, mean)
    return backward_output(logits)


_lib.impl("fused_logp_entropy_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_entropy_backward", _backward_fake, lib=_lib)
torch.library.register_autograd(
    "rl_logp::fused_logp_entropy_backward", no_second_derivative, lib=_lib
)
