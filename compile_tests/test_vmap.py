"""vmap over the op is one call of it, with the bits of a loop, eager and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rl_logp
from compile_tests.common import BACKENDS, OP, assert_compiled_is_eager, assert_same_bits, gradients
from rl_logp import _checks

SAMPLES, ROWS, COLUMNS = 3, 4, 19


def _case(logits_dim: int | None, target_dim: int | None, temperature_dim: Any):
    """Arguments with the samples at the given dimensions; None: the same for every sample."""
    logits = torch.randn(SAMPLES, ROWS, COLUMNS)
    target = torch.randint(-1, COLUMNS, (SAMPLES, ROWS))
    arguments = [
        logits[0] if logits_dim is None else logits.movedim(0, logits_dim),
        target[0] if target_dim is None else target.movedim(0, target_dim),
    ]
    dims: list = [logits_dim, target_dim]
    if temperature_dim == "one-for-all":
        arguments.append(torch.tensor(0.7))
        dims.append(None)
    elif temperature_dim == "one-a-sample":
        arguments.append(torch.rand(SAMPLES) + 0.5)
        dims.append(0)
    elif temperature_dim == "one-a-row":
        arguments.append(torch.rand(ROWS, SAMPLES) + 0.5)
        dims.append(1)
    elif temperature_dim == "one-a-row-the-same-for-every-sample":
        arguments.append(torch.rand(ROWS) + 0.5)
        dims.append(None)
    arguments[0] = arguments[0].clone().requires_grad_()
    return arguments, tuple(dims)


CASES = {
    "all-in-front": (0, 0, None),
    "samples-behind-rows": (1, 1, None),
    "samples-last": (2, 1, None),
    "one-set-of-logits": (None, 0, None),
    "one-target": (0, None, None),
    **{
        f"temperature-{kind}": (0, 0, kind)
        for kind in (
            "one-for-all",
            "one-a-sample",
            "one-a-row",
            "one-a-row-the-same-for-every-sample",
        )
    },
}


def _op(return_lse: bool) -> Callable:
    def op(logits: Tensor, target: Tensor, temperature: Tensor | None = None):
        return rl_logp.fused_logp(
            logits,
            target,
            temperature=1.0 if temperature is None else temperature,
            return_lse=return_lse,
        )

    return op


def _loop(op: Callable, arguments: list, dims: tuple) -> Any:
    """What vmap stands for: the calls one by one, their outputs stacked."""
    outputs = [
        op(*(a if d is None else a.select(d, i) for a, d in zip(arguments, dims, strict=True)))
        for i in range(SAMPLES)
    ]
    if isinstance(outputs[0], tuple):
        return tuple(torch.stack(each) for each in zip(*outputs, strict=True))
    return torch.stack(outputs)


@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp-lse"])
@pytest.mark.parametrize("case", CASES)
def test_of_every_placing(case: str, return_lse: bool, monkeypatch: pytest.MonkeyPatch):
    arguments, dims = _case(*CASES[case])
    op = _op(return_lse)
    expected = _loop(op, arguments, dims)
    runs = []
    check = _checks.forward
    monkeypatch.setattr(_checks, "forward", lambda *a, **k: (runs.append(a), check(*a, **k)))
    actual = torch.vmap(op, in_dims=dims)(*arguments)
    assert len(runs) == 1
    assert_same_bits(actual, expected, "outputs")
    if dims[0] is not None:  # else the loop adds up gradients, in an order of its own
        assert_same_bits(
            gradients(actual, arguments[0]), gradients(expected, arguments[0]), "dlogits"
        )


@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp-lse"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str, return_lse: bool):
    arguments, dims = _case(1, 1, "one-a-sample")
    f = torch.vmap(_op(return_lse), in_dims=dims)
    assert_compiled_is_eager(f, *arguments, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested(backend: str):
    logits = torch.randn(2, SAMPLES, ROWS, COLUMNS, requires_grad=True)
    target = torch.randint(-1, COLUMNS, (2, SAMPLES, ROWS))
    f = torch.vmap(torch.vmap(OP.fused_logp))
    assert_same_bits(f(logits, target), rl_logp.fused_logp(logits, target), "logp")
    assert_compiled_is_eager(f, logits, target, backend=backend)


def test_of_a_batch_of_upstream_gradients():
    """torch.autograd's own use of vmap: a Jacobian in one backward."""
    logits = torch.randn(ROWS, COLUMNS, requires_grad=True)
    logp = rl_logp.fused_logp(logits, torch.tensor([3, 0, -100, 18]))
    (jacobian,) = torch.autograd.grad(logp, logits, torch.eye(ROWS), is_grads_batched=True)
    logp = rl_logp.fused_logp(logits, torch.tensor([3, 0, -100, 18]))
    for row in range(ROWS):
        (expected,) = torch.autograd.grad(logp[row], logits, retain_graph=True)
        assert_same_bits(jacobian[row], expected, f"row {row} of the Jacobian")
