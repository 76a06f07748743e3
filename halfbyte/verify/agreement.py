"""`halfbyte verify --against`: our bytes beside another package's, and which of its rules makes each difference.

Three things are compared on every data set: our quantizer with the definition written as a profile, the package with
the profile of its rules (both must be equal), and the two profiles. Where those differ, the rules are exchanged one
after another, in the order in which they act: a byte belongs to the rule after which it has the package's value for
good. So every difference has one rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from halfbyte import layout, ops
from halfbyte.formats import E2M1, NVFP4_BLOCK
from halfbyte.reference.scale import global_scale
from halfbyte.sides import Side
from halfbyte.spec import NVFP4
from halfbyte.verify.peers import Peer, Quantizer
from halfbyte.verify.profiles import DEFINITION, STORED, PeerBytes, Profile, bytes_by, steps

ROWS, COLUMNS = 512, 1024
SEED = 20_261_122
DECADES = 8
FREEDOM = 3
TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "stored": "of the tensor it stores {value}, not {definition}",
        "scale": "a block's scale is {value}, not {definition}",
        "scale_of_zeros": "a scale of 0 becomes {value:g} before the cast",
        "scale_floor": "scales below 2^{exponent:g} are raised to it before the cast",
        "scale_after_zero": "a scale that the cast made 0 becomes {value:g}",
        "encode": "it rounds {value}, not {definition}",
        "factor_of_zero": "where the scale is 0 it rounds x * {value:g}, not x * FLT_MAX",
        "has_minus_zero": "-0 becomes +0",
        "saturates": "magnitudes of 7 and more become code 8, which is -0",
        "code_of_nan": "NaN becomes the magnitude of code {value}",
    }
)
"""What a rule that is not the definition's says."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """How many scales and codes one rule of a package changes; `rule` is a field of Profile, `text` says it."""

    rule: str
    text: str
    scales: int
    codes: int


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One data set.

    Args:
        data: its name.
        blocks: how many scales it has.
        elements: how many codes it has.
        scales: scales that differ from the definition's.
        codes: codes that differ.
        decoded: products of code and scale that differ as numbers: -0 is 0, and with a scale of 0 every code is.
        factor: the relative difference of the fp32 numbers that everything is decoded with.
        causes: the rules behind the differences; they add up to them.
        unexplained: what is neither the definition's nor the profile's, "" if nothing is.
    """

    data: str
    blocks: int
    elements: int
    scales: int
    codes: int
    decoded: int
    factor: float
    causes: tuple[Cause, ...]
    unexplained: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `--against` found about one package on one day."""

    peer: Peer
    version: str
    day: str
    agreements: tuple[Agreement, ...]

    @property
    def is_explained(self) -> bool:
        return not any(agreement.unexplained for agreement in self.agreements)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        peer = {"name": self.peer.name, "call": self.peer.call, "rules_read_in": self.peer.version}
        return {
            **peer,
            "version": self.version,
            "torch": torch.__version__,
            "day": self.day,
            "rules": [text for _, text in differing_rules(self.peer.profile)],
            "is_explained": self.is_explained,
            "data": [asdict(agreement) for agreement in self.agreements],
        }


def data(generator: torch.Generator | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, x [512, 1024]): normal, heavy tails, scales of blocks over 8 decades, zeros; bf16 and fp32."""
    generator = torch.Generator().manual_seed(SEED) if generator is None else generator
    blocks = ROWS, COLUMNS // NVFP4_BLOCK, 1

    def normal() -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float32)

    def by_block(factor: Tensor) -> Tensor:
        return (normal().view(*blocks[:2], NVFP4_BLOCK) * factor).view(ROWS, COLUMNS)

    chi = torch.stack([normal() for _ in range(FREEDOM)]).square().mean(0).sqrt()
    decades = torch.rand(blocks, generator=generator, dtype=torch.float32) * -DECADES
    kept = (torch.rand(blocks, generator=generator, dtype=torch.float32) >= 1 / NVFP4_BLOCK).float()
    kinds = {
        "normal": normal(),
        "Student-t, 3 degrees of freedom": normal() / chi,
        "blocks over 8 decades": by_block(10**decades),
        "one block of 16 is zeros": by_block(kept),  # a product of 0 and a negative number is -0
        "zeros alone": by_block(torch.zeros(blocks, dtype=torch.float32)),
    }
    for name, x in kinds.items():
        for dtype in (torch.bfloat16, torch.float32):
            yield f"{name}, {str(dtype).removeprefix('torch.')}", x.to(dtype)


def compare_with(peer: Peer, quantize: Quantizer, version: str) -> Comparison:
    """Compare on all data.

    Args:
        peer: the package.
        quantize: how it is called.
        version: of what is called.
    """
    agreements = tuple(agree_on(name, x, peer.profile, quantize) for name, x in data())
    return Comparison(peer=peer, version=version, day=date.today().isoformat(), agreements=agreements)


def agree_on(name: str, x: Tensor, profile: Profile, quantize: Quantizer) -> Agreement:
    """Compare on one data set.

    Args:
        name: of the data.
        x: bf16 or fp32 [M, K], K a multiple of 16.
        profile: the package's rules.
        quantize: the package.
    """
    ours = PeerBytes(*ops.quantize(x, Side(NVFP4()), backend="reference"))
    by_definition, by_profile = bytes_by(DEFINITION, x), bytes_by(profile, x)
    problems = (
        _unlike("halfbyte", ours, by_definition, "the definition"),
        _unlike("the package", quantize(x.clone()), by_profile, "its profile"),
    )
    start, end = _planes(by_definition), _planes(by_profile)
    causes = _causes(x, profile, start, end)
    scales, codes = (int((a != b).sum()) for a, b in zip(start, end, strict=True))
    return Agreement(
        data=name,
        blocks=start[0].numel(),
        elements=start[1].numel(),
        scales=scales,
        codes=codes,
        decoded=int((_numbers(*start) != _numbers(*end)).sum()),
        factor=_factor_difference(profile, x),
        causes=causes,
        unexplained="; ".join(problem for problem in problems if problem),
    )


def _planes(stored: PeerBytes) -> tuple[Tensor, Tensor]:
    return stored.block_scale, layout.unpack(stored.qdata)


def _numbers(scale: Tensor, codes: Tensor) -> Tensor:
    """Return code * scale fp32 [M, K/16, 16]; NaN, which is unlike itself, as an infinity."""
    values = torch.tensor([E2M1.decode(code) for code in range(16)], dtype=torch.float32)[codes.long()]
    products = values.unflatten(1, (-1, NVFP4_BLOCK)) * scale.view(torch.float8_e4m3fn).float()[..., None]
    return products.nan_to_num(nan=torch.inf)


def _causes(x: Tensor, profile: Profile, start: tuple[Tensor, ...], end: tuple[Tensor, ...]) -> tuple[Cause, ...]:
    """Give every byte of `end` that is not that of `start` to the last rule at which it changed."""
    before = start
    last = [torch.full(plane.shape, -1, dtype=torch.int64) for plane in start]
    names = []
    for index, (rule, between) in enumerate(steps(profile)):
        after = _planes(bytes_by(between, x))
        for plane, old, new in zip(last, before, after, strict=True):
            plane[old != new] = index
        before = after
        names.append(rule)
    texts = dict(differing_rules(profile))
    causes = []
    for index, rule in enumerate(names):
        scales, codes = (int(((p == index) & (a != b)).sum()) for p, a, b in zip(last, start, end, strict=True))
        if scales or codes:
            causes.append(Cause(rule=rule, text=texts[rule], scales=scales, codes=codes))
    return tuple(causes)


def _unlike(who: str, actual: PeerBytes, expected: PeerBytes, what: str) -> str:
    """Say how bytes are not what they should be, "" if they are."""
    found = []
    for part, a, b in zip(("codes", "scales", "fp32 number"), actual, expected, strict=True):
        if part == "codes" and a.shape == b.shape and a.dtype == b.dtype:
            a, b = layout.unpack(a), layout.unpack(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{part}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
            continue
        if part == "fp32 number":
            a, b = a.view(torch.int32), b.view(torch.int32)
        count = int((a != b).sum())
        if count:
            found.append(f"{part}: {count} of {a.numel()}")
    return f"bytes of {who} that are not those of {what}: {', '.join(found)}" if found else ""


def _factor_difference(profile: Profile, x: Tensor) -> float:
    """Return how far the fp32 factors of decoding lie apart, relative to the definition's; 0 where that is 0."""
    amax = x.float().abs().amax()
    if amax == 0:
        return 0.0
    ours, theirs = global_scale(amax, NVFP4()).double(), STORED[profile.stored](amax, x.dtype).decode.double()
    return float((theirs - ours).abs() / ours)


def differing_rules(profile: Profile) -> list[tuple[str, str]]:
    """Return (rule, what it says) of the rules in which a profile is not the definition."""
    return [(rule, _text(rule, getattr(profile, rule))) for rule, _ in steps(profile)]


def _text(rule: str, value: Any) -> str:
    exponent = math.log2(value) if rule == "scale_floor" else 0
    return TEXTS[rule].format(value=value, definition=getattr(DEFINITION, rule), exponent=exponent)
