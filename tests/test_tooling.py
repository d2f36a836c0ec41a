"""What the developers' tools promise: one version of each, and a target for every task."""

import re
import subprocess
from pathlib import Path

import pytest

import rl_logp

ROOT = Path(__file__).resolve().parent.parent
TASKS = (
    "bench", "bench-cpu", "build-cpu", "demo", "gpu-test", "gpu2-test", "help", "lint", "plots",
    "sanitize", "sanitize-cpu", "test", "wheel",
)  # fmt: skip


def pins(path: str) -> set[tuple[str, str]]:
    """Every NAME==VERSION in a file, extras dropped."""
    return set(re.findall(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", (ROOT / path).read_text()))


def test_pre_commit_runs_the_linters_that_ci_runs() -> None:
    required = pins("requirements/lint.txt")
    assert {name for name, _ in required} == {"ruff", "clang-format", "pyright"}
    assert pins(".pre-commit-config.yaml") == required
    version = dict(required)["clang-format"]
    assert f"clang-format {version} " in (ROOT / ".clang-format").read_text()


def test_torch_for_development_is_pinned() -> None:
    assert "torch" in dict(pins("requirements/dev.txt"))


@pytest.mark.parametrize("name", ["pyproject.toml", "CITATION.cff", "CHANGELOG.md"])
def test_version_is_the_same_everywhere(name: str) -> None:
    assert re.search(rf"\b{re.escape(rl_logp.__version__)}\b", (ROOT / name).read_text())


@pytest.mark.parametrize("task", TASKS)
def test_make_help_lists(task: str) -> None:
    run = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert re.search(rf"^  make {task} +\S", run.stdout, re.MULTILINE), run.stdout
