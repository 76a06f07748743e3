"""Registers of one bank, counted in instructions written by hand."""

import pytest

from bench.register_banks import conflicts


@pytest.mark.parametrize(
    ("instructions", "count"),
    [
        (["FMUL R3, R4, R6"], 1),
        (["FMUL R3, R4, R7", "FADD R4, -R4, |R5|"], 0),  # what is written does not count
        (["FADD R0, -|R14|, R6"], 1),
        (["FMUL R3, R4, R4", "MOV R3, R2", "IMAD R6, R40, 0x2, R7"], 0),
        (["IMAD R6, R40, R2, 0x200000", "IMAD.WIDE R6, R41, R3, UR4"], 2),
        (["FFMA R31, R7, R9, R50"], 0),  # one of three in the other bank
        (["FFMA R31, R7, R9, R51"], 1),
        (["FMUL R3, R4, UR6", "FMUL R3, R4, c[0x0][R6]"], 1),
        (["FMUL R1, R4.reuse, R7", "FMUL R3, R4, R6"], 0),  # kept where it was read
        (["FMUL R1, R4.reuse, R7", "FMUL R3, R6, R4"], 1),  # in another place
        (["FMUL R1, R4.reuse, R7", "MOV R3, R9", "FMUL R3, R4, R6"], 1),  # for the next one alone
        (["STG.E.64 desc[UR16][R10.64], R40", "STG.E desc[UR16][R2.64], R5", "LDG.E R0, desc[UR16][R2.64]"], 1),
        (["HMNMX2.BF16_V2.NAN.XORSIGN R0, |R8|, |R10|, !PT", "EXIT", "BRA `(.L_x_1)"], 1),
    ],
)
def test_conflicts(instructions, count):
    assert conflicts(instructions) == count
