"""What the op does not do raises, and says so: never a wrong or silently zero derivative."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

import rl_logp
from compile_tests.common import BACKENDS, OP

LOGITS = torch.randn(5, 11)
TARGET = torch.tensor([3, 0, -100, 10, 7])

NO_TORCH_FUNC = "got a torch.func transform (grad, vjp, jacrev), which is not implemented"
NO_TANGENT = "got a dual tensor: forward-mode differentiation is not implemented"
NO_SECOND = "fused_logp: expected to be differentiated once, got a second derivative"


def _logp(logits: Tensor) -> Tensor:
    return rl_logp.fused_logp(logits, TARGET)


def _logp_of_the_pair(logits: Tensor) -> Tensor:
    return rl_logp.fused_logp(logits, TARGET, return_lse=True)[0]


def _lse(logits: Tensor) -> Tensor:
    return rl_logp.fused_logp(logits, TARGET, return_lse=True)[1]


def _of_shards(logits: Tensor) -> Tensor:
    return rl_logp.vocab_parallel_logp(logits, TARGET)


FUNCTIONS = pytest.mark.parametrize("function", [_logp, _logp_of_the_pair, _lse, _of_shards])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture
def two_processes() -> Iterator[None]:
    """A group of which the other process is not there, and what it would send is not looked at."""
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def _raises(message: str, call: Callable, compiled: bool, logits: Tensor = LOGITS) -> None:
    """The call raises NotImplementedError; compiled whole, the compiler's own error quotes it."""
    expected = NotImplementedError
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
        expected = TorchDynamoException
    with pytest.raises(expected, match=re.escape(message)):
        call(logits)


TORCH_FUNC: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones_like(f(x))),
    "jacrev": lambda f: torch.func.jacrev(f),
    "hessian": lambda f: torch.func.jacrev(torch.func.jacrev(lambda x: f(x).sum())),
    "grad-of-vmap": lambda f: torch.func.grad(
        lambda x: torch.vmap(OP.fused_logp)(x, TARGET).sum() + f(x).sum()
    ),
    "vmap-of-grad": lambda f: lambda x: torch.vmap(torch.func.grad(OP.fused_logp))(x, TARGET),
}


@COMPILED
@FUNCTIONS
@pytest.mark.parametrize("transform", TORCH_FUNC)
def test_torch_func(function: Callable, transform: str, compiled: bool):
    _raises(NO_TORCH_FUNC, TORCH_FUNC[transform](function), compiled)


FORWARD_MODE: dict[str, Callable[[Callable], Callable]] = {
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f: torch.func.jacfwd(f),
}


@COMPILED
@FUNCTIONS
@pytest.mark.parametrize("transform", FORWARD_MODE)
def test_forward_mode(function: Callable, transform: str, compiled: bool):
    _raises(NO_TANGENT, FORWARD_MODE[transform](function), compiled)


@COMPILED
@FUNCTIONS
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors(function: Callable, requires_grad: bool, compiled: bool):
    def f(logits: Tensor) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(logits, torch.ones_like(logits))
            return forward_ad.unpack_dual(function(dual)).tangent

    _raises(NO_TANGENT, f, compiled, LOGITS.clone().requires_grad_(requires_grad))


@COMPILED
@pytest.mark.parametrize("batched", ["logits", "target", "temperature"])
def test_vmap_where_several_processes_share_the_vocabulary(
    batched: str, compiled: bool, two_processes: None
):
    """It would gather the states sample by sample, and use them before they are there."""

    def f(logits: Tensor) -> Tensor:
        arguments = {"logits": logits, "target": TARGET, "temperature": torch.ones(5)}
        arguments[batched] = torch.stack([arguments[batched]] * 3)

        def score(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
            return rl_logp.vocab_parallel_logp(
                logits,
                target,
                group=dist.group.WORLD,
                vocab_start=0,
                vocab_size=22,
                temperature=temperature,
            )

        in_dims = tuple(0 if name == batched else None for name in arguments)
        return torch.vmap(score, in_dims)(*arguments.values())

    _raises("vocab_parallel_logp: expected no vmap where several processes share", f, compiled)


@FUNCTIONS
def test_linearize(function: Callable):
    _raises(NO_TANGENT, lambda x: torch.func.linearize(function, x), compiled=False)


@FUNCTIONS
def test_a_second_derivative_in_eager(function: Callable):
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(logits).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        grad.square().sum().backward()
    with pytest.raises(RuntimeError, match=NO_SECOND):
        torch.autograd.functional.hessian(lambda x: function(x).sum(), LOGITS)


@FUNCTIONS
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_of_compiled_code(function: Callable, backend: str):
    """Torch refuses it of any compiled function, before the op is asked."""
    logits = LOGITS.clone().requires_grad_()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(logits).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.square().sum().backward()


@FUNCTIONS
def test_a_graph_of_the_gradient_that_nothing_differentiates_is_fine(function: Callable):
    logits = LOGITS.clone().requires_grad_()
    (kept,) = torch.autograd.grad(function(logits).sum(), logits, create_graph=True)
    (plain,) = torch.autograd.grad(function(logits).sum(), logits)
    assert torch.equal(kept, plain)


@FUNCTIONS
def test_code_that_may_break_its_graph_raises_as_eager_does(function: Callable):
    with pytest.raises(NotImplementedError, match=re.escape(NO_TORCH_FUNC)):
        torch.compile(TORCH_FUNC["grad"](function), backend="aot_eager")(LOGITS)


@COMPILED
def test_a_temperature_that_requires_grad(compiled: bool):
    def f(logits: Tensor, temperature: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, TARGET, temperature=temperature)

    call = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    expected = TorchDynamoException if compiled else ValueError
    with pytest.raises(expected, match="a temperature that does not require grad"):
        call(LOGITS, torch.tensor(0.7, requires_grad=True))


@COMPILED
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_torch_func_on_the_temperature(transform: Callable, compiled: bool):
    def f(logits: Tensor) -> Tensor:
        return transform(
            lambda temperature: rl_logp.fused_logp(logits, TARGET, temperature=temperature).sum()
        )(torch.tensor(0.7))

    _raises("is not implemented", f, compiled)
