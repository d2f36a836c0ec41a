"""A library's way to score tokens beside rl_logp's: how far apart they are, and what each costs."""

from collections.abc import Callable, Mapping

import torch
from op_cost import peak_bytes, seconds
from tabulate import tabulate
from torch import Tensor

import rl_logp
from rl_logp.reference import reference

Score = Callable[[Tensor, Tensor], Tensor]
HEADERS = [
    "forward + backward", "tokens", "differ in bits", "by at most", "from exact at most",
    "time (ms)", "peak memory, x logits",
]  # fmt: skip


def compare(
    title: str,
    ways: Mapping[str, Score],
    logits: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    measure_cost: bool = True,
) -> None:
    """Prints a line for each way to score; the first is what the others are compared with.

    Args:
        title: what is compared.
        ways: by name, functions of logits and target that return a log-probability for each target.
        logits, target: what they score; every target is a column of logits.
        temperature: what the ways divide logits by, for the exact values.
    """
    exact = reference(logits, target, temperature=temperature).logp
    first = None
    lines = []
    for name, score in ways.items():
        leaf = logits.detach().clone().requires_grad_()

        def step(score: Score = score, leaf: Tensor = leaf) -> None:
            leaf.grad = None
            score(leaf, target).sum().backward()

        logp = score(leaf, target).detach().float()
        first = logp if first is None else first
        differing = int((logp.view(torch.int32) != first.view(torch.int32)).sum())
        line = [name, str(target.numel()), str(differing), f"{(logp - first).abs().max():.1e}"]
        line.append(f"{(logp.double() - exact).abs().max():.1e}")
        if measure_cost:
            step()  # warm up
            line.append(f"{seconds(step, logits.device.type, repeats=5) * 1e3:.4g}")
            leaf.grad = None
            line.append(f"{peak_bytes(step, logits.device.type) / logits.nbytes:.2f}")
        lines.append(line)
    headers = HEADERS[: len(lines[0])]
    align = ["left"] + ["right"] * (len(headers) - 1)
    print(f"\n{title}\n{tabulate(lines, headers, colalign=align, disable_numparse=True)}")


def served_by(device: str, dtype: torch.dtype) -> str:
    """What serves rl_logp's calls, in words."""
    backend = next(b for b in rl_logp.backends() if (b.device_type, b.dtype) == (device, dtype))
    return f"rl_logp {rl_logp.__version__}: {backend.path}, {backend.reason}"
