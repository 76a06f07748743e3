"""ZeroOptimizer trains as if every rank held the whole model and quantized it in every forward."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import pytest
import ranks
import torch
import zero_checks as checks

import halfbyte as hb
from halfbyte.distributed import ZeroConfig
from halfbyte.distributed.weights import first_users


def test_two_ranks():
    ranks.run(2, checks.two_ranks)


def test_one_process_needs_no_group():
    assert checks.same_losses(0, 1, 4, "nvfp4", {})[0] > 0


@pytest.mark.parametrize(
    "field, value",
    (
        ("weights", "fp4"),
        ("grad_dtype", "fp16"),
        ("weight_dtype", "fp8"),
        ("bucket_numel", 0),
        ("bucket_numel", 1e6),
        ("max_norm", -1.0),
        ("max_norm", "1"),
        ("timeout", 60),
    ),
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        ZeroConfig(**{field: value})


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="expert_groups: 'experts"):
        hb.distributed.ZeroOptimizer(checks.small_models.Decoder(1), expert_groups={"experts*": None})


def test_an_fp32_model_under_autocast():
    losses = {}
    for weights in ("nvfp4", "plain"):
        torch.manual_seed(0)
        model = checks.Bigram(16)
        state = hb.quantize_(model, "nvfp4", keep=checks.small_models.NOTHING_KEPT).state
        zero = hb.distributed.ZeroOptimizer(model, config=ZeroConfig(weights=weights, weight_dtype=torch.bfloat16))
        losses[weights] = []
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = checks.loss_of(model, checks.tokens(0, step))
            loss.backward()
            state.advance()
            losses[weights].append((loss.item(), zero.step().item()))
    assert losses["nvfp4"] == losses["plain"]


def _freeze_a_sibling(model):
    model.mlp.gate_proj.weight.requires_grad_(False)


def _one_weight_for_two(model):
    model.mlp.up_proj.weight = model.mlp.gate_proj.weight


@pytest.mark.parametrize(
    "change, recipe, experts, primary",
    (
        (None, "nvfp4", (), {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"}),
        (_freeze_a_sibling, "nvfp4", (), {"mlp.down_proj", "lm_head"}),
        (_one_weight_for_two, "nvfp4", (), {"mlp.down_proj", "lm_head"}),
        (None, "nvfp4/bf16", (), set()),  # its backward reads weights that were never rounded
        (None, "nvfp4", ("mlp.gate_proj.*",), {"mlp.down_proj", "lm_head"}),
        (None, "nvfp4", ("mlp.*",), {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"}),
    ),
    ids=("all", "frozen sibling", "one weight for two layers", "high precision backward", "two groups", "one group"),
)
def test_weights_that_cannot_be_primary_without_changing_the_training_are_not(change, recipe, experts, primary):
    losses = []
    for weights in ("nvfp4", "plain"):
        torch.manual_seed(0)
        model = checks.Bigram(16)
        if change is not None:
            change(model)
        state = hb.quantize_(model, recipe, keep=checks.small_models.NOTHING_KEPT, state=hb.RunState(1)).state
        config = ZeroConfig(weights=weights, weight_dtype=torch.bfloat16)
        zero = hb.distributed.ZeroOptimizer(
            model, partial(torch.optim.AdamW, lr=0.01), config=config, expert_groups=dict.fromkeys(experts)
        )
        found = {name for name, p in model.named_parameters() if isinstance(p, hb.tensor.PrimaryWeight)}
        assert found == ({f"{name}.weight" for name in primary} if weights == "nvfp4" else set())
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(checks.train(0, model, state, zero, range(4)))
    assert losses[0] == losses[1]


def test_parameters_of_any_strides():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(36, 5))
    model.to(memory_format=torch.channels_last)
    model[2].weight = torch.nn.Parameter(torch.randn(36, 5).t())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    hb.distributed.ZeroOptimizer(model).synchronize()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])


@pytest.mark.parametrize(
    "change",
    (lambda m: m.float(), lambda m: m.half().bfloat16(), lambda m: setattr(m.lm_head, "weight", m.lm_head.bias)),
)
def test_a_model_that_steps_no_longer_reach_is_refused(change):
    model, _, zero = checks.build(0, "nvfp4", blocks=0)
    change(model)
    with pytest.raises(RuntimeError, match="^(embed_tokens|lm_head).weight was replaced or moved.*before building"):
        zero.step()


def test_moving_a_model_to_where_it_is_changes_nothing():
    runs = []
    for moves in (False, True):
        model, state, zero = checks.build(0, "nvfp4", blocks=0)
        if moves:
            model.to("cpu").bfloat16()
        runs.append(checks.train(0, model, state, zero, range(3)))
    assert runs[0] == runs[1]


def test_loading_a_model_that_masters_would_overwrite_is_refused():
    model, _, zero = checks.build(0, "nvfp4", blocks=0)
    whole = checks.Bigram(16).state_dict()
    for assign in (False, True):
        with pytest.raises(
            RuntimeError, match="embed_tokens.weight follows the masters.*before building ZeroOptimizer"
        ):
            model.load_state_dict(whole, assign=assign)
    copied, codes = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    del zero
    gc.collect()
    for free in (model, copied):
        down, values = free.mlp.down_proj.weight, whole["mlp.down_proj.weight"]
        free.load_state_dict({"mlp.down_proj.weight": values.float()}, strict=False)
        assert torch.equal(down.qdata, hb.quantize(values.bfloat16(), down.spec).qdata)
        # One after the other, each would bring its own amax, which scales the codes of the other.
        with pytest.raises(RuntimeError, match=r"gate_proj(.|\n)*shares its amax with others"):
            free.load_state_dict(whole)
        free.load_state_dict(codes)
        assert torch.equal(free.mlp.gate_proj.weight.qdata, codes["mlp.gate_proj.weight"].qdata)


def test_two_optimizers_of_one_model_are_refused():
    model, _, first = checks.build(0, "nvfp4", blocks=0)
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight exists in NVFP4 only.*build the model anew"):
        hb.distributed.ZeroOptimizer(model)
    model, _, first = checks.build(0, "plain", blocks=0)
    second = hb.distributed.ZeroOptimizer(model, config=first.config)
    with pytest.raises(RuntimeError, match="another ZeroOptimizer of the same model"):
        checks.loss_of(model, checks.tokens(0, 0)).backward()
    del second


def test_compiled_models_run_layers_with_primary_weights_eagerly():
    def compiled(model, **options):
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager", **options)

    class Block(torch.nn.Module):
        def __init__(self, state):
            super().__init__()
            self.qkv = hb.nn.LayerNormLinear(16, {"q_proj": 16, "k_proj": 8}, state=state)
            self.mlp = hb.nn.LayerNormMLP(16, 24, state=state)

        def forward(self, x):
            q, k = self.qkv(x)
            return self.mlp(x + q.tanh()) * k.sum(-1, keepdim=True)

    runs = []
    for wrap in (lambda model: model, compiled):
        torch.manual_seed(0)
        state = hb.RunState(0)
        model = Block(state).bfloat16()
        zero = hb.distributed.ZeroOptimizer(model)
        function = wrap(model)
        runs.append([])
        for _ in range(2):
            loss = function(torch.randn(6, 16, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            state.advance()
            runs[-1].append((loss.item(), zero.step().item()))
    assert runs[0] == runs[1]
    function = compiled(model, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="primary weights run eagerly"):
        function(torch.randn(6, 16, dtype=torch.bfloat16))
    torch._dynamo.reset()


def test_parameters_that_masters_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="weight is torch.float64"):
        hb.distributed.ZeroOptimizer(torch.nn.Linear(4, 4).double())


def test_what_fsdp1_sharded_is_refused_by_name():
    ranks.run(2, checks.under_fsdp1)


def test_what_is_dropped_is_freed():
    model, state, zero = checks.build(0, "nvfp4", blocks=0)
    checks.train(0, model, state, zero, range(1))
    alive = weakref.ref(zero.buckets[0].masters)
    del model, state, zero
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("weights", ("nvfp4", "plain"))
def test_a_model_outlives_its_optimizer_without_its_memory(weights):
    model, state, zero = checks.build(0, weights, blocks=0)
    checks.train(0, model, state, zero, range(1))
    twin = copy.deepcopy(model)
    alive = [weakref.ref(tensor) for bucket in zero.buckets for tensor in (bucket.masters, bucket.grads)]
    del zero, twin
    gc.collect()
    assert not any(tensor() is not None for tensor in alive)
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._load_state_dict_pre_hooks
        assert not module._state_dict_pre_hooks
    loss = checks.loss_of(model, checks.tokens(0, 1))
    model, state, zero = checks.build(0, weights, blocks=0)
    checks.train(0, model, state, zero, range(1))
    assert torch.equal(loss, checks.loss_of(model, checks.tokens(0, 1)))


def test_a_parameter_that_thaws_after_the_optimizer_was_built_is_named():
    model = checks.Bigram(16)
    model.embed_tokens.requires_grad_(False)
    zero = hb.distributed.ZeroOptimizer(model)
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match="^embed_tokens.weight required no gradient when ZeroOptimizer was built"):
        zero.step()


def test_gradients_of_masters_exist_within_a_step_only():
    """Outside they would be those of one rank, and the inner optimizer's zero_grad would take them for ever."""
    runs = []
    for forgets in (False, True):
        model, state, zero = checks.build(0, "nvfp4", blocks=0)
        runs.append([])
        for step in range(3):
            runs[-1] += checks.train(0, model, state, zero, range(step, step + 1))
            assert all(master.grad is None for _, master in zero.masters())
            if forgets:
                zero.inner.zero_grad()
    assert runs[0] == runs[1]


def test_a_trained_model_is_copied_but_not_pickled():
    model, _, zero = checks.build(0, "nvfp4", blocks=0)
    for action, thing in ((copy.deepcopy, zero), (pickle.dumps, zero), (pickle.dumps, model)):
        with pytest.raises(TypeError, match=r"^a ZeroOptimizer cannot be copied or pickled.*state_dict\(\)"):
            action(thing)
    del zero, thing
    gc.collect()
    file, x = io.BytesIO(), checks.tokens(0, 0)
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(checks.loss_of(torch.load(file, weights_only=False), x), checks.loss_of(model, x))


@pytest.mark.parametrize(
    "arguments, reason",
    (
        (([torch.nn.Linear(2, 2)],), "model is a list: give a Module"),
        ((torch.nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)])), r"optimizer=SGD\(…\) has parameters already"),
        ((torch.nn.Linear(2, 2), lambda groups: None), "optimizer returned None"),
    ),
)
def test_arguments_of_other_types_are_named(arguments, reason):
    with pytest.raises(TypeError, match=f"^{reason}"):
        hb.distributed.ZeroOptimizer(*arguments)
    with pytest.raises(TypeError, match="^config is a dict: give a ZeroConfig"):
        hb.distributed.ZeroOptimizer(torch.nn.Linear(2, 2), config={})
    with pytest.raises(ValueError, match=r"model: weight is on the meta device"):
        hb.distributed.ZeroOptimizer(torch.nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("later, primary", (("bf16", True), ("four_over_six", False), ("nvfp4_mxfp8_bwd", False)))
def test_weights_that_a_schedule_quantizes_in_another_way_later_are_not_primary(later, primary):
    model = checks.Bigram(16).bfloat16()
    state = hb.RunState(0, hb.Schedule([(1, later)]))
    hb.quantize_(model, "nvfp4", keep=checks.small_models.NOTHING_KEPT, state=state)
    zero = hb.distributed.ZeroOptimizer(model)
    assert isinstance(model.lm_head.weight, hb.tensor.PrimaryWeight) == primary
    for _ in range(2):
        state.begin_step(model)
        checks.train(0, model, state, zero, range(1))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_weight_without_rows():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), hb.nn.Linear(32, 0, bias=False)).bfloat16()
    zero = hb.distributed.ZeroOptimizer(model)
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    zero.step()
    zero.load_state_dict(zero.state_dict())


class Work:
    """A gather under way: writes ones when it is waited for."""

    def __init__(self, values):
        self.values = values

    def wait(self):
        self.values.fill_(1)


def test_layers_wait_whoever_calls_them():
    """The module above has no forward of its own or is not called: a method of it calls the layer, for instance."""
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(16, 32), "head": torch.nn.Linear(32, 16)}).bfloat16()
    hb.quantize_(model, "nvfp4", keep=checks.small_models.NOTHING_KEPT, state=hb.RunState(0))
    zero = hb.distributed.ZeroOptimizer(model, config=ZeroConfig(weights="plain", bucket_numel=1))
    for bucket in zero.buckets:
        bucket.values.zero_()
        bucket._gathering = [Work(bucket.values)]
    y = model["head"](torch.ones(1, 32, dtype=torch.bfloat16))
    assert torch.equal(y, torch.full_like(y, 33))
    assert not model["q"].weight.any()  # not needed yet
    del zero, bucket
    gc.collect()
    assert model["head"].before_use is None and model["q"].weight.all()


class Lost:
    """A gather from a rank that is gone."""

    def wait(self):
        raise RuntimeError("a rank is gone")


def test_scales_that_never_came_stop_every_forward_not_the_first_alone():
    model, _, zero = checks.build(0, "nvfp4", blocks=0)
    zero.scales[0]._gathering = [Lost()]
    for bucket in zero.buckets:
        bucket._gathering = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            checks.loss_of(model, checks.tokens(0, 0))
    zero.scales[0]._gathering = None  # the test ends well


def test_plain_values_are_rounded_as_masters_are():
    values = torch.randn(32, 32)
    weight = hb.tensor.PrimaryWeight.empty((32, 32))
    weight.copy_(values)
    assert torch.equal(weight.qdata, hb.quantize(values.bfloat16(), weight.spec).qdata)


@pytest.mark.parametrize("weights", ("nvfp4", "plain"))
def test_a_backward_through_weights_of_before_the_step_is_refused(weights):
    layers = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)
    model = torch.nn.Sequential(*layers).bfloat16()
    keep = checks.small_models.NOTHING_KEPT
    hb.quantize_(model, "nvfp4", rules={"2": None}, keep=keep, state=hb.RunState(0))
    zero = hb.distributed.ZeroOptimizer(model, config=ZeroConfig(weights=weights))
    for layer in model:
        x = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        zero.step()
        zero.synchronize()
        if weights == "plain" and layer is model[0]:  # its backward reads the codes that the forward made
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), x)


def test_a_default_dtype_changes_no_master():
    runs = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for weights in ("nvfp4", "plain"):
            torch.manual_seed(0)
            model = checks.Bigram(16).bfloat16()
            report = hb.quantize_(model, "nvfp4", keep=checks.small_models.NOTHING_KEPT, state=hb.RunState(0))
            torch.set_default_dtype(dtype)
            try:
                zero = hb.distributed.ZeroOptimizer(model, config=ZeroConfig(weights=weights))
            finally:
                torch.set_default_dtype(torch.float32)
            assert all(master.dtype == torch.float32 for _, master in zero.masters())
            runs.append(checks.train(0, model, report.state, zero, range(2)))
    assert all(run == runs[0] for run in runs)


def test_what_would_be_lost_in_a_new_parameter_is_kept_or_refused():
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)).bfloat16()
        hb.quantize_(model, "nvfp4", keep=checks.small_models.NOTHING_KEPT, state=hb.RunState(0))
        return model

    model = build()
    model[0].weight.tensor_model_parallel = True
    model[0].weight.grad = torch.ones_like(model[0].weight)  # of a trial
    zero = hb.distributed.ZeroOptimizer(model)
    assert model[0].weight.tensor_model_parallel and model[0].weight.grad is None
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="0.weight was frozen after ZeroOptimizer was built"):
        zero.step()
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        model = build()
        getattr(model[0].weight, hook)(lambda value: None)
        with pytest.raises(ValueError, match="0.weight has hooks.*after building ZeroOptimizer"):
            hb.distributed.ZeroOptimizer(model)
        hb.distributed.ZeroOptimizer(model, config=ZeroConfig(weights="plain"))


def test_gradients_of_before_are_forgotten_in_all_parameters_alike():
    norms = []
    for weights in ("nvfp4", "plain"):
        torch.manual_seed(0)
        model = checks.Bigram(16).bfloat16()
        report = hb.quantize_(model, "nvfp4", keep=checks.small_models.NOTHING_KEPT, state=hb.RunState(0))
        checks.loss_of(model, checks.tokens(0, 7)).backward()
        zero = hb.distributed.ZeroOptimizer(model, config=ZeroConfig(weights=weights))
        norms.append(checks.train(0, model, report.state, zero, range(1)))
    assert norms[0] == norms[1]


def test_sparse_gradients_and_options_that_are_none_are_named():
    layer = torch.nn.Embedding(10, 4, sparse=True)
    zero = hb.distributed.ZeroOptimizer(layer)
    with pytest.raises(ValueError, match="^weight has a gradient that is sparse.*sparse=False"):
        layer(torch.tensor([1, 2])).sum().backward()
    zero.zero_grad()
    for options in (None, {"params": []}):
        with pytest.raises(TypeError, match="^param_options returned .* for 'weight'"):
            hb.distributed.ZeroOptimizer(layer, param_options=lambda *_, given=options: given)


def test_attention_waits_for_the_projection_that_it_reads_without_a_call():
    """torch's MultiheadAttention hands out_proj's weight to a function: out_proj's own hook would never run."""
    model = torch.nn.TransformerEncoderLayer(16, 2)
    users = first_users(model, [name for name, _ in model.named_parameters()])
    assert {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "self_attn.out_proj.bias"} <= {
        *users[model.self_attn]
    }
    assert users[model.norm1] == ["norm1.weight", "norm1.bias"]


def test_a_gradient_scaler_is_refused():
    """It would unscale, on every rank, gradients that are not summed yet."""
    model, _, zero = checks.build(0, "nvfp4", blocks=0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(checks.loss_of(model, checks.tokens(0, 0))).backward()
    with pytest.raises(ValueError, match="^optimizer=ZeroOptimizer: .*GradScaler"):
        scaler.step(zero)
    torch.amp.GradScaler("cpu", enabled=False).step(zero)


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.Adagrad, partial(torch.optim.SGD, momentum=0.9)])
def test_a_parameter_without_dimensions_and_state_of_every_kind_are_saved(optimizer):
    def build(seed):
        torch.manual_seed(seed)
        model = checks.Bigram(16)
        model.mlp.scale = torch.nn.Parameter(torch.ones(()))
        model.mlp.register_forward_hook(lambda module, _, y: y * module.scale)
        state = hb.quantize_(model, "nvfp4", keep=checks.small_models.NOTHING_KEPT).state
        return model, state, hb.distributed.ZeroOptimizer(model, partial(optimizer, lr=0.01))

    run, other = build(0), build(1)
    checks.train(0, *run, range(2))
    other[1].load_state_dict(run[1].state_dict())
    other[2].load_state_dict(run[2].state_dict())
    assert checks.train(0, *other, range(2, 4)) == checks.train(0, *run, range(2, 4))


def test_gradients_that_come_too_late_are_refused_and_can_be_forgotten():
    runs = []
    for forgets in (False, True):
        model, state, zero = checks.build(0, "nvfp4", blocks=0)
        if forgets:
            checks.loss_of(model, checks.tokens(1, 0)).backward()
            with pytest.raises(RuntimeError, match=r"a second gradient.*accumulate"):
                checks.loss_of(model, checks.tokens(0, 0)).backward()
            zero.zero_grad()
        runs.append(checks.train(0, model, state, zero, range(2)))
    assert runs[0] == runs[1]
