"""Passes of layers whose weights exist as codes alone are repeated from records, as those of other layers."""

from dataclasses import replace

import pytest
import torch
from repeating import anew, check_repeats, kernels, same

import halfbyte as hb
from halfbyte.distributed import cast_master_weights_to_nvfp4, post_all_gather_processing
from halfbyte.functional.linear import backward_pass, forward_pass
from halfbyte.kernels import prepared
from halfbyte.tensor import PrimaryWeight

pytestmark = pytest.mark.usefixtures("kernels")
__all__ = ["kernels"]
NVFP4 = hb.recipes.nvfp4()
RECIPES = {
    "nvfp4": NVFP4,
    "four_over_six": hb.recipes.four_over_six(),
    "qat": hb.Recipe(fprop=NVFP4.fprop, backward="dequantized"),
}


def codes(w, spec, dtype=torch.bfloat16):
    """Return w as codes, in both orientations, and the values that they stand for."""
    weight = PrimaryWeight.empty(tuple(w.shape), spec)
    cast_master_weights_to_nvfp4([weight], [w.flatten()], [0], None)
    post_all_gather_processing([weight])
    return weight.as_parameter()


def inputs(i):
    generator = torch.Generator().manual_seed(i)
    x, dy = (torch.randn(16, n, generator=generator).bfloat16() for n in (48, 32))
    return x.requires_grad_(), dy


def step(weights, recipe, i):
    """Return outputs and gradients of q/k/v-like layers that share x."""
    x, dy = inputs(i)
    for w in weights:
        w.grad = None
    outputs = hb.linear_shared(x, weights, None, recipe, rng=[hb.Philox(5, 16 * j) for j in range(len(weights))])
    torch.autograd.backward(outputs, [dy] * len(outputs))
    return (*(y.detach() for y in outputs), x.grad, *(w.grad for w in weights))


def masters(n):
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(32, 48, generator=generator).bfloat16() for _ in range(n)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_pass_is_repeated(name, count):
    recipe = RECIPES[name]
    weights = [codes(w, recipe.fprop.b) for w in masters(count)]
    check_repeats(lambda i: step(weights, recipe, i))
    known = {key[0] for key in prepared._RECORDS}
    assert {forward_pass, backward_pass} <= known
    plain = [w.requires_grad_() for w in masters(count)]
    with anew():
        wanted = step(plain, recipe, 3)
    same(step(weights, recipe, 3), wanted)


def test_a_forward_without_gradients_is_repeated():
    weight = codes(masters(1)[0], NVFP4.fprop.b)

    def run(i):
        with torch.no_grad():
            return hb.linear(inputs(i)[0], weight, None, NVFP4, rng=hb.Philox(5, 0))

    check_repeats(run)
    assert forward_pass in {key[0] for key in prepared._RECORDS}


def test_other_codes_of_a_shape_are_read_anew():
    """A record has no codes of the call that made it."""
    first, second = (codes(w, NVFP4.fprop.b) for w in masters(2))
    step([first], NVFP4, 1)
    with anew():
        wanted = step([second], NVFP4, 1)
    same(step([second], NVFP4, 1), wanted)


def test_a_split_mean_goes_on_reading_values():
    recipe = replace(NVFP4, activation_mean="split")
    weight = codes(masters(1)[0], NVFP4.fprop.b)
    with anew():
        wanted = step([weight], recipe, 2)
    same(step([weight], recipe, 2), wanted)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_a_pass_with_an_activation_is_repeated(name):
    from halfbyte.functional.activation import _activated_forward, linear_activation
    from halfbyte.functional.linear import Layers

    count = 2 if name == "silu" else 1
    name = "swiglu" if name == "silu" else name
    weights = [codes(w, NVFP4.fprop.b) for w in masters(count)]

    def run(weights, i):
        x, dy = inputs(i)
        for w in weights:
            w.grad = None
        none = [None] * count
        rng = [hb.Philox(5, 16 * j) for j in range(count)]
        h, amaxes = linear_activation(x, Layers(list(weights), none, none, none, list(none), rng), name, NVFP4)
        h.backward(dy)
        return (h.detach(), *amaxes, x.grad, *(w.grad for w in weights))

    check_repeats(lambda i: run(weights, i))
    assert _activated_forward in {key[0] for key in prepared._RECORDS}
    plain = [w.requires_grad_() for w in masters(count)]
    with anew():
        wanted = run(plain, 3)
    same(run(weights, 3), wanted)
