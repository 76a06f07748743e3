"""Which kernels a call would launch, with which tiles, and why: the launchers are asked, and nothing is launched.

A rehearsal (`kernels.launch.rehearsing`) runs the launchers on tensors without memory for a target that need not be
here. What it notes are the choices themselves (`kernels.route`), so that nothing here can disagree with a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from halfbyte import recipes
from halfbyte.kernels.target import INTERPRETER, Target, assumed, find
from halfbyte.layout import Operand
from halfbyte.ops.backends import REFERENCE, backends, choose, unread_by_kernels, without_kernel
from halfbyte.sides import Epilogue, Sides, both_sides
from halfbyte.spec import MXFP8, NVFP4, GemmSpec, Spec, parse

CPU = "cpu"
PLAIN = ("bf16", "-")
"""Words for an operand that is not quantized, and for an orientation that is not wanted."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch, or how those behind it go together.

    Args:
        kernel: its name, or words.
        programs: how many there are, along each axis; empty for words.
        constants: the constexprs and launch options, by name.
        why: what speaks for it; empty where there is nothing to choose.
        instead: what was tried before it, and what spoke against each.
    """

    kernel: str
    programs: tuple[int, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    instead: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        count = " x ".join(map(str, self.programs))
        size = f": {count} program{'' if count == '1' else 's'}" if self.programs else ""
        shown = {name: value for name, value in self.constants.items() if not isinstance(value, tuple)}
        tile = ", ".join(f"{name}={value}" for name, value in shown.items())
        lines = [f"{self.kernel}{size}{f', {tile}' if tile else ''}"]
        lines += [f"    why: {self.why}"] if self.why else []
        return "\n".join((*lines, *(f"    not {name}: {reason}" for name, reason in self.instead)))


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call does.

    Args:
        op: what was asked for.
        target: where, as in "sm_90".
        steps: in order.
    """

    op: str
    target: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join((f"{self.op} on {self.target}", *(f"{i}. {step}" for i, step in enumerate(self.steps, 1))))


_OPERANDS = tuple(f"{gemm}.{side}" for gemm in ("fprop", "dgrad", "wgrad") for side in "ab")
"""Places in a recipe."""


def read_spec(word: Spec | str | None) -> Spec | None:
    """Return a spec by its key, whose last parts may be left out, or by a place in a preset, `nvfp4.dgrad.a`.

    Raises:
        ValueError: the word names no spec.
        TypeError: it is neither a spec nor a word.
    """
    if isinstance(word, recipes.Recipe):
        raise TypeError(f"spec={word!r}: a recipe has six operands; give that of one, such as recipe.fprop.a")
    if not isinstance(word, str | Spec | None):
        raise TypeError(f"spec={word!r}: give hb.NVFP4(…), hb.MXFP8(…), a key such as 'nvfp4/1x16', or None")
    if not isinstance(word, str):
        return word
    if word in PLAIN:
        return None
    preset, _, place = word.partition(".")
    if preset in recipes.PRESETS and place in _OPERANDS:
        gemm, side = place.split(".")
        found = getattr(recipes.get(preset), gemm)
        return found and getattr(found, side)
    for default in (NVFP4().key, MXFP8().key):
        parts, given = default.split("/"), word.split("/")
        if given[0] == parts[0]:
            try:
                return parse("/".join((*given, *parts[len(given) :])))
            except ValueError as error:  # whose message names a key that nobody wrote
                raise ValueError(f"spec={word!r}: {error}") from None
    raise ValueError(
        f"spec={word!r}: give a key, whose last parts may be left out (nvfp4, nvfp4/16x16, mxfp8/e5m2), an operand "
        "of a preset (nvfp4.dgrad.a), or bf16"
    )


def _target(name: str | None) -> tuple[Target | None, str]:
    """Return the target, None where plain torch runs, and why."""
    from halfbyte.kernels.record import TARGETS

    if name == CPU:
        return None, "Triton kernels need a GPU"
    known = {**TARGETS, INTERPRETER.name: INTERPRETER}
    if name is not None:
        if not isinstance(name, str) or name not in known:
            names = ", ".join((*known, CPU))
            raise ValueError(f"target={name!r}: use one of {names}, or leave it out for this machine")
        return known[name], ""
    device = torch.device("cuda" if torch.cuda.is_available() else CPU)
    if choose(device, None) == REFERENCE:
        return None, backends(device)[1].reason
    return find(device), ""


class RehearsedCall(NamedTuple):
    """What is rehearsed: sizes, the specs of rows and columns or of a and b, groups of tokens, how rows are summed."""

    shape: tuple[int, ...]
    first: Spec | None
    second: Spec | None
    groups: int
    batch_invariant: bool = False


def _quantize(call: RehearsedCall) -> None:
    from halfbyte.kernels import backend
    from halfbyte.kernels.scenario_values import tensor

    backend.quantize_row_col(tensor(*call.shape), *_sides(call))


def _sides(call: RehearsedCall) -> Sides:
    """Return both sides that a call asks for, with places where they draw."""
    from halfbyte.kernels.scenario_values import places

    drawn: Any = places(call.first, call.second)
    return both_sides(call.first, call.second, **drawn)


def _amax(call: RehearsedCall) -> None:
    from halfbyte.kernels.amax.plain import row_col_amax
    from halfbyte.kernels.scenario_values import places, tensor

    row_col_amax(tensor(*call.shape), call.first, call.second, places(call.first, call.second)["sign_draw"])


def _dequantize(call: RehearsedCall) -> None:
    from halfbyte.kernels import backend
    from halfbyte.kernels.scenario_values import blocks

    assert call.first is not None, "explain refuses bf16"
    rows, cols = call.shape
    backend.dequantize(Operand(blocks(rows, cols, call.first), call.first, cols), torch.bfloat16)


def _gemm(call: RehearsedCall) -> None:
    from halfbyte.kernels import backend
    from halfbyte.kernels.gemm import native, native_route
    from halfbyte.kernels.scenario_values import META, blocks, tensor

    M, N, K = call.shape
    way = native_route.choose_way(call.first, call.second, META, call.batch_invariant)
    if way.kernel == native_route.NATIVE:
        assert call.first is not None and call.second is not None, "tensor cores read codes"
        sides = (M, call.first), (N, call.second)
        a, b = (Operand(blocks(n, K, spec), spec, K) for n, spec in sides)
        native.native_gemm_nt(a, b)
        return
    decoded = []
    for n, spec in ((M, call.first), (N, call.second)):
        stored = None if spec is None else Operand(blocks(n, K, spec), spec, K)
        decoded.append(backend.plain(tensor(n, K)) if stored is None else backend.decode(stored))
    if None in (call.first, call.second):  # padding takes part only if both operands have it
        decoded = [side._replace(values=side.values[:, :K]) for side in decoded]
    a, b = decoded
    backend.gemm_nt(a, b, Epilogue(batch_invariant=call.batch_invariant))


def _grouped(call: RehearsedCall) -> None:
    from halfbyte.kernels import backend
    from halfbyte.kernels.scenario_values import tensor
    from halfbyte.kernels.scenarios_grouped import offsets_of

    offsets = offsets_of(call.groups) if call.groups else None
    backend.grouped_quantize_row_col(tensor(*call.shape), offsets, *_sides(call))


def _grouped_gemm(call: RehearsedCall) -> None:
    from halfbyte.kernels import backend
    from halfbyte.kernels.gemm import grouped_native, native_route
    from halfbyte.kernels.scenario_values import tensor
    from halfbyte.kernels.scenarios_grouped import blocks_of_experts, grouped_blocks, offsets_of

    (M, N, K), a, b, groups, batch_invariant = call
    offsets = offsets_of(groups)
    left = tensor(M, K) if a is None else Operand(grouped_blocks((M, K), groups, a), a, K)
    right = tensor(groups, N, K) if b is None else Operand(blocks_of_experts(groups, N, K, b), b, K)
    way = native_route.choose_grouped_way(left, right, offsets, torch.bfloat16, batch_invariant)
    if way.kernel == native_route.GROUPED_NATIVE:
        assert isinstance(left, Operand) and isinstance(right, Operand), "tensor cores multiply codes"
        grouped_native.scaled_grouped_mm_arguments(left, right, offsets, K)
    elif way.kernel != native_route.GROUPED_TORCH:
        backend.grouped_gemm_nt(left, right, offsets, K, tensor(M, N))


OPS: dict[str, tuple[int, Callable[[RehearsedCall], None]]] = {
    "quantize": (2, _quantize),
    "amax": (2, _amax),
    "dequantize": (2, _dequantize),
    "gemm": (3, _gemm),
    "grouped_quantize": (2, _grouped),
    "grouped_experts": (3, _grouped),
    "grouped_gemm": (3, _grouped_gemm),
}
"""By name, how many sizes its shape has, and the call that is rehearsed."""

MOST = 1 << 48
"""Elements of a tensor, far beyond any memory and far below where sizes in bytes overflow."""

EMPTY = "it has no elements"
QUANTIZING = ("quantize", "amax", "grouped_quantize", "grouped_experts")
"""Ops that need a kernel for the spec itself; the others need its format."""


def _op(op: str | None, shape: Sequence[int], groups: int) -> str:
    """Return the op that is asked for: by default that of the shape."""
    _check_types(op, shape, groups)
    if op is None:
        op = ("grouped_" if groups else "") + ("gemm" if len(shape) == 3 else "quantize")
    if op not in OPS:
        raise ValueError(f"op={op!r}: use one of {', '.join(OPS)}")
    if len(shape) != OPS[op][0]:
        sizes = {2: "two sizes, as in 16384x2880", 3: "three sizes, as in 8192x4096x4096"}[OPS[op][0]]
        raise ValueError(f"shape={tuple(shape)}: {op} takes {sizes}")
    wrong = next((n for n in shape if type(n) is not int or n < 0), None)
    if wrong is not None:
        raise ValueError(f"shape={tuple(shape)}: {wrong!r} is no size; give an int, 0 or more")
    if op == "grouped_experts" and shape[0] == 0:
        raise ValueError(f"shape={tuple(shape)}: give the weights of at least one expert")
    if math.prod(sorted(shape)[-2:]) * (shape[0] if op == "grouped_experts" else max(1, groups)) > MOST:
        raise ValueError(f"shape={tuple(shape)}, groups={groups}: more than 2**48 elements; give sizes of one device")
    takes_groups = op in ("grouped_quantize", "grouped_gemm")
    if (groups < 1) if takes_groups else (groups != 0):
        raise ValueError(f"groups={groups}: {op} takes {'a number of groups, 1 or more' if takes_groups else 'none'}")
    return op


def _check_types(op: Any, shape: Any, groups: Any) -> None:
    if not isinstance(op, str | None):
        raise TypeError(f"op={op!r}: give its name, one of {', '.join(OPS)}")
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"shape={shape!r}: give its sizes, as in (16384, 2880)")
    if type(groups) is not int:
        raise TypeError(f"groups={groups!r}: give an int, a number of groups")


def explain(
    shape: Sequence[int],
    *specs: Spec | str | None,
    op: str | None = None,
    groups: int = 0,
    target: str | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """Say which kernels a call on bf16 of this shape launches, with which tiles, why, and why not the others.

    Args:
        shape: rows and columns, or M, N and K of a @ b.T; of `grouped_experts` E, N and K.
        specs: of rows and, if wanted, of columns; of a product those of a and b. A spec, its key, whose last parts may
            be left out, or None.
        op: one of quantize, amax, dequantize, gemm, grouped_quantize, grouped_experts, grouped_gemm; by default
            quantize for two sizes, gemm for three.
        groups: groups of tokens.
        target: "sm_90", "gfx942", "interpreter", "cpu", …; this machine by default.
        batch_invariant: of a product, as in `GemmSpec`.

    Raises:
        ValueError: an argument names nothing that there is, or the product of two such operands is refused.
        TypeError: an argument is of no type that it takes.
    """
    op = _op(op, shape, groups)
    fewest, most = (2, 2) if op.endswith("gemm") else (1, 1) if op == "dequantize" else (1, 2)
    if not fewest <= len(specs) <= most:
        takes = "one or two" if fewest < most else ("", "one", "two")[most]
        raise ValueError(f"specs={specs}: {op} takes {takes}")
    known = [read_spec(spec) for spec in specs]
    if batch_invariant and not op.endswith("gemm"):
        raise ValueError(f"batch_invariant=True: {op} is no product; leave it out")
    if op.endswith("gemm"):
        GemmSpec(a=known[0], b=known[1], batch_invariant=batch_invariant)  # refuses what the product refuses
    if op == "dequantize" and known[0] is None:
        raise ValueError("spec=bf16: what is not quantized needs no dequantize; give the spec of the operand")
    where, reason = _target(target)
    if op in QUANTIZING and not any(known):
        why = "bf16 stays as it is; give the spec of rows, of columns or of both, such as nvfp4"
        return Explanation(op=op, target=CPU if where is None else where.name, steps=(Step(kernel="nothing", why=why),))
    if where is None:
        return Explanation(op=op, target=CPU, steps=(Step(kernel="plain torch (halfbyte.reference)", why=reason),))
    lacks = without_kernel if op in QUANTIZING else unread_by_kernels
    if (missing := next(filter(None, map(lacks, known)), None)) is not None:
        why = f"{missing} has no kernel: plain torch computes it, on the CPU or with backend='reference'"
        return Explanation(op=op, target=where.name, steps=(Step(kernel="none, the call is refused", why=why),))
    from halfbyte.kernels.launch import rehearsing

    with assumed(where), rehearsing() as events:
        second = known[1] if len(known) == 2 else None
        OPS[op][1](RehearsedCall(tuple(shape), known[0], second, groups, batch_invariant))
    return Explanation(op=op, target=where.name, steps=tuple(steps_of(events) or [Step(kernel="nothing", why=EMPTY)]))


def steps_of(events: Sequence[Any]) -> list[Step]:
    """Return the steps of a rehearsal: launches with the choice that each follows, and choices in words."""
    from halfbyte.kernels.route import Choice

    steps, last = [], {}
    for event in events:
        if isinstance(event, Choice):
            instead = tuple((name, str(reason)) for name, reason in event.instead)
            if event.grid:
                last[event.kernel] = Step(
                    kernel=event.kernel, programs=event.grid, constants=event.constants, why=event.why, instead=instead
                )
            else:
                steps.append(Step(kernel=event.kernel, why=event.why, instead=instead))
            continue
        name, grid = event.kernel.__name__, tuple(event.grid)
        known = last.get(name, Step(kernel=name))
        given = {name: value for name, value in event.arguments.items() if name in event.kernel.constants}
        constants = {name: getattr(value, "value", value) for name, value in given.items()}
        options = {key: value for key, value in event.options.items() if key in ("num_warps", "num_stages")}
        steps.append(
            Step(kernel=name, programs=grid, constants=constants | options, why=known.why, instead=known.instead)
        )
    return steps
