"""What the operators accept. Metadata only: nothing here makes a host wait for a device."""

from typing import Optional

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from rl_logp import _state

LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHARD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TARGET_DTYPES = (torch.int32, torch.int64)
MAX_LEADING_DIMS = 8  # of a kernel (rows.h)
MAX_ENTROPY_COLUMNS = 2**30  # of an exact sum with weights (weighted_sum.h: 2^26 terms of 16)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_device(name: str, tensor: Tensor, logits: Tensor) -> None:
    if tensor.device != logits.device:
        raise ValueError(
            f"fused_logp: expected {name} on {logits.device}, the device of logits,"
            f" got {tensor.device}"
        )


def _row_tensor(name: str, tensor: Tensor, target: Tensor, logits: Tensor) -> None:
    if tensor.shape != target.shape:
        raise ValueError(
            f"fused_logp: expected {name} of shape {tuple(target.shape)}, the shape of target,"
            f" got {tuple(tensor.shape)}"
        )
    _same_device(name, tensor, logits)


def forward(
    logits: Tensor, target: Tensor, temperature: Optional[Tensor], is_shard: bool = False
) -> None:
    """Raises TypeError or ValueError unless the arguments have the documented form.

    A shard of a vocabulary may be empty: where ranks outnumber pieces, one is.
    """
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(
            f"fused_logp: expected logits of dtype {_names(LOGITS_DTYPES)},"
            f" got {_name(logits.dtype)}"
        )
    if target.dtype not in TARGET_DTYPES:
        raise TypeError(
            f"fused_logp: expected target of dtype {_names(TARGET_DTYPES)},"
            f" got {_name(target.dtype)}"
        )
    if logits.device.type == "mps":
        raise ValueError("fused_logp: expected a device that has float64, got mps")
    if logits.dim() < 1:
        raise ValueError("fused_logp: expected logits of shape (..., V), got a 0-dim tensor")
    if logits.shape[-1] < 1 and not is_shard:
        raise ValueError(
            f"fused_logp: expected logits with at least one column, got {tuple(logits.shape)}"
        )
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"fused_logp: expected target of shape {tuple(logits.shape[:-1])}, the leading shape"
            f" of logits, got {tuple(target.shape)}"
        )
    _same_device("target", target, logits)
    if temperature is None:
        return
    if temperature.dtype != torch.float32:
        raise TypeError(
            f"fused_logp: expected temperature of dtype float32, got {_name(temperature.dtype)}"
        )
    if temperature.dim() and temperature.shape != target.shape:
        raise ValueError(
            f"fused_logp: expected a 0-dim temperature or one of shape {tuple(target.shape)}, the"
            f" leading shape of logits, got {tuple(temperature.shape)}"
        )
    _same_device("temperature", temperature, logits)


def temperature_error(temperature: float) -> ValueError:
    return ValueError(
        f"fused_logp: expected temperature > 0 and finite in float32, got {temperature}"
    )


def temperature_values(temperature: Optional[Tensor]) -> None:
    """Raises ValueError unless 0 < temperature < inf, where looking does not synchronise."""
    if temperature is None or temperature.device.type != "cpu":
        return
    right = (temperature > 0) & (temperature < torch.inf)
    if not bool(right.all()):
        raise temperature_error(temperature[~right].flatten()[0].item())


def logp_dtype(logits: Tensor) -> torch.dtype:
    """Of logp and of the entropy."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def backward(
    grad_logp: Optional[Tensor],
    grad_lse: Optional[Tensor],
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    lse: Tensor,
    vocab_start: int,
    vocab_size: int,
    grad_entropy: Optional[Tensor] = None,
    mean: Optional[Tensor] = None,
) -> None:
    """Raises TypeError or ValueError unless the arguments have the documented form."""
    forward(logits, target, temperature, is_shard=True)
    _shard_range(logits, vocab_start, vocab_size)
    if grad_entropy is not None and mean is None:
        raise ValueError("fused_logp: expected mean beside grad_entropy, got None")
    for name, of_rows, dtype in (
        ("lse", lse, torch.float64),
        ("mean", mean, torch.float64),
        ("grad_logp", grad_logp, logp_dtype(logits)),
        ("grad_lse", grad_lse, torch.float64),
        ("grad_entropy", grad_entropy, logp_dtype(logits)),
    ):
        if of_rows is None:
            continue
        if of_rows.dtype != dtype:
            raise TypeError(
                f"fused_logp: expected {name} of dtype {_name(dtype)}, got {_name(of_rows.dtype)}"
            )
        _row_tensor(name, of_rows, target, logits)


def entropy_columns(columns: int) -> None:
    """Raises ValueError for more columns than an exact sum with weights can count."""
    if columns > MAX_ENTROPY_COLUMNS:
        raise ValueError(f"fused_logp: expected at most 2^30 columns for an entropy, got {columns}")


def partial(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    vocab_start: int,
    vocab_size: int,
) -> None:
    """Raises TypeError or ValueError unless the arguments have the documented form."""
    forward(logits, target, temperature, is_shard=True)
    if logits.dtype not in SHARD_DTYPES:
        raise TypeError(
            f"fused_logp: expected a shard of logits of dtype {_names(SHARD_DTYPES)},"
            f" got {_name(logits.dtype)}"
        )
    _shard_range(logits, vocab_start, vocab_size)


def _shard_range(logits: Tensor, vocab_start: int, vocab_size: int) -> None:
    vocab_end = vocab_start + logits.shape[-1]
    if vocab_start < 0 or vocab_end > vocab_size or vocab_size < 1:
        raise ValueError(
            f"fused_logp: expected columns {vocab_start} to {vocab_end}"
            f" within a vocabulary of {vocab_size}"
        )


def combine(states: Tensor, target: Tensor, words: int = _state.WORDS) -> None:
    """Raises TypeError or ValueError unless the arguments have the documented form."""
    if states.dtype != torch.int64:
        raise TypeError(f"fused_logp: expected states of dtype int64, got {_name(states.dtype)}")
    if target.dtype not in TARGET_DTYPES:
        raise TypeError(
            f"fused_logp: expected target of dtype {_names(TARGET_DTYPES)},"
            f" got {_name(target.dtype)}"
        )
    rows = (*target.shape, words)
    if states.dim() != len(rows) + 1 or states.shape[1:] != rows or states.shape[0] < 1:
        raise ValueError(
            f"fused_logp: expected states of shape {('S', *rows)}, of S shards,"
            f" got {tuple(states.shape)}"
        )
    if target.device != states.device:
        raise ValueError(
            f"fused_logp: expected target on {states.device}, the device of states,"
            f" got {target.device}"
        )


def reverse_mode(logits: Tensor) -> None:
    """Raises NotImplementedError under the transforms that would fail obscurely or in silence.

    Forward-mode AD would drop the tangent; ``torch.func.grad`` and its kin cannot trace an operator
    registered with ``register_autograd``.
    """
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(logits).tangent is not None:
        raise NotImplementedError(
            "fused_logp: expected logits without a tangent, got a dual tensor: forward-mode"
            " differentiation is not implemented; use reverse mode"
        )
    if torch._C._functorch.is_gradtrackingtensor(logits):  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(
            "fused_logp: expected torch.autograd, got a torch.func transform (grad, vjp, jacrev),"
            " which is not implemented; use torch.autograd.grad or backward()"
        )


def kernel_layout(logits: Tensor) -> Tensor:
    """logits, or a copy of it where its columns are not adjacent."""
    if logits.dim() > 1 + MAX_LEADING_DIMS:
        raise ValueError(
            f"fused_logp: expected at most {MAX_LEADING_DIMS} leading dimensions where a kernel"
            f" serves, got {logits.dim() - 1}"
        )
    if logits.shape[-1] == 1 or logits.stride(-1) == 1:
        return logits
    return logits.contiguous()


def writable(logits: Tensor) -> None:
    """Raises ValueError unless the gradient of logits can take their place, without a copy."""
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(
            "fused_logp: expected logits whose last dimension has stride 1 where"
            f" inplace_backward=True, got strides {tuple(logits.stride())}"
        )
    end = 0  # of what the dimensions before take, counted from an element's own place
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride <= end and logits.numel():
            raise ValueError(
                "fused_logp: expected logits whose elements do not share memory where"
                f" inplace_backward=True, got shape {tuple(logits.shape)} and strides"
                f" {tuple(logits.stride())}"
            )
        end += (size - 1) * stride
