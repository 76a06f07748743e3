"""The learning rate at every step, and which parameters decay."""

import pytest
import torch

from halfbyte.train import model, optim
from halfbyte.train.config import OptimConfig


def rates(**values):
    config = OptimConfig(steps=100, lr=1.0, warmup=0.1, **values)
    return [optim.learning_rate(config, step) for step in range(100)]


def test_wsd_rises_stays_and_falls_in_a_line():
    course = rates(schedule="wsd", decay=0.2)
    assert course[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert course[10:80] == [1.0] * 70
    assert course[80:] == pytest.approx([(20 - i) / 21 for i in range(20)])


def test_wsd_ends_at_its_final_share():
    course = rates(schedule="wsd", decay=0.2, final_lr=0.1)
    assert course[-1] == pytest.approx(0.1 + 0.9 / 21)


def test_wsd_without_a_decay_stays():
    assert rates(schedule="wsd", decay=0.0)[10:] == [1.0] * 90


def test_cosine_is_half_way_in_the_middle():
    course = rates(schedule="cosine", final_lr=0.1)
    assert course[10] == 1.0
    assert course[55] == pytest.approx(0.55)
    assert 0.1 < course[-1] < 0.102


def test_norms_do_not_decay():
    decoder = model.Decoder(model.model_preset("tiny"))
    optimizer = optim.adamw(decoder, OptimConfig())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in decoder.named_parameters():
        assert (id(parameter) in decayed) == ("norm" not in name)


def test_adamw_is_the_textbook_update():
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(weight.weight)
    optimizer = optim.adamw(weight, OptimConfig(beta1=0.5, beta2=0.5, weight_decay=0.1, eps=1e-8))
    optim.set_learning_rate_(optimizer, 0.01)
    weight.weight.grad = torch.tensor([[4.0]])
    optimizer.step()  # bias-corrected moments of one gradient are the gradient itself: a step of lr * sign
    assert weight.weight.item() == pytest.approx(1 - 0.01 * 0.1 - 0.01, abs=1e-6)
