"""Compare a file of results with the targets: python -m benchmarks.check [FILE]"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.providers import OURS
from benchmarks.results import Row, load
from benchmarks.workloads import LARGE, QWEN

DEFAULT = Path(__file__).parent / "results" / "h200.json"


@dataclass(frozen=True)
class Verdict:
    """A target, what was measured, and whether it is met; None: nothing was measured."""

    target: str
    measured: str
    met: bool | None


class Rows:
    """Rows that have figures, found by what they are of."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = [row for row in rows if "error" not in row]

    def of(self, bench: str, **fields: object) -> list[Row]:
        return [
            row
            for row in self._rows
            if row["bench"] == bench and all(row.get(key) == of for key, of in fields.items())
        ]

    def ours(self, bench: str, **fields: object) -> Row | None:
        found = self.of(bench, provider="rl_logp", **fields)
        return found[-1] if found else None

    def peers(self, bench: str, **fields: object) -> list[Row]:
        return [row for row in self.of(bench, **fields) if row["provider"] not in OURS]


def at_most(name: str, row: Row | None, key: str, limit: float) -> Verdict:
    return _bound(f"{name} <= {limit:g}", row, key, lambda value: value <= limit)


def at_least(name: str, row: Row | None, key: str, limit: float) -> Verdict:
    return _bound(f"{name} >= {limit:.4f}", row, key, lambda value: value >= limit)


def _bound(name: str, row: Row | None, key: str, good: Callable[[float], bool]) -> Verdict:
    if row is None or row.get(key) is None:
        return Verdict(name, "", None)
    return Verdict(name, f"{row[key]:.6g}", good(row[key]))


def beats(name: str, row: Row | None, peers: list[Row], key: str, more: bool) -> Verdict:
    """Our figure against the best peer's: as good for a time, better for a share (``more``)."""
    others = [peer for peer in peers if peer.get(key) is not None]
    if row is None or row.get(key) is None or not others:
        return Verdict(name, "", None)
    best = (max if more else min)(others, key=lambda peer: peer[key])
    ours, theirs = row[key], best[key]
    met = ours > theirs if more else ours <= theirs
    return Verdict(name, f"{ours:.6g}, {best['provider']} {theirs:.6g}", met)


def verdicts(rows: Rows) -> Iterator[Verdict]:
    parts = {"fwd": ("forward", 1.00), "bwd": ("backward", 1.05), "fwd_bwd": ("both", 1.03)}
    for point in LARGE:
        row = rows.ours("speed", V=point.columns, N=point.rows, dtype=point.dtype)
        for part, (name, limit) in parts.items():
            yield at_most(f"V={point.columns} {name}, x floor", row, f"{part}_x_floor", limit)
    row = rows.ours("speed", V=QWEN, N=256, dtype="bf16")
    yield at_most("N=256 both, x floor", row, "fwd_bwd_x_floor", 1.15)
    for count in (1, 4, 16, 64):
        of = {"V": QWEN, "N": count, "dtype": "bf16"}
        for part, (name, _) in parts.items():
            ours, peers = rows.ours("speed", **of), rows.peers("speed", **of)
            title = f"N={count} {name}: no slower than any peer, ms"
            yield beats(title, ours, peers, f"{part}_ms", more=False)
    row = rows.ours("masked", variant="ignored")
    yield at_most("half the rows ignored, x of the full time", row, "of_full", 0.65)
    pair = rows.ours("entropy", V=QWEN, N=32768, dtype="bf16")
    yield at_most("with the entropy, both, x floor", pair, "fwd_bwd_x_floor", 1.10)
    torch_pairs = rows.of("entropy", V=QWEN, provider="torch")
    title = "largest error of an entropy, no more than torch's"
    yield beats(
        title, rows.ours("entropy", V=QWEN, N=8192), torch_pairs, "entropy_max_error", False
    )
    accurate = rows.ours("accuracy", dtype="bf16")
    yield at_least("dlogits correctly rounded, %", accurate, "dlogits_cr_pct", 99.9990)
    peers = rows.peers("accuracy", dtype="bf16")
    title = "logp correctly rounded more often than every peer, %"
    yield beats(title, accurate, peers, "logp_cr_pct", more=True)
    row = rows.ours("invariance")
    yield at_most("rows whose bits change with the batch", row, "differing_rows", 0)


def report(rows: list[Row]) -> tuple[str, bool]:
    """A table, and whether every target was measured and met."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    found = list(verdicts(Rows(rows)))
    cells = [[each.target, each.measured, words[each.met]] for each in found]
    text = tabulate(cells, headers=["target", "measured", ""], disable_numparse=True)
    return text, all(each.met for each in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT)
    text, good = report(load(parser.parse_args().file))
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
