"""What distillation minimises: how far a student's distribution over the next token is from its teacher's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distillation_loss(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return T² KL(teacher ‖ student) of every token, whose mean a quantization-aware distillation (QAD) minimises.

    Both distributions are those of logits / T; T² keeps the gradient's size (Hinton et al., arXiv 1503.02531).

    Args:
        student: logits [..., V]; gradients flow to them alone.
        teacher: logits [..., V] of the same tokens.
        temperature: T > 0; above 1, unlikely tokens count for more.

    Returns:
        fp32 [...].

    Raises:
        ValueError: shapes differ, or the temperature is not above 0.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"teacher.shape={tuple(teacher.shape)}, student.shape={tuple(student.shape)}: a teacher has the student's "
            "tokens and vocabulary"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: give a number above 0")
    log_student = F.log_softmax(student.float() / temperature, dim=-1)
    log_teacher = F.log_softmax(teacher.detach().float() / temperature, dim=-1)
    divergence = F.kl_div(log_student, log_teacher, reduction="none", log_target=True)
    return divergence.sum(-1) * temperature**2
