"""Compiles the CUDA sources for every architecture; fails where a kernel uses local memory.

It needs neither a GPU nor a CUDA build of torch. A spilled register, or an array that is indexed at
run time, is memory traffic in a kernel whose only cost is memory traffic.

    python tools/compile_cuda.py
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import cuda_build
import kernel_build

ARCHS = ("80", "90", "100")


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel on one architecture."""

    name: str
    arch: str
    registers: int
    stack: int  # bytes, as of spills
    spill_stores: int
    spill_loads: int


def toolkit() -> Path:
    """CUDA_HOME's toolkit, else that of requirements/cuda.txt, else the one on PATH."""
    if not os.environ.get("CUDA_HOME"):
        for folder in sys.path:
            home = Path(folder) / "nvidia" / "cu13"
            if cuda_build.is_toolkit(home):
                return home
    return cuda_build.find_toolkit(os.environ)


def torch_flags() -> list[str]:
    """What torch adds to a build of an extension, whether or not it is a CUDA build itself."""
    import torch
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    return [*COMMON_NVCC_FLAGS, f"-isystem={Path(torch.__file__).parent / 'include'}"]


def parse_ptxas(output: str) -> list[Kernel]:
    """The kernels named in the output of ``ptxas -v``."""
    kernels = []
    name = arch = ""
    stack = stores = loads = -1
    for line in output.splitlines():
        if found := re.search(r"Compiling entry function '(.+)' for 'sm_(\w+)'", line):
            name, arch = found.groups()
            stack = stores = loads = -1
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, stores, loads = map(int, found.groups())
        elif name and (found := re.search(r"Used (\d+) registers", line)):
            kernels.append(Kernel(name, arch, int(found[1]), stack, stores, loads))
            name = ""
    return kernels


def demangle(names: list[str]) -> dict[str, str]:
    """Mangled names to readable ones; to themselves where there is no c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return {name: name for name in names}
    run = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, run.stdout.splitlines(), strict=True))


def compile_source(home: Path, source: str, archs: tuple[str, ...], folder: str) -> str:
    """Compiles one file for every architecture, and returns what the compiler said."""
    compiled = Path(folder) / f"{Path(source).name}.o"
    command = [
        str(home / "bin" / "nvcc"), "-c", source, "-o", str(compiled),
        *cuda_build.NVCC_FLAGS, "-Xcompiler=-fPIC", "--threads=2",
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
        f"-I{kernel_build.INCLUDE}", *torch_flags(),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=kernel_build.ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=ARCHS, help="such as 90; default: %(default)s")
    archs = tuple(parser.parse_args().arch)
    sources = cuda_build.sources()
    if not sources:
        raise SystemExit("expected sources in csrc/cuda, got none")
    home = toolkit()
    print(f"nvcc {'.'.join(map(str, cuda_build.toolkit_version(home)))} in {home}", flush=True)
    kernels: list[Kernel] = []
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            start = time.monotonic()
            found = parse_ptxas(compile_source(home, source, archs, folder))
            expected = f"{len(found)} kernels" if found else "no kernel"
            print(f"{source}: {expected}, {time.monotonic() - start:.0f} s", flush=True)
            kernels += found
    return report(kernels, archs)


def report(kernels: list[Kernel], archs: tuple[str, ...]) -> int:
    """Prints the registers of each architecture and what uses local memory; 1 if anything does."""
    for arch in archs:
        registers = [kernel.registers for kernel in kernels if kernel.arch == arch]
        if not registers:
            print(f"sm_{arch}: expected kernels, got none")
            return 1
        print(f"sm_{arch}: {len(registers)} kernels, at most {max(registers)} registers")
    local = [each for each in kernels if each.stack or each.spill_stores or each.spill_loads]
    readable = demangle([kernel.name for kernel in local])
    for kernel in local:
        print(
            f"sm_{kernel.arch}: {kernel.stack} bytes of stack, {kernel.spill_stores} spilled,"
            f" {kernel.spill_loads} loaded, {kernel.registers} registers: {readable[kernel.name]}"
        )
    print(f"{len(local)} of {len(kernels)} kernels use local memory")
    return 1 if local else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except kernel_build.CannotBuild as reason:
        sys.exit(f"compile_cuda: {reason}")
