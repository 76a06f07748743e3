"""The E2M1 conversions of sm_100 and later beside ours, value by value: what `halfbyte verify` reports of them.

The nearest conversion is what quantize uses there. The stochastic one (sm_100 and sm_103) is compared only: which
random byte meets which value, and how it rounds below 1/2, is known from no such GPU yet, so stochastic codes are ours
everywhere.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device.e2m1_conversion import converted_word
from halfbyte.kernels.device.stochastic import stochastic_word, upper_halves
from halfbyte.kernels.launch import jit
from halfbyte.kernels.target import find

COUNT = 1 << 16
BLOCK = 256

# Eight values and two words of random bytes to eight codes.
STOCHASTIC_CONVERSION = tl.constexpr(
    "{.reg .b16 low, high;"
    "cvt.rs.satfinite.e2m1x4.f32 low, {$4, $3, $2, $1}, $9;"
    "cvt.rs.satfinite.e2m1x4.f32 high, {$8, $7, $6, $5}, $10;"
    "mov.b32 $0, {low, high};}"
)


@jit
def e2m1_pair_kernel(x_ptr, random_ptr, ours_ptr, theirs_ptr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """Convert x fp32 [8 n] to words of 8 codes [n], by our arithmetic and by the target; random: uint32 [2 n]."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    xs = ()
    for i in tl.static_range(8):
        xs = xs + (tl.load(x_ptr + word * 8 + i),)
    one = xs[0] * 0 + 1.0
    if STOCHASTIC:
        random = (tl.load(random_ptr + word * 2), tl.load(random_ptr + word * 2 + 1))
        ours = stochastic_word(xs, upper_halves(xs), 0, one, random, False)
        theirs = tl.inline_asm_elementwise(
            STOCHASTIC_CONVERSION,
            "=r,f,f,f,f,f,f,f,f,r,r",
            xs + random,
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        ours = pm.pack_word(xs, 0, pm.nearest_codes(xs, 0, one))
        theirs = converted_word(xs, 0, one)
    tl.store(ours_ptr + word, ours)
    tl.store(theirs_ptr + word, theirs)


def conversions(device: torch.device) -> dict[str, bool]:
    """Return which of "nearest" and "stochastic" the device has and uses: name -> used by quantize."""
    target, found = find(device), {}
    if target.e2m1:
        found["nearest"] = True
    if target.stochastic_e2m1:
        found["stochastic"] = False
    return found


def explain_conversions(device: torch.device) -> str:
    """Say which conversions to E2M1 quantize takes from the device, and why not the others."""
    found, words = conversions(device), {}
    for name, instruction in (("nearest", "cvt.rn"), ("stochastic", "cvt.rs")):
        if found.get(name):
            words[name] = f"by {instruction}"
        elif name in found:
            words[name] = (
                f"in integer arithmetic: {instruction} is compared with it by `halfbyte verify` but not used, "
                "because no such GPU has confirmed its bytes"
            )
        else:
            words[name] = f"in integer arithmetic: {find(device).name} has no {instruction} to E2M1"
    return "; ".join(f"{name} {how}" for name, how in words.items())


def compare_conversions(device: torch.device, name: str) -> tuple[Tensor, Tensor]:
    """Return the codes of 65,536 values, [8192] int32, by our arithmetic and by the target's conversion.

    Args:
        device: one for which `conversions` names `name`.
        name: "nearest": of every finite bf16 value, or "stochastic": of values from -8 to 8 and random bytes.
    """
    if name == "nearest":
        bits = torch.arange(COUNT, dtype=torch.int32, device=device) << 16
        x = torch.nan_to_num(bits.view(torch.float32), nan=0.0, posinf=6.0, neginf=-6.0)
    else:
        x = torch.linspace(-8, 8, COUNT, device=device, dtype=torch.float32)
    generator = torch.Generator(device).manual_seed(4)
    random = torch.randint(-(1 << 31), 1 << 31, (COUNT // 4,), generator=generator, device=device).to(torch.int32)
    return convert(x, random, name)


def convert(x: Tensor, random: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the codes of x fp32 [8 n] by our arithmetic and by the target's conversion `name`; random: int32 [2 n]."""
    words = x.numel() // 8
    ours, theirs = (torch.empty(words, dtype=torch.int32, device=x.device) for _ in range(2))
    e2m1_pair_kernel[(words // BLOCK,)](
        x,
        random.view(torch.uint32),
        ours.view(torch.uint32),
        theirs.view(torch.uint32),
        STOCHASTIC=name == "stochastic",
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return ours, theirs
