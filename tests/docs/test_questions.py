"""Ten questions of a reader who knows PyTorch and no FP4: the sentence that answers each is there, and it is true."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from pages import ROOT

import halfbyte as hb
from halfbyte.formats import E2M1, E4M3


class Question(NamedTuple):
    asked: str
    page: str
    answer: str
    holds: Callable[[], bool]


def normal(rows: int = 64, cols: int = 64) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


def values(x: torch.Tensor, spec: hb.NVFP4, rng: hb.Philox | None = None) -> torch.Tensor:
    return hb.quantize(x, spec, rng=rng).dequantize(torch.float32)


def bits_per_element() -> bool:
    q = hb.quantize(normal(), hb.NVFP4())
    return 8 * (q.qdata.nbytes + q.block_scale.nbytes) == 4.5 * 64 * 64 and q.amax.numel() == 1


def tiny_values_survive() -> bool:
    x = normal() * 2.0**-20  # far below what a block scale alone reaches
    return bool(x.abs().max() / 6 < 2.0**-9) and bool((values(x, hb.NVFP4()) != 0).float().mean() > 0.9)


def tiles_transpose() -> bool:
    strips, tiles = hb.NVFP4(), hb.NVFP4(block=(16, 16))
    x = normal()
    same = [torch.equal(values(x, spec), values(x.T.contiguous(), spec).T) for spec in (strips, tiles)]
    return same == [False, True]


def stochastic_is_right_on_average() -> bool:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, 0.1  # below half a step
    drawn = [values(x, hb.NVFP4(rounding="stochastic"), hb.Philox(1, i))[0, 1] for i in range(500)]
    return float(values(x, hb.NVFP4())[0, 1]) == 0 and abs(float(torch.stack(drawn).mean()) - 0.1) < 0.02


def an_outlier_spreads() -> bool:
    x = torch.full((1, 16), 0.2)
    x[0, 3] = 20.0
    turned = values(x, hb.NVFP4(rotation=hb.Hadamard()))
    return int((values(x, hb.NVFP4()) == 0).sum()) == 15 and bool((turned != 0).all())


def parameters_stay() -> bool:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    before = dict(model.named_parameters())
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0))
    return all(p is before[name] and p.dtype == torch.float32 for name, p in model.named_parameters())


def only_the_position_changes_bits() -> bool:
    state, x = hb.RunState(1), normal()
    one = hb.nn.Linear(64, 64, recipe="nvfp4", state=state)

    def gradient() -> torch.Tensor:
        one.weight.grad = None
        one(x).square().sum().backward()
        return one.weight.grad.clone()

    first, again = gradient(), gradient()
    state.advance()
    return torch.equal(first, again) and not torch.equal(first, gradient())


def one_block_is_poisoned() -> bool:
    x = normal()
    x[3, 20] = float("nan")
    lost = values(x, hb.NVFP4()).isnan()
    return bool(lost[3, 16:32].all()) and int(lost.sum()) == 16


def emulation_is_exact() -> bool:
    a, b = (hb.quantize(t, hb.NVFP4()) for t in (normal(), normal().flip(0).contiguous()))
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
    return torch.allclose(hb.gemm_nt(a, b, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)


QUESTIONS = [
    Question(
        "What can four bits hold?",
        "docs/concepts.md",
        "An E2M1 number has a sign and one of eight magnitudes: 0, 0.5, 1, 1.5, 2, 3, 4, 6.",
        lambda: [E2M1.decode(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    ),
    Question(
        "How many bits is it really, with the scales?",
        "docs/concepts.md",
        "Together: 4 + 8/16 = 4.5 bits per element.",
        bits_per_element,
    ),
    Question(
        "Why is one scale not enough?",
        "docs/concepts.md",
        "E4M3 reaches from 2⁻⁹ to 448, and the scales of a gradient lie below that.",
        lambda: E4M3.max == 448 and tiny_values_survive(),
    ),
    Question(
        "Why are weights quantized in squares?",
        "docs/concepts.md",
        "Weights use tiles so that forward and backward see the same weight.",
        tiles_transpose,
    ),
    Question(
        "Why would anybody round at random?",
        "docs/concepts.md",
        "a gradient that is always below half a step is always rounded to zero.",
        stochastic_is_right_on_average,
    ),
    Question(
        "What is the rotation for?",
        "docs/concepts.md",
        "One outlier in a block of 16 pushes the other 15 toward zero.",
        an_outlier_spreads,
    ),
    Question(
        "Are my parameters 4-bit now?",
        "docs/concepts.md",
        "Parameters stay in the dtype that they have, bf16 or fp32, and optimizers see nothing else; codes are made "
        "from them in every forward.",
        parameters_stay,
    ),
    Question(
        "What do I have to add to my training loop?",
        "docs/quickstart.md",
        "Call `advance()` once per micro-batch, or `report.state.follow(model)` once",
        only_the_position_changes_bits,
    ),
    Question(
        "What happens to a NaN?",
        "docs/faq.md",
        "A NaN or an infinity in a tensor makes its block NaN and no other",
        one_block_is_poisoned,
    ),
    Question(
        "I have no Blackwell: is what I measure worth anything?",
        "docs/concepts.md",
        "A GPU without FP4 tensor cores can therefore compute the block-scaled product *exactly*, up to the order of "
        "summation, at the speed of its bf16 GEMM.",
        emulation_is_exact,
    ),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.asked)
def test_the_page_answers_and_is_right(question):
    page = re.sub(r"\s+", " ", (ROOT / question.page).read_text(encoding="utf-8"))
    assert question.answer in page
    assert question.holds()


def test_there_are_ten():
    assert len({question.answer for question in QUESTIONS}) == 10
