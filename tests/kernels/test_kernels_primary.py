"""The kernels that cast primary weights, in the interpreter."""

import primary_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte.distributed.partial_cast import cast_target_of
from halfbyte.kernels.master_cast import kernels as pk
from halfbyte.kernels.master_cast import launch
from halfbyte.reference import primary as reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("name", checks.SPECS)
def test_parts_with_broken_values(name):
    chosen = checks.SPECS[name].scaling != hb.BlockMax()
    # A tile that no stage has chosen a scale for has none: here nobody supplies the tile rows that are cut.
    checks.check_stages("cpu", checks.SHAPES, checks.SPECS[name], FP32, checks.PARTS, broken=not chosen)
    if chosen:
        checks.check_stages("cpu", checks.SHAPES, checks.SPECS[name], FP32, checks.WHOLE, broken=True)


@pytest.mark.parametrize("dtype, rounded", ((BF16, BF16), (FP32, FP32), (FP32, FP16), (FP16, BF16)))
def test_dtypes_of_masters_and_weights(dtype, rounded):
    shapes = [(16, 16), (17, 33), (7, 300)]
    checks.check_stages("cpu", shapes, checks.TILE, dtype, checks.PARTS[:3], rounded=rounded, at_once=True)


@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_whole_blocks_take_the_aligned_path(dtype):
    shapes = [(16, 16), (40, 1040), (33, 64)]
    cuts = [(0.0, 1.0), (0.1, 0.8), (0.3, 0.7)]
    checks.check_stages("cpu", shapes, checks.TILE, dtype, cuts, blocks=True, broken=True)
    checks.check_stages("cpu", shapes, checks.SPECS["four_over_six"], dtype, cuts, blocks=True)


def test_padded_rows_swizzled_scales_and_shards():
    def to_blocks(cols):
        return -(-cols // 16) * 16

    checks.check_stages("cpu", checks.SHAPES, checks.TILE, FP32, checks.PARTS, pitch=to_blocks, blocks=True)
    checks.check_stages("cpu", checks.SHAPES, checks.TILE, FP32, checks.WHOLE, scale_layout="swizzled_32_4_4")
    checks.check_stages("cpu", checks.SHAPES, checks.TILE, FP32, checks.PARTS, shards=True)


def test_one_launch_serves_every_shape():
    shapes = [(rows, cols) for rows in (1, 16, 17, 40) for cols in (2, 15, 16, 33)]
    cuts = [(0.1 * (i % 4), 1.0 - 0.07 * (i % 3)) for i in range(len(shapes))]
    checks.check_stages("cpu", shapes, checks.TILE, FP32, cuts, at_once=True)


def test_weights_of_both_scale_layouts_are_turned_in_one_list():
    layouts = {"linear": (33, 40), "swizzled_32_4_4": (20, 50)}
    wholes = [
        hb.quantize(torch.randn(shape).bfloat16(), checks.TILE, scale_layout=layout)
        for layout, shape in layouts.items()
    ]
    weights, targets = [], []
    for whole in (*wholes, wholes[0]):
        weight = hb.tensor.PrimaryWeight.empty(tuple(whole.shape), scale_layout=whole.scale_layout)
        for to, from_ in zip(weight.blocks, whole.blocks, strict=True):
            to.copy_(from_)
        first_tile = sum(target.tile_count for target in targets)
        weights.append(weight)
        targets.append(cast_target_of(weight, first_tile, 0, turned=weight.allocate_turned()))
    launch.Finisher(targets, sum(target.tile_count for target in targets)).transpose()
    for weight in weights:
        expected = weight.transpose()
        assert torch.equal(weight.turned.qdata, expected.qdata)
        assert torch.equal(weight.turned.block_scale, expected.linear_scale().view(torch.uint8))


@pytest.mark.parametrize("kernels", (launch, reference), ids=("kernels", "reference"))
def test_weights_whose_memory_moves_are_turned_by_one_launch_each_time(kernels, monkeypatch):
    made = turner_of(kernels)
    wholes = [hb.quantize(torch.randn(shape).bfloat16(), checks.TILE) for shape in ((33, 40), (16, 16), (1, 70))]
    weights = [hb.tensor.PrimaryWeight.empty(tuple(whole.shape)) for whole in wholes]
    targets = [cast_target_of(weight, 0, 0, turned=weight.allocate_turned()) for weight in weights]
    memory = [t for weight in weights for t in (*weight.blocks[:2], *weight.turned[:2])]
    stages = made(targets)
    held = []
    for _ in range(3):
        for tensor in memory:
            storage = tensor.untyped_storage()
            size = storage.size()
            storage.resize_(0)
            held.append(torch.empty(size, dtype=torch.uint8))  # what was freed is taken
            storage.resize_(size)
            tensor.fill_(255)
        for weight, whole in zip(weights, wholes, strict=True):
            weight.qdata.copy_(whole.qdata)
            weight.blocks.block_scale.copy_(whole.linear_scale().view(torch.uint8))
        stages.transpose()
        for weight, whole in zip(weights, wholes, strict=True):
            expected = whole.transpose()
            assert torch.equal(weight.turned.qdata, expected.qdata)
            assert torch.equal(weight.turned.block_scale, expected.linear_scale().view(torch.uint8))
    if kernels is launch:
        launched = []
        monkeypatch.setattr(pk, "transpose_weights_kernel", Counting("turned", launched))
        stages.transpose()
        assert launched == ["turned"]


def test_memory_that_comes_back_to_places_of_before_is_not_looked_up_again(monkeypatch):
    whole = hb.quantize(torch.randn(33, 40).bfloat16(), checks.TILE)
    weight = hb.tensor.PrimaryWeight.empty(tuple(whole.shape))
    turner = launch.Turner([cast_target_of(weight, 0, 0, turned=weight.allocate_turned())])
    memory = [*weight.blocks[:2], *weight.turned[:2]]
    places = [[tensor.untyped_storage() for tensor in memory]]
    places += [[torch.UntypedStorage(storage.nbytes()) for storage in places[0]] for _ in range(launch.TABLES)]
    looked_up = []
    own = launch.Finisher.look_up
    monkeypatch.setattr(launch.Finisher, "look_up", lambda finisher: looked_up.append(own(finisher)))

    def turn_at(place):
        for tensor, storage in zip(memory, places[place], strict=True):
            tensor.set_(storage, 0, tensor.shape, tensor.stride())
            tensor.fill_(255)
        weight.qdata.copy_(whole.qdata)
        weight.blocks.block_scale.copy_(whole.linear_scale().view(torch.uint8))
        turner.transpose()
        assert torch.equal(weight.turned.qdata, whole.transpose().qdata)

    for place in (0, 1, 2, 0, 1, 2):
        turn_at(place)
    assert len(looked_up) == 3
    for place in range(len(places)):  # more than are kept
        turn_at(place)
    turn_at(0)
    assert len(turner._tables) <= launch.TABLES and len(looked_up) > len(places)


def turner_of(kernels):
    """What fills the other orientation, of kernels and of the reference."""
    return kernels.Turner if kernels is launch else lambda targets: kernels.Finisher(targets, 0)


def test_the_number_of_launches_does_not_depend_on_the_list(monkeypatch):
    counts = {}
    for number in (1, 7):
        launched = []
        for kernel in ("amax_kernel", "cast_kernel", "scale_kernel", "transpose_weights_kernel"):
            monkeypatch.setattr(pk, kernel, Counting(kernel, launched))
        pieces, _, tiles = checks.make_pieces(
            [(32, 48)] * number, checks.TILE, FP32, checks.WHOLE[:1] * number, "cpu", blocks=True
        )
        amaxes, scales = torch.zeros(tiles + number), torch.zeros(tiles, dtype=torch.uint8)
        caster, finisher = launch.Caster(pieces, tiles), launch.Finisher([p.target for p in pieces], tiles)
        caster.amax(amaxes)
        finisher.scale(amaxes, scales, expand=True)
        caster.cast(amaxes, scales)
        finisher.transpose()
        counts[number] = launched
    assert counts[1] == counts[7] == ["amax_kernel", "scale_kernel", "cast_kernel", "transpose_weights_kernel"]


class Counting:
    """Stands for a kernel and records its launches."""

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append(self.name)
