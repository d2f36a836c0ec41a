"""vmap works for every in_dims; the transforms that do not work say so, and none is silent."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from calls import Sample, sample
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal

BATCH, ROWS, V = 4, 3, 5


def logp(logits: Tensor, target: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    return rl_logp.fused_logp(logits, target, temperature=temperature)


def batch(device: str) -> Sample:
    return sample((BATCH, ROWS, V), device=device)


@pytest.mark.parametrize("logits_dim", [0, 1, 2, -1, None], ids=str)
@pytest.mark.parametrize("target_dim", [0, 1, -1, None], ids=str)
def test_vmap_over_any_dimensions(
    device: str, logits_dim: int | None, target_dim: int | None
) -> None:
    case = batch(device)
    if logits_dim is None and target_dim is None:
        pytest.skip("vmap wants one batched argument")
    logits = case.logits[0] if logits_dim is None else case.logits.movedim(0, logits_dim)
    target = case.target[0] if target_dim is None else case.target.movedim(0, target_dim)
    actual = torch.vmap(logp, in_dims=(logits_dim, target_dim))(logits, target)
    one_by_one = [
        logp(
            case.logits[0 if logits_dim is None else i], case.target[0 if target_dim is None else i]
        )
        for i in range(BATCH)
    ]
    assert_bitwise_equal(actual, torch.stack(one_by_one), "vmap")


@pytest.mark.parametrize(
    ("form", "in_dim"),
    [
        ("number", None),
        ("0-dim, shared", None),
        ("per row, shared", None),
        ("one a sample", 0),
        ("per row and sample", 0),
        ("per row and sample", 1),
        ("per row and sample", -1),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [0, ROWS])
def test_vmap_with_a_temperature(device: str, form: str, in_dim: int | None, rows: int) -> None:
    case = Sample(*(t[:, :rows] for t in batch(device)))
    full = batch(device).temperature
    temperature, samples = {
        "number": (0.7, [0.7] * BATCH),
        "0-dim, shared": (full[0, 0], [full[0, 0]] * BATCH),
        "per row, shared": (full[0, :rows], [full[0, :rows]] * BATCH),
        "one a sample": (full[:, 0], list(full[:, 0])),
        "per row and sample": (case.temperature.movedim(0, in_dim or 0), list(case.temperature)),
    }[form]
    actual = torch.vmap(logp, in_dims=(0, 0, in_dim))(case.logits, case.target, temperature)
    one_by_one = [logp(x, t, s) for x, t, s in zip(case.logits, case.target, samples, strict=True)]
    assert_bitwise_equal(actual, torch.stack(one_by_one), form)


def test_vmap_refuses_the_temperature_that_eager_refuses(device: str) -> None:
    """(BATCH, ROWS, 7) would broadcast against (ROWS, 7); a sample's (7,) is not its rows'."""
    case = sample((BATCH, ROWS, 7, V), device=device)
    with pytest.raises(ValueError, match=r"^fused_logp: expected a 0-dim temperature or one of"):
        torch.vmap(logp, in_dims=(0, 0, None))(
            case.logits, case.target, torch.ones(7, device=device)
        )


def test_nested_vmap(device: str) -> None:
    case = batch(device)
    expected = logp(case.logits, case.target, case.temperature)
    assert_bitwise_equal(torch.vmap(torch.vmap(logp))(*case[:3]), expected, "both dimensions")
    of_the_batch = torch.vmap(torch.vmap(logp, in_dims=(0, 0, None)))
    one_a_sample = case.temperature[:, :1].expand(BATCH, ROWS)
    assert_bitwise_equal(
        of_the_batch(*case[:2], case.temperature[:, 0]),
        logp(case.logits, case.target, one_a_sample),
        "a temperature of the outer dimension",
    )


def test_vmap_with_lse(device: str) -> None:
    case = batch(device)

    def both(logits: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return rl_logp.fused_logp(logits, target, temperature=temperature, return_lse=True)

    expected = both(*case[:3])
    for actual, whole in zip(torch.vmap(both)(*case[:3]), expected, strict=True):
        assert_bitwise_equal(actual, whole, "vmap")


def test_the_gradient_passes_through_vmap(device: str) -> None:
    case = batch(device)
    leaf = case.logits.requires_grad_()
    through = torch.autograd.grad(torch.vmap(logp)(leaf, *case[1:3]), leaf, case.grad_logp)[0]
    plain = torch.autograd.grad(logp(leaf, *case[1:3]), leaf, case.grad_logp)[0]
    assert_bitwise_equal(through, plain, "dlogits")


def test_batched_upstream_gradients(device: str) -> None:
    case = batch(device)
    leaf = case.logits.requires_grad_()
    grads = torch.stack([case.grad_logp, -case.grad_logp, 3 * case.grad_logp])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no batching rule: torch loops, and says so
        batched = torch.autograd.grad(logp(leaf, case.target), leaf, grads, is_grads_batched=True)[
            0
        ]
    for g, dlogits in zip(grads, batched, strict=True):
        expected = torch.autograd.grad(logp(leaf, case.target), leaf, g)[0]
        assert_bitwise_equal(dlogits, expected, "dlogits")


REVERSE = (
    "fused_logp: expected torch.autograd, got a torch.func transform (grad, vjp, jacrev), which is"
    " not implemented; use torch.autograd.grad or backward()"
)
FORWARD = (
    "fused_logp: expected logits without a tangent, got a dual tensor: forward-mode"
    " differentiation is not implemented; use reverse mode"
)


@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp and lse"])
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        pytest.param(lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), REVERSE, id="grad"),
        pytest.param(lambda f, x: torch.func.vjp(f, x), REVERSE, id="vjp"),
        pytest.param(lambda f, x: torch.func.jacrev(f)(x), REVERSE, id="jacrev"),
        pytest.param(
            lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x), REVERSE, id="hessian"
        ),
        pytest.param(
            lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x.expand(2, ROWS, V)),
            REVERSE,
            id="vmap of grad",
        ),
        pytest.param(
            lambda f, x: torch.func.grad(lambda x: torch.vmap(f)(x.expand(2, ROWS, V)).sum())(x),
            REVERSE,
            id="grad of vmap",
        ),
        pytest.param(lambda f, x: torch.func.jvp(f, (x,), (x,)), FORWARD, id="jvp"),
        pytest.param(lambda f, x: torch.func.jacfwd(f)(x), FORWARD, id="jacfwd"),
    ],
)
def test_what_does_not_work_says_so(
    device: str,
    transform: Callable[[Callable[[Tensor], Tensor], Tensor], object],
    message: str,
    return_lse: bool,
) -> None:
    case = sample((ROWS, V), device=device)

    def function(logits: Tensor) -> Tensor:
        if return_lse:
            return rl_logp.fused_logp(logits, case.target, return_lse=True)[1]
        return rl_logp.fused_logp(logits, case.target)

    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        transform(function, case.logits)


@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp and lse"])
def test_a_dual_tensor_is_not_stripped_in_silence(device: str, return_lse: bool) -> None:
    case = sample((ROWS, V), device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(case.logits, torch.ones_like(case.logits))
        with pytest.raises(NotImplementedError, match=f"^{re.escape(FORWARD)}$"):
            rl_logp.fused_logp(dual, case.target, return_lse=return_lse)
        # Within a level, tensors without a tangent are welcome.
        rl_logp.fused_logp(case.logits, case.target, return_lse=return_lse)


def test_views_that_are_lazily_negated(device: str) -> None:
    """The imaginary part of a conjugate: its memory holds the values with the other sign."""
    case = sample((ROWS, V), device=device)
    lazy = torch.complex(case.logits, -case.logits).conj().imag
    assert lazy.is_neg()
    assert_bitwise_equal(logp(lazy, case.target), logp(case.logits, case.target), "negated twice")
