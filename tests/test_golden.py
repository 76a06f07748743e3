"""Every vector of tests/golden, bit for bit through the public API (edge_gemm: within the vector's own bound)."""

from collections import Counter

import golden_vectors as golden
import pytest


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in golden.cases()])
def test_golden(case):
    golden.check(case)


def test_the_files_are_complete():
    kinds = Counter(case.kind for case in golden.cases())
    assert set(kinds) == set(golden.CHECKS)
    assert sum(kinds.values()) == 369 + 868 + 8 + 24


@pytest.mark.parametrize("file, name", [("numerics", "qdata"), ("numerics", "block_scale"), ("edge", "dequant")])
def test_a_changed_vector_fails(file, name):
    """The comparison can fail: one flipped bit in one array is found and located."""
    case = next(case for case in golden.cases() if case.file == file and case.has(name) and case.array(name).size)
    wrong = case.array(name).copy()
    wrong.reshape(-1).view("uint8")[-1] ^= 1
    changed = _Changed(*case, name, wrong)
    with pytest.raises(AssertionError, match=rf"{name}\[.*1 of"):
        golden.check(changed)


class _Changed(golden.Case):
    def __new__(cls, *fields):
        *case, name, wrong = fields
        self = super().__new__(cls, *case)
        self.name, self.wrong = name, wrong
        return self

    def array(self, name):
        return self.wrong if name == self.name else super().array(name)
