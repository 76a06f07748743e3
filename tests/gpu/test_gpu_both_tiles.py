"""Both orientations of a weight from one launch on a GPU: bytes of the reference at sizes of layers."""

import pytest
import torch
from tile_checks import check_both

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("shape", ((768, 2048), (2880, 1040), (80, 272), (4096, 2048)), ids=str)
@pytest.mark.parametrize("amax", (None, 100.0))
def test_bytes_of_both_orientations(shape, amax):
    check_both(shape, "cuda", amax)
