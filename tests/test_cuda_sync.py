"""C6 on CUDA: the host never waits for the device, in any form of a call.

``calls.call`` makes the same true of every other test's calls.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import DTYPES, LAYOUTS, Call, Sample, no_host_sync, relaid, sample
from test_inplace_backward import computed
from torch import Tensor

import rl_logp

pytestmark = pytest.mark.cuda

# The kernels, and the fallback on the same device.
on_cuda = pytest.mark.parametrize("device", ["cuda", "cuda-chunked"], indirect=True)
CUDA = torch.device("cuda")
ops = torch.ops.rl_logp


def test_the_mode_sees_a_synchronisation() -> None:
    x = torch.ones(3, device=CUDA)
    with no_host_sync(CUDA), pytest.raises(RuntimeError, match="synchroni"):
        x.sum().item()
    assert x.sum().item() == 3


def backward(outputs: Any, leaf: Tensor) -> None:
    """Gradients of the outputs that have one."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(outputs, leaf, [torch.ones_like(t) for t in outputs])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "logp": rl_logp.fused_logp,
    "logp and lse": lambda *args, **options: rl_logp.fused_logp(*args, **options, return_lse=True),
    "logp in place": (
        lambda *args, **options: rl_logp.fused_logp(*args, **options, inplace_backward=True)
    ),
    "logp and entropy": rl_logp.fused_logp_entropy,
    "entropy": lambda logits, _, **options: rl_logp.fused_entropy(logits, **options),
}

TEMPERATURES: dict[str, Callable[[Sample], Any]] = {
    "1": lambda _: 1.0,
    "a number": lambda _: 0.7,
    "0-dim": lambda case: case.temperature.flatten()[0],
    "a row": lambda case: case.temperature,
}


@on_cuda
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (9,), (2, 3, 4)], ids=str)
def test_nothing_that_is_called_waits(
    device: str,
    dtype: torch.dtype,
    temperature: str,
    function: Callable[..., Any],
    target_dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    case = sample((*shape, 515), dtype, device)
    target = case.target.to(target_dtype)
    divisor = TEMPERATURES[temperature](case) if case.target.numel() else 0.7
    with no_host_sync(CUDA):
        logits = computed(case.logits)
        backward(function(logits, target, temperature=divisor), logits)
        with torch.no_grad():
            function(case.logits, target, temperature=divisor)
        with torch.inference_mode():
            function(case.logits, target, temperature=divisor)


@on_cuda
@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp and lse"])
@pytest.mark.parametrize("in_place", [False, True], ids=["a new gradient", "in place"])
def test_the_module_does_not_wait(device: str, return_lse: bool, in_place: bool) -> None:
    case = sample((2, 3, 515), torch.bfloat16, device)
    module = rl_logp.FusedLogp(0.7, return_lse, inplace_backward=in_place)
    with no_host_sync(CUDA):
        logits = computed(case.logits)
        backward(module(logits, case.target), logits)


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_makes_the_host_wait(
    call: Call, device: str, dtype: torch.dtype, layout: str
) -> None:
    case = sample((3, 5, 515), dtype, device)
    call(relaid(case.logits, layout), *case[1:])
    expanded = (t[:1, :1].expand(3, 5) for t in case[1:])
    call(relaid(case.logits, layout), *expanded)


@on_cuda
@pytest.mark.parametrize("value", [-100, -1, 515, 2**32 + 5], ids=str)
@pytest.mark.parametrize("upstream", [0.0, 1.0, torch.nan], ids=str)
def test_no_value_makes_the_host_wait(call: Call, device: str, value: int, upstream: float) -> None:
    """Nor does what makes a row's logits unnecessary."""
    case = sample((9, 515), torch.bfloat16, device)
    g = torch.full_like(case.grad_logp, upstream)
    target = torch.full_like(case.target, value)
    for logits in (case.logits, torch.full_like(case.logits, torch.nan)):
        call(logits, target, case.temperature, g)
        call(logits, target, case.temperature, g, g.double())
        call(logits, case.target, None, g)


@on_cuda
@pytest.mark.parametrize("start", [0, 16], ids=str)
def test_a_shard_of_the_vocabulary_does_not_wait(device: str, start: int) -> None:
    case = sample((9, 32), torch.bfloat16, device)
    shard = (case.logits[:, start : start + 16].contiguous(), case.target, case.temperature)
    columns = (start, 32)
    with no_host_sync(CUDA):
        _, _, lse, mean = ops.fused_logp_entropy_forward(*case[:3])
        states = ops.fused_logp_partial(*shard, True, *columns)
        ops.fused_logp_combine(states[None], case.target, 32)
        states = ops.fused_logp_entropy_partial(*shard, *columns)
        ops.fused_logp_entropy_combine(states[None], case.target, 32)
        ops.fused_logp_backward(*case[3:], *shard, lse, *columns)
        grads = (case.grad_logp, case.grad_logp, case.grad_lse)
        ops.fused_logp_entropy_backward(*grads, *shard, lse, mean, *columns)
        ops.fused_logp_backward_(*case[3:], *shard, lse, *columns)
