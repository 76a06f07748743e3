"""Launch options beside those of a route: they reach the kernels, change no byte, and a byte that changes is seen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bench import instructions, options
from halfbyte.kernels.quantize import one

CPU = torch.device("cpu")
LAUNCHED = """
import sys
from bench import instructions, options
from halfbyte.kernels import record
for case in sys.argv[1:]:
    with record.recording(record.TARGETS["sm_90"]) as launches, options.asked({"maxnreg": 88}):
        instructions.CASES[case]()
    found = [one for one in launches if one.kernel.fn.__name__ != "plan_kernel"]
    print(len(found), all(one.options.get("maxnreg") == 88 for one in found))
"""
FAMILIES = (
    "1x16 nearest",
    "rotation of 128",
    "NVFP4 row + MXFP8 column",
    "60 small groups: row + rotated column, nearest",
)


def test_options_reach_every_family_of_kernels():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LAUNCHED, *FAMILIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["1 True"] * len(FAMILIES) + [""]


@pytest.mark.parametrize("case", ["1x16 stochastic", "row as values + rotated column, nearest"])
def test_bytes_that_differ_are_counted(case, monkeypatch):
    work = [options._call(case, torch.randn(64, 256).bfloat16())]
    assert options.differing(work, {"num_warps": 8}) == 0
    if case in instructions.DENSE and instructions.DENSE[case][1] is None:
        choose = one.choose_one_side
        draws = iter([False, True])

        def other(request):
            side = request.side._replace(amax=request.side.amax * 2) if next(draws) else request.side
            return choose(request._replace(side=side))

        monkeypatch.setattr(one, "choose_one_side", other)
        assert options.differing(work, {"num_warps": 8}) > 1000


def test_what_is_read_and_refused(capsys):
    assert options.parsed("maxnreg=80,ptx_options=-O1") == {"maxnreg": 80, "ptx_options": "-O1"}
    for words, said in (
        (["nearest", "--try", "warps=3"], "'warps=3' is no option; give maxnreg="),
        (["nearest", "--try", "maxnreg="], "is no option"),
        (["nearest", "--shape", "8192"], "invalid literal"),
        (["none of them"], "no case; there are 1x16 nearest"),
    ):
        with pytest.raises(SystemExit) as ended:
            options.main([*words, "--count"])
        assert ended.value.code == 2 and said in capsys.readouterr().err
