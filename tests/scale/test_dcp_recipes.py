"""From bf16 training to nvfp4 and back through checkpoints, on other ranks each time: no bit of a master is lost."""

from dataclasses import replace

import dcp_checks
import pytest
import ranks
import torch
import train_checks as checks

from halfbyte.train import config as configs


@pytest.mark.parametrize(
    "worlds",
    [(2, 1, 2), pytest.param((1, 2, 1), marks=pytest.mark.full), pytest.param((2, 3, 4), marks=pytest.mark.full)],
)
def test_masters_and_moments_of_another_recipe_and_world_are_those_that_were_saved(tmp_path, worlds):
    """DCP's checkpoints of a user's own loop: plain modules on one process, FSDP2 with codes on several."""
    left, load = None, None
    for number, (recipe, world) in enumerate(zip(("bf16", "nvfp4", "bf16"), worlds, strict=True)):
        save = str(tmp_path / str(number))
        for begun, end in (found := ranks.run(world, dcp_checks.trained, recipe, load, save)):
            assert left is None or begun == left, (number, recipe)
            assert end == found[0][1] and end != begun, "it trains"
        left, load = found[0][1], save
        masters = [value for name, value in left.items() if name.endswith("weight")]
        assert len(masters) == 4 and all(dtype == torch.float32 for dtype, _ in masters)
        values = [torch.frombuffer(bytearray(content), dtype=torch.float32) for _, content in masters]
        assert not any(torch.equal(t, t.bfloat16().float()) for t in values), "they have bits that bf16 has not"


def test_a_run_of_another_recipe_and_mesh_begins_with_the_masters_of_the_last(tmp_path):
    """`--begin`: bf16 on two ranks, nvfp4 on one process, bf16 on two ranks."""
    checks.write_corpus(tmp_path)
    source, left = None, None
    for number, (recipe, mesh) in enumerate((("bf16", (1, 2)), ("nvfp4", (1, 1)), ("bf16", (1, 2)))):
        config = checks.tiny(str(tmp_path), "mixed", f"run{number}", mesh=mesh, steps=3)
        config = replace(config, tune=configs.TuneConfig(begin=source))
        checks.load(config)
        arguments = [(config, recipe)]
        ends = (
            ranks.run(2, checks.begun_and_trained, arguments)
            if mesh[1] > 1
            else [checks.begun_and_trained(0, 1, arguments)]
        )
        for begun, end in [one for (one,) in ends]:
            assert left is None or begun == left, (number, recipe)
            assert end != begun and end == ends[0][0][1]
        source, left = config.run.out, ends[0][0][1]
