"""Lightning's own Trainer and Fabric with the plugins of halfbyte.integrations.lightning: bit for bit a plain loop."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import lightning_runs as runs
import plain_loop
import ranks
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy

import halfbyte as hb
from halfbyte.integrations.lightning import FabricNVFP4Precision, NVFP4Precision

PAGE = Path(__file__).parent.parent.parent / "docs" / "loops.md"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plugin(recipe="nvfp4", precision="32-true", **options) -> NVFP4Precision:
    return NVFP4Precision(recipe, precision, keep=plain_loop.ALL, **options)


def same(parameters, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def test_the_trainer_trains_as_a_plain_loop_does():
    module, precision = runs.Module(), plugin()
    runs.fit(module, precision)
    assert isinstance(module.model[0], hb.nn.Linear)
    assert precision.run_state.position == plain_loop.STEPS * plain_loop.ACCUMULATE
    assert same(module.model.parameters(), plain_loop.expected())
    assert not same(module.model.parameters(), plain_loop.expected("bf16"))


def test_a_checkpoint_goes_on_bit_for_bit():
    runs.fit(runs.Module(), plugin(), steps=2).save_checkpoint("two.ckpt")
    later, precision = runs.Module(), plugin()
    runs.fit(later, precision, ckpt_path="two.ckpt")
    assert precision.run_state.position == plain_loop.STEPS * plain_loop.ACCUMULATE
    assert same(later.model.parameters(), plain_loop.expected())
    with pytest.raises(ValueError, match=r"trained model\.0 in fprop=.*give the plugin the recipe"):
        runs.fit(runs.Module(), plugin("nvfp4_forward"), ckpt_path="two.ckpt")
    checkpoint = torch.load("two.ckpt", weights_only=False)
    del checkpoint["NVFP4Precision"]
    torch.save(checkpoint, "plain.ckpt")
    with pytest.raises(ValueError, match="ckpt_path: the checkpoint holds no NVFP4Precision"):
        runs.fit(runs.Module(), plugin(), ckpt_path="plain.ckpt")


def test_schedules_begin_at_steps_not_at_micro_batches():
    state = hb.RunState(0, hb.Schedule([(2, "bf16")], steps=plain_loop.STEPS))
    module = runs.Module()
    runs.fit(module, plugin(state=state))
    assert state.step == plain_loop.STEPS and not module.model[0].recipe.specs
    model = plain_loop.layers()
    hand = hb.RunState(0, hb.Schedule([(2, "bf16")], steps=plain_loop.STEPS))
    hb.quantize_(model, "nvfp4", keep=plain_loop.ALL, state=hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in plain_loop.batches().split(plain_loop.ACCUMULATE):
        hand.begin_step(model)
        for x in step:
            (plain_loop.loss_of(model, x) / plain_loop.ACCUMULATE).backward()
            hand.advance()
        optimizer.step()
        optimizer.zero_grad()
    assert same(module.model.parameters(), model.parameters())


@pytest.mark.parametrize("evaluation", ["high_precision", "as_trained"])
def test_evaluation_is_in_high_precision_unless_asked_for(evaluation):
    module = runs.Module()
    trainer = Trainer(
        accelerator="cpu", plugins=plugin(evaluation=evaluation), enable_checkpointing=False, **runs.QUIET
    )
    x = plain_loop.batches(1)
    trainer.validate(module, torch.utils.data.DataLoader(x, batch_size=None), verbose=False)
    plain = plain_loop.layers()(x[0])
    assert torch.equal(module.seen[0], plain) is (evaluation == "high_precision")
    assert module.model[0].recipe == hb.recipes.nvfp4()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_is_autocast_or_the_weights(precision):
    module = runs.Module()
    runs.fit(module, plugin(precision=precision), accumulate_grad_batches=1)
    model = plain_loop.layers().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    state = hb.quantize_(model, "nvfp4", keep=plain_loop.ALL).state
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in plain_loop.batches()[: plain_loop.STEPS]:
        x = x.to(next(model.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = plain_loop.loss_of(model, x)
        loss.backward()
        state.advance()
        optimizer.step()
        optimizer.zero_grad()
    assert same(module.model.parameters(), model.parameters())


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_ranks_are_one_process_that_takes_them_in_turn(sharded, tmp_path):
    results = ranks.run(2, runs.on_a_rank, str(tmp_path), sharded, seconds=200)
    assert [result[:2] for result in results] == [(0, plain_loop.STEPS), (1, plain_loop.STEPS)]
    assert results[0][2] == results[1][2]
    assert same([torch.tensor(p) for p in results[0][2]], plain_loop.expected(ranks=2, accumulate=1))


def test_fabric_trains_as_a_plain_loop_does():
    precision = FabricNVFP4Precision("nvfp4", "32-true", keep=plain_loop.ALL)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    model = plain_loop.layers()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in plain_loop.batches().split(plain_loop.ACCUMULATE):
        for x in step:
            fabric.backward(plain_loop.loss_of(model, x) / plain_loop.ACCUMULATE)
        optimizer.step()
        optimizer.zero_grad()
    assert same(model.parameters(), plain_loop.expected())
    fabric.save("fabric.ckpt", {"precision": precision})
    other = FabricNVFP4Precision("nvfp4", "32-true", keep=plain_loop.ALL)
    other.convert_module(plain_loop.layers())
    fabric.load("fabric.ckpt", {"precision": other})
    assert other.run_state.position == plain_loop.STEPS * plain_loop.ACCUMULATE


def test_the_block_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "NVFP4Precision" in block)
    exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})


def test_refusals():
    other = runs.Module()
    other._trainer = SimpleNamespace(strategy=type("DeepSpeedStrategy", (), {})())
    with pytest.raises(
        TypeError, match=r"FSDPPrecision.* found NVFP4Precision: to shard with it, take ModelParallelStr"
    ):
        FSDPStrategy(precision_plugin=plugin())
    with pytest.raises(
        ValueError, match="strategy=DeepSpeedStrategy: NVFP4Precision is for SingleDeviceStrategy, DDPS"
    ):
        plugin().convert_module(other)
    with pytest.raises(ValueError, match="precision='16-mixed': use one of '32-true'"):
        plugin(precision="16-mixed")
    with pytest.raises(ValueError, match="evaluation='bf16': use one of 'high_precision'"):
        plugin(evaluation="bf16")
    with pytest.raises(ValueError, match="NVFP4Precision has converted no model"):
        plugin().load_state_dict({"recipes": {}, "states": []})
