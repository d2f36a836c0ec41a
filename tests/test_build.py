"""RL_LOGP_BUILD does what it says: builds, leaves out with the reason, or fails with it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


setup: Any = load(ROOT / "setup.py")  # puts tools/ on the path, as a build does
cpu_build: Any = sys.modules["cpu_build"]
cuda_build: Any = sys.modules["cuda_build"]
kernel_build: Any = sys.modules["kernel_build"]
compile_cuda: Any = load(ROOT / "tools" / "compile_cuda.py")


def fake_torch(cuda: str | None = "13.0", hip: str | None = None, release: str = "2.13.0") -> Any:
    return SimpleNamespace(__version__=release, version=SimpleNamespace(cuda=cuda, hip=hip))


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def toolkit_at(home: Path, release: str = "13.0") -> Path:
    """A folder that looks like a CUDA toolkit; its nvcc answers --dryrun and --version."""
    said = f"echo '#$ TOP={home}/bin/..' >&2; echo 'Cuda compilation tools, release {release}, V1'"
    script(home / "bin" / "nvcc", said)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return home


@pytest.fixture
def no_usual_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_build, "USUAL_TOOLKIT", tmp_path / "none")


def fails_to_build(monkeypatch: pytest.MonkeyPatch, *devices: str) -> None:
    """Those devices' kernels cannot be built; the others' are built, in name."""

    def refuse() -> Any:
        raise kernel_build.CannotBuild("the reason")

    for device, (name, _) in setup.KERNELS.items():
        build = refuse if device in devices else lambda device=device: f"built {device}"
        monkeypatch.setitem(setup.KERNELS, device, (name, build))


# --- modes ----------------------------------------------------------------------------------------
def test_auto_leaves_out_what_cannot_be_built_and_says_why(monkeypatch, capsys) -> None:
    fails_to_build(monkeypatch, "cuda", "cpu")
    assert setup.extensions("auto") == {}
    assert capsys.readouterr().err == (
        "rl_logp: left out the CUDA kernels: the reason\n"
        "rl_logp: left out the CPU kernel: the reason\n"
    )


@pytest.mark.parametrize(("fails", "built"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_auto_builds_the_one_that_can_be_built(monkeypatch, fails: str, built: str) -> None:
    fails_to_build(monkeypatch, fails)
    assert setup.extensions("auto")["ext_modules"] == [f"built {built}"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_device_by_name_fails_loudly(monkeypatch, device: str) -> None:
    fails_to_build(monkeypatch, device)
    with pytest.raises(SystemExit, match=rf"^rl_logp: RL_LOGP_BUILD={device}: the reason$"):
        setup.extensions(device)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_device_by_name_is_built_alone(monkeypatch, device: str) -> None:
    fails_to_build(monkeypatch)
    assert setup.extensions(device)["ext_modules"] == [f"built {device}"]


def test_none_builds_nothing_and_looks_for_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(setup, "imported_torch", lambda: pytest.fail("looked for torch"))
    assert setup.extensions("none") == {}
    assert "RL_LOGP_BUILD=none" in capsys.readouterr().err


def test_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"auto\|cuda\|cpu\|none, got 'gpu'"):
        setup.extensions("gpu")


# --- what a build of the kernels needs ------------------------------------------------------------
def test_no_torch_tells_how_to_build_against_the_installed_one(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(kernel_build.CannotBuild, match="pip install --no-build-isolation"):
        setup.imported_torch()


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        pytest.param(fake_torch(cuda=None, hip="6.4"), "ROCm build", id="ROCm"),
        pytest.param(fake_torch(cuda="12.8", hip="6.4"), "ROCm build", id="ROCm-wins"),
        pytest.param(fake_torch(cuda=None), "built without CUDA", id="CPU-torch"),
        pytest.param(fake_torch(release="2.9.1"), "2.10 or later, got 2.9.1", id="old-torch"),
    ],
)
def test_torch_that_cannot_run_the_kernels(torch: Any, reason: str) -> None:
    with pytest.raises(kernel_build.CannotBuild, match=reason):
        cuda_build.prerequisites(torch, {})


@pytest.mark.parametrize("release", ["2.10.0", "2.13.0+cu130", "2.14.0a0+git1234", "3.0.0"])
def test_torch_that_can(release: str) -> None:
    assert cuda_build.check_torch(fake_torch(release=release)) == "13.0"


def test_cuda_home_without_headers_is_refused(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "nvcc", "exit 0")
    with pytest.raises(kernel_build.CannotBuild, match=r"CUDA_HOME to hold .*cuda_runtime\.h, got"):
        cuda_build.find_toolkit({"CUDA_HOME": str(tmp_path)})


@pytest.mark.usefixtures("no_usual_toolkit")
def test_wrapper_on_path_is_asked_where_its_toolkit_lies(tmp_path: Path) -> None:
    home = toolkit_at(tmp_path / "cuda-13.0")
    script(tmp_path / "local" / "bin" / "nvcc", f'exec {home}/bin/nvcc "$@"')
    assert cuda_build.find_toolkit({"PATH": str(tmp_path / "local" / "bin")}) == home


@pytest.mark.usefixtures("no_usual_toolkit")
def test_link_on_path_is_followed(tmp_path: Path) -> None:
    home = toolkit_at(tmp_path / "cuda-13.0")
    script(home / "bin" / "nvcc", "exit 1")  # says nothing of itself
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    assert cuda_build.find_toolkit({"PATH": str(tmp_path / "bin")}) == home


@pytest.mark.usefixtures("no_usual_toolkit")
def test_nvcc_without_headers_asks_for_cuda_home(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "nvcc", "exit 0")
    with pytest.raises(kernel_build.CannotBuild, match="set CUDA_HOME"):
        cuda_build.find_toolkit({"PATH": str(tmp_path / "bin")})


@pytest.mark.usefixtures("no_usual_toolkit")
def test_no_nvcc(tmp_path: Path) -> None:
    with pytest.raises(kernel_build.CannotBuild, match="there is no nvcc"):
        cuda_build.find_toolkit({"PATH": str(tmp_path)})


def test_nvcc_of_another_major_version_than_torchs(tmp_path: Path) -> None:
    home = toolkit_at(tmp_path, release="12.8")
    with pytest.raises(kernel_build.CannotBuild, match=r"CUDA 13.0, .* got CUDA 12.8 in"):
        cuda_build.prerequisites(fake_torch(), {"CUDA_HOME": str(home), "PATH": os.defpath})


@pytest.mark.parametrize("build", [cuda_build, cpu_build], ids=["cuda", "cpu"])
def test_no_compiler(tmp_path: Path, build: Any) -> None:
    environ = {"CUDA_HOME": str(toolkit_at(tmp_path)), "PATH": str(tmp_path), "CXX": "nosuch -m64"}
    with pytest.raises(kernel_build.CannotBuild, match=r"is no C\+\+ compiler \(nosuch -m64\)"):
        build.prerequisites(fake_torch(), environ)


@pytest.mark.parametrize(
    "torch", [fake_torch(cuda=None), fake_torch(cuda=None, hip="6.4")], ids=["CPU", "ROCm"]
)
def test_the_cpu_kernel_needs_no_more_than_torch_and_a_compiler(torch: Any) -> None:
    cpu_build.prerequisites(torch, {"PATH": "/bin", "CXX": "sh"})


def test_the_cpu_kernel_needs_the_stable_abi() -> None:
    with pytest.raises(kernel_build.CannotBuild, match=r"2\.10 or later, got 2\.9\.1"):
        cpu_build.prerequisites(fake_torch(release="2.9.1"), {"PATH": "/bin", "CXX": "sh"})


def test_everything_there(tmp_path: Path) -> None:
    home = toolkit_at(tmp_path, release="13.4")
    environ = {"CUDA_HOME": str(home), "PATH": "/bin", "CXX": "sh"}
    assert cuda_build.prerequisites(fake_torch(), environ) == home


@pytest.mark.parametrize(
    ("version", "archs"), [((12, 6), "8.0;9.0+PTX"), ((12, 8), "8.0;9.0;10.0+PTX")]
)
def test_default_architectures_are_those_that_the_compiler_knows(version, archs) -> None:
    assert cuda_build.default_arch_list(version) == archs


# --- a real build without torch -------------------------------------------------------------------
def test_without_torch_the_wheel_is_pure_python_and_carries_no_stale_library(
    tmp_path: Path,
) -> None:
    pytest.importorskip("pip", reason="builds a wheel with pip")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("rl_logp", "tools"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for stale in ("_C_cuda.abi3.so", "_C_cpu.abi3.so"):
        (source / "rl_logp" / stale).touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('no torch here')")
    run = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps",
         "--no-index", "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "broken"), "RL_LOGP_BUILD": "auto"},
    )  # fmt: skip
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    for kernel in ("CUDA kernels", "CPU kernel"):
        assert f"rl_logp: left out the {kernel}: torch cannot be imported" in output
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name.split("/")[1] for name in names if name.startswith("rl_logp/")}
    assert packaged == {path.name for path in (ROOT / "rl_logp").glob("*.py")} | {"py.typed"}
    assert any(name.endswith("LICENSE") for name in names)


# --- the compile-only check -----------------------------------------------------------------------
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_80'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90'
ptxas info    : Function properties for _Z3badPf
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
ptxas info    : Function properties for _Z6calledPf
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_compile_check_fails_on_local_memory_and_names_the_kernel(capsys) -> None:
    kernels = compile_cuda.parse_ptxas(PTXAS)
    good, bad = kernels
    assert good == compile_cuda.Kernel("_Z4goodPf", "80", 40, 0, 0, 0)
    assert bad == compile_cuda.Kernel("_Z3badPf", "90", 255, 16, 12, 8)
    assert compile_cuda.report([good], ("80",)) == 0
    assert compile_cuda.report(kernels, ("80", "90")) == 1
    line = "sm_90: 16 bytes of stack, 12 spilled, 8 loaded, 255 registers:"
    assert line in capsys.readouterr().out
    array = replace(bad, spill_stores=0, spill_loads=0)  # indexed at run time
    assert compile_cuda.report([good, array], ("80", "90")) == 1


def test_compile_check_fails_where_an_architecture_got_no_kernel() -> None:
    assert compile_cuda.report(compile_cuda.parse_ptxas(PTXAS)[:1], ("80", "100")) == 1


def test_compile_check_takes_a_kernel_of_which_ptxas_told_nothing_for_a_spill() -> None:
    kernels = compile_cuda.parse_ptxas(PTXAS.replace("spill", "lost"))
    assert compile_cuda.report(kernels, ("80", "90")) == 1
