"""What the figures have in common: rows, names and colours, bars, and a caption."""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import Row

STYLES = {  # provider -> its name in a legend, its colour
    "rl_logp": ("rl_logp", "#d1495b"),
    "flash_attn": ("flash-attn", "#2e4057"),
    "quack": ("quack", "#48639c"),
    "fla": ("FLA", "#4c8fb0"),
    "liger": ("Liger", "#82b6a8"),
    "liger_selective": ("Liger, forward only", "#b7d3c2"),
    "trl": ("TRL", "#2e4057"),
    "verl": ("verl", "#4c8fb0"),
    "torch_compile": ("torch.compile", "#8d8d92"),
    "torch": ("torch", "#c3c3c8"),
    "fp32_vjp": ("fp32 VJP", "#e6d3a3"),
    "chunked": ("chunked fallback", "#eda35a"),
}


class Figures:
    """Rows with figures, and the caption that they share."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = [row for row in rows if "error" not in row]
        self._commits: list[str] = []  # of the rows of the figure that is drawn

    def rows(self, bench: str, key: str, **fields: object) -> list[Row]:
        """The rows of a bench that have a figure, in the order of the styles."""
        found = [
            row
            for row in self._rows
            if row["bench"] == bench
            and row.get(key) is not None
            and all(row.get(name) == value for name, value in fields.items())
        ]
        self._commits += [(row["commit"] or "")[:7] for row in found]
        return sorted(found, key=lambda row: list(STYLES).index(row["provider"]))

    def save(self, figure: Figure, path: Path) -> None:
        one = self._rows[0]
        commits = ", ".join(dict.fromkeys(self._commits))
        caption = f"{one['gpu']}, torch {one['torch']}, CUDA {one['cuda']}, commit {commits}"
        figure.text(0.995, 0.005, caption, ha="right", va="bottom", fontsize=7, color="0.45")
        self._commits.clear()
        figure.savefig(path, dpi=160)
        plt.close(figure)
        print(path)


def new_figure(count: int, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    figure, panels = plt.subplots(1, count, figsize=(10, 3.9), sharey=sharey, squeeze=False)
    figure.set_layout_engine("constrained", rect=(0, 0.045, 1, 0.955))  # above the caption
    return figure, list(panels[0])


def bars(
    axes: Axes, rows: list[Row | None], value: Callable[[Row], float | None], form: str
) -> None:
    for place, row in enumerate(rows):
        length = value(row) if row else None
        if row and length is not None:
            axes.barh(place, length, 0.72, color=STYLES[row["provider"]][1])
        text = "not measured" if length is None else form.format(length)
        axes.annotate(
            text,
            (length or 0, place),
            textcoords="offset points",
            xytext=(4, 0),
            va="center",
            fontsize=7.5,
        )
    axes.margins(x=0.25)


def names(axes: Axes, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [STYLES[row["provider"]][0] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def named(rows: list[Row], name: str) -> Row | None:
    return next((row for row in rows if row["provider"] == name), None)


def heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="0.92", zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
