"""Do a row's bits depend on the batch it is in? Eight rows alone against many batches.

Every batch size, three positions in it, several seeds; the row's logp and dlogits are compared as
bits with those it has alone.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from benchmarks.providers import Provider
from benchmarks.workloads import Point, draw
from rl_logp.testing import bits

ROWS = 8
SEEDS = 3


def batch_sizes(largest: int) -> list[int]:
    """1 to 9, then around every power of two.

    >>> batch_sizes(33)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33]
    """
    around = {2**k + d for k in range(3, largest.bit_length() + 1) for d in (-1, 0, 1)}
    return sorted(size for size in {*range(1, 10), *around} if size <= largest)


def positions(size: int) -> list[int]:
    """Front, middle and back, as far as they differ.

    >>> positions(1), positions(2), positions(9)
    ([0], [0, 1], [0, 4, 8])
    >>> sum(len(positions(size)) for size in batch_sizes(2048)) * ROWS * SEEDS
    2232
    """
    return sorted({0, size // 2, size - 1})


@dataclass
class Batch:
    """Logits, targets and upstream gradients of some rows."""

    logits: Tensor
    target: Tensor
    grad: Tensor

    def __getitem__(self, rows) -> "Batch":
        return Batch(self.logits[rows], self.target[rows], self.grad[rows])

    def clone(self) -> "Batch":
        return Batch(self.logits.clone(), self.target.clone(), self.grad.clone())

    def put(self, at: Tensor, rows: "Batch") -> None:
        for each in fields(self):
            getattr(self, each.name)[at] = getattr(rows, each.name)


def run(provider: Provider, function, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Bits of what the provider returns for each row, and of dlogits if it has a backward."""
    logits = batch.logits.clone() if provider.overwrites else batch.logits
    logits = logits.detach().requires_grad_(provider.has_backward)
    out = function(logits, batch.target)
    if not provider.has_backward:
        return bits(out), None
    grad = (provider.sign * batch.grad).to(out.dtype)
    return bits(out.detach()), bits(torch.autograd.grad(out, logits, grad)[0])


def sweep(provider: Provider, point: Point, device: torch.device) -> dict[str, int]:
    """Counts of compared and of differing rows, in one seed after the other."""
    function = provider.load(True)
    compared = 0
    differing = torch.zeros(3, dtype=torch.int64, device=device)  # either, logp, dlogits
    for seed in range(SEEDS):
        # The last rows are those that are looked at; the others are the company they get.
        inputs = draw(Point(point.rows + ROWS, point.columns, point.dtype), device, seed)
        everything = Batch(inputs.logits, inputs.target, inputs.grad_logp)
        room, looked_at = everything[: point.rows], everything[point.rows :].clone()
        alone = []
        for row in range(ROWS):
            room.put(torch.tensor([0], device=device), looked_at[[row]])
            alone.append(run(provider, function, room[:1]))
        for size in batch_sizes(point.rows):
            places = torch.tensor(positions(size), device=device)
            company = room[places].clone()
            for first in range(ROWS):
                # Rows first, first + 1, … take the places, so each row has been at each.
                rows = [(first + i) % ROWS for i in range(len(places))]
                room.put(places, looked_at[rows])
                logp, dlogits = run(provider, function, room[:size])
                for place, row in zip(places.tolist(), rows, strict=True):
                    differing += _differs(logp[place], alone[row][0], dlogits, place, alone[row][1])
                    compared += 1
            room.put(places, company)
    either, of_logp, of_dlogits = differing.tolist()
    return {
        "compared_rows": compared,
        "differing_rows": either,
        "differing_logp_rows": of_logp,
        "differing_dlogits_rows": of_dlogits,
    }


def _differs(
    logp: Tensor, logp_alone: Tensor, dlogits: Tensor | None, place: int, alone: Tensor | None
) -> Tensor:
    of_logp = (logp != logp_alone).any()
    if dlogits is None or alone is None:
        return torch.stack([of_logp, of_logp, torch.zeros_like(of_logp)])
    of_dlogits = (dlogits[place] != alone[0]).any()
    return torch.stack([of_logp | of_dlogits, of_logp, of_dlogits])
