"""RunState.follow: the bits of a loop that calls advance() after every micro-batch; one warning where nothing moves."""

import copy
import dataclasses
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.nn.streams import STALE_FORWARDS

RECIPE = hb.recipes.nvfp4(hadamard=hb.Hadamard(size=32, signs="fresh"))
ALL = hb.Keep(names=(), last_fraction=0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def build(seed=1):
    torch.manual_seed(0)
    model = nn.Sequential(Net(), Net())
    return model, hb.quantize_(model, RECIPE, keep=ALL, state=hb.RunState(seed)).state


def data(i):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(i))


def train(model, after_backward, *, steps=3, accumulated=2, forward=None, between=None):
    """Return all parameters after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for i in range(accumulated):
            (forward or model)(data(step * accumulated + i)).square().mean().backward()
            after_backward()
            if between is not None:
                between()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def nothing():
    pass


@functools.cache
def by_hand(**options):
    model, state = build()
    return train(model, state.advance, **options)


def test_following_a_model_is_advancing_after_every_backward():
    model, state = build()
    state.follow(model)
    assert same(train(model, nothing), by_hand())
    assert state.position == 5 and state.state_dict()["position"] == 6, "the sixth micro-batch is over"


def test_calling_advance_beside_it_changes_nothing():
    model, state = build()
    state.follow(model)
    assert same(train(model, state.advance), by_hand())
    assert state.position == state.state_dict()["position"] == 6


@pytest.mark.parametrize("grad", [False, True])
def test_evaluation_in_between_changes_nothing(grad):
    model, state = build()
    state.follow(model)

    def evaluate():
        with torch.set_grad_enabled(grad):  # forgotten no_grad
            model.eval()(data(99))
            model.train()(data(98))

    assert same(train(model, nothing, between=evaluate), by_hand())


@pytest.mark.parametrize("whole", [False, True])
def test_recomputation_draws_what_the_forward_drew(whole):
    """The recomputed forward runs after the backward has begun, and through the followed model itself."""
    model, state = build()
    state.follow(model)

    def recomputed(x):
        if whole:
            return checkpoint(model, x, use_reentrant=False)
        return model[1](checkpoint(model[0], x, use_reentrant=False))

    if not whole:
        state.follow(model[1])
    assert same(train(model, nothing, forward=recomputed), by_hand())


def test_forwards_before_one_backward_share_a_position():
    """As in DPO; a loop of one's own advances once, too."""
    results = []
    for follows in (False, True):
        model, state = build()
        if follows:
            state.follow(model)
        for step in range(2):
            (model(data(step)) * model(data(step + 10))).mean().backward()
            if not follows:
                state.advance()
        results.append([p.grad for p in model.parameters()])
        assert state.state_dict()["position"] == 2
    assert same(*results)


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: tuple


class Opaque:
    __slots__ = ("loss",)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "opaque"])
def test_outputs_of_any_kind(kind):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.state = build()

        def forward(self, x):
            loss = self.inner(x).square().mean()
            if kind == "dict":
                return {"logits": x, "nested": [loss]}
            if kind == "dataclass":
                return Output(loss, (x,))
            opaque = Opaque()
            opaque.loss = loss
            return opaque

    def loss_of(output):
        return output["nested"][0] if kind == "dict" else output.loss

    model = Wrapped()
    model.state.follow(model)
    for step in range(3):
        assert model.state.next_position == step
        loss_of(model(data(step))).backward()
    assert model.state.next_position == 3


def test_two_models_of_one_state_move_it_once():
    model, state = build()
    state.follow(model[0])
    state.follow(model[1])
    for step in range(3):
        assert state.next_position == step
        model[1](model[0](data(step))).sum().backward()


def test_following_an_optimizer_moves_with_its_steps():
    """One position per step; advance() beside it, before or after the step, means the same move."""
    for when in ("never", "before", "after"):
        model, state = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state.follow(optimizer)
        for step in range(4):
            assert state.position == step, when
            model(data(step)).sum().backward()
            for due in ("before", "after"):
                if when == due:
                    state.advance()
                if due == "before":
                    optimizer.step()


def test_model_and_optimizer_move_once():
    model, state = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handles = [state.follow(model), state.follow(optimizer)]
    for step in range(4):
        assert state.next_position == step
        model(data(step)).sum().backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    for _ in range(2):
        model(data(0)).sum().backward()
        optimizer.step()
    assert state.position <= 4 and not model._forward_hooks


def test_compiled_wholes_are_followed_from_outside_or_refused():
    model, state = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    state.follow(compiled)
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        assert state.next_position == step
        compiled(data(step)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    model, state = build()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"leader=Sequential: compile\(\) was called.*follow the optimizer"):
        state.follow(model)


def test_compiled_blocks_in_a_followed_model():
    model, state = build()
    for block in model:
        block.compile(backend="eager", fullgraph=True)
    state.follow(model)
    assert same(train(model, nothing, steps=2), by_hand(steps=2))


def test_a_checkpoint_between_backward_and_forward_is_after_the_micro_batch():
    whole, state = build()
    state.follow(whole)
    expected = train(whole, nothing, steps=2, accumulated=1)
    model, state = build()
    state.follow(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(data(0)).square().mean().backward()
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict()))
    model, state = build(seed=7)
    state.follow(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for part, values in zip((model, optimizer, state), saved, strict=True):
        part.load_state_dict(values)
    model(data(1)).square().mean().backward()
    optimizer.step()
    assert same(model.parameters(), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_followed_model_follow_their_own_state(copied):
    model, state = build()
    state.follow(model)
    model(data(0)).sum().backward()
    twin = copied(model)
    own = twin[0].first.run_state
    for step in range(2):
        twin(data(step)).sum().backward()
    assert own is not state and own.next_position == 3 and state.next_position == 1


def test_what_cannot_be_followed():
    _, state = build()
    with pytest.raises(TypeError, match="leader=str"):
        state.follow("model")
    with pytest.raises(ValueError, match="leader=Linear: no layer of it draws from this RunState"):
        state.follow(nn.Linear(2, 2))


def told(caught):
    return [str(one.message) for one in caught if "random bits" in str(one.message)]


@pytest.mark.parametrize("compiled, fused", [(False, False), (False, True), (True, True)])
def test_a_forgotten_advance_is_said_once_at_the_second_step(compiled, fused):
    model, _ = build()
    run = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            run(data(step)).sum().backward()
            optimizer.step()
            assert len(told(caught)) == (step > 0)
    assert "4 layers" in told(caught)[0] and "report.state.follow(model)" in told(caught)[0]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("after", ["step", "backward"])
def test_loops_that_advance_hear_nothing(after):
    """Two optimizers that take turns, and one whose RunState is another model's, too."""
    model, state = build()
    other, _ = build()
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.01) for block in model]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            model(data(step)).sum().backward()
            if after == "backward":
                state.advance()
            for optimizer in optimizers:
                optimizer.step()
            if after == "step":
                state.advance()
        for block in other:
            block.requires_grad_(False)
            block(data(0))


def test_a_state_that_is_loaded_behind_a_followed_step_moves_with_the_next_advance():
    """The step had moved the position already, but not that of the checkpoint."""
    model, state = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state.follow(optimizer)
    saved = state.state_dict()
    model(data(0)).sum().backward()
    optimizer.step()
    assert (saved["position"], state.position) == (0, 1)
    state.load_state_dict(saved)
    state.advance()
    assert state.position == 1


def test_layers_built_one_by_one_have_one_warning():
    model = nn.Sequential(*(hb.nn.Linear(32, 32, recipe="nvfp4") for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(data(0)).sum().backward()
            optimizer.step()
    (message,) = told(caught)
    assert "pass the run's RunState as state=" in message


def test_forwards_without_optimizer_have_one_warning_in_all():
    model, _ = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STALE_FORWARDS + 6):
            model[0].first(data(0))
            model[1].first(data(0))
    assert len(told(caught)) == 1 and caught[0].filename == __file__
