"""inplace_backward=True in compiled code: the gradient is a new tensor there, with eager's bits.

AOTAutograd hands saved logits to the backward graph as an input. An operator that mutates them
costs a copy where they were computed in the graph, and where they are an input of the forward graph
it overwrites what the caller still holds, uncounted. So compiled code has the functional operator.
Logits that compiled code returns, or that it is given to save, are eager's to overwrite.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import rl_logp
from compile_tests.common import (
    BACKENDS,
    OP,
    LanguageModel,
    assert_same_bits,
    gradients,
    inputs,
)
from compile_tests.graphs import Graphs, calls, capture, render

BACKEND = pytest.mark.parametrize("backend", BACKENDS)
OVERWRITTEN = "has been modified"


class Score(NamedTuple):
    """An operator, and its gradient in the logits' memory and in its own."""

    inplace: Callable[[Tensor, Tensor], Tensor]
    new: Callable[[Tensor, Tensor], Tensor]
    backward: torch._ops.OpOverload

    @staticmethod
    def of(function: Callable[..., Tensor], backward: torch._ops.OpOverload) -> "Score":
        in_place = partial(function, temperature=0.7, inplace_backward=True)
        return Score(in_place, partial(function, temperature=0.7), backward)


def logp_and_bonus(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Half of an entropy is exact, so the compiler may fuse the sum as it likes."""
    logp, entropy = rl_logp.fused_logp_entropy(logits, target, **options)
    return logp + 0.5 * entropy


SCORES = {
    "fused_logp": Score.of(rl_logp.fused_logp, OP.fused_logp_backward.default),
    "fused_logp_entropy": Score.of(logp_and_bonus, OP.fused_logp_entropy_backward.default),
}
inplace, new = SCORES["fused_logp"][:2]
every_score = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)


def head(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    _, target = inputs(5, 33, device=device)
    hidden = torch.randn(5, 8, device=device, requires_grad=True)
    return hidden, torch.randn(8, 33, device=device, requires_grad=True), target


def test_the_graphs_are_those_of_a_new_gradient():
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target, inplace_backward=True)

    assert_expected_inline(
        render(capture(f, *inputs(4, 7))),
        """\
dynamo:
    logits: bf16[4, 7]
    target: i64[4]
    fused_logp: f32[4] = rl_logp.fused_logp(logits, target, None, True)
    return fused_logp
forward:
    logits: bf16[4, 7]
    target: i64[4]
    fused_logp_forward = rl_logp.fused_logp_forward.default(logits, target, None, False, True)
    logp: f32[4] = fused_logp_forward[0]
    lse: f64[4] = fused_logp_forward[1]
    return logp
    save logits, lse, target
backward:
    grad_logp: f32[4]
    logits: bf16[4, 7]
    lse: f64[4]
    target: i64[4]
    fused_logp_backward: bf16[4, 7] = rl_logp.fused_logp_backward.default(
        grad_logp, None, logits, target, None, lse, 0, 7)
    grad_logits = fused_logp_backward""",
    )


@pytest.mark.parametrize("min_cut", [False, True], ids=["default partition", "min cut"])
@pytest.mark.parametrize("computed", [False, True], ids=["an input", "computed"])
@every_score
def test_nothing_is_mutated_or_copied(min_cut: bool, computed: bool, score: Score):
    graphs = Graphs(min_cut=min_cut)
    hidden, weight, target = head()
    logits = (hidden @ weight).detach().requires_grad_()

    def f(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return score.inplace(hidden @ weight if computed else logits, target)

    torch.compile(f, backend=graphs, fullgraph=True)(hidden, weight, target).sum().backward()
    (backward,) = graphs.backward
    assert calls(backward, score.backward) == 1
    operators = {str(node.target) for node in backward.graph.nodes}
    assert not [name for name in operators if "backward_" in name or "functionalized" in name]
    assert "aten.clone.default" not in operators


@BACKEND
@every_score
def test_of_logits_that_are_computed(device: str, backend: str, score: Score):
    hidden, weight, target = head(device)

    def f(score: Callable, hidden: Tensor, weight: Tensor) -> Tensor:
        return score(hidden @ weight, target)

    actual = torch.compile(f, backend=backend, fullgraph=True)(score.inplace, hidden, weight)
    expected = f(score.new, hidden, weight)
    assert_same_bits(actual, expected, "results")
    grads = gradients(actual, hidden, weight)
    assert_same_bits(grads, gradients(expected, hidden, weight), "gradients")
    in_eager = gradients(f(score.inplace, hidden, weight), hidden, weight)
    assert_same_bits(grads, in_eager, "gradients in eager, in place")


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "shifted": lambda x: x[:, :-1],
    "padded vocabulary": lambda x: x[..., :90],
    "expanded": lambda x: x[:1].expand(3, -1, -1),
    "columns not adjacent": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@BACKEND
@pytest.mark.parametrize("leaf", [False, True], ids=["computed", "leaf"])
@pytest.mark.parametrize("view", VIEWS)
@every_score
def test_of_an_input_that_the_caller_holds(
    device: str, backend: str, leaf: bool, view: str, score: Score
):
    """What eager refuses has the right gradient too, since nothing is overwritten."""
    logits, _ = inputs(3, 4, 97, device=device)
    if not leaf:
        logits = logits * 2
    before, version = logits.detach().clone(), logits._version
    _, target = inputs(*VIEWS[view](logits).shape[:-1], 90, device=device)

    def f(score: Callable, logits: Tensor) -> Tensor:
        return score(VIEWS[view](logits), target)

    actual = torch.compile(f, backend=backend, fullgraph=True)(score.inplace, logits)
    expected = f(score.new, logits)
    assert_same_bits(actual, expected, "results")
    assert_same_bits(gradients(actual, logits), gradients(expected, logits), "dlogits")
    assert_same_bits(logits.detach(), before, "the caller's logits")
    assert logits._version == version


@BACKEND
@every_score
def test_of_logits_that_others_use(device: str, backend: str, score: Score):
    """In the graph, and outside of it: eager would raise."""
    hidden, weight, target = head(device)

    def f(score: Callable, logits: Tensor) -> Tensor:
        return logits.sin().sum(-1) + score(logits, target) + score(logits, target.flip(0))

    def step(function: Callable, score: Callable) -> tuple[Tensor, ...]:
        logits = hidden @ weight
        outputs = logits * logits, function(score, logits)
        return gradients(outputs, hidden, weight)

    compiled = torch.compile(f, backend=backend, fullgraph=True)
    assert_same_bits(step(compiled, score.inplace), step(compiled, score.new), "gradients")
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        step(f, score.inplace)


@every_score
def test_run_uncompiled_by_dynamo_it_is_eager(score: Score):
    """backend="eager" runs the operators one by one, with autograd: in place, and refused."""
    logits, target = inputs(5, 97)
    compiled = torch.compile(score.inplace, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="got a leaf that requires grad"):
        compiled(logits, target)
    computed = logits * 2
    (dlogits,) = gradients(compiled(computed, target), computed)
    assert dlogits.data_ptr() == computed.data_ptr()
    again = logits * 2
    assert_same_bits((dlogits,), gradients(score.new(again, target), again), "dlogits")


SAVES_ITS_RESULT = {"tanh": torch.tanh, "exp": torch.exp, "softmax": lambda x: x.softmax(-1)}
OTHERS = {"linear": lambda x: x, "capped": lambda x: 3 * torch.tanh(x / 3), "bf16": Tensor.bfloat16}


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize("name", [*SAVES_ITS_RESULT, *OTHERS])
def test_of_logits_that_compiled_code_returns(device: str, backend: str, name: str):
    """A compiled model and a loss in eager, which is how the gradient is in place."""
    hidden, weight, target = head(device)
    last = {**SAVES_ITS_RESULT, **OTHERS}[name]
    model = torch.compile(lambda h, w: last(h @ w), backend=backend, fullgraph=True)
    expected = gradients(new(model(hidden, weight), target), hidden, weight)
    logits = model(hidden, weight)
    logp = inplace(logits, target)
    if name in SAVES_ITS_RESULT:
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            gradients(logp, hidden, weight)
        return
    assert_same_bits(gradients(logp, hidden, weight), expected, "gradients")
    again = model(hidden, weight)
    assert_same_bits((logits.detach(),), gradients(new(again, target), again), "the logits")


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize("called", ["before", "after"])
def test_of_logits_that_compiled_code_has_saved(device: str, backend: str, called: str):
    hidden, weight, target = head(device)
    other = torch.compile(lambda x: x.sin() * x, backend=backend, fullgraph=True)

    def step(score: Callable) -> tuple[Tensor, ...]:
        logits = hidden @ weight
        first = other(logits) if called == "before" else None
        logp = score(logits, target)
        return gradients((other(logits) if first is None else first, logp), hidden, weight)

    expected = step(new)
    if called == "before":
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            step(inplace)
    else:
        assert_same_bits(step(inplace), expected, "gradients")


@BACKEND
def test_of_a_model(backend: str):
    tokens = torch.randint(0, 64, (3, 9))
    model = LanguageModel()
    parameters = tuple(model.parameters())
    expected = gradients(model(tokens), *parameters)
    model.logp.inplace_backward = True
    assert_same_bits(gradients(model(tokens), *parameters), expected, "gradients in eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same_bits(gradients(compiled(tokens), *parameters), expected, "gradients")


@BACKEND
def test_of_a_checkpoint(backend: str):
    hidden, weight, target = head()

    def f(score: Callable, hidden: Tensor, weight: Tensor) -> Any:
        def block(hidden: Tensor, weight: Tensor) -> Tensor:
            logits = hidden @ weight
            return logits.square().sum(-1) + score(logits, target)

        return checkpoint(block, hidden, weight, use_reentrant=False)

    expected = gradients(f(new, hidden, weight), hidden, weight)
    actual = torch.compile(f, backend=backend, fullgraph=True)(inplace, hidden, weight)
    grads = gradients(actual, hidden, weight)
    for a, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


@BACKEND
@every_score
def test_of_a_second_backward(backend: str, score: Score):
    """Torch refuses to retain some compiled graphs, and says so; any other answer is right."""
    logits, target = inputs(5, 97)
    logp = torch.compile(score.inplace, backend=backend, fullgraph=True)(logits, target)
    first = torch.autograd.grad(logp.sum(), logits, retain_graph=True)
    assert_same_bits(torch.autograd.grad(logp.sum(), logits), first, "the second gradient")


@BACKEND
@every_score
def test_of_compiled_autograd(backend: str, score: Score):
    """It traces the backward of a forward in eager: a new gradient, and the logits are kept."""
    hidden, weight, target = head()
    score.new(hidden @ weight, target).sum().backward()
    expected, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None
    logits = hidden @ weight
    before = logits.detach().clone()
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        score.inplace(logits, target).sum().backward()
    assert_same_bits((hidden.grad, weight.grad), expected, "gradients")
    assert_same_bits(logits.detach(), before, "logits")


class Scores(torch.nn.Module):
    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return self.score.inplace(hidden @ weight, target)


@pytest.mark.parametrize("decomposed", [False, True])
@every_score
def test_of_an_exported_program(decomposed: bool, score: Score, tmp_path: Path):
    """It holds the option, and runs uncompiled: in place, as eager does."""
    exported = torch.export.export(Scores(score), head())
    torch.export.save(exported.run_decompositions() if decomposed else exported, tmp_path / "m.pt2")
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    hidden, weight, target = head()
    actual, expected = loaded(hidden, weight, target), score.new(hidden @ weight, target)
    assert_same_bits(actual, expected, "results")
    expected = gradients(expected, hidden, weight)
    assert_same_bits(gradients(actual, hidden, weight), expected, "gradients")
    loss = loaded(hidden, weight, target).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="got a second one"):
        loss.backward()
