"""Prints what a bug report needs: versions, GPUs, compilers, and which path serves each dtype.

    python -m rl_logp.collect_env

Standard library only, and every probe stands alone: one that fails says so in its line. Where
``import rl_logp`` or ``import torch`` itself fails, run this file by its path.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

VARIABLES = (
    "RL_LOGP_BUILD", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CXX", "LD_LIBRARY_PATH",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_CUDA_ARCH_LIST", "TORCH_LOGS",
)  # fmt: skip
PACKAGES = ("rl_logp", "torch", "triton", "numpy", "setuptools", "ninja", "pip")

Report = Iterator[tuple[str, str]]


def output_of(*command: str) -> str:
    """What a command prints, or why it prints nothing."""
    path = shutil.which(command[0])
    if path is None:
        return "not on PATH"
    try:
        run = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=60)
    except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run: {error}"
    if run.returncode:
        return f"{path} exits with {run.returncode}: {(run.stderr or run.stdout).strip()[:200]}"
    return run.stdout.strip()


def first_line(*command: str) -> str:
    path = shutil.which(command[0])
    line = (output_of(*command).splitlines() or ["prints nothing"])[0]
    return f"{line} ({path})" if path else line


def system() -> Report:
    yield "python", f"{sys.version.split()[0]} ({sys.executable})"
    yield "platform", platform.platform()
    yield "libc", " ".join(platform.libc_ver()) or "unknown"
    try:
        yield "cpus", str(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        yield "cpus", str(os.cpu_count())


def packages() -> Report:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def compilers() -> Report:
    for command in (os.environ.get("CXX") or "c++", "g++", "clang++"):
        yield command, first_line(*command.split()[:1], "--version")
    said = output_of("nvcc", "--version")
    release = [line for line in said.splitlines() if "release" in line]
    yield "nvcc", f"{release[0]} ({shutil.which('nvcc')})" if release else said
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            header = os.path.join(os.environ[name], "include", "cuda_runtime.h")
            found = "" if os.path.isfile(header) else "no "
            yield name, f"{os.environ[name]} ({found}include/cuda_runtime.h)"


def driver() -> Report:
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    lines = output_of("nvidia-smi", query, "--format=csv,noheader").splitlines()
    for index, line in enumerate(lines or ["no GPU"]):
        yield f"nvidia-smi {index}", line


def torch_build() -> Report:
    import torch

    yield "torch", f"{torch.__version__} ({torch.__file__})"
    yield "torch CUDA, HIP", f"{torch.version.cuda}, {torch.version.hip}"
    yield "torch CUDA available", str(torch.cuda.is_available())
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}",
            f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} multiprocessors,"
            f" {gpu.total_memory / 2**30:.0f} GiB",
        )


def kernels() -> Report:
    import rl_logp

    yield "rl_logp", f"{rl_logp.__version__} ({rl_logp.__file__})"
    for name, module in (("CUDA kernels", "_C_cuda"), ("CPU kernel", "_C_cpu")):
        spec = importlib.util.find_spec(f"rl_logp.{module}")
        yield f"file of the {name}", "none" if spec is None else str(spec.origin)
    for backend in rl_logp.backends():
        dtype = str(backend.dtype).removeprefix("torch.")
        yield f"{backend.device_type} {dtype}", f"{backend.path}: {backend.reason}"


def variables() -> Report:
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def report() -> str:
    """The whole report, one probe a section."""
    sections: tuple[Callable[[], Report], ...] = (
        system, packages, compilers, driver, torch_build, kernels, variables,
    )  # fmt: skip
    lines = []
    for section in sections:
        lines.append(f"[{section.__name__}]")
        try:
            for name, value in section():
                lines.append(f"{name}: {value}")
        # What importing a package that is missing, broken or built for another torch raises, and
        # what asking a broken driver does.
        except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
            lines.append(f"failed: {type(error).__name__}: {error}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
