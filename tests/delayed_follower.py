"""The amaxes of one layer with a recipe that delays them, followed in numpy as numerics.md section 3 says."""

from __future__ import annotations

import numpy as np
import oracle

import halfbyte as hb
from halfbyte import layout

SEED = 3
NAMES = ("x.row", "x.col", "dy.row", "dy.col")
STREAM = {"x.row": 0, "x.col": 1, "w.row": 2, "w.col": 3, "dy.row": 4, "dy.col": 5}
SIGNS = {"x.row": 6, "x.col": 8, "dy.row": 7, "dy.col": 8}


class Follower:
    """The amaxes of one layer, followed as section 3 defines them."""

    def __init__(self, recipe: hb.Recipe, seed: int = SEED) -> None:
        self.seed = seed
        self.every, self.margin, self.step = recipe.amax.every, np.float32(recipe.amax.margin), -1
        fprop, dgrad, wgrad = (gemm or hb.GemmSpec() for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
        x_col = wgrad.b if recipe.backward == "original" else None
        self.specs = dict(zip(NAMES, (fprop.a, x_col, dgrad.a, wgrad.a), strict=True))
        zeros = dict.fromkeys(NAMES, np.float32(0))
        self.held, self.before, self.seen, self.exceeded = zeros, zeros, zeros, dict.fromkeys(NAMES, 0)

    def begin(self) -> None:
        held = dict(self.held)
        if self.step >= 0 and self.step % self.every == 0:
            for name in NAMES:
                self.exceeded[name] += int(self.before[name] > 0 and self.seen[name] > self.held[name])
                if self.seen[name] > 0:
                    held[name] = min(self.margin * self.seen[name], np.finfo(np.float32).max)
        self.before, self.held, self.step = self.held, held, self.step + 1
        self.seen = dict.fromkeys(NAMES, np.float32(0))

    def delays(self, name: str) -> bool:
        spec = self.specs[name]
        return spec is not None and spec.has_tensor_amax

    def note(self, name: str, t: np.ndarray, position: int) -> None:
        """Note the amax of an operand of a call."""
        if self.delays(name):
            signs, rotation = oracle.Place(self.seed, (position << 32) + SIGNS[name]), self.specs[name].rotation
            rows = t if rotation is None else np.array(oracle.rotated(t, rotation, signs), dtype=np.float32)
            self.seen[name] = max(self.seen[name], np.abs(rows).max())

    def expected(self, name: str, t: np.ndarray, position: int) -> oracle.Result:
        """Return the operand of a call, and note its amax."""
        spec = self.specs[name]
        place, signs = (oracle.Place(self.seed, (position << 32) + streams[name]) for streams in (STREAM, SIGNS))
        own = oracle.quantize(t, spec, place, signs)
        if not self.delays(name):
            return own
        self.seen[name] = max(self.seen[name], own.amax[0])
        return oracle.quantize(t, spec, place, signs, [self.held[name]]) if self.before[name] > 0 else own


def assert_bytes(spec, blocks, expected: oracle.Result) -> None:
    codes = np.array(expected.codes, dtype=np.uint8)
    np.testing.assert_array_equal(layout.unpack(blocks.qdata).numpy(), codes)
    np.testing.assert_array_equal(blocks.block_scale.numpy(), np.array(expected.scales, dtype=np.uint8))
    amax = np.array(expected.amax, dtype=np.float32).reshape(tuple(blocks.amax.shape))
    np.testing.assert_array_equal(blocks.amax.numpy(), amax)
