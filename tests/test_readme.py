"""The README says what is so: its code runs as printed, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
WRITTEN = ("benchmarks/results/", "build/")  # by the commands that are named beside them
CODE = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROMISES = dict(re.findall(r"^\| C(\d+) \|.*\| ([^|]+) \|$", README, re.MULTILINE))

every_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)


def test_first_code_is_eight_lines() -> None:
    assert len([line for line in CODE[0].splitlines() if line]) == 8


@pytest.mark.parametrize("code", CODE, ids=range(len(CODE)))
def test_code_runs_as_printed(code: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr


def test_every_promise_of_the_contract_names_its_tests() -> None:
    assert list(map(int, PROMISES)) == list(range(1, 16))
    for tests in PROMISES.values():
        assert re.findall(r"`(?:compile_)?tests/test_\w+\.py`", tests)


@every_text
def test_files_named_exist(path: Path) -> None:
    named = re.findall(r"`((?:\w+/)+[\w.]+\.\w+|\w+/)`|\]\(([^)#:]+)\)", path.read_text())
    for name in map("".join, named):
        if name.startswith(WRITTEN):
            continue
        places = (ROOT / name, path.parent / name)
        assert any(place.exists() for place in places), f"{path.name} names {name}"


@every_text
def test_make_targets_named_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^ {4}|`)make ([a-z0-9-]+)", path.read_text(), re.MULTILINE)
    assert set(named) <= targets
