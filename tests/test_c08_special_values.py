"""C8: NaN, infinities, masks and huge logits give what torch.log_softmax in fp32 gives."""

import pytest
import torch
from calls import DTYPES, call
from torch import Tensor

import rl_logp
from rl_logp.reference import reference
from rl_logp.testing import assert_as_accurate

INF, NAN = torch.inf, torch.nan
MAX, MIN, TINY = "largest", "smallest", "subnormal"
ROWS: dict[str, list] = {
    "a NaN": [0.0, NAN, 1.0, 2.0],
    "one +inf": [0.0, INF, 1.0, 2.0],
    "two +inf": [INF, INF, 1.0, 2.0],
    "+inf and -inf": [INF, -INF, 1.0, 2.0],
    "all -inf": [-INF, -INF, -INF, -INF],
    "a -inf mask": [0.0, -INF, 1.0, -INF],
    "all but one -inf": [-INF, 10.0, -INF, -INF],
    "all but one -inf, which is huge": [-INF, MAX, -INF, -INF],
    "a finfo.min mask": [0.0, MIN, 1.0, MIN],
    "all finfo.min": [MIN, MIN, MIN, MIN],
    "all finfo.max": [MAX, MAX, MAX, MAX],
    "finfo.min and -inf": [MIN, -INF, MIN, -INF],
    "the widest row": [MAX, MIN, 0.0, MAX],
    "huge": [MAX, 0.0, -1.0, 1.0],
    "large and close": [30000.0, 29984.0, 29952.0, 30000.0],
    "zeros of both signs": [0.0, -0.0, 0.0, -0.0],
    "subnormal": [TINY, 0.0, TINY, -0.0],
}


def row_of(name: str, dtype: torch.dtype, device: str) -> Tensor:
    finfo = torch.finfo(dtype)
    values = {MAX: finfo.max, MIN: finfo.min, TINY: finfo.tiny / 4}
    return torch.tensor([[values.get(v, v) for v in ROWS[name]]], device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("columns", [4, 515], ids=["alone", "within a long row"])
@pytest.mark.parametrize("temperature", [None, 0.5, 2.0], ids=str)
def test_special_rows_give_what_torch_gives(
    device: str, dtype: torch.dtype, name: str, columns: int, temperature: float | None
) -> None:
    row = row_of(name, dtype, device)
    fill = -INF if "all" in name else 0.0
    row = torch.nn.functional.pad(row, (columns - 4, 0), value=fill)
    logits = row.expand(4, -1)
    target = torch.arange(columns - 4, columns, device=device)  # each of the special columns
    g = torch.tensor([1.0, -2.0, 0.5, 3.0], device=device)
    divisor = None if temperature is None else torch.tensor(temperature, device=device)

    actual = call(logits, target, divisor, g)

    leaf = logits.detach().clone().requires_grad_()
    y = leaf.float() if divisor is None else leaf.float() / divisor
    torch_logp = torch.log_softmax(y, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    (torch_dlogits,) = torch.autograd.grad(torch_logp, leaf, g)
    exact = reference(logits, target, temperature=divisor, grad_logp=g)
    torch_lse = torch.logsumexp(y.detach(), -1)
    for what, ours, theirs, truth in zip(
        actual._fields,
        actual,
        (torch_logp.detach(), torch_lse, torch_dlogits),
        exact,
        strict=True,
    ):
        assert_as_accurate(ours.to(theirs.dtype), theirs, truth, what)


def test_a_target_of_minus_infinity_has_a_finite_gradient(device: str) -> None:
    logits = torch.tensor([[0.0, 0.0, -INF]], device=device)
    g = torch.tensor([2.0], device=device)
    result = call(logits, torch.tensor([2], device=device), None, g)
    assert result.logp.tolist() == [-INF]
    torch.testing.assert_close(result.dlogits, torch.tensor([[-1.0, -1.0, 2.0]], device=device))


@pytest.mark.parametrize(
    ("logits", "temperature", "grad", "expected"),
    [
        ([0.0, -1.0, -2.0], 1e-38, 100.0, [0, 0, 0]),
        ([0.0, 0.0], 2e-39, 1.0, [2.5e38, -2.5e38]),
        ([0.0, 0.0, 0.0, 0.0], 2e-39, 1.0, [torch.inf, -1.25e38, -1.25e38, -1.25e38]),
        ([0.0, -1e-20], 1e-30, 1e9, [0, 0]),
    ],
    ids=["p is 0 or 1", "halves", "one beyond fp32", "small and far apart"],
)
def test_a_quotient_of_the_upstream_gradient_beyond_fp32(
    device: str, logits: list[float], temperature: float, grad: float, expected: list[float]
) -> None:
    """grad / temperature is no fp32 number; times a softmax it may be one."""
    leaf = torch.tensor([logits], device=device, requires_grad=True)
    target = torch.zeros(1, dtype=torch.long, device=device)
    logp = rl_logp.fused_logp(leaf, target, temperature=temperature)
    (dlogits,) = torch.autograd.grad(logp, leaf, torch.full_like(logp, grad))
    wanted = torch.tensor([expected], dtype=torch.float32, device=device)
    torch.testing.assert_close(dlogits, wanted, rtol=1e-6, atol=0)
