"""Who is measured: each a function (logits [N, V], target [N]) -> logp or loss [N], with autograd.

Peers are loaded lazily. One that cannot be imported or run becomes a row with an ``error``.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

import rl_logp
from benchmarks.baselines import Chunked, Fp32Vjp, selected_logp

Function = Callable[[Tensor, Tensor], Tensor]


def errors() -> tuple[type[Exception], ...]:
    """What importing, compiling or launching a provider may raise.

    torch.OutOfMemoryError and the errors of CUDA and of Dynamo are RuntimeErrors; Triton and CuTe
    have classes of their own, which exist once a provider has imported them.
    """
    found = [ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError]
    for module, name in _TOOLCHAIN_ERRORS.items():
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


_TOOLCHAIN_ERRORS = {"triton.errors": "TritonError", "cutlass.base_dsl.common": "DSLBaseError"}


@dataclass(frozen=True)
class Provider:
    """One implementation and what the harness has to know about it."""

    name: str
    load: Callable[[bool], Function]  # the argument: will the number of rows change between calls
    sign: int = -1  # it returns sign * logp
    package: str | None = None  # the distribution whose version is recorded
    bytes_per_element: int = 0  # of logits, at the peak of forward and backward, beside gradient
    has_backward: bool = True
    overwrites: bool = False  # the forward or the backward writes over the logits
    takes_leaf: bool = True  # False: the logits must have been computed
    graphable: bool = True  # False: it makes the host wait, so no CUDA graph can hold it
    ignores: bool = True  # a target of -100 is an ignored row

    @property
    def version(self) -> str | None:
        if self.package is None:
            return None
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def _rl_logp(_varying: bool) -> Function:
    return lambda logits, target: rl_logp.fused_logp(logits, target, require_kernel=True)


def _inplace(_varying: bool) -> Function:
    return lambda logits, target: rl_logp.fused_logp(
        logits, target, inplace_backward=True, require_kernel=True
    )


# As rl_logp, whose gradient it writes over the logits.
INPLACE = Provider(
    "rl_logp", _inplace, sign=1, package="rl_logp", overwrites=True, takes_leaf=False
)


def chunked_provider(workspace_elements: int | None = None) -> Provider:
    """The fallback, whatever kernels there are; with another workspace than its default."""

    def function(logits: Tensor, target: Tensor) -> Tensor:
        rows = workspace_elements and max(1, workspace_elements // (2 * logits.shape[-1]))
        return Chunked.apply(logits, target, rows)  # pyright: ignore[reportReturnType]

    return Provider("chunked", lambda _: function, sign=1)


def _fp32_vjp(_varying: bool) -> Function:
    return lambda logits, target: Fp32Vjp.apply(logits, target)  # pyright: ignore[reportReturnType]


def _compiled(varying: bool) -> Function:
    # Each shape is compiled for itself, as a fresh process would; the limit on recompilations of
    # one function would otherwise end the run.
    torch.compiler.reset()
    # A backward that reuses saved buffers runs only once, and cannot be captured by itself.
    functorch_config.donated_buffer = False
    return torch.compile(selected_logp, fullgraph=True, dynamic=None if varying else False)


def _flash_attn(_varying: bool) -> Function:
    # The package imports its CUDA extension, which this one file does not need.
    package = importlib.util.find_spec("flash_attn")
    if package is None or not package.submodule_search_locations:
        raise ImportError("flash-attn is not installed")
    path = Path(package.submodule_search_locations[0]) / "ops" / "triton" / "cross_entropy.py"
    spec = importlib.util.spec_from_file_location("flash_attn_cross_entropy", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"flash-attn has no {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        raise ImportError(f"flash-attn has no {path}") from error
    return lambda logits, target: module.cross_entropy_loss(logits, target)[0]


def _liger(_varying: bool) -> Function:
    from liger_kernel.transformers.cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerCrossEntropyLoss,
    )

    return LigerCrossEntropyLoss(reduction="none")


def _liger_selective(_varying: bool) -> Function:
    from liger_kernel.ops.grpo_loss import (  # pyright: ignore[reportMissingImports]
        fused_selective_log_softmax,
    )

    def function(logits: Tensor, target: Tensor) -> Tensor:
        # It scores all rows of a sequence but the last, so every input has a row to spare.
        rows, columns = logits.shape
        one_more = logits.detach().as_strided((1, rows + 1, columns), (0, columns, 1))
        return fused_selective_log_softmax(one_more, target.unsqueeze(0), 1.0).squeeze(0)

    return function


def _fla(_varying: bool) -> Function:
    from fla.modules.fused_cross_entropy import (  # pyright: ignore[reportMissingImports]
        cross_entropy_loss,
    )

    return lambda logits, target: cross_entropy_loss(logits, target)[0]


def _quack(_varying: bool) -> Function:
    from quack.cross_entropy import cross_entropy  # pyright: ignore[reportMissingImports]

    return lambda logits, target: cross_entropy(logits, target, reduction="none")


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("rl_logp", _rl_logp, sign=1, package="rl_logp"),
        Provider("flash_attn", _flash_attn, package="flash-attn"),
        Provider("quack", _quack, package="quack-kernels"),
        Provider("fla", _fla, package="fla-core"),
        Provider(
            "liger",
            _liger,
            package="liger-kernel",
            overwrites=True,
            graphable=False,
            bytes_per_element=4,
        ),
        Provider(
            "liger_selective",
            _liger_selective,
            sign=1,
            package="liger-kernel",
            has_backward=False,
            ignores=False,
        ),
        Provider("torch_compile", _compiled, sign=1, bytes_per_element=8, ignores=False),
        Provider("torch", lambda _: selected_logp, sign=1, bytes_per_element=12, ignores=False),
        Provider("fp32_vjp", _fp32_vjp, sign=1, bytes_per_element=8, ignores=False),
        chunked_provider(),
    )
}
OURS = ("rl_logp", "chunked", "fp32_vjp")  # the others are peers
