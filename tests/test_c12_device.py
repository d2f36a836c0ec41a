"""C12: the device of logits is used; peers elsewhere are a clear error."""

from collections.abc import Callable

import pytest
import torch
from calls import Result, assert_same_bits, call, sample
from torch import Tensor

import rl_logp


@pytest.mark.parametrize("argument", ["target", "temperature"])
def test_a_peer_on_another_device_is_an_error(device: str, argument: str) -> None:
    case = sample((3, 5), device=device)
    case = case._replace(**{argument: getattr(case, argument).to("meta")})
    expected = f"fused_logp: expected {argument} on {case.logits.device}, the device of logits, got"
    with pytest.raises(ValueError, match=f"^{expected} meta$"):
        rl_logp.fused_logp(case.logits, case.target, temperature=case.temperature)


@pytest.mark.parametrize("argument", ["grad_logp", "grad_lse", "lse"])
def test_so_it_is_in_the_backward(device: str, argument: str) -> None:
    case = sample((3, 5), device=device)
    names = ("grad_logp", "grad_lse", "lse")
    peers: dict[str, Tensor] = dict(zip(names, (*case[3:], case.grad_lse), strict=True))
    peers[argument] = peers[argument].to("meta")
    grads, lse = (peers["grad_logp"], peers["grad_lse"]), peers["lse"]
    expected = f"fused_logp: expected {argument} on {case.logits.device}, the device of logits, got"
    with pytest.raises(ValueError, match=f"^{expected} meta$"):
        torch.ops.rl_logp.fused_logp_backward(*grads, *case[:2], None, lse, 0, 5)


def test_results_are_where_the_logits_are_whatever_the_default_device(device: str) -> None:
    case = sample((3, 5), torch.bfloat16, device)
    expected = call(*case)
    with torch.device("meta"):
        actual = call(*case)
    assert {t.device for t in actual} == {case.logits.device}
    assert_same_bits(actual, expected, "another default device")


def test_the_meta_device_gets_shapes_alone() -> None:
    case = sample((3, 5), torch.bfloat16)
    real, meta = call(*case), call(*(t.to("meta") for t in case))
    described = [[(t.shape, t.dtype, t.stride()) for t in result] for result in (real, meta)]
    assert described[0] == described[1]
    assert all(t.is_meta for t in meta)


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_the_current_device_is_not_asked() -> None:
    case = sample((3, 515), torch.bfloat16, "cuda:0")
    expected = call(*case)
    actual = call(*(t.to("cuda:1") for t in case))
    assert_same_bits(Result(*(t.to("cuda:0") for t in actual)), expected, "cuda:1")


@pytest.mark.cuda
@pytest.mark.two_gpus
@pytest.mark.parametrize("argument", ["target", "temperature"])
@pytest.mark.parametrize("score", [rl_logp.fused_logp, rl_logp.vocab_parallel_logp])
def test_a_peer_on_another_gpu_is_an_error(score: Callable, argument: str) -> None:
    case = sample((3, 515), torch.bfloat16, "cuda:0")
    case = case._replace(**{argument: getattr(case, argument).to("cuda:1")})
    message = f"expected {argument} on cuda:0, the device of logits, got cuda:1"
    with pytest.raises(ValueError, match=f"^fused_logp: {message}$"):
        score(case.logits, case.target, temperature=case.temperature)
