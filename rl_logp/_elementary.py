"""exp and log1p whose bits do not depend on where in a tensor an element stands.

Torch on the CPU may take one implementation for elements that fill a vector register and another
for those left over, and the two round differently: exp2 does, and of exp it is up to the library
that torch was built with. Sums, products, divisions and integer operations have one result each, so
on the CPU they are all there is.
"""

import math

import torch
from torch import Tensor

# ln(2) in two parts, of which the first has so few bits that its products here are exact.
_LN2_PARTS = {
    torch.float32: (0.693145751953125, 1.428606765330187e-06),
    torch.float64: (6.93147180369123816490e-01, 1.90821492927058770002e-10),
}
# Arguments are clamped to where 2^n is 0 and infinite.
_EXP_RANGE = {torch.float32: (-88.0, 88.9), torch.float64: (-709.0, 710.0)}
# The integer of the same size, the exponent bits of 1, and how many bits are the fraction's.
_EXPONENT = {torch.float32: (torch.int32, 127, 23), torch.float64: (torch.int64, 1023, 52)}
# Of the series on [-ln(2) / 2, ln(2) / 2]: what is left out does not show.
_EXP_TERMS = {torch.float32: 7, torch.float64: 13}

_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD


def exp(x: Tensor) -> Tensor:
    """exp(x), fp32 or fp64, to about one unit in the last place; a subnormal result may be 0."""
    if x.device.type != "cpu":  # where one function serves every element
        return x.exp()
    high, low = _LN2_PARTS[x.dtype]
    x = x.clamp(*_EXP_RANGE[x.dtype])
    n = (x * math.log2(math.e)).round_()
    x.sub_(n * high).sub_(n * low)
    terms = _EXP_TERMS[x.dtype]
    power = torch.full_like(x, 1 / math.factorial(terms))
    for k in reversed(range(terms)):
        power.mul_(x).add_(1 / math.factorial(k))
    integer, one, fraction_bits = _EXPONENT[x.dtype]
    scale = n.to(integer).add_(one).bitwise_left_shift_(fraction_bits)
    return power.mul_(scale.view(x.dtype))


def log1p(x: Tensor) -> Tensor:
    """log(1 + x) of fp64 x >= 0, to about one unit in the last place."""
    if x.device.type != "cpu":
        return x.log1p()
    total = 1 + x
    lost = (x - (total - 1)) / total  # what the sum rounded away
    bits = total.view(torch.int64)
    k = (bits - _SQRT_HALF_BITS) >> 52
    reduced = (bits - (k << 52)).view(torch.float64)  # in [sqrt(1/2), sqrt(2))
    s = (reduced - 1) / (reduced + 1)  # log(reduced) = 2 * atanh(s)
    square = s * s
    series = torch.full_like(x, 1 / 23)
    for n in range(21, 0, -2):
        series.mul_(square).add_(1 / n)
    high, low = _LN2_PARTS[torch.float64]
    k = k.double()
    return k * high + (2 * s * series + (lost + k * low))
