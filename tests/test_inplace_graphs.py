"""inplace_backward=True in a graph: all other gradients are what they were, or what has saved the
overwritten logits raises. None is wrong in silence."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import rl_logp
from rl_logp.testing import assert_bitwise_equal

OVERWRITTEN = "has been modified"
SECOND = (
    "fused_logp: expected one backward where inplace_backward=True, got a second one: the logits"
    " hold the gradient of the first"
)

Score = Callable[[Tensor, Tensor], Tensor]


def logp_and_bonus(logits: Tensor, target: Tensor, inplace_backward: bool = False) -> Tensor:
    logp, entropy = rl_logp.fused_logp_entropy(logits, target, inplace_backward=inplace_backward)
    return logp + 0.5 * entropy


class Head:
    """Hidden states, a weight and targets: what logits are computed from, and what is trained.

    ``of_rows`` is the operator: from logits and targets to what each row adds to the loss.
    """

    def __init__(self, device: str, of_rows: Callable[..., Tensor]) -> None:
        self.of_rows = of_rows
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(6, 4, generator=generator).to(device).requires_grad_()
        self.weight = torch.randn(4, 33, generator=generator).to(device).requires_grad_()
        self.target = torch.tensor([3, 0, -100, 32, 7, 7], device=device)

    def logits(self) -> Tensor:
        return self.hidden @ self.weight

    def in_place(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.of_rows(logits, target, inplace_backward=True)

    def inplace_sum(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.in_place(logits, target).sum()

    def new_sum(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.of_rows(logits, target).sum()

    def gradients(self, loss: Callable[[Score], Tensor], score: Score) -> tuple[Tensor, ...]:
        self.hidden.grad = self.weight.grad = None
        loss(score).backward()
        assert self.hidden.grad is not None
        assert self.weight.grad is not None
        return self.hidden.grad, self.weight.grad

    def assert_right(self, loss: Callable[[Score], Tensor]) -> None:
        """Parameters have the bits of the gradients that they have out of place."""
        expected = self.gradients(loss, self.new_sum)
        for a, e in zip(self.gradients(loss, self.inplace_sum), expected, strict=True):
            assert_bitwise_equal(a, e, "a parameter's gradient")

    def assert_raises(self, loss: Callable[[Score], Tensor], message: str = OVERWRITTEN) -> None:
        self.gradients(loss, self.new_sum)
        with pytest.raises(RuntimeError, match=re.escape(message)):
            self.gradients(loss, self.inplace_sum)


@pytest.fixture(
    params=[rl_logp.fused_logp, logp_and_bonus], ids=["fused_logp", "fused_logp_entropy"]
)
def head(device: str, request: pytest.FixtureRequest) -> Head:
    return Head(device, request.param)


def test_what_lies_before_gets_the_gradient_it_had(head: Head) -> None:
    head.assert_right(lambda score: score(head.logits(), head.target))
    head.assert_right(lambda score: score(3 * torch.tanh(head.logits() / 3), head.target))
    head.assert_right(lambda score: score((head.logits() + 1).bfloat16(), head.target))


SAVES_ITS_INPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: x * x,
    "logsumexp": lambda x: x.logsumexp(-1),
    "linear layer": lambda x: x @ x.detach().T,
    "view of it": lambda x: x[:, :3] * x[:, 3:6],
    "other columns of it": lambda x: x[:2].sin(),
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "another call": lambda x: rl_logp.fused_logp(x, torch.zeros_like(x[:, 0]).long()),
    "an entropy": rl_logp.fused_entropy,
}


@pytest.mark.parametrize("name", SAVES_ITS_INPUT)
def test_what_has_saved_the_logits_raises_once_they_are_overwritten(head: Head, name: str) -> None:
    """Autograd goes backwards: what was called first finds the logits overwritten."""

    def before(score: Score) -> Tensor:
        logits = head.logits()
        other = SAVES_ITS_INPUT[name](logits).sum()
        return other + score(logits, head.target)

    def after(score: Score) -> Tensor:
        logits = head.logits()
        logp = score(logits, head.target)
        return logp + SAVES_ITS_INPUT[name](logits).sum()

    head.assert_raises(before)
    head.assert_right(after)


@pytest.mark.parametrize("name", SAVES_ITS_INPUT)
@pytest.mark.parametrize("saved", ["before", "after"])
def test_so_it_does_in_a_backward_of_its_own(head: Head, name: str, saved: str) -> None:
    def losses() -> tuple[Tensor, Tensor]:
        logits = head.logits()
        other = SAVES_ITS_INPUT[name](logits).sum() if saved == "before" else None
        logp = head.inplace_sum(logits, head.target)
        return logp, SAVES_ITS_INPUT[name](logits).sum() if other is None else other

    logp, other = losses()
    logp.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        other.backward()
    logp, other = losses()
    other.backward(retain_graph=True)
    head.hidden.grad = head.weight.grad = None
    logp.backward()  # and the other way round, the logits are what they were
    expected = head.hidden.grad, head.weight.grad
    actual = head.gradients(lambda score: score(head.logits(), head.target), head.new_sum)
    for a, e in zip(actual, expected, strict=True):
        assert e is not None
        assert_bitwise_equal(a, e, "a parameter's gradient")


@pytest.mark.parametrize("function", [torch.tanh, torch.exp, torch.sigmoid])
def test_what_has_saved_the_logits_as_its_result_raises(
    head: Head, function: Callable[[Tensor], Tensor]
) -> None:
    head.assert_raises(lambda score: score(function(head.logits()), head.target))


@pytest.mark.parametrize("first", ["the op", "the other"])
def test_logits_that_another_uses_without_saving_them(head: Head, first: str) -> None:
    """Autograd adds the two gradients, one of which is the logits' memory."""

    def loss(score: Score) -> Tensor:
        logits = head.logits()
        if first == "the op":
            return score(logits, head.target) + (2 * logits).sum() + logits[:, 4].sum()
        other = (2 * logits).sum() + logits[:, 4].sum()
        return other + score(logits, head.target)

    head.assert_right(loss)


def test_two_calls_on_the_same_logits(head: Head) -> None:
    def loss(score: Score) -> Tensor:
        logits = head.logits()
        return score(logits, head.target) + score(logits, head.target.flip(0))

    head.assert_raises(loss)


def test_rows_that_are_split_over_calls(head: Head) -> None:
    """They share a version: one call of all rows is what works."""
    head.assert_raises(
        lambda score: sum(map(score, head.logits().split(3), head.target.split(3)), torch.zeros(()))
    )


def test_one_logp_in_several_losses(head: Head) -> None:
    def loss(score: Score) -> Tensor:
        logp = score(head.logits(), head.target)
        return logp.square() + 3 * logp + logp.exp()

    head.assert_right(loss)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> None:
        return None


def test_without_an_upstream_gradient_nothing_is_overwritten(head: Head) -> None:
    logits = head.logits()
    before = logits.detach().clone()
    logp = head.in_place(logits, head.target)
    without = NoGradient.apply(logp)
    without.sum().backward(retain_graph=True)
    assert_bitwise_equal(logits.detach(), before, "logits")
    logp.sum().backward()


def test_a_second_backward(head: Head) -> None:
    logp = head.in_place(head.logits(), head.target)
    logp[0].backward(retain_graph=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"^{re.escape(SECOND)}$"):
            logp[1].backward(retain_graph=True)
    loss = head.inplace_sum(head.logits(), head.target)
    loss.backward()
    with pytest.raises(RuntimeError, match="second"):
        loss.backward()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["logp first", "entropy first"])
def test_a_backward_each_for_logp_and_entropy(device: str, order: tuple[int, int]) -> None:
    """They have one gradient: it is in the logits once, whole."""
    head = Head(device, logp_and_bonus)
    outputs = rl_logp.fused_logp_entropy(head.logits(), head.target, inplace_backward=True)
    first, second = (outputs[index].sum() for index in order)
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=f"^{re.escape(SECOND)}$"):
        second.backward()


@pytest.mark.parametrize("index", [0, 1], ids=["logp", "entropy"])
def test_one_of_logp_and_entropy_alone(device: str, index: int) -> None:
    def only(logits: Tensor, target: Tensor, **options: bool) -> Tensor:
        return rl_logp.fused_logp_entropy(logits, target, **options)[index]

    head = Head(device, only)
    head.assert_right(lambda score: score(head.logits(), head.target))


def test_a_graph_of_the_gradient(head: Head) -> None:
    loss = head.inplace_sum(head.logits(), head.target)
    message = "expected a backward without create_graph=True where inplace_backward=True, got one"
    with pytest.raises(RuntimeError, match=f"^fused_logp: {message} with it$"):
        torch.autograd.grad(loss, head.hidden, create_graph=True)


def test_batched_upstream_gradients(head: Head) -> None:
    logits = head.logits()
    logp = head.in_place(logits, head.target)
    # Of torch, on a CPU and on a GPU.
    message = "Batching rule not implemented|invalid gradient at index 0"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(logp, logits, logp.new_ones(3, *logp.shape), is_grads_batched=True)


@pytest.mark.parametrize("view", ["slice", "padding", "rows", "permuted", "one of a split"])
def test_views_of_what_was_computed(head: Head, view: str) -> None:
    def loss(score: Score) -> Tensor:
        logits = head.logits()
        if view == "permuted":
            logits = logits.view(2, 3, 33).transpose(0, 1)
            return score(logits, head.target.view(2, 3).T)
        if view == "one of a split":
            return score(logits.split(3)[0], head.target[:3]) + logits[:3].sum()
        index: Any = {
            "slice": (slice(None, -1), slice(None)),
            "padding": (slice(None), slice(32)),
            "rows": (slice(None, None, 2), slice(None)),
        }[view]
        others = logits.sum()  # of the base, which it does not save
        return score(logits[index], head.target[index[0]]) + others

    head.assert_right(loss)


def test_the_gradient_that_a_hook_keeps(head: Head) -> None:
    """It is the logits' memory, which nothing writes again."""
    logits = head.logits()
    kept: list[Tensor] = []
    logits.register_hook(kept.append)
    (head.inplace_sum(logits, head.target) + (2 * logits).sum()).backward()
    (expected,) = kept
    again = head.logits()
    (new,) = torch.autograd.grad(head.new_sum(again, head.target) + (2 * again).sum(), again)
    assert_bitwise_equal(expected, new, "the sum of both gradients")
    logits = head.logits()
    logits.register_hook(lambda grad: 2 * grad)
    logits.retain_grad()
    head.inplace_sum(logits, head.target).backward()
    assert logits.grad is not None
    assert_bitwise_equal(logits.grad, 2 * logits.detach(), "the gradient that is retained")
    assert logits.grad.data_ptr() != logits.data_ptr()


def test_a_leaf_that_takes_over_the_gradient(head: Head) -> None:
    """clone() hands its gradient through, and .grad keeps the tensor that comes."""
    leaf = head.logits().detach().requires_grad_()
    before = leaf.detach().clone()
    logits = leaf.clone()
    for _ in range(2):
        head.inplace_sum(logits, head.target).backward()
        logits = leaf.clone()
    assert leaf.grad is not None
    expected = torch.autograd.grad(head.new_sum(leaf, head.target), leaf)[0]
    assert_bitwise_equal(leaf.grad, 2 * expected, "two gradients")
    assert_bitwise_equal(leaf.detach(), before, "the leaf")


def test_a_leaf_whose_gradient_is_the_memory_of_the_logits(head: Head) -> None:
    leaf = head.logits().detach().requires_grad_()
    logits = leaf + 1
    head.inplace_sum(logits, head.target).backward()
    assert leaf.grad is not None
    expected = torch.autograd.grad(head.new_sum(leaf + 1, head.target), leaf)[0]
    assert_bitwise_equal(leaf.grad, expected, "the gradient")
    assert leaf.grad.data_ptr() == logits.data_ptr()  # as docs/memory.md says


# --- hooks, checkpoints, transforms ---------------------------------------------------------------
def with_another(head: Head, score: Score) -> Tensor:
    def block(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight
        return logits.square().sum() + score(logits, head.target)

    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return block(head.hidden, head.weight)


def test_hooks_that_hand_out_one_tensor_to_all(head: Head) -> None:
    """Torch counts no versions of what hooks keep: the gradient is a new tensor there."""
    head.assert_right(lambda score: with_another(head, score))


def test_hooks_that_offload(head: Head) -> None:
    def loss(score: Score) -> Tensor:
        with save_on_cpu():
            logits = head.logits()
            return logits.square().sum() + score(logits, head.target)

    head.assert_right(loss)
    with save_on_cpu():
        logits = head.logits()
        before = logits.detach().clone()
        logp = head.inplace_sum(logits, head.target)
    for _ in range(2):  # nothing is overwritten, so a graph may be retained
        logp.backward(retain_graph=True)
    assert_bitwise_equal(logits.detach(), before, "logits")


def test_a_checkpoint_with_another_that_saves_the_logits(head: Head) -> None:
    """Both are handed the tensor that was computed again, and neither sees its version."""

    def loss(score: Score, reentrant: bool) -> Tensor:
        def block(hidden: Tensor, weight: Tensor) -> Tensor:
            logits = hidden @ weight
            return logits.square().sum() + score(logits, head.target)

        out = checkpoint(block, head.hidden, head.weight, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return out

    head.assert_right(lambda score: loss(score, reentrant=False))
    head.assert_raises(lambda score: loss(score, reentrant=True))  # runs without hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint(head: Head, reentrant: bool) -> None:
    def loss(score: Score) -> Tensor:
        out = checkpoint(
            lambda hidden, weight: score(hidden @ weight, head.target),
            head.hidden,
            head.weight,
            use_reentrant=reentrant,
        )
        assert isinstance(out, Tensor)
        return out

    head.assert_right(loss)


def test_logits_that_are_lazily_negated(head: Head) -> None:
    """Their memory holds the values with the other sign: the gradient is a new tensor."""
    negated: Callable[[Tensor], Tensor] = torch._neg_view  # pyright: ignore[reportPrivateImportUsage]
    head.assert_right(lambda score: score(negated(head.logits()), head.target))
