"""Under ROCm nothing compiled is opened or loaded, even if a library lies there, and the fallback
serves. A process of its own believes that its torch is a ROCm build and notes what it opens."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import rl_logp

STALE = ["_C_cuda.abi3.so", "_C_cuda.so"]
PROBE = """
import json, sys

opened = []

def note(event, args):
    if event in ("open", "ctypes.dlopen", "import") and any("_C_cuda" in str(a) for a in args):
        opened.append([event, str(args[0])])

import torch

torch.version.hip, torch.version.cuda = json.loads(sys.argv[1])
loads = []
torch.ops.load_library = lambda path: loads.append(str(path))
sys.addaudithook(note)

import rl_logp

logits = torch.zeros(2, 4, requires_grad=True)
logp = rl_logp.fused_logp(logits, torch.tensor([1, -100]))
logp.sum().backward()
with open("/proc/self/maps") as maps:
    mapped = sum("_C_cuda" in line for line in maps)
print(json.dumps({
    "package": rl_logp.__file__,
    "opened": opened,
    "loads": loads,
    "mapped": mapped,
    "backends": [[b.device_type, b.path, b.reason] for b in rl_logp.backends()],
    "logp": logp.tolist(),
    "grad": logits.grad.tolist(),
}))
"""


class Stale(NamedTuple):
    package: Path
    libraries: list[Path]


@pytest.fixture
def stale(tmp_path: Path) -> Stale:
    """A copy of the package in which libraries of an earlier build lie."""
    source = Path(rl_logp.__file__).parent
    package = tmp_path / "rl_logp"
    package.mkdir()
    for file in source.glob("*.py"):
        shutil.copy(file, package)
    libraries = [package / name for name in STALE]
    for library in libraries:
        library.write_bytes(b"not a library: whoever opens this has looked where it must not")
    return Stale(package, libraries)


def probe(stale: Stale, hip: str | None, cuda: str | None) -> dict:
    """What a process does that imports the copy under this pair of versions."""
    command = [sys.executable, "-c", PROBE, json.dumps([hip, cuda])]
    done = subprocess.run(
        command, cwd=stale.package.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert Path(seen["package"]).parent == stale.package, "the probe did not import the copy"
    return seen


@pytest.mark.parametrize("cuda", [None, "13.0"], ids=["hip alone", "hip beside cuda"])
def test_a_stale_library_is_neither_opened_nor_loaded(stale: Stale, cuda: str | None) -> None:
    seen = probe(stale, "6.4.43482", cuda)
    assert seen["opened"] == seen["loads"] == []
    assert seen["mapped"] == 0
    reason = "torch is a ROCm build, for which there is no kernel"
    of_cuda = [b[1:] for b in seen["backends"] if b[0] == "cuda"]
    assert of_cuda == [["chunked", reason]] * 4
    assert {path for _, path, _ in seen["backends"]} == {"chunked"}
    # The fallback serves: log(1/4), and the gradient of one row alone.
    assert seen["logp"] == [pytest.approx(-1.3862944, abs=1e-6), 0]
    assert seen["grad"] == [[-0.25, 0.75, -0.25, -0.25], [0, 0, 0, 0]]


def test_a_build_without_cuda_does_not_load_it_either(stale: Stale) -> None:
    seen = probe(stale, None, None)
    assert seen["opened"] == seen["loads"] == []
    of_cuda = {b[2] for b in seen["backends"] if b[0] == "cuda"}
    assert of_cuda == {"torch is built without CUDA"}


def test_the_probe_would_see_it_loaded(stale: Stale) -> None:
    """The other side: in a CUDA build the very same file is loaded."""
    seen = probe(stale, None, "13.0")
    assert seen["loads"]
    assert set(seen["loads"]) <= set(map(str, stale.libraries))
    assert {b[1] for b in seen["backends"] if b[0] == "cuda"} == {"kernel", "chunked"}


def test_nothing_lying_there_is_said_to_be_the_reason(stale: Stale) -> None:
    for library in stale.libraries:
        library.unlink()
    seen = probe(stale, None, "13.0")
    assert seen["loads"] == []
    reasons = {b[2] for b in seen["backends"] if b[0] == "cuda"}
    assert reasons == {"the CUDA kernels were not built (RL_LOGP_BUILD, docs/install.md)"}
