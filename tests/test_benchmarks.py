"""The benchmark harness measures what it says, on a CPU, with whoever is installed."""

import doctest
import importlib
import json
from pathlib import Path

import pytest
import torch
from calls import kernel_serves

from benchmarks import check, cpu, invariance, run, workloads
from benchmarks.baselines import selected_logp
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.report import tables
from benchmarks.results import Results, load, surroundings
from benchmarks.workloads import Point
from rl_logp import _library

CPU = torch.device("cpu")

kernel = pytest.mark.skipif(
    not kernel_serves("cpu", torch.bfloat16), reason="the CPU kernel is not built: make build-cpu"
)


@pytest.mark.parametrize(
    "module",
    ["accuracy", "check", "cpu", "invariance", "report", "run", "speed", "timing", "workloads"],
)
def test_examples_of_its_modules(module):
    assert doctest.testmod(importlib.import_module(f"benchmarks.{module}")).failed == 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("results") / "smoke.json"
    options = "--smoke --device=cpu --shapes=5x100,3x33:fp32 --providers=rl_logp,fp32_vjp,chunked"
    args = run.arguments([*options.split(), f"--output={path}"])
    with _library.hidden("cpu"):
        run.measure_all(args, Results(path, surroundings(CPU, None)))
    return load(path)


def test_every_bench_yields_the_documented_figures(rows):
    of_bench = {
        "speed": {"fwd_ms", "bwd_ms", "fwd_bwd_ms", "floor_ms", "x_floor", "peak_bytes"},
        "accuracy": {"dlogits_cr_pct", "logp_cr_pct"},
        "invariance": {"differing_rows", "compared_rows"},
        "masked": {"fwd_bwd_ms", "of_full", "variant"},
        "chunks": {"fwd_bwd_ms", "chunk_elements", "peak_bytes"},
        "entropy": {"fwd_bwd_ms", "x_floor", "peak_bytes", "entropy_max_error"},
    }
    everywhere = {"provider", "dtype", "V", "N", "gpu", "driver", "torch", "cuda", "commit"}
    for bench, figures in of_bench.items():
        found = [row for row in rows if row["bench"] == bench and row["provider"] == "chunked"]
        assert {(row["N"], row["V"], row["dtype"]) for row in found} == {
            (5, 100, "bf16"),
            (3, 33, "fp32"),
        }
        for row in found:
            assert figures | everywhere <= row.keys(), row


def test_a_provider_that_cannot_run_is_a_row_that_says_why(rows):
    failed = [row for row in rows if "error" in row]
    assert {row["provider"] for row in failed} == {"rl_logp"}  # its kernel is hidden
    assert all("expected a compiled kernel" in row["error"] for row in failed)
    assert "rl_logp: RuntimeError: fused_logp: expected a compiled kernel" in tables(rows)


@kernel
def test_a_backward_over_the_logits_is_measured_beside_one_that_is_not(tmp_path):
    options = "--smoke --device=cpu --bench=inplace --shapes=5x100 --providers=rl_logp"
    args = run.arguments([*options.split(), f"--output={tmp_path / 'inplace.json'}"])
    results = Results(args.output, surroundings(CPU, None))
    run.measure_all(args, results)
    assert [row["variant"] for row in results.rows] == ["new gradient", "in place"]
    assert all(row["bwd_ms"] > 0 for row in results.rows)


def test_a_cpu_is_measured_beside_what_torch_offers(monkeypatch):
    monkeypatch.setattr(cpu, "MOST_REPEATS", cpu.LEAST_REPEATS)
    monkeypatch.setattr(cpu, "UNCACHED_BYTES", 2**16)
    point, bandwidth, found = Point(3, 100), cpu.bandwidths(), []
    for name in ("torch", "torch_cross_entropy"):
        row = {"provider": name, "threads": 1, "dtype": point.dtype, "V": 100, "N": 3}
        row |= cpu.limits(point, bandwidth) | cpu.measure(name, workloads.draw(point, CPU))
        assert row["fwd_ms"] > 0
        assert row["peak_bytes"] >= 2 * point.logits_bytes  # fp32 alone is that much
        found.append(row)
    assert cpu.table(found).count("\n") == 2


@pytest.mark.parametrize(
    ("provider", "point"),
    [
        pytest.param("torch", Point(2048, 1), id="torch"),
        pytest.param("rl_logp", Point(2048, 1), id="rl_logp-one-column", marks=kernel),
        pytest.param("rl_logp", Point(2048, 517), id="rl_logp", marks=kernel),
    ],
)
def test_the_sweep_makes_the_comparisons_it_promises(provider, point):
    found = invariance.sweep(PROVIDERS[provider], point, CPU)
    assert found["compared_rows"] == 2232
    assert found["differing_rows"] == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(lambda n, row: n == 17, 3 * 8 * 3, id="every-row-of-17"),
        pytest.param(lambda n, row: (row == n - 1) & (n > 1), 14 * 8 * 3, id="the-last-row"),
    ],
)
def test_the_sweep_finds_bits_that_depend_on_the_batch(changes, expected):
    def function(logits, target):
        row = torch.arange(len(target))
        return torch.where(torch.as_tensor(changes(len(target), row)), 0.5, 0) + selected_logp(
            logits, target
        )

    planted = Provider("planted", lambda _: function, sign=1)
    found = invariance.sweep(planted, Point(33, 100), CPU)
    assert found["differing_rows"] == found["differing_logp_rows"] == expected
    assert found["differing_dlogits_rows"] == 0  # a constant was added


def test_targets_are_met_missed_or_not_measured():
    row = {"bench": "speed", "provider": "rl_logp", "dtype": "bf16", "V": 151936, "N": 1}
    peer = {**row, "provider": "quack", "fwd_ms": 0.005, "bwd_ms": 0.007, "fwd_bwd_ms": 0.01}
    rows = [{**row, "fwd_ms": 0.004, "bwd_ms": 0.008}, peer]
    met = {each.target: each.met for each in check.verdicts(check.Rows(rows))}
    assert met["N=1 forward: no slower than any peer, ms"] is True
    assert met["N=1 backward: no slower than any peer, ms"] is False
    assert met["N=1 both: no slower than any peer, ms"] is None
    assert not check.report(rows)[1]


def test_a_run_cut_short_keeps_its_rows(tmp_path):
    results = Results(tmp_path / "some.json", {"gpu": None})
    results.add({"bench": "speed", "provider": "torch"})
    with pytest.raises(TypeError):
        results.add({"bench": object()})
    assert json.loads((tmp_path / "some.json").read_text()) == [
        {"bench": "speed", "provider": "torch", "gpu": None}
    ]


def test_what_the_budget_does_not_reach_is_said_to_be_missing(tmp_path):
    args = run.arguments(
        ["--smoke", "--device=cpu", "--bench=speed", "--providers=torch", "--budget-seconds=-1"]
    )
    results = Results(tmp_path / "none.json", {})
    run.measure_all(args, results)
    assert [row["error"] for row in results.rows] == ["not run: -1 s were spent"] * 2
