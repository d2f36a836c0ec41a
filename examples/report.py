"""What the demo shows at its end: three tables and a picture."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure
from op_cost import PROVIDERS, VOCAB_SIZE
from same_bits import Bits
from tabulate import tabulate
from tqdm import tqdm


def table(title: str, headers: list[str], rows: Iterable[Iterable[str]]) -> None:
    align = ["left"] + ["right"] * (len(headers) - 1)
    text = tabulate(rows, headers, colalign=align, disable_numparse=True)
    print(f"\n{title}\n{text}")


def reward_table(before: float, after: float, answers: int) -> None:
    headers = ["", "before GRPO", "after", "rise"]
    row = ["mean reward", f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
    table(f"Reward on problems held out ({answers} sampled answers)", headers, [row])


def bits_table(bits: Bits) -> None:
    counts = {f"fused_logp, {layout}": count for layout, count in bits.op.items()}
    counts["log_softmax + gather, eager against compiled"] = bits.log_softmax
    counts["fused_logp, on the trainer's own run of the model *"] = bits.model
    rows = [(name, str(c.compared), str(c.differing)) for name, c in counts.items()]
    title = "Tokens whose log-probability differs between rollout and trainer"
    table(title, ["scored by the trainer as", "tokens", "differ in bits"], rows)
    print(
        f"* by at most {bits.model_largest:.1e}. These logits come from matrix products of another"
        " shape, whose\n  bits differ; every other line compares scores of the same logits."
    )


def cost_table(device: str, rows: int) -> None:
    script = Path(__file__).with_name("op_cost.py")
    lines = []
    for provider in tqdm(PROVIDERS, desc="op cost", unit="op"):
        command = [sys.executable, str(script), provider, "--device", device, "--rows", str(rows)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        cost = json.loads(done.stdout)
        peak, logits = cost["peak_bytes"], cost["logits_bytes"]
        milliseconds = f"{cost['seconds'] * 1e3:.4g}"
        lines.append((provider, milliseconds, f"{peak / 2**20:.0f}", f"{peak / logits:.2f}"))
    headers = ["forward + backward", "time (ms)", "peak memory (MiB)", "x the logits"]
    table(f"Cost of the op on {device}: bf16 logits [{rows}, {VOCAB_SIZE}]", headers, lines)


def reward_curve(path: Path, rewards: list[float], before: float, after: float) -> None:
    """Saves the reward of every step, its moving average, and the two evaluations."""
    window = max(1, min(10, len(rewards) // 4))
    average = [sum(rewards[i - window : i]) / window for i in range(window, len(rewards) + 1)]
    steps = len(rewards)
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, steps + 1), rewards, ".", color="#9ecae1", ms=5, label="one step's rollout")
    axes.plot(
        range(window, steps + 1), average, color="#08519c", lw=2, label=f"mean of {window} steps"
    )
    # The curve runs from low on the left to high on the right: the other corners are free.
    for name, value, x, align, dy in (
        ("before", before, 1, "right", -12),
        ("after", after, 0, "left", 5),
    ):
        axes.axhline(value, color="#d94801", lw=1, ls="--")
        axes.annotate(
            f"held-out problems, {name}: {value:.2f}",
            (x, value),
            xycoords=("axes fraction", "data"),
            xytext=(4 - 8 * x, dy),
            textcoords="offset points",
            ha=align,
            color="#d94801",
        )
    axes.set(xlim=(0, steps + 1), ylim=(0, 1), xlabel="GRPO step", ylabel="mean reward")
    axes.set_title("GRPO through fused_logp: adding two numbers, byte by byte", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
