"""The loss of distillation against its formula in fp64, and its gradient against the closed form."""

import pytest
import torch

from halfbyte.functional import distillation_loss


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_value_and_gradient_are_the_formulas(temperature):
    student, teacher = (3 * torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(i)) for i in range(2))
    student.requires_grad_()
    teacher.requires_grad_()
    loss = distillation_loss(student, teacher, temperature=temperature)
    loss.backward(torch.ones_like(loss))
    s, t = ((x.detach().double() / temperature).exp() for x in (student, teacher))
    s, t = s / s.sum(-1, keepdim=True), t / t.sum(-1, keepdim=True)
    expected = temperature**2 * (t * (t.log() - s.log())).sum(-1)
    assert loss.dtype == torch.float32 and loss.shape == (2, 5)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad.double(), temperature * (s - t), rtol=1e-4, atol=1e-6)
    assert teacher.grad is None


def test_half_precision_logits_are_compared_in_fp32():
    student, teacher = (torch.randn(4, 9, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    assert torch.equal(distillation_loss(student, teacher), distillation_loss(student.float(), teacher.float()))
    assert distillation_loss(student, student).abs().max() == 0


def test_refusals():
    with pytest.raises(
        ValueError, match=r"teacher.shape=\(2, 4\), student.shape=\(2, 3\): a teacher has the student's"
    ):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="temperature=0: give a number above 0"):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 3), temperature=0)
