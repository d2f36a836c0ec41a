"""C12, compiled: the device of the logits and its current stream, not the current device."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import Tensor

import rl_logp
from compile_tests.common import BACKENDS, assert_same_bits, gradients, inputs

pytestmark = [pytest.mark.cuda, pytest.mark.two_gpus]


SCORES: dict[str, Callable] = {
    "fused_logp": partial(rl_logp.fused_logp, return_lse=True),
    "vocab_parallel_logp": partial(rl_logp.vocab_parallel_logp, return_lse=True),
    "fused_logp_entropy": rl_logp.fused_logp_entropy,
    "vocab_parallel_logp_entropy": rl_logp.vocab_parallel_logp_entropy,
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side_stream", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize(
    ("current", "other"), [(0, 1), (1, 0)], ids=["current 0, logits on 1", "current 1, logits on 0"]
)
def test_the_current_device_is_neither_used_nor_changed(
    score: Callable, backend: str, side_stream: bool, current: int, other: int
) -> None:
    def results(run: Callable, logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        leaf = logits.detach().requires_grad_()
        outputs = run(leaf, target, temperature=0.7)
        return (*outputs, *gradients(outputs, leaf))

    with torch.cuda.device(current), ExitStack() as stack:
        here = inputs(33, 515, device=f"cuda:{current}")
        expected = results(score, *here)
        there = [tensor.detach().to(f"cuda:{other}") for tensor in here]
        torch.cuda.synchronize(other)
        if side_stream:  # of the other device; the current device stays
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(other)))
            torch.cuda.set_device(current)
        actual = results(torch.compile(score, backend=backend, fullgraph=True), *there)
        assert torch.cuda.current_device() == current
        torch.cuda.synchronize(other)
        assert {tensor.device for tensor in actual} == {torch.device("cuda", other)}
        assert_same_bits([t.to(f"cuda:{current}") for t in actual], expected, f"cuda:{other}")
