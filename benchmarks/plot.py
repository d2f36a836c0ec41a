"""Draw the figures in docs/ from a file of results: python -m benchmarks.plot [FILE]"""

import argparse
from pathlib import Path

from benchmarks.check import DEFAULT
from benchmarks.drawing import STYLES, Figures, bars, heading, named, names, new_figure
from benchmarks.results import Row, load
from benchmarks.workloads import LARGE, QWEN, SMALL

DOCS = Path(__file__).parent.parent / "docs"

CAP = 4.0  # bars longer than this many floors are cut, and say their length


def speed(of: Figures, path: Path) -> None:
    """Forward and backward at the large shapes, grouped by shape."""
    figure, (axes,) = new_figure(1)
    groups = [of.rows("speed", "fwd_bwd_ms", V=p.columns, N=p.rows, dtype="bf16") for p in LARGE]
    providers = [name for name in STYLES if any(named(rows, name) for rows in groups)]
    width = 0.86 / max(1, len(providers))
    for place, name in enumerate(providers):
        label, colour = STYLES[name]
        axes.bar(0, 0, color=colour, label=label)
        for group, rows in enumerate(groups):
            at = group + (place - (len(providers) - 1) / 2) * width
            row = named(rows, name)
            length = row["x_floor"] if row else 0.0
            axes.bar(at, min(length, CAP), width * 0.9, color=colour)
            text = f"{length:.2f}" if length < 10 else f"{length:.1f}"
            axes.annotate(
                text if row else "no figure",
                (at, min(length, CAP)),
                rotation=90,
                textcoords="offset points",
                xytext=(0, 4),
                ha="center",
                fontsize=6.5,
            )
    axes.axhline(1, color="0.2", linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    axes.set_xticks(range(len(LARGE)), [f"V = {p.columns}\nN = {p.rows}" for p in LARGE])
    axes.set_xlim(-0.55, len(LARGE) - 0.45)
    axes.set_ylim(0, CAP + 0.4)
    axes.set_ylabel(f"time, x of the memory floor (cut at {CAP:g})")
    heading(axes, "Forward + backward, bf16 (1 = one read, then one read and one write)")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    of.save(figure, path)


def small_batches(of: Figures, path: Path) -> None:
    """Microseconds against the number of rows, forward and backward."""
    figure, panels = new_figure(2, sharey=True)
    counts = sorted(point.rows for point in SMALL)
    for axes, part, title in zip(panels, ("fwd", "bwd"), ("Forward", "Backward"), strict=True):
        for name, (label, colour) in STYLES.items():
            rows = of.rows("speed", f"{part}_ms", V=QWEN, dtype="bf16", provider=name)
            rows = sorted((row for row in rows if row["N"] in counts), key=lambda row: row["N"])
            if not rows:
                continue
            times = [row[f"{part}_ms"] * 1e3 for row in rows]
            ours = name == "rl_logp"
            axes.plot(
                [row["N"] for row in rows],
                times,
                marker="o",
                markersize=4,
                label=label,
                color=colour,
                linewidth=2.4 if ours else 1.3,
                zorder=3 if ours else 2,
            )
            if ours:
                floor = [row[f"{part}_ms"] / row[f"{part}_x_floor"] * 1e3 for row in rows]
                axes.plot(
                    [row["N"] for row in rows],
                    floor,
                    color="0.2",
                    linewidth=0.9,
                    linestyle=(0, (4, 3)),
                    label="memory floor",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel(f"rows (V = {QWEN}, bf16)")
        heading(axes, f"{title}, from a cold cache")
    panels[0].set_ylabel("microseconds on the GPU")
    # The forward has all of them; the backward's panel is the one with room beside it.
    handles, labels = panels[0].get_legend_handles_labels()
    panels[1].legend(
        handles, labels, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )
    of.save(figure, path)


def memory(of: Figures, path: Path) -> None:
    """Peak memory of every provider, and what the fallback's workspace buys."""
    figure, panels = new_figure(2)
    point = LARGE[0]
    size = {"V": point.columns, "N": point.rows, "dtype": "bf16"}
    rows = of.rows("speed", "peak_bytes", **size)
    rows = [row for row in rows if row["provider"] != "liger_selective"]
    bars(panels[0], [*rows], lambda row: row["peak_bytes"] / point.logits_bytes, "{:.2f} x")
    panels[0].axvline(1, color="0.2", linewidth=0.9, linestyle=(0, (4, 3)))
    panels[0].set_xlabel("x of the size of the logits, beside them; the gradient is 1")
    names(panels[0], rows)
    heading(panels[0], f"Peak memory, N = {point.rows}, V = {point.columns}, bf16")
    chunks = sorted(of.rows("chunks", "fwd_bwd_ms"), key=lambda row: row["chunk_elements"])
    sizes = [row["chunk_elements"] for row in chunks]
    colour = STYLES["chunked"][1]
    panels[1].plot(sizes, [row["fwd_bwd_ms"] for row in chunks], marker="o", color=colour)
    for row in chunks:
        extra = ((row["peak_bytes"] or 0) - point.logits_bytes) / 2**30
        panels[1].annotate(
            f"{extra:.2f} GiB",
            (row["chunk_elements"], row["fwd_bwd_ms"]),
            textcoords="offset points",
            xytext=(0, 7),
            ha="center",
            fontsize=7,
        )
    panels[1].set_xscale("log", base=2)
    panels[1].set_ylim(0, 1.2 * max((row["fwd_bwd_ms"] for row in chunks), default=1))
    panels[1].set_xlabel("elements of workspace; at a point, memory beside the gradient")
    panels[1].set_ylabel("forward + backward, ms")
    heading(panels[1], "The chunked fallback's workspace")
    of.save(figure, path)


def accuracy(of: Figures, path: Path) -> None:
    """Wrongly rounded gradients and logp, and rows whose bits change with the batch."""
    figure, panels = new_figure(3, sharey=True)
    rounded = of.rows("accuracy", "logp_cr_pct", dtype="bf16")
    bars(panels[0], [*rounded], lambda row: _missing(row, "dlogits_cr_pct", 1e4), "{:,.0f}")
    panels[0].set_xscale("log")
    panels[0].set_xlabel("of a million bf16 values, not the nearest")
    heading(panels[0], "Gradients rounded wrongly")
    bars(panels[1], [*rounded], lambda row: _missing(row, "logp_cr_pct", 1), "{:.1f}%")
    panels[1].set_xlabel("% of fp32 values, not the nearest")
    heading(panels[1], "logp rounded wrongly")
    swept = [named(of.rows("invariance", "differing_rows"), row["provider"]) for row in rounded]
    bars(panels[2], swept, lambda row: row["differing_rows"], "{:,.0f}")
    compared = max((row["compared_rows"] for row in swept if row), default=0)
    panels[2].set_xlabel(f"of {compared} comparisons with the row alone")
    heading(panels[2], "Bits that change with the batch")
    names(panels[0], rounded)
    of.save(figure, path)


def entropy(of: Figures, path: Path) -> None:
    """logp and entropy with both gradients: time and peak memory."""
    figure, panels = new_figure(2, sharey=True)
    point = LARGE[0]
    size = {"V": point.columns, "N": point.rows, "dtype": "bf16"}
    rows = of.rows("entropy", "fwd_bwd_ms", **size)
    bars(panels[0], [*rows], lambda row: row["x_floor"], "{:.2f} x")
    panels[0].set_xscale("log")
    panels[0].set_xlabel("time, x of the memory floor of logp alone")
    heading(panels[0], "logp and entropy, forward + backward")
    bars(panels[1], [*rows], lambda row: row["peak_bytes"] / point.logits_bytes, "{:.2f} x")
    panels[1].set_xlabel("x of the size of the logits, beside them; the gradient is 1")
    heading(panels[1], f"Peak memory, N = {point.rows}, V = {point.columns}, bf16")
    for axes in panels:
        axes.axvline(1, color="0.2", linewidth=0.9, linestyle=(0, (4, 3)))
    names(panels[0], rows)
    of.save(figure, path)


def _missing(row: Row, key: str, scale: float) -> float | None:
    """What a percentage lacks of 100."""
    return (100 - row[key]) * scale if row.get(key) is not None else None


FIGURES = {
    "speed": speed,
    "small_batches": small_batches,
    "memory": memory,
    "accuracy": accuracy,
    "entropy": entropy,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--output", type=Path, default=DOCS, help="a folder (%(default)s)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    of = Figures(load(args.file))
    for name, draw in FIGURES.items():
        draw(of, args.output / f"{name}.png")


if __name__ == "__main__":
    main()
