"""The examples in the docstrings run as printed."""

import doctest
import importlib
import pkgutil

import pytest

import rl_logp

MODULES = sorted(module.name for module in pkgutil.iter_modules(rl_logp.__path__, "rl_logp."))
# Compiled libraries lie in the package too, and are not Python.
PYTHON = ["rl_logp", *(name for name in MODULES if not name.rpartition(".")[2].startswith("_C_"))]


@pytest.mark.parametrize("name", PYTHON)
def test_the_examples_of(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, verbose=False).failed == 0


@pytest.mark.parametrize("name", [n for n in rl_logp.__all__ if callable(getattr(rl_logp, n))])
def test_everything_public_is_documented(name: str) -> None:
    assert getattr(rl_logp, name).__doc__


@pytest.mark.parametrize("name", ["fused_logp", "FusedLogp", "backends", "require_kernel"])
def test_what_people_call_has_an_example(name: str) -> None:
    examples = doctest.DocTestFinder(recurse=False).find(getattr(rl_logp, name), name)
    assert any(example.examples for example in examples)
