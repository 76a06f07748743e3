"""What check_optimizer_state lets pass trains on as before; what it refuses is named, and nothing has changed yet."""

import copy
from functools import partial

import pytest
import torch

from halfbyte.optimizer_state import check_optimizer_state

OPTIM = torch.optim
WHOLE = {
    "adam": partial(OPTIM.Adam, lr=0.01),
    "adamw": partial(OPTIM.AdamW, lr=0.01),
    "fused": partial(OPTIM.AdamW, lr=0.01, fused=True),
    "foreach": partial(OPTIM.AdamW, lr=0.01, foreach=True),
    "amsgrad": partial(OPTIM.Adam, lr=0.01, amsgrad=True),
    "tensor lr": partial(OPTIM.AdamW, lr=torch.tensor(0.01), fused=True),
    "sgd": partial(OPTIM.SGD, lr=0.1),
    "momentum": partial(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": OPTIM.NAdam,
    "radam": OPTIM.RAdam,
    "adamax": OPTIM.Adamax,
    "adadelta": OPTIM.Adadelta,
    "adagrad": OPTIM.Adagrad,
    "asgd": OPTIM.ASGD,
    "rmsprop": partial(OPTIM.RMSprop, momentum=0.5, centered=True),
    "rprop": OPTIM.Rprop,
    "adafactor": OPTIM.Adafactor,
    "lbfgs": OPTIM.LBFGS,
}


class Lion(OPTIM.Optimizer):
    """A class that is not torch's: sign of a mean of gradients."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros(p.numel()))
                    p.sub_(mean.lerp_(p.grad.view(-1), 0.1).sign().view_as(p), alpha=group["lr"])


def build(make, steps: int = 2):
    """Return an optimizer of a matrix, a vector, a parameter without dimensions and one that never has a gradient."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 6), (5,), (), (3,))]
    optimizer = make(params[:3] if make is OPTIM.LBFGS else [{"params": params[:2]}, {"params": params[2:]}])
    walk(optimizer, params, range(steps))
    return optimizer, params


def walk(optimizer, params, steps) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params[:3]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step(*[lambda: 0.0][: isinstance(optimizer, OPTIM.LBFGS)])


@pytest.mark.parametrize("make", [*WHOLE.values(), Lion], ids=[*WHOLE, "lion"])
def test_whole_states_pass_and_train_on(make):
    for steps in (0, 2):
        optimizer, params = build(make, steps)
        saved = copy.deepcopy(optimizer.state_dict())
        check_optimizer_state(optimizer, saved)
        other, copies = build(make, 0)
        before = repr(other.state_dict())
        check_optimizer_state(other, saved, steps=steps, is_complete=steps == 0)
        assert repr(other.state_dict()) == before
        with torch.no_grad():
            for ours, theirs in zip(copies, params, strict=True):
                ours.copy_(theirs)
        other.load_state_dict(saved)
        walk(optimizer, params, range(2, 4))
        walk(other, copies, range(2, 4))
        assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


def change(*path, value):
    """Return a function that puts a value at a path of a state dict; `del` takes it out."""

    def apply(saved) -> None:
        *parents, last = path
        for key in parents:
            saved = saved[key]
        if value is DELETE:
            del saved[last]
        else:
            saved[last] = value

    return apply


DELETE = object()
OF_2 = "state", 2
OVERLAPPING = torch.zeros(1).expand(4, 6)
ADAM = [
    ((), None, "it is None"),
    ((), [], "it is a list"),
    (("state",), [], "it is a dict, not a dict with a dict 'state'"),
    (("param_groups",), {}, "'param_groups' is not a list"),
    (("param_groups",), [1, 2], "'param_groups' is not a list of dicts"),
    (("param_groups",), DELETE, "'param_groups' is not a list"),
    (("param_groups", 1), DELETE, "1 parameter groups, the optimizer 2"),
    (("param_groups", 0, "params"), [0], r"param_groups\[0\] has 1 parameters, the optimizer's has 2"),
    (("param_groups", 0, "params"), "01", r"param_groups\[0\]\['params'\] is '01'"),
    (("param_groups", 0, "params"), [0, 0], r"param_groups\[0\]\['params'\] names a parameter .* before"),
    (("param_groups", 1, "params"), [1, 2], r"param_groups\[1\]\['params'\] names a parameter .* before"),
    (("param_groups", 0, "params"), [0, 1.0], "not a list of the parameters' numbers"),
    (("param_groups", 0, "lr"), DELETE, r"param_groups\[0\]: the option 'lr' is missing"),
    (("param_groups", 0, "lr"), float("nan"), "'lr' is nan, expected is a finite number"),
    (("param_groups", 0, "lr"), "0.1", "'lr' is '0.1', expected is a finite number"),
    (("param_groups", 0, "lr"), torch.ones(2), r"'lr' is float32 \[2\], expected is a finite number"),
    (("param_groups", 1, "lr"), -1.0, r"param_groups\[1\]: the option 'lr' is -1.0"),
    (("param_groups", 0, "betas"), (0.9,), "'betas' is a tuple, expected is 2 finite numbers"),
    (("param_groups", 0, "betas"), (0.9, 1.5), "'betas' is .*1.5"),
    (("param_groups", 0, "betas"), (0.9, 1.0), "'betas' is .*1.0.*, expected is what AdamW takes"),
    (("param_groups", 0, "fused"), "yes", "'fused' is 'yes', expected is True, False or None"),
    (("param_groups", 0, "capturable"), True, "'capturable' is True, which parameters on the CPU cannot use"),
    (("param_groups", 0, "momentum"), 0.9, "AdamW has no option 'momentum'"),
    (("more",), 1, "the key 'more' belongs to no state of AdamW"),
    (("state", 7), {}, "one of parameter 7, which no group has"),
    (("state", 0), None, "that of parameter 0 is a NoneType"),
    (("state", 0, "exp_avg"), torch.ones(2), r"parameter 0: 'exp_avg' is float32 \[2\], expected is float32 \[4, 6\]"),
    (("state", 0, "exp_avg"), torch.ones(24), r"'exp_avg' is float32 \[24\], expected is float32 \[4, 6\]"),
    (("state", 0, "exp_avg"), torch.ones(4, 6).double(), r"'exp_avg' is float64 \[4, 6\], expected is float32"),
    (("state", 0, "exp_avg"), torch.ones(4, 6).int(), r"'exp_avg' is int32 \[4, 6\], expected is float32"),
    (("state", 0, "exp_avg"), torch.ones(4, 6).to_sparse(), "'exp_avg' has elements that share memory, or gaps"),
    (("state", 0, "exp_avg"), torch.ones(4, 6, device="meta"), "'exp_avg' is on the meta device"),
    (("state", 0, "exp_avg"), OVERLAPPING, "'exp_avg' has elements that share memory"),
    (("state", 0, "exp_avg"), torch.ones(8, 6)[::2], "'exp_avg' has elements that share memory, or gaps"),
    (("state", 0, "exp_avg"), torch.ones(6, 4).t(), r"'exp_avg' has strides \(1, 4\), expected are \(6, 1\)"),
    (("state", 0, "exp_avg"), None, r"'exp_avg' is None, expected is float32 \[4, 6\]"),
    (("state", 0, "exp_avg"), {"exp_avg": {}}, r"'exp_avg' is a dict, expected"),
    (
        ("state", 0, "exp_avg"),
        DELETE,
        "parameter 0: 'exp_avg' is missing; expected are 'step', 'exp_avg', 'exp_avg_sq'",
    ),
    (("state", 1, "extra"), torch.ones(5), "parameter 1: 'extra' is unknown"),
    (("param_groups", 0, "amsgrad"), True, "parameter 0: 'max_exp_avg_sq' is missing"),
    ((*OF_2, "step"), DELETE, "parameter 2: 'step' is missing"),
    ((*OF_2, "step"), "x", "parameter 2: 'step' is 'x', expected is a finite float32"),
    ((*OF_2, "step"), True, "'step' is True"),
    ((*OF_2, "step"), torch.ones(1), r"'step' is float32 \[1\] of 1.0, expected is a finite float32 \[\]"),
    ((*OF_2, "step"), torch.ones(3), r"'step' is float32 \[3\], expected"),
    ((*OF_2, "step"), torch.tensor(2), r"'step' is int64 \[\] of 2, expected"),
    ((*OF_2, "step"), torch.tensor(torch.nan), r"'step' is float32 \[\] of nan, expected"),
    ((*OF_2, "step"), torch.tensor(torch.inf), r"'step' is float32 \[\] of inf, expected"),
    ((*OF_2, "step"), torch.tensor(-1.0), r"'step' is float32 \[\] of -1.0, expected is a number of steps"),
    ((*OF_2, "step"), torch.tensor(1.5), r"'step' is float32 \[\] of 1.5, expected is a number of steps"),
    ((*OF_2, "step"), torch.tensor(1e20), "expected is a number of steps"),
    ((*OF_2, "step"), 10**400, "expected is a number of steps"),
]


@pytest.mark.parametrize("path, value, message", ADAM)
def test_damage_is_named(path, value, message):
    optimizer, _ = build(WHOLE["fused"])
    saved = copy.deepcopy(optimizer.state_dict())
    if path:
        change(*path, value=value)(saved)
    else:
        saved = value
    with pytest.raises(ValueError, match=f"^optimizer state: .*{message}.*; load what state_dict"):
        check_optimizer_state(optimizer, saved)
    check_optimizer_state(optimizer, optimizer.state_dict())


OTHERS = [
    ("momentum", (("state", 0, "momentum_buffer"), torch.ones(2)), r"'momentum_buffer' is float32 \[2\]"),
    ("momentum", (("state", 0, "step"), 1), "parameter 0: 'step' is unknown"),
    ("momentum", (("param_groups", 0, "momentum"), DELETE), "the option 'momentum' is missing"),
    ("sgd", (("state", 0), {"exp_avg": torch.ones(4, 6)}), "parameter 0: 'exp_avg' is unknown"),
    ("amsgrad", (("state", 1, "max_exp_avg_sq"), DELETE), "parameter 1: 'max_exp_avg_sq' is missing"),
    ("amsgrad", (("state", 1, "max_exp_avg_sq"), None), "parameter 1: 'max_exp_avg_sq' is None"),
    ("rmsprop", (("state", 1, "grad_avg"), DELETE), "parameter 1: 'grad_avg' is missing"),
    ("nadam", (("state", 1, "mu_product"), torch.tensor(torch.nan)), "parameter 1: 'mu_product' is .*nan"),
    ("adafactor", (("state", 0, "row_var"), torch.ones(1, 6)), r"'row_var' is float32 \[1, 6\], .* \[4, 1\]"),
    ("adafactor", (("state", 1, "row_var"), torch.ones(1)), "parameter 1: 'row_var' is unknown"),
    ("lion", (("state", 0, "mean"), torch.ones(2)), r"'mean' is float32 \[2\], the optimizer's is float32 \[24\]"),
    ("lion", (("param_groups", 1, "lr"), DELETE), r"param_groups\[1\]: the option 'lr' is missing"),
    ("lion", (("state", 0, "step"), torch.nan), "parameter 0: 'step' is nan"),
]


@pytest.mark.parametrize("name, damage, message", OTHERS)
def test_damage_of_other_optimizers_is_named(name, damage, message):
    optimizer, _ = build(WHOLE.get(name, Lion))
    saved = copy.deepcopy(optimizer.state_dict())
    change(*damage[0], value=damage[1])(saved)
    with pytest.raises(ValueError, match=message):
        check_optimizer_state(optimizer, saved)


@pytest.mark.parametrize("name", ["fused", "momentum", "adagrad", "lion"])
def test_an_emptied_state_is_refused_where_steps_were_made(name):
    optimizer, params = build(WHOLE.get(name, Lion))
    saved = copy.deepcopy(optimizer.state_dict())
    for emptied in ({}, {index: {} for index in range(4)}):
        with pytest.raises(ValueError, match="parameter 0 has none, though the run had made steps"):
            check_optimizer_state(optimizer, {**saved, "state": emptied}, steps=2)
    saved["state"].pop(3, None)  # it never had a gradient
    check_optimizer_state(optimizer, saved, steps=2)
    params[3].requires_grad_(False)
    check_optimizer_state(optimizer, saved, steps=2, is_complete=True)
    saved["state"][1] = {}
    with pytest.raises(ValueError, match="parameter 1 has none"):
        check_optimizer_state(optimizer, saved, is_complete=True)


def test_counts_do_not_pass_the_steps_of_the_run():
    optimizer, _ = build(WHOLE["fused"])
    saved = optimizer.state_dict()
    check_optimizer_state(optimizer, saved, steps=3)  # one of them was skipped
    with pytest.raises(ValueError, match="'step' is 2, and the run had made 1 steps"):
        check_optimizer_state(optimizer, saved, steps=1)
    with pytest.raises(ValueError, match="'step' is 2, and the run had made 0 steps"):
        check_optimizer_state(optimizer, saved, steps=0)
    optimizer, _ = build(WHOLE["momentum"])
    with pytest.raises(ValueError, match="an optimizer that has stepped, and the run had made no step"):
        check_optimizer_state(optimizer, optimizer.state_dict(), steps=0)


def test_tensors_that_share_memory_are_refused():
    optimizer, _ = build(WHOLE["foreach"])
    for key, other in (("exp_avg", "exp_avg_sq"), ("step", "step")):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0][key] = saved["state"][0 if key != other else 1][other]
        with pytest.raises(ValueError, match="two of its tensors share memory"):
            check_optimizer_state(optimizer, saved)


def test_states_of_other_releases_schedules_and_precisions_pass():
    optimizer, _ = build(WHOLE["adamw"])
    OPTIM.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["a_later_flag"] = False
    del saved["param_groups"][1]["foreach"]  # an earlier release had none
    saved["state"][0]["step"] = 2.0  # as before torch 1.12
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].t().contiguous().t()  # no fused kernel reads it
    check_optimizer_state(build(WHOLE["adamw"])[0], saved)
    wide = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))
    wide.grad = torch.ones_like(wide)
    optimizer = OPTIM.Adam([("weight", wide)])
    optimizer.step()
    check_optimizer_state(optimizer, optimizer.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.ones(4, 6)
    with pytest.raises(
        ValueError, match=r"parameter 0 \(weight\): 'exp_avg' is float32 \[4, 6\], expected is complex64"
    ):
        check_optimizer_state(optimizer, saved)


def test_momentum_that_was_switched_on_or_off_passes():
    optimizer, _ = build(WHOLE["sgd"])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = {"momentum_buffer": None}  # as torch 1 left it
    check_optimizer_state(optimizer, saved, steps=2)
    optimizer, _ = build(WHOLE["momentum"])
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    check_optimizer_state(optimizer, optimizer.state_dict(), steps=2)


class Mine(OPTIM.AdamW):
    """Steps as torch does: what it keeps is known."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class Other(OPTIM.SGD):
    """Keeps what it likes."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["anything"] = [1, "x"]


def test_subclasses_are_known_by_how_they_step():
    optimizer, _ = build(Mine)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"'exp_avg' is float32 \[2\]"):
        check_optimizer_state(optimizer, saved)
    optimizer, _ = build(Other)
    check_optimizer_state(optimizer, optimizer.state_dict())
