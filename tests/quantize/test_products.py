"""Large products in the parts that tensor cores multiply exactly, as far as a CPU can tell: what is cut, and what the parts add up to."""

from __future__ import annotations

import pytest
import torch

from gemq.quantize.products import add_crossed, add_in_parts, halves, split


@pytest.mark.parametrize("short", ["neither", "left", "right"])
def test_a_product_in_parts_of_eleven_bits_is_the_product(short):
    left, right = torch.randn(30, 5000), torch.randn(5000, 40)
    if short == "left":
        left = left.to(torch.bfloat16).float()
    elif short == "right":
        right = right.to(torch.bfloat16).float()
    exact = left.double() @ right.double() + 1
    cut = torch.ones(30, 40)
    rounded: list[torch.Tensor] = []

    class TensorCores(torch.overrides.TorchFunctionMode):
        """They take 11 bits of a number: what has more would be cut there, and the product be another one."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.addmm_:
                total, a, b = args
                rounded.extend(value for value in (a, b) if split(value)[1].any())
                return total.copy_(total.double() + split(a)[0].double() @ split(b)[0].double())
            return function(*args, **(kwargs or {}))

    with TensorCores():
        add_in_parts(cut, left, right, left_is_short=short == "left", right_is_short=short == "right")
    assert (cut - exact).norm() < 1e-6 * exact.norm()
    assert all(value.abs().max() < 1e-2 for value in rounded), "what is cut are low parts, by 2^-11 of 2^-11"


def test_a_number_is_split_into_eleven_bits_and_the_rest():
    value = torch.randn(100, 7) * torch.exp(10 * torch.randn(100, 7))
    high, low = split(value)
    assert torch.equal(high + low, value)
    for part, bits in ((high, 11), (low, 13)):
        mantissa = part.frexp().mantissa.double() * 2**bits
        assert torch.equal(mantissa, mantissa.round())
    assert torch.equal(split(torch.arange(-128.0, 128.0))[1], torch.zeros(256))


def test_the_difference_of_two_bfloat16_is_a_sum_of_two_such():
    torch.manual_seed(0)
    x = (torch.randn(5000, 16) * torch.exp(2 * torch.randn(16))).to(torch.bfloat16)
    for apart in (0.01, 0.2, 2.0):
        y = (x.float() * (1 + apart * torch.randn(x.shape)) + apart * torch.randn(x.shape)).to(torch.bfloat16)
        difference = y.float() - x.float()
        high, low = halves(difference)
        assert high.dtype == low.dtype == torch.bfloat16
        assert (high.float() + low.float() - difference).abs().max() <= 2**-16 * difference.abs().max()
        exact = difference.double().T @ x.double()
        made = torch.cat([high, low]).double().T @ torch.cat([x, x]).double()
        assert (made - exact).norm() < 1e-6 * exact.norm()
        assert low.any()  # both are needed
        added = torch.ones(16, 16)
        add_crossed(added, x, y)
        assert (added.double() - 1 - exact).norm() < 1e-5 * exact.norm()
