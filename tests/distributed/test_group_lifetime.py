"""A process group ends when it is destroyed: nothing of ours keeps it, whose threads would outlive the interpreter."""

import subprocess
import sys
import weakref
from functools import partial

import pytest
import ranks
import small_models
import torch
import torch.distributed as dist
import zero_checks as checks

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer

SGD = partial(torch.optim.SGD, lr=0.1)


def _zero_outlives_its_group(rank: int, world: int, weights: str) -> tuple[bool, str]:
    group = dist.new_group(range(world))
    torch.manual_seed(0)
    model = checks.Bigram(24).bfloat16()
    hb.quantize_(model, "nvfp4", keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    config = ZeroConfig(weights=weights, bucket_numel=3000, timeout=checks.TIMEOUT)
    optimizer = ZeroOptimizer(model, SGD, group, config=config)
    model(torch.arange(11)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return seen() is None, str(raised.value)


@pytest.mark.parametrize("weights", ["nvfp4", "plain"])
def test_an_optimizer_does_not_keep_its_group(weights):
    for gone, message in ranks.run(2, _zero_outlives_its_group, weights):
        assert gone and "process group was destroyed" in message


def _cast_outlives_its_group(rank: int, world: int) -> bool:
    group = dist.new_group(range(world))
    master = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    weight = hb.tensor.PrimaryWeight.empty((32, 32))
    half = master.view(-1)[512 * rank : 512 * (rank + 1)].clone()
    hb.distributed.cast_master_weights_to_nvfp4([weight], [half], [512 * rank], group)
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return seen() is None


def test_a_prepared_cast_does_not_keep_its_group():
    assert ranks.run(2, _cast_outlives_its_group) == [True, True]


DEFAULT_GROUP = """
import os, weakref
import torch
import halfbyte as hb

torch.distributed.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
seen = weakref.ref(torch.distributed.group.WORLD)
model = torch.nn.Sequential(torch.nn.Linear(32, 32))
hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
optimizer = hb.distributed.ZeroOptimizer(model)
model(torch.ones(32)).sum().backward()
optimizer.step()
torch.distributed.destroy_process_group()
print(seen() is None)
"""


def test_the_default_group_ends_though_an_optimizer_was_built_while_it_was_there():
    """In a process of its own: the modules that keep a group do so when they are imported."""
    done = subprocess.run([sys.executable, "-c", DEFAULT_GROUP], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


KEPT_GROUP = """
import time
from pathlib import Path
import torch
import halfbyte as hb
from halfbyte.distributed import agree

rests, tasks = [], Path("/proc/self/task")
agree.time.sleep, sleep = rests.append, time.sleep
agree.let_threads_go()
print(rests)
torch.distributed.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
kept = torch.distributed.group.WORLD
torch.distributed.destroy_process_group()
deadline = time.monotonic() + 60  # gloo's threads get their names a little later
while time.monotonic() < deadline and not any("pt_gloo" in task.read_text() for task in tasks.glob("*/comm")):
    sleep(0.01)
agree.let_threads_go()
print(rests == [agree.LETTING_GO])
"""


def test_the_end_waits_for_the_threads_of_a_group_that_somebody_keeps():
    """As DDP does: torch 2.13 aborts a process whose thread asks for Python's lock after the interpreter's end."""
    done = subprocess.run([sys.executable, "-c", KEPT_GROUP], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["[]", "True"], done.stderr
