"""RunState: the same bits from the same seed and position, other bits everywhere else, restored from a checkpoint."""

import copy
import io
import itertools
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.nn.streams import CALLS_PER_STEP, STALE_FORWARDS, STREAMS_PER_MODULE

EVERYTHING_RANDOM = hb.recipes.nvfp4(hadamard=hb.Hadamard(size=32, signs="fresh"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def model_and_state(seed: int = 0, recipe=EVERYTHING_RANDOM, blocks: int = 2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    report = hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(seed))
    return model, report.state


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(step))


def gradients(model, step: int = 0, forward=None) -> list[torch.Tensor]:
    model.zero_grad()
    (forward or model)(data(step)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def same(a, b) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def train(model, state, steps, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in steps:
        gradients(model, step)
        optimizer.step()
        state.advance()
    return optimizer


def test_a_run_is_reproducible_and_a_seed_is_another_run():
    finals = []
    for seed in (3, 3, 4):
        model, state = model_and_state(seed)
        train(model, state, range(4))
        finals.append([p.detach().clone() for p in model.parameters()])
    assert same(finals[0], finals[1])
    assert not same(finals[0], finals[2])


def test_a_position_repeats_until_it_advances():
    model, state = model_and_state()
    first = gradients(model)
    assert same(first, gradients(model))
    state.advance()
    second = gradients(model)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a.dim() == 2)


def test_every_layer_operand_call_and_step_has_its_own_offset():
    """Offsets of 3 steps, 4 layers, all calls and streams: no two are equal, and none leaves its step."""
    model, state = model_and_state()
    offsets = []
    for step in range(3):
        for module in model.modules():
            if isinstance(module, hb.nn.Linear):
                for call in range(CALLS_PER_STEP):
                    draw = module.place(call).on(torch.device("cpu"))
                    first = int(draw.base[1]) + draw.stream
                    offsets += range(first, first + 16)
                    assert first >> 32 == step
        state.advance()
    assert len(set(offsets)) == len(offsets) == 3 * 4 * STREAMS_PER_MODULE


def test_equal_layers_draw_different_bits():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(3)])
    for layer in model[1:]:
        layer.weight.data.copy_(model[0].weight.data)
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    grads = []
    for layer in model:
        for call in range(2):
            layer.zero_grad()
            layer(data(), call=call).square().sum().backward()
            grads.append(layer.weight.grad.clone())
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(grads, 2))


def test_one_operand_draws_other_bits_in_each_of_its_gemms():
    """dy is quantized for dgrad and for wgrad: each with its own bits even where both see the same matrix."""
    dy = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    spec = hb.NVFP4(rounding="stochastic")
    row, col = hb.quantize_row_col(dy + dy.T, spec, spec, rng=hb.Philox(1))
    assert not torch.equal(row.qdata, col.qdata)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", [EVERYTHING_RANDOM, hb.recipes.nvfp4(), hb.recipes.four_over_six()])
def test_recomputation_draws_the_same_bits(use_reentrant, recipe):
    model, state = model_and_state(5, recipe)
    for step in range(2):
        plain = gradients(model, step)

        def recomputed(x):
            x.requires_grad_(use_reentrant)
            for block in model:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

        assert same(plain, gradients(model, step, recomputed))
        state.advance()


def test_recomputation_without_rng_state_and_with_early_stop():
    model, _ = model_and_state(5)

    def recomputed(x):
        return checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)

    assert same(gradients(model), gradients(model, 0, recomputed))


@pytest.mark.parametrize("through_a_file", [True, False])
def test_a_checkpoint_continues_bit_for_bit(through_a_file):
    model, state = model_and_state(7)
    optimizer = train(model, state, range(3))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state.state_dict()}
    if through_a_file:
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    else:
        saved = copy.deepcopy(saved)
    train(model, state, range(3, 6), optimizer)
    resumed, other = model_and_state(99)
    resumed.load_state_dict(saved["model"])
    fresh = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    fresh.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["state"])
    assert other.position == 3 and other.seed == 7
    train(resumed, other, range(3, 6), fresh)
    assert same(model.parameters(), resumed.parameters())


def test_loading_changes_the_position_in_place():
    """Modules and CUDA graphs hold the tensor itself."""
    state = hb.RunState(1)
    base = state.base
    state.load_state_dict({"version": 1, "seed": 2**64 - 1, "position": 2**31 - 1, "streams": 0})
    assert state.base is base
    assert state.position == 2**31 - 1 and state.seed == 2**64 - 1
    assert state.state_dict() == {"version": 1, "seed": 2**64 - 1, "position": 2**31 - 1, "streams": 0}


@pytest.mark.parametrize(
    "bad",
    [
        {},
        None,
        [],
        {"version": 2, "seed": 0, "position": 0, "streams": 0},
        {"version": 1, "seed": 0, "position": 0},
        {"version": 1, "seed": -1, "position": 0, "streams": 0},
        {"version": 1, "seed": 2**64, "position": 0, "streams": 0},
        {"version": 1, "seed": 0, "position": -1, "streams": 0},
        {"version": 1, "seed": 0, "position": 2**31, "streams": 0},
        {"version": 1, "seed": "0", "position": 0, "streams": 0},
        {"version": 1, "seed": 0, "position": 1.5, "streams": 0},
        {"version": 1, "seed": 0, "position": 0, "streams": None},
        {"version": 1, "seed": 0, "position": 0, "streams": -4},
        {"version": 1, "seed": 0, "position": 0, "streams": 0, "amax": {}},
    ],
)
def test_a_foreign_state_is_refused_and_nothing_changes(bad):
    state = hb.RunState(5)
    state.advance()
    before = state.state_dict()
    with pytest.raises(ValueError, match="state.*RunState"):
        state.load_state_dict(bad)
    assert state.state_dict() == before


def test_a_state_whose_amaxes_are_damaged_leaves_the_schedule_alone():
    state = hb.RunState(5)
    schedule = hb.Schedule([(3, "bf16")]).state_dict()
    with pytest.raises(ValueError, match=r"state\['amaxes'\]\['0'\]=3: not"):
        state.load_state_dict(state.state_dict() | {"schedule": schedule, "step": 2, "amaxes": {"0": 3}})
    assert state.schedule is None and state.step == 0


def test_a_state_of_a_model_with_other_layers_is_refused():
    _, state = model_and_state(0, blocks=2)
    _, larger = model_and_state(0, blocks=3)
    before = state.state_dict()
    with pytest.raises(ValueError, match="streams"):
        state.load_state_dict(larger.state_dict())
    assert state.state_dict() == before


@pytest.mark.parametrize(
    "bad, error", [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)]
)
def test_bad_seeds(bad, error):
    with pytest.raises(error, match="seed"):
        hb.RunState(bad)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_64_bits_of_the_seed_draw(seed):
    place = hb.RunState(seed).philox(3)
    x = data()
    spec = hb.NVFP4(rounding="stochastic")
    q = hb.quantize(x, spec, rng=place)
    assert torch.equal(q.qdata, hb.quantize(x, spec, rng=hb.Philox(seed, 3)).qdata)


def test_the_position_is_in_the_upper_half_of_the_offset():
    state = hb.RunState(9)
    for _ in range(5):
        state.advance()
    spec = hb.NVFP4(rounding="stochastic")
    q = hb.quantize(data(), spec, rng=state.philox(17))
    assert torch.equal(q.qdata, hb.quantize(data(), spec, rng=hb.Philox(9, (5 << 32) + 17)).qdata)


def test_streams_run_out_with_an_error():
    state = hb.RunState(0)
    assert state.reserve_streams(2**32 - 16) == 0
    assert state.reserve_streams(16) == 2**32 - 16
    with pytest.raises(ValueError, match="streams"):
        state.reserve_streams(1)


@pytest.mark.parametrize("count, error", [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("4", TypeError)])
def test_no_number_of_streams_is_refused(count, error):
    state = hb.RunState(0)
    with pytest.raises(error, match="count="):
        state.reserve_streams(count)
    assert state.reserve_streams(0) == state.reserve_streams(2) == 0


def test_too_many_calls_of_one_module_are_refused():
    layer = hb.nn.Linear(16, 16, recipe="nvfp4", state=hb.RunState(0))
    with pytest.raises(ValueError, match="call=16"):
        layer(torch.ones(1, 16), call=CALLS_PER_STEP)


def linear(recipe):
    layer = hb.nn.Linear(16, 16, recipe=recipe, state=hb.RunState(0))
    return lambda x, call: layer(x, call=call)


CALLED = {
    "quantized": linear("nvfp4"),
    "in high precision": linear("bf16"),
    "MLP": lambda x, call: hb.nn.MLP(16, 16, state=hb.RunState(0))(x, call=call),
    "LayerNormLinear": lambda x, call: hb.nn.LayerNormLinear(16, 16, state=hb.RunState(0))(x, call=call),
    "GroupedLinear": lambda x, call: hb.nn.GroupedLinear(1, 16, 16, state=hb.RunState(0))(
        x, torch.tensor([1], dtype=torch.int32), call=call
    ),
    "shared": lambda x, call: hb.nn.forward_shared(x, [hb.nn.Linear(16, 16, state=hb.RunState(0))] * 2, call=call),
    "of torch": lambda x, call: hb.nn.forward_shared(x, [torch.nn.Linear(16, 16)], call=call),
}


@pytest.mark.parametrize("kind", CALLED)
def test_a_call_is_a_number_of_a_run(kind):
    for call in (1.5, 0.0, True, "1", None, torch.tensor(1)):
        with pytest.raises(TypeError, match=f"^call={re.escape(repr(call))}: give an int, 0, 1"):
            CALLED[kind](torch.ones(1, 16), call)
    with pytest.raises(ValueError, match="^call=-1: a module has bits for 16 runs"):
        CALLED[kind](torch.ones(1, 16), -1)
    CALLED[kind](torch.ones(1, 16), 15)


def test_no_layers_share_nothing():
    for modules in ([], ()):
        with pytest.raises(ValueError, match=f"^modules={re.escape(repr(modules))}: give at least one layer"):
            hb.nn.forward_shared(torch.ones(1, 16), modules)


def test_a_forgotten_advance_is_reported_once():
    layer = hb.nn.Linear(16, 16, recipe="nvfp4", state=hb.RunState(0))
    x = torch.ones(1, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STALE_FORWARDS + 3):
            layer(x)
    assert len(caught) == 1 and "advance()" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(STALE_FORWARDS + 1):
            layer(x)
            layer.run_state.advance()
        layer.eval()
        for _ in range(STALE_FORWARDS + 1):
            layer(x)


@pytest.mark.parametrize("is_training", [False, True])
def test_forwards_that_train_nothing_are_no_forgotten_advance(is_training):
    layer = hb.nn.Linear(16, 16, recipe="nvfp4", state=hb.RunState(0)).train(is_training)
    with warnings.catch_warnings(), torch.set_grad_enabled(not is_training):
        warnings.simplefilter("error")
        for _ in range(STALE_FORWARDS + 1):
            layer(torch.ones(1, 16))


def test_a_backward_draws_at_the_position_of_its_forward():
    """A pipeline runs the next forward before this backward."""
    results = []
    for early in (False, True):
        model, state = model_and_state(5)
        loss = model(data()).square().mean()
        if early:
            state.advance()
            model(data())
        loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_without_randomness_need_no_state():
    layer = hb.nn.Linear(16, 16, recipe="mxfp8")
    assert layer.run_state is None
    layer(torch.ones(2, 16)).sum().backward()
    layer.recipe = hb.recipes.nvfp4()
    with pytest.raises(ValueError, match="RunState"):
        layer(torch.ones(2, 16))


def test_shapes_traced_on_meta_leave_the_position_where_it_is():
    state = hb.RunState(5)
    layer = hb.nn.Linear(16, 16, recipe="nvfp4", state=state, device="meta")
    state.advance()
    layer(torch.zeros(4, 16, device="meta")).sum().backward()
    state.advance()
    assert state.position == 2 and state.state_dict()["position"] == 2
    layer.to_empty(device="cpu")
    torch.nn.init.normal_(layer.weight)
    layer(torch.zeros(4, 16)).sum().backward()
    with pytest.raises(ValueError, match=r"device=meta.*position"):
        state.to("meta")


def test_a_deepcopied_model_draws_as_the_original():
    model, state = model_and_state(4)
    twin = copy.deepcopy(model)
    assert same(gradients(model), gradients(twin))
    shared = {id(m.run_state) for m in twin.modules() if isinstance(m, hb.nn.Linear)}
    assert len(shared) == 1 and id(state) not in shared
