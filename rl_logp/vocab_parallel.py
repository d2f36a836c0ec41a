"""The log-probability where each process of a group holds a shard of the vocabulary."""

from functools import partial
from typing import Any, Literal, Optional, Union, overload

import torch.distributed as dist
from torch import Tensor

from rl_logp import _library, _shard
from rl_logp.functional import temperature_tensor


@overload
def vocab_parallel_logp(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: Any = ...,
    vocab_start: Optional[int] = ...,
    vocab_size: Optional[int] = ...,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: Literal[False] = ...,
    require_aligned: bool = ...,
    require_kernel: bool = ...,
) -> Tensor: ...
@overload
def vocab_parallel_logp(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: Any = ...,
    vocab_start: Optional[int] = ...,
    vocab_size: Optional[int] = ...,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: Literal[True],
    require_aligned: bool = ...,
    require_kernel: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def vocab_parallel_logp(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: Any = ...,
    vocab_start: Optional[int] = ...,
    vocab_size: Optional[int] = ...,
    temperature: Union[float, Tensor, None] = ...,
    return_lse: bool,
    require_aligned: bool = ...,
    require_kernel: bool = ...,
) -> Union[Tensor, tuple[Tensor, Tensor]]: ...


def vocab_parallel_logp(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    temperature: Union[float, Tensor, None] = 1.0,
    return_lse: bool = False,
    require_aligned: bool = False,
    require_kernel: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    r"""As :func:`rl_logp.fused_logp`, of logits whose vocabulary is spread over a process group.

    One all-gather of 64 bytes a row and process, whatever the vocabulary; the gradient needs none.

    Args:
        logits_shard: ``[..., C]``, bf16, fp16 or fp32: columns ``[vocab_start, vocab_start + C)``
            of a vocabulary of ``vocab_size``; C may differ between processes, and be 0. Or a
            DTensor, in which case group, vocab_start and vocab_size follow from its placements.
        target: ``[...]``, int32 or int64, numbers in the whole vocabulary, the same in every
            process. A target outside ``[0, vocab_size)`` is ignored.
        group: the process group, over which the shards are the whole vocabulary; None: this process
            has all of it. With more than one process, vocab_start and vocab_size must be given.
        temperature, return_lse, require_kernel: as for ``fused_logp``; the same in every process.
        require_aligned: raise ValueError unless this shard and the next start at multiples of 16,
            as the bits below need.

    Returns:
        As ``fused_logp``, in every process. A DTensor where logits_shard is one.

    Raises:
        As ``fused_logp``, and ValueError where this shard alone shows that shards overlap or are
        missing. Where only the others would, a row whose target no shard holds, or two, has a
        ``logp`` of NaN; other rows are wrong in silence.

    Where every shard starts at a multiple of 16, ``logp``, ``lse`` and the gradient have bits that
    do not depend on how many shards there are. Where kernels serve the device, they are those of
    ``fused_logp``.

    >>> import torch, rl_logp
    >>> rl_logp.vocab_parallel_logp(
    ...     torch.zeros(2, 4), torch.tensor([3, -100]), vocab_start=0, vocab_size=4
    ... )
    tensor([-1.3863,  0.0000])
    """
    logp, lse = _score(
        "vocab_parallel_logp",
        logits_shard,
        target,
        (group, vocab_start, vocab_size),
        temperature,
        require_aligned,
        require_kernel,
        all_rows=return_lse,
    )
    return (logp, lse) if return_lse else logp


def vocab_parallel_logp_entropy(
    logits_shard: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    temperature: Union[float, Tensor, None] = 1.0,
    require_aligned: bool = False,
    require_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""As :func:`rl_logp.fused_logp_entropy`, of logits whose vocabulary a process group shares.

    One all-gather of 104 bytes a row and process; the gradients need none.

    Args:
        logits_shard, target, group, vocab_start, vocab_size, temperature, require_aligned,
            require_kernel: as for :func:`vocab_parallel_logp`.

    Returns:
        ``(logp, entropy)``, as ``fused_logp_entropy``, in every process. DTensors where
        logits_shard is one.

    Raises:
        As ``vocab_parallel_logp``, and ValueError for a vocabulary of more than 2^30.

    The bits are those that ``vocab_parallel_logp`` promises, of the entropy and its gradient too.

    >>> import torch, rl_logp
    >>> rl_logp.vocab_parallel_logp_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
    (tensor([-1.3863,  0.0000]), tensor([1.3863, 1.3863]))
    """
    logp, entropy, _ = _score(
        "vocab_parallel_logp_entropy",
        logits_shard,
        target,
        (group, vocab_start, vocab_size),
        temperature,
        require_aligned,
        require_kernel,
        with_entropy=True,
    )
    return logp, entropy


def vocab_parallel_entropy(
    logits_shard: Tensor,
    *,
    group: Any = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    temperature: Union[float, Tensor, None] = 1.0,
    require_aligned: bool = False,
    require_kernel: bool = False,
) -> Tensor:
    r"""As :func:`rl_logp.fused_entropy`, of logits whose vocabulary a process group shares.

    Args: as for :func:`vocab_parallel_logp_entropy`, which says what raises as well.

    Returns:
        ``entropy``, with the bits that ``vocab_parallel_logp_entropy`` has.

    >>> import torch, rl_logp
    >>> rl_logp.vocab_parallel_entropy(torch.zeros(2, 4))
    tensor([1.3863, 1.3863])
    """
    return _score(
        "vocab_parallel_entropy",
        logits_shard,
        None,
        (group, vocab_start, vocab_size),
        temperature,
        require_aligned,
        require_kernel,
        with_entropy=True,
    )[1]


def _score(
    caller: str,
    logits: Tensor,
    target: Optional[Tensor],
    layout: tuple[Any, Optional[int], Optional[int]],
    temperature: Union[float, Tensor, None],
    require_aligned: bool,
    require_kernel: bool,
    **wanted: bool,
) -> tuple[Tensor, ...]:
    """``layout``: group, vocab_start and vocab_size; ``wanted``: that of ``_shard.score``."""
    if require_kernel:
        _library.require_kernel(logits.device.type, logits.dtype)
    scale = temperature_tensor(temperature, logits)
    if _shard.is_dtensor(logits):
        from rl_logp import _dtensor

        if any(given is not None for given in layout):
            raise ValueError(
                f"{caller}: expected no group, vocab_start or vocab_size beside a DTensor,"
                f" whose placements say them, got {layout}"
            )
        return _dtensor.score(
            caller, logits, target, scale, require_aligned=require_aligned, **wanted
        )
    _shard.check_plain(caller, target=target, temperature=scale)
    group, vocab_start, vocab_size = layout
    shards = 1 if group is None else dist.get_world_size(group)
    if shards > 1 and (vocab_start is None or vocab_size is None):
        raise ValueError(
            f"{caller}: expected vocab_start and vocab_size, as {shards} processes"
            f" share the vocabulary, got {vocab_start} and {vocab_size}"
        )
    columns = logits.shape[-1]
    start = 0 if vocab_start is None else vocab_start
    size = columns if vocab_size is None else vocab_size
    _shard.check(caller, start, columns, size, shards)
    if require_aligned:
        _shard.check_aligned(caller, start, columns, size)

    gather = None if shards == 1 else partial(_shard.all_gather, group=group)
    return _shard.score(logits, target, scale, gather, start, size, **wanted)
