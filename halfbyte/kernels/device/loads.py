"""Device functions that read a tile of x in groups along its rows or its columns, in words where x is packed."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.ptx import has_ptx

SUBTRACT_PAIR = tl.constexpr("{.reg .b32 n; mov.b32 n, 0xBF80BF80; fma.rn.bf16x2 $0, $2, n, $1;}")  # x + mean * -1


@triton.jit
def masked_load(pointers, mask, FULL: tl.constexpr):
    """Load, with 0 where `mask` is false; FULL: it is true everywhere."""
    if FULL:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def masked_store(pointers, values, mask, FULL: tl.constexpr):
    """Store where `mask` is true; FULL: it is true everywhere."""
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def block_address(ptr, i_row, i_group, row, block, blocks):
    """Return addresses in an operand of `blocks` blocks a row; row, block: [R, N] from row i_row and block i_group on.

    Addresses are numbers: the compiler, which does not see that blocks lie together, moves nothing between threads.
    """
    SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    first = ptr.to(tl.int64) + (tl.cast(i_row, tl.int64) * blocks + i_group) * SIZE
    return pm.wide_sum(first, row * blocks + block, SIZE).to(ptr.dtype)


@triton.jit
def pairs_without(words, mean):
    """Return words of two bf16 values less those of `mean`, which broadcasts, each rounded once."""
    if not has_ptx():
        low = (words << 16).to(tl.float32, bitcast=True) - (mean << 16).to(tl.float32, bitcast=True)
        high = (words & 0xFFFF0000).to(tl.float32, bitcast=True) - (mean & 0xFFFF0000).to(tl.float32, bitcast=True)
        return pm.bf16_pairs((low, high))[0]
    return tl.inline_asm_elementwise(SUBTRACT_PAIR, "=r,r,r", [words, mean], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def mean_words(x, word, FULL: tl.constexpr):
    """Return the means of the columns of words `word` of a packed x, two in a word, 0 where there is none."""
    return masked_load(x.mean_ptr.to(tl.pointer_type(tl.uint32)) + word, word * 2 < x.cols, FULL)


@triton.jit
def rows_of_tile(i_row, rows, RULE: tl.constexpr, R: tl.constexpr):
    """Return the rows of a tile whose blocks lie along them; RULE.clamped: the last one in place of those behind it."""
    row = i_row + tl.arange(0, R)
    if RULE.clamped:
        row = tl.minimum(row, rows - 1)
    return row


@triton.jit
def lines_from(i_row, rows, RULE: tl.constexpr, R: tl.constexpr):
    """Return `rows_of_tile` counted from i_row."""
    row = tl.arange(0, R)
    if RULE.clamped:
        row = tl.minimum(row, rows - 1 - i_row)
    return row


@triton.jit
def load_row_pairs(
    x, i_row, i_group, RULE: tl.constexpr, R: tl.constexpr, N: tl.constexpr, EVERY: tl.constexpr
):  # fmt: skip
    """Return RULE.group / 2 words [R, N], two bf16 values each, of N groups of R rows of a packed x.

    EVERY: how far these groups lie apart.
    """
    row = rows_of_tile(i_row, x.rows, RULE, R)
    group = tl.arange(0, N)
    if EVERY > 1:
        group = EVERY * group
    o_word = (i_group + group) * (RULE.group // 2)
    if RULE.full or RULE.along:
        word_ptr = (x.ptr + tl.cast(i_row, tl.int64) * x.stride_r).to(tl.pointer_type(tl.uint32))
        o_row = lines_from(i_row, x.rows, RULE, R).to(tl.int64) * (x.stride_r // 2)
    else:
        # Rows of a packed x are whole pieces of 16 bytes. The compiler does not see that in their length: it would
        # read word after word, by lanes that lie otherwise.
        word_ptr = x.ptr.to(tl.pointer_type(tl.uint32)) + tl.cast(i_row, tl.int64) * (x.stride_r // 8) * 4
        o_row = lines_from(i_row, x.rows, RULE, R).to(tl.int64) * (x.stride_r // 8) * 4
    if RULE.along:  # groups lead: of dimensions that are not contiguous the compiler lays lanes along the first
        first = word_ptr + o_row[None, :, None]
    else:
        first = word_ptr + o_row[:, None, None]
    words = ()
    for piece in tl.static_range(RULE.group // 8):
        four = piece * 4 + tl.arange(0, 4)
        if RULE.along:
            word = o_word[:, None, None] + four[None, None, :]
            inside = (row < x.rows)[None, :, None] & (word * 2 < x.cols)
            loaded = masked_load(first + word, inside, RULE.full)
            if x.mean_ptr is not None:
                loaded = pairs_without(loaded, mean_words(x, word, RULE.full))
            loaded = tl.permute(loaded, (1, 0, 2))
        else:
            word = o_word[None, :, None] + four[None, None, :]
            inside = (row < x.rows)[:, None, None] & ((o_word + piece * 4) * 2 < x.cols)[None, :, None]
            loaded = masked_load(first + word, inside, RULE.full)
            if x.mean_ptr is not None:
                loaded = pairs_without(loaded, mean_words(x, word, RULE.full))
        words = words + pm.split_four(loaded, R, N)
    return words


@triton.jit
def load_col_pairs(x, i_group, i_col, RULE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """Return RULE.group tuples of RULE.words words [N, C / words / 2], two columns each: a packed x by columns."""
    COUNT: tl.constexpr = RULE.words
    SHARE: tl.constexpr = C // (2 * COUNT)
    SIZE: tl.constexpr = RULE.group
    row = tl.arange(0, N) * SIZE
    # Halved, columns hide from the compiler that single words lie together: its layout then keeps the groups of a
    # column in one warp, where scales need no shared memory.
    word = ((i_col + 2 * COUNT * tl.arange(0, SHARE)) // 2)[:, None] + tl.arange(0, COUNT)[None, :]
    stride = tl.cast(x.stride_r, tl.int64) // 2
    first = x.ptr.to(tl.pointer_type(tl.uint32)) + i_group * SIZE * stride
    first = first + row.to(tl.int64)[:, None, None] * stride + word[None, :, :]
    left = (x.rows - i_group * SIZE - row)[:, None, None]
    in_col = (word * 2 < x.cols)[None, :, :]
    if RULE.clamped:
        # One branch of a program in place of a comparison for every row.
        if i_group * SIZE + N * SIZE <= x.rows:
            loaded = load_rows(first, x.stride_r, left, in_col, True, True, SIZE)
        else:
            loaded = load_rows_left(first, x.stride_r, left, SIZE)
    else:
        loaded = load_rows(first, x.stride_r, left, in_col, RULE.full, False, SIZE)
    if x.mean_ptr is not None:
        loaded = rows_without(loaded, mean_words(x, word, RULE.full)[None, :, :], left, RULE.full)
    out = ()
    for i in tl.static_range(SIZE):
        if COUNT == 4:
            out = out + (pm.split_four(loaded[i], N, SHARE),)
        elif COUNT == 2:
            out = out + (tl.split(loaded[i]),)
        else:
            out = out + ((tl.reshape(loaded[i], (N, SHARE)),),)
    return out


@triton.jit
def rows_without(rows, mean, left, FULL: tl.constexpr):
    """Return rows of words less `mean`; 0 in those that do not exist, of which there are `left`, unless FULL."""
    out = ()
    for i in tl.static_range(len(rows)):
        rest = pairs_without(rows[i], mean)
        if not FULL:
            rest = tl.where(left > i, rest, 0)
        out = out + (rest,)
    return out


@triton.jit
def load_rows(first, stride_r, left, in_col, FULL: tl.constexpr, ALL_COLS: tl.constexpr, SIZE: tl.constexpr):
    """Return what lies at `first` and below it in SIZE rows, of which `left` exist; 0 elsewhere, unless FULL."""
    step = tl.cast(pm.unaligned(stride_r // 2), tl.int64)
    out = ()
    for i in tl.static_range(SIZE):
        inside = left > i
        if not ALL_COLS:
            inside = inside & in_col
        out = out + (masked_load(first, inside, FULL),)
        if first.shape[2] == 1:
            first = first + step
        else:
            first = first + tl.cast(stride_r, tl.int64) // 2
    return out


@triton.jit
def load_rows_left(first, stride_r, left, SIZE: tl.constexpr):
    """Return `load_rows` of whole columns, from addresses that the compiler does not keep for whole tiles too."""
    address, zero = first.to(tl.int64), tl.zeros(left.shape, tl.int32)
    out = ()
    for i in tl.static_range(SIZE):
        pointers = pm.wide_sum(address, zero + i, stride_r * 2).to(first.dtype)
        out = out + (tl.load(pointers, mask=left > i, other=0),)
    return out


@triton.jit
def load_row_groups(x_ptr, o_row, in_row, o_col, cols, stride_c, SIZE: tl.constexpr):
    """Return SIZE fp32 tensors [R, N]: element i of the groups that start in columns o_col [N] of rows o_row [R].

    Each thread loads whole groups in pieces of 16 bytes.
    """
    R: tl.constexpr = o_row.shape[0]
    N: tl.constexpr = o_col.shape[0]
    WIDTH: tl.constexpr = 4 if x_ptr.dtype.element_ty == tl.float32 else 8
    xs = ()
    for piece in tl.static_range(SIZE // WIDTH):
        col = o_col[None, :, None] + (piece * WIDTH + tl.arange(0, WIDTH))[None, None, :]
        pointers = x_ptr + o_row[:, None, None] + col.to(tl.int64) * stride_c
        x = pm.to_fp32(tl.load(pointers, mask=in_row[:, None, None] & (col < cols), other=0.0))
        if WIDTH == 8:
            xs = xs + pm.split_eight(x, R, N)
        else:
            xs = xs + pm.split_four(x, R, N)
    return xs


@triton.jit
def load_col_groups(x_ptr, o_row, rows, o_col, in_col, stride_r, stride_c, SIZE: tl.constexpr):
    """Return SIZE fp32 tensors [N, C]: element i of the groups that start in rows o_row [N], in columns o_col [C]."""
    xs = ()
    stride_r64 = tl.cast(stride_r, tl.int64)
    first = x_ptr + o_row.to(tl.int64)[:, None] * stride_r + o_col.to(tl.int64)[None, :] * stride_c
    for i in tl.static_range(SIZE):
        inside = (o_row + i < rows)[:, None] & in_col[None, :]
        xs = xs + (pm.to_fp32(tl.load(first + i * stride_r64, mask=inside, other=0.0)),)
    return xs
