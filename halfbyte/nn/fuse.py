"""hb.nn.fuse_: norms and MLPs of a Llama-style model learn how the layers behind them quantize; unfuse_ undoes it.

Modules are found by name and then *tried* (trial.py): random tokens go through the module and through its replacement,
in high precision, and where the results differ by more than roundings the module is left alone. What a norm hands to
its linear layers is bound to one tensor object, so a model that is wired differently than its names suggest computes
the same; it only gains nothing. No key of a state_dict changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from halfbyte.arithmetic import ACTIVATIONS
from halfbyte.nn import trial
from halfbyte.nn.fused import MLP, LayerNormLinear
from halfbyte.nn.linear import REPLACED_FORWARD
from halfbyte.nn.norm import LayerNorm, RMSNorm, from_norm
from halfbyte.nn.shared_input import SharedInput
from halfbyte.notebook import ShowsText

NORMS_BEFORE = (
    ("input_layernorm", "self_attn"),
    ("pre_feedforward_layernorm", "mlp"),
    ("post_attention_layernorm", "mlp"),
    ("attention_norm", "attention"),
    ("ffn_norm", "feed_forward"),
    ("ln_1", "attn"),
    ("ln_2", "mlp"),
    ("norm1", "attn"),
    ("norm2", "mlp"),
)
"""(norm, the module that reads its output), children of one block; of two norms before one module the first counts."""

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"), ("qkv_proj",), ("wqkv",), ("qkv",))
"""Linear layers of an attention that read its input."""

MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
)
"""Linear layers of an MLP: gate (if gated), up and down."""


@dataclass(frozen=True, kw_only=True)
class FuseRow:
    """One module that was looked at: its name, whether it was replaced, and by what or why not."""

    name: str
    fused: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class FuseReport(ShowsText):
    """What fuse_ did; prints as a table.

    Args:
        rows: one per norm and per module with the layers of an MLP, in the model's order.
    """

    rows: tuple[FuseRow, ...]

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the modules that were replaced."""
        return tuple(row.name for row in self.rows if row.fused)

    @property
    def left(self) -> dict[str, str]:
        """Name and reason of every module that stays as it is."""
        return {row.name: row.reason for row in self.rows if not row.fused}

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{row.name.ljust(width)}  {'fused' if row.fused else 'left '}  {row.reason}" for row in self.rows]
        return "\n".join([*lines, f"{len(self.fused)} of {len(self.rows)} norms and MLPs fused"])


def fuse_(model: nn.Module) -> FuseReport:
    """Replace norms and MLPs of `model` in place by hb.nn.RMSNorm, LayerNorm and MLP where they do the same.

    Works before and after `hb.quantize_`. Parameters, their names and hb.nn.Linear layers with their recipes stay. A
    norm then computes the amaxes of its output in the same pass, q/k/v quantize it once, and the activation of an MLP
    does likewise for down_proj and, in the backward, for the gradients of gate and up.

    Args:
        model: any module; blocks are recognised by the names in `NORMS_BEFORE`, `SIBLINGS` and `MLPS`.

    Returns:
        FuseReport, which prints as a table.

    Raises:
        ValueError: the model has neither a norm nor an MLP of these names.
    """
    rows: dict[str, FuseRow] = {}
    for name, module in list(model.named_modules()):
        if name and not isinstance(module, MLP | LayerNormLinear):
            layers = _mlp_layers(module)
            if layers is not None:
                rows[name] = _fuse_mlp(model, name, module, layers)
    for name, module in list(model.named_modules()):
        if _looks_like_norm(module):
            rows[name] = _fuse_norm(model, name, module)
    if not rows:
        raise ValueError(f"model={type(model).__name__}: it has no norm and no MLP of the names that fuse_ knows")
    order = [name for name, _ in model.named_modules()]
    return FuseReport(rows=tuple(sorted(rows.values(), key=lambda row: order.index(row.name))))


def unfuse_(model: nn.Module) -> tuple[str, ...]:
    """Put back the modules that `fuse_` replaced, with the present parameters and linear layers.

    Args:
        model: what `fuse_` changed.

    Returns:
        The names of the modules that were put back.
    """
    done = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, MLP | RMSNorm | LayerNorm) or not module.fused_from:
            continue
        (origin,) = module.fused_from
        if isinstance(module, MLP):
            for layer in module.names:
                setattr(origin, layer, getattr(module, layer))
        else:
            _let_go(module.feeds)
            for parameter in ("weight",) if module.bias is None else ("weight", "bias"):
                setattr(origin, parameter, getattr(module, parameter))
        vars(origin).update({table: vars(module)[table] for table in _hook_tables(module)})  # registered since
        _replace(model, module, origin.train(module.training))
        done.append(name)
    return tuple(done)


def _fuse_mlp(model: nn.Module, name: str, module: nn.Module, names: tuple[str, ...]) -> FuseRow:
    layers = {layer: getattr(module, layer) for layer in names}
    reason = _more_than(module, list(layers.values()))
    if reason is None:
        found = _closest_mlp(module, layers)
        reason = found if isinstance(found, str) else trial.own_difference(module, found, layers[names[0]].in_features)
        if reason is None and isinstance(found, MLP):
            found.fused_from = (module,)
            _replace(model, module, found)
            return FuseRow(name=name, fused=True, reason=f"hb.nn.MLP, {found.activation}")
    assert reason is not None, "an MLP is replaced or left for a reason"
    return FuseRow(name=name, fused=False, reason=reason)


def _closest_mlp(module: nn.Module, layers: dict[str, nn.Linear]) -> MLP | str:
    """Return the MLP that computes what `module` does, or why none does: activations are told apart by their error."""
    tried: list[tuple[float, str | None, MLP]] = []
    for activation, kind in ACTIVATIONS.items():
        if len(layers) == 2 + kind.gated:
            try:
                new = MLP.from_linears(layers, activation).train(module.training)
            except ValueError as error:  # widths that do not meet
                return str(error)
            tried.append((*trial.fresh_mlp_difference(module, new, new.names), new))
    _, reason, new = min(tried, key=lambda one: (one[1] is not None, one[0]))
    return new if reason is None else reason


def _fuse_norm(model: nn.Module, name: str, module: nn.Module) -> FuseRow:
    def left(reason: str) -> FuseRow:
        return FuseRow(name=name, fused=False, reason=reason)

    if isinstance(module, RMSNorm | LayerNorm) and module.feeds is not None:
        return left("fused before")
    parent_name, _, own = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    reader_name, siblings = _readers(parent, own)
    if reader_name is None or siblings is None:
        return left("no q/k/v projection or MLP behind it")
    reader = getattr(parent, reader_name)
    layers = [getattr(reader, sibling) for sibling in siblings]
    if any(layer.in_features != layers[0].in_features for layer in layers):
        return left(f"{', '.join(siblings)} of {reader_name} read tensors of different widths")
    try:
        new = from_norm(module)
    except ValueError as error:
        return left(str(error))
    width = layers[0].in_features
    reason = _more_than(module, [module])
    if new is not module:
        reason = reason or trial.own_difference(module, new, width) or trial.fresh_norm_difference(module, new, width)
    if reason is not None:
        return left(reason)
    if new is not module:
        new.fused_from = (module,)
        _replace(model, module, new)
    new.feeds = SharedInput(reader, siblings)
    for layer in layers:
        layer.shared_input = new.feeds
    return FuseRow(name=name, fused=True, reason=f"hb.nn.{type(new).__name__} for {reader_name}: {', '.join(siblings)}")


def _readers(parent: nn.Module, norm: str) -> tuple[str | None, tuple[str, ...] | None]:
    """Return the child of `parent` that reads the output of its child `norm`, and its linear layers that do."""
    for before, reader_name in NORMS_BEFORE:
        reader = getattr(parent, reader_name, None)
        if before != norm or not isinstance(reader, nn.Module):
            continue
        earlier = [b for b, r in NORMS_BEFORE[: NORMS_BEFORE.index((before, reader_name))] if r == reader_name]
        if any(hasattr(parent, other) for other in earlier):
            continue
        if isinstance(reader, MLP):
            return reader_name, reader.names[:-1]
        for names in SIBLINGS:
            if all(isinstance(getattr(reader, name, None), nn.Linear) for name in names):
                return reader_name, names
    return None, None


def _mlp_layers(module: nn.Module) -> tuple[str, ...] | None:
    for names in MLPS:
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return names
    return None


def _looks_like_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | LayerNorm) or type(module).__name__.endswith("RMSNorm")


def _more_than(module: nn.Module, parts: Sequence[nn.Module]) -> str | None:
    """Say what the module has beside its computation with the parameters of `parts`, or None."""
    if any(vars(module)[name] for name in _hook_tables(module)):
        return "it has hooks"
    if "forward" in vars(module):
        return f"its forward was {REPLACED_FORWARD}"
    known = {id(p) for part in parts for p in part.parameters(recurse=False)}
    if any(id(p) not in known for p in module.parameters()):
        return "it has parameters of its own"
    if any(isinstance(part, nn.Dropout) and part.p for part in module.modules()):
        return "it drops values at random"
    if any(True for _ in module.buffers(recurse=False)):
        return "it has buffers of its own"
    if type(module) not in (RMSNorm, LayerNorm) and not trial.takes_one_tensor(module):
        return "its forward takes other arguments beside a tensor"
    return None


def _hook_tables(module: nn.Module) -> list[str]:
    """Return the attributes in which torch keeps a module's hooks, those of state_dicts included."""
    return [name for name in vars(module) if "_hooks" in name]


def _let_go(feeds: SharedInput | None) -> None:
    """Make the layers behind a norm independent again."""
    for layer in () if feeds is None else feeds.layers:
        layer.__dict__.pop("shared_input", None)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever the model holds `old`: a module may be registered under several names."""
    holders = [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is old]
    for parent, name in holders:
        setattr(parent, name, new)
