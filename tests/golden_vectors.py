"""The vectors of tests/golden and how each kind is checked, for any device and backend (the format: golden/README.md).

`check(case)` runs a case through the public API and raises with the first value that differs.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import layout, reference

FOLDER = Path(__file__).resolve().parent / "golden"
FILES = ("numerics", "edge", "ranks", "recipes")
SCALINGS = {"block_max": hb.BlockMax, "four_over_six": hb.FourOverSix, "eden": hb.Eden}
HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Case(NamedTuple):
    """One vector: its file, its entry of the json and where it runs."""

    file: str
    entry: dict
    device: str = "cpu"
    backend: str | None = None

    @property
    def kind(self) -> str:
        return self.entry["kind"]

    @property
    def id(self) -> str:
        return f"{self.file}-{self.entry['id']}-{self.entry['name']}"

    def has(self, name: str) -> bool:
        return f"{self.entry['id']}/{name}" in _arrays(self.file)

    def array(self, name: str) -> np.ndarray:
        return _arrays(self.file)[f"{self.entry['id']}/{name}"]

    def tensor(self, name: str, dtype: str | None = None) -> Tensor:
        """Return an array on the device; bf16 and fp16 are stored as their bits."""
        array = self.array(name).copy()
        if dtype in HALF_DTYPES:
            return torch.from_numpy(array.view(np.int16)).view(HALF_DTYPES[dtype]).to(self.device)
        return torch.from_numpy(array).to(self.device)


@lru_cache(maxsize=len(FILES))
def _arrays(file: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{file}.npz") as archive:
        return dict(archive)


def cases(*kinds: str) -> list[Case]:
    """Return the cases of some kinds, of all kinds if none is named."""
    entries = [Case(file, e) for file in FILES for e in json.loads((FOLDER / f"{file}.json").read_text("utf-8"))]
    return [case for case in entries if not kinds or case.kind in kinds]


def spec_of(entry: dict) -> hb.NVFP4 | hb.MXFP8:
    """Return the spec that an entry, or its `row`, `col`, `a` or `b`, describes."""
    if "element" in entry:
        return hb.MXFP8(element=entry["element"])
    if entry.get("kind") == "nvfp4_rht_col":
        return hb.NVFP4(rotation=hb.Hadamard())
    rotation, scaling = entry.get("rotation"), dict(entry.get("scaling", {"kind": "block_max"}))
    if entry.get("kind") == "four_over_six":
        scaling = {"kind": "four_over_six", "error": entry["error"], "e4m3_max": entry["e4m3_max"]}
    kind, e4m3_max = scaling.pop("kind"), scaling.pop("e4m3_max", 448.0)
    rounding = "stochastic" if entry.get("kind") == "nvfp4_sr" else entry.get("rounding", "nearest")
    return hb.NVFP4(
        block=tuple(entry["block"]),
        rounding=rounding,
        outer=entry.get("outer", "tensor"),
        rotation=hb.Hadamard(**rotation) if rotation else None,
        scaling=SCALINGS[kind](**_tuples(scaling)),
        fp4_max=entry.get("fp4_max", 6.0),
        e4m3_max=e4m3_max,
    )


def _tuples(fields: dict) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def place_of(entry: dict) -> hb.Philox:
    per_row = entry.get("blocks_per_row")
    return hb.Philox(
        seed=int(entry.get("seed", 0)),
        offset=int(entry.get("offset", 0)),
        first_block=int(entry.get("first_block") or 0),
        blocks_per_row=None if per_row is None else int(per_row),
    )


def assert_same(actual: Tensor, expected: np.ndarray, what: str) -> None:
    """Compare bit for bit, NaN equal to NaN; a different shape is only allowed between [] and [1]."""
    if actual.dtype in (torch.bfloat16, torch.float16) and expected.dtype == np.float32:
        actual = actual.float()
    actual = actual.detach().cpu().contiguous()
    if actual.dim() == 0:
        actual = actual.reshape(1)
    assert tuple(actual.shape) == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {expected.shape}"
    if expected.dtype == np.float32:
        got, want = actual.numpy().view(np.uint32), expected.view(np.uint32)
        differs = (got != want) & ~(np.isnan(actual.numpy()) & np.isnan(expected))
        got, want = actual.numpy(), expected
    else:
        got, want = actual.view(torch.uint8).numpy().view(expected.dtype), expected
        differs = got != want
    if differs.any():
        where = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(
            f"{what}{list(where)} is {got[where]}, expected {want[where]}; {differs.sum()} of {got.size} differ"
        )


def assert_blocks(case: Case, q: hb.QuantTensor, prefix: str = "") -> None:
    """Compare codes, scales in both layouts, amax and dequantized values with the case's arrays."""
    for name in ("qdata", "block_scale", "amax"):
        if case.has(prefix + name):
            assert_same(getattr(q, name), case.array(prefix + name), prefix + name)
    if case.has(prefix + "dequant"):
        assert_same(q.dequantize(torch.float32), case.array(prefix + "dequant"), prefix + "dequant")


def check(case: Case) -> None:
    """Run one case.

    Raises:
        AssertionError: a value differs; the message says which.
    """
    CHECKS[case.kind](case)


def _given_amax(case: Case, prefix: str, spec: hb.NVFP4) -> Tensor | None:
    if not case.has(prefix + "given_amax"):
        return None
    amax = case.tensor(prefix + "given_amax")
    return amax if spec.outer == "row" else amax.reshape(())


def _check_quantize(case: Case) -> None:
    entry, spec = case.entry, spec_of(case.entry)
    x = case.tensor("x", entry["dtype"])
    x = x.T if entry.get("transposed") or case.kind == "nvfp4_rht_col" else x
    place = place_of(entry)
    options = {"rng": place, "sign_rng": place, "amax": _given_amax(case, "", spec), "backend": case.backend}
    q = hb.quantize(x, spec, **options)
    assert_blocks(case, q)
    if case.has("rotated"):
        assert_same(reference.rotate(x, spec.rotation), case.array("rotated"), "rotated")
    if case.has("t_qdata"):
        _assert_transpose(case, q, "t_")
    swizzled = hb.quantize(x, spec, scale_layout=layout.SWIZZLED_32_4_4, **options)
    assert_same(swizzled.linear_scale(), case.array("block_scale"), "unswizzled block_scale")
    if case.has("dequant"):
        assert_same(swizzled.dequantize(torch.float32), case.array("dequant"), "dequant of swizzled scales")


def _assert_transpose(case: Case, q: hb.QuantTensor, prefix: str) -> None:
    t = q.transpose()
    assert_same(t.qdata, case.array(f"{prefix}qdata"), f"{prefix}qdata")
    assert_same(t.block_scale, case.array(f"{prefix}block_scale"), f"{prefix}block_scale")


def _check_row_col(case: Case) -> None:
    entry, place = case.entry, place_of(case.entry)
    x = case.tensor("x", entry["dtype"])
    specs = spec_of(entry["row"]), spec_of(entry["col"])
    row, col = hb.quantize_row_col(x, *specs, rng=place, sign_rng=place, backend=case.backend)
    for prefix, q in (("row_", row), ("col_", col)):
        assert_blocks(case, q, prefix)
        if case.has(f"{prefix}t_qdata"):
            _assert_transpose(case, q, f"{prefix}t_")


def _check_rank(case: Case) -> None:
    """A run's place on a data-parallel rank: bits of the rank, signs of the run."""
    entry, spec = case.entry, spec_of(case.entry)
    state = hb.RunState(int(entry["seed"]), rank=entry["rank"])
    state.load_state_dict({**state.state_dict(), "position": entry["position"]})
    place, x = state.philox(entry["stream"]), case.tensor("x", entry["dtype"])
    options = {"rng": place, "sign_rng": place, "backend": case.backend}
    if entry["groups"] is None:
        return assert_blocks(case, hb.quantize(x, spec, **options))
    offsets = torch.tensor(entry["groups"], device=case.device).cumsum(0, dtype=torch.int32)
    assert_blocks(case, hb.grouped_quantize_row_col(x, offsets, spec, None, **options)[0])


def _check_rotate(case: Case) -> None:
    entry = case.entry
    x = case.tensor("x", entry["dtype"])
    x = x.reshape(-1, x.shape[-1])
    x = x.T if entry["transposed"] else x
    draw = place_of(entry).on(x.device)
    assert_same(reference.rotate(x, hb.Hadamard(**entry["rotation"]), draw), case.array("rotated"), "rotated")


def _check_gemm(case: Case) -> None:
    operands = {}
    for name in ("a", "b"):
        entry = case.entry[name]
        spec, place = spec_of(entry), place_of(entry)
        amax = _given_amax(case, f"{name}_", spec)
        x = case.tensor(name, entry["dtype"])
        operands[name] = hb.quantize(x, spec, rng=place, sign_rng=place, amax=amax, backend=case.backend)
    existing = case.tensor("existing") if case.has("existing") else None
    y = hb.gemm_nt(
        operands["a"],
        operands["b"],
        out_dtype=torch.float32,
        bias=case.tensor("bias") if case.has("bias") else None,
        out=existing,
        accumulate=existing is not None,
        backend=case.backend,
    )
    got, want, bound = y.cpu().numpy(), case.array("out"), case.array("bound")
    assert got.shape == want.shape
    assert np.array_equal(np.isnan(got), np.isnan(want)), "NaN elsewhere than expected"
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(got.astype(np.float64) - want) <= case.entry["rtol"] * bound
    assert (near | np.isnan(want) | (got == want)).all(), f"off by {np.nanmax(np.abs(got - want) / bound)} of the bound"


def _check_swizzle(case: Case) -> None:
    scale = case.tensor("block_scale")
    groups = case.entry.get("groups") or [scale.shape[0]]
    parts = [layout.swizzle(part) for part in scale.split(groups)]
    assert_same(torch.cat(parts), case.array("swizzled"), "swizzled")
    back = [layout.unswizzle(part, rows, scale.shape[1]) for part, rows in zip(parts, groups, strict=True)]
    assert_same(torch.cat(back), case.array("block_scale"), "unswizzled")


QUANTIZE_KINDS = ("nvfp4", "nvfp4_rht_col", "four_over_six", "nvfp4_sr", "mxfp8", "edge_nvfp4", "edge_mxfp8")
CHECKS = {
    **dict.fromkeys((*QUANTIZE_KINDS, "reference_nvfp4"), _check_quantize),
    "edge_row_col": _check_row_col,
    "rank_nvfp4": _check_rank,
    "edge_rotate": _check_rotate,
    "edge_gemm": _check_gemm,
    "swizzle": _check_swizzle,
    "edge_swizzle": _check_swizzle,
}
