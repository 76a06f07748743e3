"""Profiles of other packages' rules, worked out by hand and in numpy, and how differences get their causes."""

import argparse
import json
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte import cli, layout
from halfbyte.verify import against, agreement
from halfbyte.verify.against import agreement_text, reasons, shares_of
from halfbyte.verify.alone import load_alone
from halfbyte.verify.peers import PEERS, quantizer
from halfbyte.verify.profiles import DEFINITION, PeerBytes, Profile, bytes_by, rules, steps

F = np.float32


def four_blocks(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A row: a block up to 2688, so that A / 2688 is 1, one up to 3, one of 0.001, one of zeros; each with a -0."""
    x = torch.zeros(4, 16)
    x[:, 1] = -0.0
    x[0, 2], x[1, 2], x[2, 2] = 2688.0, -3.0, 1e-3
    return x.view(1, 64).to(dtype)


@pytest.mark.parametrize(
    "name, scales, codes",
    [
        ("torchao", [448, 0.5, 2**-6, 2**-6], [7, 15, 0, 0]),
        ("modelopt", [448, 0.5, 2**-9, 1], [7, 15, 1, 0]),
        ("compressed-tensors", [448, 0.5, 0.125, 0.125], [7, 15, 0, 0]),
        ("fouroversix", [448, 0.5, 0, 0], [7, 15, 0, 0]),
        ("te", [448, 0.5, 0, 0], [7, 15, 7, 0]),
        ("vllm", [448, 0.5, 0, 0], [7, 15, 0, 0]),
    ],
)
def test_four_blocks_by_hand(name, scales, codes):
    """Scales of 0.001 / 6 and of nothing, and the code of -0 in every block: torchao alone keeps its sign."""
    q = bytes_by(PEERS[name].profile, four_blocks())
    assert q.block_scale.view(torch.float8_e4m3fn).float().tolist() == [scales]
    found = layout.unpack(q.qdata).view(4, 16)
    assert found[:, 2].tolist() == codes
    assert found[:, 1].tolist() == [8 if name == "torchao" else 0] * 4
    assert not found[:, 3:].any()


def test_a_magnitude_of_eight_becomes_minus_zero_where_nothing_saturates():
    """A scale of 1.45 * 2^-9 is rounded down to 2^-9: the block's maximum is 8.7 then."""
    x = four_blocks()
    x[0, 16 + 2] = -1.45 * 6 * 2**-9
    codes = {
        name: int(layout.unpack(bytes_by(PEERS[name].profile, x).qdata)[0, 18]) for name in ("fouroversix", "vllm")
    }
    assert codes == {"fouroversix": 8, "vllm": 15}


def e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(F)


NUMPY = {  # what the packages' sources say: block maxima, the tensor's, and x -> scales and what is rounded
    "torchao": lambda m, a, x: (
        s := e4m3(np.maximum(m / F(6) / (a / F(2688)), F(2**-6))),
        x * (F(1) / (a / F(2688)) / s),
    ),
    "modelopt": lambda m, a, x: (s := e4m3(np.maximum(m / (F(6) * (a / F(2688))), F(2**-9))), x / (s * (a / F(2688)))),
    "vllm": lambda m, a, x: (s := e4m3(F(2688) / a * (m * F(1 / 6))), x * (F(1) / (s * (F(1) / (F(2688) / a))))),
    "fouroversix": lambda m, a, x: (s := e4m3(m / F(6) * (F(2688) / a)), x * (F(1) / (F(1) / (F(2688) / a) * s))),
}


@pytest.mark.parametrize("name", NUMPY)
def test_formulas_are_those_of_numpy(name):
    """bf16 data, whose quotients often lie on the border between two scales; amaxes in every binade fraction."""
    for seed in range(8):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        blocks = x.float().numpy().reshape(16, 4, 16)
        maxima, amax = np.abs(blocks).max(-1, keepdims=True), np.abs(blocks).max()
        scale, rounded = NUMPY[name](maxima, amax, blocks)
        codes = np.clip(rounded, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(16, 64)
        q = bytes_by(PEERS[name].profile, x)
        np.testing.assert_array_equal(q.block_scale.view(torch.float8_e4m3fn).float().numpy(), scale[..., 0])
        np.testing.assert_array_equal(layout.unpack(q.qdata).numpy(), codes)


@pytest.mark.parametrize("name, average", [("torchao", 0.0023), ("modelopt", 0.0030)])
def test_most_bf16_tensors_have_the_scales_of_the_definition(name, average):
    """Which tie depends on the tensor's maximum: four tensors in five have none, few have many."""
    shares = []
    for seed in range(48):
        x = torch.randn(256, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()
        scales = (bytes_by(profile, x).block_scale for profile in (DEFINITION, PEERS[name].profile))
        shares.append(float(torch.ne(*scales).float().mean()))
    assert sum(share == 0 for share in shares) >= 36
    assert 0.02 < max(shares) < 0.035 and abs(sum(shares) / 48 - average) < 1e-3


def small_data() -> dict[str, torch.Tensor]:
    return {name: x[:32] for name, x in agreement.data()}


def test_the_definition_has_our_bytes_and_no_cause():
    for name, x in small_data().items():
        found = agreement.agree_on(name, x, DEFINITION, lambda x: bytes_by(DEFINITION, x))
        assert (found.scales, found.codes, found.decoded, found.causes, found.unexplained) == (0, 0, 0, (), "")


@pytest.mark.parametrize("name", PEERS)
def test_causes_add_up(name):
    profile = PEERS[name].profile
    for data, x in small_data().items():
        found = agreement.agree_on(data, x, profile, lambda x: bytes_by(profile, x))
        assert not found.unexplained
        assert sum(cause.scales for cause in found.causes) == found.scales
        assert sum(cause.codes for cause in found.causes) == found.codes
        assert {cause.rule for cause in found.causes} <= {rule for rule, _ in steps(profile)}


def test_each_rule_causes_what_it_changes():
    x = small_data()["blocks over 8 decades, float32"]
    lowest = x.float().abs().view(32, -1, 16).amax(-1) / 6 / (x.abs().amax() / 2688)
    found = agreement.agree_on("wide", x, Profile(scale_floor=2**-6), lambda x: bytes_by(Profile(scale_floor=2**-6), x))
    assert [cause.rule for cause in found.causes] == ["scale_floor"]
    assert found.causes[0].scales == found.scales == int((lowest < 2**-6 - 2**-10).sum())
    x = four_blocks()
    found = agreement.agree_on(
        "-0", x, Profile(has_minus_zero=False), lambda x: bytes_by(Profile(has_minus_zero=False), x)
    )
    assert [(cause.rule, cause.scales, cause.codes) for cause in found.causes] == [("has_minus_zero", 0, 4)]
    assert found.decoded == 0


def test_what_a_profile_does_not_say_is_reported():
    def flipped(x):
        q = bytes_by(DEFINITION, x)
        q.qdata[0, 3] ^= 0x10
        return q._replace(stored=q.stored * 2)

    found = agreement.agree_on("four", four_blocks(), DEFINITION, flipped)
    assert found.unexplained == (
        "bytes of the package that are not those of its profile: codes: 1 of 64, fp32 number: 1 of 1"
    )
    result = agreement.Comparison(peer=PEERS["torchao"], version="9", day="2026-11-22", agreements=(found,))
    assert not result.is_explained
    assert "NOT EXPLAINED: the rules were read in torchao 0.18.0" in agreement_text(result)
    assert json.loads(json.dumps(result.as_json()))["data"][0]["unexplained"] == found.unexplained
    short = agreement.agree_on(
        "four", four_blocks(), DEFINITION, lambda x: PeerBytes(*(t[:0] for t in bytes_by(DEFINITION, x)[:2]), x.amax())
    )
    assert "codes: torch.uint8 (0, 32), not torch.uint8 (1, 32)" in short.unexplained


def test_shares_and_reasons():
    found = agreement.agree_on(
        "four", four_blocks(), PEERS["modelopt"].profile, lambda x: bytes_by(PEERS["modelopt"].profile, x)
    )
    assert shares_of(found) == ("50.00%", "7.81%", "1.56%")
    assert reasons(found) == "scale_of_zeros (1 scale), scale_floor (1 scale, 1 code), has_minus_zero (4 codes)"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"stored": "max"}, "stored='max': use one of 'A', 'A / 2688'"),
        ({"scale": "m"}, "scale='m': use one of"),
        ({"encode": "x"}, "encode='x': use one of"),
        ({"scale_floor": -1.0}, "scale_floor=-1.0: a scale lies between 0 and 448"),
        ({"factor_of_zero": float("inf")}, "factor_of_zero=inf: use a number"),
        ({"code_of_nan": 8}, "code_of_nan=8: a magnitude's code"),
    ],
)
def test_profiles_refuse(fields, message):
    with pytest.raises(ValueError, match=message):
        Profile(**fields)


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.zeros(2, 17), r"x.shape=\(2, 17\)"),
        (torch.zeros(2, 16, dtype=torch.float16), "x.dtype=torch.float16"),
        (torch.full((1, 16), float("nan")), "x holds NaN or Inf"),
    ],
)
def test_profiles_quantize_finite_matrices(x, message):
    with pytest.raises(ValueError, match=message):
        bytes_by(DEFINITION, x)


def test_every_rule_has_a_text_and_a_package():
    used = {rule for peer in PEERS.values() for rule, _ in steps(peer.profile)}
    assert used == set(rules()) == set(agreement.TEXTS)


FILE = """import a_build_for_a_gpu
LIMIT = a_build_for_a_gpu.MAX
HALF = 1 / LIMIT

class Quantizer(a_build_for_a_gpu.Base):
    @classmethod
    def scale(cls, x: a_build_for_a_gpu.Tensor) -> Missing:
        return x * HALF
"""


def test_functions_of_a_file_alone(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(FILE)
    found = load_alone(path, ("scale", "HALF"), {"LIMIT": 4})
    assert found["scale"](None, 8) == 2
    with pytest.raises(ValueError, match=r"theirs\.py: defines no quantize; give the file"):
        load_alone(path, ("scale", "quantize"), {})


@pytest.mark.parametrize("content", [b"def f(:\n", b"\xff\xfe\x00", b"a\0b"])
def test_a_file_that_is_no_python_is_named(tmp_path, content):
    path = tmp_path / "theirs.py"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"theirs\.py: is no Python \(.*give the file"):
        load_alone(path, ("scale",), {})


@pytest.mark.parametrize(
    "options, message",
    [
        ("te", "--against te: needs --path, transformer_engine/pytorch/custom_recipes/reference_nvfp4.py"),
        ("te --path nowhere", "--path nowhere: no file transformer_engine/pytorch"),
        ("torchao --path x", "--path x: torchao is imported where it is installed"),
        ("modelopt --full", "--full: --against compares on the CPU"),
    ],
)
def test_the_command_refuses(options, message, capsys):
    assert cli.main(["verify", "--against", *options.split()]) == cli.USER_ERROR
    assert message in capsys.readouterr().err
    assert cli.main(["verify", "--path", "x"]) == cli.USER_ERROR
    assert "says where a package of --against lies" in capsys.readouterr().err


def test_a_package_that_is_missing_or_too_new_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ValueError, match=r"torchao is not installed: pip install torchao==0\.18\.0"):
        quantizer(PEERS["torchao"], None)
    monkeypatch.setattr(metadata, "version", lambda name: "99")
    moved = replace(PEERS["torchao"], load=lambda path: __import__("halfbyte.no_such_module"))
    with pytest.raises(ValueError, match=r"torchao 99 does not import: .*; install 0\.18\.0, whose rules were read"):
        quantizer(moved, None)


@pytest.mark.parametrize("is_explained", [True, False])
def test_bytes_that_no_rule_explains_are_the_exit_status(is_explained, monkeypatch, capsys):
    found = SimpleNamespace(is_explained=is_explained, as_json=lambda: {"explained": is_explained})
    monkeypatch.setattr(against, "quantizer", lambda *_: (None, "1.0"))
    monkeypatch.setattr(against, "compare_with", lambda *_: found)
    asked = dict.fromkeys(against.MACHINE_OPTIONS) | {"against": next(iter(PEERS)), "path": None, "json": True}
    assert against.against(argparse.Namespace(**asked)) == int(not is_explained)
    assert json.loads(capsys.readouterr().out) == {"explained": is_explained}


def test_shares_are_percents_down_to_one_in_ten_thousand():
    shares = [against._share(*counts) for counts in ((0, 7), (1, 3), (1, 10_000), (1, 100_000))]
    assert shares == ["0", "33.33%", "0.01%", "1.0e-05"]
