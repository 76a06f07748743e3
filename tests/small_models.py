"""A decoder small enough to convert in every test, with the layer names of the Llama family."""

import torch
from torch import nn

import halfbyte as hb

NOTHING_KEPT = hb.Keep(names=(), last_fraction=0)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        scores = self.q_proj(x) @ self.k_proj(x).transpose(-1, -2)
        return self.o_proj(scores.softmax(-1) @ self.v_proj(x))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.down_proj = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn, self.mlp = Attention(dim), Mlp(dim)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, blocks=10, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.lm_head = nn.Linear(dim, 11, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def decoder(blocks: int = 10) -> Decoder:
    torch.manual_seed(0)
    return Decoder(blocks)


TOKENS = torch.arange(10).view(2, 5) % 11
