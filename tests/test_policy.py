"""What the default policy keeps: heads and stacks found by structure, adapters; each expected name is spelled out."""

from __future__ import annotations

import pytest
import torch
from small_models import NOTHING_KEPT, TOKENS, Block, Decoder, decoder
from torch import nn

import halfbyte as hb
from halfbyte.policy import HEADS


class Container(nn.Module):
    """A model whose blocks are held by any container."""

    def __init__(self, blocks: nn.Module, head: str = "output"):
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(11, 16), blocks
        self.add_module(head, nn.Linear(16, 11, bias=False))


def blocks(count: int = 7) -> list[nn.Module]:
    return [Block(16) for _ in range(count)]


def kept_blocks(report, prefix: str = "layers.") -> set[str]:
    names = {name.removeprefix(prefix).split(".")[0] for name in report.kept if name.startswith(prefix)}
    converted = {name.removeprefix(prefix).split(".")[0] for name in report.converted if name.startswith(prefix)}
    assert not names & converted
    return names


class TitanBlock(nn.Module):
    """Names and containers of torchtitan's Llama 3."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.attention, self.feed_forward = nn.Module(), nn.Module()
        for name in ("wq", "wk", "wv", "wo"):
            self.attention.add_module(name, nn.Linear(dim, dim, bias=False))
        for name in ("w1", "w2", "w3"):
            self.feed_forward.add_module(name, nn.Linear(dim, dim, bias=False))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)


@pytest.mark.parametrize(("count", "first"), [(32, 27), (6, 5), (16, 13)])
@pytest.mark.parametrize("head", ["output", "lm_head"])
def test_torchtitans_own_layers_are_kept_on_its_own_model(count, first, head):
    """Its NVFP4 recipe leaves ceil(0.15 * layers) layers at the end in bf16: 27 to 31 of 32; and the head."""
    layers = nn.ModuleDict({str(i): TitanBlock() for i in range(count)})
    report = hb.quantize_(Container(layers, head), "nvfp4")
    linears = [f"attention.{n}" for n in ("wq", "wk", "wv", "wo")] + [f"feed_forward.{n}" for n in ("w1", "w2", "w3")]
    assert set(report.kept) == {head} | {f"layers.{i}.{name}" for i in range(first, count) for name in linears}
    assert set(report.converted) == {f"layers.{i}.{name}" for i in range(first) for name in linears}
    assert report.kept[f"layers.{count - 1}.attention.wq"] == (
        f"kept: last {count - first} of {count} blocks of layers"
    )


@pytest.mark.parametrize(
    "make",
    [
        nn.ModuleList,
        lambda parts: nn.Sequential(*parts),
        lambda parts: nn.ModuleDict({str(i): part for i, part in enumerate(parts)}),
        lambda parts: nn.ModuleDict({f"block_{i + 1}": part for i, part in enumerate(parts)}),
        lambda parts: nn.ModuleDict({str(i + 16 + i // 3): part for i, part in enumerate(parts)}),  # of a pipeline
    ],
)
def test_every_container_is_a_stack(make):
    report = hb.quantize_(Container(make(blocks())), "nvfp4", keep=hb.Keep(first_blocks=1))
    names = list(make(blocks())._modules)
    assert kept_blocks(report) == {names[0], names[5], names[6]}
    assert "output" in report.kept


def test_the_report_says_of_parametrized_layers_what_to_do():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nn.utils.parametrizations.weight_norm(model[0])
    first, second = hb.quantize_(model, "nvfp4").rows
    assert first.recipe is None and second.recipe is not None
    assert first.reason == (
        "its parameters are computed by torch.nn.utils.parametrize; convert first, then register these"
    )
    nn.utils.parametrizations.weight_norm(model[1])
    x = torch.randn(4, 16)
    model(x).sum().backward()
    assert isinstance(model[1], hb.nn.Linear) and model[1].parametrizations.weight.original1.grad is not None
    expected = hb.linear(model[0](x), model[1].weight, model[1].bias, model[1].recipe, rng=hb.Philox(0))
    assert torch.equal(model(x), expected)


def test_complex_layers_stay_and_run():
    model = nn.Sequential(nn.Linear(16, 16, dtype=torch.complex64), nn.Linear(16, 16))
    first, second = hb.quantize_(model, "nvfp4").rows
    assert first.reason == "its weight is complex, which no format quantizes" and second.recipe is not None
    x = torch.randn(4, 16, dtype=torch.complex64)
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))


@pytest.mark.parametrize("fields", [{"last_fraction": "0.3"}, {"last_fraction": True}, {"first_blocks": True}])
def test_other_kinds_than_numbers_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=f"^{next(iter(fields))}={next(iter(fields.values()))!r}: give a "):
        hb.Keep(**fields)


@pytest.mark.parametrize("fields", [{"first_blocks": 1}, {"last_fraction": 0.3}, {"names": (), "last_fraction": 1}])
def test_blocks_of_a_model_that_has_none_are_refused(fields):
    (field, value) = list(fields.items())[-1]
    model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
    with pytest.raises(ValueError, match=rf"^keep.{field}={value}: the model has no stack of blocks.*name the layers"):
        hb.quantize_(model, "nvfp4", keep=hb.Keep(**fields))
    assert all(type(layer) is not hb.nn.Linear for layer in model), "nothing has changed"
    assert len(hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("2",))).rows) == 2, "the default share asks for nothing"


def test_in_a_whole_model_as_a_sequence_only_recurring_blocks_count():
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    model = nn.Sequential(nn.Embedding(11, 16), Stem(), *blocks(8), nn.LayerNorm(16), nn.Linear(16, 11))
    report = hb.quantize_(model, "nvfp4")
    assert kept_blocks(report, "") == {"8", "9"}
    hybrid = nn.Sequential(*(kind(16) for kind in (Block, TitanBlock) * 4))
    assert kept_blocks(hb.quantize_(hybrid, "nvfp4", keep=hb.Keep(names=())), "") == {"6", "7"}


def test_what_is_no_stack():
    """Small MLPs, containers by name, and containers inside of blocks."""

    def mlp():
        return nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    for model in (
        mlp(),
        nn.Sequential(mlp(), mlp()),
        nn.ModuleDict({"encoder": Block(16), "decoder": Block(16)}),
        nn.ModuleDict({"0": nn.Linear(16, 16), "1": nn.Linear(16, 16)}),
        nn.Sequential(Block(16), nn.ReLU()),
        nn.ModuleDict({"moe": nn.ModuleDict({"experts": nn.ModuleList(blocks(4))})}),
    ):
        assert hb.quantize_(model, "nvfp4").kept == {}
    nested = [nn.ModuleDict({"mlp": mlp(), "more": nn.ModuleList(blocks(3))}) for _ in range(4)]
    assert kept_blocks(hb.quantize_(Container(nn.ModuleList(nested)), "nvfp4")) == {"3"}


@pytest.mark.parametrize("name", ["output", "proj_out", "classifier", "score", "embed_out", "lm_head", "output_layer"])
def test_heads_by_name_are_outside_of_the_blocks(name):
    model = Container(nn.ModuleList(blocks(3)), name)
    model.layers[0].add_module("output", nn.Linear(16, 16))
    model.layers[0].add_module("proj_out", nn.Linear(16, 16))
    report = hb.quantize_(model, "nvfp4")
    assert name in report.kept and {"layers.0.output", "layers.0.proj_out"} <= set(report.converted)
    assert name in hb.quantize_(Container(nn.ModuleList(blocks(3)), name), "nvfp4", keep=NOTHING_KEPT).converted


def test_heads_by_structure():
    class Own(Decoder):
        def __init__(self):
            super().__init__(2)
            self.reader, self.tied = self.lm_head, nn.Linear(16, 11, bias=False)
            self.tied.weight = self.embed_tokens.weight
            del self.lm_head

        def get_output_embeddings(self):
            return self.reader

    class Undecided(Block):
        def get_output_embeddings(self):
            raise NotImplementedError

    model = nn.ModuleDict({"body": Own(), "more": Undecided(16)})
    kept = hb.quantize_(model, "nvfp4").kept
    assert kept["body.reader"] == "kept: head, the output embeddings of Own"
    assert kept["body.tied"] == "kept: head, tied to the embedding body.embed_tokens"
    assert all("blocks of" in why for name, why in kept.items() if name not in ("body.reader", "body.tied"))
    only = hb.quantize_(Own(), "nvfp4", keep=hb.Keep(names=(HEADS,), last_fraction=0))
    assert set(only.kept) == {"reader", "tied"}


def test_names_may_be_added_to_those_of_the_default():
    keep = hb.Keep(names=(*hb.Keep().names, "*down_proj"))
    report = hb.quantize_(decoder(4), "nvfp4", keep=keep)
    assert report.kept["layers.0.mlp.down_proj"] == "kept: name matches '*down_proj'" and "lm_head" in report.kept
    with pytest.raises(ValueError, match=r"keep\.names: '\*w9' matches no linear layer"):
        hb.quantize_(decoder(4), "nvfp4", keep=hb.Keep(names=(*hb.Keep().names, "*w9")))
    with pytest.raises(ValueError, match=r"keep\.names: '@heads' matches no linear layer"):
        hb.quantize_(nn.Sequential(nn.Linear(16, 16)), "nvfp4", keep=hb.Keep(names=("@heads",)))


class Adapted(nn.Module):
    """What PEFT puts in the place of a linear layer."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, layer.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Saved(nn.Module):
    """PEFT's wrapper of modules that are trained and saved whole."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.original_module, self.modules_to_save = layer, nn.ModuleDict({"default": decoder(1).lm_head})

    def forward(self, x):
        return self.modules_to_save["default"](x)


def adapted(names: tuple[str, ...]) -> nn.Module:
    model = decoder(2)
    for block in model.layers:
        for parent in (block.attn, block.mlp):
            for name in names:
                if hasattr(parent, name):
                    setattr(parent, name, Adapted(getattr(parent, name)))
    model.lm_head = Saved(model.lm_head)
    return model


@pytest.mark.parametrize("names", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj")])
def test_adapters_are_kept_and_their_layers_still_have_siblings(names):
    model = adapted(names)
    keys = list(model.state_dict())
    report = hb.quantize_(model, "nvfp4", rules={"*.down_proj": "mxfp8", "*.q_proj": "nvfp4_forward"})
    adapters = {name for name, module in model.named_modules() if "lora_" in name and isinstance(module, nn.Linear)}
    first = {name for name in adapters if name.startswith("layers.0.")}
    assert len(first) == 2 * len(names) and adapters <= set(report.kept)
    assert {"lm_head.original_module", "lm_head.modules_to_save.default"} <= set(report.kept)
    assert list(model.state_dict()) == keys
    attn, mlp = model.layers[0].attn, model.layers[0].mlp
    siblings = [getattr(layer, "base_layer", layer) for layer in (attn.q_proj, attn.k_proj, attn.v_proj)]
    assert all(type(layer) is hb.nn.Linear and list(layer.amax_group) == siblings for layer in siblings)
    assert getattr(mlp.gate_proj, "base_layer", mlp.gate_proj).amax_group[1] is mlp.up_proj
    assert siblings[0].recipe == hb.recipes.nvfp4_forward() and mlp.down_proj.recipe == hb.recipes.mxfp8()
    model(TOKENS).sum().backward()


def test_the_names_of_other_wrappers_do_not_count():
    model = decoder(2)
    model.layers[0].attn.q_proj = torch.compile(model.layers[0].attn.q_proj, backend="eager")
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    report = hb.quantize_(model, "nvfp4", rules={"layers.0.attn.k_proj": None, "layers.0.attn.q_proj": "mxfp8"})
    assert "lm_head._orig_mod" in report.kept
    rows = {row.name: row.recipe for row in report.rows}
    assert rows["layers.0.attn.q_proj._orig_mod"] == hb.recipes.mxfp8()


def test_arguments_have_the_order_of_torchaos_quantize():
    def filter_fn(module, name):
        return name.endswith("q_proj")

    report = hb.quantize_(decoder(2), "nvfp4", filter_fn)
    assert report.converted and all(name.endswith("q_proj") for name in report.converted)
    with pytest.raises(TypeError, match=r"filter_fn=\{'\*': None\}: give a function .* a dict of recipes is rules="):
        hb.quantize_(decoder(2), "nvfp4", {"*": None})


def test_keep_and_state_of_other_kinds_are_refused_before_anything_changes():
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(TypeError, match=r"keep=0.15: give a Keep"):
        hb.quantize_(model, "nvfp4", keep=0.15)
    schedule = hb.Schedule([(0, "bf16")])
    with pytest.raises(TypeError, match=r"state=Schedule.*: give a RunState"):
        hb.quantize_(model, "nvfp4", state=schedule)
    with pytest.raises(TypeError, match=r"state=Schedule.*: give a RunState"):
        hb.nn.Linear(16, 16, state=schedule)
    with pytest.raises(TypeError, match=r"names=\('\*', None\): give a tuple of globs"):
        hb.Keep(names=("*", None))
    assert type(model[0]) is nn.Linear


def test_a_share_that_is_whole_blocks_is_not_rounded_up_by_what_floats_add():
    """0.07 * 100 is 7.000000000000001."""
    assert [hb.Keep(last_fraction=share).last_blocks(100) for share in (0.07, 0.14, 0.28, 0.55, 0.56)] == [
        *(7, 14, 28, 55, 56)
    ]


def test_a_name_that_matches_is_the_reason_wherever_the_layer_lies():
    model = Container(nn.ModuleList(blocks(7)))
    kept = hb.quantize_(model, "nvfp4", keep=hb.Keep(names=("layers.6.*", "layers.0.*"), last_fraction=0.2)).kept
    found = {name.split(".")[1]: reason for name, reason in kept.items() if name.startswith("layers.")}
    assert found == {
        "0": "kept: name matches 'layers.0.*'",
        "5": "kept: last 2 of 7 blocks of layers",
        "6": "kept: name matches 'layers.6.*'",
    }
