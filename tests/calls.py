"""Seeded inputs, and one call of the op with everything it computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rl_logp
from rl_logp import entropy_ops, ops
from rl_logp.reference import Reference, reference
from rl_logp.testing import assert_bitwise_equal

LOW_DTYPES = [torch.bfloat16, torch.float16]
DTYPES = [*LOW_DTYPES, torch.float32]


class Result(NamedTuple):
    logp: Tensor
    lse: Tensor
    dlogits: Tensor


class EntropyResult(NamedTuple):
    logp: Tensor
    entropy: Tensor
    lse: Tensor
    dlogits: Tensor


AnyResult = TypeVar("AnyResult", Result, EntropyResult)
# ``call`` or ``call_with_entropy``: what a fixture of conftest.py gives.
Call = Callable[..., Any]


class Sample(NamedTuple):
    """Arguments of one call. Every fifth target is ignored, every seventh upstream gradient 0."""

    logits: Tensor
    target: Tensor
    temperature: Tensor
    grad_logp: Tensor
    grad_lse: Tensor

    def rows(self, index) -> "Sample":
        """The same rows of every argument."""
        return Sample(*(tensor[index] for tensor in self))


def sample(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Sample:
    """Arguments for logits of ``shape``; the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    *rows, vocab_size = shape
    count = torch.Size(rows).numel()
    logits = torch.randn(shape, generator=generator).mul_(4).to(dtype)
    target = torch.randint(vocab_size, (count,), generator=generator)
    target[4::5] = -100
    temperature = torch.rand(count, generator=generator) + 0.5
    grad_logp = torch.randn(count, generator=generator)
    if dtype == torch.float64:  # as logp is
        grad_logp = grad_logp.double()
    grad_logp[6::7] = 0
    grad_lse = torch.randn(count, generator=generator, dtype=torch.float64)
    grad_lse[6::7] = 0
    per_row = (t.reshape(rows).to(device) for t in (target, temperature, grad_logp, grad_lse))
    return Sample(logits.to(device), *per_row)


@contextmanager
def no_host_sync(device: torch.device) -> Iterator[None]:
    """On CUDA, whatever makes the host wait for the device is an error."""
    if device.type != "cuda":
        yield
        return
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous)


def call(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor] = None,
    grad_logp: Optional[Tensor] = None,
    grad_lse: Optional[Tensor] = None,
) -> Result:
    """logp, lse and dlogits through autograd; the upstream gradient of logp is 1 unless given.

    No test's call may make the host wait for a CUDA device.
    """
    leaf = logits.detach().requires_grad_()
    with no_host_sync(logits.device):
        logp, lse = rl_logp.fused_logp(
            leaf, target, temperature=1.0 if temperature is None else temperature, return_lse=True
        )
        outputs, grads = [logp], [torch.ones_like(logp) if grad_logp is None else grad_logp]
        if grad_lse is not None:
            outputs, grads = [logp, lse], [grads[0], grad_lse]
        (dlogits,) = torch.autograd.grad(outputs, leaf, grads)
    return Result(logp.detach(), lse.detach(), dlogits)


def call_with_entropy(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor] = None,
    grad_logp: Optional[Tensor] = None,
    grad_lse: Optional[Tensor] = None,
    grad_entropy: Optional[Tensor] = None,
) -> EntropyResult:
    """As ``call``, of fused_logp_entropy; the entropy's upstream gradient is lse's unless given."""
    leaf = logits.detach().requires_grad_()
    with no_host_sync(logits.device):
        *outputs, _ = torch.ops.rl_logp.fused_logp_entropy_forward(leaf, target, temperature)
        logp, entropy, lse = outputs
        if grad_entropy is None and grad_lse is not None:
            grad_entropy = grad_lse.to(logp.dtype)
        grads = [torch.ones_like(logp) if grad_logp is None else grad_logp, grad_entropy, grad_lse]
        used = [index for index, grad in enumerate(grads) if grad is not None]
        (dlogits,) = torch.autograd.grad(
            [outputs[index] for index in used], leaf, [grads[index] for index in used]
        )
    return EntropyResult(logp.detach(), entropy.detach(), lse.detach(), dlogits)


def exact(case: Sample) -> Reference:
    """The fp64 oracle's results for the same arguments."""
    return reference(
        case.logits,
        case.target,
        temperature=case.temperature,
        grad_logp=case.grad_logp,
        grad_lse=case.grad_lse,
    )


def rows_of(result: AnyResult, index) -> AnyResult:
    """The same rows of every result."""
    return type(result)(*(tensor[index] for tensor in result))


def assert_same_bits(actual: Any, expected: Any, what: str) -> None:
    """Of two named tuples of tensors, such as Result."""
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        assert_bitwise_equal(a, e, f"{what}: {name}")


def kernel_serves(device: str, dtype: torch.dtype) -> bool:
    """Whether a compiled kernel, and not the chunked fallback, serves this device and dtype."""
    return any(
        b.available for b in rl_logp.backends() if b.device_type == device and b.dtype == dtype
    )


_INSIDE = {
    torch.ops.rl_logp.fused_logp_forward.default: ops._forward,
    torch.ops.rl_logp.fused_logp_backward.default: ops._backward,
    torch.ops.rl_logp.fused_logp_entropy_forward.default: entropy_ops._forward,
    torch.ops.rl_logp.fused_logp_entropy_backward.default: entropy_ops._backward,
}


class OperatorsSeen(TorchDispatchMode):
    """Every operator that is called, those inside ours too, which a mode is not shown by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        inside = _INSIDE.get(func)
        if inside is None:
            return func(*args, **(kwargs or {}))
        with self:
            return inside(*args, **(kwargs or {}))


def relaid(logits: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout. Everything around them is NaN."""
    *rows, vocab_size = logits.shape
    if layout == "contiguous":
        return logits.contiguous()
    if layout == "padded columns":
        base = logits.new_full((*rows, vocab_size + 13), torch.nan)
        view = base[..., :vocab_size]
    elif layout == "inner columns":
        base = logits.new_full((*rows, vocab_size + 13), torch.nan)
        view = base[..., 5 : 5 + vocab_size]
    elif layout == "shifted rows":  # what trainers pass: logits[:, :-1]
        base = logits.new_full((*rows[:-1], rows[-1] + 1, vocab_size), torch.nan)
        view = base[..., :-1, :]
    elif layout == "every other row":
        base = logits.new_full((*rows[:-1], 2 * rows[-1], vocab_size), torch.nan)
        view = base[..., ::2, :]
    elif layout == "misaligned base":
        base = logits.new_full((logits.numel() + 3,), torch.nan)
        view = base[3:].view(logits.shape)
    elif layout == "rows reversed in memory":
        base = logits.new_full((*rows[::-1], vocab_size), torch.nan)
        view = base.permute(*reversed(range(len(rows))), len(rows))
    elif layout == "columns not adjacent":
        base = logits.new_full((vocab_size, *rows), torch.nan)
        view = base.movedim(0, -1)
    else:
        raise ValueError(f"no layout {layout}")
    view.copy_(logits)
    return view


LAYOUTS = [
    "padded columns",
    "inner columns",
    "shifted rows",
    "every other row",
    "misaligned base",
    "rows reversed in memory",
    "columns not adjacent",
]
