"""A state that does not fit is refused by ZeroOptimizer with the place that is wrong named, and nothing has changed."""

import copy
from functools import partial

import pytest
import ranks
import small_models
import torch
import zero_checks as checks

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer

ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DELETE = object()
NAME = "mlp.down_proj.weight"  # [24, 48]


class Mean(torch.optim.Optimizer):
    """A class that is not torch's: a running mean in bf16, and a count that is no tensor."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1, "decay": 0.9})

    def step(self):
        for group in self.param_groups:
            for master in group["params"]:
                state = self.state[master]
                mean = state.setdefault("mean", torch.zeros_like(master, dtype=torch.bfloat16))
                state["count"] = state.get("count", 0) + 1
                mean.mul_(group["decay"]).add_(master.grad.bfloat16())
                master.data.sub_(mean.float(), alpha=group["lr"])


def build(optimizer, group=None):
    torch.manual_seed(0)
    model = checks.Bigram(24).bfloat16()
    report = hb.quantize_(model, "nvfp4", keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    config = ZeroConfig(bucket_numel=3000, timeout=checks.TIMEOUT)
    return model, report.state, ZeroOptimizer(model, optimizer, group, config=config)


def damaged(good: dict, path: tuple, value) -> dict:
    saved = copy.deepcopy(good)
    *parents, last = path
    inner = saved
    for key in parents:
        inner = inner[key]
    if value is DELETE:
        del inner[last]
    else:
        inner[last] = value(inner[last]) if callable(value) else value
    return saved


def emptied(state: dict) -> dict:
    return {name: {} for name in state}


OF = "state", NAME
ANY = [
    (("version",), 4, "not of a ZeroOptimizer of version 3"),
    (("version",), "3", "not of a ZeroOptimizer"),
    (("keys",), DELETE, "not of a ZeroOptimizer"),
    (("more",), 1, "the key 'more' belongs to no ZeroOptimizer"),
    (
        ("masters", NAME),
        torch.ones(2),
        rf"state\['masters'\]\['{NAME}'\] is float32 \[2\], expected is float32 \[24, 48\]",
    ),
    (("masters", NAME), lambda t: t.double(), r"is float64 \[24, 48\], expected is float32"),
    (("masters", NAME), lambda t: t.to("meta"), "expected is float32"),
    (("masters", NAME), lambda t: t.to_sparse(), "expected is float32"),
    (("masters", NAME), None, r"\['mlp.down_proj.weight'\] is None, expected"),
    (("masters", "x"), torch.ones(2), r"state\['masters'\]: 'x' is on one side only"),
    (("state", NAME), None, rf"state\['state'\]\['{NAME}'\] is None, expected is a dict"),
    (("state",), emptied, "is missing"),
    (("state", NAME), {}, rf"state\['state'\]\['{NAME}'\]: '.*' is missing"),
    ((*OF, "extra"), 1, "'extra' is in no list of what was saved"),
    (("keys", NAME), DELETE, rf"state\['keys'\]: '{NAME}' is on one side only"),
    (("groups", 0), [], "not all of them are dicts"),
    (("groups", 0, "params"), [], r"state\['groups'\]\[0\]: 'params' are in it"),
    (("groups", 0, "lr"), "x", r"state\['groups'\]\[0\]: the option 'lr' is 'x', expected is a finite number"),
    (("groups", 0, "lr"), torch.nan, "'lr' is nan"),
    (("groups", 0, "lr"), DELETE, "the option 'lr' is missing"),
    (("groups", 0, "names"), DELETE, "parameters are grouped as"),
]
BY_OPTIMIZER = {
    ADAMW: [
        ((*OF, "step"), "x", rf"\['{NAME}'\]: 'step' is 'x', expected is a finite number"),
        ((*OF, "step"), torch.nan, "'step' is nan, expected"),
        ((*OF, "step"), -3.0, "'step' is -3.0, expected is a number of steps"),
        ((*OF, "step"), 1e30, "'step' is 1e.30, expected is a number of steps"),
        ((*OF, "step"), 0.5, "'step' is 0.5, expected is a number of steps"),
        ((*OF, "step"), torch.tensor, "'step' is float32 .*, expected is a finite number"),
        ((*OF, "step"), DELETE, "'step' is missing"),
        ((*OF, "exp_avg"), torch.ones(2), r"'exp_avg' is float32 \[2\], expected is float32 \[24, 48\]"),
        ((*OF, "exp_avg"), lambda t: t.half(), "'exp_avg' is float16 .* to be kept as float16, expected is float32"),
        ((*OF, "exp_avg"), lambda t: t.to("meta"), r"'exp_avg' is meta float32 \[24, 48\], expected is float32"),
        ((*OF, "exp_avg"), lambda t: t.tolist(), "'exp_avg' is a list"),
        ((*OF, "exp_avg"), 1.0, "'exp_avg' is 1.0"),
        ((*OF, "exp_avg"), DELETE, "'exp_avg' is missing"),
        (("groups", 0, "betas"), (0.9,), "'betas' is a tuple, expected is 2 finite numbers"),
        (("groups", 0, "amsgrad"), True, "'max_exp_avg_sq' is missing"),
        (("groups", 0, "momentum"), 0.5, "AdamW has no option 'momentum'"),
        (("scalars", "step"), DELETE, "'step' is .* to be kept as None, expected is float32"),
        (("scalars", "step"), "floaty", "'floaty': no dtype"),
        (("scalars", "step"), "bool", "kept as bool, expected is float32"),
        (("scalars", "other"), "float32", r"state\['scalars'\] has 'other', the state of no parameter does"),
    ],
    SGD: [
        ((*OF, "momentum_buffer"), torch.ones(24), r"'momentum_buffer' is float32 \[24\]"),
        ((*OF, "momentum_buffer"), None, "'momentum_buffer' is None to be kept as None, expected is float32"),
    ],
    Mean: [
        ((*OF, "mean"), lambda t: t.float(), "'mean' is float32 .*, expected is bfloat16"),
        ((*OF, "mean"), torch.ones(2).bfloat16(), r"'mean' is bfloat16 \[2\], expected is .*\[24, 48\]"),
        ((*OF, "count"), [1], r"'count' is a list, expected is a number"),
        (("groups", 0, "decay"), DELETE, "the option 'decay' is missing"),
    ],
}


@pytest.mark.parametrize("optimizer", BY_OPTIMIZER, ids=("adamw", "sgd", "mean"))
def test_damage_is_named_and_changes_nothing(optimizer):
    run, untouched = build(optimizer), build(optimizer)
    for each in (run, untouched):
        checks.train(0, *each, range(2))
    good = run[2].state_dict()
    for path, value, message in (*ANY, *BY_OPTIMIZER[optimizer]):
        with pytest.raises(ValueError, match=message):
            run[2].load_state_dict(damaged(good, path, value))
    assert checks.train(0, *run, range(2, 4)) == checks.train(0, *untouched, range(2, 4))


@pytest.mark.parametrize("saved", (None, [], "x", 3, {}, {"version": 3}, {"version": [3]}))
def test_garbage_is_refused(saved):
    with pytest.raises(ValueError, match="^state: not of a ZeroOptimizer"):
        build(ADAMW)[2].load_state_dict(saved)


def test_states_of_version_2_are_taken_and_looked_at():
    """They have no list of what was saved; what a class keeps is known without."""
    run, other = build(ADAMW), build(ADAMW)
    checks.train(0, *run, range(2))
    old = {key: value for key, value in run[2].state_dict().items() if key != "keys"} | {"version": 2}
    for path, value, message in (
        (("state",), emptied, "it has none, though the run had made steps"),
        (("state", NAME), {}, "it has none, though the run had made steps"),
        ((*OF, "exp_avg"), DELETE, "'exp_avg' is missing"),
        ((*OF, "step"), "x", "'step' is 'x'"),
        (("scalars",), {}, "'step' is 2.0, expected is a finite number, kept as float32"),
        (("keys",), {}, "the key 'keys' belongs to no ZeroOptimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            other[2].load_state_dict(damaged(old, path, value))
    other[1].load_state_dict(run[1].state_dict())
    other[2].load_state_dict(old)
    assert checks.train(0, *other, range(2, 4)) == checks.train(0, *run, range(2, 4))


def test_a_state_from_before_the_first_step_passes():
    for optimizer in BY_OPTIMIZER:
        run, untouched = build(optimizer), build(optimizer)
        saved = run[2].state_dict()
        checks.train(0, *run, range(1))
        run[2].load_state_dict(saved)  # and takes the momentum of later steps away
        run[1].load_state_dict(untouched[1].state_dict())
        assert checks.train(0, *run, range(2)) == checks.train(0, *untouched, range(2))


def damage_on_one_rank(rank: int, world: int) -> None:
    """Every rank hears of what one rank has, whatever is wrong with it, and goes on as if nothing had been asked."""
    run, untouched = build(ADAMW), build(ADAMW)
    for each in (run, untouched):
        checks.train(rank, *each, range(2))
    good = run[2].state_dict()
    for path, value, message in (
        (("masters", NAME), torch.ones(2), r"is float32 \[2\]"),
        ((*OF, "step"), "x", "'step' is 'x'"),
        (("state",), emptied, "is missing"),
        (("groups", 0, "lr"), torch.nan, "'lr' is nan"),
        (("scalars",), None, "not of a ZeroOptimizer"),
        (("groups", 0, 3), None, "TypeError: '<' not supported"),  # what nobody thought of
    ):
        saved = damaged(good, path, value) if rank == 1 else good
        with pytest.raises(ValueError, match=f"^rank 1: state.*{message}"):
            run[2].load_state_dict(saved)
    for path, value in (
        (("masters", NAME), lambda t: t + 1),
        ((*OF, "exp_avg"), lambda t: t + 1),
        ((*OF, "step"), 1.0),
        (("groups", 0, "lr"), 0.5),
    ):
        with pytest.raises(ValueError, match="^state: that of rank 1 is another than that of rank 0; load the same"):
            run[2].load_state_dict(damaged(good, path, value) if rank == 1 else good)
    assert checks.train(rank, *run, range(2, 4)) == checks.train(rank, *untouched, range(2, 4))
    run[2].load_state_dict(good)


def test_damage_on_one_of_two_ranks():
    ranks.run(2, damage_on_one_rank)
