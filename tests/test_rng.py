"""Random bits are Philox4x32-10 as published, keyed by logical position, and a shard draws the bits of the whole.

What stochastic rounding does with them: reference/test_stochastic.py.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.reference.hadamard import signs
from halfbyte.reference.philox import block_bytes, philox4x32, sign_bits
from halfbyte.rng import OFFSET_LIMIT, SEED_LIMIT, Draw, Philox, StreamPhilox, as_signed64, given_sign_bits

CPU = torch.device("cpu")
FIXED_SIGNS = "+++-+------+-+--"

# Known answers of the Random123 distribution (kat_vectors, philox4x32 10): counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox with Python integers, from numerics.md section 4."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def plain_bytes(block: int, seed: int, offset: int) -> list[int]:
    counter = (block & 0xFFFFFFFF, block >> 32, offset & 0xFFFFFFFF, offset >> 32)
    words = plain_philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return [byte for word in words for byte in word.to_bytes(4, "little")]


def word(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


seeds = st.integers(0, SEED_LIMIT - 1)
offsets = st.integers(0, OFFSET_LIMIT - 1)
words32 = st.integers(0, 0xFFFFFFFF)


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_known_answers(counter, key, expected):
    assert plain_philox(counter, key) == expected
    assert tuple(int(w) for w in philox4x32(tuple(map(word, counter)), tuple(map(word, key)))) == expected


@given(counter=st.tuples(*[words32] * 4), key=st.tuples(*[words32] * 2))
def test_philox_equals_python_integers(counter, key):
    ours = philox4x32(tuple(map(word, counter)), tuple(map(word, key)))
    assert tuple(int(w) for w in ours) == plain_philox(counter, key)


@given(seed=seeds, offset=offsets, block=st.integers(0, 2**63 - 1))
def test_bytes_of_a_block(seed, offset, block):
    ours = block_bytes(torch.tensor([block]), Philox(seed, offset).on(CPU))
    assert ours.flatten().tolist() == plain_bytes(block, seed, offset)


@given(seed=seeds, offset=offsets)
def test_fresh_signs(seed, offset):
    counter = (0, 0, offset & 0xFFFFFFFF, offset >> 32 ^ 0x80000000)
    words = plain_philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    expected = [words[i // 32] >> i % 32 & 1 for i in range(128)]
    for width in (16, 32, 64, 128):
        assert sign_bits(width, Philox(seed, offset).on(CPU)).tolist() == expected[:width]


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_fixed_signs_repeat_every_16(width):
    expected = [1.0 if sign == "+" else -1.0 for sign in FIXED_SIGNS] * (width // 16)
    assert signs(hb.Hadamard(size=width), None, CPU).tolist() == expected


@pytest.mark.parametrize("given", ["fixed", "none", "-", "-+++", "+" * 100 + "-" * 28])
def test_sign_bits_are_those_of_the_reference(given):
    rotation = hb.Hadamard(size=128, signs=given)
    bits = [given_sign_bits(rotation) >> i & 1 for i in range(128)]
    assert signs(rotation, None, CPU).tolist() == [1.0 - 2.0 * bit for bit in bits]
    assert given_sign_bits(None) == given_sign_bits(hb.Hadamard(signs="fresh")) == 0


SR = hb.NVFP4(rounding="stochastic")


@given(
    row0=st.integers(0, 30),
    rows=st.integers(1, 10),
    block0=st.integers(0, 3),
    blocks=st.integers(1, 3),
    seed=seeds,
    offset=offsets,
)
def test_a_shard_draws_the_bits_of_the_whole(row0, rows, block0, blocks, seed, offset):
    whole = torch.randn(40, 6 * 16, generator=torch.Generator().manual_seed(seed % 997))
    amax = whole.abs().amax()
    all_codes = hb.layout.unpack(hb.quantize(whole, SR, rng=Philox(seed, offset), amax=amax).qdata)
    part = whole[row0 : row0 + rows, block0 * 16 : (block0 + blocks) * 16]
    place = Philox(seed, offset, first_block=row0 * 6 + block0, blocks_per_row=6)
    codes = hb.layout.unpack(hb.quantize(part, SR, rng=place, amax=amax).qdata)
    assert torch.equal(codes, all_codes[row0 : row0 + rows, block0 * 16 : (block0 + blocks) * 16])


def test_bytes_are_uniform():
    draws = block_bytes(torch.arange(4096), Philox(11).on(CPU)).flatten().long()
    counts = torch.bincount(draws, minlength=256).double()
    expected = draws.numel() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 255 + 5 * (2 * 255) ** 0.5  # five standard deviations


@given(value=seeds)
def test_signed_view_keeps_the_64_bits(value):
    assert as_signed64(value) % SEED_LIMIT == value
    assert int(word(as_signed64(value))) == as_signed64(value)


def test_stream_adds_to_the_offset():
    base = torch.tensor([5, 6 << 32], dtype=torch.int64)
    blocks = torch.arange(3)
    ours = block_bytes(blocks, StreamPhilox(base, 9).on(CPU))
    assert torch.equal(ours, block_bytes(blocks, Philox(5, (6 << 32) + 9).on(CPU)))
    assert torch.equal(ours, block_bytes(blocks, Draw(base, 8).next()))


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"seed": -1}, ValueError, r"seed=-1: give 0 <= seed < 2\*\*64"),
        ({"seed": 2**64}, ValueError, "seed="),
        ({"seed": 1.5}, TypeError, "seed=1.5: give an int"),
        ({"seed": True}, TypeError, "seed=True: give an int"),
        ({"seed": 0, "offset": 2**63}, ValueError, r"offset=.*offset < 2\*\*63"),
        ({"seed": 0, "offset": "0"}, TypeError, "offset='0': give an int"),
        ({"seed": 0, "first_block": -1}, ValueError, "first_block=-1"),
        ({"seed": 0, "first_block": 1.5}, TypeError, "first_block=1.5"),
        ({"seed": 0, "first_block": 1 << 63}, ValueError, "first_block=9223372036854775808"),
        ({"seed": 0, "blocks_per_row": "6"}, TypeError, "blocks_per_row='6'"),
        ({"seed": 0, "blocks_per_row": -2}, ValueError, "blocks_per_row=-2"),
    ],
)
def test_refusals(fields, error, message):
    with pytest.raises(error, match=message):
        Philox(**fields)


def test_missing_bits_are_asked_for_by_name():
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="rng"):
        hb.quantize(x, SR)
    with pytest.raises(ValueError, match="sign_rng"):
        hb.quantize(x, hb.NVFP4(rotation=hb.Hadamard(signs="fresh")))
