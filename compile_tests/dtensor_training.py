"""One step of training an output layer whose logits are a DTensor: by rows, by vocabulary, by both.

One process that takes the same step makes the same roundings: its rows come in two halves where a
mesh shards them, whose gradients' sum has one order; and its layer is cut where the mesh cuts it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rl_logp
from compile_tests.common import HAS_COMPILER, fresh_compiler

ROWS, WIDTH, VOCAB_SIZE = 24, 32, 96
LEARNING_RATE = 2.0**-7
BACKENDS = ["eager", "aot_eager", *(["inductor"] if HAS_COMPILER else [])]

# Shape of the mesh, over rows and over the vocabulary.
MESHES: dict[str, tuple[int, int]] = {
    "rows over 2": (2, 1),
    "vocabulary over 2": (1, 2),
    "rows over 2, vocabulary over 2": (2, 2),
}


def meshes(size: int) -> dict[str, tuple[int, int]]:
    """Those that have as many processes."""
    return {name: shape for name, shape in MESHES.items() if math.prod(shape) == size}


def arguments(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the layer's weight, targets (each fifth ignored), and advantages."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
    target = torch.randint(VOCAB_SIZE, (ROWS,), generator=generator)
    target[::5] = -100
    advantages = torch.randn(ROWS, generator=generator)
    return hidden.to(device), weight.to(device), target.to(device), advantages.to(device)


def losses_of(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    # Without a minus, which Inductor writes as 0 - x on a GPU: that of 0 has another sign.
    logits = hidden @ weight.t()
    return rl_logp.fused_logp(logits, target, temperature=0.7) * advantages


def one_process(name: str, device: str) -> list[Tensor]:
    """Losses, the gradient of the weight, and the weight after the step."""
    halves, shards = MESHES[name]
    hidden, weight, target, advantages = arguments(device)
    losses, gradients = [], []
    for rows in torch.arange(ROWS, device=device).chunk(halves):
        parts = [part.clone().requires_grad_() for part in weight.chunk(shards)]
        products = [hidden[rows] @ part.t() for part in parts]
        for product in products:  # as a process has it; how a GPU adds may depend on strides
            product.register_hook(Tensor.contiguous)
        logp = rl_logp.vocab_parallel_logp(torch.cat(products, -1), target[rows], temperature=0.7)
        of_rows = logp * advantages[rows]
        of_rows.sum().backward()
        losses.append(of_rows.detach())
        gradients.append(torch.cat([_gradient(part) for part in parts]))
    gradient = sum(gradients[1:], gradients[0])
    return [torch.cat(losses), gradient, weight - LEARNING_RATE * gradient]


def _gradient(tensor: Any) -> Any:
    assert tensor.grad is not None
    return tensor.grad


def train(rank: int, size: int, device: str) -> dict[Any, Any]:
    """What one_process returns, for every mesh of this size and every backend."""
    found = {}
    for name, shape in meshes(size).items():
        mesh = init_device_mesh(device, shape, mesh_dim_names=("rows", "vocabulary"))
        for backend in BACKENDS:
            found[name, backend] = _step(mesh, backend, device)
    return found


def _step(mesh: DeviceMesh, backend: str, device: str) -> list[Tensor]:
    by_rows, by_vocabulary = [Shard(0), Replicate()], [Replicate(), Shard(0)]
    hidden, weight, target, advantages = arguments(device)
    leaf = distribute_tensor(weight, mesh, by_vocabulary).requires_grad_()
    per_row = [distribute_tensor(t, mesh, by_rows) for t in (hidden, target, advantages)]
    run: Callable = losses_of
    with fresh_compiler():
        if backend != "eager":
            run = torch.compile(losses_of, backend=backend, fullgraph=True)
        losses: Any = run(per_row[0], leaf, *per_row[1:])
        losses.sum().backward()
    gradient = _gradient(leaf)
    with torch.no_grad():
        trained: Any = leaf - LEARNING_RATE * gradient.redistribute(mesh, by_vocabulary)
    return [t.full_tensor().detach().cpu() for t in (losses, gradient, trained)]
