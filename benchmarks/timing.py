"""Clocks: what an action costs the device, from a cold cache, without the host's launch work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

SCRUB_BYTES = 512 * 2**20  # several times the L2 of any GPU
SPIN_CYCLES = 2_000_000  # about a millisecond: longer than the host needs to launch any provider
WARM_UPS = 3


class Clock(Protocol):
    def time(self, action: Callable[[], T]) -> tuple[float, T]:
        """Milliseconds the action took, and what it returned."""
        ...


class CudaClock:
    """Times one action between two CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._scrub = torch.ones(SCRUB_BYTES // 4, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def time(self, action: Callable[[], T]) -> tuple[float, T]:
        # Reading evicts. Writing would leave dirty lines, written back while the action runs.
        self._scrub.sum()
        # While the device spins, the host queues everything that is timed.
        torch.cuda._sleep(SPIN_CYCLES)
        self._start.record()
        result = action()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end), result


class HostClock:
    """Wall time, where there is no device: for trying the harness, not for figures."""

    def time(self, action: Callable[[], T]) -> tuple[float, T]:
        start = time.perf_counter()
        result = action()
        return (time.perf_counter() - start) * 1e3, result


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def spread(samples: list[float]) -> Spread:
    """Of at least one sample, by the nearest rank.

    >>> spread([5.0, 1.0, 3.0, 2.0, 4.0])
    Spread(median=3.0, p20=2.0, p80=4.0)
    >>> spread([7.0])
    Spread(median=7.0, p20=7.0, p80=7.0)
    """
    ordered = sorted(samples)
    p20, median, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8))
    return Spread(median, p20, p80)


def copy_bandwidth(clock: Clock, elements: int, device: torch.device) -> float:
    """Bytes per millisecond that a copy reads plus those it writes: what a floor is made of."""
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    destination = torch.empty_like(source)
    samples = [clock.time(lambda: destination.copy_(source))[0] for _ in range(WARM_UPS + 20)]
    return 2 * source.nbytes / spread(samples[WARM_UPS:]).median


class Captured:
    """Some actions, each captured in a CUDA graph that its replay is timed of.

    Everything that the graphs read or write is kept alive with them.
    """

    def __init__(self) -> None:
        # One stream for all: autograd runs a backward on the stream its forward ran on.
        self.stream = torch.cuda.Stream()
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._results: list[object] = []

    def warm_up(self, action: Callable[[], T]) -> T:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS - 1):
                action()
            result = action()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize()
        self._results.append(result)
        return result

    def add(self, name: str, action: Callable[[], object]) -> None:
        self.warm_up(action)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            result = action()
        self._graphs[name] = graph
        self._results.append(result)

    def sample(self, clock: Clock) -> dict[str, float]:
        return {name: clock.time(graph.replay)[0] for name, graph in self._graphs.items()}


def launch_overhead(clock: Clock, device: torch.device) -> float:
    """Milliseconds that timing the replay of a graph costs by itself: a kernel of one element."""
    one: Tensor = torch.zeros(1, device=device)
    captured = Captured()
    captured.add("nothing", lambda: one.add_(1))
    return spread([captured.sample(clock)["nothing"] for _ in range(20)]).median
