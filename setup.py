"""Builds the compiled kernels that this machine can build. Everything else is in pyproject.toml.

RL_LOGP_BUILD says which:

    auto  (default) what can be built; says what was left out, and why
    cuda  the CUDA kernels, or an error
    cpu   the CPU kernels, or an error
    none  no kernel: pure Python
"""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

# A PEP 517 build does not look for modules beside this file.
sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import cuda_build

MODES = ("auto", "cuda", "cpu", "none")


def say(message: str) -> None:
    # One installation runs this file several times; once is enough to say it.
    if not {"egg_info", "dist_info"} & set(sys.argv):
        print(f"rl_logp: {message}", file=sys.stderr, flush=True)


def cuda_toolkit() -> Path:
    """Imports torch and finds the toolkit; raises CannotBuild, with the reason."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise cuda_build.CannotBuild(
            f"torch cannot be imported where the build runs ({error}): install it first, and build"
            " with `pip install --no-build-isolation`"
        ) from error
    return cuda_build.prerequisites(torch, os.environ)


def cuda_extension(home: Path) -> dict[str, Any]:
    os.environ["CUDA_HOME"] = str(home)  # torch would guess, and a wrapper on PATH misleads it
    archs = cuda_build.default_arch_list(cuda_build.toolkit_version(home))
    archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", archs)
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    say(f"building the CUDA kernels for {archs} with {home}")
    extension = CUDAExtension(
        "rl_logp._C_cuda",
        cuda_build.sources(),
        include_dirs=[str(cuda_build.INCLUDE)],
        depends=cuda_build.headers(),
        extra_compile_args={"cxx": cuda_build.CXX_FLAGS, "nvcc": cuda_build.NVCC_FLAGS},
        extra_link_args=["-Wl,--as-needed"],
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension},
        # One wheel for every Python: the library is found by its file, and holds no Python.h.
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def extensions(mode: str) -> dict[str, Any]:
    """setup()'s arguments for the kernels of this mode."""
    if mode not in MODES:
        raise SystemExit(f"rl_logp: expected RL_LOGP_BUILD to be {'|'.join(MODES)}, got {mode!r}")
    if mode == "cpu":
        raise SystemExit(
            "rl_logp: RL_LOGP_BUILD=cpu: there is no CPU kernel yet; on a CPU the chunked fallback"
            " runs, which needs no build (RL_LOGP_BUILD=none)"
        )
    if mode == "none":
        say("left out the CUDA kernels: RL_LOGP_BUILD=none")
        return {}
    try:
        return cuda_extension(cuda_toolkit())
    except cuda_build.CannotBuild as reason:
        if mode == "cuda":
            raise SystemExit(f"rl_logp: RL_LOGP_BUILD=cuda: {reason}") from reason
        say(f"left out the CUDA kernels: {reason}")
        return {}


if __name__ == "__main__":
    setup(license="Apache-2.0", **extensions(os.environ.get("RL_LOGP_BUILD", "auto")))
