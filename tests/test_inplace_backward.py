"""inplace_backward=True: the gradient has the memory of the logits, and the bits that it has in its
own; logits that cannot give theirs are refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from calls import DTYPES, LAYOUTS, Sample, kernel_serves, no_host_sync, relaid, sample
from cuda_calls import grad_entropy_of, varied_rows
from test_c10_inputs import whole_storage
from torch import Tensor

import rl_logp
from rl_logp import chunked
from rl_logp.functional import temperature_tensor
from rl_logp.testing import assert_bitwise_equal

OPS = torch.ops.rl_logp
WRITABLE = ["contiguous", *(layout for layout in LAYOUTS if layout != "columns not adjacent")]

# Whoever takes the option. With an entropy there is one backward for all results.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fused_logp": rl_logp.fused_logp,
    "with lse": partial(rl_logp.fused_logp, return_lse=True),
    "fused_logp_entropy": rl_logp.fused_logp_entropy,
    "fused_entropy": lambda logits, _, **options: rl_logp.fused_entropy(logits, **options),
}
every_function = pytest.mark.parametrize("score", FUNCTIONS.values(), ids=FUNCTIONS)


def total(outputs: Any) -> Tensor:
    """Of all results."""
    return outputs[0].sum() + outputs[1].sum() if isinstance(outputs, tuple) else outputs.sum()


def raises(error: type[Exception], message: str):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def computed(logits: Tensor, layout: str = "contiguous") -> Tensor:
    """The same values as the result of something, in a layout."""
    leaf = logits.detach().requires_grad_()
    return leaf.clone() if layout == "contiguous" else relaid(leaf, layout)


def everything(logits: Tensor, target: Tensor, temperature: Any, inplace_backward: bool) -> tuple:
    scale = temperature_tensor(temperature, logits)
    return OPS.fused_logp_entropy_forward(logits, target, scale, inplace_backward)


# What is called, and its results, but for those that have no upstream gradient.
WAYS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "logp": (FUNCTIONS["with lse"], ("logp", "")),
    "lse": (FUNCTIONS["with lse"], ("", "lse")),
    "logp and lse": (FUNCTIONS["with lse"], ("logp", "lse")),
    "logp, beside an entropy": (FUNCTIONS["fused_logp_entropy"], ("logp", "")),
    "an entropy beside logp": (FUNCTIONS["fused_logp_entropy"], ("", "entropy")),
    "logp and entropy": (FUNCTIONS["fused_logp_entropy"], ("logp", "entropy")),
    "entropy": (FUNCTIONS["fused_entropy"], ("entropy",)),
    "logp, entropy and lse": (everything, ("logp", "entropy", "lse")),
}
every_way = pytest.mark.parametrize("way", WAYS)
with_and_without_entropy = pytest.mark.parametrize("way", ["logp and lse", "logp, entropy and lse"])


def gradient(logits: Tensor, case: Sample, form: str, way: str, inplace: bool) -> Tensor:
    temperature: Any = {"none": 1.0, "number": 0.7, "per row": case.temperature}[form]
    upstream = {
        "logp": case.grad_logp,
        "entropy": grad_entropy_of(case).to(case.grad_logp.dtype),
        "lse": case.grad_lse,
    }
    score, names = WAYS[way]
    with no_host_sync(logits.device):
        outputs = score(logits, case.target, temperature=temperature, inplace_backward=inplace)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        chosen = [i for i, name in enumerate(names) if name]
        grads = [upstream[names[i]] for i in chosen]
        (dlogits,) = torch.autograd.grad([outputs[i] for i in chosen], logits, grads)
    return dlogits


def assert_same(case: Sample, layout: str, form: str, way: str) -> None:
    """Written over the logits, it has the bits of a new gradient, and nothing else is written."""
    expected = gradient(computed(case.logits, layout), case, form, way, False)
    logits = computed(case.logits, layout)
    around = whole_storage(logits).clone()
    dlogits = gradient(logits, case, form, way, True)
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
@every_way
def test_it_has_the_bits_of_a_new_gradient(
    device: str, dtype: torch.dtype, layout: str, form: str, way: str
) -> None:
    assert_same(sample((3, 5, 77), dtype, device), layout, form, way)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 513, 8200])
@pytest.mark.parametrize("form", ["none", "per row"])
@with_and_without_entropy
def test_so_it_has_in_rows_of_every_kind(
    device: str, dtype: torch.dtype, vocab_size: int, form: str, way: str
) -> None:
    case = varied_rows(vocab_size, dtype, device)
    case.logits[9, 0] = torch.nan
    case.logits[17] = -torch.inf
    for layout in ("contiguous", "inner columns"):
        assert_same(case, layout, form, way)


@pytest.mark.parametrize("scale", [1, 2000], ids=["fast arithmetic", "slow arithmetic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["logp", "logp and entropy"])
def test_so_it_has_wherever_the_target_is(
    device: str, dtype: torch.dtype, scale: int, way: str
) -> None:
    """The target's logit is needed after its column was written: each column in turn."""
    columns = 200
    case = sample((columns, columns), dtype, device)
    limit = torch.finfo(dtype).max
    case = case._replace(
        logits=case.logits.float().mul_(scale).clamp_(-limit, limit).to(dtype),
        target=torch.arange(columns, device=device),
        grad_logp=torch.ones_like(case.grad_logp),
    )
    assert_same(case, "shifted rows" if scale == 1 else "contiguous", "none", way)


@pytest.mark.parametrize("rows", [1, 2, 3])
@with_and_without_entropy
def test_so_it_has_where_threads_share_a_row(device: str, rows: int, way: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(sample((rows, 200_003), torch.float32, device), "contiguous", "none", way)
    finally:
        torch.set_num_threads(threads)


@with_and_without_entropy
def test_so_it_has_in_chunks(device: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", 2 * 3 * (33 + chunked.ROW_ELEMENTS))
    assert chunked.default_chunk_rows(33, torch.float32) == 3
    assert chunked.default_chunk_rows(33, torch.float32, with_entropy=True) == 2
    for dtype in (torch.float32, torch.float64):
        assert_same(sample((4, 5, 33), dtype, device), "padded columns", "per row", way)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (7,), (1, 1), (1, 4, 1)], ids=str)
@with_and_without_entropy
def test_so_it_has_in_other_shapes(device: str, shape: tuple[int, ...], way: str) -> None:
    assert_same(sample(shape, torch.bfloat16, device), "contiguous", "per row", way)


# --- what lies in their memory --------------------------------------------------------------------
@pytest.mark.parametrize("shared", ["an upstream gradient", "temperature", "one temperature"])
@every_function
def test_what_is_read_for_each_row_may_lie_in_the_logits(
    device: str, shared: str, score: Callable[..., Any]
) -> None:
    """A row's is read after other rows, or pieces of its own, were overwritten."""
    case = sample((40, 16400), device=device)

    def gradient_of(per_row: Callable[[Tensor], Tensor], inplace: bool) -> Tensor:
        logits = computed(case.logits.abs() + 0.5)
        column = per_row(logits.detach()[0, :40])
        temperature = {"temperature": column, "one temperature": column[0]}.get(shared, 1.0)
        outputs = score(logits, case.target, temperature=temperature, inplace_backward=inplace)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = column if shared == "an upstream gradient" else torch.ones_like(column)
        grads = [upstream.to(output.dtype) for output in outputs]
        return torch.autograd.grad(outputs, logits, grads)[0]

    expected = gradient_of(torch.clone, False)
    assert_bitwise_equal(gradient_of(lambda column: column, True), expected, "dlogits")


# --- options --------------------------------------------------------------------------------------
def test_it_is_off_by_default(device: str) -> None:
    case = sample((6, 33), device=device)
    logits = computed(case.logits)
    version = logits._version
    for score in FUNCTIONS.values():
        total(score(logits, case.target)).backward()
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


@every_function
def test_vmap(device: str, score: Callable[..., Any]) -> None:
    case = sample((4, 3, 33), device=device)

    def of_sample(logits: Tensor, target: Tensor, temperature: Tensor) -> Any:
        return score(logits, target, temperature=temperature, inplace_backward=True)

    leaf = case.logits.clone().requires_grad_()
    outputs = score(leaf, case.target, temperature=case.temperature)
    (expected,) = torch.autograd.grad(total(outputs), leaf)
    for dim in (0, 1):
        logits = computed(case.logits.movedim(0, dim).contiguous())
        outputs = torch.vmap(of_sample, in_dims=(dim, 0, 0))(logits, *case[1:3])
        (dlogits,) = torch.autograd.grad(total(outputs), logits)
        assert_bitwise_equal(dlogits, expected.movedim(0, dim), "dlogits")
        assert dlogits.data_ptr() == logits.data_ptr()
    # Logits that all samples share have one memory for all their gradients.
    message = re.escape("do not share memory where inplace_backward=True, got shape (4, 3, 33) and")
    for in_dims in ((None, 0, 0), (None, None, 0)):
        others = [x if dim == 0 else x[0] for x, dim in zip(case[1:3], in_dims[1:], strict=True)]
        with pytest.raises(ValueError, match=message):
            torch.vmap(of_sample, in_dims=in_dims)(computed(case.logits[0]), *others)


# --- what is refused ------------------------------------------------------------------------------
LEAF = (
    "fused_logp: expected logits that were computed where inplace_backward=True, got a leaf that"
    " requires grad, or a view of one: its values would be lost"
)


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0]


@every_function
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x, id="itself"),
        pytest.param(lambda x: x[:, :5], id="a slice"),
        pytest.param(lambda x: x.view_as(x).transpose(0, 1).transpose(0, 1), id="a view of a view"),
        pytest.param(lambda x: x.float(), id="a cast that does nothing"),
        pytest.param(lambda x: x.detach().requires_grad_(), id="detached"),
        pytest.param(lambda x: torch.ops.aten._unsafe_view(x, [3, 7]), id="no view, in its memory"),
        pytest.param(lambda x: torch.ops.aten._unsafe_view(x[:], [3, 7])[:], id="after a view"),
        pytest.param(lambda x: x.unsafe_split(5, dim=1)[0], id="a part of it"),
        pytest.param(lambda x: Detached.apply(x), id="a Function that detaches it"),
    ],
)
def test_a_leaf(device: str, view: Callable[[Tensor], Tensor], score: Callable[..., Any]) -> None:
    leaf = torch.randn(3, 7, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2], device=device)
    with raises(ValueError, LEAF):
        score(view(leaf), target, inplace_backward=True)
    with torch.no_grad():  # without a backward nothing is overwritten
        score(view(leaf), target, inplace_backward=True)


@every_function
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda x: x.unsafe_chunk(2)[0], id="unsafe_chunk"),
        pytest.param(lambda x: x.unsafe_split(3)[0], id="unsafe_split"),
        pytest.param(lambda x: x.unsafe_split_with_sizes([3, 3])[0], id="unsafe_split_with_sizes"),
        pytest.param(lambda x: x.unsafe_split(3, dim=1)[0][:3], id="a view of one"),
    ],
)
def test_parts_that_share_memory_and_no_version(
    device: str, part: Callable[[Tensor], Tensor], score: Callable[..., Any]
) -> None:
    logits = part(torch.randn(6, 7, device=device, requires_grad=True) * 2)
    with raises(
        ValueError,
        "fused_logp: expected logits that share versions with what shares their memory where"
        " inplace_backward=True, got a result of unsafe_split or unsafe_chunk",
    ):
        score(logits, torch.tensor([0, 1, 2], device=device), inplace_backward=True)


@every_function
def test_logits_that_do_not_require_grad(device: str, score: Callable[..., Any]) -> None:
    case = sample((3, 7), torch.bfloat16, device)
    expected = score(*case[:2])
    for logits in (case.logits, case.logits[:1].expand(3, -1).contiguous().t().contiguous().t()):
        score(logits, case.target, inplace_backward=True)
    actual = score(*case[:2], inplace_backward=True)
    assert_bitwise_equal(total(actual), total(expected), "the results")
    with torch.inference_mode():
        score(case.logits.clone(), case.target, inplace_backward=True)


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
@every_function
def test_elements_that_share_memory(
    device: str, relay: Callable[[Tensor], Tensor], form: str, score: Callable[..., Any]
) -> None:
    logits = relay(torch.randn(5, 7, device=device, requires_grad=True) * 2)
    target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=device)
    with raises(
        ValueError,
        "fused_logp: expected logits whose elements do not share memory where"
        f" inplace_backward=True, got {form}",
    ):
        score(logits, target, inplace_backward=True)


@every_function
def test_columns_that_are_not_adjacent(device: str, score: Callable[..., Any]) -> None:
    logits = (torch.randn(7, 3, device=device, requires_grad=True) * 2).t()
    target = torch.zeros(3, dtype=torch.long, device=device)
    with raises(
        ValueError,
        "fused_logp: expected logits whose last dimension has stride 1 where inplace_backward=True,"
        " got strides (1, 3)",
    ):
        score(logits, target, inplace_backward=True)
    narrow = logits[:, :1]  # one column is next to none
    (expected,) = torch.autograd.grad(total(score(narrow, target)), narrow)
    total(score(narrow, target, inplace_backward=True)).backward()
    assert_bitwise_equal(narrow.detach(), expected, "the gradient of one column")


@every_function
def test_a_kernel_can_be_required_as_ever(device: str, score: Callable[..., Any]) -> None:
    logits = computed(torch.randn(3, 7, device=device, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="expected a compiled kernel"):
        score(
            logits,
            torch.zeros(3, dtype=torch.long, device=device),
            require_kernel=True,
            inplace_backward=True,
        )


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logp", "logp and entropy"])
def test_the_operator_refuses_what_requires_grad(device: str, with_entropy: bool) -> None:
    case = sample((6, 33), device=device)
    logits = computed(case.logits)
    *_, lse, mean = OPS.fused_logp_entropy_forward(case.logits, case.target, None)
    entropies = (False, grad_entropy_of(case), mean) if with_entropy else ()
    arguments = (case.grad_logp, None, logits, case.target, None, lse, 0, 33, *entropies)
    with raises(
        RuntimeError,
        "fused_logp: expected no tensor that requires grad where logits are overwritten, got one:"
        " this has no derivative",
    ):
        OPS.fused_logp_backward_(*arguments)
    version = logits._version
    with torch.no_grad():
        OPS.fused_logp_backward_(*arguments)
        assert logits._version > version
        shared = logits[:1].expand(6, -1)
        with pytest.raises(ValueError, match="elements do not share memory"):
            OPS.fused_logp_backward_(*arguments[:2], shared, *arguments[3:])


@pytest.mark.parametrize("index", [0, 1, 2, 5, 9, 10])
def test_whichever_it_is(device: str, index: int) -> None:
    case = sample((6, 33), device=device)
    *_, lse, mean = OPS.fused_logp_entropy_forward(*case[:2], None)
    row = (case.logits, case.target, None, lse, 0, 33, False)
    arguments: list[Any] = [case.grad_logp, case.grad_lse, *row, grad_entropy_of(case), mean]
    arguments[index] = arguments[index].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="expected no tensor that requires grad"):
        OPS.fused_logp_backward_(*arguments)


def test_the_operator_refuses_an_entropys_gradient_without_its_mean(device: str) -> None:
    case = sample((6, 33), device=device)
    lse = case.logits.double().logsumexp(-1)
    arguments = (*case[3:], *case[:2], None, lse, 0, 33, False, grad_entropy_of(case))
    with raises(ValueError, "fused_logp: expected mean beside grad_entropy, got None"):
        OPS.fused_logp_backward_(*arguments)
