"""Rows of results as short tables."""

from collections import defaultdict

from tabulate import tabulate

from benchmarks.results import Row

_COLUMNS = {
    "fwd_ms": ("fwd ms", ".4g"),
    "bwd_ms": ("bwd ms", ".4g"),
    "fwd_bwd_ms": ("both ms", ".4g"),
    "of_full": ("of full", ".3f"),
    "peak_bytes": ("peak GB", ""),
    "dlogits_cr_pct": ("dlogits cr %", ".5f"),
    "dlogits_max_ulps": ("max ulps", ".4g"),
    "logp_cr_pct": ("logp cr %", ".3f"),
    "logp_max_ulps": ("max ulps", ".4g"),
    "entropy_max_error": ("error of entropy", ".3g"),
    "differing_rows": ("differ", "d"),
    "compared_rows": ("of", "d"),
}


def shape(row: Row) -> str:
    return f"{row['N']}x{row['V']} {row['dtype']}"


def label(row: Row) -> str:
    """What a row is of, without its figures.

    >>> label({"bench": "masked", "provider": "rl_logp", "N": 8, "V": 9, "dtype": "bf16",
    ...        "variant": "ignored"})
    'masked 8x9 bf16 rl_logp ignored'
    """
    detail = row.get("variant", "")
    if "chunk_elements" in row:
        detail = f"2^{row['chunk_elements'].bit_length() - 1}"
    return f"{row['bench']} {shape(row)} {row['provider']} {detail}".strip()


def tables(rows: list[Row]) -> str:
    """Speed as a matrix, the other benches as lists, and what failed, once for each reason."""
    good = [row for row in rows if "error" not in row]
    timed = [row for row in good if row["bench"] == "speed"]
    others = [row for row in good if row["bench"] != "speed"]
    parts = []
    if timed:
        parts += ["forward / backward / both, ms, and x of the floor", _speed(timed)]
    if others:
        parts += [_list(others)]
    return "\n\n".join([*parts, *_failures([row for row in rows if "error" in row])])


def _speed(rows: list[Row]) -> str:
    shapes, providers = (list(dict.fromkeys(map(of, rows))) for of in (shape, _provider))
    cells = {(shape(row), row["provider"]): _times(row) for row in rows}
    body = [[name, *(cells.get((of, name), "") for of in shapes)] for name in providers]
    # A few shapes a table, or its lines would not fit.
    return "\n\n".join(
        tabulate(
            [[line[0], *line[1 + start : 5 + start]] for line in body],
            headers=["", *shapes[start : start + 4]],
            disable_numparse=True,
        )
        for start in range(0, len(shapes), 4)
    )


def _provider(row: Row) -> str:
    return row["provider"]


def _times(row: Row) -> str:
    parts = [f"{row[key]:.3g}" for key in ("fwd_ms", "bwd_ms", "fwd_bwd_ms") if key in row]
    return f"{' / '.join(parts)}  {row['x_floor']:.2f}x"


def _list(rows: list[Row]) -> str:
    columns = {key: of for key, of in _COLUMNS.items() if any(key in row for row in rows)}
    cells = [[label(row), *(_cell(key, of[1], row) for key, of in columns.items())] for row in rows]
    headers = ["", *(of[0] for of in columns.values())]
    return tabulate(cells, headers=headers, disable_numparse=True)


def _cell(key: str, form: str, row: Row) -> str:
    value = row.get(key)
    if value is None:
        return ""
    return f"{value / 1e9:.3f}" if key == "peak_bytes" else f"{value:{form}}"


def _failures(rows: list[Row]) -> list[str]:
    of_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        of_reason[row["provider"], row["error"]].append(f"{row['bench']} {shape(row)}")
    return [
        f"{provider}: {error} ({', '.join(dict.fromkeys(where))})"
        for (provider, error), where in of_reason.items()
    ]
