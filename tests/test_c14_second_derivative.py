"""C14: a second derivative is a clear error, never silently zero."""

import re

import pytest
import torch
from calls import call, sample
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal

MESSAGE = re.escape(
    "fused_logp: expected to be differentiated once, got a second derivative, which is not"
    " implemented (create_graph=True is fine as long as nothing differentiates the gradient)"
)


def once(leaf: Tensor, target: Tensor, weight: Tensor, lse: bool) -> Tensor:
    """The gradient of a weighted sum, with a graph of its own."""
    logp, lse_value = rl_logp.fused_logp(leaf, target, return_lse=True)
    loss = (logp * weight).sum() + (lse_value * weight).sum() * lse
    (dlogits,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return dlogits


@pytest.mark.parametrize("lse", [False, True], ids=["logp", "logp and lse"])
@pytest.mark.parametrize("of", ["logits", "the upstream gradient"])
def test_a_second_derivative_raises(device: str, of: str, lse: bool) -> None:
    case = sample((3, 5), device=device)
    leaf, weight = case.logits.requires_grad_(), case.grad_logp.requires_grad_()
    dlogits = once(leaf, case.target, weight, lse)
    with pytest.raises(RuntimeError, match=f"^{MESSAGE}$"):
        torch.autograd.grad(dlogits.square().sum(), leaf if of == "logits" else weight)


def test_a_penalty_on_the_gradient_raises(device: str) -> None:
    case = sample((3, 5), device=device)
    leaf = case.logits.requires_grad_()
    logp = rl_logp.fused_logp(leaf, case.target)
    (dlogits,) = torch.autograd.grad(logp.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{MESSAGE}$"):
        (logp.sum() + dlogits.square().sum()).backward()


def test_a_graph_of_the_gradient_that_nothing_uses_is_fine(device: str) -> None:
    case = sample((3, 5), device=device)
    leaf = case.logits.requires_grad_()
    ones = torch.ones_like(case.grad_logp)
    dlogits = once(leaf, case.target, ones, lse=False)
    assert dlogits.requires_grad, "without a graph a second derivative would be silently absent"
    assert_bitwise_equal(dlogits.detach(), call(leaf, case.target).dlogits, "dlogits")
