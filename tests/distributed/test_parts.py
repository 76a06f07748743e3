"""Linear layers on DTensors are one autograd function, which makes the DTensors of gradients itself."""

import parts_checks as checks
import ranks


def test_gradients_lie_as_torch_wants_them():
    assert ranks.run(2, checks.gradients_lie)[0] == []


def test_the_gradient_of_an_output_may_lie_in_any_way():
    assert ranks.run(2, checks.any_dy)[0] == []


def test_a_second_derivative_is_refused_by_name():
    said = ranks.run(2, checks.twice)[0]
    assert len(said) == len(checks.WAYS)
    assert all("a quantized layer cannot be differentiated twice" in one for one in said)
