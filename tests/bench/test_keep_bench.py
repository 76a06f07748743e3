"""What hb.inspect proposes to keep repairs a planted defect, and a random Keep of its cost does not."""

import json

import pytest

from bench import keep


def check(one):
    """Compare one seed with what is claimed."""
    proposed = one["kept"]["proposed"]
    assert one["gap"] >= 0.05 and 0 < one["share"] <= keep.BUDGET
    assert proposed["recovered"] >= 0.5
    others = {name: way for name, way in one["kept"].items() if name != "proposed"}
    for way in others.values():
        assert way["recovered"] < 0.5 and not set(way["layers"]) & set(proposed["layers"])
        assert len(way["layers"]) >= len(proposed["layers"])  # all layers cost the same
    assert others


def test_the_kept_result_holds_it():
    found = json.loads(keep.RESULT.read_text())
    assert len(found["seeds"]) == 3
    for one in found["seeds"]:
        check(one)


@pytest.mark.parametrize("seed", range(3))
def test_the_defect_is_what_is_proposed(seed):
    proposal = keep.proposal(seed)
    assert proposal.targets == ("first",) and proposal.share == pytest.approx(1 / (keep.DEPTH + 1))


def test_the_defect_costs_nothing_in_high_precision(monkeypatch):
    loud = keep.trained(0, 3, None)
    monkeypatch.setattr(keep, "LOUD", 1.0)
    assert keep.trained(0, 3, None) == pytest.approx(loud, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_trained_anew(seed):
    check(keep.of_seed(seed, steps=100, draws=1))
