"""What a training run is: frozen values, checked when built, and presets as functions that return them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from halfbyte.schedule import Schedule, parse_schedule
from halfbyte.spec import Recipe
from halfbyte.state import POSITION_LIMIT
from halfbyte.train import model as models
from halfbyte.train import options, treatment
from halfbyte.train.documents import TEXT_FIELD
from halfbyte.train.fields import Switch, check_finite, check_fraction, check_positive, check_switch
from halfbyte.train.mesh_config import MeshConfig

AUTO = "auto"
"""When a run changes its recipe that decides so itself."""
LONGEST = 120
"""Characters of a value in a message; a damaged file may hold any."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how it becomes batches."""

    corpus: str = "python"
    """`python` (the sources of the running interpreter's standard library), or a file or folder of text, JSON Lines,
    JSON (each .gz too) or Parquet. Every file or record is a document."""
    text_field: str = TEXT_FIELD
    """The field of JSON and Parquet records that holds their text."""
    tokenizer: str = "bytes"
    """`bytes`, or `bpe:N`: a byte-level BPE of N tokens trained on the corpus."""
    sequence: int = 256
    """Tokens of one sequence."""
    batch: int = 8
    """Sequences of one micro-batch, of all ranks together: each takes its part of them."""
    accumulate: int = 1
    """Micro-batches of one optimizer step."""
    held_out: float = 0.02
    """Share of the tokens kept for validation."""
    held_out_corpus: str = ""
    """A file or folder whose text is kept for validation instead; `corpus` is then trained on whole."""

    def __post_init__(self) -> None:
        if not self.text_field:
            raise ValueError("text_field='': name the field of a record that holds its text")
        check_positive(self, "sequence", "batch", "accumulate")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}: give a share of the tokens, above 0 and below 1")
        kind, _, size = self.tokenizer.partition(":")
        if self.tokenizer != "bytes" and not (kind == "bpe" and size.isdecimal() and 257 <= int(size) <= 1 << 20):
            raise ValueError(f"tokenizer={self.tokenizer!r}: use 'bytes' or 'bpe:N' with 257 <= N <= 1048576")

    @property
    def micro_batch_tokens(self) -> int:
        return self.sequence * self.batch

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch_tokens * self.accumulate


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and the course of its learning rate."""

    steps: int = 200
    """Optimizer steps of the whole run. More of them extend one whose learning rate has been constant."""
    lr: float = 2e-3
    """Peak learning rate."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """`wsd`: warm up, stay, decay linearly over the last `decay` of the steps. `cosine`: warm up, half a cosine."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises."""
    decay: float = 0.3
    """Share of the steps in which `wsd` decays; 0: never, so that the run can be extended."""
    final_lr: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices; never on norms."""
    clip: float = 1.0
    """Largest norm of the whole gradient; `inf` clips nothing."""

    def __post_init__(self) -> None:
        check_positive(self, "steps", "lr", "eps", "clip")
        check_finite(self, "lr", "eps")
        check_fraction(self, "warmup", "decay", "final_lr", "beta1", "beta2", "weight_decay")
        if self.warmup + self.decay > 1:
            raise ValueError(f"decay={self.decay}: warmup={self.warmup} and decay overlap; give a sum of at most 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What does not change the result: where it goes, and how often it is reported."""

    out: Path = Path("runs/train")
    """Folder of the run: config, log, checkpoints. A run found there goes on where it stopped."""
    cache: Path = Path("runs/cache")
    """Folder of tokenized corpora, believed by their SHA-256."""
    overwrite: bool = False
    """Start again although the folder holds a run: what it wrote is deleted, all of it or, with a reason, nothing."""
    log_every: int = 10
    """Steps between two reads of the loss from the device."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    async_save: bool = False
    """Let several ranks write checkpoints behind the steps that follow; it takes a copy in the CPU's memory."""
    cache_weights: bool = False
    """Quantize weights once per optimizer step: pays with accumulate > 1, costs 1.125 bytes a weight."""
    graph: Switch = "auto"
    """Replay the optimizer step as a CUDA graph: changes no bit. auto: on a GPU, where its memory suffices."""
    recompute: Literal["nothing", "selective", "full"] = "nothing"
    """Activation checkpointing of every block: `selective` keeps what quantization and GEMMs returned."""
    tensorboard: bool = False
    """Write TensorBoard files too (extra `train`)."""
    stats_every: int = 0
    """Steps between two in which every layer's quantization is measured, into stats.jsonl; 0: never."""

    def __post_init__(self) -> None:
        check_positive(self, "log_every", "checkpoint_every", "keep")
        if self.stats_every < 0:
            raise ValueError(f"stats_every={self.stats_every}: give a number of steps, or 0 for no statistics")
        check_switch(self, "graph")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Where a run's weights and targets come from, where not from a seed and the text: QAT and QAD (docs/qat.md)."""

    begin: Path | None = None
    """Folder of a run with whose last weights this one begins; shape and tokenizer are the same, all else is free."""
    teacher: Path | None = None
    """Folder of a run that is distilled: the loss is T² KL(teacher ‖ student), the teacher in high precision."""
    temperature: float = 1.0
    """T of the distillation."""

    def __post_init__(self) -> None:
        check_positive(self, "temperature")
        check_finite(self, "temperature")
        if self.temperature != 1.0 and self.teacher is None:
            raise ValueError(f"temperature={self.temperature}: it is the teacher's; give --teacher FOLDER too")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run under any recipe. Equal `identity(recipe)` gives equal losses, on a CPU bit for bit."""

    model: str = "nano"
    """Name of a model preset: tiny, nano, 2m, 10m, 60m, 125m, 300m, 1b, 3b, 8b; moe-tiny, moe-2m, moe-10m, moe-60m,
    moe-300m, moe-1b with 8 experts, 2 per token."""
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    mesh: MeshConfig = MeshConfig()
    tune: TuneConfig = TuneConfig()
    seed: int = 0
    """Of the initial weights, the data order and the random bits of quantization."""
    bits: int = 0
    """Other random bits of quantization, with the same weights and data; 0: those of the seed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the GEMMs; weights and optimizer are fp32. auto: bfloat16 on a GPU, float32 on a CPU."""
    fuse: Switch = "auto"
    """Norms and activations hand their amaxes to the quantization behind them (docs/fused.md). auto: on a GPU."""
    compile: Switch = "auto"
    """Run every block through torch.compile; they share one graph. auto: dense models on a GPU, from 100 steps on."""
    recipe_schedule: str = ""
    """Changes of recipe in mid-run: `WHEN:RECIPE,…`, WHEN a step or, with a point, a share of the steps. RECIPE may be
    `FORWARD/BACKWARD`: `0.9:bf16/nvfp4` runs the last tenth with a high-precision forward. `auto:RECIPE` changes once
    rounding drowns the gradient, looked at where the run validates. In `compare` it is for the recipes that quantize a
    GEMM: bf16 stays bf16."""
    eval_every: int = 50
    """Steps between two validations, in high precision."""
    eval_batches: int = 16
    """Micro-batches of one validation, always the same ones."""

    def __post_init__(self) -> None:
        models.model_preset(self.model)
        check_positive(self, "eval_every", "eval_batches")
        check_switch(self, "fuse", "compile")
        if self.compile == "on" and self.run.recompute == "selective":  # Inductor reuses the outputs of GEMMs in place
            raise ValueError(
                "recompute='selective' with compile='on': compiled blocks write over what it keeps, so that gradients "
                "would be wrong; use recompute='full' or compile='off'"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed}: give 0 <= seed < 2**63")
        if not 0 <= self.bits < 1 << 15:
            raise ValueError(f"bits={self.bits}: give 0 <= bits < 32768")
        if self.optim.steps * self.data.accumulate >= POSITION_LIMIT:
            raise ValueError(
                f"steps={self.optim.steps}, accumulate={self.data.accumulate}: a run has fewer than 2**31 "
                "micro-batches, which its random places count; give fewer steps"
            )
        self.schedule()
        self._check_mesh()

    def _check_mesh(self) -> None:
        ranks, shard = self.mesh.size, self.mesh.dp_shard
        if self.data.batch % self.mesh.parts:
            parts = self.mesh.parts
            groups = self.mesh.dp_replicate or 1
            ranks_of = f" (dp_shard={shard} x dp_replicate={groups})" if min(shard, groups) > 1 else ""
            raise ValueError(
                f"batch={self.data.batch}: {parts} ranks{ranks_of} cannot share it; give a multiple, such as {parts}, "
                "with --accumulate for a larger step"
            )
        if ranks > 1 and self.run.graph == "on":
            raise ValueError(
                f"graph='on': {ranks} ranks step together, and graphs with their communication are not captured; leave "
                "it out, or use one process"
            )
        if self.mesh.weights == "nvfp4" and shard == 1 and self.run.cache_weights:
            raise ValueError(
                "cache_weights=True with weights='nvfp4' and dp_shard=1: weights are there in NVFP4 alone, and nothing "
                "is cached; leave one of them out"
            )
        if self.mesh.head == "shared" and self.tune.teacher is not None:
            raise ValueError(
                f"head='shared' with teacher={self.tune.teacher}: a teacher is compared with all logits of a token, "
                "which no rank has then; leave one of them out"
            )
        if self.mesh.weights == "nvfp4" and shard == 1 and self.compile == "on":
            raise ValueError(
                "compile='on' with weights='nvfp4' and dp_shard=1: layers whose weights are there in NVFP4 alone run "
                "eagerly; leave one of them out, or use --dp-shard"
            )
        if shard > 1 and self.run.cache_weights:
            raise ValueError(
                f"cache_weights=True with dp_shard={shard}: a rank holds no whole weight to quantize once; leave it "
                "out, or use --dp-shard 1"
            )
        if self.switch() is not None and self.mesh.weights == "nvfp4":
            raise ValueError(
                f"recipe_schedule={self.recipe_schedule!r} with weights='nvfp4': weights that are codes alone have no "
                "gradient in high precision to compare with; leave --weights out, or name the step instead of auto"
            )
        if self.switch() is not None and (shard > 1 or self.mesh.tp > 1):
            raise ValueError(
                f"recipe_schedule={self.recipe_schedule!r}: ranks that share parameters (dp_shard={shard}, "
                f"tp={self.mesh.tp}) do not measure the noise of gradients; name the step instead of auto"
            )
        self._check_statistics()
        self._check_tensor_parallel()
        self._check_expert_parallel()

    def _check_statistics(self) -> None:
        every, mesh = self.run.stats_every, self.mesh
        if every and mesh.weights == "nvfp4":
            raise ValueError(
                f"stats_every={every} with weights='nvfp4': weights that are there as codes have no values to compare "
                "with; leave one of --stats-every and --weights out (losses are the same with --weights plain)"
            )
        if every and mesh.tp > 1:
            raise ValueError(
                f"stats_every={every} with tp={mesh.tp}: layers that ranks share have passes of their own, which "
                "nothing measures; leave one of --stats-every and --tp out"
            )

    def _check_expert_parallel(self) -> None:
        moe, ep = models.model_preset(self.model).moe, self.mesh.ep
        if ep == 1:
            return
        if moe is None:
            raise ValueError(
                f"model={self.model!r} with ep={ep}: it has no experts; use one of moe-…, or leave --ep out"
            )
        if moe.experts % ep:
            raise ValueError(f"model={self.model!r} with ep={ep}: its {moe.experts} experts are no multiple of it")
        if self.compile == "on":
            raise ValueError(f"compile='on' with ep={ep}: compiled blocks do not wait for tokens; leave --compile out")

    def _check_tensor_parallel(self) -> None:
        shape, tp = models.model_preset(self.model), self.mesh.tp
        if tp == 1:
            return
        problems = [
            (
                shape.kv_heads % tp != 0,
                f"model={self.model!r}",
                f"its {shape.kv_heads} key/value heads are no multiple of it; use another model, or --dp-shard",
            ),
            (self.fuse == "on", "fuse='on'", "fused layers read whole tensors; leave --fuse out"),
            (self.compile == "on", "compile='on'", "compiled blocks are not shared so; leave --compile out"),
            (self.run.cache_weights, "cache_weights=True", "a rank holds no whole weight; leave --cache-weights out"),
        ]
        for is_met, what, remedy in problems:
            if is_met:
                raise ValueError(f"{what} with tp={tp}: {remedy}")

    def schedule(self) -> Schedule | None:
        """Return the changes of recipe, None if there are none or the run decides about them itself."""
        return (
            None if self.switch() is not None else parse_schedule(self.recipe_schedule, self.optim.steps, options.read)
        )

    def switch(self) -> Recipe | None:
        """Return the recipe that the run changes to when rounding drowns its gradients, None if it does not."""
        when, _, recipe = self.recipe_schedule.strip().partition(":")
        if when == AUTO and not recipe:
            raise ValueError(f"recipe_schedule={AUTO!r}: say to which recipe, as in '{AUTO}:nvfp4_forward'")
        return options.read(recipe) if when == AUTO else None

    @property
    def quantization_seed(self) -> int:
        """The seed of quantization's random bits."""
        return self.seed + (self.bits << 32)

    def identity(self, recipe: str) -> dict:
        """Return everything that decides the result of training under the recipe of that name, as JSON values.

        What other runs give to it is not here: tune.tune_identity reads their folders.

        Raises:
            ValueError: no recipe has that name.
        """
        values = asdict(self)
        del values["run"], values["mesh"], values["tune"], values["recipe_schedule"]
        for part, name in (
            (values, "bits"),
            (values["data"], "held_out_corpus"),
        ):  # as in runs from before they were there
            if not part[name]:
                del part[name]
        if self.mesh.dispatch != "plain":  # else the identity of runs from before experts were shared
            values["dispatch"] = self.mesh.dispatch
        if self.mesh.capacity is not None:
            values["capacity"] = self.mesh.capacity
        del values["data"]["text_field"]  # the hash of the text, which is in a run's identity, holds what it chose
        for name in (
            "fuse",
            "compile",
        ):  # truth values in runs from before there was "auto"; "auto" is yet to be decided
            values[name] = {"on": True, "off": False}.get(values[name], values[name])
        if math.isinf(self.optim.clip):  # JSON has no such number
            values["optim"]["clip"] = "inf"
        schedule = self.schedule()
        if schedule is not None:  # else the identity of runs from before there were schedules
            values["recipe_schedule"] = schedule.state_dict()
        switch = self.switch()
        if switch is not None:
            values["switch"] = switch.key
        values["shape"] = asdict(models.model_preset(self.model))
        return values | {"recipe": recipe, "recipe_key": treatment.treatment_of(recipe).recipe.key}

    @property
    def tokens(self) -> int:
        return self.optim.steps * self.data.tokens_per_step


HASHES = {"corpus": "corpus_sha256", "held_out_corpus": "held_out_sha256", "held_out": "held_out_sha256"}
"""What of an identity's data does not count where both have that hash of a text, and it is equal."""


def differences(ours: dict, theirs: dict) -> list[str]:
    """Return one line per leaf in which two identities differ that decides something: names of equal texts do not."""
    equal = {name for name in HASHES.values() if ours.get(name) is not None and ours[name] == theirs.get(name)}
    aside = {f"data.{name}" for name, text in HASHES.items() if text in equal}
    return _leaves(ours, theirs, "", aside)


def _leaves(ours: dict, theirs: dict, prefix: str, aside: set[str]) -> list[str]:
    lines = []
    for name in sorted(ours.keys() | theirs.keys(), key=str):
        a, b = ours.get(name), theirs.get(name)
        if f"{prefix}{name}" in aside:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            lines += _leaves(a, b, f"{prefix}{name}.", aside)
        elif a != b:
            word = name if str(name).isprintable() else repr(name)
            lines.append(f"{prefix}{word}: {_brief(b)} there, {_brief(a)} here")
    return lines


def _brief(value: object) -> str:
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def two_cores() -> TrainConfig:
    """A run of minutes on two slow CPU cores: what `make train` compares."""
    return TrainConfig(
        model="nano",
        data=DataConfig(sequence=128, batch=4),
        optim=OptimConfig(steps=400, lr=1e-3, decay=0.4),
        run=RunConfig(out=Path("runs/two_cores"), log_every=5, checkpoint_every=50),
        device="cpu",
        dtype="float32",
        eval_every=50,
        eval_batches=32,
    )


def small_gpu() -> TrainConfig:
    """The same on a GPU: seconds a recipe as a CUDA graph, so that compiling blocks would take the longest."""
    return replace(two_cores(), device="auto", dtype="auto", compile="off")


def two_cores_moe() -> TrainConfig:
    """The same with 8 experts, 2 per token."""
    shape = two_cores()
    return replace(shape, model="moe-2m", run=replace(shape.run, out=Path("runs/two_cores_moe")))


def one_gpu() -> TrainConfig:
    """60M parameters and 0.5B tokens: an evening on one GPU."""
    return TrainConfig(
        model="60m",
        data=DataConfig(tokenizer="bpe:32000", sequence=1024, batch=32, accumulate=4),
        optim=OptimConfig(steps=4000, lr=1e-3, warmup=0.02, decay=0.2),
        run=RunConfig(out=Path("runs/one_gpu"), log_every=20, checkpoint_every=500, tensorboard=True),
        eval_every=250,
        eval_batches=32,
    )


def tiny() -> TrainConfig:
    """A run of seconds, for tests."""
    return TrainConfig(
        model="tiny",
        data=DataConfig(sequence=32, batch=4),
        optim=OptimConfig(steps=12, lr=5e-3),
        run=RunConfig(out=Path("runs/tiny"), log_every=2, checkpoint_every=4),
        device="cpu",
        dtype="float32",
        eval_every=6,
        eval_batches=2,
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    f.__name__: f for f in (two_cores, two_cores_moe, small_gpu, one_gpu, tiny)
}


def training_preset(name: str) -> TrainConfig:
    """Return the training preset called `name`.

    Raises:
        ValueError: no preset has that name; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} does not exist; use one of {', '.join(PRESETS)}")
    return PRESETS[name]()
