"""An export that is killed leaves no folder of its name."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

from halfbyte.export import write


def test_a_kill_leaves_no_folder_of_that_name(tmp_path):
    """Killed with everything written but the name: what lies there is hidden, and a second export is not in its way."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from halfbyte.export import write
        write._to_disk = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
        with write.new_folder(Path(sys.argv[1])) as folder:
            (folder / "model.safetensors").write_bytes(bytes(100))
    """
    target = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.name.endswith(".partial")
    with write.new_folder(target) as folder:
        (folder / "file").write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {left.name, "out"}
