"""One training run, from a config to a folder with a log, checkpoints and a result.

Nothing in a step waits for the device: losses and gradient norms stay there and are read every `log_every` steps.
A run that was stopped, however hard, goes on from its newest checkpoint and gives the same numbers.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte import files
from halfbyte.functional import distillation_loss
from halfbyte.nn.linear import describe_recipe
from halfbyte.nn.streams import FollowsRecipe
from halfbyte.train import (
    auto,
    checkpoint,
    divergence,
    environment,
    folder,
    graphs,
    lock,
    measure,
    optim,
    parallel,
    progress,
    restore,
    sampled,
    switch,
    treatment,
    tune,
)
from halfbyte.train import model as models
from halfbyte.train.background import background_of
from halfbyte.train.config import TrainConfig, differences
from halfbyte.train.data import Batches, Data
from halfbyte.train.divergence import Divergence
from halfbyte.train.folder import CHECKPOINTS, CONFIG, LAYERS, RESULT, clear, finished, identity
from halfbyte.train.history import History
from halfbyte.train.log import Log, Silent
from halfbyte.train.ranks import World
from halfbyte.train.signals import Interrupts

__all__ = ["CHECKPOINTS", "Trainer", "clear", "finished", "identity", "train"]
EARLY = 8
"""A run of more steps reads the clock after so many or a third: a pace beside that of what happens once."""
HELD_OUT_SEED = 0
"""Validation takes the same held-out sequences in every run, whatever its seed."""


def resolve_device(config: TrainConfig) -> torch.device:
    """Return the device of a run.

    Raises:
        ValueError: device='cuda' without a GPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU; use device='auto' or 'cpu'")
    return auto.device_of(config)


def resolve_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the GEMMs; bfloat16 is several times slower than float32 on CPUs without AMX or AVX-512."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


class Trainer:
    """A run: model, optimizer, data position and random state, advanced step by step.

    Whoever builds one holds the lock of its folder, as `train` does. Several ranks build and train it together; the
    first writes and speaks.

    Args:
        config: what to train; `config.run.out` is the folder.
        recipe: name of the recipe.
        data: the tokenized corpus.
        show: makes the progress display of the run, called what its recipe is called.
        interrupts: who hears of signals; by default nobody, and ctrl-C is an exception wherever it meets the run.
        ranks: with whom this process trains; by default alone.

    Raises:
        ValueError: the folder holds another run, or a broken checkpoint.
        Elsewhere: another rank found something like that.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: str,
        data: Data,
        *,
        show: progress.Show = progress.start,
        interrupts: Interrupts | None = None,
        ranks: World | None = None,
    ) -> None:
        self.ranks = ranks or World()
        config, notes = self.ranks.first(lambda: folder.settled(over(config, self.ranks)))
        auto.say(notes)
        self.config, self.recipe, self.data = config, recipe, data
        self.show = show if self.ranks.is_first else progress.silent
        self.interrupts = interrupts or Interrupts()
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, self.device)
        self.folder = config.run.out
        self.identity = identity(config, recipe, data)
        self.ranks.compare(self.identity, differences)
        self.parallel = parallel.Parallel(config.mesh, self.device)
        shape = replace(models.model_preset(config.model), vocab_size=data.vocab_size)
        self.model = models.initialised(shape, config.seed)
        self.ranks.together(lambda: tune.begin_(self.model, config, data))
        self.teacher = self.ranks.together(lambda: tune.teacher_of(config, data, self.device))
        if not self.parallel.is_sharded:  # else blocks go there one by one, each with its part alone
            self.model.to(self.device)
        self.run_state = hb.RunState(config.quantization_seed, config.schedule()).to(self.device)
        chosen = treatment.treatment_of(recipe)
        self.report = hb.quantize_(self.model, chosen.recipe, keep=chosen.keep, state=self.run_state)
        if config.fuse == "on":
            hb.nn.fuse_(self.model)
        self.model.recompute = config.run.recompute
        self.parallel.place_(self.run_state)
        self.trained = self.parallel.wrap(self.model, self.model.layers, self.dtype, config.data.micro_batch_tokens)
        if config.compile == "on":
            self.parallel.compile_(self.model.layers, auto.MOST_GRAPHS)
        self.optimizer = optim.adamw(self.model, config.optim)
        self.compute = self._compute
        if config.run.graph != "off":
            self.compute = graphs.GraphedStep(self._compute, self.device, must_fit=config.run.graph == "auto")
        layout = {"sequence": config.data.sequence, "batch": config.data.batch, "device": self.device}
        self.batches = Batches(data.train, seed=config.seed, part=self.parallel.part, **layout)
        self.held_out = Batches(data.held_out, seed=HELD_OUT_SEED, part=self.parallel.part, **layout)
        self.step, self.position, self.seconds, self.pace = 0, 0, 0.0, measure.Pace()
        self.stats: hb.stats.StatsCollector | None = None
        background = background_of(config, self.ranks)
        self.checkpoints = checkpoint.Checkpoints(self.folder / CHECKPOINTS, config.run.keep, self.ranks, background)
        self.environments = [{"step": 0, **environment.own(self.device, self.dtype, config.mesh)}]
        self._resume()
        self.optimizer = self.parallel.stepping(self.model, self.optimizer, config.optim.clip, self.dtype)
        self.weight_cache = (
            hb.cache_weights(self.model, self.optimizer, dtype=self.dtype)
            if config.run.cache_weights and any(isinstance(m, FollowsRecipe) for m in self.model.modules())
            else None
        )

    def train(self) -> dict:
        """Run the remaining steps and return the result, which `result.json` holds too.

        Raises:
            Stopped: a signal came; the step that it met is finished and in a checkpoint.
        """
        with self.interrupts.deferred():
            result = self._train()
            self._is_to_stop()
            self.interrupts.check(f"after {self.recipe}, which is finished")
        return result

    def _train(self) -> dict:
        self.ranks.first(self._record_config)
        measure.reset_peak_memory(self.device)
        log = self.ranks.together(self._open_log)
        self.stats = self.ranks.together(lambda: self._watch(log))
        display = self.show(self.recipe, self.config.optim.steps, self.step)
        try:
            history = self._steps(log, display)
            self.checkpoints.wait()
        finally:
            self.checkpoints.give_up()
            display.close()
            log.close()
            if self.stats is not None:
                self.stats.remove()
        result = self._result(history)
        return self.ranks.first(lambda: self._keep_result(result))

    def _open_log(self) -> Log | Silent:
        return (
            Log(self.folder, after=self.step, tensorboard=self.config.run.tensorboard)
            if self.ranks.is_first
            else Silent()
        )

    def _watch(self, log: Log | Silent) -> hb.stats.StatsCollector | None:
        return sampled.collector(self.model, self.config.run.stats_every, log, self.folder, (self.step, self.ranks))

    def _keep_result(self, result: dict) -> dict:
        files.write_json(self.folder / RESULT, result)
        return result

    def evaluate(self, *, as_trained: bool = False) -> float:
        """Return the mean loss on the held-out sequences, in high precision; each rank takes its part of them.

        Args:
            as_trained: compute it in the recipes, as a model is served that was tuned for it.
        """
        count = max(1, min(self.config.eval_batches, self.held_out.windows // self.config.data.batch))
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        aside = contextlib.nullcontext() if as_trained else hb.high_precision(self.model)
        with torch.no_grad(), aside:
            for position in range(count):
                total += self._loss(*self.held_out[position])
        self.parallel.let_go(self.model)
        return self.ranks.mean(total / count).item()

    def _steps(self, log: Log | Silent, display: progress.Progress) -> History:
        run, history = self.config.run, History()
        start, left = time.perf_counter(), self.config.optim.steps - self.step
        early = self.step + min(EARLY, left // 3) if left > EARLY else None
        while self.step < self.config.optim.steps and not history.diverged:
            switch.look_at_noise(self, log)
            self._follow_schedule(log)
            history.pending.append((self.step + 1, *self._one_step()))
            last = self.step == self.config.optim.steps
            to_evaluate = self.step % self.config.eval_every == 0 or last
            to_save = self.step % run.checkpoint_every == 0 or last
            is_due = self.step % run.log_every == 0 or to_evaluate or to_save or self._is_to_stop()
            if not is_due and self.step != early:
                continue
            steps_read = len(history.pending)
            # Waits for the device, then the clock is right.
            history.flush(log, self.config.data.tokens_per_step, self.ranks)
            self.parallel.log_dropped(self.model, log, self.step, self.ranks)
            now = time.perf_counter()
            self.seconds += now - start
            self.pace.add(steps_read * self.config.data.tokens_per_step, now - start)
            speed = steps_read * self.config.data.tokens_per_step / (now - start)
            if is_due:
                display.update(self.step, f"loss {history.train_loss:.3f}  {speed:,.0f} tok/s")
            if to_evaluate and not history.diverged:
                history.held_out_loss = self.evaluate()
                log.write("eval", self.step, {"tokens": self._tokens(), "loss": history.held_out_loss})
            to_stop = self._is_to_stop() and not last
            if (to_evaluate or to_save or to_stop) and not history.diverged:
                self._check_what_a_step_left(history)
            if (to_save or to_stop) and not history.diverged:
                self._save()
            if to_stop and not history.diverged:
                self.checkpoints.wait()
                self.interrupts.check(f"with step {self.step + 1} of {self.config.optim.steps} in {self.folder}")
            start = time.perf_counter()
        if history.diverged:
            step, what = history.diverged
            log.write("diverged", step, {"loss": math.nan, "what": what})
        return history

    def _is_to_stop(self) -> bool:
        """Return whether a signal has come to any of the ranks, which stop after the same step."""
        number = self.ranks.largest(self.interrupts.number or 0)
        if number:
            self.interrupts.number = number
        return number > 0

    def _check_what_a_step_left(self, history: History) -> None:
        """Say that the run diverged if its last held-out loss or a parameter is not finite."""
        if history.held_out_loss is not None and not math.isfinite(history.held_out_loss):
            history.diverged = Divergence(self.step, divergence.HELD_OUT)
        elif self.ranks.largest(int(not divergence.finite_parameters(self.parallel.trained(self.model)))):
            history.diverged = Divergence(self.step, divergence.PARAMETERS)

    def _follow_schedule(self, log: Log | Silent) -> None:
        amaxes, schedule = self.run_state.amaxes, self.run_state.schedule
        before, recipe = amaxes.changes, self.run_state.begin_step(self.model)
        if amaxes.changes != before:
            self._forget_graph()
        if recipe is None or schedule is None:
            return
        if self.step in schedule.starts:  # else layers of a resumed run take up what changed before
            log.write("recipe", self.step + 1, {"recipe": describe_recipe(recipe)})
        self._forget_graph()

    def _forget_graph(self) -> None:
        if isinstance(self.compute, graphs.GraphedStep):
            self.compute.reset()

    def _one_step(self) -> tuple[float, Tensor, Tensor]:
        """Advance by one optimizer step; return learning rate, loss and gradient norm, the last two unread."""
        count = self.config.data.accumulate
        lr = optim.learning_rate(self.config.optim, self.step)
        optim.set_learning_rate_(self.optimizer, lr)
        batches = [self.batches[self.position + i] for i in range(count)]
        compute = self.compute
        does_more = self.run_state.amaxes.measures_now_and_then or (self.stats is not None and self.stats.is_sampling)
        if isinstance(compute, graphs.GraphedStep) and does_more:
            compute = compute.eagerly
        total, norm = compute(*(tokens for batch in batches for tokens in batch))
        if self.stats is not None:
            self.stats.advance()
        self.position += count
        self.step += 1
        return lr, total, norm

    def _compute(self, *tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Train on inputs and targets of every micro-batch in turn; return loss and gradient norm."""
        count = self.config.data.accumulate
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        for i in range(count):
            with self.parallel.reducing(self.trained, i == count - 1):
                loss, balance = self._losses(tokens[2 * i], tokens[2 * i + 1], self.trained, self.teacher)
                ((loss + balance) / count).backward()
            total += loss.detach() / count
            self.run_state.advance()
        return total, self.parallel.step(self.model, self.optimizer, self.config.optim.clip)

    def _loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self._losses(inputs_BT, targets_BT, self.model)[0]

    def _losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, model: nn.Module, teacher: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the cross entropy, or the divergence from a teacher, and the weighted balancing loss of experts."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits_BTV, balance = model(inputs_BT, balance=True)
            if teacher is not None:
                with torch.no_grad():
                    wanted_BTV = teacher(inputs_BT)
                per_token = distillation_loss(logits_BTV, wanted_BTV, temperature=self.config.tune.temperature)
                return per_token.mean(), balance
        return parallel.cross_entropy(logits_BTV, targets_BT), balance

    def _tokens(self) -> int:
        return self.step * self.config.data.tokens_per_step

    def _save(self) -> None:
        self.checkpoints.save(
            {
                "identity": self.identity,
                "step": self.step,
                "position": self.position,
                "seconds": self.seconds,
                **self.parallel.state(self.model, self.optimizer),
                "run_state": self.run_state.state_dict(),
                "environments": self.environments,
            }
        )

    def _resume(self) -> None:
        path = self.ranks.first(self.checkpoints.latest)
        if path is None:
            return
        saved = self.ranks.together(lambda: checkpoint.load_checkpoint(path, self.identity))
        if checkpoint.is_of_ranks(path):
            from halfbyte.train import sharded  # DCP takes a second to import

            saved = sharded.load_tensors(path, saved, self.model, self.optimizer, self.ranks)
        self.ranks.together(lambda: self._take_up(path, saved))
        self.step, self.position, self.seconds = saved["step"], saved["position"], saved["seconds"]
        self.environments = self.ranks.first(lambda: self._environments(saved))

    def _environments(self, saved: dict) -> list[dict]:
        before = folder.environments(self.folder, saved.get("environments", []))
        return environment.resumed(self.folder, self.step, before, self.environments[0])

    def _take_up(self, path: Path, saved: dict) -> None:
        """Go on with what was saved, or raise and leave the run as it is."""
        try:
            restore.check(saved, self.config, self.model, self.optimizer, self.run_state)
            saved = restore.as_shards(saved, self.model, self.optimizer) if self.parallel.is_sharded else saved
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(restore.optimizer_state(saved["optimizer"], self.optimizer))
            optim.place_learning_rate_(self.optimizer)
            self.run_state.load_state_dict(saved["run_state"])
        except (RuntimeError, KeyError, AttributeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0][:400]
            raise ValueError(
                f"checkpoint {path}: does not fit this run ({reason}); delete it or use --overwrite"
            ) from error

    def _record_config(self) -> None:
        facts = {
            "identity": self.identity,
            "run": {name: str(value) for name, value in asdict(self.config.run).items()},
            "mesh": asdict(self.config.mesh),
            "data": self.data.summary,
            "environment": measure.environment(self.device),
            "environments": self.environments,
            "parameters": self.model.config.parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        files.write_json(self.folder / CONFIG, facts)
        (self.folder / RESULT).unlink(missing_ok=True)  # of a run that is now extended
        gathered = f"\n{self.parallel.travels}\n" if self.parallel.travels else ""
        files.write_text(self.folder / LAYERS, f"{self.report}\n{gathered}")

    def _result(self, history: History) -> dict:
        if history.held_out_loss is None and not history.diverged:
            history.held_out_loss = self.evaluate()  # resumed from the checkpoint of the last step
            self._check_what_a_step_left(history)
        diverged = history.diverged
        tuned = {} if self.config.tune.begin is None else {"held_out_loss_as_trained": self.evaluate(as_trained=True)}
        peak = self.ranks.largest(measure.peak_memory(self.device))  # before the measurement below adds to it
        self._forget_graph()  # which holds what a step takes
        saved = measure.saved_activation_bytes(self.model, lambda: self._loss(*self.batches[0]))
        return {
            "recipe": self.recipe,
            "identity": self.identity,
            "environments": self.environments,
            "processor": measure.processor(),
            "steps": self.step,
            "tokens": self._tokens(),
            "held_out_loss": None if diverged else history.held_out_loss,
            **(dict.fromkeys(tuned) if diverged else tuned),
            "is_diverged": diverged is not None,
            "diverged_at": diverged and diverged.step,
            "diverged_in": diverged and diverged.what,
            "seconds": self.seconds,
            "tokens_per_second": self._tokens() / self.seconds,
            "steady_tokens_per_second": self.pace.median(),
            "peak_memory_bytes": peak,
            "saved_activation_bytes": saved,
            **({"amaxes_exceeded": self.run_state.amaxes.exceeded} if self.run_state.amaxes.layers else {}),
        }


def train(
    config: TrainConfig,
    recipe: str,
    data: Data,
    *,
    interrupts: Interrupts | None = None,
    ranks: World | None = None,
) -> dict:
    """Train, or go on with a run that was stopped or is to be longer, or return the result of one that ended.

    Args:
        config, recipe, data, interrupts, ranks: see Trainer.

    Returns:
        The result: held-out loss, speed, memory, and the identity of the run.

    Raises:
        ValueError: unknown recipe, a folder with another run or that another process writes to, a broken checkpoint.
        Stopped: a signal came.
    """
    ranks = ranks or World()
    config, notes = ranks.first(lambda: folder.settled(over(config, ranks)))
    kept = None if config.run.overwrite else ranks.first(lambda: finished(config, recipe, data))
    if kept is not None:  # needs no right to write there
        return _keep(config, kept, ranks)
    with held_by_first(ranks, f"train {recipe}", config.run.out):
        auto.say(notes)
        return train_held(config, recipe, data, show=progress.start, interrupts=interrupts, ranks=ranks)


def over(config: TrainConfig, ranks: World) -> TrainConfig:
    """Return the config with the mesh of these ranks.

    Raises:
        ValueError: they do not fill it, or batches cannot be shared among them.
    """
    return replace(config, mesh=config.mesh.over(ranks.size))


@contextlib.contextmanager
def held_by_first(ranks: World, work: str, *folders: Path) -> Iterator[None]:
    """Let the first rank be the one process that writes to `folders` while the block runs; see lock.hold."""
    with contextlib.ExitStack() as held:
        ranks.first(lambda: held.enter_context(lock.hold(work, *folders)))
        yield


def train_held(
    config: TrainConfig,
    recipe: str,
    data: Data,
    *,
    show: progress.Show,
    interrupts: Interrupts | None,
    ranks: World,
) -> dict:
    """Do what `train` does for a caller whose first rank holds the lock of the folder."""
    treatment.check_experts(config, treatment.treatment_of(recipe).recipe)

    def prepare() -> dict | None:
        folder.clean_folder(config.run.out)
        if config.run.overwrite:
            clear(config.run.out)
        return finished(config, recipe, data)

    kept = ranks.first(prepare)
    if kept is not None:
        return _keep(config, kept, ranks)
    return Trainer(config, recipe, data, show=show, interrupts=interrupts, ranks=ranks).train()


def _keep(config: TrainConfig, result: dict, ranks: World) -> dict:
    device = auto.device_of(config)
    now = environment.own(device, resolve_dtype(config, device), config.mesh)
    history = folder.environments(config.run.out, result.get("environments", []))
    environment.say_kept(config.run.out, history, now)
    ranks.first(lambda: folder.say_what_no_step_writes(config))
    return result
