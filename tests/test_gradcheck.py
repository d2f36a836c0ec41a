"""The gradient against finite differences, in fp64."""

import pytest
import torch
from calls import LAYOUTS, Sample, relaid, sample
from torch import Tensor

import rl_logp

SHAPES = [(5,), (1, 1), (4, 7), (2, 3, 5)]


def check(case: Sample, temperature: Tensor | float, return_lse: bool) -> None:
    def function(logits: Tensor):
        return rl_logp.fused_logp(
            logits, case.target, temperature=temperature, return_lse=return_lse
        )

    # gradcheck's default tolerances are for fp64.
    assert torch.autograd.gradcheck(function, (case.logits.requires_grad_(),))


@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp and lse"])
@pytest.mark.parametrize("temperature", ["none", "number", "0-dim", "per row"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_every_form(
    device: str, shape: tuple[int, ...], temperature: str, return_lse: bool
) -> None:
    case = sample(shape, torch.float64, device)
    form = {
        "none": 1.0,
        "number": 0.7,
        "0-dim": torch.tensor(0.7, device=device),
        "per row": case.temperature,
    }[temperature]
    check(case, form, return_lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_every_layout(device: str, layout: str) -> None:
    case = sample((2, 3, 5), torch.float64, device)
    view = relaid(case.logits, layout)
    check(case._replace(logits=view), case.temperature, return_lse=True)


def test_the_gradient_through_what_is_before_and_after(device: str) -> None:
    """A projection before the op and a policy ratio after it, as a trainer has them."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(device).requires_grad_()
        for shape in ((4, 3), (3, 6))
    )
    target = torch.tensor([0, 5, -100, 2], device=device)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logp = rl_logp.fused_logp(hidden @ weight, target, temperature=0.7)
        return ((logp + 0.1).exp() * torch.arange(4, device=device)).sum()

    assert torch.autograd.gradcheck(loss, (hidden, weight))
