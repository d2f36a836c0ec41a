"""backends() says which path serves a device and dtype, and why; a caller can demand the kernel."""

import re

import pytest
import torch
from calls import DTYPES, kernel_serves, sample

import rl_logp
from rl_logp import _library

ALL_DTYPES = [*DTYPES, torch.float64]


def test_every_device_and_dtype_is_listed_once_with_a_reason() -> None:
    backends = rl_logp.backends()
    served = [(b.device_type, b.dtype) for b in backends]
    assert sorted(map(str, served)) == sorted(
        str((device, dtype)) for device in ("cpu", "cuda") for dtype in ALL_DTYPES
    )
    assert all(b.path in ("kernel", "chunked") and b.reason for b in backends)
    assert all(b.available == (b.path == "kernel") for b in backends)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_caller_who_demands_the_kernel_gets_it_or_an_error(
    device: str, dtype: torch.dtype
) -> None:
    case = sample((3, 5), dtype, device)
    module = rl_logp.FusedLogp(require_kernel=True)
    if kernel_serves(device, dtype):
        rl_logp.require_kernel(device, dtype)
        module(case.logits, case.target)
        return
    (reason,) = (
        b.reason for b in rl_logp.backends() if b.device_type == device and b.dtype == dtype
    )
    message = (
        f"fused_logp: expected a compiled kernel for {dtype} on {device}, got the chunked"
        f" fallback: {reason}"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        rl_logp.require_kernel(device, dtype)
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        rl_logp.fused_logp(case.logits, case.target, require_kernel=True)
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        module(case.logits, case.target)


def test_a_loaded_library_serves_the_dtypes_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_loaded", {"cuda": "/somewhere/_C_cuda.abi3.so"})
    monkeypatch.setattr(_library, "_refused", {})
    paths = {(b.device_type, b.dtype): b.path for b in rl_logp.backends()}
    assert {dtype for (device, dtype), path in paths.items() if path == "kernel"} == set(DTYPES)
    assert {device for (device, _), path in paths.items() if path == "kernel"} == {"cuda"}
    rl_logp.require_kernel("cuda", torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"there is no kernel for torch\.float64$"):
        rl_logp.require_kernel("cuda", torch.float64)


def test_a_device_that_nobody_speaks_of_is_served_by_the_fallback() -> None:
    with pytest.raises(RuntimeError, match=r"fallback: there is no kernel for xpu$"):
        rl_logp.require_kernel("xpu", torch.bfloat16)
