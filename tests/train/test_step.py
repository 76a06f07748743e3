"""One optimizer step and one validation, done again by hand: gradients, not losses of an optimizer without scale."""

import math

import pytest
import torch

from halfbyte.train import log, loop

BALANCE = 0.01


def switch_balance(router, x_SC):
    """Switch Transformer's equation 4: experts, times the sum over them of the share of copies times probability."""
    probability = (x_SC @ router.weight.T).softmax(-1)
    k, experts = router.config.per_token, router.config.experts
    chosen = probability.argsort(-1, descending=True)[:, :k]
    share = torch.stack([(chosen == expert).sum() for expert in range(experts)]) / chosen.numel()
    return experts * (share * probability.mean(0)).sum()


def losses(model, inputs, targets):
    """Cross entropy from log-softmax, and the weighted mean of the blocks' balance from what their routers read."""
    seen = []
    routers = [block.mlp.gate for block in model.layers if hasattr(block.mlp, "gate")]
    hooks = [router.register_forward_hook(lambda m, args, _: seen.append((m, args[0]))) for router in routers]
    logits = model(inputs)
    for hook in hooks:
        hook.remove()
    entropy = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    balance = torch.stack([switch_balance(*one) for one in seen]).mean() if seen else torch.zeros(())
    return entropy, BALANCE * balance


def by_hand(trainer, count):
    """Loss and gradients of the mean over the first micro-batches."""
    both = [losses(trainer.model, *trainer.batches[i]) for i in range(count)]
    loss = sum(entropy for entropy, _ in both) / count
    balance = sum(balance for _, balance in both) / count
    return loss, balance, torch.autograd.grad(loss + balance, list(trainer.model.parameters()))


@pytest.mark.parametrize(("model", "count"), [("tiny", 1), ("tiny", 3), ("moe-tiny", 1), ("moe-tiny", 3)])
def test_a_step_descends_the_mean_of_its_micro_batches_and_the_balance_of_experts(run, model, count):
    config, data = run(model=model, accumulate=count, steps=1, clip=math.inf, log_every=1)
    trainer = loop.Trainer(config, "bf16", data)
    loss, balance, expected = by_hand(trainer, count)
    assert bool(balance > 0.5 * BALANCE) is (model == "moe-tiny")
    trainer.optimizer.zero_grad = lambda: None
    trainer.train()
    got = [parameter.grad for parameter in trainer.model.parameters()]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * float(other.abs().max()))
    (line,) = (line for line in log.read_log(config.run.out) if line["kind"] == "step")
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in expected]).norm().item(), rel=1e-4)


def test_three_steps_are_adamw_on_clipped_gradients_at_the_rates_of_the_schedule(run):
    """Momentum that is no average of equal gradients, so that scale and order of every step matter."""
    config, data = run(accumulate=2, steps=3, clip=0.5, lr=1e-2, warmup=0.34, log_every=1, eval_every=3)
    trainer = loop.Trainer(config, "bf16", data)
    matrices = [p for p in trainer.model.parameters() if p.dim() == 2]
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in trainer.model.parameters()}
    start = [p.detach().clone() for p in trainer.model.parameters()]
    for step in range(3):
        both = [losses(trainer.model, *trainer.batches[2 * step + i])[0] for i in range(2)]
        gradients = torch.autograd.grad(sum(both) / 2, list(trainer.model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        lr = (0.005, 0.01, 0.005)[step]  # one step of warm-up, one at the peak, one of decay
        for p, gradient in zip(trainer.model.parameters(), gradients, strict=True):
            g, (first, second) = gradient * min(1.0, 0.5 / norm.item()), moments[p]
            first.mul_(0.9).add_(0.1 * g)
            second.mul_(0.95).add_(0.05 * g * g)
            update = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            decay = 0.1 if any(p is matrix for matrix in matrices) else 0.0
            with torch.no_grad():
                p.sub_(lr * (update + decay * p))
    expected = [p.detach().clone() for p in trainer.model.parameters()]
    with torch.no_grad():
        for p, value in zip(trainer.model.parameters(), start, strict=True):
            p.copy_(value)
    trainer.train()
    assert [line["lr"] for line in log.read_log(config.run.out) if line["kind"] == "step"] == [0.005, 0.01, 0.005]
    moved = torch.cat([(a - b).flatten() for a, b in zip(expected, start, strict=True)])
    error = torch.cat([(a - b).flatten() for a, b in zip(expected, trainer.model.parameters(), strict=True)])
    assert error.norm() < 1e-3 * moved.norm()


def test_a_validation_is_the_mean_over_the_same_sequences_whatever_the_seed(run, folder):
    """The order of training follows the seed, the order of validation does not."""
    trainers = []
    for seed in (0, 1):
        config, data = run(seed=seed, eval_batches=3, held_out=0.2, out=folder / f"seed{seed}")
        trainers.append(loop.Trainer(config, "bf16", data))
    first, second = trainers
    assert first.held_out.windows > 3 * 4, "more than one validation reads, so that an order shows"
    for i in range(3):
        assert torch.equal(first.held_out[i][0], second.held_out[i][0])
        assert not torch.equal(first.batches[i][0], second.batches[i][0])
    second.model.load_state_dict(first.model.state_dict())
    by_hand = [losses(first.model, *first.held_out[i])[0].item() for i in range(3)]
    assert first.evaluate() == second.evaluate() == pytest.approx(sum(by_hand) / 3, rel=1e-6)


def test_validation_reads_no_sequence_of_the_training(run):
    config, data = run(held_out=0.2)
    trainer = loop.Trainer(config, "bf16", data)
    whole = torch.tensor(data.held_out, dtype=torch.int64)
    inputs = trainer.held_out[0][0]
    windows = whole.unfold(0, inputs.shape[1], 1)
    assert all((windows == row).all(-1).any() for row in inputs)
