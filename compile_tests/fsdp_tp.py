"""A model on a mesh of 2 x 2, or 1 x 2: FSDP2's parameters, and tensor parallelism's vocabulary.

One process that takes the same steps makes the same roundings. Its batch comes in halves, as in
data_parallel.py; and its head is cut in two where the mesh cuts it, so that its products are of the
same shape, and the gradient of the hidden states is a sum of two addends, which has one order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rl_logp
from compile_tests import data_parallel
from compile_tests.data_parallel import LEARNING_RATE, STEPS, Result, losses_of, new_model

SHARDS = 2


class CutHead(torch.nn.Module):
    """A linear layer without bias, as that many products."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        products = [torch.nn.functional.linear(hidden, w) for w in self.weight.chunk(SHARDS)]
        for product in products:  # as a process has it; how a GPU adds may depend on strides
            product.register_hook(Tensor.contiguous)
        return torch.cat(products, -1)


class OneShard(torch.nn.Module):
    """Scores the whole vocabulary by the operators on shards, whose bits the fallback's are not."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.vocab_parallel_logp(logits, target, temperature=0.7)


def in_one_process(device: str) -> torch.nn.Module:
    model: Any = new_model(device)
    model.head = CutHead(model.head.weight)
    model.logp = OneShard()
    return model


def one_process(size: int, device: str) -> list[Result]:
    """What the processes of each part of the batch should get."""
    return data_parallel.one_process(torch.float32, device, in_one_process, size // SHARDS)


def train(rank: int, size: int, device: str) -> Result:
    """Trains, and returns what data_parallel's processes do."""
    mesh = init_device_mesh(device, (size // SHARDS, SHARDS), mesh_dim_names=("dp", "tp"))
    model = new_model(device)
    head = ColwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(model, mesh["tp"], {"head": head})
    for module in (model.body, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def run(tokens: Tensor) -> Tensor:
        return model(tokens).to_local()

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = losses_of(run, step, mesh.get_local_rank("dp"), device)
        losses.append(loss.detach())
        loss.sum().backward()
        optimizer.step()
    return data_parallel.on_cpu({"losses": losses, **data_parallel._copies(model)})
