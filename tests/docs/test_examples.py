"""The examples run, small, and do what they say; the linear layer by hand has every bit of the library's."""

import runpy
import subprocess
import sys

import pytest
import torch
from pages import ROOT

import halfbyte as hb

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def load(name: str) -> dict:
    """Return the namespace of an example, not run."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_is_short_and_has_a_main_and_a_test(path):
    source = path.read_text(encoding="utf-8")
    assert (
        source.count("\n") < 120
        and "def main(" in source
        and source.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    )
    assert f'load("{path.stem}")' in (ROOT / "tests" / "docs" / "test_examples.py").read_text()


class TestLinearByHand:
    example = load("linear_by_hand")

    @pytest.mark.parametrize("sizes", [(64, 96, 48), (16, 16, 16), (128, 32, 80)])
    def test_every_bit_of_the_layer(self, sizes):
        assert self.example["main"](*sizes, seed=7) == {"y": True, "dx": True, "dw": True}

    def test_it_notices_other_random_bits(self):
        assert self.example["main"](64, 96, 48, seed=7)["dx"]
        wrong = runpy.run_path(str(ROOT / "examples" / "linear_by_hand.py"))
        drawn = wrong["backward"].__globals__["random_bytes"]
        wrong["backward"].__globals__["random_bytes"] = lambda rows, blocks, seed, offset: drawn(
            rows, blocks, seed, offset + 1
        )
        assert wrong["main"](64, 96, 48, seed=7) == {"y": True, "dx": False, "dw": False}

    @pytest.mark.parametrize("tile", [1, 16])
    @pytest.mark.parametrize("draw", [None, (7, 5), ((1 << 40) + 3, (1 << 35) + 9)])
    def test_every_value_of_an_operand(self, tile, draw):
        x = torch.randn(32, 48, generator=torch.Generator().manual_seed(tile))
        spec = hb.NVFP4(block=(tile, 16), rounding="nearest" if draw is None else "stochastic")
        values, factor = self.example["quantize"](x, tile, draw)
        q = hb.quantize(x, spec, rng=draw and hb.Philox(*draw))
        scale = q.block_scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=1)
        halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12]) / 2
        code = hb.layout.unpack(q.qdata).long()
        signed = halves[code & 7] * torch.where(code > 7, -1.0, 1.0)
        assert torch.equal(values, signed * scale) and factor == q.amax * torch.tensor(1 / 2688)

    def test_the_layer_takes_60_lines(self):
        source = (ROOT / "examples" / "linear_by_hand.py").read_text()
        layer = source[source.index("\n# LAYER\n") : source.index("\n# END\n")]
        assert len([line for line in layer.splitlines() if line.strip()]) <= 60 and "hb." not in layer


def test_convert_and_train():
    losses = load("convert_and_train")["main"](steps=60)
    assert losses["nvfp4"] != losses["float32"] < 3.5  # 5.5 before training
    assert losses["nvfp4"] == pytest.approx(losses["float32"], rel=0.03)


def test_schedules(capsys):
    example = load("schedules")
    history = example["main"](steps=20)
    nvfp4, late, high = (hb.recipes.get(name) for name in ("nvfp4", "bf16/nvfp4", "bf16"))
    assert [recipe for recipe, _ in history] == [nvfp4] * 12 + [late] * 4 + [high] * 4
    run = example["build"](20)
    assert [loss for _, loss in history] == [example["step"](*run, index) for index in range(20)]  # not interrupted


def test_mixture_of_experts():
    example = load("mixture_of_experts")
    losses = example["main"](steps=40)
    assert losses[-1] < 0.8 * losses[0]
    assert losses[-1] == pytest.approx(example["main"](steps=40, recipe="bf16")[-1], rel=0.05)


def test_the_mixture_is_a_sum_over_experts():
    torch.manual_seed(0)
    mixture = load("mixture_of_experts")["Mixture"]().double()
    x = torch.randn(10, 64, dtype=torch.float64)
    weight, chosen = mixture.router(x).softmax(-1).topk(2)
    expected = torch.zeros_like(x)
    for token in range(10):
        for share, expert in zip(weight[token], chosen[token], strict=True):
            gate, up = (x[token] @ mixture.gate_up_proj.weight[expert].T).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected[token] += share * (hidden @ mixture.down_proj.weight[expert].T)
    assert torch.allclose(mixture(x), expected, rtol=1e-4, atol=1e-6)  # grouped_mm sums in fp32


def test_watch_training():
    found = load("watch_training")["main"](steps=10)
    assert found["step"] == 10 and found["finding"].layer == "1.down" and found["keep"] == ("1.down",)


def test_lora():
    beside, aware = load("lora")["main"](steps=24).values()
    assert beside["base"] == aware["base"]
    assert all(losses["trained"] < 0.97 * losses["base"] for losses in (beside, aware))
    assert aware["merged"] == aware["trained"] and beside["merged"] != beside["trained"]


def test_finetune_transformers(tmp_path):
    found = load("finetune_transformers")["main"](steps=10, out=str(tmp_path))
    assert found["after"] < found["before"] - 1 and found["loaded"] == found["after"] and found["changed"] == 0
    assert found["wrote"].startswith("def main(") and len(found["wrote"]) > len("def main(")
    assert {"config.json", "halfbyte.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "served").iterdir()
    }


def test_primary_weights():
    losses = load("primary_weights")["main"](steps=12)
    assert losses["nvfp4"] == losses["plain"] and losses["plain"][-1] < 0.7 * losses["plain"][0]


def test_fsdp2():
    losses = load("fsdp2")["main"](steps=8)
    assert losses["nvfp4"] == losses["bf16"] and losses["nvfp4"][-1] < 0.7 * losses["nvfp4"][0]


@pytest.mark.parametrize("example", ["primary_weights", "fsdp2"])
def test_two_ranks(example):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(ROOT / "examples" / f"{example}.py")
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal bit for bit") == 2 and "DIFFERENT" not in done.stdout
