"""C12: the device of logits is used; peers elsewhere are a clear error."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from calls import Call, assert_same_bits, sample
from torch import Tensor

import rl_logp

OPS = torch.ops.rl_logp

SCORES = [
    rl_logp.fused_logp,
    rl_logp.fused_logp_entropy,
    rl_logp.vocab_parallel_logp,
    rl_logp.vocab_parallel_logp_entropy,
]
every_score = pytest.mark.parametrize("score", SCORES)


@every_score
@pytest.mark.parametrize("argument", ["target", "temperature"])
def test_a_peer_on_another_device_is_an_error(device: str, score: Callable, argument: str) -> None:
    case = sample((3, 5), device=device)
    case = case._replace(**{argument: getattr(case, argument).to("meta")})
    expected = f"fused_logp: expected {argument} on {case.logits.device}, the device of logits, got"
    with pytest.raises(ValueError, match=f"^{expected} meta$"):
        score(case.logits, case.target, temperature=case.temperature)


BACKWARDS: dict[str, Callable] = {
    "fused_logp_backward": lambda of, row: OPS.fused_logp_backward(
        of["grad_logp"], of["grad_lse"], *row, of["lse"], 0, 5
    ),
    "fused_logp_backward_": lambda of, row: OPS.fused_logp_backward_(
        of["grad_logp"], of["grad_lse"], *row, of["lse"], 0, 5
    ),
    "fused_logp_entropy_backward": lambda of, row: OPS.fused_logp_entropy_backward(
        of["grad_logp"], of["grad_entropy"], of["grad_lse"], *row, of["lse"], of["mean"], 0, 5
    ),
}


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        *product(BACKWARDS, ("grad_logp", "grad_lse", "lse")),
        ("fused_logp_entropy_backward", "grad_entropy"),
        ("fused_logp_entropy_backward", "mean"),
    ],
)
def test_so_it_is_in_the_backward(device: str, name: str, argument: str) -> None:
    case = sample((3, 5), device=device)
    single, double = case[3:]
    peers: dict[str, Tensor] = {"grad_logp": single, "grad_entropy": single}
    peers |= {"grad_lse": double, "lse": double, "mean": double}
    BACKWARDS[name](peers, (*case[:2], None))  # where they are together
    peers[argument] = peers[argument].to("meta")
    expected = f"fused_logp: expected {argument} on {case.logits.device}, the device of logits, got"
    with pytest.raises(ValueError, match=f"^{expected} meta$"):
        BACKWARDS[name](peers, (*case[:2], None))


def test_results_are_where_the_logits_are_whatever_the_default_device(
    call: Call, device: str
) -> None:
    case = sample((3, 5), torch.bfloat16, device)
    expected = call(*case)
    with torch.device("meta"):
        actual = call(*case)
    assert {t.device for t in actual} == {case.logits.device}
    assert_same_bits(actual, expected, "another default device")


def test_the_meta_device_gets_shapes_alone(call: Call) -> None:
    case = sample((3, 5), torch.bfloat16)
    real, meta = call(*case), call(*(t.to("meta") for t in case))
    described = [[(t.shape, t.dtype, t.stride()) for t in result] for result in (real, meta)]
    assert described[0] == described[1]
    assert all(t.is_meta for t in meta)


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_the_current_device_is_not_asked(call: Call) -> None:
    case = sample((3, 515), torch.bfloat16, "cuda:0")
    expected = call(*case)
    actual = call(*(t.to("cuda:1") for t in case))
    assert_same_bits(type(expected)(*(t.to("cuda:0") for t in actual)), expected, "cuda:1")


@pytest.mark.cuda
@pytest.mark.two_gpus
@pytest.mark.parametrize("argument", ["target", "temperature"])
@every_score
def test_a_peer_on_another_gpu_is_an_error(score: Callable, argument: str) -> None:
    case = sample((3, 515), torch.bfloat16, "cuda:0")
    case = case._replace(**{argument: getattr(case, argument).to("cuda:1")})
    message = f"expected {argument} on cuda:0, the device of logits, got cuda:1"
    with pytest.raises(ValueError, match=f"^fused_logp: {message}$"):
        score(case.logits, case.target, temperature=case.temperature)
