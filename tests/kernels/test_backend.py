"""What ops calls has one name and one head in the reference and in the kernels."""

from __future__ import annotations

import inspect

import pytest

from halfbyte import reference
from halfbyte.kernels import backend

FUNCTIONS = {name: value for name, value in vars(backend).items() if inspect.isfunction(value)}
OF_KERNELS_ALONE = {"grouped_values"}  # the reference decodes group by group


def test_the_kernels_have_no_function_of_their_own():
    assert len(FUNCTIONS) > 10
    assert FUNCTIONS.keys() - vars(reference).keys() == OF_KERNELS_ALONE


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - OF_KERNELS_ALONE))
def test_heads_agree(name):
    """A kernel may take more, by name and with a default: which variant, which dtype."""
    wanted, given = (
        [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(reference, name), FUNCTIONS[name])
    )
    assert given[: len(wanted)] == wanted
    assert all(extra.default is not extra.empty for extra in given[len(wanted) :])
