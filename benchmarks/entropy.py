"""The entropy beside the log-probability: ours, what TRL and verl call, and plain torch.

A provider's function returns the two as one tensor ``[2, N]``, so that the harness treats it like
any other output.
"""

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import rl_logp
from benchmarks.providers import PROVIDERS as LOGP_PROVIDERS
from benchmarks.providers import Function, Provider
from benchmarks.workloads import Inputs
from rl_logp import _library

Pair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

ORACLE_ROWS = 256


def _stacked(pair: Pair) -> Function:
    return lambda logits, target: torch.stack([of.float() for of in pair(logits, target)])


def _file_of(package: str, *path: str) -> Path:
    """A file of an installed package, most of whose imports its one function does not need."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    file = Path(found.submodule_search_locations[0]).joinpath(*path)
    if not file.is_file():
        raise ImportError(f"{package} has no {file}")
    return file


def _rl_logp(_varying: bool) -> Function:
    return _stacked(
        lambda logits, target: rl_logp.fused_logp_entropy(logits, target, require_kernel=True)
    )


def _chunked(_varying: bool) -> Function:
    def pair(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with _library.hidden(logits.device.type):
            return _Reentered.apply(logits, target)  # pyright: ignore[reportReturnType]

    return _stacked(pair)


class _Reentered(torch.autograd.Function):
    """The fallback's pair, whose backward hides the kernels as well."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.ops.rl_logp.fused_logp_entropy_forward(logits, target, None)
        logp, entropy, lse, mean = found
        ctx.save_for_backward(logits, target, lse, mean)
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        logits, target, lse, mean = ctx.saved_tensors
        with _library.hidden(logits.device.type):
            dlogits = torch.ops.rl_logp.fused_logp_entropy_backward(
                grads[0], grads[1], None, logits, target, None, lse, mean, 0, logits.shape[-1]
            )
        return dlogits, None


def _trl(_varying: bool) -> Function:
    file = _file_of("trl", "kernels", "logprob_entropy.py")
    spec = importlib.util.spec_from_file_location("trl_logprob_entropy", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"trl has no {file}")
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _stacked(module.selective_log_softmax_and_entropy)


def _verl(_varying: bool) -> Function:
    """Its defaults: flash-attn's cross-entropy, and its own entropy compiled."""
    file = _file_of("verl", "utils", "torch_functional.py")
    names = {"torch": torch}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "entropy_from_logits":
            exec(compile(ast.Module([node], []), str(file), "exec"), names)
    if "entropy_from_logits" not in names:
        raise ImportError(f"verl has no entropy_from_logits in {file}")
    torch.compiler.reset()
    entropy = torch.compile(names["entropy_from_logits"], dynamic=True)  # pyright: ignore[reportCallIssue,reportArgumentType]
    loss = LOGP_PROVIDERS["flash_attn"].load(False)
    return _stacked(lambda logits, target: (-loss(logits, target), entropy(logits)))


def _textbook(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    logp = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return logp, -(log_p.exp() * log_p).sum(-1)


def _compiled(_varying: bool) -> Function:
    torch.compiler.reset()
    return _stacked(torch.compile(_textbook, fullgraph=True, dynamic=False))


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("rl_logp", _rl_logp, sign=1, package="rl_logp"),
        Provider("trl", _trl, sign=1, package="trl"),
        Provider("verl", _verl, sign=1, package="verl", bytes_per_element=6),
        Provider("torch_compile", _compiled, sign=1, bytes_per_element=8),
        Provider("torch", lambda _: _stacked(_textbook), sign=1, bytes_per_element=20),
        Provider("chunked", _chunked, sign=1),
    )
}


def with_gradients(inputs: Inputs) -> Inputs:
    """The same with an upstream gradient for each of the pair."""
    of_entropy = inputs.grad_logp.flip(0)
    return replace(inputs, grad_logp=torch.stack((inputs.grad_logp, of_entropy)))


def largest_error(provider: Provider, inputs: Inputs) -> float:
    """The largest error of an entropy, in nats, against fp64, over some rows."""
    logits, target = inputs.logits[:ORACLE_ROWS], inputs.target[:ORACLE_ROWS]
    with torch.no_grad():
        actual = provider.load(False)(logits, target)[1].double()
    log_p = torch.log_softmax(logits.double(), -1)
    return (actual + (log_p.exp() * log_p).sum(-1)).abs().max().item()
