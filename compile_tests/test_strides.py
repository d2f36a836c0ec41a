"""Compiled code hands the op the strides and the memory that eager does: no copy of logits."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import rl_logp
from compile_tests.common import BACKENDS, LanguageModel, inputs, needs_compiler
from rl_logp import _checks

VIEWS = {
    "drops-the-last-position": lambda x: x[:, :-1],
    "drops-the-first-position": lambda x: x[:, 1:],
    "slice-of-a-padded-vocabulary": lambda x: x[..., :90],
    "misaligned-base": lambda x: x[..., 1:],
    "permuted-rows": lambda x: x.transpose(0, 1),
    "expanded-rows": lambda x: x[:1].expand(4, -1, -1),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits that reach the op, forward then backward, while code runs rather than compiles."""
    logits: list[Tensor] = []
    for name, position in (("forward", 0), ("backward", 2)):
        check: Callable = getattr(_checks, name)

        def spy(*args, check=check, position=position, **options):
            if type(args[position]) is Tensor:  # not fake
                logits.append(args[position])
            return check(*args, **options)

        monkeypatch.setattr(_checks, name, spy)
    return logits


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_the_callers_logits_is_not_copied(
    device: str, backend: str, view: str, seen: list[Tensor]
):
    logits, _ = inputs(3, 6, 97, device=device)
    expected = VIEWS[view](logits)
    target = torch.zeros(expected.shape[:-1], dtype=torch.int64, device=device)

    @torch.compile(backend=backend, fullgraph=True)
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(VIEWS[view](logits), target)

    f(logits, target).sum().backward()
    assert seen
    for tensor in seen:
        assert tensor.stride() == expected.stride()
        assert tensor.data_ptr() == expected.data_ptr()


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_a_view_of_computed_logits_is_not_copied(backend: str, device: str, seen: list[Tensor]):
    model = LanguageModel(97).to(device)
    tokens = torch.randint(0, 97, (3, 6), device=device)
    torch.compile(model, backend=backend, fullgraph=True)(tokens).sum().backward()
    assert seen
    for tensor in seen:
        assert tensor.shape == (3, 5, 97)
        assert tensor.stride() == (6 * 97, 97, 1)


@needs_compiler
def test_inductors_code_neither_clones_nor_casts_logits():
    """The only buffer it makes of logits' size is the gradient of what the view left out."""

    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits[:, :-1], target[:, 1:], temperature=0.7)

    logits, target = inputs(3, 6, 97)
    compiled = torch.compile(f, fullgraph=True)
    _, (forward, backward) = run_and_get_code(lambda: compiled(logits, target).sum().backward())
    view = r"reinterpret_tensor\(\w+, \(3, 5, 97\), \(582, 97, 1\), 0\)"
    assert re.search(rf"rl_logp\.fused_logp_forward\.default\({view}", forward)
    saved = re.search(r"rl_logp\.fused_logp_backward\.default\(\w+, None, (\w+),", backward)
    assert saved
    assert f"assert_size_stride({saved[1]}, (3, 5, 97), (582, 97, 1)" in backward
    assert _allocations(forward) == []
    assert _allocations(backward) == ["(3, 6, 97)"]


def _allocations(code: str) -> list[str]:
    """Shapes of the buffers of logits' width that inductor's code allocates."""
    return [shape for shape in re.findall(r"= empty\w*\((\([^)]*\))", code) if "97" in shape]
