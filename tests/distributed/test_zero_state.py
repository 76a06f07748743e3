"""Checkpoints of ZeroOptimizer with optimizers, options and gradients that are not the usual ones, on one rank."""

import warnings
from functools import partial

import pytest
import ranks
import small_models
import torch
import zero_checks as checks

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)


class Momentum(torch.optim.Optimizer):
    """Momentum in bf16 and its running sum in fp64; a count that is an integer."""

    wrong: object = None

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for master in group["params"]:
                state = self.state[master]
                if not state:
                    state["momentum"] = torch.zeros_like(master, dtype=torch.bfloat16)
                    state["total"] = torch.full_like(master, 1 / 3, dtype=torch.float64)
                    state["count"] = torch.tensor(2**24)
                    if self.wrong is not None:
                        state["extra"] = self.wrong
                state["count"] += 1
                state["momentum"].mul_(0.9).add_(master.grad.bfloat16())
                state["total"] += state["momentum"].double() / 3
                master.data.sub_(state["total"].float(), alpha=0.01)


def build(optimizer, options=None, **config):
    torch.manual_seed(0)
    model = checks.Bigram(24).bfloat16()
    state = hb.quantize_(model, "nvfp4", keep=small_models.NOTHING_KEPT, state=hb.RunState(0)).state
    config = ZeroConfig(bucket_numel=3000, max_norm=1.0, **config)
    return model, state, ZeroOptimizer(model, optimizer, param_options=options, config=config)


def goes_on(optimizer, options=None):
    """Return the checkpoint after two steps, having compared two more of the same run and of one that loads it."""
    run, other = build(optimizer, options), build(optimizer, options)
    checks.train(0, *run, range(2))
    other[1].load_state_dict(run[1].state_dict())
    saved = run[2].state_dict()
    other[2].load_state_dict(saved)
    assert checks.train(0, *other, range(2, 4)) == checks.train(0, *run, range(2, 4))
    return saved


def test_parameters_whose_options_give_them_other_state():
    saved = goes_on(SGD, lambda name, p: {} if name.startswith("mlp") else {"momentum": 0.0})
    assert {name for name, state in saved["state"].items() if state} == {n for n in saved["state"] if "mlp" in n}


def test_state_keeps_its_dtypes():
    saved = goes_on(Momentum)
    state = saved["state"]["embed_tokens.weight"]
    assert (state["momentum"].dtype, state["total"].dtype) == (torch.bfloat16, torch.float64)
    assert state["count"] == 2**24 + 2 and saved["scalars"] == {"count": "int64"}


def test_a_checkpoint_of_another_optimizer_is_refused():
    one, other = build(SGD), build(ADAMW)
    checks.train(0, *one, range(1))
    with pytest.raises(ValueError, match="'dampening' and no 'amsgrad', unlike this AdamW"):
        other[2].load_state_dict(one[2].state_dict())
    torch.optim.lr_scheduler.StepLR(one[2].inner, 1)
    saved = one[2].state_dict()
    saved["groups"] = [{k: v for k, v in group.items() if k != "nesterov"} for group in saved["groups"]]
    build(SGD)[2].load_state_dict(saved)  # an older release's options, and a schedule's


def test_a_learning_rate_that_is_a_tensor_is_copied():
    adamw = partial(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True)
    zeros = build(adamw)[2], build(adamw)[2]
    saved = zeros[0].state_dict()
    zeros[0].param_groups[0]["lr"].fill_(1.0)
    zeros[1].load_state_dict(saved)
    zeros[1].param_groups[0]["lr"].fill_(2.0)
    assert saved["groups"][0]["lr"] == torch.tensor(0.01)


def test_options_that_are_lists_are_copied():
    def momentum(params):
        made = Momentum(params)
        made.param_groups[0]["rates"] = [0.1, 0.2]
        return made

    zeros = build(momentum)[2], build(momentum)[2]
    saved = zeros[0].state_dict()
    zeros[0].param_groups[0]["rates"][0] = 1.0
    zeros[1].load_state_dict(saved)
    zeros[1].param_groups[0]["rates"][0] = 2.0
    assert saved["groups"][0]["rates"] == [0.1, 0.2]


def bytes_kept(rank: int, world: int) -> list[tuple[int, int]]:
    """Elements of what each master's state is, and of the memory that it holds on to."""
    run, other = build(ADAMW), build(ADAMW)
    checks.train(rank, *run, range(1))
    other[2].load_state_dict(run[2].state_dict())
    values = [v for state in other[2].inner.state.values() for v in state.values() if v.dim()]
    return [(v.numel(), v.untyped_storage().nbytes() // v.element_size()) for v in values]


def test_loaded_state_holds_on_to_no_more_than_the_part_of_its_rank():
    for sizes in ranks.run(2, bytes_kept):
        assert sizes and all(held == own for own, held in sizes)


def test_a_checkpoint_repairs_a_run_whose_gradients_were_nan():
    """Clipping multiplies by a norm that is NaN, also what lies between parameters and counts in the next norm."""
    model, state, zero = build(ADAMW)
    saved, position = zero.state_dict(), state.state_dict()
    good = checks.train(0, model, state, zero, range(2))
    (checks.loss_of(model, checks.tokens(0, 0)) * torch.nan).backward()
    assert zero.step().isnan()
    zero.load_state_dict(saved)
    state.load_state_dict(position)
    assert checks.train(0, model, state, zero, range(2)) == good


def test_gradients_that_were_dropped_are_no_part_of_the_next_step():
    """Those of a micro-batch whose step nobody waited for."""
    run, other = build(ADAMW), build(ADAMW)
    with other[2].accumulate():
        (3 * checks.loss_of(other[0], checks.tokens(0, 99))).backward()
    other[2].zero_grad()
    assert checks.train(0, *other, range(2)) == checks.train(0, *run, range(2))


@pytest.mark.parametrize("wrong, what", [(torch.zeros(3), r"has shape \[3\]"), ({}, "is a dict")])
def test_state_of_other_shapes_warns_and_is_not_saved(monkeypatch, wrong, what):
    monkeypatch.setattr(Momentum, "wrong", wrong)
    run = build(Momentum)
    with pytest.warns(UserWarning, match=f"state 'extra' of embed_tokens.weight {what}.*state_dict.. will refuse"):
        checks.train(0, *run, range(1))
    with warnings.catch_warnings(action="error"):
        checks.train(0, *run, range(1))
    with pytest.raises(ValueError, match=f"state 'extra' of embed_tokens.weight {what}"):
        run[2].state_dict()


class LAMB(torch.optim.SGD):
    """As in other libraries: known by its name."""


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.LBFGS, LAMB])
def test_optimizers_that_look_at_a_whole_parameter_are_refused(optimizer):
    with pytest.raises(ValueError, match=f"optimizer: {optimizer.__name__} looks at more than one element.*AdamW"):
        build(optimizer)
