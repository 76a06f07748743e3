"""Damaged and foreign files: refused in one line that names the file, before anything of the run has changed."""

import copy
import json
import math
import os
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import tiny, write_corpus
from runs import stop_after

from halfbyte.train import checkpoint, compare, data, log, loop

STEP = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Config and text of a run that ended, and a Trainer of one that stopped."""
    folder = tmp_path_factory.mktemp("made")
    write_corpus(folder / "corpus")
    config = tiny(folder, steps=4, checkpoint_every=STEP, accumulate=2, eval_every=4, recipe_schedule="1:bf16")
    text = data.load_data(config.data, config.run.cache)
    loop.train(config, "nvfp4", text)
    stopped = replace(config, run=replace(config.run, out=folder / "stopped"))
    stop_after(loop.Trainer(stopped, "nvfp4", text), STEP)
    return config, text, loop.Trainer(stopped, "nvfp4", text)


@pytest.fixture
def trainer(made):
    """A run that has resumed, and resumes again when a test has damaged its checkpoint."""
    _, _, trainer = made
    path = next((trainer.folder / "checkpoints").glob("*.pt"))
    whole = path.read_bytes()
    yield trainer
    path.write_bytes(whole)
    trainer._resume()


def content_of(trainer):
    path = next((trainer.folder / "checkpoints").glob("*.pt"))
    return path, torch.load(path, weights_only=True)


def state_of(trainer):
    """Every bit that a resumed run consists of."""

    def bits(value):
        if isinstance(value, dict):
            return {name: bits(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [bits(part) for part in value]
        return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value

    parts = (trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.run_state.state_dict())
    return [*map(bits, parts), trainer.step, trainer.position, trainer.seconds, str(trainer.environments)]


def refuses(trainer, path, reason):
    """Disturb the run, as if it had gone on, then resume: all of the disturbance must stay."""
    with torch.no_grad():
        trainer.model.lm_head.weight.add_(1.0)
    trainer.run_state.advance()
    trainer.step, trainer.position, trainer.seconds = 1, 3, 77.0
    before = state_of(trainer)
    with pytest.raises(ValueError, match=reason) as error:
        trainer._resume()
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert state_of(trainer) == before


def moment(content, key, value):
    content["optimizer"]["state"][3][key] = value


def weight(content, value):
    content["model"]["lm_head.weight"] = value


def with_nan(tensor):
    out = tensor.clone()
    out.view(-1)[-1] = math.nan
    return out


LIKE = torch.ones_like
HOSTILE = {
    "short moment": (
        lambda c: moment(c, "exp_avg", torch.ones(2)),
        "parameter 3: 'exp_avg' is float32 [2], expected is float32 [32, 64]",
    ),
    "moment of other dtype": (
        lambda c: moment(c, "exp_avg_sq", c["optimizer"]["state"][3]["exp_avg_sq"].double()),
        "'exp_avg_sq' is float64",
    ),
    "one element as many": (
        lambda c: moment(c, "exp_avg", torch.ones(1).expand(c["optimizer"]["state"][3]["exp_avg"].shape)),
        "elements that share memory",
    ),
    "transposed moment": (
        lambda c: moment(c, "exp_avg", c["optimizer"]["state"][0]["exp_avg"].T),
        "'exp_avg' is float32 [64, 256]",
    ),
    "moment on meta": (
        lambda c: moment(c, "exp_avg", c["optimizer"]["state"][3]["exp_avg"].to("meta")),
        "on the meta device",
    ),
    "NaN in a moment": (
        lambda c: moment(c, "exp_avg", with_nan(c["optimizer"]["state"][3]["exp_avg"])),
        "'exp_avg' of parameter 3 holds numbers that are not finite",
    ),
    "variance below 0": (
        lambda c: moment(c, "exp_avg_sq", -LIKE(c["optimizer"]["state"][3]["exp_avg_sq"])),
        "'exp_avg_sq' of parameter 3 holds numbers below 0",
    ),
    "NaN as the count": (lambda c: moment(c, "step", torch.tensor(math.nan)), "'step' is float32 [] of nan"),
    "text as the count": (lambda c: moment(c, "step", "x"), "'step' is 'x'"),
    "a count of other steps": (
        lambda c: moment(c, "step", torch.tensor(1.0)),
        "parameter 3 has made 1.0 steps, the run 2",
    ),
    "a moment twice": (
        lambda c: moment(c, "exp_avg", c["optimizer"]["state"][3]["exp_avg_sq"]),
        "two of its tensors share memory",
    ),
    "a key too many": (lambda c: moment(c, "max_exp_avg_sq", torch.ones(3)), "'max_exp_avg_sq' is"),
    "a moment that is gone": (lambda c: c["optimizer"]["state"][3].pop("exp_avg"), "'exp_avg' is missing"),
    "no state": (lambda c: c["optimizer"]["state"].clear(), "its moments are lost"),
    "no state of one": (lambda c: c["optimizer"]["state"].pop(3), "parameter 3 has none"),
    "state of an unknown": (
        lambda c: c["optimizer"]["state"].update({99: c["optimizer"]["state"][3]}),
        "parameter 99, which no group has",
    ),
    "no groups": (lambda c: c["optimizer"]["param_groups"].clear(), "it has 0 parameter groups"),
    "groups exchanged": (lambda c: c["optimizer"]["param_groups"].reverse(), "param_groups[0] has 5 parameters"),
    "other betas": (
        lambda c: c["optimizer"]["param_groups"][0].update(betas=(0.5, 0.5)),
        "group 0 has betas=(0.5, 0.5)",
    ),
    "a flag": (lambda c: c["optimizer"]["param_groups"][1].update(maximize=True), "group 1 has maximize=True"),
    "a list as the optimizer": (lambda c: c.update(optimizer=[1]), "optimizer state: it is a list"),
    "a weight of another shape": (
        lambda c: weight(c, torch.ones(3)),
        "'lm_head.weight' is torch.float32 [3], here torch.float32 [256, 64]",
    ),
    "a weight of another dtype": (
        lambda c: weight(c, c["model"]["lm_head.weight"].double()),
        "'lm_head.weight' is torch.float64",
    ),
    "NaN in a weight": (
        lambda c: weight(c, with_nan(c["model"]["lm_head.weight"])),
        "'lm_head.weight' holds numbers that are not finite",
    ),
    "a sparse weight": (
        lambda c: weight(c, c["model"]["lm_head.weight"].to_sparse()),
        "'lm_head.weight' is no plain tensor",
    ),
    "a number as weight": (lambda c: weight(c, 1.0), "'lm_head.weight' is no plain tensor"),
    "a weight that is gone": (lambda c: c["model"].pop("lm_head.weight"), "'lm_head.weight' is on one side only, here"),
    "a weight too many": (lambda c: c["model"].update(extra=torch.ones(1)), "'extra' is on one side only, there"),
    "a list as the model": (lambda c: c.update(model=[]), "model: a list"),
    "another random position": (
        lambda c: c["run_state"].update(position=5),
        "position=5, step=2; expected are 0, 4, 2",
    ),
    "a random position in text": (lambda c: c["run_state"].update(position="4"), "state['position']='4'"),
    "another seed": (lambda c: c["run_state"].update(seed=1), "seed=1, position=4"),
    "another place in the schedule": (lambda c: c["run_state"].update(step=1), "step=1; expected are 0, 4, 2"),
    "no place in the schedule": (lambda c: c["run_state"].pop("step"), "step=0; expected are 0, 4, 2"),
    "other streams": (lambda c: c["run_state"].update(streams=1), "state['streams']=1"),
    "half a step": (lambda c: c.update(step=2.5), "step='2.5' is no number"),
    "a step in text": (lambda c: c.update(step="2"), "step='2' is no number"),
    "NaN as step": (lambda c: c.update(step=math.nan), "step='nan' is no number"),
    "true as step": (lambda c: c.update(step=True), "step='True' is no number"),
    "a step past the end": (lambda c: c.update(step=5, position=10), "step=5: the run has 4 steps"),
    "a position of other steps": (lambda c: c.update(position=3), "position=3: after 2 steps it is 4"),
    "time below 0": (lambda c: c.update(seconds=-1.0), "seconds='-1.0'"),
    "time without end": (lambda c: c.update(seconds=math.inf), "seconds='inf'"),
    "NaN as time": (lambda c: c.update(seconds=math.nan), "seconds='nan'"),
    "a tensor as version": (lambda c: c.update(version=torch.ones(3)), "version tensor([1., 1., 1.]), this is 1"),
    "no identity": (lambda c: c.update(identity=None), "its identity is no dict"),
    "a list as identity": (lambda c: c.update(identity=[]), "its identity is no dict"),
    "numbers as names": (lambda c: c["identity"].update({1: 2}), "its identity is no dict of plain values"),
    "a tensor in the identity": (
        lambda c: c["identity"].update(seed=torch.zeros(2)),
        "its identity is no dict of plain values",
    ),
    "an environment in text": (lambda c: c.update(environments="x"), "environments: not a list of objects"),
    "an environment of tensors": (lambda c: c["environments"][0].update(x=torch.ones(2)), "environments: no list of"),
    "an optimizer of one tensor": (lambda c: c.update(optimizer=torch.ones(2)), "optimizer state: it is float32"),
}


@pytest.mark.parametrize(("change", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_not_a_checkpoint_of_this_run_changes_nothing(trainer, change, reason):
    path, content = content_of(trainer)
    change(content)
    torch.save(content, path)
    refuses(trainer, path, re.escape(reason))


def test_a_checkpoint_of_a_gpu_goes_on_here(trainer):
    """Its optimizer was capturable and had its learning rate in a tensor; the bits are those of the run."""
    path, content = content_of(trainer)
    expected = state_of(trainer)
    for group in content["optimizer"]["param_groups"]:
        group.update(capturable=True, lr=torch.tensor(1e-3))
    torch.save(content, path)
    trainer._resume()
    assert state_of(trainer)[:1] + state_of(trainer)[2:] == expected[:1] + expected[2:]
    assert not any(group["capturable"] for group in trainer.optimizer.param_groups)


def test_one_that_cannot_be_read_is_not_called_broken(trainer):
    path, content = content_of(trainer)
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # whom rights do not bind
            os.seteuid(65534)
        with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\); check its rights") as error:
            checkpoint.load_checkpoint(path, content["identity"])
    finally:
        os.seteuid(user)
        path.chmod(0o644)
    assert "delete" not in str(error.value)


VALUES = (
    None,
    [],
    {},
    "x",
    "",
    -1,
    0,
    1 << 70,
    1.5,
    math.nan,
    math.inf,
    True,
    [[1]],
    {"a": {"b": 1}},
    "é\n",
    [None] * 3,
)


def places(value, path=()):
    """Yield the path of every part of a tree of dicts and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(children):
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated(value, generator):
    """Return a copy with one part replaced, dropped, doubled under another name, or all of it replaced."""
    value = copy.deepcopy(value)
    path = generator.choice([*places(value), ()])
    if not path:
        return copy.deepcopy(generator.choice(VALUES))
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    kind = generator.randrange(6)
    if kind == 0:
        del parent[path[-1]]
    elif kind == 1 and isinstance(parent, dict):
        parent[generator.choice(("new", 7, (1, 2)))] = parent[path[-1]]
    elif kind == 2 and isinstance(parent[path[-1]], torch.Tensor):
        tensor = parent[path[-1]].clone()
        parent[path[-1]] = generator.choice(
            (tensor.double(), tensor.view(-1)[:1], tensor.int(), tensor[None], with_nan(tensor))
        )
    else:
        parent[path[-1]] = copy.deepcopy(generator.choice(VALUES))
    return value


def damaged(raw, generator):
    """Return bytes with some cut off, flipped, doubled, or all of them replaced."""
    place = generator.randrange(len(raw))
    flipped = raw[:place] + bytes([raw[place] ^ 1 << generator.randrange(8)]) + raw[place + 1 :]
    others = (b"", b"\xff\xfe", b"null", b"[" * 100_000, b"9" * 5000, b'{"a":' * 50_000, b"\0" * 64)
    return generator.choice((raw[:place], flipped, flipped, raw[place:], raw + raw, generator.choice(others)))


def refusal(call):
    """Return the message with which `call` refused, None if it did not; whatever else it raises is a fault."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def is_one_line(message, path):
    return (
        (str(path) in message or f"out={str(path.parent)!r}" in message) and "\n" not in message and len(message) < 2000
    )


def write_json(path, value):
    def plain(part):
        return {str(k): plain(v) for k, v in part.items()} if isinstance(part, dict) else part

    path.write_text(json.dumps(plain(value)))


def use(name, config, text):
    """Do with a file what the commands do with it."""
    if name == "log.jsonl":
        log.Log(config.run.out, after=4, tensorboard=False).close()
        assert all(map(math.isfinite, log.curve(config.run.out, "step")[1]))
        return
    result = loop.finished(config, "nvfp4", text)
    if result is not None:
        compare.with_gaps([result])
        compare.table([result])


@pytest.mark.parametrize(("name", "seed"), [("result.json", 1), ("config.json", 2), ("log.jsonl", 3)])
def test_mutants_of_what_a_run_wrote(made, tmp_path, name, seed):
    config, text, _ = made
    config = replace(config, run=replace(config.run, out=tmp_path / "run"))
    generator, refused, accepted = random.Random(seed), 0, 0
    shutil.copytree(made[0].run.out, config.run.out)
    path = config.run.out / name
    if name == "config.json":
        (config.run.out / "result.json").unlink()
    raw = path.read_bytes()
    for number in range(60):
        if number % 2:
            path.write_bytes(damaged(raw, generator))
        elif name == "log.jsonl":
            lines = raw.decode().splitlines()
            place = generator.randrange(len(lines))
            lines[place] = json.dumps(mutated(json.loads(lines[place]), random.Random(number)))
            path.write_text("\n".join(lines) + "\n")
        else:
            write_json(path, mutated(json.loads(raw), generator))

        message = refusal(lambda: use(name, config, text))
        assert message is None or is_one_line(message, path)
        refused, accepted = refused + (message is not None), accepted + (message is None)
    assert refused > 15 and accepted > 0


def test_mutants_of_a_checkpoint_and_of_the_pointer(trainer):
    """Those of its content get past the checksums; what is accepted trains on with finite numbers."""
    path, content = content_of(trainer)
    raw, generator, refused, steps = path.read_bytes(), random.Random(4), 0, 0
    whole = state_of(trainer)
    for number in range(100):
        if number % 4 == 0:
            path.write_bytes(damaged(raw, generator))
        else:
            torch.save(mutated(content, generator), path)
        message = refusal(trainer._resume)
        if message is not None:
            assert is_one_line(message, path), message
            assert state_of(trainer) == whole
            refused += 1
            continue
        if steps < 3:
            steps += 1
            assert math.isfinite(trainer._one_step()[1].item())
        path.write_bytes(raw)
        trainer._resume()
    assert refused > 60
    path.write_bytes(raw)
    pointer = path.with_name(checkpoint.LATEST)
    for value in (
        b"\xff",
        b"",
        b"../../config.json",
        b"/etc/passwd",
        b"step-00000009.pt",
        b"a" * 5000,
        b"\0",
        b"step-1.pt\n" * 9,
    ):
        pointer.write_bytes(value)
        assert trainer.checkpoints.latest() == path
    pointer.unlink()
    pointer.mkdir()
    assert trainer.checkpoints.latest() == path
    pointer.rmdir()
