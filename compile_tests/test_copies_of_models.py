"""A model that ends in the op can be copied, pickled, saved and sent to another process."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

from compile_tests.common import LanguageModel, assert_same_bits, gradients


def _saved_and_loaded(model: LanguageModel) -> LanguageModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _state_loaded(model: LanguageModel) -> LanguageModel:
    fresh = LanguageModel(temperature=0.7)
    fresh.load_state_dict(model.state_dict())  # strict: the op has no state
    return fresh


COPIES: dict[str, Callable[[LanguageModel], LanguageModel]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save-and-load": _saved_and_loaded,
    "state-dict": _state_loaded,
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("compiled_before", [False, True], ids=["plain", "after-compiling"])
def test_the_copy_computes_the_same(kind: str, compiled_before: bool):
    model = LanguageModel(temperature=0.7)
    tokens = torch.randint(0, 64, (3, 9))
    expected = model(tokens)
    if compiled_before:
        model.compile(backend="aot_eager", fullgraph=True)
        model(tokens)
    copied = COPIES[kind](model)
    assert copied.logp is not model.logp
    for run in (copied, torch.compile(copied, backend="aot_eager", fullgraph=True)):
        actual = run(tokens)
        assert_same_bits(actual, expected, "logp")
        assert_same_bits(
            gradients(actual, *copied.parameters()),
            gradients(model(tokens), *model.parameters()),
            "gradients",
        )


def test_a_deepcopy_of_the_compiled_module_computes_the_same():
    model = LanguageModel()
    tokens = torch.randint(0, 64, (3, 9))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(tokens), model(tokens), "logp")
    assert_same_bits(copy.deepcopy(compiled)(tokens), model(tokens), "logp")


def test_options_are_kept():
    model = LanguageModel(temperature=0.5, return_lse=True)
    copied = pickle.loads(pickle.dumps(model))
    assert vars(copied.logp)["temperature"] == 0.5
    assert repr(copied) == repr(model)
    tokens = torch.randint(0, 64, (3, 9))
    assert_same_bits(copied(tokens), model(tokens), "logp and lse")
