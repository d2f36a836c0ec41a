"""vocab_parallel_logp compiled whole: its graphs, what they save, and a number of rows that varies.

The all-gather of a group is in test_vocab_parallel.py; a group is not needed for the rest.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rl_logp
from compile_tests.common import (
    BACKENDS,
    OP,
    assert_compiled_is_eager,
    assert_rows_are_eager,
    inputs,
)
from compile_tests.graphs import calls, capture


def test_nothing_but_logits_target_and_lse_is_saved() -> None:
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.vocab_parallel_logp(logits, target, vocab_start=0, vocab_size=32)

    graphs = capture(f, *inputs(4, 32))
    (forward,), (backward,) = graphs.forward, graphs.backward
    assert calls(forward, OP.fused_logp_partial.default) == 1
    assert calls(forward, OP.fused_logp_shard.default) == 1
    assert calls(backward, OP.fused_logp_backward.default) == 1
    returned: Any = forward.graph.output_node().args[0]
    assert sorted(tuple(node.meta["val"].shape) for node in returned[1:]) == [(4,), (4,), (4, 32)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "return_lse": True}], ids=str)
def test_compiled_has_eagers_bits(device: str, backend: str, options: dict) -> None:
    def f(logits: Tensor, target: Tensor):
        return rl_logp.vocab_parallel_logp(logits, target, **options)

    assert_compiled_is_eager(f, *inputs(5, 97, device=device), backend=backend)


def test_a_varying_number_of_rows_makes_three_graphs(device: str) -> None:
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.vocab_parallel_logp(logits, target, temperature=0.7)

    compilations = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=compilations, fullgraph=True)
    for rows in (7, 128, 3, 1, 0, 2, 65):
        assert_rows_are_eager(compiled, f, rows, 97, device)
    assert compilations.frame_count == 3
