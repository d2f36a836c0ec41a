"""Runs a function in several processes that are one group: what tests and benchmarks spread."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def _available(device: str) -> bool:
    return dist.is_available() and dist.is_backend_available(BACKENDS[device])


needs_gloo = pytest.mark.skipif(not _available("cpu"), reason="needs torch.distributed with gloo")
needs_nccl = pytest.mark.skipif(not _available("cuda"), reason="needs torch.distributed with NCCL")
ON_CPUS = pytest.param("cpu", marks=needs_gloo)
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.two_gpus, needs_nccl])
DEVICES = {"cpu": ON_CPUS, "cuda": ON_GPUS}


def run_processes(
    size: int, device: str, folder: Path, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """What ``function(rank, size, device, *args)`` returned in each process.

    On GPUs, each process has one, which is its current device. The processes import the function,
    so it must be one of a module. What it returns goes through a file of ``folder``.
    """
    spawn(_worker, (size, device, str(folder), function, args), nprocs=size)
    return [torch.load(folder / f"results.{rank}") for rank in range(size)]


def _worker(
    rank: int, size: int, device: str, folder: str, function: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    # A pool of compilers for each process would take longer to start than it saves.
    torch._inductor.config.compile_threads = 1
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        BACKENDS[device],
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=5 if device == "cpu" else 1),
    )
    torch.save(function(rank, size, device, *args), f"{folder}/results.{rank}")
    dist.destroy_process_group()
