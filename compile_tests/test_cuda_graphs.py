"""Replaying a CUDA graph of the op, captured by torch.compile or by hand, gives eager's bits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import rl_logp
from compile_tests.common import INDUCTOR, assert_same_bits, gradients, inputs, needs_compiler

pytestmark = pytest.mark.cuda

ROWS, COLUMNS = 6, 1537


def _f(logits: Tensor, target: Tensor) -> Any:
    return rl_logp.fused_logp(logits[:, :-1], target[:, 1:], temperature=0.7, return_lse=True)


def _fresh() -> tuple[Tensor, Tensor]:
    return inputs(2, ROWS, COLUMNS, device="cuda")


@needs_compiler
def test_of_reduce_overhead():
    counters.clear()
    compiled = torch.compile(_f, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):  # warm-up, recording, and three replays
        torch.compiler.cudagraph_mark_step_begin()
        logits, target = _fresh()
        outputs = compiled(logits, target)
        actual = tuple(out.clone() for out in outputs)  # the next replay writes over them
        grad = gradients(outputs, logits)[0].clone()
        expected = _f(logits, target)
        assert_same_bits(actual, expected, "outputs")
        assert_same_bits(grad, gradients(expected, logits)[0], "dlogits")
    assert counters["inductor"]["cudagraph_skips"] == 0


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Captures a call, after a warm-up on a stream of its own, as torch's notes ask."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_of_a_graph_captured_by_hand():
    logits, target = _fresh()
    results: list[Tensor] = []

    def run() -> None:
        outputs = _f(logits, target)
        results[:] = [*outputs, *gradients(outputs, logits)]

    graph = _capture(run)
    for _ in range(3):
        fresh, fresh_target = _fresh()
        with torch.no_grad():
            logits.copy_(fresh)
            target.copy_(fresh_target)
        graph.replay()
        outputs = _f(fresh, fresh_target)
        assert_same_bits(results, [*outputs, *gradients(outputs, fresh)], "replay")


def test_of_the_forward_alone_on_another_stream():
    logits, target = _fresh()
    results: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            results[:] = _f(logits, target)

    graph = _capture(run)
    expected = [out.detach() for out in _f(logits, target)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(results, expected, "replay")


def test_of_a_graphed_module():
    module = rl_logp.FusedLogp(temperature=0.7)
    graphed: Callable = torch.cuda.make_graphed_callables(module, _fresh())
    for _ in range(2):
        logits, target = _fresh()
        actual, expected = graphed(logits, target), rl_logp.FusedLogp(0.7)(logits, target)
        assert_same_bits(actual.clone(), expected, "logp")
        assert_same_bits(gradients(actual, logits), gradients(expected, logits), "dlogits")


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """Call it to make every host synchronisation an error, to the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
@pytest.mark.parametrize("kind", ["number", "0-dim", "a-row"])
def test_no_temperature_makes_the_host_wait(backend: str, kind: str, no_sync: Callable):
    logits, target = inputs(ROWS, COLUMNS, device="cuda")
    temperature: Any = {
        "number": 0.7,
        "0-dim": torch.tensor(0.7, device="cuda"),
        "a-row": torch.rand(ROWS, device="cuda") + 0.5,
    }[kind]

    @torch.compile(backend=backend, fullgraph=True)
    def f(logits: Tensor, target: Tensor) -> Any:
        return rl_logp.fused_logp(logits, target, temperature=temperature, return_lse=True)

    gradients(f(logits, target), logits)  # compiles
    no_sync()
    gradients(f(logits, target), logits)
