"""`halfbyte` without arguments: what it says of machines that are not here, and of this one."""

import pytest

from halfbyte import cli, welcome
from halfbyte.welcome import Here

CPU = Here(gpu="", backends=("reference",), missing=(), is_checkout=True, comparison="")
H100 = CPU._replace(gpu="NVIDIA H100", backends=("reference", "triton"))
LARGER = {
    "halfbyte compare --preset one_gpu --out runs/one_gpu",
    "halfbyte bench --quick",
    "halfbyte explain 8192x4096 nvfp4 nvfp4",
}


def commands(here: Here) -> list[str]:
    """Return the commands that are offered."""
    listed = welcome.welcome_text(here).split("What you can do here:\n\n")[1].split("\n\n")[0]
    return [line.split("  ")[1] for line in listed.splitlines()]


def test_a_cpu_is_offered_what_takes_minutes():
    assert "no GPU is visible" in welcome.welcome_text(CPU) and "halfbyte compare" in commands(CPU)
    assert not [command for command in commands(CPU) if "one_gpu" in command or "bench" in command]


def test_a_gpu_is_offered_the_larger_study_and_speeds():
    text = welcome.welcome_text(H100)
    assert "NVIDIA H100: Triton kernels; GEMMs are emulated exactly" in text and "every kernel against" in text
    assert not LARGER - set(commands(H100))
    assert "halfbyte bench --quick" not in commands(H100._replace(is_checkout=False))
    native = H100._replace(gpu="NVIDIA B200", backends=(*H100.backends, "native"))
    assert "NVIDIA B200: GEMMs on FP4 tensor cores" in welcome.welcome_text(native)


def test_a_gpu_without_kernels_is_told_so():
    old = CPU._replace(gpu="Tesla T4")
    assert "Tesla T4: the reference runs" in welcome.welcome_text(old) and commands(old) == commands(CPU)


def test_missing_packages_are_named_first():
    bare = H100._replace(missing=("rich", "tyro"))
    assert commands(bare)[0] == "pip install 'halfbyte[train]'" and "rich, tyro is missing" in welcome.welcome_text(
        bare
    )
    assert not [
        command
        for command in commands(bare)
        if command.startswith(("halfbyte train", "halfbyte compare", "halfbyte plan"))
    ]


@pytest.mark.parametrize(("files", "said"), [([], "five recipes"), (["bf16"], "goes on"), (["losses.png"], "shows")])
def test_a_comparison_that_lies_about_is_noticed(tmp_path, monkeypatch, files, said):
    monkeypatch.chdir(tmp_path)
    for name in files:
        (tmp_path / "runs" / "compare" / name).mkdir(parents=True)
    assert said in welcome.welcome_text(welcome.look())


def test_the_command_says_it_of_this_machine(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert "What you can do here" in text and max(map(len, text.splitlines())) <= 120
    named = {line.split()[1] for line in text.splitlines() if line.startswith("  halfbyte ")}
    assert named and named <= set(cli.COMMANDS)
