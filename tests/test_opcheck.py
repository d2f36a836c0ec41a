"""torch.library.opcheck, all four utilities, for every operator in every form it is called."""

import pytest
import torch
from calls import DTYPES, Sample, call, sample
from shards import states_of, weighted_states_of
from torch import Tensor
from torch.testing._internal.optests.generate_tests import OpCheckError

ops = torch.ops.rl_logp
UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)

every_form = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("rows", [0, 1, 7]),
    pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"]),
    pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "requires grad"]),
]


def forms(function):
    for mark in every_form:
        function = mark(function)
    return function


def arguments(
    dtype: torch.dtype, rows: int, strided: bool, requires_grad: bool, device: str
) -> Sample:
    case = sample((rows, 19), dtype, device)
    if strided:
        base = sample((rows + 1, 24), dtype, device).logits
        base[:-1, :19] = case.logits
        case = case._replace(logits=base.requires_grad_(requires_grad)[:-1, :19].detach())
    return case._replace(logits=case.logits.requires_grad_(requires_grad))


def opcheck(op, *args: Tensor | int | bool | None, utilities: tuple[str, ...] = UTILITIES) -> None:
    torch.library.opcheck(op, args, test_utils=utilities)


PEOPLE_CALL = [
    "fused_logp",
    "fused_logp_with_lse",
    "fused_logp_entropy",
    "fused_logp_entropy_with_lse",
]


@forms
@pytest.mark.parametrize("temperature", ["none", "0-dim", "per row"])
@pytest.mark.parametrize("name", PEOPLE_CALL)
def test_what_people_call(
    device: str,
    name: str,
    dtype: torch.dtype,
    rows: int,
    strided: bool,
    requires_grad: bool,
    temperature: str,
) -> None:
    case = arguments(dtype, rows, strided, requires_grad, device)
    op = getattr(ops, name).default
    opcheck(op, case.logits, case.target, divisor(case, temperature))


@forms
@pytest.mark.parametrize("temperature", ["none", "0-dim", "per row"])
@pytest.mark.parametrize("all_rows", [False, True], ids=["targets' rows", "all rows"])
def test_fused_logp_forward(
    device: str,
    dtype: torch.dtype,
    rows: int,
    strided: bool,
    requires_grad: bool,
    temperature: str,
    all_rows: bool,
) -> None:
    case = arguments(dtype, rows, strided, requires_grad, device)
    opcheck(
        ops.fused_logp_forward.default,
        case.logits,
        case.target,
        divisor(case, temperature),
        all_rows,
    )


def backward_arguments(case: Sample, upstream: str) -> tuple:
    return (
        case.grad_logp if upstream in ("logp", "both") else None,
        case.grad_lse if upstream in ("lse", "both") else None,
        case.logits,
        case.target,
        case.temperature if upstream == "both" else None,
        call(*case).lse,
        0,
        19,
    )


@forms
@pytest.mark.parametrize("upstream", ["logp", "lse", "both", "neither"])
def test_fused_logp_backward(
    device: str,
    dtype: torch.dtype,
    rows: int,
    strided: bool,
    requires_grad: bool,
    upstream: str,
) -> None:
    args = backward_arguments(arguments(dtype, rows, strided, requires_grad, device), upstream)
    if not requires_grad:
        return opcheck(ops.fused_logp_backward.default, *args)
    # The last utility differentiates what requires grad, which is a second derivative (C14).
    opcheck(ops.fused_logp_backward.default, *args, utilities=UTILITIES[:-1])
    with pytest.raises(OpCheckError, match="expected to be differentiated once"):
        opcheck(ops.fused_logp_backward.default, *args, utilities=UTILITIES[-1:])


@forms
@pytest.mark.parametrize("temperature", ["none", "0-dim", "per row"])
def test_fused_entropy(
    device: str,
    dtype: torch.dtype,
    rows: int,
    strided: bool,
    requires_grad: bool,
    temperature: str,
) -> None:
    case = arguments(dtype, rows, strided, requires_grad, device)
    opcheck(ops.fused_entropy.default, case.logits, divisor(case, temperature))


@forms
@pytest.mark.parametrize("all_rows", [False, True], ids=["targets' rows", "all rows"])
def test_fused_logp_entropy_forward(
    device: str, dtype: torch.dtype, rows: int, strided: bool, requires_grad: bool, all_rows: bool
) -> None:
    case = arguments(dtype, rows, strided, requires_grad, device)
    op = ops.fused_logp_entropy_forward.default
    args = (*case[:3], False, all_rows)
    if not requires_grad:
        return opcheck(op, *args)
    # The last utility differentiates every output, and the mean refuses.
    opcheck(op, *args, utilities=UTILITIES[:-1])
    with pytest.raises(OpCheckError, match="expected no gradient towards mean"):
        opcheck(op, *args, utilities=UTILITIES[-1:])


@forms
@pytest.mark.parametrize("upstream", ["entropy", "logp and entropy", "all, of a shard", "neither"])
def test_fused_logp_entropy_backward(
    device: str,
    dtype: torch.dtype,
    rows: int,
    strided: bool,
    requires_grad: bool,
    upstream: str,
) -> None:
    case = arguments(dtype, rows, strided, requires_grad, device)
    shard = "shard" in upstream
    *_, lse, mean = ops.fused_logp_entropy_forward(case.logits.detach(), *case[1:3])
    op, args = (
        ops.fused_logp_entropy_backward.default,
        (
            case.grad_logp if shard or "logp" in upstream else None,
            None if upstream == "neither" else case.grad_logp,
            case.grad_lse if shard else None,
            *case[:3],
            lse,
            mean,
            16 if shard else 0,
            48 if shard else 19,
            shard,
        ),
    )
    if not requires_grad:
        return opcheck(op, *args)
    opcheck(op, *args, utilities=UTILITIES[:-1])
    with pytest.raises(OpCheckError, match="expected to be differentiated once"):
        opcheck(op, *args, utilities=UTILITIES[-1:])


def divisor(case: Sample, form: str) -> Tensor | None:
    if form == "none":
        return None
    return case.temperature if form == "per row" else torch.tensor(0.7, device=case.logits.device)


@forms
@pytest.mark.parametrize("upstream", ["logp", "lse", "both", "entropy", "entropy, both"])
def test_fused_logp_backward_in_place(
    device: str,
    dtype: torch.dtype,
    rows: int,
    strided: bool,
    requires_grad: bool,
    upstream: str,
) -> None:
    case = arguments(dtype, rows, strided, requires_grad, device)
    entropy, _, others = upstream.partition(", ")
    args = backward_arguments(case, others or upstream)
    if entropy == "entropy":
        *_, mean = ops.fused_logp_entropy_forward(case.logits.detach(), *args[3:5])
        args = (*args, False, case.grad_logp, mean)
    if not requires_grad:
        return opcheck(ops.fused_logp_backward_.default, *args)
    with pytest.raises(OpCheckError, match="expected no tensor that requires grad"):
        opcheck(ops.fused_logp_backward_.default, *args)


@pytest.mark.parametrize("start", [0, 16])
def test_fused_logp_backward_of_a_shard(device: str, start: int) -> None:
    case = sample((7, 32), torch.bfloat16, device)
    opcheck(
        ops.fused_logp_backward.default,
        *case[3:],
        case.logits[:, start : start + 16],
        *case[1:3],
        call(*case).lse,
        start,
        32,
    )


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "requires grad"])
@pytest.mark.parametrize("temperature", ["none", "per row"])
def test_the_operators_on_a_shard(
    device: str, strided: bool, requires_grad: bool, temperature: str
) -> None:
    case = arguments(torch.bfloat16, 7, strided, requires_grad, device)
    target, scale = case.target, divisor(case, temperature)
    states = states_of(case.logits.detach(), target, scale, (0, 16, 19))
    for all_rows in (False, True):
        opcheck(ops.fused_logp_partial.default, case.logits, target, scale, all_rows, 16, 35)
    opcheck(ops.fused_logp_combine.default, states, target, 19)
    first = case.logits[:, :16].detach().requires_grad_(requires_grad)
    opcheck(ops.fused_logp_shard.default, first, target, scale, states, 0, 19)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "requires grad"])
@pytest.mark.parametrize("temperature", ["none", "per row"])
def test_the_operators_on_a_shard_with_the_entropy(
    device: str, strided: bool, requires_grad: bool, temperature: str
) -> None:
    case = arguments(torch.bfloat16, 7, strided, requires_grad, device)
    target, scale = case.target, divisor(case, temperature)
    states = weighted_states_of(case.logits.detach(), target, scale, (0, 16, 19))
    opcheck(ops.fused_logp_entropy_partial.default, case.logits, target, scale, 16, 35)
    opcheck(ops.fused_logp_entropy_combine.default, states, target, 19)
    first = case.logits[:, :16].detach().requires_grad_(requires_grad)
    args = (first, target, scale, states, 0, 19)
    if not requires_grad:
        return opcheck(ops.fused_logp_entropy_shard.default, *args)
    opcheck(ops.fused_logp_entropy_shard.default, *args, utilities=UTILITIES[:-1])
    with pytest.raises(OpCheckError, match="expected no gradient towards mean"):
        opcheck(ops.fused_logp_entropy_shard.default, *args, utilities=UTILITIES[-1:])


@pytest.mark.parametrize("sharded", [False, True], ids=["a row", "a shard"])
@pytest.mark.parametrize("columns", [0, 19])
def test_fused_logp_backward_of_a_whole_row(device: str, columns: int, sharded: bool) -> None:
    case = sample((7, 19), torch.bfloat16, device)
    opcheck(
        ops.fused_logp_backward.default,
        *case[3:],
        case.logits[:, :columns],
        *case[1:3],
        call(*case).lse,
        0,
        19,
        sharded,
    )


@pytest.mark.parametrize("rows", [(), (2, 3), (2, 0, 3)], ids=str)
def test_other_leading_dimensions(device: str, rows: tuple[int, ...]) -> None:
    case = sample((*rows, 19), torch.bfloat16, device)
    case.logits.requires_grad_()
    opcheck(ops.fused_logp.default, *case[:3])
    opcheck(ops.fused_logp_with_lse.default, *case[:3])
    opcheck(ops.fused_logp_forward.default, *case[:3], True)
    opcheck(ops.fused_logp_entropy.default, *case[:3])
    opcheck(ops.fused_entropy.default, case.logits, case.temperature)
    states = states_of(case.logits.detach(), *case[1:3], (0, 19))
    opcheck(ops.fused_logp_partial.default, *case[:3], True, 0, 19)
    opcheck(ops.fused_logp_combine.default, states, case.target, 19)
    opcheck(ops.fused_logp_shard.default, *case[:3], states, 0, 19)
