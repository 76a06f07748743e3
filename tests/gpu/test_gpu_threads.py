"""Several threads, streams and devices in one process: each model gets the bytes that it gets alone."""

from __future__ import annotations

import pytest
import torch
from thread_checks import assert_equal, together, trained

RECIPES = ("nvfp4", "nvfp4_mxfp8_bwd")


@pytest.mark.parametrize("own_streams", (False, True), ids=("one stream", "a stream each"))
def test_threads_get_the_bytes_of_one_after_the_other(own_streams):
    places = [(seed, recipe) for seed, recipe in enumerate(RECIPES * 2)]
    expected = [trained(*place, "cuda") for place in places]

    def job(place, meet):
        with torch.cuda.stream(torch.cuda.Stream() if own_streams else torch.cuda.current_stream()):
            return trained(*place, "cuda", meet)

    actual = together([lambda meet, place=place: job(place, meet) for place in places])
    assert_equal(actual, expected)
    assert not torch.equal(expected[0][0], expected[2][0])  # other seeds, other runs


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_devices_get_the_bytes_of_one():
    places = [(0, recipe, device) for recipe in RECIPES for device in ("cuda:0", "cuda:1")]
    expected = [trained(seed, recipe, "cuda:0") for seed, recipe, _ in places]
    assert_equal([trained(*place) for place in places], expected)
    actual = together([lambda meet, place=place: trained(*place, meet) for place in places])
    assert_equal(actual, expected)
