"""Measure a vocabulary that two GPUs share: python -m benchmarks.two_gpus

--table prints the file of results as a table for docs/distributed.md instead.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

import rl_logp
from benchmarks import timing, workloads
from benchmarks.results import Results, Row, load, surroundings
from benchmarks.vocab_parallel import FUNCTIONS, Function, Traffic, gather
from benchmarks.workloads import QWEN, Point
from compile_tests.processes import run_processes
from rl_logp.collect_env import output_of
from rl_logp.testing import bits

T = TypeVar("T")

DEFAULT = Path(__file__).parent / "results" / "h200x2.json"
SIZE = 2
POINTS = [Point(rows, QWEN) for rows in (256, 4096, 16384)]
SMOKE = [Point(3, 256), Point(8, 1024)]
REPEATS = 21
ONE_GPU = "fused_logp on one GPU"


class GroupClock(timing.CudaClock):
    """Starts the GPUs of the group together."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._one = torch.zeros(1, device=device)

    def time(self, action: Callable[[], T]) -> tuple[float, T]:
        self._scrub.sum()
        # Longer than for one GPU: the host also queues the collectives. GPUs spin at clocks of
        # their own, so they meet after it.
        torch.cuda._sleep(4 * timing.SPIN_CYCLES)
        dist.all_reduce(self._one)
        self._start.record()
        result = action()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end), result


@dataclass
class Case:
    """A function on this process's columns of one input, and what its rows say of it."""

    name: str
    function: Function
    logits: Tensor
    target: Tensor
    grad_logp: Tensor
    start: int
    vocab_size: int
    group: Any

    def forward(self) -> Tensor:
        return self.function(self.logits, self.target, self.start, self.vocab_size, self.group)

    def both(self) -> Tensor:
        return torch.autograd.grad(self.forward(), self.logits, self.grad_logp)[0]

    @property
    def tp(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def cases(point: Point, rank: int, size: int, device: torch.device) -> tuple[list[Case], Case]:
    """Those over the group, and the one that has all columns."""
    inputs = workloads.draw(point, device)
    piece = point.columns // size
    whole = inputs.logits.detach().requires_grad_()
    shard = inputs.logits[:, rank * piece : (rank + 1) * piece].clone().requires_grad_()
    rows = (inputs.target, inputs.grad_logp)
    spread = [
        Case(name, function, shard, *rows, rank * piece, point.columns, dist.group.WORLD)
        for name, function in FUNCTIONS.items()
    ]
    return spread, Case(ONE_GPU, gather, whole, *rows, 0, point.columns, None)


def differing_rows(case: Case, whole: Case) -> int:
    """Rows whose logp the function has with other bits where one process has all columns."""
    with torch.no_grad():
        alone = case.function(whole.logits, whole.target, 0, whole.vocab_size, None)
        return int((bits(case.forward()) != bits(alone)).sum())


def sent(case: Case) -> Row:
    with Traffic(case.tp) as traffic:
        case.both()
    return {"bytes_moved": traffic.bytes, "collectives": traffic.calls}


def peak_bytes(case: Case) -> int | None:
    if case.logits.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.both()
    return torch.cuda.max_memory_allocated() - before


def slowest(milliseconds: float, device: torch.device) -> float:
    """Of the processes: the work is done when the last is."""
    latest = torch.tensor(milliseconds, device=device)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    return latest.item()


def times(
    together: list[Case], clock: timing.Clock, device: torch.device, repeats: int
) -> dict[str, Row]:
    """Of each case, forward, and forward and backward; cases take turns."""
    samples: dict[tuple[str, str], list[float]] = {}
    for index in range(timing.WARM_UPS + repeats):
        for case in together:
            for part, action in (("fwd", case.forward), ("fwd_bwd", case.both)):
                milliseconds = slowest(clock.time(action)[0], device)
                if index >= timing.WARM_UPS:
                    samples.setdefault((case.name, part), []).append(milliseconds)
    rows: dict[str, Row] = {case.name: {"repeats": repeats} for case in together}
    for (name, part), of in samples.items():
        spread = timing.spread(of)
        rows[name][f"{part}_ms"] = spread.median
        rows[name][f"{part}_p20_ms"], rows[name][f"{part}_p80_ms"] = spread.p20, spread.p80
    return rows


def measure(rank: int, size: int, device_type: str, options: dict[str, Any]) -> None:
    """What a process does; that of rank 0 writes the rows."""
    device = torch.device(f"cuda:{rank}" if device_type == "cuda" else "cpu")
    clock = GroupClock(device) if device_type == "cuda" else timing.HostClock()
    if device_type == "cuda":
        rl_logp.require_kernel("cuda", torch.bfloat16)
    results = None
    if rank == 0:
        results = Results(Path(options["output"]), surroundings(device, options["commit"]))
    started = time.monotonic()
    for rows, columns in options["shapes"]:
        point = Point(rows, columns)
        for row in _rows(point, rank, size, device, clock, options["repeats"]):
            if results is not None:
                row = results.add({"bench": "vocab_parallel", **row})
                print(f"{time.monotonic() - started:5.1f} s  {row}", flush=True)
        if device_type == "cuda":
            torch.cuda.empty_cache()


def _rows(
    point: Point,
    rank: int,
    size: int,
    device: torch.device,
    clock: timing.Clock,
    repeats: int,
) -> Iterator[Row]:
    spread, whole = cases(point, rank, size, device)
    figures = {case.name: {**sent(case), "peak_bytes": peak_bytes(case)} for case in spread}
    figures[whole.name] = {"bytes_moved": 0, "collectives": 0, "peak_bytes": peak_bytes(whole)}
    differing = {case.name: {"differing_rows": differing_rows(case, whole)} for case in spread}
    timed = times([*spread, whole], clock, device, repeats)
    for case in (*spread, whole):
        yield {
            "provider": case.name,
            "dtype": point.dtype,
            "V": point.columns,
            "N": point.rows,
            "tp": case.tp,
            **timed[case.name],
            **figures[case.name],
            **differing.get(case.name, {}),
        }


def table(rows: list[Row]) -> str:
    """Rows as a table in Markdown, for docs/distributed.md."""
    headers = [
        "tokens",
        "",
        "forward, ms",
        "forward and backward, ms",
        "a process sends, MB",
        "peak memory, GB",
        "rows of other bits than one GPU's",
    ]
    cells = [
        [
            row["N"],
            f"`{row['provider']}`" if row["tp"] > 1 else row["provider"],
            f"{row['fwd_ms']:.3f}",
            f"{row['fwd_bwd_ms']:.3f}",
            f"{row['bytes_moved'] / 1e6:.3g}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.3f}",
            row.get("differing_rows", ""),
        ]
        for row in rows
    ]
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_gpus", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, default=DEFAULT, help="the file of results (%(default)s)")
    add("--commit", help="the source's commit, where git is not there to say")
    add("--repeats", type=int, default=REPEATS, help="timings of each (%(default)s)")
    add("--smoke", action="store_true", help="tiny shapes, to see that everything runs")
    add("--cpu", action="store_true", help="two processes without GPUs, with gloo")
    add("--table", action="store_true", help="measure nothing, print the file as a table")
    args = parser.parse_args(argv)
    if args.cpu and not args.smoke:
        parser.error("expected --smoke beside --cpu, whose times are no figures")
    if not (args.cpu or args.table) and torch.cuda.device_count() < SIZE:
        parser.error(f"expected {SIZE} GPUs, got {torch.cuda.device_count()} (--cpu --smoke)")
    return args


def main() -> None:
    args = arguments()
    if args.table:
        print(table(load(args.output)))
        return
    options = {
        "output": str(args.output),
        "commit": args.commit,
        "repeats": args.repeats,
        "shapes": [(point.rows, point.columns) for point in (SMOKE if args.smoke else POINTS)],
    }
    if not args.cpu:
        print(output_of("nvidia-smi", "topo", "-m"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run_processes(SIZE, "cpu" if args.cpu else "cuda", Path(folder), measure, options)
    print(table(load(args.output)))


if __name__ == "__main__":
    main()
