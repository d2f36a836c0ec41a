"""Time and peak memory of fused_logp, or of log_softmax + gather, forward and backward.

    python examples/op_cost.py fused_logp --device cpu --rows 1024

Prints one line of JSON. One process for each, so that neither finds memory the other left behind.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import rl_logp

VOCAB_SIZE = 151936


def log_softmax_gather(logits: Tensor, target: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


PROVIDERS = {"fused_logp": rl_logp.fused_logp, "log_softmax + gather": log_softmax_gather}


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """The most memory that step has allocated, through torch, at any one time."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [event["args"] for event in events if event["name"] == "[memory]"]
    # Totals count from where this process first profiled.
    before = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    return max(event["Total Allocated"] for event in memory) - before


def seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """Median wall-clock time of step."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("provider", choices=PROVIDERS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=1024)
    args = parser.parse_args()
    torch.manual_seed(0)

    shape = args.rows, VOCAB_SIZE
    logits = torch.randn(shape, dtype=torch.bfloat16, device=args.device, requires_grad=True)
    target = torch.randint(VOCAB_SIZE, shape[:1], device=args.device)
    upstream = torch.randn(shape[:1], device=args.device)

    def step() -> None:
        logits.grad = None
        PROVIDERS[args.provider](logits, target).backward(upstream)

    step()  # warm up
    elapsed = seconds(step, args.device, repeats=3 if args.device == "cpu" else 20)
    logits.grad = None
    print(
        json.dumps(
            {
                "seconds": elapsed,
                "peak_bytes": peak_bytes(step, args.device),
                "logits_bytes": logits.nbytes,
            }
        )
    )


if __name__ == "__main__":
    main()
