"""`--mesh auto` against all meshes tried one by one, and the command."""

import json

import pytest

from halfbyte import cli
from halfbyte.plan import Mesh, Plan, PlanRequest, plan
from halfbyte.plan.assumptions import assumptions, computed
from halfbyte.plan.planning import candidates, job_of
from halfbyte.plan.show import plan_heading


def test_what_a_plan_is_of_where_nothing_is_said():
    """The figures of docs/scaling.md leave most of it out."""
    assert vars(PlanRequest()) == {
        "model": "llama3-8b",
        "gpus": 8,
        "mesh": "auto",
        "recipe": "nvfp4",
        "hardware": "h200",
        "sequences": 1,
        "sequence": 8192,
        "accumulate": 1,
        "sharding": "auto",
        "gather": "auto",
        "recompute": "auto",
        "kernels": "auto",
        "vocabulary": None,
        "high_precision_blocks": 0.15,
        "head": "gathered",
        "values": "bf16",
        "reduce": "auto",
        "host": "ahead",
        "holds_logits": False,
    }
    job = plan(PlanRequest(mesh="dp_shard=8")).job
    assert (job.sharding, job.gather, job.recompute, job.kept_blocks) == ("fsdp", "nvfp4", "nothing", 5)
    assert job.kernels == "compiled"
    assert plan(PlanRequest(mesh="dp_replicate=8")).job.sharding == "none"


def test_selective_recomputation_runs_op_by_op_and_says_so():
    found = plan(PlanRequest(mesh="dp_shard=8", recompute="selective"))
    assert found.job.kernels == "eager" and "recompute selective, op by op\n" in plan_heading(found)
    assert found.peak == plan(PlanRequest(mesh="dp_shard=8", recompute="selective", kernels="eager")).peak
    compiled = plan_heading(plan(PlanRequest(mesh="dp_shard=8")))
    assert "recompute nothing\n" in compiled and "op by op" not in compiled


def every(request: PlanRequest) -> dict[tuple[str, str], Plan | str]:
    """Return the plan of each mesh, asked for by name, or why there is none."""
    found: dict[tuple[str, str], Plan | str] = {}
    for mesh, recompute in candidates(request):
        try:
            found[str(mesh), recompute] = plan(
                PlanRequest(**{**vars(request), "mesh": str(mesh), "recompute": recompute})
            )
        except ValueError as error:
            found[str(mesh), recompute] = str(error)
    return found


@pytest.mark.parametrize("name", ("model", "recipe", "hardware"))
def test_an_unknown_name_is_no_reason_against_meshes(name):
    with pytest.raises(ValueError, match=f"^{name}='nope'"):
        plan(PlanRequest(gpus=8, **{name: "nope"}))


@pytest.mark.parametrize(
    "request_",
    [
        PlanRequest(model="llama3-8b", gpus=8, hardware="h100", sequences=2),
        PlanRequest(model="moe-1b", gpus=2, sequences=16),
    ],
    ids=lambda request: request.model,
)
def test_auto_is_the_fastest_of_all_that_fit(request_):
    found, all_ = plan(request_), every(request_)
    fitting = {key: p for key, p in all_.items() if isinstance(p, Plan) and p.fits}
    assert found.fits and (str(found.job.mesh), found.job.recompute) in fitting
    assert found.tokens_per_second == max(p.tokens_per_second for p in fitting.values())
    refused = {(mesh, recompute): why for mesh, recompute, why in found.refused}
    assert refused.keys() == all_.keys() - fitting.keys() and refused
    for key, why in refused.items():
        other = all_[key]
        if isinstance(other, str):
            assert why == other
        else:
            assert why.startswith(f"needs {other.peak.total / 2**30:,.0f} GiB of ") and other.peak.moment in why


def test_where_nothing_fits_the_mesh_that_needs_least_is_named():
    request = PlanRequest(model="llama3-70b", gpus=16, hardware="h100", recompute="full", sequences=64)
    all_ = {key: p for key, p in every(request).items() if isinstance(p, Plan)}
    least = min(all_, key=lambda key: all_[key].peak.total)
    assert least not in (next(iter(all_)), [*all_][-1])
    with pytest.raises(ValueError, match=f"; least is {least[0]}, recompute={least[1]}: needs "):
        plan(request)


def test_all_ways_of_splitting_are_tried():
    tried = list(candidates(PlanRequest(model="moe-1b", gpus=16)))
    sizes = {(m.dp_replicate, m.dp_shard, m.tp, m.ep) for m, _ in tried}
    assert {(1, 16, 1, 1), (1, 16, 1, 8), (16, 1, 1, 1), (2, 4, 2, 4), (1, 2, 8, 2)} <= sizes
    assert all(m.gpus == 16 and m.tp <= 8 and m.ep <= 8 for m, _ in tried) and len(set(tried)) == len(tried)
    assert {recompute for _, recompute in tried} == {"nothing", "full"}
    odd = {str(m) for m, _ in candidates(PlanRequest(model="llama3-8b", gpus=12))}
    assert odd == {"dp_shard=12", "dp_replicate=2,dp_shard=6", "dp_replicate=4,dp_shard=3"} | {
        "dp_shard=6,tp=2",
        "dp_replicate=2,dp_shard=3,tp=2",
        "dp_shard=3,tp=4",
    }


def test_json_holds_the_plan(capsys):
    command = [
        "plan",
        "--model",
        "moe-1b",
        "--gpus",
        "2",
        "--mesh",
        "dp_shard=2,ep=2",
        "--recipe",
        "nvfp4@all",
        "--json",
    ]
    assert cli.main(command) == 0
    said = json.loads(capsys.readouterr().out)
    found = plan(PlanRequest(model="moe-1b", gpus=2, mesh="dp_shard=2,ep=2", recipe="nvfp4@all"))
    assert said["peak_bytes"] == found.peak.total and said["step_seconds"] == found.step.total
    assert said["mesh"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "ep": 2} and said["fits"] is True
    assert sum(said["seconds"].values()) == pytest.approx(said["step_seconds"])
    assert said["tokens_per_second"] == pytest.approx(2 * 8192 / said["step_seconds"])
    assert {(c["what"], c["wire_bytes"]) for c in said["collectives"]} == {(c.what, c.wire) for c in found.collectives}
    assert said["computed"] == ["expert parallelism (docs/expert_parallel.md)"]
    assert said["assumptions"][:2] == [
        "In halfbyte and not measured yet, so computed: expert parallelism (docs/expert_parallel.md).",
        "Weights that expert parallelism shares are gathered in their values, not as codes.",
    ]
    assert any(line.startswith("Every expert gets equally many tokens") for line in said["assumptions"])


def test_tables_say_what_fits_and_what_does_not(capsys):
    command = ["plan", "--model", "llama3-8b", "--gpus", "8", "--mesh", "dp_shard=4,tp=2", "--hardware", "h100"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert cli.main(["plan", "--model", "llama3-8b", "--gpus", "8", "--hardware", "h100"]) == 0
    text += capsys.readouterr().out
    for part in (
        "Memory",
        "masters",
        "Collectives of a step",
        "all-gather",
        "Meshes left out",
        "fits;",
        "(computed)",
        "b200",
    ):
        assert (part in text) == (part != "b200"), part
    assert "No h100 was measured" in text and "ATTENTION_SHARE = 0.35" in text
    assert cli.main(["plan", "--model", "1b", "--gpus", "1", "--mesh", "dp_shard=1", "--sequences", "64"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_what_a_recipe_is_known_to_miss_is_said():
    said = {
        r: "such layers took up to 35 % longer" in _said(r) for r in ("nvfp4", "bf16", "nvfp4_forward", "nvfp4/bf16")
    }
    assert said == {"nvfp4": False, "bf16": False, "nvfp4_forward": True, "nvfp4/bf16": True}


def _said(recipe: str) -> str:
    return "\n".join(assumptions(job_of(PlanRequest(gpus=1, recipe=recipe), Mesh(), "nothing")))


def test_a_mistake_is_one_line(capsys):
    assert cli.main(["plan", "--gpus", "8", "--mesh", "tp=3"]) == 2
    assert capsys.readouterr().err.startswith(
        "halfbyte plan: mesh=tp=3: dp_replicate x dp_shard x tp = 3 GPUs, and gpus=8"
    )


def test_what_was_not_measured_is_told_and_what_travels_in_values():
    def of(mesh, **options):
        job = job_of(PlanRequest(gpus=mesh.gpus, recipe="nvfp4", **options), mesh, "nothing")
        return computed(job), [line for line in assumptions(job) if "in their values" in line]

    assert of(Mesh()) == ((), [])
    assert of(Mesh(dp_shard=2)) == ((), [])
    tensor, experts = (f"{kind} parallelism (docs/{kind}_parallel.md)" for kind in ("tensor", "expert"))
    said = "Weights that {} parallelism shares are gathered in their values, not as codes."
    assert of(Mesh(tp=2)) == ((tensor,), [])
    assert of(Mesh(dp_shard=2, tp=2)) == ((tensor,), [said.format("tensor")])
    assert of(Mesh(dp_shard=2, ep=2), model="moe-1b") == ((experts,), [said.format("expert")])
    assert of(Mesh(dp_shard=2, ep=2, tp=2), model="moe-1b") == ((tensor, experts), [said.format("tensor")])
    assert of(Mesh(dp_shard=2, ep=2), model="moe-1b", gather="bf16") == ((experts,), [])


def test_a_plan_with_tp_says_that_train_shares_less():
    for mesh, expected in ((Mesh(tp=2), 1), (Mesh(dp_shard=2, tp=2), 1), (Mesh(dp_shard=2), 0)):
        job = job_of(PlanRequest(gpus=mesh.gpus), mesh, "nothing")
        said = [
            line for line in assumptions(job) if "halfbyte train --tp shares the blocks' linear layers alone" in line
        ]
        assert len(said) == expected
