"""The operators of the ``rl_logp`` namespace: schemas, fake kernels, autograd, and who serves them.

    fused_logp            what people call: one tensor, logp; a composite over fused_logp_forward
    fused_logp_with_lse   the same with return_lse=True: (logp, lse)
    fused_logp_forward    (logp, lse), with autograd; its backward is
    fused_logp_backward   dlogits from the saved lse; once differentiable
    fused_logp_backward_  the same, written over the logits, with an entropy too (inplace_ops.py)

    fused_logp_entropy, fused_logp_entropy_with_lse, fused_entropy, fused_logp_entropy_forward,
    fused_logp_entropy_backward
                          the same with the entropy of the row beside logp (entropy_ops.py)

    fused_logp_partial    of a shard of the vocabulary: the states of its rows (shard_ops.py)
    fused_logp_combine    (logp, lse) from the states of all shards
    fused_logp_shard      the same, with autograd towards one shard's logits
    fused_logp_entropy_partial, fused_logp_entropy_combine, fused_logp_entropy_shard
                          the same with the entropy (entropy_shard_ops.py)
    _check_transforms     nothing but errors: where an operator runs, compiled too, they can be seen

Every implementation allocates its results here, in Python, and then either lets a compiled kernel
fill them (the ``_..._out`` operators) or runs the chunked fallback. That keeps
``torch.OutOfMemoryError`` what it is: an exception that crosses a stable-ABI boundary loses its
type.
"""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _checks, _inplace, _library, chunked

# A Library unregisters its operators when it is collected, so it lives as long as the module does.
_lib = torch.library.Library("rl_logp", "DEF")

_lib.define(
    "fused_logp(Tensor logits, Tensor target, Tensor? temperature=None,"
    " bool inplace_backward=False) -> Tensor"
)
_lib.define(
    "fused_logp_with_lse(Tensor logits, Tensor target, Tensor? temperature=None,"
    " bool inplace_backward=False) -> (Tensor logp, Tensor lse)"
)
_lib.define(
    "fused_logp_forward(Tensor logits, Tensor target, Tensor? temperature, bool all_rows,"
    " bool inplace_backward=False) -> (Tensor logp, Tensor lse)"
)
_lib.define(
    "fused_logp_backward(Tensor? grad_logp, Tensor? grad_lse, Tensor logits, Tensor target,"
    " Tensor? temperature, Tensor lse, SymInt vocab_start, SymInt vocab_size,"
    " bool sharded=False) -> Tensor"
)
_lib.define(
    "fused_logp_entropy(Tensor logits, Tensor target, Tensor? temperature=None,"
    " bool inplace_backward=False, bool all_rows=True) -> (Tensor logp, Tensor entropy)"
)
_lib.define(
    "fused_logp_entropy_with_lse(Tensor logits, Tensor target, Tensor? temperature=None,"
    " bool inplace_backward=False, bool all_rows=True)"
    " -> (Tensor logp, Tensor entropy, Tensor lse)"
)
_lib.define(
    "fused_entropy(Tensor logits, Tensor? temperature=None, bool inplace_backward=False) -> Tensor"
)
_lib.define(
    "fused_logp_entropy_forward(Tensor logits, Tensor target, Tensor? temperature,"
    " bool inplace_backward=False, bool all_rows=True)"
    " -> (Tensor logp, Tensor entropy, Tensor lse, Tensor mean)"
)
_lib.define(
    "fused_logp_entropy_backward(Tensor? grad_logp, Tensor? grad_entropy, Tensor? grad_lse,"
    " Tensor logits, Tensor target, Tensor? temperature, Tensor lse, Tensor mean,"
    " SymInt vocab_start, SymInt vocab_size, bool sharded=False) -> Tensor"
)
_lib.define(
    "fused_logp_backward_(Tensor? grad_logp, Tensor? grad_lse, Tensor(a!) logits, Tensor target,"
    " Tensor? temperature, Tensor lse, SymInt vocab_start, SymInt vocab_size,"
    " bool sharded=False, Tensor? grad_entropy=None, Tensor? mean=None) -> ()"
)
_lib.define(
    "fused_logp_partial(Tensor logits, Tensor target, Tensor? temperature, bool all_rows,"
    " SymInt vocab_start, SymInt vocab_size) -> Tensor"
)
_lib.define(
    "fused_logp_combine(Tensor states, Tensor target, SymInt vocab_size)"
    " -> (Tensor logp, Tensor lse)"
)
_lib.define(
    "fused_logp_shard(Tensor logits, Tensor target, Tensor? temperature, Tensor states,"
    " SymInt vocab_start, SymInt vocab_size) -> (Tensor logp, Tensor lse)"
)
_lib.define(
    "fused_logp_entropy_partial(Tensor logits, Tensor target, Tensor? temperature,"
    " SymInt vocab_start, SymInt vocab_size) -> Tensor"
)
_lib.define(
    "fused_logp_entropy_combine(Tensor states, Tensor target, SymInt vocab_size)"
    " -> (Tensor logp, Tensor entropy, Tensor lse, Tensor mean)"
)
_lib.define(
    "fused_logp_entropy_shard(Tensor logits, Tensor target, Tensor? temperature, Tensor states,"
    " SymInt vocab_start, SymInt vocab_size)"
    " -> (Tensor logp, Tensor entropy, Tensor lse, Tensor mean)"
)
_lib.define(
    "_check_transforms(Tensor logits, Tensor target, Tensor? temperature, bool gathers) -> ()"
)
# The compiled kernels write buffers that their caller allocated (csrc/cuda/ops.cpp).
_lib.define(
    "_fused_logp_forward_out(Tensor logits, Tensor target, Tensor? temperature, bool all_rows,"
    " Tensor(a!) logp, Tensor(b!) lse, Tensor(c!)? entropy=None, Tensor(d!)? mean=None) -> ()"
)
_lib.define(
    "_fused_logp_backward_out(Tensor? grad_logp, Tensor? grad_lse, Tensor logits, Tensor target,"
    " Tensor? temperature, Tensor lse, int vocab_start, int vocab_size, Tensor(a!) dlogits,"
    " Tensor? grad_entropy=None, Tensor? mean=None) -> ()"
)
_lib.define(
    "_fused_logp_partial_out(Tensor logits, Tensor target, Tensor? temperature, bool all_rows,"
    " int vocab_start, int vocab_size, Tensor(a!) states) -> ()"
)
_lib.define(
    "_fused_logp_combine_out(Tensor states, Tensor target, int vocab_size,"
    " Tensor(a!) logp, Tensor(b!) lse, Tensor(c!)? entropy=None, Tensor(d!)? mean=None) -> ()"
)

_library.load()


# --- fused_logp and fused_logp_with_lse: the composites -------------------------------------------
def _fused_logp(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor] = None,
    inplace_backward: bool = False,
) -> Tensor:
    _checks.reverse_mode(logits)
    return torch.ops.rl_logp.fused_logp_forward(
        logits, target, temperature, False, inplace_backward
    )[0]


def _fused_logp_with_lse(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor] = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    _checks.reverse_mode(logits)
    return torch.ops.rl_logp.fused_logp_forward(logits, target, temperature, True, inplace_backward)


_lib.impl("fused_logp", _fused_logp, "CompositeImplicitAutograd")
_lib.impl("fused_logp_with_lse", _fused_logp_with_lse, "CompositeImplicitAutograd")


def batched(
    info, in_dims, logits: Tensor, target: Tensor, temperature: Optional[Tensor] = None, *options
):
    """The arguments of a vmapped call as those of one call, whose first dimension is vmap's."""

    def in_front(tensor: Tensor, dim: Optional[int]) -> Tensor:
        if dim is None:
            return tensor.expand(info.batch_size, *tensor.shape)
        return tensor.movedim(dim, 0)

    logits_dim, target_dim, *temperature_dim = in_dims
    logits, target = in_front(logits, logits_dim), in_front(target, target_dim)
    if temperature is not None and (temperature_dim[0] is not None or temperature.dim()):
        temperature = in_front(temperature, temperature_dim[0])
        if temperature.dim() == 1:  # one a sample, for all of the sample's rows
            temperature = temperature.reshape(-1, *[1] * (target.dim() - 1)).expand(target.shape)
    return logits, target, temperature, *options


def _fused_logp_vmap(info, in_dims, *args):
    return torch.ops.rl_logp.fused_logp(*batched(info, in_dims, *args)), 0


def _fused_logp_with_lse_vmap(info, in_dims, *args):
    return torch.ops.rl_logp.fused_logp_with_lse(*batched(info, in_dims, *args)), (0, 0)


torch.library.register_vmap("rl_logp::fused_logp", _fused_logp_vmap, lib=_lib)
torch.library.register_vmap("rl_logp::fused_logp_with_lse", _fused_logp_with_lse_vmap, lib=_lib)


# --- fused_logp_forward ---------------------------------------------------------------------------
def forward_outputs(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits.new_empty(target.shape, dtype=_checks.logp_dtype(logits))
    return logp, logits.new_empty(target.shape, dtype=torch.float64)


def _forward(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    all_rows: bool,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    _checks.forward(logits, target, temperature)
    _checks.temperature_values(temperature)
    logp, lse = forward_outputs(logits, target)
    if _library.kernel_for(logits.device.type, logits.dtype).available:
        torch.ops.rl_logp._fused_logp_forward_out(
            _checks.kernel_layout(logits), target, temperature, all_rows, logp, lse
        )
    else:
        chunked.forward(logits, target, temperature, logp, lse)
    return logp, lse


def _forward_fake(logits, target, temperature, all_rows, inplace_backward=False):
    _checks.forward(logits, target, temperature)
    return forward_outputs(logits, target)


_lib.impl("fused_logp_forward", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_forward", _forward_fake, lib=_lib)


def save_for_backward(
    ctx, inputs: tuple, of_rows: tuple, *shard, inplace_backward: bool = False
) -> None:
    """What the gradient needs: ``of_rows`` are the outputs that it is computed from.

    ``shard``: vocab_start, vocab_size, and sharded where it is True.
    """
    logits, target, temperature = inputs[:3]
    if ctx.needs_input_grad[2]:
        raise ValueError(
            "fused_logp: expected a temperature that does not require grad, got one that does:"
            " its gradient is not computed; detach it"
        )
    ctx.save_for_backward(logits, target, temperature, *of_rows)
    ctx.shard = shard
    ctx.set_materialize_grads(False)
    _inplace.prepare(ctx, logits, inplace_backward)


def grad_logp_of(logits: Tensor, grad_logp: Optional[Tensor], other: Tensor) -> Optional[Tensor]:
    """grad_logp; of a DTensor zeros in place of None, which have the same bits.

    DTensor in torch 2.11 looks for the mesh in an operator's first argument.
    """
    from rl_logp import _shard  # which imports the operators

    if grad_logp is not None or not _shard.is_dtensor(other):
        return grad_logp
    return torch.zeros_like(other, dtype=_checks.logp_dtype(logits))


def dlogits_of(ctx, grad_logp: Optional[Tensor], grad_lse: Optional[Tensor]) -> Optional[Tensor]:
    if _inplace.overwrites(ctx):
        return _inplace.overwrite(ctx, grad_logp, grad_lse)
    if grad_lse is not None:
        grad_logp = grad_logp_of(ctx.saved_tensors[0], grad_logp, grad_lse)
    if grad_logp is None and grad_lse is None:
        return None
    return torch.ops.rl_logp.fused_logp_backward(
        grad_logp, grad_lse, *ctx.saved_tensors, *ctx.shard
    )


def _save_for_backward(ctx, inputs, output) -> None:
    columns = inputs[0].shape[-1]
    save_for_backward(ctx, inputs, output[1:], 0, columns, inplace_backward=inputs[4])


def _forward_autograd(ctx, grad_logp: Optional[Tensor], grad_lse: Optional[Tensor]):
    return dlogits_of(ctx, grad_logp, grad_lse), None, None, None, None


torch.library.register_autograd(
    "rl_logp::fused_logp_forward", _forward_autograd, setup_context=_save_for_backward, lib=_lib
)


# --- fused_logp_backward --------------------------------------------------------------------------
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
) -> Tensor:
    arguments = (logits, target, temperature, lse, vocab_start, vocab_size)
    _checks.backward(grad_logp, grad_lse, *arguments)
    dlogits = backward_output(logits)
    write_dlogits(grad_logp, grad_lse, arguments, sharded, dlogits)
    return dlogits


def write_dlogits(
    grad_logp: Optional[Tensor],
    grad_lse: Optional[Tensor],
    arguments: tuple[Tensor, Tensor, Optional[Tensor], Tensor, int, int],
    sharded: bool,
    dlogits: Tensor,
    grad_entropy: Optional[Tensor] = None,
    mean: Optional[Tensor] = None,
) -> None:
    """``arguments``: logits, which dlogits may be, target, temperature, lse and the shard."""
    logits = arguments[0]
    if logits.shape[-1] == 0:
        return
    if _library.kernel_for(logits.device.type, logits.dtype).available:
        torch.ops.rl_logp._fused_logp_backward_out(
            grad_logp,
            grad_lse,
            _checks.kernel_layout(logits),
            *arguments[1:],
            dlogits,
            grad_entropy,
            mean,
        )
    else:
        chunked.backward(
            grad_logp,
            grad_lse,
            *arguments,
            dlogits,
            sharded=sharded,
            grad_entropy=grad_entropy,
            mean=mean,
        )


def backward_output(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _backward_fake(
    grad_logp,
    grad_lse,
    logits,
    target,
    temperature,
    lse,
    vocab_start,
    vocab_size,
    sharded=False,
):
    _checks.backward(grad_logp, grad_lse, logits, target, temperature, lse, vocab_start, vocab_size)
    return backward_output(logits)


_lib.impl("fused_logp_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("rl_logp::fused_logp_backward", _backward_fake, lib=_lib)


def no_second_derivative(ctx, grad):
    raise RuntimeError(
        "fused_logp: expected to be differentiated once, got a second derivative, which is not"
        " implemented (create_graph=True is fine as long as nothing differentiates the gradient)"
    )


torch.library.register_autograd("rl_logp::fused_logp_backward", no_second_derivative, lib=_lib)
