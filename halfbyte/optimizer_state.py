"""Whether a saved state fits a torch optimizer: all of it is looked at before any of it is loaded.

torch's `load_state_dict` counts groups and parameters and takes the rest as it comes; a fused kernel then reads and
writes as many elements as the parameter has, wherever a shorter tensor of a damaged checkpoint ends.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

REMEDY = "load what state_dict() of this optimizer returned for this model, from a checkpoint that is whole"
COUNTS = frozenset(("step",))
NUMBERS = frozenset(("mu_product", "eta", "mu"))
MAX_COUNT = 1 << 31
"""No run makes so many steps."""
REDUCED = {"row_var": -1, "col_var": -2}
"""Keys of state that has one number for all elements along this dimension."""
AT_LEAST_ZERO = frozenset(("lr", "eps", "weight_decay", "momentum", "betas"))
SCHEDULES = frozenset(
    ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names", "names")
)
"""What torch's schedules, and names, add to a parameter group."""
PLAIN = (Tensor, nn.Parameter)


class Keys(NamedTuple):
    """What a class of optimizers keeps for a parameter.

    always: keys that every state has.
    by_option: {key: option that asks for it}; it may be there without.
    of_matrices, of_vectors: keys of parameters with more dimensions than one, and of the others.
    is_eager: whether state is there before the first step.
    """

    always: tuple[str, ...] = ()
    by_option: Mapping[str, str] = {}
    of_matrices: tuple[str, ...] = ()
    of_vectors: tuple[str, ...] = ()
    is_eager: bool = False

    def required(self, options: Mapping[str, Any], dims: int) -> tuple[str, ...]:
        """Return the keys that the state of a parameter needs."""
        by_option = (key for key, option in self.by_option.items() if options.get(option))
        return (*self.always, *(self.of_matrices if dims > 1 else self.of_vectors), *by_option)


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
KEPT: dict[type[torch.optim.Optimizer], Keys] = {
    torch.optim.Adam: Keys(_MOMENTS, {"max_exp_avg_sq": "amsgrad"}),
    torch.optim.NAdam: Keys((*_MOMENTS, "mu_product")),
    torch.optim.RAdam: Keys(_MOMENTS),
    torch.optim.SparseAdam: Keys(_MOMENTS),
    torch.optim.Adamax: Keys(("step", "exp_avg", "exp_inf")),
    torch.optim.Adadelta: Keys(("step", "square_avg", "acc_delta")),
    torch.optim.Adagrad: Keys(("step", "sum"), is_eager=True),
    torch.optim.ASGD: Keys(("step", "eta", "mu", "ax")),
    torch.optim.RMSprop: Keys(("step", "square_avg"), {"momentum_buffer": "momentum", "grad_avg": "centered"}),
    torch.optim.Rprop: Keys(("step", "prev", "step_size")),
    torch.optim.SGD: Keys((), {"momentum_buffer": "momentum"}),
    torch.optim.Muon: Keys(("momentum_buffer",)),
    torch.optim.Adafactor: Keys(("step",), of_matrices=("row_var", "col_var"), of_vectors=("variance",)),
}


def kept_by(optimizer: torch.optim.Optimizer) -> Keys | None:
    """Return what an optimizer keeps for each parameter; None unless it steps as one of torch's known classes does."""
    cls = type(optimizer)
    for known, keys in KEPT.items():
        methods = [(getattr(cls, name, None), getattr(known, name, None)) for name in ("step", "_init_group")]
        same = all(inspect.unwrap(own) is inspect.unwrap(theirs) for own, theirs in methods if own and theirs)
        if issubclass(cls, known) and same:
            return keys
    return None


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, state: object, *, steps: int | None = None, is_complete: bool = False
) -> None:
    """Raise ValueError unless `optimizer.load_state_dict(state)` would leave an optimizer that trains on as before.

    Of torch's own classes (but LBFGS) every key, shape, dtype, layout in memory, count and option is compared with what
    the optimizer keeps. Of other classes it is known that states are dicts, that counts are finite, and the shapes of
    what the optimizer holds at the moment. Parameters may be without state, as those are that never had a gradient.

    Args:
        optimizer: that is to load it; nothing of it changes.
        state: what `optimizer.state_dict()` returned, of an equal optimizer.
        steps: the steps that the run had made when it was saved, if the caller knows: after some, a state that is
            empty is refused, and so is one that counts more of them.
        is_complete: every parameter that requires a gradient had one in every step, so that all of them have state or
            none has.

    Raises:
        ValueError: naming the parameter or group, the key, what was found and what is expected.
    """
    problem = _problem(optimizer, state, steps, is_complete)
    if problem is not None:
        raise ValueError(f"optimizer state: {problem}; {REMEDY}")


def _problem(optimizer: torch.optim.Optimizer, state: Any, steps: int | None, is_complete: bool) -> str | None:
    known = kept_by(optimizer)
    problem = _outline_problem(optimizer, state, known is not None)
    if problem is not None:
        return problem
    found: list[Tensor] = []
    empty: list[str] = []
    has_any = False
    for index, param, options, name in _parameters(optimizer, state["param_groups"]):
        values = state["state"].get(index, {})
        if not isinstance(values, dict):
            return f"that of {name} is a {type(values).__name__}, not a dict"
        if _is_empty(values):
            keeps = known.required(options, param.dim()) if known is not None else optimizer.state.get(param)
            empty += [name] if keeps and param.requires_grad else []
            continue
        has_any = True
        if known is not None:
            problem = _known_problem(known, param, options, values)
        else:
            problem = _other_problem(optimizer.state.get(param, {}), values)
        problem = problem or count_problem(values, steps)
        if problem is not None:
            return f"{name}: {problem}"
        found += [value for value in values.values() if type(value) in PLAIN]
    if known is not None and steps == 0 and has_any and not known.is_eager:
        return "it is that of an optimizer that has stepped, and the run had made no step"
    if empty and (steps or has_any) and (is_complete or not has_any):
        return f"{empty[0]} has none, though the run had made steps: its moments are lost"
    return _overlap_problem(found) if known is not None else None


def _outline_problem(optimizer: torch.optim.Optimizer, state: Any, is_known: bool) -> str | None:
    """Return what is wrong with everything but the state of single parameters."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return f"it is {_kind(state)}, not a dict with a dict 'state' and a list 'param_groups'"
    groups = state.get("param_groups")
    if not isinstance(groups, list | tuple) or not all(isinstance(group, dict) for group in groups):
        return "'param_groups' is not a list of dicts"
    extra = sorted(map(repr, state.keys() - {"state", "param_groups"}))
    if extra and is_known:
        return f"the key {extra[0]} belongs to no state of {type(optimizer).__name__}"
    if len(groups) != len(optimizer.param_groups):
        return f"it has {len(groups)} parameter groups, the optimizer {len(optimizer.param_groups)}"
    seen: set[Any] = set()
    for number, (ours, theirs) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        params = theirs.get("params")
        if not isinstance(params, list | tuple) or not all(type(index) in (int, str) for index in params):
            return f"param_groups[{number}]['params'] is {_kind(params)}, not a list of the parameters' numbers"
        if len(params) != len(ours["params"]):
            return f"param_groups[{number}] has {len(params)} parameters, the optimizer's has {len(ours['params'])}"
        if len({*params}) != len(params) or seen.intersection(params):
            return f"param_groups[{number}]['params'] names a parameter that was named before"
        seen.update(params)
        problem = option_problem(optimizer, ours, theirs)
        if problem is not None:
            return f"param_groups[{number}]: {problem}"
    unknown = [index for index in state["state"] if type(index) not in (int, str) or index not in seen]
    if unknown and (is_known or not all(isinstance(index, str) for index in unknown)):
        return f"there is one of parameter {unknown[0]!r}, which no group has"
    return None


def option_problem(optimizer: torch.optim.Optimizer, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return which options of a saved parameter group the optimizer cannot use, or None.

    Flags may be missing, or there and off, where another release of torch has more of them.
    """
    is_known = kept_by(optimizer) is not None
    for key in optimizer.defaults:
        value = ours.get(key)
        is_flag = value is None or isinstance(value, bool)
        if key not in theirs and not (is_known and is_flag):
            return f"the option {key!r} is missing"
    for key, value in theirs.items():
        if key == "params":
            continue
        if key not in ours:
            if is_known and key not in SCHEDULES and value not in (None, False):
                return f"{type(optimizer).__name__} has no option {key!r}, here {_kind(value)}"
        elif key in optimizer.defaults and not _is_like(value, ours[key]):
            return f"the option {key!r} is {_kind(value)}, expected is {_expected(ours[key])}"
        if key in AT_LEAST_ZERO and is_known and not _is_in_range(key, value):
            return f"the option {key!r} is {value!r}, expected is what {type(optimizer).__name__} takes"
    device = next((param.device.type for param in ours["params"]), "cpu")
    if is_known and theirs.get("capturable") and not ours.get("capturable") and device == "cpu":
        return "the option 'capturable' is True, which parameters on the CPU cannot use"
    return None


def _is_like(value: Any, ours: Any) -> bool:
    """Return whether an option is of the kind that the optimizer has now."""
    if ours is None or isinstance(ours, bool):
        return value is None or isinstance(value, bool)
    if isinstance(ours, list | tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(ours)
        return is_list and all(_is_like(a, b) for a, b in zip(value, ours, strict=True))
    if isinstance(ours, int | float) or (isinstance(ours, Tensor) and ours.numel() == 1):
        return _number(value) is not None
    return isinstance(value, type(ours))


def _is_in_range(key: str, value: Any) -> bool:
    numbers = [_number(each) for each in (value if isinstance(value, list | tuple) else [value])]
    return all(number is None or (number >= 0 and (key != "betas" or number < 1)) for number in numbers)


def _expected(ours: Any) -> str:
    if ours is None or isinstance(ours, bool):
        return "True, False or None"
    if isinstance(ours, list | tuple):
        return f"{len(ours)} finite numbers"
    return "a finite number" if isinstance(ours, int | float | Tensor) else f"a {type(ours).__name__}"


def _parameters(
    optimizer: torch.optim.Optimizer, groups: list[dict]
) -> Iterator[tuple[int | str, Tensor, dict[str, Any], str]]:
    """Yield (number in the saved state, parameter, options that it would have, what to call it)."""
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        names = ours.get("param_names", [None] * len(ours["params"]))
        for index, param, name in zip(theirs["params"], ours["params"], names, strict=True):
            yield index, param, {**ours, **theirs}, f"parameter {index}" + (f" ({name})" if name else "")


def _is_empty(values: Mapping[str, Any]) -> bool:
    return all(key == "momentum_buffer" and value is None for key, value in values.items())


def _known_problem(known: Keys, param: Tensor, options: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    problem = keys_problem(known, options, values, param.dim())
    if problem is not None:
        return problem
    required = known.required(options, param.dim())
    for key, value in values.items():
        if key in COUNTS | NUMBERS:
            is_number = _number(value) is not None
            if isinstance(value, Tensor) and (value.dim() or value.dtype not in (torch.float32, torch.float64)):
                is_number = False
            if not is_number:
                return f"{key!r} is {_kind(value)}, expected is a finite float32 []"
        elif value is not None or key in required:
            problem = _elements_problem(param, key, value, bool(options.get("fused")))
            if problem is not None:
                return problem
    return None


def keys_problem(known: Keys, options: Mapping[str, Any], values: Mapping[str, Any], dims: int) -> str | None:
    """Return which key the state of a parameter lacks, or has and should not; None if it has what is needed."""
    required = known.required(options, dims)
    missing = [key for key in required if key not in values]
    if missing:
        return f"{missing[0]!r} is missing; expected are {', '.join(map(repr, required))}"
    extra = [key for key in values if key not in required and key not in known.by_option]
    if extra:
        return f"{extra[0]!r} is unknown; expected are {', '.join(map(repr, required))}"
    return None


def _elements_problem(param: Tensor, key: str, value: Any, is_fused: bool) -> str | None:
    """Return why a tensor has not one number for each element of a parameter, or None."""
    is_plain = type(param) in PLAIN
    shape = list(param.shape)
    if key in REDUCED:
        shape[REDUCED[key]] = 1
    expected = f"expected is {_dtype(param)} {shape}"
    if not isinstance(value, Tensor) or (is_plain and type(value) not in PLAIN):
        return f"{key!r} is {_kind(value)}, {expected}"
    if list(value.shape) != shape or value.dtype != param.dtype:
        return f"{key!r} is {_kind(value)}, {expected}"
    if value.is_meta and not param.is_meta:
        return f"{key!r} is on the meta device, without values"
    if not is_plain:
        return None
    if value.layout != torch.strided or not _is_dense(value):
        return f"{key!r} has elements that share memory, or gaps between them; expected is a dense tensor"
    own = torch.empty_like(param, device="meta").stride()
    strides = zip(value.shape, value.stride(), own, strict=True)
    if is_fused and value.numel() and any(theirs != ours for size, theirs, ours in strides if size > 1):
        return f"{key!r} has strides {value.stride()}, expected are {own}, which fused kernels take for granted"
    return None


def _is_dense(value: Tensor) -> bool:
    count = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride != count:
            return value.numel() == 0
        count *= size
    return True


def _other_problem(present: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the state of an optimizer of a class that is not known."""
    for key, value in values.items():
        ours = present.get(key)
        if isinstance(value, Tensor) and value.is_meta:
            return f"{key!r} is on the meta device, without values"
        if isinstance(ours, Tensor) and (not isinstance(value, Tensor) or value.shape != ours.shape):
            return f"{key!r} is {_kind(value)}, the optimizer's is {_dtype(ours)} {list(ours.shape)}"
    return None


def count_problem(values: Mapping[str, Any], steps: int | None = None) -> str | None:
    """Return which count of steps is none, or is more than the run has made; None if all are sound."""
    for key in COUNTS & values.keys():
        count = _number(values[key])
        if count is None or not 0 <= count <= MAX_COUNT or count != int(count):
            return f"{key!r} is {_kind(values[key])}, expected is a number of steps"
        if steps is not None and count > steps:
            return f"{key!r} is {count:g}, and the run had made {steps} steps"
    return None


def _overlap_problem(tensors: list[Tensor]) -> str | None:
    """Return whether two tensors share memory, so that each would step the other; None if none do."""
    end, device = 0, None
    parts = [tensor for tensor in tensors if tensor.numel() and not tensor.is_meta]
    for tensor in sorted(parts, key=lambda tensor: (str(tensor.device), tensor.data_ptr())):
        if tensor.device == device and tensor.data_ptr() < end:
            return f"two of its tensors share memory, one of them {_dtype(tensor)} {list(tensor.shape)}"
        device, end = tensor.device, tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return None


def _number(value: Any) -> float | None:
    """Return a finite real number, kept as such or as a tensor with one element; None for anything else."""
    if isinstance(value, Tensor):
        is_plain = type(value) in PLAIN and value.layout == torch.strided and not value.is_meta
        if not is_plain or value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _kind(value: Any) -> str:
    """Return what to call a value: short, whatever it is."""
    if isinstance(value, Tensor):
        is_plain = type(value) in PLAIN and value.layout == torch.strided and not value.is_meta
        what = "" if is_plain else f"{type(value).__name__} " if type(value) not in PLAIN else f"{value.layout} "
        number = f" of {value.item()}" if is_plain and value.numel() == 1 else ""
        return f"{what}{_dtype(value)} {list(value.shape)}{number}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"{value[:40]!r}" if isinstance(value, str) else f"a {type(value).__name__}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
