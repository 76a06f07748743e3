"""Layers that 4 ranks share, with amaxes of earlier steps: signs of the run, rotations in all GEMMs, any borders."""

import delayed_parts_checks as checks
import ranks
from delayed_parts_checks import Case

SIZES = (21, 24, 40)


def test_recipes_and_styles_on_four_ranks():
    cases = [Case("fresh", "colwise", SIZES), Case("mxfp8_bwd", "tokens", SIZES), Case("quartet2", "rowwise", SIZES)]
    cases += [Case("every1", style, (128, 24, 33), sequences=2) for style in ("x in codes", "dy in codes")]
    assert ranks.run(4, checks.operands, cases, seconds=280)[0] == []
