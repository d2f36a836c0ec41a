"""Speed and memory on a CPU, beside what torch offers.

    python -m benchmarks.cpu [--output benchmarks/results/cpu.json]

Forward, and forward with backward, with one thread and with all. Repeats take turns at copies of
the logits that no cache could hold together: the logits come from memory, and the code does not.
The limit of a figure is the time that reading the logits takes, and then reading them again and
writing the gradient, at what the same threads read and copy, measured beside it.
"""

import argparse
import itertools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.providers import PROVIDERS
from benchmarks.results import Results, Row, surroundings
from benchmarks.timing import WARM_UPS, HostClock, Spread, spread
from benchmarks.workloads import LLAMA2, QWEN, Inputs, Point, draw

CPU = torch.device("cpu")
POINTS = [
    Point(rows, columns, dtype)
    for columns in (LLAMA2, QWEN)
    for rows in (1, 16, 256)
    for dtype in ("bf16", "fp32")
]
UNCACHED_BYTES = 2**28
MOST_COPIES = 2**13  # tiny logits are tried for the code's sake, not for figures
LEAST_REPEATS, MOST_REPEATS, MOST_SECONDS = 9, 300, 0.5


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """As people call it; -logp."""
    return F.cross_entropy(logits.float(), target, reduction="none")


def functions() -> dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]]:
    """What is measured, and the sign that its upstream gradient takes."""
    named = {name: PROVIDERS[name] for name in ("rl_logp", "torch", "torch_compile")}
    loaded = {name: (provider.load(False), provider.sign) for name, provider in named.items()}
    return {**loaded, "torch_cross_entropy": (cross_entropy, -1)}


def processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def peak_bytes(action: Callable[[], object]) -> int:
    """The most bytes of tensors that the action had allocated at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        kept = action()
    del kept
    events: Any = run.profiler and run.profiler.kineto_results
    now = peak = 0
    for event in events.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def repeated(action: Callable[[], object]) -> Spread:
    """Milliseconds, of some repeats after some that do not count."""
    clock, samples = HostClock(), []
    for _ in range(WARM_UPS):
        action()
    while len(samples) < LEAST_REPEATS or (
        len(samples) < MOST_REPEATS and sum(samples) < MOST_SECONDS * 1e3
    ):
        samples.append(clock.time(action)[0])
    return spread(samples)


def bandwidths() -> Row:
    """What the current threads read, and copy (bytes read plus bytes written)."""
    source = torch.ones(UNCACHED_BYTES // 4, dtype=torch.int32)
    destination = torch.empty_like(source)
    read = repeated(source.max).p20
    copy = repeated(lambda: destination.copy_(source)).p20
    return {
        "read_gb_per_s": source.nbytes / read * 1e-6,
        "copy_gb_per_s": 2 * source.nbytes / copy * 1e-6,
    }


def measure(name: str, inputs: Inputs) -> Row:
    """One provider at one point."""
    function, sign = functions()[name]
    copies = min(-(-UNCACHED_BYTES // inputs.logits.nbytes), MOST_COPIES)
    leaves = itertools.cycle(
        [logits.requires_grad_() for logits in inputs.logits.repeat(copies, 1, 1).unbind()]
    )
    grad = sign * inputs.grad_logp

    def forward() -> Tensor:
        return function(next(leaves), inputs.target)

    def both() -> tuple[Tensor, ...]:
        leaf = next(leaves)
        return torch.autograd.grad(function(leaf, inputs.target), leaf, grad)

    row: Row = {}
    for what, action in (("fwd", forward), ("fwd_bwd", both)):
        times = repeated(action)
        row |= {f"{what}_ms": times.median, f"{what}_p20": times.p20, f"{what}_p80": times.p80}
    return {**row, "peak_bytes": peak_bytes(both)}


def limits(point: Point, bandwidth: Row) -> Row:
    """Milliseconds at the measured bandwidths.

    >>> limits(Point(1, 10**6, "fp32"), {"read_gb_per_s": 4.0, "copy_gb_per_s": 8.0})
    {'fwd_limit_ms': 1.0, 'fwd_bwd_limit_ms': 2.0}
    """
    read = point.logits_bytes / bandwidth["read_gb_per_s"] * 1e-6
    copy = 2 * point.logits_bytes / bandwidth["copy_gb_per_s"] * 1e-6
    return {"fwd_limit_ms": read, "fwd_bwd_limit_ms": read + copy}


def table(rows: list[Row]) -> str:
    """Milliseconds at the 20th percentile, forward / forward and backward, a line for every point.

    Not the median: whatever else the machine does can only add.
    """
    names = list(dict.fromkeys(row["provider"] for row in rows))
    lines = ["| threads | dtype | V | N | limit | " + " | ".join(names) + " |"]
    lines.append("|" + "---|" * (5 + len(names)))
    points = dict.fromkeys((row["threads"], row["dtype"], row["V"], row["N"]) for row in rows)
    for point in points:
        at = {
            row["provider"]: row
            for row in rows
            if (row["threads"], row["dtype"], row["V"], row["N"]) == point
        }
        first = next(iter(at.values()))
        cells = [f"{first['fwd_limit_ms']:.3g} / {first['fwd_bwd_limit_ms']:.3g}"]
        cells += [f"{at[n]['fwd_p20']:.3g} / {at[n]['fwd_bwd_p20']:.3g}" for n in names]
        lines.append("| " + " | ".join([*map(str, point), *cells]) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = Path(__file__).parent / "results" / "cpu.json"
    parser.add_argument("--output", type=Path, default=default, help="default: %(default)s")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="default: 1 and all; all need an idle machine"
    )
    parser.add_argument("--commit", help="where the checkout is no git repository")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    common = {**surroundings(CPU, args.commit), "cpu": processor()}
    results = Results(args.output, common)
    everywhere = args.threads or sorted({1, torch.get_num_threads()})
    tasks = [(threads, point) for threads in everywhere for point in POINTS]
    bandwidth: dict[int, Row] = {}
    for threads, point in tqdm(tasks, unit="point"):
        torch.set_num_threads(threads)
        if threads not in bandwidth:
            bandwidth[threads] = bandwidths()
        inputs = draw(point, CPU)
        for name in functions():
            torch.compiler.reset()  # each point is compiled for itself, and for these threads
            started = time.monotonic()
            row = {"bench": "cpu", "provider": name, "threads": threads, "dtype": point.dtype}
            row |= {"V": point.columns, "N": point.rows, **bandwidth[threads]}
            row |= {**limits(point, bandwidth[threads]), **measure(name, inputs)}
            results.add({**row, "seconds": round(time.monotonic() - started, 1)})
    print(table(results.rows))


if __name__ == "__main__":
    main()
