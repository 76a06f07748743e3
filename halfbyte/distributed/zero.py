"""ZeroOptimizer: ZeRO-1 (arXiv 1910.02054) around any torch optimizer, with weights that exist only in NVFP4.

Every rank keeps the fp32 masters and the optimizer's state of an equal share of all parameters. A step is: gradients
are summed and scattered bucket by bucket while the backward still runs; the optimizer steps the masters; NVFP4 weights
are cast from them; codes and scales (of other parameters the values) are gathered while the next forward already runs,
each bucket waited for by the first module that needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from typing import cast as cast_type

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfbyte.distributed import zero_state
from halfbyte.distributed.agree import WeakGroup, exchange_notes, rank_and_size, telling
from halfbyte.distributed.buckets import Bucket
from halfbyte.distributed.cast import Cast, CastLayout
from halfbyte.distributed.config import ZeroConfig
from halfbyte.distributed.holding import UNPICKLABLE, Holding, model_problem
from halfbyte.distributed.hooks import (
    LayerWaits,
    TakenGradients,
    after_gradient,
    before_forward,
    before_state_dict,
    release,
)
from halfbyte.distributed.inner import CALL, build_inner, warn_of_state
from halfbyte.distributed.placing import place_in_group
from halfbyte.distributed.plan import Item, storage_plan
from halfbyte.distributed.same import check_globs, check_same_experts, check_same_parameters, ranks_of
from halfbyte.distributed.scales import Ranks, ScaleGather
from halfbyte.distributed.weights import (
    described_layers,
    first_users,
    linear_users,
    make_primary,
    memory_of,
    tiled_parameters,
)
from halfbyte.distributed.zero_parts import StoredPart, stored_parts
from halfbyte.tensor import PrimaryWeight


class ZeroOptimizer:
    """Shards masters and optimizer state over the ranks of `group` and keeps the model's parameters up to date.

    The parameters of `model` are replaced in place: NVFP4 weights by PrimaryWeights, the others by views of buffers
    that are gathered. Gradients are taken from the parameters as backward makes them. Use it like an optimizer:

        optimizer = hb.distributed.ZeroOptimizer(model, partial(torch.optim.AdamW, lr=3e-4, fused=True))
        loss(model(x)).backward();  norm = optimizer.step()

    Learning rate schedules act on `optimizer.inner`. All ranks must call all methods in the same order.

    Args:
        model: with the same parameters on every rank; those of the group's first rank count. Gradients are forgotten.
        optimizer: parameter groups -> torch.optim.Optimizer; AdamW, fused, by default. It sees flat parts of
            parameters, so it must treat every element alike.
        group: the data-parallel ranks; None is the default group, or one process alone. RunStates that nobody gave a
            rank draw with that in this group.
        expert_groups: {glob of parameter names: ranks that hold the same experts}, each a part of `group`. Gradients
            are averaged over the size of `group` all the same: every expert sees the tokens of all its ranks. A rank
            may have no parameter that a glob matches, all of them may not.
        param_options: (name, parameter) -> options of its parameter group, such as {"weight_decay": 0.0}.
        config: see ZeroConfig.

    Raises:
        ValueError: on every rank: nothing to train, or the ranks differ in parameters, recipes, config or optimizer, or
            RunStates, or another rank could not go on; its own error says why.
        TypeError: an argument is of another type, or param_options returns no options.
        RuntimeError: some rank builds no ZeroOptimizer within config.timeout.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[dict]], torch.optim.Optimizer] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        expert_groups: Mapping[str, dist.ProcessGroup] | None = None,
        param_options: Callable[[str, nn.Parameter], dict] | None = None,
        config: ZeroConfig = ZeroConfig(),
    ) -> None:
        self.config, self._group = config, WeakGroup.of(group)
        _, self._size = rank_and_size(group)
        self.everyone = _ranks(group)
        with telling(group, CALL, getattr(config, "timeout", None), ("", [], [], {})):
            _check_types(model, config)
            self._params = {name: p for name, p in model.named_parameters() if p.requires_grad}
            chosen, groups, matched = self._divide(expert_groups or {})
            self._tiled = tiled_parameters(model, chosen.values())
            self._options = {name: _options_of(name, p, param_options) for name, p in self._params.items()}
            self._layers = described_layers(model)
        self._agree(model, chosen, groups, matched)
        place_in_group(model, group, config.timeout, call=CALL, same_layers=not expert_groups)
        self.buckets: list[Bucket] = []
        self._taken = TakenGradients()
        self._home: dict[str, tuple[Bucket, int]] = {}
        self.scales: list[ScaleGather] = []
        amaxes: dict[int, Tensor] = {}
        # Ranks meet in several groups: in an order that all share, or three pairs could wait for each other in a ring.
        for key in sorted(chosen, key=lambda key: (key != 0, ranks_of(groups[key].group))):
            self._store(model, groups[key], chosen[key], amaxes)
        for param in self._params.values():
            param.grad = None  # of before: primary weights are new parameters, without any
        build = optimizer or partial(torch.optim.AdamW, fused=True)
        self.inner = build_inner(build, self._param_groups(), group, config.timeout)
        self._has_stepped = False
        self._reduced = len(self.buckets)
        self._accumulating = False
        self._waiting = self._expected()
        self._memory = [tensor for param in self._params.values() for tensor in memory_of(param)]
        self._holding = Holding(self, model, self._params)
        handles = [*self._hook(model), *self._holding.handles]
        finalizer: Any = weakref.finalize(self, release, self.buckets, handles, list(self._params.values()))
        finalizer.atexit = False  # a process that ends waits for no other
        self._publish()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks, as given."""
        return self._group.group

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: a copy would step masters that no model has."""
        raise TypeError(UNPICKLABLE)

    # Construction

    def _divide(
        self, expert_groups: Mapping[str, dist.ProcessGroup]
    ) -> tuple[dict[int, list[str]], dict[int, Ranks], dict[str, bool]]:
        """Return names of parameters for each group of ranks, the main one first, and whether each glob matched any."""
        chosen: dict[int, list[str]] = {0: []}
        groups = {0: self.everyone}
        matched = dict.fromkeys(expert_groups, False)
        for name in self._params:
            key = 0
            match = next((glob for glob in expert_groups if fnmatchcase(name, glob)), None)
            if match is not None:
                matched[match] = True
                key = id(expert_groups[match])
                groups.setdefault(key, _ranks(expert_groups[match]))
            chosen.setdefault(key, []).append(name)
        return chosen, groups, matched

    def _item(self, name: str) -> Item:
        param = self._params[name]
        dtype = str(param.dtype).removeprefix("torch.")
        if name in self._tiled:  # experts as one matrix
            return Item(name, param.numel() // param.shape[-1], param.shape[-1], True, dtype)
        return Item(name, 1, param.numel(), False, dtype)

    def _agree(
        self, model: nn.Module, chosen: dict[int, list[str]], groups: dict[int, Ranks], matched: dict[str, bool]
    ) -> None:
        """Raise on every rank unless all have the same parameters in the same order, recipes, options and config."""
        config = str(replace(self.config, timeout=timedelta()))
        problem = model_problem(model, self._params, self._tiled if self.config.weights == "nvfp4" else None)
        experts: dict[tuple[int, ...], list] = {}
        for key, names in chosen.items():  # in the order of the parameters, which ranks share; keys are addresses
            if key:
                experts.setdefault(ranks_of(groups[key].group), []).extend(self._described(names))
        note = [problem, config, self._described(chosen[0]), sorted(experts.items()), matched]
        notes = exchange_notes(note, self.group, CALL, self.config.timeout)
        for rank, (problem, *_) in enumerate(notes):
            if problem is not None:
                raise ValueError(f"rank {rank}: {problem}")
        check_globs([note[4] for note in notes])
        for rank, (_, config, theirs, _, _) in enumerate(notes):
            if config != notes[0][1]:
                raise ValueError(f"config is ({notes[0][1]}) on rank 0 and ({config}) on rank {rank}: make it one")
            check_same_parameters(notes[0][2], theirs, "the parameters", (0, rank))
        check_same_experts([{tuple(members): items for members, items in note[3]} for note in notes], self.group)

    def _described(self, names: list[str]) -> list[list]:
        """Return what ranks compare of some parameters."""
        return [
            [
                *self._item(name),
                self._tiled[name].key if name in self._tiled else "",
                repr(sorted(self._options[name].items())),
                *self._layers.get(name, []),
            ]
            for name in names
        ]

    def _store(self, model: nn.Module, ranks: Ranks, names: list[str], amaxes: dict[int, Tensor]) -> None:
        """Make the buckets of some parameters, fill their masters and put the model's parameters into them."""
        plans = storage_plan([self._item(name) for name in names], ranks.size, self.config.bucket_numel)
        stored: list[StoredPart] = []
        shares, pieces, attached = [], [], []
        slots: dict[int, int] = {}
        first_tile = 0
        for plan in plans:
            quantized = plan.tiled and self.config.weights == "nvfp4"
            param = self._params[plan.places[0].item.name]
            bucket = Bucket(
                plan, ranks, param.device, torch.uint8 if quantized else param.dtype, self.config.grad_dtype
            )
            self.buckets.append(bucket)
            self._fill_masters(bucket)
            start = len(stored)
            of: dict[str, list[StoredPart]] = {}
            for index, place in enumerate(plan.places):
                name = place.item.name
                self._home[name] = bucket, index
                if not quantized:
                    self._params[name].data = bucket.matrix(bucket.values, place).view_as(self._params[name])
                    continue
                dtype = self.config.weight_dtype or self._params[name].dtype
                weight = make_primary(model, name, (self._tiled[name], dtype), bucket.codes(place), amaxes)
                weight.before_use, weight.on_no_grad = bucket.finish_gathering, self._taken.tell
                self._params[name] = cast_type(nn.Parameter, weight)
                of[name] = stored_parts(weight, place, first_tile, slots)
                stored += of[name]
                wholes = [plan.part(place, rank) for rank in range(ranks.size)]
                shares += [[part.share(whole) for whole in wholes] for part in of[name]]
            if quantized:
                for fragment in bucket.fragments:
                    own = [part.piece(fragment) for part in of[fragment.place.item.name]]
                    pieces += [piece for piece in own if piece is not None]
                attached.append((bucket, [part.target for part in stored[start:]]))
                first_tile += plan.tile_runs[-1]
        if stored:
            targets = [part.target for part in stored]
            layout = CastLayout(targets, [part.pitch for part in stored], shares, len(slots))
            cast = Cast(layout, pieces, ranks.group, local_scales=True, device=targets[0].blocks.qdata.device)
            self.scales.append(ScaleGather(cast, [bucket.plan for bucket, _ in attached], ranks))
            for bucket, own in attached:
                bucket.attach(self.scales[-1], own)

    def _fill_masters(self, bucket: Bucket) -> None:
        """Give masters the values of the parameters on the group's first rank."""
        for place in bucket.plan.places:
            held = self._params[place.item.name].detach()
            param = held.dequantize(torch.float32) if isinstance(held, PrimaryWeight) else held.contiguous()
            if bucket.ranks.group is not None:
                dist.broadcast(param, dist.get_global_rank(bucket.ranks.group, 0), group=bucket.ranks.group)
            flat = torch.zeros(place.numel, dtype=torch.float32, device=param.device)
            rows, cols = place.item.rows, place.item.cols
            flat.view(rows, place.pitch)[:, :cols] = param.view(rows, cols)
            for fragment in bucket.fragments:
                if fragment.place is place:
                    start = fragment.start
                    fragment.master.detach().copy_(flat[start : start + fragment.master.numel()])

    def _param_groups(self) -> list[dict]:
        """Return one parameter group for each set of options, the same on every rank even where it is empty."""
        groups: dict[str, dict] = {}
        fragments = {f.place.item.name: f.master for bucket in self.buckets for f in bucket.fragments}
        for name, options in self._options.items():
            group = groups.setdefault(repr(sorted(options.items())), {"params": [], "names": [], **options})
            group["names"].append(name)
            if name in fragments:
                group["params"].append(fragments[name])
        return list(groups.values())

    def _expected(self) -> list[int]:
        return [len(bucket.plan.places) for bucket in self.buckets]

    def _hook(self, model: nn.Module) -> list[RemovableHandle | LayerWaits]:
        handles: list[RemovableHandle | LayerWaits] = []
        numbers = {id(bucket): i for i, bucket in enumerate(self.buckets)}
        for name, param in self._params.items():
            bucket, index = self._home[name]
            hook = partial(after_gradient, weakref.ref(self), numbers[id(bucket)], index)
            handles.append(param.register_post_accumulate_grad_hook(hook))
        plain = [name for name in self._params if not self._home[name][0].quantized]  # the others have before_use
        for module, names in first_users(model, plain).items():
            needed = list(dict.fromkeys(self._home[name][0] for name in names))
            handles.append(module.register_forward_pre_hook(partial(before_forward, needed)))
        for layer, names in linear_users(model, plain).items():
            handles.append(LayerWaits(layer, list(dict.fromkeys(self._home[name][0] for name in names))))
        homes = {id(param): self._home[name][0] for name, param in self._params.items()}
        for module in model.modules():
            own = list(dict.fromkeys(homes[id(p)] for p in module._parameters.values() if id(p) in homes))
            if own:
                handles.append(module.register_state_dict_pre_hook(partial(before_state_dict, own)))
        return handles

    # Training

    def _on_gradient(self, number: int, index: int, param: Tensor) -> None:
        if param.grad is None:
            raise RuntimeError("another ZeroOptimizer of the same model took this gradient: build one for a model")
        name = self.buckets[number].plan.places[index].item.name
        if param.grad.layout != torch.strided:
            raise ValueError(f"{name} has a gradient that is sparse, which ranks cannot sum: use sparse=False")
        if number >= self._reduced:
            raise RuntimeError(
                f"{name}: a second gradient after the ranks began to sum the first; run every backward of a step but "
                "the last within `with optimizer.accumulate():`, or zero_grad() to forget the first; a layer "
                "that is used twice needs use_reentrant=False in its checkpoints"
            )
        self.buckets[number].add_gradient(index, param.grad)
        param.grad, self._taken.are_waiting = None, True
        if self._accumulating:
            return
        self._waiting[number] -= 1
        # Ranks must reduce in one order, whatever order gradients arrive in: the last bucket first.
        while self._reduced and self._waiting[self._reduced - 1] <= 0:
            self._reduced -= 1
            self.buckets[self._reduced].start_reducing()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within this context backward only adds gradients: for all micro-batches of a step but the last."""
        self._accumulating, before = True, self._accumulating
        try:
            yield
        finally:
            self._accumulating = before

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters with the gradients since the last step and start to gather the new weights.

        Args:
            closure: called once before, with gradients enabled, as torch's optimizers do: it runs the model forward and
                backward and returns the loss.

        Returns:
            The global norm of the mean gradient before clipping, fp32 []; with a closure, what that returned.

        Raises:
            RuntimeError: the model was moved, cast or given other parameters since the optimizer was built.
            TypeError: closure is no function.
        """
        loss: Any = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    f"closure={type(closure).__name__}: give a function that runs forward and backward and returns the "
                    "loss, or call step() after them"
                )
            with torch.enable_grad():
                loss = closure()
        self._holding.check()
        for bucket in reversed(self.buckets[: self._reduced]):
            bucket.start_reducing()
        for bucket in self.buckets:
            bucket.finish_reducing()
        norm = self._scale_gradients()
        self.inner.step()
        if not self._has_stepped:
            warn_of_state(self.inner.state, self.masters())
            self._has_stepped = True
        self.zero_grad()
        self._publish()
        return norm if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were accumulated and not yet used."""
        for bucket in self.buckets:
            bucket.drop_gradients()
        for param in self._params.values():
            param.grad = None  # of a backward that was stopped
        self._reduced, self._waiting = len(self.buckets), self._expected()
        self._taken.are_waiting = False

    def _scale_gradients(self) -> Tensor:
        """Divide by the ranks and clip, in one multiplication; return the norm."""
        grads = [bucket.master_grads for bucket in self.buckets]
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        if self.everyone.group is not None:
            dist.all_reduce(squares, group=self.everyone.group)
        norm = squares.sqrt() / self._size
        if self.config.max_norm is not None:
            factor = (self.config.max_norm / (norm + 1e-6)).clamp(max=1.0) / self._size
            torch._foreach_mul_(grads, factor)
        elif self._size > 1:
            torch._foreach_mul_(grads, 1 / self._size)
        return norm

    def _publish(self) -> None:
        with torch.no_grad():
            self.synchronize()
            # Gathers and kernels write what autograd does not see them write: a backward of before must not read it.
            torch.autograd.graph.increment_version(self._memory)
            for scales in self.scales:
                scales.cast.agree()
            # Messages follow each other, and one begins only where kernels leave room for it: an embedding's, needed
            # first of all, goes before the cast's kernels and travels beside them; before `agree` it would stop them.
            for bucket in self.buckets:
                if not bucket.quantized:
                    bucket.start_gathering()
            for scales in self.scales:
                scales.cast.scale()
                scales.start_gathering()
            for scales in self.scales:
                scales.cast.write()
            for bucket in self.buckets:
                if bucket.quantized:
                    bucket.start_gathering()

    def synchronize(self) -> None:
        """Let all parameters be complete, as the next forward would: before reading them without one."""
        for bucket in self.buckets:
            bucket.finish_gathering()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's: change "lr" here."""
        return self.inner.param_groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler asks for this before it steps.
        raise ValueError(
            "optimizer=ZeroOptimizer: a GradScaler unscales what a rank has before all have summed it; train in bf16, "
            "which needs none, or pass GradScaler(enabled=False)"
        )

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes of the buffers that this rank has gathered and reduced so far."""
        gathered = sum(sender.bytes_gathered for sender in (*self.buckets, *self.scales))
        return {"gathered": gathered, "reduced": sum(bucket.bytes_reduced for bucket in self.buckets)}

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return masters and optimizer state under the ordinary names of parameters, whole, on the CPU of every rank.

        Returns:
            {"version", "masters": {name: fp32}, "state": {name: {key: value}}, "groups", "scalars", "keys"}: `masters`
            is a state dict of the model's trained parameters in fp32, without any codes; `scalars` {key: dtype} of
            state whose numbers the optimizer keeps as tensors; `keys` {name: {key: dtype}} lists what `state` holds.

        Raises:
            ValueError: on every rank: the optimizer has state that is not a number for each element or parameter.
        """
        return zero_state.save_zero_state(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that wrote `state`, with any number of ranks, and cast the weights anew.

        Raises:
            ValueError: on every rank, nothing changed: on one of them `state` does not fit this model or optimizer, is
                damaged, or is another than on the others.
        """
        zero_state.load_zero_state(self, state)
        self._publish()

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Name the parts of parameters that this rank steps."""
        return ((f.place.item.name, f.master) for bucket in self.buckets for f in bucket.fragments)

    @property
    def names(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        return dict(self._params)


def _check_types(model: Any, config: Any) -> None:
    for name, value, wanted in (("model", model, nn.Module), ("config", config, ZeroConfig)):
        if not isinstance(value, wanted):
            raise TypeError(f"{name} is a {type(value).__name__}: give a {wanted.__name__}")
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:  # whose parameters may be empty here
        raise ValueError(
            "model: torch's FullyShardedDataParallel has sharded it already, and a ZeroOptimizer shards whole "
            "parameters itself: build it for the model without; or use fully_shard, "
            "hb.distributed.fsdp_gather_nvfp4_(model) and any torch optimizer"
        )


def _options_of(name: str, param: nn.Parameter, choose: Callable[[str, nn.Parameter], dict] | None) -> dict:
    options = choose(name, param) if choose is not None else {}
    if not isinstance(options, dict) or options.keys() & {"params", "names"}:
        raise TypeError(
            f"param_options returned {options!r} for {name!r}: return a dict of the optimizer's options, such as "
            "{'weight_decay': 0.0}, or {}"
        )
    return options


def _ranks(group: dist.ProcessGroup | None) -> Ranks:
    rank, size = rank_and_size(group)
    return Ranks(WeakGroup.of((group or dist.group.WORLD) if size > 1 else None), rank, size)
