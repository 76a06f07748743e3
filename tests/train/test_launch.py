"""What a launcher says of a process, what a mesh makes of its processes, and what is refused before any is joined."""

from dataclasses import replace

import pytest

from halfbyte import cli
from halfbyte.train import auto, config, environment, launch

pytest.importorskip("tyro")
LAUNCHED = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def launcher(monkeypatch):
    def say(**changes):
        for name, value in (LAUNCHED | changes).items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return say


def test_a_process_learns_its_place(launcher):
    launcher()
    assert launch.launched() == launch.ProcessPlace(rank=3, size=4, local_rank=1)


@pytest.mark.parametrize("size", ["1", "", "all", None])
def test_one_process_is_alone(launcher, size):
    launcher(WORLD_SIZE=size)
    assert launch.launched() == launch.ProcessPlace(rank=0, size=1, local_rank=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"RANK": None, "MASTER_PORT": " "},
            "WORLD_SIZE=4 without RANK, MASTER_PORT: start .* torchrun --nproc-per-node 4",
        ),
        ({"RANK": "two"}, "RANK='two': give the number"),
        ({"RANK": "4"}, "RANK=4, LOCAL_RANK=1, WORLD_SIZE=4: no rank of so many"),
        ({"RANK": "0"}, "RANK=0, LOCAL_RANK=1, WORLD_SIZE=4: no rank of so many"),
    ],
)
def test_nonsense_is_refused(launcher, changes, message):
    launcher(**changes)
    with pytest.raises(ValueError, match=message):
        launch.launched()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_launcher_that_says_too_little_gets_one_line(launcher, capsys, tmp_path, command):
    launcher(LOCAL_RANK=None)
    assert cli.main([command, "--corpus", "/absent", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"halfbyte {command}: WORLD_SIZE=4 without LOCAL_RANK") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_one_process_of_a_launcher_trains(folder, launcher):
    launcher(WORLD_SIZE="1")
    command = ["train", "--preset", "tiny", "--steps", "1", "--recipe", "bf16", "--corpus", str(folder / "corpus")]
    assert cli.main([*command, "--out", str(folder / "run"), "--cache", str(folder / "cache")]) == 0
    assert (folder / "run" / "result.json").exists()


def test_codes_that_nobody_would_gather_are_refused_before_anything_is_made(folder, tmp_path, capsys):
    command = ["train", "--preset", "tiny", "--corpus", str(folder / "corpus"), "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--weights", "nvfp4"]) == 2
    assert "weights='nvfp4': one process has whole weights, and none travel" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "asked, ranks, found",
    [((1, None), 1, (1, 1)), ((1, None), 4, (1, 4)), ((2, None), 8, (2, 4)), ((4, 2), 8, (4, 2)), ((4, 1), 4, (4, 1))],
)
def test_the_mesh_of_so_many_ranks(asked, ranks, found):
    mesh = config.MeshConfig(dp_shard=asked[0], dp_replicate=asked[1]).over(ranks)
    assert (mesh.dp_shard, mesh.dp_replicate) == found and mesh.size == ranks


@pytest.mark.parametrize(
    "mesh, ranks, message",
    [
        (
            {"dp_shard": 2},
            1,
            "dp_shard=2: the mesh has 2 ranks, and 1 runs; start torchrun --nproc-per-node 2 -m halfbyte",
        ),
        ({"dp_shard": 3}, 4, "dp_shard=3: the mesh has 3 ranks, and 4 run; .* whose product is 4"),
        ({"dp_shard": 2, "dp_replicate": 3}, 4, "dp_shard=2, dp_replicate=3: the mesh has 6 ranks, and 4 run"),
        ({"dp_shard": 8}, 4, "dp_shard=8: the mesh has 8 ranks"),
    ],
)
def test_a_mesh_that_ranks_do_not_fill(mesh, ranks, message):
    with pytest.raises(ValueError, match=message):
        config.MeshConfig(**mesh).over(ranks)


@pytest.mark.parametrize(
    "mesh, message",
    [
        ({"dp_shard": 0}, "dp_shard=0: give a number above 0"),
        ({"dp_replicate": -1}, "dp_replicate=-1: give a number above 0"),
        ({"weights": "fp4"}, "weights='fp4': give 'plain' or 'nvfp4'"),
        ({"tp": 2, "dp_replicate": 2}, "dp_replicate=2: tp=2 goes with FSDP2, not with DDP; give --dp-shard"),
    ],
)
def test_a_mesh_of_nonsense(mesh, message):
    with pytest.raises(ValueError, match=message):
        config.MeshConfig(**mesh)


def test_what_ranks_cannot_share_is_refused():
    tiny, mesh = config.tiny(), config.MeshConfig(dp_shard=2, dp_replicate=2)
    said = r"batch=6: 4 ranks \(dp_shard=2 x dp_replicate=2\) cannot share it; give a multiple, such as 4"
    with pytest.raises(ValueError, match=said):
        replace(tiny, mesh=mesh, data=replace(tiny.data, batch=6))
    with pytest.raises(ValueError, match="batch=6: 4 ranks cannot share it; give a multiple, such as 4"):
        replace(tiny, mesh=config.MeshConfig(dp_shard=4), data=replace(tiny.data, batch=6))
    with pytest.raises(ValueError, match="graph='on': 4 ranks step together"):
        replace(tiny, mesh=mesh, run=replace(tiny.run, graph="on"))
    with pytest.raises(ValueError, match="cache_weights=True with dp_shard=2: .* use --dp-shard 1"):
        replace(tiny, mesh=mesh, run=replace(tiny.run, cache_weights=True))


def test_several_ranks_have_no_graph_and_say_so():
    settled = replace(config.tiny(), mesh=config.MeshConfig(dp_shard=2), optim=config.OptimConfig(steps=1000))
    facts = auto.Facts(device="cuda")
    choices = auto.choose_options(settled, facts, {})
    assert [option for option, choice in choices.items() if choice.is_on] == ["fuse", "compile"]
    assert auto.lines(settled, facts, choices) == (
        "graph: off, 2 ranks step together, and graphs with their communication are not captured; one process alone "
        "has it",
    )


def test_another_mesh_than_before_is_said():
    one, two = {"torch": "2.13"}, {"torch": "2.13", "mesh": "dp_replicate=2, dp_shard=1"}
    assert environment.changes([one], one) == environment.changes([two], two) == ""
    assert environment.changes([two], one) == "mesh dp_replicate=2, dp_shard=1 there, 1 process here"
    assert environment.changes([one], two) == "mesh 1 process there, dp_replicate=2, dp_shard=1 here"


def test_a_mesh_is_no_part_of_what_decides_a_run():
    one, four = (replace(config.tiny(), mesh=config.MeshConfig(dp_shard=n)) for n in (1, 4))
    assert one.identity("nvfp4") == four.identity("nvfp4") and "mesh" not in one.identity("nvfp4")


def test_shards_without_a_launcher_are_refused_in_one_line(folder, capsys):
    command = ["train", "--preset", "tiny", "--dp-shard", "2", "--corpus", str(folder / "corpus")]
    assert cli.main([*command, "--out", str(folder / "run"), "--cache", str(folder / "cache")]) == 2
    error = capsys.readouterr().err
    assert "dp_shard=2: the mesh has 2 ranks, and 1 runs; start torchrun --nproc-per-node 2" in error
    assert error.count("\n") == 1 and not (folder / "run").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--dp-replicate", "3"], "dp_shard=1, dp_replicate=3: the mesh has 3 ranks, and 1 runs; start torchrun"),
        (["--dp_shard=2", "--dp-replicate=3"], "dp_shard=2, dp_replicate=3: the mesh has 6 ranks, and 1 runs; start"),
        (["--dp-shard", "3", "--graph", "on"], "dp_shard=3: the mesh has 3 ranks, and 1 runs; start torchrun"),
        (["--batch", "0", "--tp", "1"], "batch=0: give a number above 0"),
    ],
)
def test_a_mesh_that_ranks_do_not_fill_is_said_before_what_it_asks_of_a_batch(folder, capsys, options, said):
    command = ["train", "--preset", "tiny", "--corpus", str(folder / "corpus"), "--out", str(folder / "unfilled")]
    assert cli.main([*command, "--batch", "4", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"halfbyte train: {said}") and error.count("\n") == 1
    assert not (folder / "unfilled").exists()
