"""torch.compile over a 4-bit gather of FSDP2: the bits of bf16's gather, one graph for equal blocks, and no break."""

from dataclasses import replace

import fsdp_compiled
import fsdp_wrapping
import pytest
import ranks
import train_checks as checks

GRAPHS = {
    "plain layers": 1,
    "fused layers, validated in high precision": 2,
    "evaluated, accumulated, not resharded": 2,
    "rows, recomputed": 1,
    "fused blocks under autocast": 2,  # of which the first needs no gradient of its input
}


def found(name: str) -> list[dict]:
    """What both ranks found of a case."""
    return ranks.run(2, fsdp_compiled.cases, [name], seconds=280)


@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_codes_have_the_bits_of_compiled_values_in_as_many_graphs(name):
    expected = {"counts": [(GRAPHS[name], 0)] * 2, "turned": False}
    assert [fsdp_compiled.described(rank[name]) for rank in found(name)] == [expected] * 2


@pytest.mark.full
@pytest.mark.parametrize("name", fsdp_compiled.WITH_BREAKS)
def test_what_no_graph_can_hold_leaves_it_and_has_the_same_bits(name):
    for rank in found(name):
        (_, before), (_, breaks) = rank[name]["counts"]
        assert before == 0 < breaks
        assert set(fsdp_compiled.described(rank[name])) == {"counts", "turned"}


@pytest.mark.full
def test_generated_code_has_them_too():
    for rank in ranks.run(2, fsdp_compiled.by_inductor, seconds=280):
        assert fsdp_compiled.described(rank) == {"counts": [(2, 0)] * 2, "turned": False}


@pytest.mark.full
@pytest.mark.parametrize("world, name", [(2, "four over six"), (2, "random bits"), (4, "HSDP")])
def test_other_recipes_and_hsdp(world, name):
    for rank in ranks.run(world, fsdp_compiled.cases, [name], seconds=280):
        assert fsdp_compiled.described(rank[name]) == {"counts": [(1, 0)] * 2, "turned": False}


@pytest.mark.full
def test_a_wrong_sign_in_what_dgrad_reads_is_seen():
    for rank in ranks.run(2, fsdp_compiled.faulty):
        assert rank["differs"] and 0 not in rank["differs"], "the loss is that of the forward, which is right"


def test_a_recipe_that_changes_is_refused_as_in_eager_code():
    for said in ranks.run(2, fsdp_compiled.recipe_changed):
        assert "its recipe now reads it in another form" in said


@pytest.mark.full
def test_halfbyte_train_compiles_blocks_over_codes(tmp_path, capfd):
    """Training and validation are a graph each; of a recipe whose backward reads columns, no block is compiled."""
    checks.write_corpus(tmp_path)
    plain = replace(checks.tiny(str(tmp_path), "mixed", "plain", mesh=(1, 2)), compile="on", fuse="on", eval_every=6)
    mesh = replace(plain.mesh, weights="nvfp4")
    codes = replace(plain, mesh=mesh, run=replace(plain.run, out=tmp_path / "codes"))
    apart = replace(codes, run=replace(codes.run, out=tmp_path / "apart"), optim=replace(codes.optim, steps=1))
    runs = [(plain, "nvfp4@all"), (codes, "nvfp4@all"), (apart, "nvfp4_mxfp8_bwd@all")]
    checks.load(plain)
    for (ours, first), (theirs, second), (_, third) in ranks.run(2, fsdp_compiled.trained, runs, seconds=280):
        assert ours == theirs and first == second and first[1] == 0 < first[0]
        assert third == (0, 0)
    assert checks.lines(plain) == checks.lines(codes)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("compile: off")]
    assert line.endswith("q_proj.weight: its backward reads it in another form than its forward")


def test_blocks_of_one_call_of_fully_shard_in_high_precision():
    assert ranks.run(2, fsdp_wrapping.blocks_of_one_call) == [[True]] * 2
