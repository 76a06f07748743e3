"""The kernels of primary weights against the reference, bit for bit, on the CPU (interpreter) and on a GPU alike."""

from __future__ import annotations

import torch

import halfbyte as hb
from halfbyte.kernels.master_cast import launch as kernels
from halfbyte.pieces import Piece, code_bytes
from halfbyte.reference import primary as reference
from halfbyte.tensor import PrimaryWeight

TILE = hb.NVFP4(block=(16, 16))
SPECS = {
    "standard": TILE,
    "headroom": hb.NVFP4(block=(16, 16), fp4_max=5.5, e4m3_max=300.0),
    "four_over_six": hb.NVFP4(block=(16, 16), e4m3_max=256.0, scaling=hb.FourOverSix()),
    "clipping": hb.NVFP4(
        block=(16, 16), scaling=hb.FourOverSix(error="mse", candidates=(0.875, 1.0, 1.5), error_math="scaled")
    ),
}


def make_pieces(shapes, spec, dtype, cuts, device, **options) -> tuple[list[Piece], list, int]:
    """Return pieces of random masters, the weights they belong to and the tiles; cuts: (start, stop) as fractions."""
    from halfbyte.distributed.partial_cast import cast_target_of

    torch.manual_seed(0)
    weights, pieces, tiles = [], [], 0
    for i, (shape, (low, high)) in enumerate(zip(shapes, cuts, strict=True)):
        pitch = options.get("pitch", lambda cols: cols)(shape[1])
        weight = PrimaryWeight.empty(
            shape, spec, dtype=options.get("rounded", torch.bfloat16), device=device,
            scale_layout=options.get("scale_layout", "linear"),
        )  # fmt: skip
        weight.qdata.copy_(torch.randint(0, 256, weight.qdata.shape, dtype=torch.uint8))
        target = cast_target_of(weight, tiles, i, turned=weight.allocate_turned())
        tiles += target.tile_count
        numel = shape[0] * pitch
        start, stop = round(low * numel), round(high * numel)
        if options.get("blocks"):
            start, stop = start // 16 * 16, stop // 16 * 16
        master = torch.randn(numel) * 10.0 ** (i - 2)
        if options.get("broken") and numel > 40:
            master[numel // 2], master[numel // 3] = float("nan"), -float("inf")
        master = master.to(dtype)[start:stop].to(device)
        codes, first = weight.qdata.view(-1), 0
        if options.get("shards"):
            first, last = code_bytes(shape[1], pitch, start, stop)
            codes = codes[first:last].clone()
        pieces.append(Piece(target, master, start, pitch, codes, first))
        weights.append(weight)
    return pieces, weights, tiles


def check_stages(device: str, shapes, spec: hb.NVFP4, dtype: torch.dtype, cuts, **options) -> None:
    """Every stage leaves the reference's bytes in every buffer; the reference runs on the CPU."""
    states = []
    for module, where in ((reference, "cpu"), (kernels, device)):
        pieces, weights, tiles = make_pieces(shapes, spec, dtype, cuts, where, **options)
        amaxes = torch.zeros(tiles + len(shapes), device=where)
        scales = torch.zeros(tiles, dtype=torch.uint8, device=where)
        caster = module.Caster(pieces, tiles)
        finisher = module.Finisher([piece.target for piece in pieces], tiles)
        caster.amax(amaxes)
        caster.choose(amaxes, scales)
        finisher.scale(amaxes, scales, expand=options.get("at_once", False))
        caster.cast(amaxes, scales)
        finisher.expand(amaxes, scales)
        finisher.transpose()
        buffers = {"amaxes": amaxes.view(torch.int32), "scales": scales}
        for i, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            buffers |= {f"{i}.{name}": tensor for name, tensor in weight.blocks._asdict().items()}
            buffers |= {f"{i}.codes": piece.codes, f"{i}.turned": weight.turned.qdata}
            buffers[f"{i}.turned_scale"] = weight.turned.block_scale
        states.append({name: tensor.cpu() for name, tensor in buffers.items()})
    for name, expected in states[0].items():
        assert torch.equal(states[1][name], expected), name


SHAPES = [(16, 16), (33, 48), (1, 1), (7, 300), (20, 33)]
WHOLE = [(0.0, 1.0)] * 5
PARTS = [(0.0, 0.5), (0.3, 0.9), (0.0, 1.0), (0.21, 0.22), (0.1, 0.97)]
