"""The packages whose bytes are compared with ours, each with the profile of its rules and the way to call it.

A package is imported where it is installed; of TransformerEngine and vLLM, which need a GPU to import, the functions
that specify their bytes are taken from a file that the user names (halfbyte/verify/alone.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from halfbyte import layout
from halfbyte.formats import E2M1, E4M3, NVFP4_BLOCK
from halfbyte.verify.alone import file_digest, load_alone
from halfbyte.verify.profiles import STORED, PeerBytes, Profile

Quantizer = Callable[[Tensor], PeerBytes]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One package.

    Args:
        name: how it is called here.
        distribution: its name on PyPI.
        version: the newest whose rules were read.
        call: what is called.
        profile: its rules.
        load: the file, or None of an installed package -> its quantizer.
        file: where its wheel holds the file to load alone; "" for a package that is imported.
    """

    name: str
    distribution: str
    version: str
    call: str
    profile: Profile
    load: Callable[[Path | None], Quantizer]
    file: str = ""

    def __post_init__(self) -> None:
        if Path(self.file).is_absolute():
            raise ValueError(f"file={self.file!r}: give the place inside the wheel")


def quantizer(peer: Peer, path: Path | None) -> tuple[Quantizer, str]:
    """Return a peer's quantizer and the version that it is of.

    Args:
        peer: the package.
        path: its file, or the folder that its wheel was unpacked into; only for peers with a `file`.

    Raises:
        ValueError: the package is not installed, the path is missing or of no use, or an import fails.
    """
    if not peer.file:
        if path is not None:
            raise ValueError(f"--path {path}: {peer.name} is imported where it is installed; leave --path out")
        return _imported(peer)
    if path is None:
        remedy = f"pip download --no-deps {peer.distribution}=={peer.version}, unzip the wheel"
        raise ValueError(f"--against {peer.name}: needs --path, {peer.file} or the folder it lies in: {remedy}")
    file = path / peer.file if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"--path {path}: no file {peer.file}; give the folder that the wheel of {peer.name} was unpacked into"
        )
    return peer.load(file), f"{_unpacked_version(file, peer)} (SHA-256 of the file {file_digest(file)}…)"


def _imported(peer: Peer) -> tuple[Quantizer, str]:
    try:
        version = metadata.version(peer.distribution)
    except metadata.PackageNotFoundError:
        remedy = f"pip install {peer.distribution}=={peer.version}"
        raise ValueError(f"--against {peer.name}: {peer.distribution} is not installed: {remedy}") from None
    try:
        return peer.load(None), version
    except (ImportError, AttributeError) as error:
        remedy = f"install {peer.version}, whose rules were read"
        raise ValueError(
            f"--against {peer.name}: {peer.distribution} {version} does not import: {error}; {remedy}"
        ) from error


def _unpacked_version(file: Path, peer: Peer) -> str:
    """Return the version that the wheel's folder says, or that none does."""
    stem = peer.distribution.replace("-", "_")
    for folder in file.parents:
        for info in sorted(folder.glob(f"{stem}-*.dist-info")):
            return info.name.removeprefix(f"{stem}-").removesuffix(".dist-info")
    return "of unknown version"


def _torchao(path: Path | None) -> Quantizer:
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def quantize(x: Tensor) -> PeerBytes:
        per_tensor = module.per_tensor_amax_to_scale(x.abs().amax())
        q = module.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor)
        return PeerBytes(q.qdata, q.scale.view(torch.uint8), q.per_tensor_scale)

    return quantize


def _modelopt(path: Path | None) -> Quantizer:
    tensor = importlib.import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def quantize(x: Tensor) -> PeerBytes:
        q, scale, stored = tensor.quantize(x, NVFP4_BLOCK)
        return PeerBytes(q._quantized_data, scale.view(torch.uint8), stored.reshape(()))

    return quantize


def _compressed_tensors(path: Path | None) -> Quantizer:
    quantization = importlib.import_module("compressed_tensors.quantization")
    helpers = importlib.import_module("compressed_tensors.quantization.utils.helpers")
    compressor = importlib.import_module("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=NVFP4_BLOCK, scale_dtype=torch.float8_e4m3fn
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)

    def quantize(x: Tensor) -> PeerBytes:
        stored = helpers.generate_gparam(*torch.aminmax(x))
        scale, _ = helpers.compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=stored)
        given = {"weight": x, "weight_scale": scale, "weight_global_scale": stored}
        out = compressor.compress(given, scheme)
        return PeerBytes(out["weight_packed"], out["weight_scale"].view(torch.uint8), stored.reshape(()))

    return quantize


def _fouroversix(path: Path | None) -> Quantizer:
    module = importlib.import_module("fouroversix")
    config = module.QuantizationConfig(backend="pytorch", scale_rule="static_6")

    def quantize(x: Tensor) -> PeerBytes:
        rows, columns = x.shape
        q = module.quantize_to_fp4(x, config)
        padded = q.padded_shape[0], q.padded_shape[1] // NVFP4_BLOCK
        scale = layout.unswizzle(q.scale_factors.flatten().view(torch.uint8), *padded)
        return PeerBytes(
            q.values[:rows, : columns // 2].contiguous(), scale[:rows, : columns // NVFP4_BLOCK].contiguous(), q.amax
        )

    return quantize


def _transformer_engine(path: Path | None) -> Quantizer:
    assert path is not None
    names = ("cast_to_fp4x2", "_quantize_blockwise_reference")
    quantize_blocks = load_alone(path, names, {"torch": torch})[names[1]]

    def quantize(x: Tensor) -> PeerBytes:
        amax = x.abs().amax().float()
        codes, scale = quantize_blocks(None, x, amax, NVFP4_BLOCK, 1, pow_2_scales=False, eps=0.0)
        return PeerBytes(codes, scale.view(torch.uint8), amax)

    return quantize


def _vllm(path: Path | None) -> Quantizer:
    assert path is not None
    names = ("get_reciprocal", "cast_to_fp4", "ref_nvfp4_quant", "FLOAT4_E2M1_MAX_RECIPROCAL")
    given: dict[str, Any] = {"torch": torch, "FLOAT4_E2M1_MAX": E2M1.max}
    quantize_blocks = load_alone(path, names, given)["ref_nvfp4_quant"]

    def quantize(x: Tensor) -> PeerBytes:
        stored = STORED["2688 / A"](x.abs().amax().float(), x.dtype).stored  # its callers take it from a checkpoint
        values, scale = quantize_blocks(x, stored, NVFP4_BLOCK)
        bytes_ = scale.to(torch.float8_e4m3fn).view(torch.uint8)
        return PeerBytes(layout.pack(_codes_of(values)), bytes_, stored)

    return quantize


def _codes_of(values: Tensor) -> Tensor:
    """Return the codes of numbers that E2M1 has."""
    magnitudes = torch.tensor([E2M1.decode(code) for code in range(8)], dtype=torch.float32)
    return (torch.searchsorted(magnitudes, values.abs()) + 8 * values.signbit()).to(torch.uint8)


_PEERS = (
    Peer(
        name="torchao",
        distribution="torchao",
        version="0.18.0",
        call="NVFP4Tensor.to_nvfp4",
        profile=Profile(
            stored="A / 2688", scale="(m / 6) / P", scale_floor=E4M3.min_normal, encode="x * (S / s)", code_of_nan=4
        ),
        load=_torchao,
    ),
    Peer(
        name="modelopt",
        distribution="nvidia-modelopt",
        version="0.47.0",
        call="NVFP4QTensor.quantize",
        profile=Profile(
            stored="A / 2688",
            scale="m / (6 * P)",
            scale_of_zeros=1.0,
            scale_floor=E4M3.min_subnormal,
            encode="x / (s * P)",
            has_minus_zero=False,
            code_of_nan=7,
        ),
        load=_modelopt,
    ),
    Peer(
        name="compressed-tensors",
        distribution="compressed-tensors",
        version="0.20.0",
        call="generate_gparam, compute_dynamic_scales_and_zp, NVFP4PackedCompressor.compress",
        profile=Profile(
            stored="2688 * (1 / A) in the dtype of x",
            scale="(m / 6 in the dtype of x) * S",
            scale_after_zero=0.125,
            encode="x / (s / S)",
            has_minus_zero=False,
        ),
        load=_compressed_tensors,
    ),
    Peer(
        name="fouroversix",
        distribution="fouroversix",
        version="1.0.5",
        call='quantize_to_fp4(backend="pytorch", scale_rule="static_6")',
        profile=Profile(scale="(m / 6) * S", factor_of_zero=0.0, has_minus_zero=False, saturates=False),
        load=_fouroversix,
    ),
    Peer(
        name="te",
        distribution="transformer-engine",
        version="2.20.2",
        call="NVFP4QuantizerRef._quantize_blockwise_reference",
        profile=Profile(has_minus_zero=False),
        load=_transformer_engine,
        file="transformer_engine/pytorch/custom_recipes/reference_nvfp4.py",
    ),
    Peer(
        name="vllm",
        distribution="vllm",
        version="0.33.0",
        call="ref_nvfp4_quant",
        profile=Profile(stored="2688 / A", scale="(m * f(1/6)) * S", factor_of_zero=1e-8, has_minus_zero=False),
        load=_vllm,
        file="vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py",
    ),
)
PEERS: Mapping[str, Peer] = MappingProxyType({peer.name: peer for peer in _PEERS})
