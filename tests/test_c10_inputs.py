"""C10: inputs are never written, nor anything around them."""

import pytest
import torch
from calls import DTYPES, LAYOUTS, Sample, relaid, sample
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_bitwise_equal


def whole_storage(tensor: Tensor) -> Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_nothing_is_written_but_the_results(device: str, dtype: torch.dtype, layout: str) -> None:
    case = sample((3, 5, 33), dtype, device)
    case = case._replace(logits=relaid(case.logits, layout))
    case.logits[0, 0, 0] = -torch.inf
    before = [whole_storage(t).clone() for t in case]
    versions = [t._version for t in case]
    leaf = case.logits.requires_grad_()
    logp, lse = rl_logp.fused_logp(leaf, case.target, temperature=case.temperature, return_lse=True)
    results = logp.detach().clone(), lse.detach().clone()
    for _ in range(2):  # the graph is retained: what it saved must survive the first pass
        torch.autograd.grad([logp, lse], leaf, [*case[3:]], retain_graph=True)
    for name, tensor, copy, version in zip(Sample._fields, case, before, versions, strict=True):
        assert_bitwise_equal(whole_storage(tensor), copy, name)
        assert tensor._version == version, name
    assert_bitwise_equal(logp.detach(), results[0], "logp")
    assert_bitwise_equal(lse.detach(), results[1], "lse")


def test_the_gradient_is_new_memory_each_time(device: str) -> None:
    leaf = torch.randn(3, 7, device=device).requires_grad_()
    logp = rl_logp.fused_logp(leaf, torch.tensor([0, 1, 2], device=device))
    first, second = (torch.autograd.grad(logp.sum(), leaf, retain_graph=True)[0] for _ in range(2))
    assert len({t.untyped_storage().data_ptr() for t in (leaf, first, second)}) == 3
