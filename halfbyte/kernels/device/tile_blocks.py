"""Device functions of what the 16 blocks of a 16x16 tile have together: the largest magnitude, the sum of errors.

Blocks are entries of one tensor [rows, blocks] or [blocks, columns], as in `scales`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def over_tile(m, AXIS: tl.constexpr):
    """Give every block of a 16x16 tile the maximum of the tile's 16 blocks, which lie along AXIS."""
    A: tl.constexpr = m.shape[0]
    B: tl.constexpr = m.shape[1]
    if AXIS == 0:
        tiles = tl.max(tl.reshape(m, (A // 16, 16, B)), axis=1)[:, None, :]
        tiles = tl.broadcast_to(tiles, (A // 16, 16, B))
    else:
        tiles = tl.max(tl.reshape(m, (A, B // 16, 16)), axis=2)[:, :, None]
        tiles = tl.broadcast_to(tiles, (A, B // 16, 16))
    return tl.reshape(tiles, (A, B))


@triton.jit
def tree_sum(e, AXIS: tl.constexpr):
    """Give every block of a tile the sum of its 16 errors in the order of section 5: (r, r + 8), then + 4, + 2, + 1."""
    if AXIS == 0:
        return exchanged_sum(e)
    else:
        e = tl.trans(e)
        A: tl.constexpr = e.shape[0]
        B: tl.constexpr = e.shape[1]
        t = tl.reshape(e, (A // 16, 16, B))
        for step in tl.static_range(4):
            upper, lower = tl.split(tl.permute(tl.reshape(t, (A // 16, 2, 8 >> step, B)), (0, 2, 3, 1)))
            t = upper + lower
        return tl.trans(tl.reshape(tl.broadcast_to(t, (A // 16, 16, B)), (A, B)))


@triton.jit
def exchanged_sum(e):
    """Return `tree_sum` of tiles whose 16 blocks lie below each other, where a warp's lanes lie too: by shuffles.

    Of two numbers either order gives the same bits, so both have their sum, and after four exchanges all have all.
    """
    A: tl.constexpr = e.shape[0]
    B: tl.constexpr = e.shape[1]
    t = tl.reshape(e, (A // 16, 16, B))
    for step in tl.static_range(4):
        other = (tl.arange(0, 16) ^ (8 >> step))[None, :, None]
        t += tl.gather(t, tl.broadcast_to(other, (A // 16, 16, B)), 1)
    return tl.reshape(t, (A, B))
