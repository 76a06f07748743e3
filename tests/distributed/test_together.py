"""q, k and v that a model runs with `forward_shared`, under torch's own styles."""

import together_checks as checks
import torch
from ranks import run
from torch import nn

import halfbyte as hb


def test_layers_run_together_have_the_bits_of_one_process():
    assert run(2, checks.bits)[0] == []


def test_ranks_meet_once_in_a_forward_and_once_in_a_backward_where_layers_run_together():
    """In a forward for the amax that three weights share; in a backward for gradients, of which ranks hold parts.

    One by one, q, k and v meet in the backward each: but for a k whose gradients are MXFP8, without an amax, and a v in
    parts along K, whose gradient is whole on every rank.
    """
    found = run(2, checks.meetings)[0]
    assert found["together"] == (1, 1)
    assert found["one by one"] == found["hooked"] == found["hooked_behind"] == found["own_style"] == (1, 3)
    assert (
        found["compiled_alone"][1] == 3
        and found["twice"][1] == 3
        and found["other_recipe"] == (1, 2)
        and found["other_placement"][1] == 2
    )


def test_other_ways_to_run_them_have_the_same_bits():
    assert run(2, checks.ways)[0] == []
    assert run(1, checks.ways)[0] == []


def test_what_hooks_change_is_seen():
    assert run(2, checks.hooks)[0] == []


def test_what_is_no_layer_is_called():
    """A function, a compiled module and a layer, of plain tensors."""
    plain = nn.Linear(8, 4)
    x, scripted = torch.randn(3, 8), torch.jit.script(plain)
    ys = hb.nn.forward_shared(x, [torch.neg, scripted, plain])
    assert torch.equal(ys[0], -x) and torch.equal(ys[1], plain(x)) and torch.equal(ys[2], plain(x))
