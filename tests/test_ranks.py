"""Data-parallel ranks: one seed, bits of their own, signs in common, and a state that knows nothing of ranks."""

import copy
import io
import itertools
import pickle
import re
from pathlib import Path

import linear_cases as cases
import pytest
import torch
from grouped_cases import fresh_everywhere

import halfbyte as hb
from halfbyte.reference.philox import block_bytes, sign_bits
from halfbyte.rng import StreamPhilox

CPU = torch.device("cpu")
NUMERICS = (Path(__file__).resolve().parent.parent / "docs" / "numerics.md").read_text()
GROUP_STEP = 0x9E3779B97F4A7C15  # numerics.md section 8
NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)
RANKS = (0, 1, 2, 65535)


def key(seed: int, rank: int) -> int:
    """The rule of numerics.md section 4."""
    return (seed + rank * 2**48) % 2**64


def places(seed: int, rank: int, offset: int = 0) -> cases.Places:
    return cases.Places(hb.Philox(key(seed, rank), offset), hb.Philox(seed, offset))


def both(two: cases.Places) -> StreamPhilox:
    """Return one place that draws bits and signs at two."""
    return StreamPhilox(two.bits.on(CPU).base, 0, None, two.signs.on(CPU).base)


def bytes_at(place) -> list[int]:
    return block_bytes(torch.tensor([0]), place.on(CPU)).flatten().tolist()


def signs_at(place) -> list[int]:
    return sign_bits(128, place.signs_on(CPU)).tolist()


class TestKeys:
    def test_the_vector_in_the_definition(self):
        for rank in (0, 1, 2):
            drawn = " ".join(map(str, bytes_at(hb.RunState(1234, rank=rank).philox(5))))
            assert re.search(rf"^rank {rank} +{drawn}$", NUMERICS, re.MULTILINE), (rank, drawn)

    def test_no_two_seeds_ranks_and_experts_share_a_key(self):
        """Equal keys need ds + dr·2^48 + dg·step = 0 mod 2^64 of differences; mod 2^48 that leaves ds and dg."""
        distances = [min(dg * GROUP_STEP % 2**48, -dg * GROUP_STEP % 2**48) for dg in range(1, 2**16)]
        assert min(distances[:4095]) == 40_015_530_894  # no |ds| below it makes up for another group
        assert "40,015,530,894" in NUMERICS and min(distances) >= 2**16
        for dr in (1, 2**16 - 1):  # within one group ds = 0 mod 2^48, so ds = 0, and then ranks below 2^16 differ
            assert dr * 2**48 % 2**64 != 0

    @pytest.mark.parametrize("seed", [0, 1, 65535, 2**48 - 1, 2**63, 2**64 - 1])
    @pytest.mark.parametrize("rank", RANKS)
    def test_the_key_of_a_place(self, seed, rank):
        state = hb.RunState(seed, rank=rank)
        assert int(state.base[0]) % 2**64 == key(seed, rank)
        assert bytes_at(state.philox(3)) == bytes_at(hb.Philox(key(seed, rank), 3))
        for group in (0, 1, 4095):
            drawn = state.philox(3).on(CPU).group(group)
            assert int(drawn.base[0]) % 2**64 == (key(seed, rank) + group * GROUP_STEP) % 2**64

    def test_places_further_on_keep_the_signs_of_all_ranks(self):
        one, other = (hb.RunState(7, rank=rank).philox(3).at(5) for rank in (0, 2))
        assert signs_at(one) == signs_at(other) == signs_at(hb.Philox(7, 8))
        assert bytes_at(other) == bytes_at(hb.Philox(key(7, 2), 8)) != bytes_at(one)

    def test_a_seed_is_no_rank(self):
        drawn = [bytes_at(hb.RunState(seed, rank=rank).philox(0)) for seed in range(4) for rank in range(4)]
        assert not any(a == b for a, b in itertools.combinations(drawn, 2))

    def test_signs_are_those_of_the_run(self):
        spec = hb.NVFP4(rotation=hb.Hadamard(size=32, signs="fresh"))
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        expected = hb.quantize(x, spec, sign_rng=hb.Philox(7, 3)).qdata
        for rank in RANKS:
            place = hb.RunState(7, rank=rank).philox(3)
            assert signs_at(place) == sign_bits(128, hb.Philox(7, 3).on(CPU)).tolist()
            assert torch.equal(hb.quantize(x, spec, sign_rng=place).qdata, expected)


@pytest.mark.parametrize(
    ("rank", "error"),
    [(-1, ValueError), (65536, ValueError), (True, TypeError), (False, TypeError), (0.0, TypeError), ("1", TypeError)],
)
def test_what_is_no_rank_is_refused(rank, error):
    with pytest.raises(error, match=f"^rank={rank!r}: give"):
        hb.RunState(0, rank=rank)
    state = hb.RunState(0, rank=2)
    before = state.base.clone()
    with pytest.raises(error, match=f"^rank={rank!r}: give"):
        state.set_rank(rank)
    assert state.rank == 2 and torch.equal(state.base, before)


def test_a_rank_is_set_in_place():
    """CUDA graphs and compiled code hold the tensors themselves."""
    state = hb.RunState(9)
    assert state.rank == 0 and not state.is_placed and hb.RunState(9, rank=0).is_placed
    base, place = state.base, state.philox(4)
    address = base.data_ptr()
    state.advance()
    assert state.set_rank(3) is state and state.rank == 3 and state.is_placed
    state.load_state_dict({"version": 1, "seed": 11, "position": 6, "streams": 0})
    state.advance()
    assert state.base is base and base.data_ptr() == address
    assert bytes_at(place) == bytes_at(hb.Philox(key(11, 3), (7 << 32) + 4))
    assert signs_at(place) == signs_at(hb.Philox(11, (7 << 32) + 4))


def test_a_checkpoint_knows_no_rank():
    states = [hb.RunState(5, rank=rank) for rank in RANKS]
    for state in states:
        state.advance()
    saved = [state.state_dict() for state in states]
    assert all(each == {"version": 1, "seed": 5, "position": 1, "streams": 0} for each in saved)
    resumed = hb.RunState(0, rank=2)
    resumed.load_state_dict(saved[0])
    assert resumed.rank == 2 and bytes_at(resumed.philox(0)) == bytes_at(states[2].philox(0))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy"])
def test_copies_are_on_the_same_rank_and_advance_whole(how):
    state = hb.RunState(5, rank=4)
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda s: pickle.loads(pickle.dumps(s))}[how](
            state
        )
    assert twin.rank == 4 and twin.is_placed
    twin.advance()
    assert bytes_at(twin.philox(1)) == bytes_at(hb.Philox(key(5, 4), (1 << 32) + 1))
    assert signs_at(twin.philox(1)) == signs_at(hb.Philox(5, (1 << 32) + 1))
    if how != "copy":  # which shares the position
        assert state.position == 0 and bytes_at(state.philox(1)) == bytes_at(hb.Philox(key(5, 4), 1))


def test_what_was_pickled_before_there_were_ranks_is_on_rank_0():
    old = hb.RunState.__new__(hb.RunState)
    base = torch.tensor([5, 3 << 32])
    old.__setstate__({"seed": 5, "_base": base, "_streams": 256, "schedule": None, "step": 0, "advances": 3})
    assert (old.rank, old.is_placed, old.position) == (0, False, 3)
    old.advance()
    assert bytes_at(old.philox(1)) == bytes_at(hb.Philox(5, (4 << 32) + 1))
    old.set_rank(2)
    assert bytes_at(old.philox(1)) == bytes_at(hb.Philox(key(5, 2), (4 << 32) + 1))
    assert signs_at(old.philox(1)) == signs_at(hb.Philox(5, (4 << 32) + 1))


def near(actual: torch.Tensor, product: cases.Product) -> bool:
    return bool(((actual.double() - product.value).abs() <= 1e-5 * product.bound + 1e-30).all())


@pytest.mark.parametrize("recipe", [fresh_everywhere(), cases.RECIPES["fresh32"]], ids=["everywhere", "wgrad"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_every_operand_of_a_layer_draws_with_the_rank(kind, recipe):
    """All bits differ from those of rank 0 and all signs agree, or an operand is not what it should be."""
    state = hb.RunState(21, rank=3)
    x, w, _, dy = cases.tensors(24, 32, 16)
    if kind == "linear":
        layer, offsets, groups = hb.nn.Linear(32, 16, bias=False, recipe=recipe, state=state), (), [slice(0, 24)]
        layer.weight.data.copy_(w)
    else:
        layer, groups = hb.nn.GroupedLinear(2, 32, 16, recipe=recipe, state=state), [slice(0, 15), slice(15, 24)]
        layer.weight.data.copy_(torch.stack([w, -2 * w]))
        offsets = (torch.tensor([15, 24], dtype=torch.int32),)
    state.advance()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, *offsets)
    state.advance()  # as pipelines do: the backward draws where its forward did
    y.backward(dy)
    weights, gradients = (t.reshape(-1, 16, 32) for t in (layer.weight.detach(), layer.weight.grad))
    for index, rows in enumerate(groups):
        draws = cases.Places(*(place.group(index) for place in places(21, 3, 1 << 32)))
        want = cases.expected(x[rows], weights[index], None, dy[rows], recipe, draws)
        assert near(y[rows], want.y) and near(leaf.grad[rows], want.dx) and near(gradients[index], want.dw)
        other = cases.expected(x[rows], weights[index], None, dy[rows], recipe, draws._replace(bits=draws.signs))
        assert not near(gradients[index], other.dw)  # with rank 0's bits


def test_fused_layers_draw_as_their_parts():
    """The amaxes that norms and activations hand over are of the signs that the rank's operands are rotated with."""
    torch.manual_seed(0)
    recipe = cases.RECIPES["fresh32"]
    layer = hb.nn.LayerNormMLP(32, 48, recipe=recipe, state=hb.RunState(8, rank=5))
    x = torch.randn(16, 32)
    layer(x).square().sum().backward()
    fused = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    gate, up, down = (getattr(layer, name) for name in layer.names)
    rng = [both(places(8, 5, linear.stream)) for linear in (gate, up, down)]
    h = hb.functional.rms_norm(x, layer.norm.weight, layer.norm.eps)
    a, b = hb.linear_shared(h, [gate.weight, up.weight], None, recipe, rng=rng[:2])
    hb.linear(hb.functional.activation("swiglu", a, b), down.weight, None, recipe, rng=rng[2]).square().sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.parameters(), fused, strict=True))


def test_layers_that_made_their_own_state_take_a_rank_too():
    torch.manual_seed(3)
    layer = hb.nn.Linear(32, 32, bias=False)
    x = torch.randn(32, 32)

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        layer(x).square().sum().backward()
        return layer.weight.grad.clone()

    first = gradient()
    layer.run_state.set_rank(1)
    assert layer.run_state.is_private and not torch.equal(gradient(), first)
    layer.run_state.set_rank(0)
    assert torch.equal(gradient(), first)
    state = hb.RunState(0, rank=7)
    model = torch.nn.Sequential(layer, torch.nn.Linear(32, 32))
    assert hb.quantize_(model, "nvfp4", keep=NOTHING_KEPT, state=state).state is layer.run_state is state


def test_a_rank_set_later_compiles_nothing_anew():
    torch._dynamo.reset()
    layer = hb.nn.Linear(32, 32, recipe=cases.RECIPES["fresh32"], state=hb.RunState(0))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 32)
    results = []
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rank in (0, 5, 5):
            layer.run_state.set_rank(rank)
            with torch._dynamo.config.patch(error_on_recompile=rank != 0):
                compiled(x).square().sum().backward()
            results.append(layer.weight.grad.clone())
            layer.zero_grad()
            layer(x).square().sum().backward()
            assert torch.equal(layer.weight.grad, results[-1])
            layer.zero_grad()
            layer.run_state.advance()
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))
    torch._dynamo.reset()
