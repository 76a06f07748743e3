"""Experts that exist as codes alone train as those in bf16, bit for bit, on any number of ranks."""

import pytest
import ranks
import zero_expert_checks as checks

ALL = ["first.weight", "up.weight", "down.weight"]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_experts_in_codes_train_as_in_bf16(world):
    """Experts and rows of tiles whose shards are cut anywhere; one bucket, and several."""
    for recipe, sizes, bucket in (("nvfp4", (3, 48), 1 << 20), ("four_over_six", (5, 16), 2000)):
        for rank in ranks.run(world, checks.trained, recipe, sizes, bucket):
            assert rank["equal"] and rank["codes"] == [True] * 3
            assert rank["forms"]["nvfp4"][0] == ALL and rank["forms"]["plain"][0] == []
            coded, plain = (rank["forms"][weights][1] for weights in ("nvfp4", "plain"))
            assert world == 1 or coded < 0.4 * plain, "codes and scales travel, and biases in bf16"


def test_experts_whose_tiles_would_have_rows_of_two_stay_in_bf16():
    for rank in ranks.run(2, checks.trained, "nvfp4", (3, 40), 1 << 20):
        assert rank["equal"] and rank["forms"]["nvfp4"][0] == ["first.weight", "down.weight"]
