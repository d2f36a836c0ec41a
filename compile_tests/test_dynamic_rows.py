"""A number of rows that varies costs at most three graphs, and none of it any bit."""

from typing import Optional

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rl_logp
from compile_tests.common import (
    BACKENDS,
    assert_rows_are_eager,
    assert_same_bits,
    gradients,
    inputs,
    needs_compiler,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"return_lse": True}], ids=str)
def test_one_graph_for_0_rows_one_for_1_and_one_for_all_others(
    device: str, backend: str, options: dict
):
    def f(logits: Tensor, target: Tensor):
        return rl_logp.fused_logp(logits, target, **options)

    compilations = CompileCounterWithBackend(backend)
    compiled = torch.compile(f, backend=compilations, fullgraph=True)
    for rows in (7, 128, 3, 1, 0, 2, 65, 1000, 1, 0):
        assert_rows_are_eager(compiled, f, rows, 97, device)
    assert compilations.frame_count == 3


@pytest.mark.parametrize("dynamic", [None, True], ids=["found-out", "asked-for"])
def test_rows_that_nobody_marked(dynamic: Optional[bool]):
    """Torch finds out by itself, at the second size, that the rows vary."""

    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target)

    compilations = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=compilations, fullgraph=True, dynamic=dynamic)
    for rows in (1, 7, 128, 1000):
        logits, target = inputs(rows, 97)
        assert_same_bits(compiled(logits, target), f(logits, target), f"logp of {rows} rows")
    assert compilations.frame_count <= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vocabulary_that_varies_too(backend: str):
    """Every size at once: the op puts no guard of its own on any of them."""

    def f(logits: Tensor, target: Tensor) -> Tensor:
        return torch.ops.rl_logp.fused_logp(logits[:, :-1], target[:, 1:])

    compilations = CompileCounterWithBackend(backend)
    compiled = torch.compile(f, backend=compilations, fullgraph=True, dynamic=True)
    for shape in ((3, 5, 97), (2, 9, 64), (4, 33, 50), (5, 4, 131)):
        logits, target = inputs(*shape)
        actual, expected = compiled(logits, target), f(logits, target)
        assert_same_bits(actual, expected, f"logp of {shape}")
        assert_same_bits(gradients(actual, logits), gradients(expected, logits), f"of {shape}")
    assert compilations.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_15_at_a_large_vocabulary(device: str, backend: str):
    """torchtitan #2823, unsloth-zoo #592: recompiles, and memory, where the rows vary.

    On a CPU the largest of the reported sizes is left out, for time.
    """

    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target)

    compilations = CompileCounterWithBackend(backend)
    compiled = torch.compile(f, backend=compilations, fullgraph=True)
    for rows in (1, 7, 128, 1000) if device == "cuda" else (1, 7, 128):
        assert_rows_are_eager(compiled, f, rows, 248320, device)
    assert compilations.frame_count <= 3


@pytest.mark.cuda
@needs_compiler
def test_case_15_peak_memory_is_eagers():
    logits, target = inputs(1000, 248320, device="cuda")
    peaks = []
    for function in (rl_logp.fused_logp, torch.compile(rl_logp.fused_logp, fullgraph=True)):
        function(logits, target).sum().backward()  # compiles, and loads what is loaded once
        logits.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(logits, target).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        logits.grad = None
    eager, compiled = peaks
    assert compiled <= eager + 2**20  # caching granularity of a few tensors of O(rows)
