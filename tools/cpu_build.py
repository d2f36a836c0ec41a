"""The CPU kernel's sources and flags, and what a build of it needs.

Standard library only: setup.py imports it where there may be no torch.
"""

from collections.abc import Mapping
from types import ModuleType

import kernel_build

# No fast-math, and nothing contracted but what is written as an fma: the bits are the promise. What
# needs a certain processor says so in the source (csrc/cpu/form_*.cpp).
CXX_FLAGS = [
    "-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-unknown-pragmas",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # said of GCC's own AVX-512 headers
    kernel_build.TARGET_VERSION,
]  # fmt: skip


def sources() -> list[str]:
    """The CPU extension's sources, relative to the repository's root."""
    return kernel_build.files("csrc/cpu", "*.cpp")


def headers() -> list[str]:
    """What the sources include, relative to the repository's root."""
    return kernel_build.headers("csrc/cpu")


def prerequisites(torch: ModuleType, environ: Mapping[str, str]) -> None:
    """Raises CannotBuild, with the reason, where the CPU kernel cannot be built."""
    kernel_build.check_release(torch)
    kernel_build.check_compiler(environ)
