"""Time and peak memory of one forward, one backward, and both, every provider in turn."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from benchmarks.providers import Function, Provider, errors
from benchmarks.timing import WARM_UPS, Captured, Clock, spread
from benchmarks.workloads import GRAPHED_ROWS, Inputs, Point

Row = dict[str, Any]

MAX_REPEATS, MIN_REPEATS = 25, 5
MILLISECONDS_EACH = 600.0  # a provider's share of one shape, which bounds the slow ones' repeats
SPARE_BYTES = 2 * 2**30


class _Computed(torch.autograd.Function):
    """The logits as some operation's result: the same memory, and not a leaf of autograd."""

    @staticmethod
    def forward(ctx, anchor: Tensor, logits: Tensor) -> Tensor:
        return logits.view_as(logits)


@dataclass
class Run:
    """One provider on one input, with what its rows say beside the figures."""

    provider: Provider
    inputs: Inputs
    fields: Row = field(default_factory=dict)

    def prepare(self) -> None:
        """Loads the provider and finds the dtype of what it returns."""
        self._function: Function = self.provider.load(False)
        logits = self.inputs.logits
        if self.provider.overwrites:
            logits = logits.clone()
        self._logits = logits.detach()
        if self.provider.takes_leaf:
            self._logits.requires_grad_(self.provider.has_backward)
        self._anchor = torch.zeros((), device=logits.device, requires_grad=True)
        self._grad: Tensor = self.inputs.grad_logp
        self._grad = (self.provider.sign * self.inputs.grad_logp).to(self.forward().dtype)

    def restore(self) -> None:
        if self.provider.overwrites:
            with torch.no_grad():
                self._logits.copy_(self.inputs.logits)

    def forward(self) -> Tensor:
        self._scored: Tensor = self._logits
        if not self.provider.takes_leaf:
            self._scored = _Computed.apply(self._anchor, self._logits)  # pyright: ignore[reportAttributeAccessIssue]
        return self._function(self._scored, self.inputs.target)

    def backward(self, out: Tensor, again: bool = False) -> Tensor:
        return torch.autograd.grad(out, self._scored, self._grad, retain_graph=again)[0]

    def both(self) -> Tensor:
        out = self.forward()
        return self.backward(out) if self.provider.has_backward else out

    def sample(self, clock: Clock) -> dict[str, float]:
        self.restore()
        forward_ms, out = clock.time(self.forward)
        if not self.provider.has_backward:
            return {"fwd": forward_ms}
        backward_ms = clock.time(partial(self.backward, out))[0]
        del out
        self.restore()
        return {"fwd": forward_ms, "bwd": backward_ms, "fwd_bwd": clock.time(self.both)[0]}

    def capture(self) -> Captured:
        """CUDA graphs of one forward, one backward, and both."""
        captured = Captured()
        captured.add("fwd", self.forward)
        if self.provider.has_backward:
            out = captured.warm_up(self.forward)
            captured.add("bwd", partial(self.backward, out, again=True))
            captured.add("fwd_bwd", self.both)
        return captured


def check_memory(point: Point, provider: Provider, device: torch.device) -> None:
    """Raises RuntimeError where the device cannot hold the provider's peak."""
    if device.type != "cuda":
        return
    copies = 2 if provider.overwrites else 1
    elements = point.rows * point.columns
    need = copies * point.logits_bytes + provider.bytes_per_element * elements + SPARE_BYTES
    free = torch.cuda.get_device_properties(device).total_memory - torch.cuda.memory_allocated()
    if need > free:
        raise RuntimeError(
            f"would need {need / 1e9:.0f} GB more, of which {free / 1e9:.0f} are free"
        )


def peak_bytes(run: Run, device: torch.device) -> int | None:
    """The most that one forward and backward allocate at a time, the gradient included."""
    if device.type != "cuda":
        return None
    run.restore()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.both()
    return torch.cuda.max_memory_allocated() - before


def floors(point: Point, bytes_per_ms: float) -> dict[str, float]:
    """The least milliseconds: a read of the logits forward, a read and a write backward."""
    once = point.logits_bytes / bytes_per_ms
    return {"fwd": once, "bwd": 2 * once, "fwd_bwd": 3 * once}


@dataclass
class _Measured:
    run: Run
    row: Row
    captured: Captured | None
    repeats: int
    samples: list[dict[str, float]] = field(default_factory=list)


def _ready(run: Run, point: Point, clock: Clock, device: torch.device) -> _Measured:
    check_memory(point, run.provider, device)
    run.prepare()
    for _ in range(WARM_UPS - 1):
        run.sample(clock)
    cost = sum(run.sample(clock).values())
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(MILLISECONDS_EACH / cost)))
    row: Row = {**run.fields, "peak_bytes": peak_bytes(run, device), "method": "launch"}
    captured = None
    if device.type == "cuda" and point.rows < GRAPHED_ROWS and run.provider.graphable:
        try:
            captured, row["method"] = run.capture(), "graph"
        except errors() as error:
            row["capture_error"] = short(error)
    return _Measured(run, row, captured, repeats)


def short(error: BaseException) -> str:
    """The class and the first line of an error, for a row.

    >>> short(ValueError("\\x1b[91mone\\x1b[0m\\ntwo"))
    'ValueError: one'
    """
    text = re.sub(r"\x1b\[\d*m", "", str(error))  # a compiler's colours
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def measure(
    runs: Iterable[Run], point: Point, clock: Clock, bytes_per_ms: float, device: torch.device
) -> Iterator[Row]:
    """A row for each run: its figures, or its ``error``."""
    ready: list[_Measured] = []
    for run in runs:
        try:
            ready.append(_ready(run, point, clock, device))
        except errors() as error:
            yield {**run.fields, "provider": run.provider.name, "error": short(error)}
    rounds = max((one.repeats for one in ready), default=0)
    for index in range(rounds):
        for one in ready:
            if index % ceil(rounds / one.repeats) == 0:
                sampled = one.captured or one.run
                one.samples.append(sampled.sample(clock))
    floor = floors(point, bytes_per_ms)
    for one in ready:
        yield {"provider": one.run.provider.name, **one.row, **_figures(one.samples, floor)}


def _figures(samples: list[dict[str, float]], floor: dict[str, float]) -> Row:
    figures: Row = {"repeats": len(samples)}
    for part in samples[0]:
        of = spread([sample[part] for sample in samples])
        figures[f"{part}_ms"] = of.median
        figures[f"{part}_p20_ms"], figures[f"{part}_p80_ms"] = of.p20, of.p80
        figures[f"{part}_x_floor"] = of.median / floor[part]
    whole = "fwd_bwd" if "fwd_bwd" in samples[0] else "fwd"
    figures["floor_ms"], figures["x_floor"] = floor[whole], figures[f"{whole}_x_floor"]
    return figures
