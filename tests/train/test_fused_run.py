"""A training run with fused norms and activations: the same run but for roundings, again and again."""

import pytest

from halfbyte.train import log, loop


@pytest.mark.parametrize("model", ["tiny", "moe-tiny"])
def test_a_fused_run_is_near_the_unfused_one(run, folder, model):
    curves = []
    for name, fuse in (("plain", "off"), ("fused", "on"), ("again", "on")):
        config, data = run(model=model, fuse=fuse, out=folder / name)
        loop.train(config, "nvfp4", data)
        curves.append(log.curve(config.run.out, "step")[1])
    plain, fused, again = curves
    assert fused == again and len(fused) == len(plain)
    # A changed last bit changes a code now and then; it does not change the course.
    assert all(abs(a - b) < 0.02 * b for a, b in zip(fused, plain, strict=True))
