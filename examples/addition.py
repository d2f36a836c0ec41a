"""The task: two-digit addition, whose answer a program can check. Text is bytes, one token each."""

import torch
from torch import Tensor

LIMIT = 50  # operands are 0 .. LIMIT - 1
PROMPT_BYTES = len("07+15=")
ANSWER_BYTES = len(str(2 * (LIMIT - 1))) + 1
END = ord("\n")
IGNORED = -100  # any target outside the vocabulary: logp and gradient are exactly 0


def problems(held_out: int, device: str) -> tuple[Tensor, Tensor]:
    """Every pair of operands in random order, ``[problems, 2]``: (to train on, held out)."""
    pairs = torch.cartesian_prod(torch.arange(LIMIT), torch.arange(LIMIT))
    pairs = pairs[torch.randperm(len(pairs))].to(device)
    return pairs[held_out:], pairs[:held_out]


def _encode(texts: list[str], device: torch.device) -> Tensor:
    return torch.tensor([list(text.encode()) for text in texts], device=device)


def prompts(pairs: Tensor) -> Tensor:
    """``[n, PROMPT_BYTES]``, "07+15=" as bytes."""
    return _encode([f"{a:02d}+{b:02d}=" for a, b in pairs.tolist()], pairs.device)


def answers(pairs: Tensor) -> Tensor:
    """``[n, ANSWER_BYTES]``, "22\\n" as bytes; ignored after the end.

    Digits come in the order in which one adds by hand, the least significant first, so that a carry
    is known by the time it is needed.
    """
    texts = [str(a + b)[::-1] + "\n" for a, b in pairs.tolist()]
    return completion_target(_encode([t.ljust(ANSWER_BYTES, "\n") for t in texts], pairs.device))


def completion_target(tokens: Tensor) -> Tensor:
    """The tokens up to and with the first END; IGNORED after it."""
    is_end = (tokens == END).int()
    ended_before = is_end.cumsum(-1) - is_end > 0
    return tokens.masked_fill(ended_before, IGNORED)


def reward(target: Tensor, pairs: Tensor) -> Tensor:
    """1 where the completion is exactly the sum, else 0; ``[n]``."""
    return (target == answers(pairs)).all(-1).float()
