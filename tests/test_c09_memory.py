"""C9: the forward allocates O(N), the backward the gradient; the fallback a bounded workspace."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import DTYPES, LAYOUTS, OperatorsSeen, kernel_serves, relaid, sample
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rl_logp import chunked

# Elements, in place of 2^27: the same promise, of chunks of 64 rows of 1024 columns that fill it.
WORKSPACE = 2 * 64 * (1024 + chunked.ROW_ELEMENTS)


def peak_bytes(device: str, call: Callable[[], object]) -> int:
    """The most bytes that were allocated at once while ``call`` ran, its results included."""
    if device == "cuda":
        gc.collect()  # or what another test left in a cycle may go while this is measured
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        kept = call()
    del kept
    now = peak = 0
    # In order, which the public tables are not: they only have sums.
    events: Any = run.profiler and run.profiler.kineto_results
    for event in events.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def forward(logits: Tensor, target: Tensor, temperature: Tensor | None):
    return torch.ops.rl_logp.fused_logp_forward(logits, target, temperature, True)


def backward(logits: Tensor, target: Tensor, temperature: Tensor | None, lse: Tensor) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    g = torch.ones((), dtype=dtype, device=logits.device).expand(target.shape)
    return torch.ops.rl_logp.fused_logp_backward(
        g, None, logits, target, temperature, lse, 0, logits.shape[-1]
    )


def test_the_measure_sees_an_allocation_that_is_gone_afterwards(device: str) -> None:
    x = torch.zeros(2**16, device=device)
    assert peak_bytes(device, lambda: (x + 1).sum()) >= x.nbytes


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("with_temperature", [False, True], ids=["no temperature", "temperature"])
def test_the_fallback_stays_within_its_workspace(
    device: str,
    dtype: torch.dtype,
    layout: str,
    with_temperature: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernel_serves(device, dtype):
        pytest.skip("a kernel serves it and has no workspace")
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", WORKSPACE)
    case = sample((16, 32, 1024), dtype, device)
    logits = relaid(case.logits, layout)
    temperature = case.temperature if with_temperature else None
    workspace = 4 * WORKSPACE
    assert case.logits.numel() > 3 * WORKSPACE  # the bound is not met by being small

    results: list[tuple[Tensor, Tensor]] = []
    peak = peak_bytes(device, lambda: results.append(forward(logits, case.target, temperature)))
    logp, lse = results.pop()
    assert peak <= workspace + logp.nbytes + lse.nbytes + 4096
    peak = peak_bytes(device, lambda: backward(logits, case.target, temperature, lse))
    assert peak <= workspace + logits.numel() * logits.element_size() + 4096


@pytest.mark.parametrize("vocab_size", [1, 2, 7])
def test_short_rows_stay_within_the_workspace(
    device: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a row is as small as its target and masks, these count too."""
    if kernel_serves(device, torch.float32):
        pytest.skip("a kernel serves it and has no workspace")
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", WORKSPACE)
    case = sample((2**17, vocab_size), torch.float32, device)
    results: list[tuple[Tensor, Tensor]] = []
    peak = peak_bytes(device, lambda: results.append(forward(case.logits, case.target, None)))
    logp, lse = results.pop()
    assert peak <= 4 * WORKSPACE + logp.nbytes + lse.nbytes + 4096
    peak = peak_bytes(device, lambda: backward(case.logits, case.target, None, lse))
    assert peak <= 4 * WORKSPACE + case.logits.nbytes + 4096


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_allocates_its_results_alone(device: str, dtype: torch.dtype) -> None:
    if not kernel_serves(device, dtype):
        pytest.skip(f"the chunked fallback serves {dtype} on {device}")
    case = sample((64, 50257), dtype, device)
    results: list[tuple[Tensor, Tensor]] = []
    peak = peak_bytes(device, lambda: results.append(forward(case.logits, case.target, None)))
    logp, lse = results.pop()
    assert peak <= 2**16, "O(N), whatever V"
    del logp
    dlogits_bytes = -(-case.logits.nbytes // 512) * 512  # the allocator's step
    peak = peak_bytes(device, lambda: backward(case.logits, case.target, None, lse))
    assert peak <= dlogits_bytes + 512, "the gradient, and the upstream gradient of this test"


@pytest.mark.parametrize("vocab_size", [1, 1000, 50257, 151936, 262144, 2**26, 2**27, 2**31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_default_chunk_is_within_two_to_the_27(vocab_size: int, dtype: torch.dtype) -> None:
    assert chunked.WORKSPACE_ELEMENTS == 2**27
    rows = chunked.default_chunk_rows(vocab_size, dtype)
    in_fp32 = 2 if dtype == torch.float64 else 1
    assert rows == 1 or 2 * in_fp32 * rows * vocab_size <= 2**27
    assert 2 * in_fp32 * (rows + 1) * (vocab_size + 16) > 2**27, "smaller than need be"


def calls_of(rows: int, chunk_rows: int) -> int:
    """Operators that the fallback calls, forward and backward."""
    case = sample((rows, 5))
    logp, lse, dlogits = (torch.empty_like(t) for t in (case.grad_logp, case.grad_lse, case.logits))
    row_arguments = (case.target, case.temperature)
    with OperatorsSeen() as operators:
        chunked.forward(case.logits, *row_arguments, logp, lse, chunk_rows)
        chunked.backward(*case[3:], case.logits, *row_arguments, lse, 0, 5, dlogits, chunk_rows)
    return len(operators.seen)


def test_operator_calls_grow_with_the_chunks_and_not_with_the_rows() -> None:
    assert calls_of(4096, 4096) == calls_of(1, 1)
    assert calls_of(4096, 1024) == calls_of(4, 1)
    assert calls_of(4096, 512) == 2 * calls_of(4096, 1024)
