"""The notebook runs from top to bottom, and what its cells end in shows itself."""

import ast
import json

import matplotlib
import pytest
from pages import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "halfbyte.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run(source: str, namespace: dict) -> object:
    """Run a cell and return the value of its last line, as a notebook does."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)


@pytest.fixture(scope="module")
def shown() -> tuple[dict, list[object]]:
    matplotlib.use("agg")
    namespace: dict = {"__name__": "notebook"}
    return namespace, [run(source, namespace) for source in CODE]


def test_it_is_a_notebook_without_outputs():
    assert NOTEBOOK["nbformat"] == 4 and len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] in ("code", "markdown") and not cell.get("outputs") and not cell.get("execution_count")
        assert all(line.endswith("\n") for line in cell["source"][:-1])


def test_what_is_shown(shown):
    namespace, values = shown
    tables = [value._repr_html_() for value in values if type(value).__module__.startswith("halfbyte")]
    assert len(tables) == 6  # two recipes, the conversion, statistics, what inspect found, memory
    assert sum("<table>" in table for table in tables) == 5
    assert namespace["stats"].last.step == 30 and len(namespace["losses"]) == 30
    assert namespace["losses"][-1] < namespace["losses"][0]


def test_it_finds_the_defect_and_repairs_it(shown):
    namespace, _ = shown
    assert namespace["seen"].proposal.targets == ("1.down",)
    seen, kept = namespace["seen"], namespace["kept"]
    assert 1 - kept["1.down"] < 0.5 * (1 - seen.ranking.cosine)
    kinds = [type(block.down).__module__ for block in namespace["repaired"]]
    assert kinds == ["halfbyte.nn.linear", "torch.nn.modules.linear", "halfbyte.nn.linear"]
