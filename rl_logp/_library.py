"""Find the compiled kernels, load them where they can run, and say what serves a device and why."""

import importlib.machinery
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Backend:
    """Which path serves logits of one device type and dtype.

    ``path`` is ``"kernel"`` (compiled) or ``"chunked"`` (the torch fallback); ``reason`` says why.
    """

    device_type: str
    dtype: torch.dtype
    path: str
    reason: str

    @property
    def available(self) -> bool:
        return self.path == "kernel"


_loaded: dict[str, str] = {}  # device type -> where its kernels were loaded from
_refused: dict[str, str] = {}  # device type -> why its kernels were not loaded


def _find(module: str) -> Optional[str]:
    """The file of a compiled module, without importing it.

    It lies beside this one, or it is not this package's: an editable installation would offer that
    of another copy.
    """
    spec = importlib.machinery.PathFinder.find_spec(module, [str(Path(__file__).parent)])
    return spec.origin if spec is not None else None


def load() -> None:
    """Loads the kernels that were compiled and that this torch can use, one library a device."""
    _load("cpu", "_C_cpu", "the CPU kernel was not built (RL_LOGP_BUILD, docs/install.md)")
    if torch.version.hip:
        # A CUDA library may lie here from another environment; on ROCm it must not even be opened.
        _refused["cuda"] = "torch is a ROCm build, for which there is no kernel"
    elif not torch.version.cuda:
        _refused["cuda"] = "torch is built without CUDA"
    else:
        reason = "the CUDA kernels were not built (RL_LOGP_BUILD, docs/install.md)"
        _load("cuda", "_C_cuda", reason)


def _load(device_type: str, module: str, reason: str) -> None:
    """Loads a library if it is there; otherwise the reason says why the device has no kernel."""
    origin = _find(f"rl_logp.{module}")
    if origin is None:
        _refused[device_type] = reason
        return
    torch.ops.load_library(origin)
    _loaded[device_type] = origin


@contextmanager
def hidden(device_type: str, reason: str = "hidden") -> Iterator[None]:
    """Lets the fallback serve a device type, whatever is loaded: for tests and benchmarks."""
    loaded, refused = _loaded.pop(device_type, None), _refused.get(device_type)
    _refused[device_type] = reason
    try:
        yield
    finally:
        del _refused[device_type]
        if refused is not None:
            _refused[device_type] = refused
        if loaded is not None:
            _loaded[device_type] = loaded


def kernel_for(device_type: str, dtype: torch.dtype) -> Backend:
    """The path that serves logits of this device type and dtype."""
    if device_type not in _loaded:
        reason = _refused.get(device_type, f"there is no kernel for {device_type}")
        return Backend(device_type, dtype, "chunked", reason)
    if dtype not in KERNEL_DTYPES:
        return Backend(device_type, dtype, "chunked", f"there is no kernel for {dtype}")
    return Backend(device_type, dtype, "kernel", f"loaded from {_loaded[device_type]}")


def backends() -> list[Backend]:
    """Which path serves each device type and dtype in this process, and why.

    Returns:
        One :class:`Backend` for each of the device types ``cpu`` and ``cuda`` and each dtype that
        logits may have. Any other device is served by the chunked fallback.

    >>> import rl_logp, torch
    >>> {b.path for b in rl_logp.backends() if b.dtype == torch.float64}
    {'chunked'}
    """
    from rl_logp._checks import LOGITS_DTYPES

    return [kernel_for(device, dtype) for device in ("cpu", "cuda") for dtype in LOGITS_DTYPES]


def require_kernel(device_type: str, dtype: torch.dtype) -> None:
    """Raises RuntimeError, with the reason, unless a compiled kernel serves this device and dtype.

    >>> import rl_logp, torch
    >>> rl_logp.require_kernel("cuda", torch.float64)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    RuntimeError: fused_logp: expected a compiled kernel for torch.float64 on cuda, ...
    """
    backend = kernel_for(device_type, dtype)
    if not backend.available:
        raise RuntimeError(
            f"fused_logp: expected a compiled kernel for {dtype} on {device_type}, got the chunked"
            f" fallback: {backend.reason}"
        )
