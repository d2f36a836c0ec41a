"""Installs a wheel in a folder of its own, and scores with it, in the Python that runs this.

    python tools/check_wheel.py dist/rl_logp-*.whl

A wheel that says it needs no certain Python (`abi3`) must hold kernels, and they must serve. Where
there is no torch, the wheel is installed, and its libraries are looked at: none may use Python's C
interface beyond what is stable, and ours use none of it.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

SCORE = """
import sys
import torch, rl_logp
from rl_logp.reference import reference

assert rl_logp.__file__.startswith(sys.argv[1]), rl_logp.__file__
kernel = sys.argv[2] == "kernel"
devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
for device in devices:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if kernel and device == "cpu":
            rl_logp.require_kernel(device, dtype)
        torch.manual_seed(0)
        logits = torch.randn(40, 50257, dtype=dtype, device=device, requires_grad=True)
        target = torch.randint(50257, (40,), device=device)
        target[3] = -100
        logp = rl_logp.fused_logp(logits, target, temperature=0.7)
        logp.sum().backward()
        exact = reference(logits, target, temperature=0.7)
        # A unit in the last place of 8 to 16 from a kernel, which rounds once; 16 from torch.
        assert (logp.double() - exact.logp).abs().max() < 2.0 ** (-20 if kernel else -16)
        # No gradient exceeds 1 / 0.7, below 2: half a unit in the last place is eps / 2.
        grad = logits.grad.double()
        assert (grad - exact.dlogits).abs().max() < torch.finfo(dtype).eps
        assert logp[3] == 0 and not logits.grad[3].any()
        alone = rl_logp.fused_logp(logits[7:8], target[7:8], temperature=0.7)
        assert torch.equal(alone, logp[7:8])
        pieces = rl_logp.vocab_parallel_logp(logits, target, temperature=0.7)
        assert not kernel or device != "cpu" or torch.equal(pieces, logp)
        compiled = torch.compile(rl_logp.fused_logp, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(logits, target, temperature=0.7), logp)
served = {str(b.dtype): b.path for b in rl_logp.backends() if b.device_type == "cpu"}
print(f"torch {torch.__version__}, {devices}: scores as it should; on a CPU {served}")
"""


def symbols_of_python(library: Path) -> list[bytes]:
    """Names of Python's C interface that a library mentions."""
    words = library.read_bytes().split(b"\0")
    return [word for word in words if word.startswith((b"Py", b"_Py")) and word[2:3].isalpha()]


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("expected the path of a wheel")
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", folder, str(wheel)], check=True)
        libraries = sorted(Path(folder, "rl_logp").glob("_C_*"))
        for library in libraries:
            if found := symbols_of_python(library):
                raise SystemExit(f"expected {library.name} without Python's symbols, got {found}")
        if "-abi3-" in wheel.name and not libraries:
            raise SystemExit(f"expected kernels in {wheel.name}, got none")
        names = ", ".join(library.name for library in libraries) or "no kernel"
        print(f"{wheel.name}, Python {sys.version.split()[0]}: installed; {names}", flush=True)
        if importlib.util.find_spec("torch") is None:
            print("no torch here to score with")
            return
        kernel = any(library.name.startswith("_C_cpu") for library in libraries)
        script = [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{SCORE}"]
        arguments = [folder, "kernel" if kernel else "fallback"]
        if subprocess.run([*script, *arguments], cwd=folder).returncode:
            raise SystemExit(f"{wheel.name} does not score as it should")


if __name__ == "__main__":
    main()
