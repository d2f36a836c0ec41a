"""Compiled code has eager's bits, forward and backward, without a graph break."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rl_logp
from compile_tests.common import (
    BACKENDS,
    LanguageModel,
    assert_compiled_is_eager,
    assert_same_bits,
    gradients,
    inputs,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp-lse"])
def test_of_every_dtype(device: str, backend: str, dtype: torch.dtype, return_lse: bool):
    def f(logits: Tensor, target: Tensor):
        return rl_logp.fused_logp(logits, target, return_lse=return_lse)

    assert_compiled_is_eager(f, *inputs(5, 97, dtype=dtype, device=device), backend=backend)


LAYOUTS = {
    "drops-the-last-position": lambda x: x[:, :-1],
    "slice-of-a-padded-vocabulary": lambda x: x[..., :90],
    "misaligned-base": lambda x: x[..., 1:],
    "permuted-rows": lambda x: x.transpose(0, 1),
    "expanded-rows": lambda x: x[:1].expand(4, -1, -1),
    "every-other-row": lambda x: x[:, ::2],
    "columns-not-adjacent": lambda x: x.transpose(1, 2),
    "one-row-without-leading-dimensions": lambda x: x[0, 0],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_every_layout(device: str, backend: str, layout: str):
    logits, _ = inputs(3, 6, 97, device=device)
    target = torch.randint(0, 90, LAYOUTS[layout](logits).shape[:-1], device=device)

    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(LAYOUTS[layout](logits), target)

    assert_compiled_is_eager(f, logits, target, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["number", "0-dim", "a-row"])
def test_of_every_kind_of_temperature(device: str, backend: str, kind: str):
    logits, target = inputs(4, 97, device=device)
    temperature: Any = {
        "number": 0.7,
        "0-dim": torch.tensor(0.7, device=device),
        "a-row": torch.rand(4, device=device) + 0.5,
    }[kind]

    def f(logits: Tensor, target: Tensor, temperature: Any) -> Tensor:
        return rl_logp.fused_logp(logits, target, temperature=temperature)

    assert_compiled_is_eager(f, logits, target, temperature, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_of_a_temperature_that_changes(device: str, backend: str, kind: str):
    """A number is a constant of the graph, a tensor an input: one graph serves every value."""
    logits, target = inputs(4, 97, device=device)
    compilations = CompileCounterWithBackend(backend)

    @torch.compile(backend=compilations, fullgraph=True)
    def f(temperature: Any) -> Tensor:
        return rl_logp.fused_logp(logits, target, temperature=temperature)

    for value in (0.7, 0.8, 0.1, 1.0, 2.0):
        temperature = value if kind == "number" else torch.tensor(value, device=device)
        actual = f(temperature)
        expected = rl_logp.fused_logp(logits, target, temperature=value)
        assert_same_bits(actual, expected, f"logp at {value}")
        assert_same_bits(gradients(actual, logits), gradients(expected, logits), "dlogits")
    if kind == "tensor":
        assert compilations.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_policy_gradient_loss(device: str, backend: str):
    """The op among what surrounds it in a trainer: only its own bits are promised, so only those
    operations that round once and in no order are used."""
    logits, target = inputs(2, 6, 97, device=device)
    old_logp = rl_logp.fused_logp(logits.detach(), target) + 0.125
    advantages = torch.randn(2, 1, device=device)

    def loss(logits: Tensor, target: Tensor, old_logp: Tensor, advantages: Tensor) -> Tensor:
        ratio = rl_logp.fused_logp(logits, target) - old_logp
        return -torch.minimum(ratio, ratio.clamp(-0.2, 0.2)) * advantages

    assert_compiled_is_eager(loss, logits, target, old_logp, advantages, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_targets_and_logits_at_the_edges(device: str, backend: str):
    logits = torch.randn(6, 33, device=device)
    logits[0] = -torch.inf
    logits[1, 3:] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, 7] = torch.nan
    logits[4] = torch.finfo(torch.float32).min
    target = torch.tensor([-100, 5, 5, 2**32 + 5, 1, 33], device=device)

    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target)

    assert_compiled_is_eager(f, logits.requires_grad_(), target, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_the_rows_that_get_no_gradient(device: str, backend: str):
    """A masked loss: the gradient of a row whose upstream gradient is 0 is exactly 0."""
    logits, target = inputs(6, 33, device=device)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], device=device)

    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target) * mask

    compiled = assert_compiled_is_eager(f, logits, target, backend=backend)
    (dlogits,) = gradients(compiled(logits, target), logits)
    assert not dlogits[mask == 0].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_autograd(device: str, backend: str, context: Any):
    logits, target = inputs(5, 97, device=device)
    expected = rl_logp.fused_logp(logits, target)

    @torch.compile(backend=backend, fullgraph=True)
    def f(logits: Tensor, target: Tensor) -> Tensor:
        with context():
            return rl_logp.fused_logp(logits, target)

    actual = f(logits, target)
    assert not actual.requires_grad
    assert_same_bits(actual, expected.detach(), "logp")
    with context():
        fresh = logits.clone()  # an inference tensor, under inference mode
        uncompiled = rl_logp.fused_logp(fresh, target)
        compiled = torch.compile(rl_logp.fused_logp, backend=backend, fullgraph=True)(fresh, target)
    for actual in (uncompiled, compiled):
        assert_same_bits(actual.clone(), expected.detach(), "logp")


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_the_op_alone(device: str, backend: str, logits_dtype: torch.dtype):
    """The dtypes, and so the bits, are those without autocast: fp32 logits are not cast down."""
    logits, target = inputs(5, 97, dtype=logits_dtype, device=device)
    expected = rl_logp.fused_logp(logits, target)

    @torch.compile(backend=backend, fullgraph=True)
    def f(logits: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return rl_logp.fused_logp(logits, target)

    actual = f(logits, target)
    assert_same_bits(actual, expected, "logp")
    assert_same_bits(gradients(actual, logits), gradients(expected, logits), "dlogits")


def test_autocast_model_feeds_the_op_its_low_precision_logits(device: str):
    model = LanguageModel().to(device)
    tokens = torch.randint(0, 64, (2, 9), device=device)
    seen: list[Tensor] = []
    model.head.register_forward_hook(lambda *hooked: seen.append(hooked[-1]))
    with torch.autocast(device, torch.bfloat16):
        logp = model(tokens)
    assert seen[0].dtype == torch.bfloat16
    assert_same_bits(logp, rl_logp.fused_logp(seen[0][:, :-1], tokens[:, 1:]), "logp")
    assert gradients(logp, seen[0])[0].dtype == torch.bfloat16
