"""The entropy in compiled code: eager's bits, one node, one backward, few graphs, and exported."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rl_logp
from compile_tests.common import (
    BACKENDS,
    OP,
    assert_compiled_is_eager,
    assert_rows_are_eager,
    assert_same_bits,
    gradients,
    inputs,
    needs_compiler,
)
from compile_tests.graphs import calls, capture, render

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FUNCTIONS: dict[str, Callable] = {
    "fused_logp_entropy": rl_logp.fused_logp_entropy,
    "fused_logp_entropy, all options": partial(
        rl_logp.fused_logp_entropy, return_lse=True, entropy_of_ignored=False
    ),
    "fused_entropy": lambda logits, target, **options: rl_logp.fused_entropy(logits, **options),
    "vocab_parallel_entropy": (
        lambda logits, target, **options: rl_logp.vocab_parallel_entropy(logits, **options)
    ),
    "vocab_parallel_logp_entropy": rl_logp.vocab_parallel_logp_entropy,
}
every_function = pytest.mark.parametrize("score", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_function
def test_compiled_has_eagers_bits(
    device: str, backend: str, dtype: torch.dtype, score: Callable
) -> None:
    if dtype == torch.float64 and score in (
        FUNCTIONS["vocab_parallel_entropy"],
        FUNCTIONS["vocab_parallel_logp_entropy"],
    ):
        pytest.skip("fp64 has no states")
    assert_compiled_is_eager(score, *inputs(5, 97, dtype=dtype, device=device), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["number", "0-dim", "a-row"])
@every_function
def test_of_every_kind_of_temperature(
    device: str, backend: str, kind: str, score: Callable
) -> None:
    logits, target = inputs(4, 97, device=device)
    temperature: Any = {
        "number": 0.7,
        "0-dim": torch.tensor(0.7, device=device),
        "a-row": torch.rand(4, device=device) + 0.5,
    }[kind]

    def f(logits: Tensor, target: Tensor, temperature: Any):
        return score(logits[..., :90], target, temperature=temperature)

    assert_compiled_is_eager(f, logits, target, temperature, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_loss_with_a_bonus(device: str, backend: str) -> None:
    """As a trainer has it: only what rounds once and in no order stands around the operator.

    No minus: Inductor writes that as 0 - x on a GPU, which gives 0 another sign.
    """
    logits, target = inputs(2, 6, 97, device=device)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], device=device)

    def loss(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        logp, entropy = rl_logp.fused_logp_entropy(logits, target)
        return logp * mask + 0.125 * (entropy * mask)

    compiled = assert_compiled_is_eager(loss, logits, target, mask, backend=backend)
    (dlogits,) = gradients(compiled(logits, target, mask), logits)
    assert not dlogits[:, mask == 0].any()


@pytest.mark.parametrize("backend", BACKENDS)
@every_function
def test_one_graph_for_0_rows_one_for_1_and_one_for_all_others(
    device: str, backend: str, score: Callable
) -> None:
    def f(logits: Tensor, target: Tensor):
        return score(logits, target, temperature=0.7)

    compilations = CompileCounterWithBackend(backend)
    compiled = torch.compile(f, backend=compilations, fullgraph=True)
    for rows in (7, 128, 3, 1, 0, 2, 65):
        assert_rows_are_eager(compiled, f, rows, 97, device)
    assert compilations.frame_count == 3


def test_the_graphs_of_a_call() -> None:
    def f(logits: Tensor, target: Tensor):
        return rl_logp.fused_logp_entropy(logits, target)

    assert_expected_inline(
        render(capture(f, *inputs(4, 7))),
        """\
dynamo:
    logits: bf16[4, 7]
    target: i64[4]
    fused_logp_entropy = rl_logp.fused_logp_entropy(logits, target, None, False, True)
    logp: f32[4] = fused_logp_entropy[0]
    entropy: f32[4] = fused_logp_entropy[1]
    return logp, entropy
forward:
    logits: bf16[4, 7]
    target: i64[4]
    fused_logp_entropy_forward = rl_logp.fused_logp_entropy_forward.default(logits, target, None)
    logp: f32[4] = fused_logp_entropy_forward[0]
    entropy: f32[4] = fused_logp_entropy_forward[1]
    lse: f64[4] = fused_logp_entropy_forward[2]
    mean: f64[4] = fused_logp_entropy_forward[3]
    return logp, entropy
    save logits, lse, mean, target
backward:
    grad_entropy: f32[4]
    grad_logp: f32[4]
    logits: bf16[4, 7]
    lse: f64[4]
    mean: f64[4]
    target: i64[4]
    fused_logp_entropy_backward: bf16[4, 7] = rl_logp.fused_logp_entropy_backward.default(
        grad_logp, grad_entropy, None, logits, target, None, lse, mean, 0, 7)
    grad_logits = fused_logp_entropy_backward""",
    )


def test_the_graphs_of_an_entropy_alone() -> None:
    def f(logits: Tensor, temperature: Tensor) -> Tensor:
        return rl_logp.fused_entropy(logits, temperature=temperature)

    logits, _ = inputs(4, 7)
    assert_expected_inline(
        render(capture(f, logits, torch.full((4,), 0.7))),
        """\
dynamo:
    logits: bf16[4, 7]
    temperature: f32[4]
    fused_entropy: f32[4] = rl_logp.fused_entropy(logits, temperature, False)
    return fused_entropy
forward:
    logits: bf16[4, 7]
    temperature: f32[4]
    new_full: i64[] = aten.new_full.default(logits, (), -1, dtype=torch.int64, pin_memory=False)
    expand: i64[4] = aten.expand.default(new_full, (4))
    fused_logp_entropy_forward = rl_logp.fused_logp_entropy_forward.default(
        logits, expand, temperature)
    entropy: f32[4] = fused_logp_entropy_forward[1]
    lse: f64[4] = fused_logp_entropy_forward[2]
    mean: f64[4] = fused_logp_entropy_forward[3]
    return entropy
    save expand, logits, lse, mean, temperature
backward:
    expand: i64[4]
    grad_entropy: f32[4]
    logits: bf16[4, 7]
    lse: f64[4]
    mean: f64[4]
    temperature: f32[4]
    fused_logp_entropy_backward: bf16[4, 7] = rl_logp.fused_logp_entropy_backward.default(
        None, grad_entropy, None, logits, expand, temperature, lse, mean, 0, 7)
    grad_logits = fused_logp_entropy_backward""",
    )


@pytest.mark.parametrize("where", ["in the graph", "outside"])
def test_an_entropy_that_is_only_looked_at(where: str) -> None:
    """Detached where it is computed, it costs nothing in the backward."""

    def f(logits: Tensor, target: Tensor):
        logp, entropy = rl_logp.fused_logp_entropy(logits, target)
        return (logp, entropy.detach()) if where == "in the graph" else (logp, entropy)

    logits, target = inputs(4, 7)
    eager = rl_logp.fused_logp(logits, target)
    (expected,) = torch.autograd.grad(eager.sum(), logits)
    logp, entropy = torch.compile(f, backend="aot_eager", fullgraph=True)(logits, target)
    (actual,) = torch.autograd.grad(logp.sum(), logits)
    assert_same_bits(actual, expected, "dlogits")
    assert entropy.requires_grad == (where == "outside")
    if where == "in the graph":
        only = capture(lambda *args: f(*args)[0], logits, target)
        assert calls(only.backward[0], OP.fused_logp_backward.default) == 1
        assert calls(only.backward[0], OP.fused_logp_entropy_backward.default) == 0


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@every_function
def test_nothing_of_the_size_of_logits_is_saved_but_logits(backend: str, score: Callable) -> None:
    logits, target = inputs(60, 512)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().nbytes() >= 60 * 512:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    # Of a product, which no input is.
    def f(logits: Tensor, target: Tensor):
        return score(logits * 2, target)

    compiled = torch.compile(f, backend=backend, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(logits, target)
    assert [(tensor.dtype, tensor.shape[-1]) for tensor in kept.values()] == [(torch.bfloat16, 512)]


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 64, bias=False)

    def forward(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits, target = self.linear(hidden)[:, :-1], tokens[:, 1:]
        pair = rl_logp.fused_logp_entropy(logits, target, temperature=0.7)
        with_lse = rl_logp.fused_logp_entropy(
            logits, target, return_lse=True, entropy_of_ignored=False
        )
        return *pair, *with_lse, rl_logp.fused_entropy(logits)


def _arguments(batch: int, device: str) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(batch, 5, 16, device=device, requires_grad=True)
    return hidden, torch.randint(-1, 64, (batch, 5), device=device)


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_and_reloaded(device: str, decomposed: bool, tmp_path: Path) -> None:
    model = Head().to(device)
    batch = torch.export.Dim("batch", min=2, max=1024)
    exported = torch.export.export(
        model, _arguments(3, device), dynamic_shapes=({0: batch}, {0: batch})
    )
    assert calls(exported.graph_module, OP.fused_logp_entropy.default) == 1
    assert calls(exported.graph_module, OP.fused_logp_entropy_with_lse.default) == 1
    assert calls(exported.graph_module, OP.fused_entropy.default) == 1
    torch.export.save(exported.run_decompositions() if decomposed else exported, tmp_path / "m.pt2")
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    for size in (2, 3, 17):
        hidden, tokens = _arguments(size, device)
        actual, expected = loaded(hidden, tokens), model(hidden, tokens)
        assert_same_bits(actual, expected, f"outputs at batch {size}")
        assert_same_bits(gradients(actual, hidden), gradients(expected, hidden), "gradient")


@needs_compiler
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    model = Head().requires_grad_(False)
    batch = torch.export.Dim("batch", min=2, max=1024)
    exported = torch.export.export(
        model, _arguments(3, "cpu"), dynamic_shapes=({0: batch}, {0: batch})
    )
    compiled = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "compiled.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # for time
    )
    loaded = torch._inductor.aoti_load_package(compiled)
    with torch.no_grad():
        for size in (2, 17):
            arguments = _arguments(size, "cpu")
            assert_same_bits(tuple(loaded(*arguments)), model(*arguments), f"at batch {size}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_compiled(backend: str) -> None:
    logits = torch.randn(4, 3, 19, requires_grad=True)
    target = torch.randint(-1, 19, (3, 4))

    def both(logits: Tensor, target: Tensor):
        return rl_logp.fused_logp_entropy(logits, target)

    f = torch.vmap(both, in_dims=(1, 0))
    expected = both(logits.transpose(0, 1), target)
    assert_same_bits(f(logits, target), expected, "vmap")
    assert_compiled_is_eager(f, logits, target, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_towards_the_mean_is_an_error(backend: str) -> None:
    logits, target = inputs(4, 7)

    @torch.compile(backend=backend, fullgraph=True)
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return OP.fused_logp_entropy_forward(logits, target, None)[3]

    with pytest.raises(RuntimeError, match="expected no gradient towards mean"):
        f(logits, target).sum().backward()
