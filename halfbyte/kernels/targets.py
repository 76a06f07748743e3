"""Compile a kernel for a GPU that is not here, and read what it uses: registers, stack, shared memory.

Every module of `halfbyte.kernels` whose kernels are launched defines `compile_cases()`: the configurations its
launchers choose from for bf16 operands of whole blocks, built from the same tables. Ragged columns, fp32 and fp16
operands launch others, which nobody compiles ahead. `all_cases()` finds them: a new kernel plugs in by that function.
`python -m halfbyte.kernels.targets [capability ...]` compiles all of them; it needs no GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = (80, 89, 90, 100, 103, 120)

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory that one block may use, by compute capability (CUDA C++ programming guide)."""

_DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return Triton's name of a torch dtype."""
    return _DTYPE_NAMES[dtype]


@dataclass(frozen=True)
class CompileCase:
    """One kernel in one configuration.

    Args:
        kernel: the @triton.jit function.
        arguments: every parameter by name: a type such as "*bf16", "i32", "fp32", "tensordesc<bf16[128,64]>", followed
            by ":16" where the launcher passes values divisible by 16; anything that is no string is a constexpr value.
        num_warps, num_stages, fp_fusion: launch options.
        capabilities: the targets on which a launcher would choose this configuration.
    """

    kernel: Any
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    capabilities: tuple[int, ...] = field(default=TARGETS)

    @property
    def name(self) -> str:
        constants = [f"{k}={getattr(v, 'value', v)}" for k, v in self.arguments.items() if not isinstance(v, str)]
        pointers = [v.split(":")[0] for v in self.arguments.values() if isinstance(v, str) and v[0] not in "if"]
        return (
            f"{self.kernel.__name__}({', '.join(pointers + constants)}) warps={self.num_warps} stages={self.num_stages}"
        )


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel uses on one target; stack bytes are spills or indexed local arrays."""

    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int

    def problem(self) -> str | None:
        """Say why the kernel does not belong on its target, or None."""
        limit = SHARED_MEMORY[self.capability] * 1024
        if self.stack_bytes:
            return f"sm_{self.capability}: spills {self.stack_bytes} bytes ({self.registers} registers)"
        if self.shared_bytes > limit:
            return f"sm_{self.capability}: {self.shared_bytes} bytes of shared memory, the limit is {limit}"
        return None


def compile_case(case: CompileCase, capability: int) -> Usage:
    """Compile `case` to machine code for a compute capability (90 for sm_90) without such a GPU."""
    names = case.kernel.arg_names
    assert set(names) == set(case.arguments), f"{case.kernel.__name__}: {set(names) ^ set(case.arguments)}"
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = case.arguments[name]
        if isinstance(value, str):
            signature[name], _, aligned = value.partition(":")
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(index,)] = getattr(value, "value", value)
    source = ASTSource(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    return Usage(capability, registers, stack, compiled.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, stack bytes) as the assembler recorded them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    (registers,), (stack,) = (re.findall(rf"{key}:(\d+)", report) for key in ("REG", "STACK"))
    return int(registers), int(stack)


def all_cases() -> list[CompileCase]:
    """Return the cases of every module in `halfbyte.kernels`."""
    import halfbyte.kernels as package

    cases = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "compile_cases"):
            cases += module.compile_cases()
    return cases


def main(capabilities: list[int]) -> int:
    """Compile everything for some targets; print one line per failure and a summary, return the number of failures."""
    failures = compiled = 0
    for case in all_cases():
        for capability in case.capabilities:
            if capability not in capabilities:
                continue
            problem = compile_case(case, capability).problem()
            compiled += 1
            if problem:
                failures += 1
                print(f"{problem}: {case.name}", flush=True)
    print(f"{compiled} compiled, {failures} unfit", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(min(1, main([int(arg) for arg in sys.argv[1:]] or list(TARGETS))))
