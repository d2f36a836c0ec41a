"""Inputs and the shapes that are measured."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOGITS_STD = 2.5
ROWS_AT_A_TIME = 2**26  # elements of scratch while inputs are drawn


@dataclass(frozen=True)
class Point:
    """A shape and a dtype."""

    rows: int
    columns: int
    dtype: str = "bf16"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.columns * self.itemsize

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} {self.dtype}"


def parse_point(text: str) -> Point:
    """
    >>> parse_point("256x151936"), parse_point("8x50257:fp32")
    (Point(rows=256, columns=151936, dtype='bf16'), Point(rows=8, columns=50257, dtype='fp32'))
    """
    match = re.fullmatch(r"(\d+)x(\d+)(?::(bf16|fp16|fp32))?", text)
    if match is None:
        raise ValueError(f"expected a shape such as 256x151936 or 256x151936:fp32, got {text!r}")
    return Point(int(match[1]), int(match[2]), match[3] or "bf16")


QWEN, LLAMA3, LLAMA2, GPT2 = 151936, 128256, 32000, 50257
LARGE = [Point(32768, QWEN), Point(38400, LLAMA3), Point(155136, LLAMA2), Point(98816, GPT2)]
SMALL = [Point(rows, QWEN) for rows in (256, 64, 16, 4, 1)]
OTHER_DTYPES = [Point(16384, QWEN, "fp32"), Point(16384, QWEN, "fp16")]
SPEED = [*LARGE, *SMALL, Point(16384, QWEN), Point(8192, QWEN), *OTHER_DTYPES]
MASKED = [Point(32768, QWEN)]
CHUNKS = [Point(32768, QWEN)]
ENTROPY = [Point(32768, QWEN), Point(8192, QWEN), Point(98816, GPT2)]
INPLACE = [Point(32768, QWEN)]
ACCURACY = [Point(8192, QWEN), Point(2048, QWEN, "fp16"), Point(2048, QWEN, "fp32")]
INVARIANCE = [Point(2048, QWEN)]  # the rows are the largest batch
LATER = {Point(16384, QWEN), *OTHER_DTYPES, *ACCURACY[1:]}  # after what the targets are about

GRAPHED_ROWS = 1024  # smaller batches are timed by replaying a CUDA graph


@dataclass(frozen=True)
class Inputs:
    """``logits`` has a row to spare behind it, which one provider's interface asks for."""

    logits: Tensor
    target: Tensor
    grad_logp: Tensor  # fp32, every value exact in bf16


def draw(point: Point, device: torch.device, seed: int = 0) -> Inputs:
    """Normal logits, targets sampled from their softmax, normal upstream gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, columns = point.rows, point.columns
    logits = torch.empty(rows + 1, columns, dtype=DTYPES[point.dtype], device=device)
    target = torch.empty(rows + 1, dtype=torch.int64, device=device)
    step = max(1, ROWS_AT_A_TIME // columns)
    for start in range(0, rows + 1, step):
        chunk = logits[start : start + step]
        noise = torch.empty(chunk.shape, device=device)
        chunk.copy_(noise.normal_(0, LOGITS_STD, generator=generator))
        gumbel = noise.exponential_(generator=generator).log_().neg_()
        target[start : start + step] = gumbel.add_(chunk).argmax(-1)
    grad = torch.randn(rows, device=device, generator=generator).bfloat16().float()
    return Inputs(logits[:rows], target[:rows].clone(), grad)
