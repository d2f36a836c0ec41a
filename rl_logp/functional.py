"""The public functions."""

import numbers
from typing import Literal, Optional, Union, overload

import torch
from torch import Tensor

from rl_logp import _checks, _library, _shard


@overload
def fused_logp(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: Literal[False] = ...,
    require_kernel: bool = ...,
    inplace_backward: bool = ...,
) -> Tensor: ...
@overload
def fused_logp(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: Literal[True],
    require_kernel: bool = ...,
    inplace_backward: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_logp(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: bool,
    require_kernel: bool = ...,
    inplace_backward: bool = ...,
) -> Union[Tensor, tuple[Tensor, Tensor]]: ...


def fused_logp(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = 1.0,
    return_lse: bool = False,
    require_kernel: bool = False,
    inplace_backward: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    r"""Log-probability, in nats, of each row's target under ``softmax(logits / temperature)``.

    ``logp = y[target] - logsumexp(y)`` with ``y = logits / temperature``, the division rounded to
    nearest in fp32. The gradient is ``grad * (onehot(target) - softmax(y)) / temperature``.

    Args:
        logits: ``[..., V]``, bf16, fp16, fp32 (or fp64, for checking gradients). Leading dimensions
            may have any strides; where the last dimension's stride is not 1, a contiguous copy is
            made. A DTensor may be sharded on any dimension (:func:`rl_logp.vocab_parallel_logp`
            says which bits it then has, where that is the vocabulary).
        target: ``[...]``, int32 or int64. A target outside ``[0, V)``, whichever, is ignored: its
            ``logp`` and its row's gradient are exactly 0.
        temperature: a number, or an fp32 tensor, 0-dim or of target's shape, on logits' device;
            > 0 and finite; None means 1. It gets no gradient. In compiled code a number is a
            constant of the graph, and a tensor is not.
        return_lse: also return ``logsumexp(y)``, of every row, ignored ones too. It is
            differentiable.
        require_kernel: raise RuntimeError where the chunked fallback would serve the call.
        inplace_backward: the backward writes the gradient over ``logits``, which hold it from then
            on, and so takes no memory of their size. Whatever else autograd saved of them raises
            when it comes to use it; a reader that autograd does not know of finds the gradient.
            In compiled code and under saved-tensor hooks (activation checkpointing) the gradient is
            a new tensor nevertheless. docs/memory.md says when this is safe.

    Returns:
        ``logp``, fp32 (of fp64 logits fp64), of target's shape; with ``return_lse`` a pair
        ``(logp, lse)``, ``lse`` fp64.

    Raises:
        TypeError: for a wrong dtype.
        ValueError: for a wrong shape or device; for a temperature that requires grad or, where it
            can be known without waiting for a device, is not > 0 and finite. With
            ``inplace_backward``, for logits that are a leaf that requires grad or a view of one,
            whose last dimension has not stride 1, whose elements share memory, or that are a
            DTensor sharded on the vocabulary or the local tensor of one.
        RuntimeError: for a second derivative, or where ``require_kernel`` cannot be met. With
            ``inplace_backward``, from a second backward or one with ``create_graph``.

    A row's ``logp``, ``lse`` and gradient have bits that depend on that row's values, target,
    temperature and upstream gradient alone, and so not on the other rows, their number or the
    layout. Nothing of logits' size is allocated but its gradient, and that neither with
    ``inplace_backward``, which has the same bits.

    >>> import torch, rl_logp
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> logp = rl_logp.fused_logp(logits, torch.tensor([3, -100]))
    >>> logp.detach()
    tensor([-1.3863,  0.0000])
    >>> logp.sum().backward()
    >>> logits.grad
    tensor([[-0.2500, -0.2500, -0.2500,  0.7500],
            [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    if require_kernel:
        _library.require_kernel(logits.device.type, logits.dtype)
    scale = temperature_tensor(temperature, logits)
    if _shard.is_dtensor(logits):
        from rl_logp import _dtensor

        if _dtensor.is_vocab_sharded(logits):
            if inplace_backward:
                raise _dtensor.no_inplace_backward(logits)
            logp, lse = _dtensor.score("fused_logp", logits, target, scale, all_rows=return_lse)
            return (logp, lse) if return_lse else logp
        target, scale = _dtensor.per_row("fused_logp", logits, target=target, temperature=scale)
    else:
        _shard.check_plain("fused_logp", target=target, temperature=scale)
    if not return_lse:
        return torch.ops.rl_logp.fused_logp(logits, target, scale, inplace_backward)
    return torch.ops.rl_logp.fused_logp_with_lse(logits, target, scale, inplace_backward)


@overload
def fused_logp_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: Literal[False] = ...,
    entropy_of_ignored: bool = ...,
    require_kernel: bool = ...,
    inplace_backward: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_logp_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: Literal[True],
    entropy_of_ignored: bool = ...,
    require_kernel: bool = ...,
    inplace_backward: bool = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def fused_logp_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: bool,
    entropy_of_ignored: bool = ...,
    require_kernel: bool = ...,
    inplace_backward: bool = ...,
) -> Union[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]: ...


def fused_logp_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = 1.0,
    return_lse: bool = False,
    entropy_of_ignored: bool = True,
    require_kernel: bool = False,
    inplace_backward: bool = False,
) -> Union[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    r"""As :func:`fused_logp`, with each row's entropy, from one pass over the logits.

    ``entropy = -sum(p * log(p))`` of ``p = softmax(y)``, ``y = logits / temperature``, in nats; a
    ``p`` of 0 adds nothing. Its gradient is ``-grad * p * (y - sum(p * y)) / temperature``, and
    comes with that of ``logp``, in one pass.

    Args:
        logits, target, temperature, return_lse, require_kernel, inplace_backward: as for
            ``fused_logp``. There is one backward for all results: with ``inplace_backward``,
            differentiate a loss of them all, not one after the other.
        entropy_of_ignored: False: of a row whose target is ignored, everything is exactly 0, the
            entropy, lse and the gradient too, whatever the row holds and whatever upstream
            gradients it gets. Kernels do not read such rows: with half of them ignored, the forward
            reads half as much. (Where the vocabulary is sharded, they do.)

    Returns:
        ``(logp, entropy)``, or ``(logp, entropy, lse)``, of target's shape: fp32, or fp64 of fp64
        logits, and ``lse`` fp64. Unless
        ``entropy_of_ignored=False``, a row whose target is ignored has a ``logp`` of 0, its
        entropy, and the entropy's gradient. Detach an entropy that is only looked at: the gradient
        is then that of ``fused_logp``, at its cost.

    Raises:
        As ``fused_logp``, and ValueError for more than 2^30 columns where a kernel serves the call.

    ``logp`` and ``lse`` have the bits of ``fused_logp``; the entropy and the gradient have bits
    that depend on the row alone, as those of ``fused_logp`` do. The gradient of a row whose entropy
    has an upstream gradient of 0 has the bits of ``fused_logp``. An entropy is at least 0. It is
    NaN where a row holds NaN or ``+inf``, or nothing but ``-inf``, as ``torch.log_softmax`` is.

    >>> import torch, rl_logp
    >>> logits = torch.tensor([[0.0, 1.0], [0.0, 3.0]], requires_grad=True)
    >>> logp, entropy = rl_logp.fused_logp_entropy(logits, torch.tensor([0, -100]))
    >>> logp.detach(), entropy.detach()
    (tensor([-1.3133,  0.0000]), tensor([0.5822, 0.1909]))
    >>> (logp - 0.5 * entropy).sum().backward()
    >>> logits.grad
    tensor([[ 0.6328, -0.6328],
            [-0.0678,  0.0678]])
    """
    if require_kernel:
        _library.require_kernel(logits.device.type, logits.dtype)
    scale = temperature_tensor(temperature, logits)
    if _shard.is_dtensor(logits):
        from rl_logp import _dtensor

        if _dtensor.is_vocab_sharded(logits):
            if inplace_backward:
                raise _dtensor.no_inplace_backward(logits)
            logp, entropy, lse = _dtensor.score(
                "fused_logp_entropy",
                logits,
                target,
                scale,
                all_rows=entropy_of_ignored,
                with_entropy=True,
            )
            return (logp, entropy, lse) if return_lse else (logp, entropy)
        target, scale = _dtensor.per_row(
            "fused_logp_entropy", logits, target=target, temperature=scale
        )
    else:
        _shard.check_plain("fused_logp_entropy", target=target, temperature=scale)
    options = (inplace_backward, entropy_of_ignored)
    if not return_lse:
        return torch.ops.rl_logp.fused_logp_entropy(logits, target, scale, *options)
    return torch.ops.rl_logp.fused_logp_entropy_with_lse(logits, target, scale, *options)


def fused_entropy(
    logits: Tensor,
    *,
    temperature: Union[float, Tensor, None] = 1.0,
    require_kernel: bool = False,
    inplace_backward: bool = False,
) -> Tensor:
    r"""The entropy of each row of ``softmax(logits / temperature)``, in nats, without a target.

    Args:
        logits: ``[..., V]``, as for :func:`fused_logp`.
        temperature: a number, or an fp32 tensor, 0-dim or of logits' leading shape; None means 1.
        require_kernel, inplace_backward: as for ``fused_logp``.

    Returns:
        ``entropy``, fp32 (of fp64 logits fp64), of logits' leading shape.

    Raises:
        As :func:`fused_logp_entropy`.

    The entropy has the bits of ``fused_logp_entropy``, whatever the targets there, and its gradient
    those of a row that is ignored there. Of another row, that gradient may differ in the last bits
    of the target's column.

    >>> import torch, rl_logp
    >>> rl_logp.fused_entropy(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))
    tensor([0.6931, 0.0000])
    """
    if require_kernel:
        _library.require_kernel(logits.device.type, logits.dtype)
    scale = temperature_tensor(temperature, logits)
    if _shard.is_dtensor(logits):
        from rl_logp import _dtensor

        if _dtensor.is_vocab_sharded(logits):
            if inplace_backward:
                raise _dtensor.no_inplace_backward(logits)
            return _dtensor.score("fused_entropy", logits, None, scale, with_entropy=True)[1]
        (scale,) = _dtensor.per_row("fused_entropy", logits, temperature=scale)
    else:
        _shard.check_plain("fused_entropy", temperature=scale)
    return torch.ops.rl_logp.fused_entropy(logits, scale, inplace_backward)


def temperature_tensor(temperature: Union[float, Tensor, None], logits: Tensor):
    """None for a temperature of 1, whose division changes no bit; else an fp32 tensor."""
    if temperature is None or isinstance(temperature, Tensor):
        return temperature
    if not isinstance(temperature, (numbers.Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(
            "fused_logp: expected temperature as a number, a tensor or None,"
            f" got {type(temperature).__name__}"
        )
    if temperature == 1.0:
        return None
    # Smaller and larger numbers may round to 0 and to infinity in fp32.
    if not 2.0**-149 <= temperature <= torch.finfo(torch.float32).max:
        raise _checks.temperature_error(temperature)
    return torch.full((), temperature, dtype=torch.float32, device=logits.device)


class FusedLogp(torch.nn.Module):
    """:func:`fused_logp` as a module, with its options fixed.

    >>> import torch, rl_logp
    >>> rl_logp.FusedLogp(temperature=0.5)(torch.tensor([[0.0, 2.0]]), torch.tensor([1]))
    tensor([-0.0181])
    """

    def __init__(
        self,
        temperature: Optional[float] = 1.0,
        return_lse: bool = False,
        require_kernel: bool = False,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.return_lse = return_lse
        self.require_kernel = require_kernel
        self.inplace_backward = inplace_backward

    def forward(self, logits: Tensor, target: Tensor):
        return fused_logp(
            logits,
            target,
            temperature=self.temperature,
            return_lse=self.return_lse,
            require_kernel=self.require_kernel,
            inplace_backward=self.inplace_backward,
        )

    def extra_repr(self) -> str:
        options = f"temperature={self.temperature}, return_lse={self.return_lse}"
        return f"{options}, inplace_backward=True" if self.inplace_backward else options
