"""Ranks against one process, bit for bit: what DDP, FSDP2 and HSDP train, and what a checkpoint of any mesh holds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
import train_checks as checks

MESHES = {2: {"ddp": (2, 1), "fsdp2": (1, 2)}, 4: {"ddp": (4, 1), "fsdp2": (1, 4), "hsdp": (2, 2)}}

UNCLIPPED = {"clip": float("inf"), "steps": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    checks.write_corpus(folder)
    for text in ("equal", "mixed"):
        checks.load(checks.tiny(str(folder), text, "none"))  # tokenized once for all
    return str(folder)


@pytest.mark.parametrize("world", [2, 4])
def test_equal_batches_train_as_one_process(folder, world):
    """Every rank has what one process has; nothing is drawn at random, and a mean of equal gradients is exact."""
    recipes = ["bf16", "nvfp4_forward"]
    names = [(recipe, name) for recipe in recipes for name in MESHES[world]]
    many = [
        checks.tiny(folder, "equal", f"{r}-{n}{world}", mesh=MESHES[world][n], batch=2 * world, **UNCLIPPED)
        for r, n in names
    ]
    ends = ranks.run(world, checks.train_all, list(zip(many, (r for r, _ in names), strict=True)))
    for recipe in recipes:
        one = checks.tiny(folder, "equal", f"{recipe}-one{world}", batch=2, **UNCLIPPED)
        (alone,) = checks.train_all(0, 1, [(one, recipe)])
        for index, (other, name) in enumerate(names):
            if other == recipe:
                assert checks.lines(many[index]) == checks.lines(one), name
                assert all(end[index] == alone for end in ends), name


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_equal_batches_with_the_bits_of_the_first_rank_train_as_one_process(folder, world):
    """Stochastic rounding is that of the place: nvfp4's gradients are equal too if all ranks stand in one."""
    equal = {**UNCLIPPED, "steps": 4}
    many = [
        checks.tiny(folder, "equal", f"place-{name}{world}", mesh=mesh, batch=2 * world, **equal)
        for name, mesh in MESHES[world].items()
    ]
    many.append(as_codes(many[1]))
    one = checks.tiny(folder, "equal", f"place-one{world}", batch=2, **equal)
    (alone,) = checks.train_all(0, 1, [(one, "nvfp4@all")])
    ends = ranks.run(world, checks.train_all_as_first, [(config, "nvfp4@all") for config in many])
    for index, config in enumerate(many):
        assert checks.lines(config) == checks.lines(one), config.run.out.name
        assert all(end[index] == alone for end in ends), config.run.out.name


def test_ranks_measure_the_noise_of_the_gradient_that_all_of_them_make(folder):
    """In bf16 it is that gradient's norm, and no noise: as of one process, whose batch the ranks share."""
    of_all = {"recipe_schedule": "auto:nvfp4", "eval_every": 1}
    runs = [
        replace(checks.tiny(folder, "mixed", f"noise{mesh[0]}", mesh=mesh, batch=4, steps=3), **of_all)
        for mesh in ((1, 1), (2, 1))
    ]
    checks.train_all(0, 1, [(runs[0], "bf16")])
    ranks.run(2, checks.train_all, [(runs[1], "bf16")])
    alone, shared = (
        [line for line in map(json.loads, (run.run.out / "log.jsonl").open()) if line["kind"] == "noise"]
        for run in runs
    )
    assert [line["step"] for line in shared] == [2, 3] and all(line["noise"] == 0 for line in shared)
    assert [line["norm"] for line in shared] == pytest.approx([line["norm"] for line in alone], rel=1e-3)


def test_options_of_a_run_change_nothing_of_that(folder):
    """Experts, accumulation, checkpointed activations, fused layers: one process, DDP and FSDP2 end alike."""
    options = {"mesh_of": [(1, 1), (2, 1), (1, 2)], "accumulate": 2, "recompute": "full", **UNCLIPPED}
    meshes = options.pop("mesh_of")
    runs = [
        replace(checks.tiny(folder, "equal", f"moe{m[0]}{m[1]}", mesh=m, batch=2 * m[0] * m[1], **options), fuse="on")
        for m in meshes
    ]
    runs = [(replace(run, model="moe-tiny"), "nvfp4_forward") for run in runs]
    (alone,) = checks.train_all(0, 1, runs[:1])
    assert ranks.run(2, checks.train_all, runs[1:]) == [[alone, alone], [alone, alone]]
    results = [json.loads((run.run.out / "result.json").read_text()) for run, _ in runs]
    assert len({result["saved_activation_bytes"] for result in results}) == 1, "gathered weights are parameters"
    assert [result["tokens"] for result in results] == [n * results[0]["tokens"] for n in (1, 2, 2)]


def test_clipping_is_exact_under_ddp(folder):
    """FSDP2 sums the norm of the gradient in another order; every step here is clipped."""
    one, two = (checks.tiny(folder, "equal", f"clip{n}", mesh=(n, 1), batch=2 * n, clip=0.1) for n in (1, 2))
    (alone,) = checks.train_all(0, 1, [(one, "bf16")])
    assert ranks.run(2, checks.train_all, [(two, "bf16")]) == [[alone], [alone]]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_gradient_is_the_mean_of_the_ranks(folder, world):
    """Each with the data and the random bits of its place."""
    runs = [
        (checks.tiny(folder, "mixed", f"mean-{n}{world}", mesh=m, batch=2 * world), "nvfp4@all")
        for n, m in MESHES[world].items()
    ]
    own = [checks.gradients_alone(*runs[0], rank, world) for rank in range(world)]
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0])
    mean = {name: torch.stack([gradient[name] for gradient in own]).double().mean(0) for name in own[0]}
    for found in ranks.run(world, checks.first_gradients, runs):
        for (config, _), bits in zip(runs, found, strict=True):
            for name, expected in mean.items():
                got = torch.frombuffer(bytearray(bits[name]), dtype=torch.float32).view_as(expected)
                if world == 2:
                    assert torch.equal(got, expected.float()), (config.run.out.name, name)
                else:  # the sum of four depends on its order
                    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-7)


def test_validation_is_that_of_one_process(folder):
    """The same held-out tokens; only the order of the sum differs."""
    many = [checks.tiny(folder, "mixed", f"eval-{n}", mesh=m) for n, m in MESHES[2].items()]
    (alone,) = checks.held_out(0, 1, [checks.tiny(folder, "mixed", "eval-one")])
    for losses in ranks.run(2, checks.held_out, many):
        assert losses == pytest.approx([alone, alone], rel=1e-6)


def as_codes(config):
    """The run with weights that travel as NVFP4, in another folder."""
    run = replace(config.run, out=config.run.out.with_name(f"{config.run.out.name}-codes"))
    return replace(config, run=run, mesh=replace(config.mesh, weights="nvfp4"))


@pytest.mark.parametrize("world, mesh", [(2, (1, 2)), pytest.param(4, (2, 2), marks=pytest.mark.full)])
def test_weights_that_travel_as_nvfp4_change_no_bit(folder, world, mesh):
    """Losses, held-out losses in high precision, weights and moments; layers in bf16 among them, autocast, experts."""
    wide = {"mesh": mesh, "batch": 2 * world, "steps": 4}
    runs = [
        (checks.tiny(folder, "mixed", f"default{world}", **wide), "nvfp4"),
        (checks.tiny(folder, "mixed", f"all{world}", accumulate=2, **wide), "nvfp4@all"),
        (replace(checks.tiny(folder, "mixed", f"autocast{world}", **wide), dtype="bfloat16"), "four_over_six@all"),
        (replace(checks.tiny(folder, "mixed", f"fused{world}", recompute="full", **wide), fuse="on"), "nvfp4@all"),
        (replace(checks.tiny(folder, "mixed", f"moe{world}", **wide), model="moe-tiny", dtype="bfloat16"), "nvfp4"),
    ]
    runs.append((checks.tiny(folder, "mixed", f"rows{world}", **wide), "rl"))
    runs = runs[: len(runs) if world == 2 else 2]
    codes = [(as_codes(config), recipe) for config, recipe in runs]
    plain, gathered = (ranks.run(world, checks.train_all, which, seconds=200) for which in (runs, codes))
    assert gathered == plain
    for (one, recipe), (other, _) in zip(runs, codes, strict=True):
        assert checks.lines(other) == checks.lines(one) and len(checks.lines(one, "eval")) == 1, one.run.out.name
        table = (other.run.out / "layers.txt").read_text().partition("gathered as")[2]
        kept = [json.loads((r.run.out / "result.json").read_text())["saved_activation_bytes"] for r in (other, one)]
        assert kept[0] < kept[1], "what is gathered for a layer is no activation"
        form, share = ("1x16", " 0.141\n") if recipe == "rl" else ("16x16", " 0.126\n")
        assert f"nvfp4/{form}" in table and share in table, "of fp32, that the others travel in"
        assert "embed_tokens.weight: rows exchanged" in table


def test_a_run_goes_on_with_weights_that_travel_otherwise(folder):
    """As NVFP4 after plain, plain after NVFP4: the identity of a run is not what travels."""
    whole = checks.tiny(folder, "mixed", "travel-whole", mesh=(1, 2))
    parts = checks.tiny(folder, "mixed", "travel-parts", mesh=(1, 2))
    undisturbed = ranks.run(2, checks.train_all, [(whole, "nvfp4@all")])
    parts.run.out.mkdir()
    codes = replace(parts, mesh=replace(parts.mesh, weights="nvfp4"))
    for config, steps in ((codes, 4), (parts, 6), (codes, 8)):
        ranks.run(2, checks.until, config, "nvfp4@all", steps)
    assert ranks.run(2, checks.train_all, [(parts, "nvfp4@all")]) == undisturbed
    assert checks.lines(parts) == [line for line in checks.lines(whole) if line[1] > 8]


CHAIN = [(1, 2), (2, 2), (1, 1), (2, 1), (1, 4), (1, 1)]
"""(dp_replicate, dp_shard), one after the other on one folder."""


def test_a_checkpoint_of_any_mesh_goes_on_with_any_other(folder):
    """To and from one process, to more ranks and to fewer: what is loaded is what was saved, bit for bit."""
    left = None
    for number, mesh in enumerate(CHAIN):
        world = mesh[0] * mesh[1]
        config = checks.tiny(folder, "mixed", "chain", mesh=mesh)
        config.run.out.mkdir(exist_ok=True)
        arguments = (config, "nvfp4", number + 1)
        ends = ranks.run(world, checks.until, *arguments) if world > 1 else [checks.until(0, 1, *arguments)]
        for begun, end in ends:
            assert begun == (left or (0, 0, {})), (number, mesh)
            assert end == ends[0][1] and end[:2] == (number + 1, number + 1)
        left = ends[0][1]
    kept = sorted(path.name for path in (config.run.out / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000005", "step-00000006.pt"]


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_resumed_is_undisturbed(folder, mesh):
    """On the same mesh, stochastic rounding and gradient accumulation included."""
    name = f"resumed{mesh[1]}"
    whole = checks.tiny(folder, "mixed", f"{name}-whole", mesh=mesh, accumulate=2)
    parts = replace(whole, run=replace(whole.run, out=Path(folder, f"{name}-parts")))
    undisturbed = ranks.run(2, checks.train_all, [(whole, "nvfp4")])
    parts.run.out.mkdir()
    ranks.run(2, checks.until, parts, "nvfp4", 5)
    assert ranks.run(2, checks.train_all, [(parts, "nvfp4")]) == undisturbed
    assert checks.lines(parts) == [line for line in checks.lines(whole) if line[1] > 5]
