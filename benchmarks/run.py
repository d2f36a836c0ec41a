"""Measure rl_logp and its peers: python -m benchmarks.run --output benchmarks/results/h200.json"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import accuracy, check, entropy, invariance, timing, workloads
from benchmarks.providers import INPLACE, PROVIDERS, Provider, chunked_provider, errors
from benchmarks.report import label, tables
from benchmarks.results import Results, Row, load, surroundings
from benchmarks.speed import Run, measure, short
from benchmarks.workloads import Point

CHUNK_ELEMENTS = [2**k for k in range(22, 29)]
POINTS = {
    "speed": workloads.SPEED,
    "accuracy": workloads.ACCURACY,
    "invariance": workloads.INVARIANCE,
    "masked": workloads.MASKED,
    "chunks": workloads.CHUNKS,
    "entropy": workloads.ENTROPY,
    "inplace": workloads.INPLACE,
}


@dataclass
class Harness:
    """What all benches share."""

    device: torch.device
    clock: timing.Clock
    bytes_per_ms: float
    launch_ms: float | None

    def speed(self, point: Point, providers: list[Provider]) -> Iterator[Row]:
        inputs = workloads.draw(point, self.device)
        yield from self._timed([Run(each, inputs) for each in providers], point)

    def chunks(self, point: Point, providers: list[Provider]) -> Iterator[Row]:
        inputs = workloads.draw(point, self.device)
        runs = [
            Run(chunked_provider(elements), inputs, {"chunk_elements": elements})
            for elements in CHUNK_ELEMENTS
            if any(each.name == "chunked" for each in providers)
        ]
        yield from self._timed(runs, point)

    def masked(self, point: Point, providers: list[Provider]) -> Iterator[Row]:
        full = workloads.draw(point, self.device)
        variants = {
            "full": full,
            "ignored": replace(full, target=masked(full.target, -100)),
            "zero_grad": replace(full, grad_logp=masked(full.grad_logp, 0)),
        }
        for provider in providers:
            if not provider.ignores:
                continue
            runs = [Run(provider, of, {"variant": name}) for name, of in variants.items()]
            rows = list(self._timed(runs, point))
            for row in rows:
                if "error" not in row and "error" not in rows[0]:
                    row["of_full"] = row["fwd_bwd_ms"] / rows[0]["fwd_bwd_ms"]
                yield row

    def accuracy(self, point: Point, providers: list[Provider]) -> Iterator[Row]:
        inputs = workloads.draw(point, self.device)
        for provider in providers:
            yield self._guarded(provider, lambda of: accuracy.score(of, inputs))

    def invariance(self, point: Point, providers: list[Provider]) -> Iterator[Row]:
        for provider in providers:
            yield self._guarded(provider, lambda of: invariance.sweep(of, point, self.device))

    def entropy(self, point: Point, providers: list[Provider]) -> Iterator[Row]:
        inputs = workloads.draw(point, self.device)
        runs = [Run(each, entropy.with_gradients(inputs)) for each in providers]
        for row in self._timed(runs, point):
            if "error" not in row:
                provider = entropy.PROVIDERS[row["provider"]]
                row["entropy_max_error"] = entropy.largest_error(provider, inputs)
            yield row

    def inplace(self, point: Point, providers: list[Provider]) -> Iterator[Row]:
        inputs = workloads.draw(point, self.device)
        for provider in providers:
            if provider.name == INPLACE.name:
                of = {"new gradient": provider, "in place": INPLACE}
                runs = [Run(each, inputs, {"variant": name}) for name, each in of.items()]
                yield from self._timed(runs, point)

    def _timed(self, runs: list[Run], point: Point) -> Iterator[Row]:
        for row in measure(runs, point, self.clock, self.bytes_per_ms, self.device):
            yield {
                **row,
                "copy_gb_per_s": self.bytes_per_ms / 1e6,
                **({"launch_ms": self.launch_ms} if row.get("method") == "graph" else {}),
            }

    def _guarded(self, provider: Provider, figures: Callable[[Provider], Row]) -> Row:
        try:
            return {"provider": provider.name, **figures(provider)}
        except errors() as error:
            return {"provider": provider.name, "error": short(error)}


def masked(values: torch.Tensor, fill: float) -> torch.Tensor:
    """A copy with every second value, in a random order, replaced."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    return values.index_fill(0, order[: len(values) // 2].to(values.device), fill)


def harness(device: torch.device, smoke: bool) -> Harness:
    if device.type != "cuda":
        clock = timing.HostClock()
        return Harness(device, clock, timing.copy_bandwidth(clock, 2**22, device), None)
    clock = timing.CudaClock(device)
    largest = workloads.LARGE[0]
    elements = 2**26 if smoke else largest.rows * largest.columns
    bytes_per_ms = timing.copy_bandwidth(clock, elements, device)
    return Harness(device, clock, bytes_per_ms, timing.launch_overhead(clock, device))


def providers_of(bench: str) -> dict[str, Provider]:
    return entropy.PROVIDERS if bench == "entropy" else PROVIDERS


def jobs(args: argparse.Namespace) -> list[tuple[str, Point, list[Provider]]]:
    """What is measured, most wanted first. Times are compared, so they come from one job."""
    found = []
    for bench in args.bench:
        known = providers_of(bench)
        everyone = [known[name] for name in args.providers if name in known]
        together = bench in ("speed", "chunks", "entropy")
        groups = [everyone] if together else [[provider] for provider in everyone]
        found += [(bench, point, group) for point in args.points[bench] for group in groups]
    return sorted(found, key=lambda job: job[1] in workloads.LATER)


def measure_all(args: argparse.Namespace, results: Results) -> None:
    started = time.monotonic()
    common = harness(args.device, args.smoke)
    progress = tqdm(jobs(args), unit="job", disable=None)
    for bench, point, providers in progress:
        progress.set_postfix_str(f"{bench} {point}")
        of = {"bench": bench, "dtype": point.dtype, "V": point.columns, "N": point.rows}
        if time.monotonic() - started > args.budget_seconds:
            spent = f"not run: {args.budget_seconds:.0f} s were spent"
            rows = iter([{"provider": each.name, "error": spent} for each in providers])
        else:
            rows = getattr(common, bench)(point, providers)
        for row in rows:
            provider = providers_of(bench)[row["provider"]]
            row = results.add({**of, **row, "provider_version": provider.version})
            tqdm.write(f"{time.monotonic() - started:5.0f} s  {label(row)}: {_brief(row)}")
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - started:.0f} s, copy {common.bytes_per_ms / 1e6:.0f} GB/s")


def _brief(row: Row) -> str:
    if "error" in row:
        return row["error"][:100]
    figures = ("fwd_ms", "bwd_ms", "fwd_bwd_ms", "dlogits_cr_pct", "logp_cr_pct", "differing_rows")
    figures += ("entropy_max_error",)
    return ", ".join(f"{key} {row[key]:.6g}" for key in figures if key in row)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, default=check.DEFAULT, help="the file of results (%(default)s)")
    add("--bench", default=",".join(POINTS), help="which benches, with commas (%(default)s)")
    add("--shapes", help="shapes for all of them, such as 256x151936,64x50257:fp32")
    everyone = list(dict.fromkeys([*PROVIDERS, *entropy.PROVIDERS]))
    add("--providers", default=",".join(everyone), help="whom to measure (%(default)s)")
    add("--budget-seconds", type=float, default=540, help="start nothing after (%(default)s)")
    add("--keep", action="store_true", help="keep the file's rows of the other benches")
    add("--commit", help="the source's commit, where git is not there to say")
    add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--smoke", action="store_true", help="tiny shapes, to see that everything runs")
    args = parser.parse_args(argv)
    args.bench, args.providers = args.bench.split(","), args.providers.split(",")
    for given, known in ((args.bench, POINTS), (args.providers, everyone)):
        if unknown := set(given) - set(known):
            parser.error(f"expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if args.device.type != "cuda" and not args.smoke:
        parser.error("expected a CUDA device, got none (--smoke runs on a CPU)")
    args.points = dict(POINTS)
    if args.smoke:
        args.points = {bench: [Point(33, 1000), Point(4, 1003, "fp32")] for bench in POINTS}
    if args.shapes:
        points = [workloads.parse_point(text) for text in args.shapes.split(",")]
        args.points = dict.fromkeys(POINTS, points)
    return args


def main() -> None:
    args = arguments()
    kept = load(args.output) if args.keep and args.output.exists() else []
    kept = [row for row in kept if row["bench"] not in args.bench]
    results = Results(args.output, surroundings(args.device, args.commit), kept)
    measure_all(args, results)
    print(tables(results.rows))
    print(check.report(results.rows)[0])


if __name__ == "__main__":
    main()
