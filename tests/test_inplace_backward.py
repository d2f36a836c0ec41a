"""inplace_backward=True: the gradient has the memory of the logits, and the bits that it has in its
own; logits that cannot give theirs are refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import DTYPES, LAYOUTS, Sample, kernel_serves, no_host_sync, relaid, sample
from cuda_calls import varied_rows
from test_c10_inputs import whole_storage
from torch import Tensor

import rl_logp
from rl_logp import chunked
from rl_logp.testing import assert_bitwise_equal

WRITABLE = ["contiguous", *(layout for layout in LAYOUTS if layout != "columns not adjacent")]


def raises(error: type[Exception], message: str):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def computed(logits: Tensor, layout: str = "contiguous") -> Tensor:
    """The same values as the result of something, in a layout."""
    leaf = logits.detach().requires_grad_()
    return leaf.clone() if layout == "contiguous" else relaid(leaf, layout)


def gradient(logits: Tensor, case: Sample, form: str, upstream: str, inplace: bool) -> Tensor:
    temperature: Any = {"none": 1.0, "number": 0.7, "per row": case.temperature}[form]
    with no_host_sync(logits.device):
        outputs = rl_logp.fused_logp(
            logits,
            case.target,
            temperature=temperature,
            return_lse=True,
            inplace_backward=inplace,
        )
        chosen = [i for i, name in enumerate(("logp", "lse")) if upstream in (name, "both")]
        grads = [case[3:][i] for i in chosen]
        (dlogits,) = torch.autograd.grad([outputs[i] for i in chosen], logits, grads)
    return dlogits


def assert_same(case: Sample, layout: str, form: str, upstream: str) -> None:
    """Written over the logits, it has the bits of a new gradient, and nothing else is written."""
    expected = gradient(computed(case.logits, layout), case, form, upstream, False)
    logits = computed(case.logits, layout)
    around = whole_storage(logits).clone()
    dlogits = gradient(logits, case, form, upstream, True)
    # Which NaN torch makes depends on where the tensor lies; the kernels make one.
    any_nan = not kernel_serves(logits.device.type, logits.dtype)
    assert (dlogits.data_ptr(), dlogits.stride()) == (logits.data_ptr(), logits.stride())
    assert_bitwise_equal(dlogits, expected, "dlogits", any_nan=any_nan)
    assert_bitwise_equal(logits.detach(), dlogits, "what the logits hold")
    around.as_strided(logits.shape, logits.stride(), logits.storage_offset()).copy_(dlogits)
    assert_bitwise_equal(whole_storage(logits), around, "what lies around them")


# --- bits -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("layout", WRITABLE)
@pytest.mark.parametrize("form", ["none", "number", "per row"])
@pytest.mark.parametrize("upstream", ["logp", "lse", "both"])
def test_it_has_the_bits_of_a_new_gradient(
    device: str, dtype: torch.dtype, layout: str, form: str, upstream: str
) -> None:
    assert_same(sample((3, 5, 77), dtype, device), layout, form, upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 513, 8200])
@pytest.mark.parametrize("form", ["none", "per row"])
def test_so_it_has_in_rows_of_every_kind(
    device: str, dtype: torch.dtype, vocab_size: int, form: str
) -> None:
    case = varied_rows(vocab_size, dtype, device)
    case.logits[9, 0] = torch.nan
    case.logits[17] = -torch.inf
    for layout in ("contiguous", "inner columns"):
        assert_same(case, layout, form, "both")


@pytest.mark.parametrize("scale", [1, 2000], ids=["fast arithmetic", "slow arithmetic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_it_has_wherever_the_target_is(device: str, dtype: torch.dtype, scale: int) -> None:
    """The target's logit is needed after its column was written: each column in turn."""
    columns = 200
    case = sample((columns, columns), dtype, device)
    limit = torch.finfo(dtype).max
    case = case._replace(
        logits=case.logits.float().mul_(scale).clamp_(-limit, limit).to(dtype),
        target=torch.arange(columns, device=device),
        grad_logp=torch.ones_like(case.grad_logp),
    )
    assert_same(case, "shifted rows" if scale == 1 else "contiguous", "none", "logp")


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_so_it_has_where_threads_share_a_row(device: str, rows: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(sample((rows, 200_003), torch.float32, device), "contiguous", "none", "both")
    finally:
        torch.set_num_threads(threads)


def test_so_it_has_in_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", 2 * 3 * (33 + chunked.ROW_ELEMENTS))
    assert chunked.default_chunk_rows(33, torch.float32) == 3
    for dtype in (torch.float32, torch.float64):
        assert_same(sample((4, 5, 33), dtype, device), "padded columns", "per row", "both")


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (7,), (1, 1), (1, 4, 1)], ids=str)
def test_so_it_has_in_other_shapes(device: str, shape: tuple[int, ...]) -> None:
    assert_same(sample(shape, torch.bfloat16, device), "contiguous", "per row", "both")


# --- options --------------------------------------------------------------------------------------
def test_it_is_off_by_default(device: str) -> None:
    case = sample((6, 33), device=device)
    logits = computed(case.logits)
    version = logits._version
    rl_logp.fused_logp(logits, case.target).sum().backward()
    rl_logp.FusedLogp()(logits, case.target).sum().backward()
    assert_bitwise_equal(logits.detach(), case.logits, "logits")
    assert logits._version == version


def test_the_module_takes_it(device: str) -> None:
    case = sample((6, 33), device=device)
    logits = computed(case.logits)
    module = rl_logp.FusedLogp(temperature=0.5, return_lse=True, inplace_backward=True)
    (dlogits,) = torch.autograd.grad(module(logits, case.target), logits, case[3:])
    assert dlogits.data_ptr() == logits.data_ptr()
    assert repr(module) == "FusedLogp(temperature=0.5, return_lse=True, inplace_backward=True)"


def test_vmap(device: str) -> None:
    case = sample((4, 3, 33), device=device)

    def logp(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target, temperature=temperature, inplace_backward=True)

    for dim in (0, 1):
        logits = computed(case.logits.movedim(0, dim).contiguous())
        out = torch.vmap(logp, in_dims=(dim, 0, 0))(logits, *case[1:3])
        (dlogits,) = torch.autograd.grad(out, logits, case.grad_logp)
        expected = gradient(computed(case.logits), case, "per row", "logp", False)
        assert_bitwise_equal(dlogits, expected.movedim(0, dim), "dlogits")
        assert dlogits.data_ptr() == logits.data_ptr()
    with pytest.raises(ValueError, match="elements do not share memory"):
        torch.vmap(logp, in_dims=(None, 0, 0))(computed(case.logits[0]), *case[1:3])


# --- what is refused ------------------------------------------------------------------------------
LEAF = (
    "fused_logp: expected logits that were computed where inplace_backward=True, got a leaf that"
    " requires grad, or a view of one: its values would be lost"
)


@pytest.mark.parametrize("return_lse", [False, True], ids=["logp", "logp and lse"])
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x, id="itself"),
        pytest.param(lambda x: x[:, :5], id="a slice"),
        pytest.param(lambda x: x.view_as(x).transpose(0, 1).transpose(0, 1), id="a view of a view"),
        pytest.param(lambda x: x.float(), id="a cast that does nothing"),
        pytest.param(lambda x: x.detach().requires_grad_(), id="detached"),
    ],
)
def test_a_leaf(device: str, view: Callable[[Tensor], Tensor], return_lse: bool) -> None:
    leaf = torch.randn(3, 7, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2], device=device)
    with raises(ValueError, LEAF):
        rl_logp.fused_logp(view(leaf), target, return_lse=return_lse, inplace_backward=True)
    with torch.no_grad():  # without a backward nothing is overwritten
        rl_logp.fused_logp(view(leaf), target, return_lse=return_lse, inplace_backward=True)


def test_logits_that_do_not_require_grad(device: str) -> None:
    case = sample((3, 7), torch.bfloat16, device)
    expected = rl_logp.fused_logp(*case[:2])
    for logits in (case.logits, case.logits[:1].expand(3, -1).contiguous().t().contiguous().t()):
        rl_logp.fused_logp(logits, case.target, inplace_backward=True)
    actual = rl_logp.fused_logp(*case[:2], inplace_backward=True)
    assert_bitwise_equal(actual, expected, "logp")
    with torch.inference_mode():
        rl_logp.fused_logp(case.logits.clone(), case.target, inplace_backward=True)


@pytest.mark.parametrize(
    ("relay", "form"),
    [
        pytest.param(lambda x: x[:1].expand(3, -1), "shape (3, 7) and strides (0, 1)", id="expand"),
        pytest.param(
            lambda x: x.as_strided((3, 7), (6, 1)), "shape (3, 7) and strides (6, 1)", id="windows"
        ),
        pytest.param(
            lambda x: x.as_strided((3, 3, 7), (7, 7, 1)),
            "shape (3, 3, 7) and strides (7, 7, 1)",
            id="two leading dimensions",
        ),
    ],
)
def test_elements_that_share_memory(
    device: str, relay: Callable[[Tensor], Tensor], form: str
) -> None:
    logits = relay(torch.randn(5, 7, device=device, requires_grad=True) * 2)
    target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=device)
    with raises(
        ValueError,
        "fused_logp: expected logits whose elements do not share memory where"
        f" inplace_backward=True, got {form}",
    ):
        rl_logp.fused_logp(logits, target, inplace_backward=True)


def test_columns_that_are_not_adjacent(device: str) -> None:
    logits = (torch.randn(7, 3, device=device, requires_grad=True) * 2).t()
    target = torch.zeros(3, dtype=torch.long, device=device)
    with raises(
        ValueError,
        "fused_logp: expected logits whose last dimension has stride 1 where inplace_backward=True,"
        " got strides (1, 3)",
    ):
        rl_logp.fused_logp(logits, target, inplace_backward=True)
    narrow = logits[:, :1]  # one column is next to none
    (expected,) = torch.autograd.grad(rl_logp.fused_logp(narrow, target).sum(), narrow)
    rl_logp.fused_logp(narrow, target, inplace_backward=True).sum().backward()
    assert_bitwise_equal(narrow.detach(), expected, "the gradient of one column")


def test_a_kernel_can_be_required_as_ever(device: str) -> None:
    logits = computed(torch.randn(3, 7, device=device, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="expected a compiled kernel"):
        rl_logp.fused_logp(
            logits,
            torch.zeros(3, dtype=torch.long, device=device),
            require_kernel=True,
            inplace_backward=True,
        )


def test_the_operator_refuses_what_requires_grad(device: str) -> None:
    case = sample((6, 33), device=device)
    logits = computed(case.logits)
    lse = case.logits.double().logsumexp(-1)
    arguments = (case.grad_logp, None, logits, case.target, None, lse, 0, 33)
    with raises(
        RuntimeError,
        "fused_logp: expected no tensor that requires grad where logits are overwritten, got one:"
        " this has no derivative",
    ):
        torch.ops.rl_logp.fused_logp_backward_(*arguments)
    version = logits._version
    with torch.no_grad():
        torch.ops.rl_logp.fused_logp_backward_(*arguments)
        assert logits._version > version
        shared = logits[:1].expand(6, -1)
        with pytest.raises(ValueError, match="elements do not share memory"):
            torch.ops.rl_logp.fused_logp_backward_(*arguments[:2], shared, *arguments[3:])
