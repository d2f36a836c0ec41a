"""Compiled autograd captures the op's backward in one graph, with the bits of eager."""

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

from compile_tests.common import BACKENDS, LanguageModel, assert_same_bits


def _gradients(model: LanguageModel) -> tuple[Tensor, ...]:
    grads = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        grads.append(parameter.grad)
    model.zero_grad()
    return tuple(grads)


@pytest.fixture
def expected() -> tuple[LanguageModel, Tensor, tuple[Tensor, ...]]:
    model, tokens = LanguageModel(), torch.randint(0, 64, (3, 9))
    model(tokens).sum().backward()
    return model, tokens, _gradients(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_an_eager_forward(backend: str, expected):
    model, tokens, grads = expected
    counters.clear()
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        model(tokens).sum().backward()
    assert counters["compiled_autograd"]["captures"] == 1
    assert_same_bits(_gradients(model), grads, "gradients")


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_compiled_step(backend: str, expected):
    model, tokens, grads = expected
    counters.clear()

    def step(tokens: Tensor) -> None:
        model(tokens).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, backend=backend)
        for _ in range(2):
            compiled(tokens)
            assert_same_bits(_gradients(model), grads, "gradients")
    assert counters["compiled_autograd"]["captures"] == 1
