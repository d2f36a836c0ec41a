"""What the builds of all kernels share: where the sources lie, and what they need of a machine.

Standard library only: setup.py imports it where there may be no torch.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "csrc" / "include"

# One build serves every later torch: only the stable ABI of this version is used.
TARGET_VERSION = "-DTORCH_TARGET_VERSION=0x020a000000000000"


class CannotBuild(Exception):
    """Why a kernel cannot be built here."""


def files(folder: str, *patterns: str) -> list[str]:
    """Files of a folder, both relative to the repository's root."""
    found = [path for pattern in patterns for path in sorted((ROOT / folder).glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in found]


def headers(folder: str) -> list[str]:
    """What the sources in a folder include, relative to the repository's root."""
    folders = ("csrc", "csrc/include/rl_logp", folder)
    return [path for each in folders for path in files(each, "*.h", "*.cuh")]


def check_release(torch: ModuleType) -> None:
    """Raises CannotBuild for a torch without the stable ABI that the kernels use."""
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < (2, 10):
        raise CannotBuild(f"expected torch 2.10 or later, got {torch.__version__}")


COMPILER = "c++"  # where CXX does not say


def check_compiler(environ: Mapping[str, str]) -> None:
    """Raises CannotBuild where there is no C++ compiler."""
    compiler = environ.get("CXX") or COMPILER
    if shutil.which(compiler.split()[0], path=environ.get("PATH")) is None:
        raise CannotBuild(f"there is no C++ compiler ({compiler})")
