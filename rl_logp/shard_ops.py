"""The operators on a shard of the vocabulary (schemas: ops.py): what they return, and autograd.

A shard is columns ``[vocab_start, vocab_start + C)`` of a vocabulary of ``vocab_size``. A state is
eight 64-bit words a row, laid out as ``RowState`` in ``csrc/include/rl_logp/row_state.h``; states
merge exactly, in any order (docs/distributed.md).
"""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _checks, _combined, _library, _state, partial
from rl_logp.ops import _lib, dlogits_of, save_for_backward


# --- _check_transforms ----------------------------------------------------------------------------
def _check_transforms(
    logits: Tensor, target: Tensor, temperature: Optional[Tensor], gathers: bool
) -> None:
    _checks.reverse_mode(logits)


def _check_transforms_vmap(info, in_dims, *args):
    """``gathers``: vmap would gather the states of each sample by itself, and not wait for them."""
    if args[-1]:
        raise NotImplementedError(
            "vocab_parallel_logp: expected no vmap where several processes share the vocabulary,"
            " got a vmapped call: call it once, with the samples as a leading dimension"
        )
    torch.ops.rl_logp._check_transforms(*args)
    return None, None


_lib.impl("_check_transforms", _check_transforms, "CompositeImplicitAutograd")
torch.library.register_vmap("rl_logp::_check_transforms", _check_transforms_vmap, lib=_lib)


# --- fused_logp_partial ---------------------------------------------------------------------------
def _partial_output(logits: Tensor, target: Tensor, words: int) -> Tensor:
    return logits.new_empty((*target.shape, words), dtype=torch.int64)


def partial_states(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    all_rows: bool,
    vocab_start: int,
    vocab_size: int,
    words: int = _state.WORDS,
) -> Tensor:
    _checks.partial(logits, target, temperature, vocab_start, vocab_size)
    _checks.temperature_values(temperature)
    states = _partial_output(logits, target, words)
    if logits.shape[-1] == 0:
        _state.write_empty(states)
    elif _library.kernel_for(logits.device.type, logits.dtype).available:
        torch.ops.rl_logp._fused_logp_partial_out(
            _checks.kernel_layout(logits),
            target,
            temperature,
            all_rows,
            vocab_start,
            vocab_size,
            states,
        )
    else:
        partial.partial(logits, target, temperature, all_rows, vocab_start, vocab_size, states)
    return states


def partial_fake(
    logits, target, temperature, all_rows, vocab_start, vocab_size, words=_state.WORDS
):
    _checks.partial(logits, target, temperature, vocab_start, vocab_size)
    return _partial_output(logits, target, words)


_lib.impl("fused_logp_partial", partial_states, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_partial", partial_fake, lib=_lib)


# --- fused_logp_combine ---------------------------------------------------------------------------
def combine_outputs(states: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logp = states.new_empty(target.shape, dtype=torch.float32)
    return logp, states.new_empty(target.shape, dtype=torch.float64)


def _combine(states: Tensor, target: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    _checks.combine(states, target)
    logp, lse = combine_outputs(states, target)
    if _library.kernel_for(states.device.type, torch.float32).available:
        torch.ops.rl_logp._fused_logp_combine_out(
            states.contiguous(), target, vocab_size, logp, lse
        )
    else:
        _combined.combine(states, target, vocab_size, logp, lse)
    return logp, lse


def _combine_fake(states, target, vocab_size):
    _checks.combine(states, target)
    return combine_outputs(states, target)


_lib.impl("fused_logp_combine", _combine, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_combine", _combine_fake, lib=_lib)


# --- fused_logp_shard -----------------------------------------------------------------------------
def _shard(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    states: Tensor,
    vocab_start: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    _checks.partial(logits, target, temperature, vocab_start, vocab_size)
    return _combine(states, target, vocab_size)


def _shard_fake(logits, target, temperature, states, vocab_start, vocab_size):
    _checks.partial(logits, target, temperature, vocab_start, vocab_size)
    return _combine_fake(states, target, vocab_size)


_lib.impl("fused_logp_shard", _shard, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_shard", _shard_fake, lib=_lib)


def _save_for_backward(ctx, inputs, output) -> None:
    vocab_start, vocab_size = inputs[4:]
    save_for_backward(ctx, inputs, output[1:], vocab_start, vocab_size, True)


def _shard_autograd(ctx, grad_logp: Optional[Tensor], grad_lse: Optional[Tensor]):
    return dlogits_of(ctx, grad_logp, grad_lse), None, None, None, None, None


torch.library.register_autograd(
    "rl_logp::fused_logp_shard", _shard_autograd, setup_context=_save_for_backward, lib=_lib
)
