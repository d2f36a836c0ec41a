"""The operators of shard_ops.py with the entropy beside logp (schemas: ops.py).

A state is thirteen 64-bit words a row, laid out as ``WeightedRowState`` in
``csrc/include/rl_logp/row_state.h``; the first eight are those of ``fused_logp_partial``.
"""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _checks, _combined, _library, _state
from rl_logp.entropy_ops import dlogits_of
from rl_logp.ops import _lib, save_for_backward
from rl_logp.shard_ops import combine_outputs, partial_fake, partial_states


# --- fused_logp_entropy_partial -------------------------------------------------------------------
def _partial(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    vocab_start: int,
    vocab_size: int,
) -> Tensor:
    _checks.entropy_columns(vocab_size)
    return partial_states(
        logits, target, temperature, True, vocab_start, vocab_size, _state.WEIGHTED_WORDS
    )


def _partial_fake(logits, target, temperature, vocab_start, vocab_size):
    _checks.entropy_columns(vocab_size)
    return partial_fake(
        logits, target, temperature, True, vocab_start, vocab_size, _state.WEIGHTED_WORDS
    )


_lib.impl("fused_logp_entropy_partial", _partial, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_entropy_partial", _partial_fake, lib=_lib)


# --- fused_logp_entropy_combine -------------------------------------------------------------------
def _outputs(states: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logp, lse = combine_outputs(states, target)
    entropy, mean = combine_outputs(states, target)
    return logp, entropy, lse, mean


def _combine(
    states: Tensor, target: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _checks.combine(states, target, _state.WEIGHTED_WORDS)
    _checks.entropy_columns(vocab_size)
    outputs = logp, entropy, lse, mean = _outputs(states, target)
    arguments = (target, vocab_size, logp, lse, entropy, mean)
    if _library.kernel_for(states.device.type, torch.float32).available:
        torch.ops.rl_logp._fused_logp_combine_out(states.contiguous(), *arguments)
    else:
        _combined.combine(states, *arguments)
    return outputs


def _combine_fake(states, target, vocab_size):
    _checks.combine(states, target, _state.WEIGHTED_WORDS)
    _checks.entropy_columns(vocab_size)
    return _outputs(states, target)


_lib.impl("fused_logp_entropy_combine", _combine, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_entropy_combine", _combine_fake, lib=_lib)


# --- fused_logp_entropy_shard ---------------------------------------------------------------------
def _shard(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    states: Tensor,
    vocab_start: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _checks.partial(logits, target, temperature, vocab_start, vocab_size)
    return _combine(states, target, vocab_size)


def _shard_fake(logits, target, temperature, states, vocab_start, vocab_size):
    _checks.partial(logits, target, temperature, vocab_start, vocab_size)
    return _combine_fake(states, target, vocab_size)


_lib.impl("fused_logp_entropy_shard", _shard, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_entropy_shard", _shard_fake, lib=_lib)


def _save_for_backward(ctx, inputs, output) -> None:
    vocab_start, vocab_size = inputs[4:]
    save_for_backward(ctx, inputs, output[2:], vocab_start, vocab_size, True)


def _shard_autograd(ctx, *grads: Optional[Tensor]):
    return dlogits_of(ctx, *grads), None, None, None, None, None


torch.library.register_autograd(
    "rl_logp::fused_logp_entropy_shard",
    _shard_autograd,
    setup_context=_save_for_backward,
    lib=_lib,
)
