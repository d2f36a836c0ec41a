"""The operator that writes dlogits over the logits (schema: ops.py). It has no derivative.

It is of logp, and of the entropy where grad_entropy and mean are given.
"""

from typing import Any, Optional

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
    grad_entropy: Optional[Tensor] = None,
    mean: Optional[Tensor] = None,
) -> None:
    arguments = (logits, target, temperature, lse, vocab_start, vocab_size)
    _checks.backward(grad_logp, grad_lse, *arguments, grad_entropy, mean)
    _checks.writable(logits)
    storage = logits.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def kept(of_rows: Optional[Tensor]) -> Any:
        """A copy where the logits' memory holds it: rows are written before others are read."""
        if of_rows is not None and start <= of_rows.data_ptr() < end:
            return of_rows.clone()
        return of_rows

    arguments = (logits, kept(target), kept(temperature), kept(lse), vocab_start, vocab_size)
    grad_logp, grad_lse, grad_entropy = kept(grad_logp), kept(grad_lse), kept(grad_entropy)
    write_dlogits(grad_logp, grad_lse, arguments, sharded, logits, grad_entropy, kept(mean))


def _backward_fake(grad_logp, grad_lse, *arguments) -> None:
    _checks.backward(grad_logp, grad_lse, *arguments[:6], *arguments[7:])  # all but ``sharded``


def _count_version(keyset, *arguments):
    """What torch does for its own operators, and not for one of a Library; before the write."""
    given = [tensor for tensor in arguments if isinstance(tensor, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        raise RuntimeError(
            "fused_logp: expected no tensor that requires grad where logits are overwritten, got"
            " one: this has no derivative"
        )
    torch.autograd.graph.increment_version(arguments[2])  # logits
    return torch.ops.rl_logp.fused_logp_backward_.default.redispatch(
        keyset & torch._C._after_ADInplaceOrView_keyset, *arguments
    )


_lib.impl("fused_logp_backward_", _backward, "CompositeExplicitAutograd")
_lib.impl("fused_logp_backward_", _count_version, "ADInplaceOrView", with_keyset=True)
torch.library.register_fake("rl_logp::fused_logp_backward_", _backward_fake, lib=_lib)
