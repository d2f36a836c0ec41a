"""The graphs: one node in Dynamo, one forward and one backward in AOT, only the logits saved."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import rl_logp
from compile_tests.common import BACKENDS, LanguageModel, inputs
from compile_tests.graphs import calls, capture, render

OP = torch.ops.rl_logp


def test_of_a_call():
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target)

    assert_expected_inline(
        render(capture(f, *inputs(4, 7))),
        """\
dynamo:
    logits: bf16[4, 7]
    target: i64[4]
    fused_logp: f32[4] = rl_logp.fused_logp(logits, target, None, False)
    return fused_logp
forward:
    logits: bf16[4, 7]
    target: i64[4]
    fused_logp_forward = rl_logp.fused_logp_forward.default(logits, target, None, False)
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


def test_of_sliced_logits_with_a_float_temperature():
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits[:, :-1], target[:, 1:], temperature=0.7)

    assert_expected_inline(
        render(capture(f, *inputs(2, 5, 7))),
        """\
dynamo:
    logits: bf16[2, 5, 7]
    target: i64[2, 5]
    getitem: bf16[2, 4, 7] = getitem(logits, (slice(None, None, None), slice(None, -1, None)))
    getitem_1: i64[2, 4] = getitem(target, (slice(None, None, None), slice(1, None, None)))
    scale: f32[] = full((), 0.7, dtype=torch.float32, device=cpu)
    fused_logp: f32[2, 4] = rl_logp.fused_logp(getitem, getitem_1, scale, False)
    return fused_logp
forward:
    logits: bf16[2, 5, 7]
    target: i64[2, 5]
    slice_1: bf16[2, 4, 7] = aten.slice.Tensor(logits, 1, 0, -1)
    slice_2: i64[2, 4] = aten.slice.Tensor(target, 1, 1, 9223372036854775807)
    full: f32[] = aten.full.default((), 0.7, dtype=torch.float32, device=cpu, pin_memory=False)
    fused_logp_forward = rl_logp.fused_logp_forward.default(slice_1, slice_2, full, False)
    logp: f32[2, 4] = fused_logp_forward[0]
    lse: f64[2, 4] = fused_logp_forward[1]
    return logp
    save full, lse, slice_1, slice_2
backward:
    full: f32[]
    grad_logp: f32[2, 4]
    lse: f64[2, 4]
    slice_1: bf16[2, 4, 7]
    slice_2: i64[2, 4]
    fused_logp_backward: bf16[2, 4, 7] = rl_logp.fused_logp_backward.default(
        grad_logp, None, slice_1, slice_2, full, lse, 0, 7)
    slice_backward: bf16[2, 5, 7] = aten.slice_backward.default(
        fused_logp_backward, (2, 5, 7), 1, 0, -1, 1)
    grad_logits = slice_backward""",
    )


def test_of_a_temperature_a_row_with_the_lse():
    def f(logits: Tensor, target: Tensor, temperature: Tensor):
        return rl_logp.fused_logp(logits, target, temperature=temperature, return_lse=True)

    assert_expected_inline(
        render(capture(f, *inputs(4, 7), torch.full((4,), 0.7))),
        """\
dynamo:
    logits: bf16[4, 7]
    target: i64[4]
    temperature: f32[4]
    fused_logp_with_lse = rl_logp.fused_logp_with_lse(logits, target, temperature, False)
    logp: f32[4] = fused_logp_with_lse[0]
    lse: f64[4] = fused_logp_with_lse[1]
    return logp, lse
forward:
    logits: bf16[4, 7]
    target: i64[4]
    temperature: f32[4]
    fused_logp_forward = rl_logp.fused_logp_forward.default(logits, target, temperature, True)
    logp: f32[4] = fused_logp_forward[0]
    lse: f64[4] = fused_logp_forward[1]
    return logp, lse
    save logits, lse, target, temperature
backward:
    grad_logp: f32[4]
    grad_lse: f64[4]
    logits: bf16[4, 7]
    lse: f64[4]
    target: i64[4]
    temperature: f32[4]
    fused_logp_backward: bf16[4, 7] = rl_logp.fused_logp_backward.default(
        grad_logp, grad_lse, logits, target, temperature, lse, 0, 7)
    grad_logits = fused_logp_backward""",
    )


def test_of_the_module_is_that_of_the_function():
    def f(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target)

    module = render(capture(rl_logp.FusedLogp(), *inputs(4, 7)))
    assert module == render(capture(f, *inputs(4, 7)))


def test_of_a_model_holds_the_op_once():
    tokens = torch.randint(0, 64, (3, 9))
    graphs = capture(LanguageModel(), tokens)
    assert calls(graphs.dynamo[0], OP.fused_logp) == 1
    assert calls(graphs.forward[0], OP.fused_logp_forward.default) == 1
    assert calls(graphs.backward[0], OP.fused_logp_forward.default) == 0
    assert calls(graphs.backward[0], OP.fused_logp_backward.default) == 1


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"return_lse": True}], ids=str)
def test_nothing_of_the_size_of_logits_is_saved_but_logits(backend: str, options: dict):
    """Counts the storages that autograd really keeps, of an uncompiled call and a compiled one."""
    rows, columns = 4 * 15, 512
    model = LanguageModel(columns, width=8, **options).bfloat16()
    tokens = torch.randint(0, columns, (4, 16))
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().nbytes() >= rows * columns:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(tokens)
    assert [(tensor.dtype, tensor.shape[-1]) for tensor in kept.values()] == [
        (torch.bfloat16, columns)
    ]
