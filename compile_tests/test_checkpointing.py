"""Activation checkpointing runs the op again in the backward, unless a policy saves its outputs.

Bits are those of the plain call either way (C1: a second run of the op has the bits of the first).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rl_logp
from compile_tests.common import (
    BACKENDS,
    LanguageModel,
    assert_same_bits,
    gradients,
    inputs,
    needs_compiler,
)
from compile_tests.graphs import Graphs, calls

FORWARD = torch.ops.rl_logp.fused_logp_forward.default


def _save_the_op(_, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = operator is FORWARD
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, dict] = {
    "reentrant": {"use_reentrant": True},
    "all": {"use_reentrant": False},
    "all-but-a-list": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [FORWARD]),
    },
    "all-but-by-policy": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _save_the_op),
    },
}
RUNS = {"reentrant": 2, "all": 2, "all-but-a-list": 1, "all-but-by-policy": 1}


def _function(kind: str) -> Callable:
    def block(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(hidden @ weight, target)

    def f(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        out = checkpoint(block, hidden, weight, target, **KINDS[kind])
        assert isinstance(out, Tensor)
        return out

    return f


def _arguments() -> tuple[Tensor, Tensor, Tensor]:
    _, target = inputs(5, 33)
    return torch.randn(5, 8, requires_grad=True), torch.randn(8, 33, requires_grad=True), target


class _Count(TorchDispatchMode):
    """Counts the runs of the forward op."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs += func is FORWARD
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_in_eager(kind: str):
    hidden, weight, target = _arguments()
    plain = rl_logp.fused_logp(hidden @ weight, target)
    with _Count() as count:
        logp = _function(kind)(hidden, weight, target)
        # reentrant checkpointing refuses torch.autograd.grad
        logp.backward(torch.linspace(-1, 2, 5))
    assert count.runs == RUNS[kind]
    assert_same_bits(logp, plain, "logp")
    assert_same_bits((hidden.grad, weight.grad), gradients(plain, hidden, weight), "gradients")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reentrant"])
def test_compiled(kind: str):
    hidden, weight, target = _arguments()
    plain = rl_logp.fused_logp(hidden @ weight, target)
    graphs = Graphs(min_cut=True)
    logp = torch.compile(_function(kind), backend=graphs, fullgraph=True)(hidden, weight, target)
    assert_same_bits(logp, plain, "logp")
    assert_same_bits(gradients(logp, hidden, weight), gradients(plain, hidden, weight), "gradients")
    assert calls(graphs.forward[0], FORWARD) == 1
    assert calls(graphs.backward[0], FORWARD) == RUNS[kind] - 1


@needs_compiler
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reentrant"])
def test_compiled_by_inductor(kind: str):
    hidden, weight, target = _arguments()
    plain = rl_logp.fused_logp(hidden @ weight, target)
    logp = torch.compile(_function(kind), fullgraph=True)(hidden, weight, target)
    assert_same_bits(logp, plain, "logp")
    assert_same_bits(gradients(logp, hidden, weight), gradients(plain, hidden, weight), "gradients")


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_of_a_whole_model(backend: str):
    """What a trainer does: the blocks are checkpointed, and the head with the op."""
    model = LanguageModel()
    tokens = torch.randint(0, 64, (3, 9))
    parameters = tuple(model.parameters())
    plain = model(tokens)
    expected = gradients(plain, *parameters)

    def f(tokens: Tensor) -> Any:
        return checkpoint(model, tokens, use_reentrant=False)

    logp = torch.compile(f, backend=backend, fullgraph=True)(tokens)
    assert_same_bits(logp, plain, "logp")
    assert_same_bits(gradients(logp, *parameters), expected, "gradients")
