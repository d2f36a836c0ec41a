"""Every way to call it wrong, by exact message: what was expected, and what came."""

import re
from typing import Any

import pytest
import torch
from calls import kernel_serves
from torch._subclasses.fake_tensor import FakeTensorMode

import rl_logp

ops = torch.ops.rl_logp
LOGITS = torch.zeros(4, 7)
TARGET = torch.zeros(4, dtype=torch.long)
LSE = torch.zeros(4, dtype=torch.float64)
ONES = torch.ones(4)


def raises(error: type[Exception], message: str):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    ("logits", "target", "error", "message"),
    [
        pytest.param(
            LOGITS.long(),
            TARGET,
            TypeError,
            "expected logits of dtype bfloat16 or float16 or float32 or float64, got int64",
            id="integer logits",
        ),
        pytest.param(
            LOGITS.to(torch.float8_e4m3fn),
            TARGET,
            TypeError,
            "expected logits of dtype bfloat16 or float16 or float32 or float64, got float8_e4m3fn",
            id="fp8 logits",
        ),
        pytest.param(
            LOGITS,
            ONES,
            TypeError,
            "expected target of dtype int32 or int64, got float32",
            id="target of floats",
        ),
        pytest.param(
            LOGITS,
            TARGET.bool(),
            TypeError,
            "expected target of dtype int32 or int64, got bool",
            id="target of bools",
        ),
        pytest.param(
            LOGITS,
            TARGET.to(torch.uint8),
            TypeError,
            "expected target of dtype int32 or int64, got uint8",
            id="target of bytes",
        ),
        pytest.param(
            torch.tensor(0.0),
            TARGET,
            ValueError,
            "expected logits of shape (..., V), got a 0-dim tensor",
            id="0-dim logits",
        ),
        pytest.param(
            torch.zeros(4, 0),
            TARGET,
            ValueError,
            "expected logits with at least one column, got (4, 0)",
            id="no columns",
        ),
        pytest.param(
            torch.zeros(4, 7, 9),
            torch.zeros(4, 6, dtype=torch.long),
            ValueError,
            "expected target of shape (4, 7), the leading shape of logits, got (4, 6)",
            id="another row count",
        ),
        pytest.param(
            LOGITS,
            TARGET[:1],
            ValueError,
            "expected target of shape (4,), the leading shape of logits, got (1,)",
            id="a target that would broadcast",
        ),
        pytest.param(
            LOGITS,
            TARGET.unsqueeze(-1),
            ValueError,
            "expected target of shape (4,), the leading shape of logits, got (4, 1)",
            id="a target as gather takes it",
        ),
        pytest.param(
            LOGITS,
            TARGET.to("meta"),
            ValueError,
            "expected target on cpu, the device of logits, got meta",
            id="another device",
        ),
    ],
)
def test_logits_and_target(
    logits: torch.Tensor, target: torch.Tensor, error: type[Exception], message: str
) -> None:
    with raises(error, f"fused_logp: {message}"):
        rl_logp.fused_logp(logits, target)
    with raises(error, f"fused_logp: {message}"):
        rl_logp.fused_logp(logits, target, return_lse=True)


def no_temperature(value: str) -> str:
    return f"fused_logp: expected temperature > 0 and finite in float32, got {value}"


INF = float("inf")


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5, float("nan"), -INF, INF, 1e-50, 1e39, 0, -1])
def test_a_number_that_is_no_temperature(value: float) -> None:
    """1e-50 is 0 in fp32, and 1e39 infinite. A number is known on the host, whatever the device."""
    with raises(ValueError, no_temperature(str(value))):
        rl_logp.fused_logp(LOGITS, TARGET, temperature=value)
    with raises(ValueError, no_temperature(str(value))):
        rl_logp.fused_logp(LOGITS.to("meta"), TARGET.to("meta"), temperature=value)


@pytest.mark.parametrize("value", ["0.7", [0.7], (), 1j], ids=str)
def test_what_is_neither_a_number_nor_a_tensor(value: Any) -> None:
    message = f"expected temperature as a number, a tensor or None, got {type(value).__name__}"
    for score in (rl_logp.fused_logp, rl_logp.fused_logp_entropy, rl_logp.vocab_parallel_logp):
        with raises(TypeError, f"fused_logp: {message}"):
            score(LOGITS, TARGET, temperature=value)
    with raises(TypeError, f"fused_logp: {message}"):
        rl_logp.fused_entropy(LOGITS, temperature=value)


@pytest.mark.parametrize("value", [0.0, -1.5, float("nan"), INF])
@pytest.mark.parametrize("form", ["0-dim", "per row"])
def test_a_tensor_that_is_no_temperature(value: float, form: str) -> None:
    """Known without waiting on the CPU alone."""
    temperature = torch.ones(4)
    temperature[2] = value
    with raises(ValueError, no_temperature(str(value))):
        rl_logp.fused_logp(
            LOGITS, TARGET, temperature=temperature if form == "per row" else temperature[2]
        )


@pytest.mark.parametrize(
    ("temperature", "error", "message"),
    [
        pytest.param(
            torch.ones((), dtype=torch.float64),
            TypeError,
            "expected temperature of dtype float32, got float64",
            id="fp64",
        ),
        pytest.param(
            torch.ones(4, dtype=torch.bfloat16),
            TypeError,
            "expected temperature of dtype float32, got bfloat16",
            id="bf16",
        ),
        pytest.param(
            torch.tensor(1),
            TypeError,
            "expected temperature of dtype float32, got int64",
            id="integer",
        ),
        pytest.param(
            torch.ones(1),
            ValueError,
            "expected a 0-dim temperature or one of shape (4,), the leading shape of logits,"
            " got (1,)",
            id="one element",
        ),
        pytest.param(
            torch.ones(4, 1),
            ValueError,
            "expected a 0-dim temperature or one of shape (4,), the leading shape of logits,"
            " got (4, 1)",
            id="as it would broadcast over columns",
        ),
        pytest.param(
            torch.ones(7),
            ValueError,
            "expected a 0-dim temperature or one of shape (4,), the leading shape of logits,"
            " got (7,)",
            id="one a column",
        ),
        pytest.param(
            torch.ones((), device="meta"),
            ValueError,
            "expected temperature on cpu, the device of logits, got meta",
            id="another device",
        ),
    ],
)
def test_the_form_of_a_temperature(
    temperature: torch.Tensor, error: type[Exception], message: str
) -> None:
    with raises(error, f"fused_logp: {message}"):
        rl_logp.fused_logp(LOGITS, TARGET, temperature=temperature)
    with raises(error, f"fused_logp: {message}"):
        rl_logp.fused_entropy(LOGITS, temperature=temperature)  # which has no target to speak of


@pytest.mark.parametrize("logits_too", [False, True], ids=["temperature alone", "logits too"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp and lse"])
def test_a_temperature_that_requires_grad(logits_too: bool, return_lse: bool) -> None:
    logits = LOGITS.clone().requires_grad_(logits_too)
    temperature = torch.tensor(0.5, requires_grad=True)
    with raises(
        ValueError,
        "fused_logp: expected a temperature that does not require grad, got one that does: its"
        " gradient is not computed; detach it",
    ):
        rl_logp.fused_logp(logits, TARGET, temperature=temperature, return_lse=return_lse)
    with torch.no_grad():  # where nothing is differentiated, nothing is left out
        rl_logp.fused_logp(logits, TARGET, temperature=temperature, return_lse=return_lse)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        pytest.param(
            {"lse": LSE.float()},
            TypeError,
            "expected lse of dtype float64, got float32",
            id="fp32 lse",
        ),
        pytest.param(
            {"lse": LSE[:3]},
            ValueError,
            "expected lse of shape (4,), the shape of target, got (3,)",
            id="lse's shape",
        ),
        pytest.param(
            {"grad_logp": ONES.bfloat16()},
            TypeError,
            "expected grad_logp of dtype float32, got bfloat16",
            id="bf16 grad_logp",
        ),
        pytest.param(
            {"grad_logp": ONES[:3]},
            ValueError,
            "expected grad_logp of shape (4,), the shape of target, got (3,)",
            id="grad_logp's shape",
        ),
        pytest.param(
            {"grad_lse": ONES},
            TypeError,
            "expected grad_lse of dtype float64, got float32",
            id="fp32 grad_lse",
        ),
        pytest.param(
            {"grad_lse": LSE[:1]},
            ValueError,
            "expected grad_lse of shape (4,), the shape of target, got (1,)",
            id="grad_lse's shape",
        ),
        pytest.param(
            {"vocab_start": -1},
            ValueError,
            "expected columns -1 to 6 within a vocabulary of 7",
            id="before the start",
        ),
        pytest.param(
            {"vocab_start": 1},
            ValueError,
            "expected columns 1 to 8 within a vocabulary of 7",
            id="past the end",
        ),
        pytest.param(
            {"vocab_size": 6},
            ValueError,
            "expected columns 0 to 7 within a vocabulary of 6",
            id="too small",
        ),
        pytest.param(
            {"logits": LOGITS.long()},
            TypeError,
            "expected logits of dtype bfloat16 or float16 or float32 or float64, got int64",
            id="integer logits",
        ),
    ],
)
def test_the_backward(changed: dict, error: type[Exception], message: str) -> None:
    arguments = {
        "grad_logp": ONES,
        "grad_lse": None,
        "logits": LOGITS,
        "target": TARGET,
        "temperature": None,
        "lse": LSE,
        "vocab_start": 0,
        "vocab_size": 7,
    }
    ops.fused_logp_backward(*arguments.values())
    with raises(error, f"fused_logp: {message}"):
        ops.fused_logp_backward(*{**arguments, **changed}.values())


def test_a_fp64_call_has_a_fp64_upstream_gradient() -> None:
    with raises(TypeError, "fused_logp: expected grad_logp of dtype float64, got float32"):
        ops.fused_logp_backward(ONES, None, LOGITS.double(), TARGET, None, LSE, 0, 7)


def test_errors_come_on_the_meta_device_too() -> None:
    """Which is how a traced graph meets them."""
    with raises(
        ValueError,
        "fused_logp: expected target of shape (4,), the leading shape of logits, got (3,)",
    ):
        rl_logp.fused_logp(LOGITS.to("meta"), TARGET[:3].to("meta"))


def test_a_device_without_fp64() -> None:
    with FakeTensorMode():  # this machine need not have one
        logits = torch.empty(4, 7, device="mps")
        target = torch.empty(4, dtype=torch.long, device="mps")
        for score in (rl_logp.fused_logp, rl_logp.vocab_parallel_logp):
            with raises(ValueError, "fused_logp: expected a device that has float64, got mps"):
                score(logits, target)


def test_more_leading_dimensions_than_a_kernel_takes(device: str) -> None:
    logits = torch.zeros(*[1] * 9, 7, device=device)
    target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=device)
    if not kernel_serves(device, logits.dtype):
        assert rl_logp.fused_logp(logits, target).shape == target.shape
        return
    with raises(
        ValueError,
        "fused_logp: expected at most 8 leading dimensions where a kernel serves, got 9",
    ):
        rl_logp.fused_logp(logits, target)
    assert rl_logp.fused_logp(logits[0], target[0]).shape == target[0].shape
