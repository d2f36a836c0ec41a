"""The file of results: a list of rows, written anew after each, with where they were measured."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rl_logp.collect_env import output_of

Row = dict[str, Any]


def surroundings(device: torch.device, commit: str | None) -> Row:
    """What every row says of the machine, the software and the source."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": output_of(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        )
        if on_gpu
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit or source_commit(),
    }


def source_commit() -> str | None:
    """The commit checked out, with a mark where tracked files differ from it."""
    head = output_of("git", "rev-parse", "HEAD")
    if not re.fullmatch(r"[0-9a-f]{40}", head):
        return None
    return head + ("-dirty" if output_of("git", "status", "-s", "--untracked-files=no") else "")


class Results:
    """Rows, on disk from the first one on, so that a run cut short loses nothing."""

    def __init__(self, path: Path, common: Row, keep: Iterable[Row] = ()) -> None:
        self.path, self._common = path, common
        self.rows: list[Row] = list(keep)
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> Row:
        row = {**row, **self._common}
        self.rows.append(row)
        partial = self.path.with_suffix(".partial")
        partial.write_text(
            "[\n" + ",\n".join(json.dumps(row) for row in self.rows) + "\n]\n", encoding="utf-8"
        )
        partial.replace(self.path)
        return row


def load(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8"))
