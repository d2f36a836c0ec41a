"""Find the compiled kernels, load them where they can run, and say what serves a device and why."""

import importlib.util
from dataclasses import dataclass
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
    """The file of a compiled module, installed or editable, without importing it."""
    spec = importlib.util.find_spec(module)
    return spec.origin if spec is not None else None


def load() -> None:
    """Loads the CUDA kernels, if this torch is a CUDA build and they were compiled."""
    if torch.version.hip:
        # A CUDA library may lie here from another environment; on ROCm it must not even be opened.
        _refused["cuda"] = "torch is a ROCm build, for which there is no kernel"
        return
    if not torch.version.cuda:
        _refused["cuda"] = "torch is built without CUDA"
        return
    origin = _find("rl_logp._C_cuda")
    if origin is None:
        _refused["cuda"] = "the CUDA kernels were not built (RL_LOGP_BUILD, docs/install.md)"
        return
    torch.ops.load_library(origin)
    _loaded["cuda"] = origin


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
