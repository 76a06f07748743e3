"""A head of which ranks exchange activations: its loss to the bit on any number of ranks, and what a model learns."""

import json
from dataclasses import replace

import head_checks
import pytest
import ranks
import torch
import torch.nn.functional as F
import train_checks
from head_checks import DIM, TOKENS

from halfbyte.train.config import MeshConfig


def test_the_loss_has_one_value_however_ranks_share_the_rows():
    """And it is the cross entropy, NaN and infinities included, as torch has it in 64 bits."""
    alone, by_world = in_64_bits(), []
    for world in (1, 2, 3, 4):
        every = ranks.run(world, head_checks.losses)
        by_world.append(every[0])
        for rank, found in enumerate(every):
            for (kind, _), (loss, gradient), (expected, exact) in zip(
                head_checks.KINDS, found, alone[rank], strict=True
            ):
                said = f"{kind} on rank {rank} of {world}: "
                close_to(loss, expected, rtol=3e-7, atol=0.0, said=said)
                close_to(gradient, exact * (rank + 2), rtol=2e-5, atol=1e-6, said=said)
    for one in by_world[1:]:
        for (loss, gradient), (first, its) in zip(one, by_world[0], strict=True):
            assert bits(loss) == bits(first) and bits(gradient) == bits(its)


def close_to(found, expected: torch.Tensor, *, rtol: float, atol: float, said: str) -> None:
    options = {"rtol": rtol, "atol": atol, "equal_nan": True}
    torch.testing.assert_close(torch.tensor(found).double(), expected, **options, msg=lambda text: said + text)


def bits(found) -> bytes:
    return torch.tensor(found).nan_to_num(nan=1e30).numpy().tobytes()


def in_64_bits() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Loss and gradient of each rank's tokens, by torch in fp64."""
    found = []
    for shift in range(4):
        own = []
        for kind, rows in head_checks.KINDS:
            logits, targets = head_checks.logits_of(kind, rows, 6, shift)
            logits = logits.double().requires_grad_()
            loss = F.cross_entropy(logits, targets)
            loss.backward()
            own.append((loss.detach(), logits.grad))
        found.append(own)
    return found


def close(found: list, expected: list, name: str, rough: bool) -> None:
    assert len(found) == len(expected)
    options = {"rtol": 2e-2, "atol": 2e-3} if rough else {"rtol": 1e-4, "atol": 1e-6}
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            torch.tensor(a), torch.as_tensor(b), **options, msg=lambda text, i=i: f"{name}, tensor {i}: {text}"
        )


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full), 4])
def test_a_model_learns_what_it_learns_from_a_gathered_head(world):
    """Losses, gradients and weights of three steps; only the order of sums differs."""
    names = [
        name for name, case in head_checks.CASES.items() if not case.quantized and (case.mesh is None or world == 4)
    ]
    names = names if world == 2 else ["fp32", "a rank that keeps none", *(["HSDP"] if world == 4 else [])]
    gathered, exchanged = (ranks.run(world, head_checks.trained, names, flag, seconds=200) for flag in (False, True))
    for one, other in zip(gathered, exchanged, strict=True):
        for name in names:
            case = head_checks.CASES[name]
            close(other[name][0], one[name][0], name, case.policy is not None or case.autocast)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_quantized_head_is_one_process_that_has_all_tokens(world):
    names = ["quantized", "quantized, tied"]
    for rank, found in enumerate(ranks.run(world, head_checks.trained, names, True, seconds=200)):
        for name in names:
            expected, seen = head_checks.alone(name, world), list(found[name][0][:-1])
            width = len(expected) // head_checks.CASES[name].steps
            for step in range(head_checks.CASES[name].steps):
                expected[step * width] = expected[step * width][rank]
            close(seen, expected, name, rough=False)


def test_bytes_are_those_of_activations_and_a_little():
    """Forward and backward of three steps and a last forward; no rank is sent a row of the head."""
    tokens = TOKENS[0] * TOKENS[1]
    world = 3
    for found in ranks.run(world, head_checks.trained, ["fp32"], True):
        _, traffic = found["fp32"]
        each = tokens * (4 * DIM + 4 + 2 * (4 + 8 + 8)), tokens * 4 * DIM
        assert traffic["activations"] == (world - 1) * (4 * each[0] + 3 * each[1])


@pytest.mark.full
def test_a_model_compiled_as_a_whole_has_the_same_bits():
    assert ranks.run(2, head_checks.compiled, seconds=300) == [[True, True], [True, True]]


def test_a_loss_that_is_compiled_is_computed_eagerly():
    assert ranks.run(2, head_checks.compiled_loss, seconds=200) == [(True, [])] * 2


def test_who_saved_logits_that_are_used_up_hears_of_it():
    """A gradient would lie where the backward of another loss, or of a cap, looks for logits."""
    for before, after, capped in ranks.run(2, head_checks.saved_by_others):
        assert all("modified by an inplace operation" in said for said in (before, capped)) and after == ""


def test_targets_are_of_any_integers():
    """An ignored one of uint8 is no -1, and of int16 no row is its last."""
    for rank in ranks.run(2, head_checks.of_other_integers):
        assert len(rank) == 9 and all(rank)


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_whole_model_quantized_weights_travel_and_little_else(tied):
    """Every collective is counted as torch launches it; plan has the sums of large models."""
    tokens, dim, words = 2 * 2 * 32, 128, 6016
    (without, _), (found, _) = (ranks.run(2, head_checks.whole_model, tied, head) for head in (None, "lm_head"))
    codes = 2 * tokens * dim * 9 // 16
    others = codes + 4 * tokens + 2 * 4  # targets, and the scale of each rank's loss
    others += 8 * tokens + 2 * tokens * dim  # ids, and gradients of rows
    gathered = found["gather"] - others
    assert gathered == pytest.approx(2 * 2 * (0.252 * found["matrices"] + found["small"]) + 2 * dim, rel=0.01)
    assert gathered == 2 * found["sent"] - 2 * dim, "of the last norm once; of embedding and head nothing"
    assert without["gather"] - gathered >= words * dim * 2
    small = found["matrices"] + found["small"] + dim
    assert found["reduce_scatter"] == 4 * small + 2 * tokens * dim, "gradients of blocks, and of activations in bf16"
    assert found["activations"] == (codes + 4 * tokens + 2 * tokens * dim) // 2 + 40 * tokens // 2


def test_a_gather_is_chosen_where_it_is_fewer_bytes_or_activations_cannot_be():
    for few, tied, biased, kept, cut in ranks.run(2, head_checks.choices):
        assert few == "activations of all ranks are as many bytes as its 8 rows"
        assert tied == "rows and the activations of the head tied to it are as many bytes as its rows"
        assert biased == "it has a bias" and kept == "other modules have it too"
        assert cut == "its rows in parts of 200 cut blocks of 16, whose gradients would be gathered whole"


def test_what_cannot_be_is_refused():
    for rank in ranks.run(2, head_checks.refusals):
        assert rank == [
            "ValueError: head='head': the model has no such layer with a weight; name the one that makes logits",
            "ValueError: targets: 1, and this rank has 2 tokens; give one for each",
            "IndexError: targets: 40 names no row of a head of 40",
            "TypeError: targets.dtype=torch.float32: rows are named by integers; give int64",
            "RuntimeError: cross_entropy: its logits were used up by a backward before; call it anew",
        ]


def shared(config, name: str):
    """The run with a head whose activations travel, in another folder."""
    run = replace(config.run, out=config.run.out.with_name(name))
    return replace(config, run=run, mesh=replace(config.mesh, weights="nvfp4", head="shared"))


def test_halfbyte_train_learns_the_same_and_goes_on_either_way(tmp_path):
    train_checks.write_corpus(tmp_path)
    wide = {"mesh": (1, 2), "batch": 2, "steps": 6, "checkpoint_every": 3}
    plain = train_checks.tiny(str(tmp_path), "mixed", "plain", **wide)
    runs = [(plain, "nvfp4_forward"), (shared(plain, "shared"), "nvfp4_forward"), (shared(plain, "all"), "nvfp4@all")]
    ranks.run(2, train_checks.train_all, runs)
    lines = [train_checks.lines(config) for config, _ in runs]
    for (kind, step, loss), (_, _, other), (_, _, quantized) in zip(*lines, strict=True):
        assert other == pytest.approx(loss, rel=2e-6), (kind, step)
        assert quantized == pytest.approx(loss, rel=0.02), (kind, step)
    for config, _ in runs[1:]:
        table = (config.run.out / "layers.txt").read_text()
        assert "embed_tokens.weight: rows exchanged" in table and "lm_head.weight: activations exchanged" in table
        assert json.loads((config.run.out / "result.json").read_text())["is_diverged"] is False
    resumed = shared(plain, "resumed")
    resumed.run.out.mkdir()
    left = None
    for config, steps, world in ((resumed, 2, 2), (replace(resumed, mesh=plain.mesh), 3, 2), (resumed, 4, 2)):
        (begun, left_now), _ = ranks.run(world, train_checks.until, config, "nvfp4", steps)
        assert left is None or begun == left
        left = left_now
    alone = replace(resumed, mesh=MeshConfig())
    begun, _ = train_checks.until(0, 1, alone, "nvfp4", 5)
    assert begun == left


@pytest.mark.parametrize(
    "mesh, said",
    [
        ({"head": "split"}, "head='split': give 'gathered' or 'shared'"),
        ({"head": "shared"}, "head='shared': dp_shard=1, tp=1, and it is for ranks that share weights"),
        ({"head": "shared", "dp_shard": 2, "tp": 2}, "head='shared': dp_shard=2, tp=2"),
    ],
)
def test_a_mesh_that_cannot_share_a_head_is_refused(mesh, said):
    with pytest.raises(ValueError, match=said):
        MeshConfig(**mesh)
