"""Builds the compiled kernels that this machine can build. Everything else is in pyproject.toml.

RL_LOGP_BUILD says which:

    auto  (default) what can be built; says what was left out, and why
    cuda  the CUDA kernels, or an error
    cpu   the CPU kernel, or an error
    none  no kernel: pure Python
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import setup

# A PEP 517 build does not look for modules beside this file.
sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import cpu_build
import cuda_build
from kernel_build import COMPILER, INCLUDE, CannotBuild

MODES = ("auto", "cuda", "cpu", "none")


def say(message: str) -> None:
    # One installation runs this file several times; once is enough to say it.
    if not {"egg_info", "dist_info"} & set(sys.argv):
        print(f"rl_logp: {message}", file=sys.stderr, flush=True)


def imported_torch() -> ModuleType:
    """torch; raises CannotBuild, with the reason, where it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise CannotBuild(
            f"torch cannot be imported where the build runs ({error}): install it first, and build"
            " with `pip install --no-build-isolation`"
        ) from error
    return torch


def cuda_extension() -> Any:
    """The extension of the CUDA kernels; raises CannotBuild, with the reason."""
    home = cuda_build.prerequisites(imported_torch(), os.environ)
    os.environ["CUDA_HOME"] = str(home)  # torch would guess, and a wrapper on PATH misleads it
    archs = cuda_build.default_arch_list(cuda_build.toolkit_version(home))
    archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", archs)
    from torch.utils.cpp_extension import CUDAExtension

    say(f"building the CUDA kernels for {archs} with {home}")
    return CUDAExtension(
        "rl_logp._C_cuda",
        cuda_build.sources(),
        include_dirs=[str(INCLUDE)],
        depends=cuda_build.headers(),
        extra_compile_args={"cxx": cuda_build.CXX_FLAGS, "nvcc": cuda_build.NVCC_FLAGS},
        extra_link_args=["-Wl,--as-needed"],
        py_limited_api=True,
    )


def cpu_extension() -> Any:
    """The extension of the CPU kernel; raises CannotBuild, with the reason."""
    cpu_build.prerequisites(imported_torch(), os.environ)
    from torch.utils.cpp_extension import CppExtension

    # What was looked for; Python may have been built with a compiler of another name.
    os.environ.setdefault("CXX", COMPILER)
    say("building the CPU kernel")
    return CppExtension(
        "rl_logp._C_cpu",
        cpu_build.sources(),
        include_dirs=[str(INCLUDE)],
        depends=cpu_build.headers(),
        extra_compile_args=cpu_build.CXX_FLAGS,
        py_limited_api=True,
    )


KERNELS = {"cuda": ("the CUDA kernels", cuda_extension), "cpu": ("the CPU kernel", cpu_extension)}


def extensions(mode: str) -> dict[str, Any]:
    """setup()'s arguments for the kernels of this mode."""
    if mode not in MODES:
        raise SystemExit(f"rl_logp: expected RL_LOGP_BUILD to be {'|'.join(MODES)}, got {mode!r}")
    if mode == "none":
        say("left out the kernels: RL_LOGP_BUILD=none")
        return {}
    built = []
    for device, (name, extension) in KERNELS.items():
        if mode not in ("auto", device):
            continue
        try:
            built.append(extension())
        except CannotBuild as reason:
            if mode == device:
                raise SystemExit(f"rl_logp: RL_LOGP_BUILD={mode}: {reason}") from reason
            say(f"left out {name}: {reason}")
    if not built:
        return {}
    from torch.utils.cpp_extension import BuildExtension

    return {
        "ext_modules": built,
        "cmdclass": {"build_ext": BuildExtension},
        # One wheel for every Python: the libraries are found by their files, and hold no Python.h.
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


if __name__ == "__main__":
    setup(license="Apache-2.0", **extensions(os.environ.get("RL_LOGP_BUILD", "auto")))
