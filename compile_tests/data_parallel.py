"""What the processes of test_data_parallel.py run. A module of its own, so that they can import it.

Two processes train a model on half of the batch each. One process that goes through the halves one
after the other, and weighs each by 1/2, makes the same roundings: dividing by two is exact, and a
sum of two addends has one order. So losses, gradients and trained parameters are compared as bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from compile_tests.common import OP, LanguageModel, fresh_compiler
from compile_tests.graphs import calls

WORLD_SIZE = 2
STEPS = 3
LEARNING_RATE = 2.0**-7  # a power of two: an update rounds once, however it is vectorised

# "losses": a tensor for each step; "gradients" of the last, "parameters" after it: by name;
# "compiled": how many of the compiler's graphs hold the op.
Result = dict[str, Any]


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """One rank's tokens, no two the same, and the advantages of all but the first of each row.

    A token that came twice would have its embedding's gradients added up, in bf16 by eager, in fp32
    by inductor.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randperm(64, generator=generator)[: 4 * 9].view(4, 9)
    return tokens, torch.randn(4, 8, generator=generator)


def new_model(device: str) -> LanguageModel:
    """The same parameters on every device."""
    torch.manual_seed(0)
    return LanguageModel(temperature=0.7).to(device)


def losses_of(run: Callable, step: int, rank: int, device: str) -> Tensor:
    """A policy gradient loss for each token."""
    tokens, advantages = data(step, rank)
    return -run(tokens.to(device)) * advantages.to(device)


def one_process(
    param_dtype: torch.dtype,
    device: str,
    new_model: Callable[[str], torch.nn.Module] = new_model,
    ranks: int = WORLD_SIZE,
) -> list[Result]:
    """What each rank should get, by one process that goes through their data in turn."""
    model = new_model(device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses: list[list[Tensor]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            low = {name: p.to(param_dtype) for name, p in model.named_parameters()}
            run = partial(torch.func.functional_call, model, low)
            loss = losses_of(run, step, rank, device)
            losses[rank].append(loss.detach())
            (loss / ranks).sum().backward()
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return [
        on_cpu({"losses": of_rank, "gradients": gradients, "parameters": parameters})
        for of_rank in losses
    ]


def _fsdp1(model: LanguageModel) -> torch.nn.Module:
    device = next(model.parameters()).device
    wrap = partial(FullyShardedDataParallel, device_id=device, use_orig_params=True)
    model.body = wrap(model.body)
    return wrap(model)


def _fsdp2(model: LanguageModel, param_dtype: torch.dtype | None = None) -> torch.nn.Module:
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
    fully_shard(model.body, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


WRAPPERS: dict[str, Callable[[LanguageModel], torch.nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fsdp2-bf16": partial(_fsdp2, param_dtype=torch.bfloat16),
}


def _train(wrapper: str, backend: str, rank: int, device: str) -> Result:
    model = WRAPPERS[wrapper](new_model(device))
    compiler = CompileCounterWithBackend(backend)
    run = torch.compile(model, backend=compiler) if backend != "eager" else model
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = losses_of(run, step, rank, device)
        losses.append(loss.detach())
        loss.sum().backward()
        optimizer.step()
    compiled = sum(calls(graph, OP.fused_logp) for graph in compiler.graphs)
    return {"losses": losses, "compiled": compiled, **_whole(model)}


def _whole(model: Any) -> Result:
    """Gradients and parameters, gathered from the shards, by the names they have unwrapped."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return _copies(model)
    return _copies(model)


def _copies(model: torch.nn.Module) -> Result:
    def whole(tensor: Tensor | None) -> Tensor | None:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return None if tensor is None else tensor.detach().clone()

    named = {
        name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): parameter
        for name, parameter in model.named_parameters()
    }
    return {
        "gradients": {name: whole(parameter.grad) for name, parameter in named.items()},
        "parameters": {name: whole(parameter) for name, parameter in named.items()},
    }


def train(rank: int, size: int, device: str, backends: list[str]) -> dict[Any, Result]:
    """Trains under every wrapper and backend."""
    found = {}
    for wrapper in WRAPPERS:
        for backend in backends:
            with fresh_compiler():
                found[wrapper, backend] = on_cpu(_train(wrapper, backend, rank, device))
    return found


def on_cpu(result: Any) -> Any:
    """Where the results of all ranks, and those of one process, are compared."""
    return tree_map_only(Tensor, Tensor.cpu, result)
