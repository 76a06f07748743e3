"""The live table of a comparison holds what its runs report; elsewhere there are lines."""

import io
import sys

import pytest

from halfbyte.train import compare, progress

rich = pytest.importorskip("rich.console")


def drawn(board: progress.LiveBoard) -> str:
    console = rich.Console(file=io.StringIO(), width=120)
    console.print(board.table())
    return console.file.getvalue()


def test_rows_follow_their_runs():
    console = rich.Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress.LiveBoard(("bf16", "nvfp4"), console) as board:
        display = board.start("bf16", 40, 10)
        assert "10/40" in drawn(board)
        display.update(20, "loss 2.125")
        assert "20/40" in drawn(board) and "loss 2.125" in drawn(board)
        display.close()
        board.finish("bf16", "2.0751", "")
        board.start("nvfp4", 40, 0).update(40, "loss 2.2")
        board.finish("nvfp4", "2.0925", "+0.84 %")
    lines = [line for line in drawn(board).splitlines() if "bf16 " in line or "nvfp4" in line]
    assert [cell.strip() for cell in lines[-1].split("│")[1:-1]] == ["nvfp4", "40/40", "loss 2.2", "2.0925", "+0.84 %"]
    assert "2.0751" in drawn(board) and "gap to bf16" in drawn(board)
    assert "2.0925" in console.file.getvalue()  # the last state stays on the screen


def test_a_comparison_on_a_terminal_shows_all_losses_at_once(run, monkeypatch):
    boards = []

    class Kept(progress.LiveBoard):
        def __init__(self, names):
            super().__init__(names, rich.Console(file=io.StringIO(), force_terminal=True, width=120))
            boards.append(self)

    monkeypatch.setattr(progress, "LiveBoard", Kept)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    config, _ = run(steps=2)
    results = compare.compare(config, ("bf16", "nvfp4"))
    rows = boards[0].rows
    assert {name: row.steps for name, row in rows.items()} == {"bf16": "2/2", "nvfp4": "2/2"}
    assert [row.loss for row in rows.values()] == [f"{result['held_out_loss']:.4f}" for result in results]
    assert rows["bf16"].gap == "" and rows["nvfp4"].gap == f"{results[1]['gap_percent']:+.2f} %"


def test_lines_elsewhere_say_which_run_of_how_many(capsys):
    with progress.board(("bf16", "nvfp4")) as board:
        display = board.start("nvfp4", 4, 0)
        display.update(4, "loss 2.0")
        display.close()
        board.finish("nvfp4", "2.0", "")
    assert type(board) is progress.Board
    assert capsys.readouterr().out.startswith("[2/2] nvfp4  step 4/4  loss 2.0")
