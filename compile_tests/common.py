"""Inputs, and one way to run the op and its backward, shared by the compiled tests."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal

OP = torch.ops.rl_logp

HAS_COMPILER = (
    any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")))
    and (Path(sysconfig.get_path("include")) / "Python.h").exists()
)
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="inductor needs a C++ compiler and Python's headers"
)
INDUCTOR = pytest.param("inductor", marks=needs_compiler)
BACKENDS = ["aot_eager", INDUCTOR]


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled, and no count of recompilations, comes from elsewhere or an earlier run.

    Torch keeps graphs on disk, by a key that knows nothing of how the op is registered: they would
    hide what a change of it does. Only compiled C++ is kept, by its text.
    """
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield
    torch._dynamo.reset()


def inputs(
    *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """logits of this shape that require grad, and targets of which about one in five is ignored."""
    logits = torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)
    rows, columns = shape[:-1], shape[-1]
    target = torch.randint(0, columns, rows, device=device)
    return logits, target.where(torch.rand(rows, device=device) > 0.2, -100)


def gradients(outputs: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the outputs, with an upstream gradient that differs from row to row."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [
        torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        for out in outputs
    ]
    return torch.autograd.grad(outputs, inputs, upstream)


def assert_same_bits(actual: Any, expected: Any, what: str) -> None:
    """Bitwise equality of tensors, or of tuples of tensors."""
    if isinstance(expected, Tensor):
        return assert_bitwise_equal(actual, expected, what)
    assert len(actual) == len(expected), what
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise_equal(a, e, f"{what}[{index}]")


def assert_compiled_is_eager(
    function: Callable, *args: Any, backend: str, mode: Optional[str] = None, **kwargs: Any
) -> Callable:
    """The function compiled whole has eager's bits, forward and backward. Returns it compiled."""
    compiled = torch.compile(function, backend=backend, mode=mode, fullgraph=True)
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    actual, expected = compiled(*args, **kwargs), function(*args, **kwargs)
    assert_same_bits(actual, expected, "outputs")
    if wanted:
        assert_same_bits(gradients(actual, *wanted), gradients(expected, *wanted), "gradients")
    return compiled


def assert_rows_are_eager(
    compiled: Callable, function: Callable, rows: int, columns: int, device: str
) -> None:
    """Compares one call and its backward with eager. The rows are marked as what varies."""
    logits, target = inputs(rows, columns, device=device)
    if rows > 1:  # torch makes graphs of their own for sizes 0 and 1, and refuses to mark them
        torch._dynamo.mark_dynamic(logits, 0)
        torch._dynamo.mark_dynamic(target, 0)
    actual, expected = compiled(logits, target), function(logits, target)
    assert_same_bits(actual, expected, f"outputs for {rows} rows")
    actual, expected = gradients(actual, logits), gradients(expected, logits)
    assert_same_bits(actual, expected, f"gradient for {rows} rows")


class LanguageModel(torch.nn.Module):
    """The smallest model that ends as a trainer's does: hidden states, a head, the op.

    No biases: the compiler adds up their gradients in an order of its own.
    """

    def __init__(self, vocab_size: int = 64, width: int = 32, **options: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, width)
        self.body: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(width, width, bias=False), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(width, vocab_size, bias=False)
        self.logp = rl_logp.FusedLogp(**options)

    def forward(self, tokens: Tensor) -> Any:
        """The log-probability of each token but the first, from the tokens before it."""
        logits = self.head(self.body(self.embedding(tokens)))
        return self.logp(logits[:, :-1], tokens[:, 1:])
