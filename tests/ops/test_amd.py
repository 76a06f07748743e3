"""ROCm's torch calls its GPUs "cuda" and answers (9, 4) for a capability: they are told apart, refused, and forced."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo import utils

import halfbyte as hb
from halfbyte import cli, ops
from halfbyte.kernels.device.decode import INTERPRETED
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.target import AMD, INTERPRETER, amd, find, nvidia, target_of
from halfbyte.ops.backends import _cached_status, choose
from halfbyte.sides import Side
from halfbyte.train import auto
from halfbyte.verify import command, plan, record
from halfbyte.verify.record import Verification

GPU = torch.device("cuda", 0)
MI300 = {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304}
H200 = {"major": 9, "minor": 0, "multi_processor_count": 132}
V100 = {"major": 7, "minor": 0, "multi_processor_count": 80}


class Facts:
    """What torch tells of a GPU."""

    def __init__(self, **facts):
        self.__dict__.update(facts)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that lets torch see a GPU with ROCm or without."""

    def see(facts, hip=None):
        found = Facts(name="a GPU", **facts)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
        _cached_status.cache_clear()

    yield see
    _cached_status.cache_clear()


def test_what_a_machine_has(machine):
    machine(MI300, hip="7.0.51831")
    target = find(GPU)
    assert target == amd("gfx942", 304) and (target.warp, target.capability) == (64, 0)
    assert not any((target.ptx, target.interpreter, target.fp8, target.e2m1, target.pdl, target.tma))
    machine(H200)
    assert find(GPU) == nvidia(90, 132) and find(GPU).ptx
    assert amd("gfx1201", 64).warp == 32


@pytest.mark.parametrize("named", ["", "AMD Instinct", "gfx", "gfx9x42"])
def test_an_architecture_without_a_name_is_said(machine, named):
    machine(MI300 | {"gcnArchName": named}, hip="7.0.51831")
    with pytest.raises(
        ValueError, match=rf"calls the architecture of this AMD GPU '{named}', where names such as gfx942"
    ):
        find(GPU)


def test_the_architecture_is_what_the_command_prints(machine, capsys):
    machine(MI300 | {"total_memory": 192 << 30}, hip="7.0.51831")
    assert cli.main(["env"]) == 0
    assert "GPU 0: a GPU, gfx942, 192 GiB" in capsys.readouterr().out
    machine(H200 | {"total_memory": 140 << 30})
    assert cli.main(["env"]) == 0
    assert "GPU 0: a GPU, sm_90, 140 GiB" in capsys.readouterr().out


def test_what_nobody_has_compiled_is_said_of_no_other_architecture():
    known = f"for which the kernels compile ({', '.join(AMD)}) but on which nobody has compared"
    assert "gfx950" in AMD and known in amd("gfx950", 256).problem
    other = (
        f"gfx1100 is an AMD GPU, for which nobody has compiled the kernels, as for {' and '.join(AMD)}, and on which"
    )
    assert amd("gfx1100", 96).problem.startswith(other)


@pytest.mark.parametrize(("compiler", "has"), [("cuda", True), ("hip", False), ("xpu", False), (None, False)])
def test_only_what_compiles_for_nvidia_has_ptx(compiler, has):
    """AMD's assembler would meet PTX in the middle of a kernel; None is the interpreter, which compiles nothing."""
    options = SimpleNamespace(backend_name=compiler)
    semantic = compiler and SimpleNamespace(builder=SimpleNamespace(options=options))
    assert has_ptx(_semantic=semantic).value is has


@pytest.mark.parametrize(
    ("capability", "has"),
    [
        (86, set()),
        (89, {"fp8"}),
        (90, {"fp8", "pdl", "tma"}),
        (103, {"fp8", "pdl", "tma", "e2m1", "stochastic_e2m1", "fp4_products"}),
        (120, {"fp8", "pdl", "e2m1", "fp4_products"}),
    ],
)
def test_what_nvidias_gpus_have(capability, has):
    target = nvidia(capability, 8)
    every = {"fp8", "pdl", "tma", "e2m1", "stochastic_e2m1", "fp4_products"}
    assert {name for name in every if getattr(target, name)} == has
    assert target.name == f"sm_{capability}" and target.ptx and not target.interpreter


def test_the_interpreter_is_a_target():
    if INTERPRETED:
        assert target_of(torch.device("cpu")) is INTERPRETER
    assert INTERPRETER.interpreter and not INTERPRETER.ptx and INTERPRETER.problem is None


def test_amd_is_refused_with_what_to_do(machine):
    machine(MI300, hip="7.0.51831")
    reference, triton, native = hb.backends(GPU)
    assert reference.available and not triton.available and not native.available
    for status in (triton, native):
        for part in ("gfx942 is an AMD GPU", "gfx942, gfx950", "`halfbyte verify --force`", "backend='portable'"):
            assert part in status.reason
    assert choose(GPU, None) == "reference"
    for asked in ("triton", "native"):
        with pytest.raises(ValueError, match=f"backend='{asked}': gfx942 is an AMD GPU.*--force.*backend=None"):
            choose(GPU, asked)
    assert "gfx942" in auto.facts(GPU).no_kernels


def test_force_is_a_value(machine):
    machine(MI300, hip="7.0.51831")
    assert choose(GPU, "portable") == "triton"
    assert choose(GPU, None) == "reference", "nothing is left behind"


def test_there_is_nothing_to_force_elsewhere(machine):
    with pytest.raises(ValueError, match="backend='portable': Triton kernels need a CUDA GPU, not cpu; use backend="):
        ops.quantize(torch.zeros(4, 16), Side(hb.NVFP4()), backend="portable")
    machine(H200)
    with pytest.raises(ValueError, match="backend='portable': the kernels of sm_90 run without it"):
        choose(GPU, "portable")
    assert choose(GPU, None) == "triton"
    machine(V100)
    with pytest.raises(ValueError, match="backend='portable': sm_70 is older than sm_80"):
        choose(GPU, "portable")
    with pytest.raises(ValueError, match="use one of 'reference', 'triton', 'native', 'portable'"):
        choose(GPU, "rocm")


def test_compiled_code_chooses_the_same(machine, monkeypatch):
    names = ("reference", "triton", "native")
    for facts, hip, expected in ((MI300, "7.0.51831", "reference"), (H200, None, "triton")):
        machine(facts, hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # torch.compile would use the GPU
        monkeypatch.setattr(sys.modules[choose.__module__], "_no_gpu", lambda device: None)

        # Dynamo takes what torch tells of a GPU for a constant, by its type.
        utils.common_constant_types.add(Facts)

        @torch.compile(backend="eager", fullgraph=True)
        def chosen(x):
            return x + names.index(choose(GPU, None))

        assert names[int(chosen(torch.zeros(())))] == expected
        torch._dynamo.reset()
        utils.common_constant_types.discard(Facts)


def verified(arguments, monkeypatch):
    """Return the scope of `halfbyte verify` and its exit status."""
    scopes = []

    def verify(scope, **_):
        scopes.append(scope)
        return Verification(machine=command.machine(scope), checks=[], fingerprint="")

    monkeypatch.setattr(command, "verify", verify)
    return cli.main(["verify", *arguments]), *scopes


def test_verify_forces_the_kernels(machine, monkeypatch, capsys):
    machine(MI300, hip="7.0.51831")
    status, scope = verified(["--force"], monkeypatch)
    assert status == 0 and scope.backend == "portable" and scope.device.type == "cuda"
    said = capsys.readouterr().out
    assert "gfx942, 304 CUs" in said and "ROCm 7.0.51831" in said and "not run" not in said


def test_verify_says_why_it_ran_no_kernel(machine, monkeypatch, capsys):
    machine(MI300, hip="7.0.51831")
    status, scope = verified([], monkeypatch)
    assert status == 0 and scope.backend == "reference"
    assert "The kernels were not run, only the reference was checked: gfx942 is an AMD GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--force", "--device", "cpu"], "--force: there is no GPU whose kernels could be forced; leave it out"),
        (["--force", "--backend", "triton"], "--force --backend triton: --force chooses the kernels"),
    ],
)
def test_force_that_cannot_be_is_one_line(arguments, reason, capsys):
    assert cli.main(["verify", *arguments]) == cli.USER_ERROR
    assert reason in capsys.readouterr().err


def test_a_forced_verification_compares_every_kernel(machine):
    machine(MI300, hip="7.0.51831")
    groups = {group for group, *_ in plan.findings(plan.Scope(device=GPU, backend="portable"))}
    machine(H200)
    assert groups == {group for group, *_ in plan.findings(plan.Scope(device=GPU, backend="triton"))}
    assert record.NATIVE_GEMM not in groups and len(groups) > 8
