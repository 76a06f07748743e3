"""Several threads of one process: each model gets the bytes that it gets alone."""

import pytest
import torch
from thread_checks import assert_equal, together, trained


@pytest.mark.parametrize("other", ((1, "nvfp4"), (0, "quartet2")), ids=("another seed", "another recipe"))
def test_threads_get_the_bytes_of_one_after_the_other(other):
    places = [(0, "nvfp4"), other]
    expected = [trained(*place, "cpu", width=64) for place in places]
    jobs = [lambda meet, place=place: trained(*place, "cpu", meet, width=64) for place in places]
    assert_equal(together(jobs), expected)
    assert not torch.equal(expected[0][0], expected[1][0])  # other runs
