"""``require_kernel`` inside compiled code: no graph break where there is one, the error where not.

Where no CPU kernel was built one is simulated: operators that fill the buffers they are given, by
the fallback.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import rl_logp
from compile_tests.common import BACKENDS, assert_compiled_is_eager, inputs
from rl_logp import _library, chunked


def _f(logits: Tensor, target: Tensor) -> Tensor:
    return rl_logp.fused_logp(logits, target, temperature=0.7, require_kernel=True)


def _served(device: str) -> bool:
    return _library.kernel_for(device, torch.bfloat16).available


@pytest.fixture
def simulated_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Registers a CPU kernel for the time of a test. Lists which of its operators ran."""
    if _served("cpu"):
        pytest.skip("the CPU kernel is built, and there is no need of a simulation")
    ran: list[str] = []

    def forward(logits, target, temperature, all_rows, logp, lse):
        ran.append("forward")
        chunked.forward(logits, target, temperature, logp, lse)

    def backward(*arguments):
        ran.append("backward")
        chunked.backward(*arguments)

    with torch.library._scoped_library("rl_logp", "IMPL") as library:
        library.impl("_fused_logp_forward_out", forward, "CPU")
        library.impl("_fused_logp_backward_out", backward, "CPU")
        monkeypatch.setitem(_library._loaded, "cpu", "a simulation")
        yield ran


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_simulated_kernel_there_is_no_graph_break(backend: str, simulated_kernel: list[str]):
    assert_compiled_is_eager(_f, *inputs(5, 97), backend=backend)
    assert sorted(simulated_kernel) == ["backward"] * 2 + ["forward"] * 2


@pytest.mark.parametrize("kernel", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_kernel_there_is_no_graph_break(kernel: str, backend: str):
    if not _served(kernel):
        pytest.skip(f"no kernel was built for {kernel}")
    assert_compiled_is_eager(_f, *inputs(5, 97, device=kernel), backend=backend)


@pytest.fixture
def no_kernel() -> Iterator[None]:
    with _library.hidden("cpu"):
        yield


@pytest.mark.usefixtures("no_kernel")
def test_without_a_kernel_compiled_code_raises_as_eager_does():
    logits, target = inputs(5, 97)
    expected = r"expected a compiled kernel for torch\.bfloat16 on cpu, got the chunked fallback"
    with pytest.raises(RuntimeError, match=expected):
        _f(logits, target)
    with pytest.raises(RuntimeError, match=expected):
        torch.compile(_f, backend="aot_eager")(logits, target)
    with pytest.raises(RuntimeError, match="expected a compiled kernel"):
        torch.compile(_f, backend="aot_eager", fullgraph=True)(logits, target)
