"""FusedLogp is fused_logp with its options fixed."""

import copy
import inspect
import pickle

import pytest
import torch
from calls import sample

import rl_logp
from rl_logp.testing import assert_bitwise_equal


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_module_has_the_bits_of_the_function(
    device: str, temperature: float, return_lse: bool
) -> None:
    case = sample((5, 33), torch.bfloat16, device)
    module = rl_logp.FusedLogp(temperature=temperature, return_lse=return_lse)
    actual = module(case.logits, case.target)
    expected = rl_logp.fused_logp(
        case.logits, case.target, temperature=temperature, return_lse=True
    )
    if not return_lse:
        actual, expected = (actual,), expected[:1]
    for a, e in zip(actual, expected, strict=True):
        assert_bitwise_equal(a, e, "the module's result")


def test_its_options_are_those_of_the_function() -> None:
    function = inspect.signature(rl_logp.fused_logp).parameters
    module = inspect.signature(rl_logp.FusedLogp).parameters
    assert {n: p.default for n, p in module.items()} == {
        n: p.default for n, p in function.items() if n not in ("logits", "target")
    }


def test_it_has_no_state_and_survives_a_copy() -> None:
    module = rl_logp.FusedLogp(temperature=0.5)
    assert not module.state_dict()
    case = sample((5, 33))
    expected = module(case.logits, case.target)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_bitwise_equal(copied(case.logits, case.target), expected, "the copy's result")
    assert repr(module) == "FusedLogp(temperature=0.5, return_lse=False)"
