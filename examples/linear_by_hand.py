"""A linear layer of NVIDIA's NVFP4 recipe in 60 lines of plain torch, bit for bit that of `hb.nn.Linear`.

What is between `LAYER` and `END` does not know halfbyte: it is docs/numerics.md in code, for finite data that is not
all zero. `main` runs it beside the library, which does the same for any data, recipe and shape, on any device.

M tokens, N out_features, K in_features. A quantized operand is a pair: values [rows, K], code times block scale, and
the factor [] of its amax.
"""

import torch

import halfbyte as hb

SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])

# LAYER


def random_bytes(rows, blocks, seed, offset):
    """Philox4x32-10: 16 bytes for every block, a function of where the block lies and of nothing else."""
    c0 = torch.arange(rows * blocks)
    c1, c2, c3 = (torch.full_like(c0, word) for word in (0, offset & 0xFFFFFFFF, offset >> 32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            (((m * (c >> 16)) + ((m * (c & 0xFFFF)) >> 16)) >> 16, (m * c) & 0xFFFFFFFF)
            for m, c in ((0xD2511F53, c0), (0xCD9E8D57, c2))
        )
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    drawn = [(word >> shift) & 255 for word in (c0, c1, c2, c3) for shift in (0, 8, 16, 24)]
    return torch.stack(drawn, dim=1).view(rows, blocks, 16)


def step(a):
    """The distance between neighbours of E2M1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6}."""
    return torch.where(a >= 4, 2.0, torch.where(a >= 2, 1.0, 0.5))


def e2m1(v, random=None):
    """Round to E2M1: to nearest, ties to even; or up as often as the fraction says, by 8 random bits."""
    a = v.abs().clamp(max=6)
    if random is None:
        q = torch.round(a / step(a)) * step(a)
    else:
        t = a + random / 256 * step(a)
        q = torch.floor(t / step(t)) * step(t)
    return q.clamp(max=6).copysign(v)


def quantize(x, tile=1, draw=None):
    """Blocks of 16 along the last dimension, or tiles of 16 x 16, each with an E4M3 scale; one amax for all of x."""
    x = x.float()
    blocks = x.view(x.shape[0] // tile, tile, -1, 16)
    amax = x.abs().amax()
    s = torch.tensor(2688.0) / amax  # 2688 = 448 * 6: the largest scale times the largest code
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) * (s * torch.tensor(1 / 6))
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn).float()
    encode_scale = 1 / (scale * (1 / s))
    random = None if draw is None else random_bytes(x.shape[0], x.shape[1] // 16, *draw).view(blocks.shape)
    return (e2m1(blocks * encode_scale, random) * scale).view(x.shape), amax * torch.tensor(1 / 2688)


def rotate(x):
    """The random Hadamard transform of width 16: signs, four stages of butterflies, one rounding to bf16."""
    y = x.float().view(x.shape[0], -1, 16) * SIGNS
    for stride in (1, 2, 4, 8):
        a, b = y.view(*y.shape[:2], -1, 2, stride).unbind(3)
        y = torch.stack((a + b, a - b), dim=3).view(y.shape)
    return (y * 0.25 + 0.0).bfloat16().view(x.shape)


def nt(a, b):
    """The GEMM a @ b.T: exact products, summed in fp32, one rounding at the end."""
    return ((a[0] @ b[0].T) * (a[1] * b[1])).bfloat16()


def forward(x_MK, w_NK):
    return nt(quantize(x_MK), quantize(w_NK, tile=16))


def backward(dy_MN, x_MK, w_NK, seed, offset):
    dx_MK = nt(quantize(dy_MN, draw=(seed, offset + 4)), quantize(w_NK.T.contiguous(), tile=16))
    dy_NM, x_KM = rotate(dy_MN.T.contiguous()), rotate(x_MK.T.contiguous())
    return dx_MK, nt(quantize(dy_NM, draw=(seed, offset + 5)), quantize(x_KM))


# END


def main(tokens: int = 64, in_features: int = 96, out_features: int = 48, seed: int = 1) -> dict[str, bool]:
    """Run both and return which of their results are equal bit for bit."""
    torch.manual_seed(0)
    state = hb.RunState(seed)
    layer = hb.nn.Linear(in_features, out_features, bias=False, recipe="nvfp4", state=state, dtype=torch.bfloat16)
    x = torch.randn(tokens, in_features, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, out_features, dtype=torch.bfloat16)

    y = layer(x)
    y.backward(dy)
    w = layer.weight.detach()
    by_hand = forward(x.detach(), w), *backward(dy, x.detach(), w, seed, offset=0)  # the run's first layer, first step

    ours = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
    equal = {name: torch.equal(value, by_hand[i]) for i, (name, value) in enumerate(ours.items())}
    for name, same in equal.items():
        print(f"{name:>2}: {'every bit equal' if same else 'DIFFERENT'}")
    return equal


if __name__ == "__main__":
    main()
