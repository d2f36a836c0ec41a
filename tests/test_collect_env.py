"""The environment report comes out whatever is broken; that is when it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rl_logp
from rl_logp import collect_env

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_report_names_versions_and_the_path_of_every_dtype() -> None:
    report = run("-m", "rl_logp.collect_env")
    assert "failed" not in report
    assert f"torch: {torch.__version__} (" in report
    for backend in rl_logp.backends():
        dtype = str(backend.dtype).removeprefix("torch.")
        assert f"{backend.device_type} {dtype}: {backend.path}: {backend.reason}\n" in report


def test_broken_torch_costs_its_own_sections_only(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: undefined symbol')")
    report = run(collect_env.__file__, PYTHONPATH=f"{tmp_path}:{ROOT}")
    for section in ("torch_build", "kernels"):
        assert f"[{section}]\nfailed: OSError: libtorch.so: undefined symbol" in report
    assert report.count("failed") == 2
    assert "[variables]" in report


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = collect_env.report()
    assert "nvcc: not on PATH\n" in report
    assert "nvidia-smi 0: not on PATH\n" in report


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("#!/bin/sh\necho wrong >&2; exit 3\n", "exits with 3: wrong", id="fails"),
        pytest.param("no interpreter, no binary", "does not run", id="not-a-program"),
        pytest.param("#!/bin/sh\nprintf '\\377'\n", "does not run", id="not-text"),
    ],
)
def test_tool_that_fails_is_reported(text: str, line: str, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text(text)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert line in collect_env.report()


def test_cuda_home_without_headers_is_pointed_out(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert f"CUDA_HOME: {tmp_path} (no include/cuda_runtime.h)\n" in collect_env.report()
