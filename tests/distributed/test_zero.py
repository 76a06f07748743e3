"""ZeroOptimizer trains as if every rank held the whole model and quantized it in every forward."""

import ranks
import zero_checks as checks


def test_the_same_losses_as_with_whole_weights():
    ranks.run(4, checks.same_losses, 20, "nvfp4", {"dim": 24})
