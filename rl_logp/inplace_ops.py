"""The operator that writes dlogits over the logits (schema: ops.py). It has no derivative."""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _checks
from rl_logp.ops import _lib, write_dlogits


def _backward(
    grad_logp: Optional[Tensor],
    grad_lse: Optional[Tensor],
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    lse: Tensor,
    vocab_start: int,
    vocab_size: int,
    sharded: bool = False,
) -> None:
    arguments = (logits, target, temperature, lse, vocab_start, vocab_size)
    _checks.backward(grad_logp, grad_lse, *arguments)
    _checks.writable(logits)
    write_dlogits(grad_logp, grad_lse, arguments, sharded, logits)


def _backward_fake(grad_logp, grad_lse, *arguments) -> None:
    _checks.backward(grad_logp, grad_lse, *arguments[:6])


def _count_version(keyset, grad_logp: Optional[Tensor], grad_lse: Optional[Tensor], *arguments):
    """What torch does for its own operators, and not for one of a Library; before the write."""
    logits = arguments[0]
    given = [tensor for tensor in (grad_logp, grad_lse, logits) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        raise RuntimeError(
            "fused_logp: expected no tensor that requires grad where logits are overwritten, got"
            " one: this has no derivative"
        )
    torch.autograd.graph.increment_version(logits)
    return torch.ops.rl_logp.fused_logp_backward_.default.redispatch(
        keyset & torch._C._after_ADInplaceOrView_keyset, grad_logp, grad_lse, *arguments
    )


_lib.impl("fused_logp_backward_", _backward, "CompositeExplicitAutograd")
_lib.impl("fused_logp_backward_", _count_version, "ADInplaceOrView", with_keyset=True)
torch.library.register_fake("rl_logp::fused_logp_backward_", _backward_fake, lib=_lib)
