"""What setup.py and tools/compile_cuda.py share: CUDA sources, flags, and where the toolkit lies.

Standard library only: setup.py imports it where there may be no torch.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import kernel_build
from kernel_build import CannotBuild

USUAL_TOOLKIT = Path("/usr/local/cuda")

MACROS = ["-DUSE_CUDA", kernel_build.TARGET_VERSION]
CXX_FLAGS = ["-O3", "-std=c++17", *MACROS]
# No fast-math: the bits of a result are the promise. -v makes ptxas tell registers and spills.
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xptxas=-v", *MACROS]


def sources() -> list[str]:
    """The CUDA extension's sources, relative to the repository's root."""
    return kernel_build.files("csrc/cuda", "*.cu", "*.cpp")


def headers() -> list[str]:
    """What the sources include, relative to the repository's root."""
    return kernel_build.headers("csrc/cuda")


def is_toolkit(home: Path) -> bool:
    return (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file()


def _homes_of(nvcc: str) -> Iterator[Path]:
    """Where an nvcc may belong. What it says comes first: what is on PATH may be a wrapper."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    for top in re.findall(r"^#\$ TOP=(.+)$", output, re.MULTILINE):
        yield Path(top).resolve()
    yield Path(nvcc).resolve().parent.parent
    yield Path(nvcc).parent.parent


def find_toolkit(environ: Mapping[str, str]) -> Path:
    """The CUDA toolkit's folder: CUDA_HOME, else that of the nvcc on PATH, else the usual one.

    Raises CannotBuild where it holds no bin/nvcc or no include/cuda_runtime.h.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            home = Path(environ[name])
            if not is_toolkit(home):
                raise CannotBuild(
                    f"expected {name} to hold bin/nvcc and include/cuda_runtime.h, got {home}"
                )
            return home
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    homes = [*(_homes_of(nvcc) if nvcc else ()), USUAL_TOOLKIT]
    for home in homes:
        if is_toolkit(home):
            return home
    if nvcc is None:
        raise CannotBuild("there is no nvcc: not on PATH, and CUDA_HOME is not set")
    raise CannotBuild(
        f"{nvcc} is on PATH, but no toolkit with include/cuda_runtime.h is found beside it:"
        " set CUDA_HOME to the toolkit's folder"
    )


def toolkit_version(home: Path) -> tuple[int, int]:
    """The version of a toolkit's nvcc, such as (13, 0)."""
    nvcc = str(home / "bin" / "nvcc")
    try:
        run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{nvcc} does not run: {error}") from error
    found = re.search(r"release (\d+)\.(\d+)", run.stdout)
    if found is None:
        raise CannotBuild(f"{nvcc} --version names no release: {run.stdout or run.stderr}")
    return int(found[1]), int(found[2])


def default_arch_list(version: tuple[int, int]) -> str:
    """The architectures built where TORCH_CUDA_ARCH_LIST does not say; 10.0 came with CUDA 12.8."""
    return "8.0;9.0;10.0+PTX" if version >= (12, 8) else "8.0;9.0+PTX"


def check_torch(torch: ModuleType) -> str:
    """The CUDA version that torch is built with; raises CannotBuild where it has none."""
    if torch.version.hip:
        raise CannotBuild("torch is a ROCm build, for which there is no kernel")
    if not torch.version.cuda:
        raise CannotBuild(f"torch {torch.__version__} is built without CUDA")
    kernel_build.check_release(torch)
    return torch.version.cuda


def prerequisites(torch: ModuleType, environ: Mapping[str, str]) -> Path:
    """The toolkit to build the CUDA kernels with; raises CannotBuild, with the reason, if none."""
    torch_cuda = check_torch(torch)
    home = find_toolkit(environ)
    version = toolkit_version(home)
    if version[0] != int(torch_cuda.split(".")[0]):
        raise CannotBuild(
            f"expected nvcc of CUDA {torch_cuda}, which torch is built with,"
            f" got CUDA {version[0]}.{version[1]} in {home}"
        )
    kernel_build.check_compiler(environ)
    return home
