"""C12 on the kernels: the device of the logits, its current stream, and no other."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from calls import DTYPES, Call, Result, Sample, assert_same_bits, call, call_with_entropy
from cuda_calls import choice, cuda_kernel, varied_rows
from shards import call_in_shards, call_in_shards_with_entropy
from test_inplace_backward import computed
from torch import Tensor

import rl_logp

pytestmark = cuda_kernel

few_and_many = pytest.mark.parametrize("rows", [9, 641], ids=["few rows", "many rows"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def call_in_place(
    logits: Tensor, target: Tensor, temperature: Tensor, grad_logp: Tensor, grad_lse: Tensor
) -> Result:
    """As calls.call, of a copy of the logits that is overwritten."""
    copy = computed(logits)
    outputs = rl_logp.fused_logp(
        copy, target, temperature=temperature, return_lse=True, inplace_backward=True
    )
    (dlogits,) = torch.autograd.grad(outputs, copy, (grad_logp, grad_lse))
    assert dlogits.data_ptr() == copy.data_ptr()
    return Result._make([*(t.detach() for t in outputs), dlogits])


# What is called, and what has its bits.
CUTS = (0, 1024, 2051)
every_operator = pytest.mark.parametrize(
    ("function", "same"),
    [
        pytest.param(call, call, id="fused_logp"),
        pytest.param(call_in_place, call, id="in place"),
        pytest.param(partial(call_in_shards, cuts=CUTS), call, id="two shards"),
        pytest.param(call_with_entropy, call_with_entropy, id="fused_logp_entropy"),
        pytest.param(
            partial(call_in_shards_with_entropy, cuts=CUTS),
            call_with_entropy,
            id="two shards with an entropy",
        ),
    ],
)

DELAY = 100_000_000  # cycles: tens of milliseconds


def call_behind_a_delay(case: Sample, device: str, function: Call) -> Any:
    """The results on values that come only after a delay, on the device's current stream."""
    late = Sample(*(torch.zeros_like(t) for t in case))
    late.logits.fill_(torch.nan)
    stream = torch.cuda.current_stream(device)
    function(*late)  # loads what loads lazily, which may wait, and leaves this stream memory
    stream.synchronize()
    with torch.cuda.device(device):
        torch.cuda._sleep(DELAY)
        for tensor, values in zip(late, case, strict=True):
            tensor.copy_(values, non_blocking=True)
    result = function(*late)
    assert not stream.query(), "the delay is over: nothing was shown"
    return result


@every_operator
@every_dtype
@few_and_many
@pytest.mark.parametrize("which", ["default", "side", "side with priority"])
def test_the_current_stream_is_used(
    function: Call, same: Call, dtype: torch.dtype, rows: int, which: str
) -> None:
    case = varied_rows(2051, dtype).rows(choice(rows))
    expected = same(*case)
    torch.cuda.synchronize()
    stream = {
        "default": torch.cuda.default_stream,
        "side": torch.cuda.Stream,
        "side with priority": lambda: torch.cuda.Stream(priority=-1),
    }[which]()
    with torch.cuda.stream(stream):
        actual = call_behind_a_delay(case, "cuda", function)
    stream.synchronize()
    assert_same_bits(actual, expected, f"the {which} stream")


@pytest.fixture(params=[(0, 1), (1, 0)], ids=["current 0, logits on 1", "current 1, logits on 0"])
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """The current device, and another."""
    current, other = request.param
    with torch.cuda.device(current):
        yield current, f"cuda:{other}"


@pytest.mark.two_gpus
@every_operator
@every_dtype
@few_and_many
@pytest.mark.parametrize("side_stream", [False, True], ids=["default stream", "side stream"])
def test_the_current_device_is_neither_used_nor_changed(
    devices: tuple[int, str],
    function: Call,
    same: Call,
    dtype: torch.dtype,
    rows: int,
    side_stream: bool,
) -> None:
    current, other = devices
    here = varied_rows(2051, dtype, f"cuda:{current}").rows(choice(rows, device=f"cuda:{current}"))
    expected = same(*here)
    there = Sample(*(t.to(other) for t in here))
    for device in (current, other):
        torch.cuda.synchronize(device)
    with ExitStack() as stack:
        if side_stream:  # of the other device; the current device stays
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(other)))
            torch.cuda.set_device(current)
        actual = call_behind_a_delay(there, other, function)
        assert torch.cuda.current_device() == current
    torch.cuda.synchronize(other)
    assert {t.device for t in actual} == {torch.device(other)}
    back = type(expected)(*(t.to(f"cuda:{current}") for t in actual))
    assert_same_bits(back, expected, other)
