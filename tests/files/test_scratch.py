"""Temporary folders go with their object, or with the next run."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnxq.errors import OutputError
from onnxq.files import ScratchFolder
from onnxq.files.scratch import hold_lock, remove_stale_files


def test_a_scratch_folder_goes_with_its_object(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path)
    (folder.path / "inside").write_text("")
    assert os.name == "nt" or folder.path.stat().st_mode & 0o777 == 0o700
    del folder
    gc.collect()
    assert os.listdir(tmp_path) == []
    with ScratchFolder(tmp_path) as path:
        assert path.is_dir()
    assert os.listdir(tmp_path) == []


def test_no_place_for_scratch_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no temporary folder can be made there"):
        ScratchFolder(tmp_path / "none")


def test_a_folder_that_another_run_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the making of a folder and its lock, it looks like one of a run that was killed."""
    make, made = Path.mkdir, []

    def make_and_lose(self: Path, mode: int = 0o777) -> None:
        make(self, mode)
        made.append(self)
        if len(made) == 1:
            remove_stale_files(tmp_path)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with ScratchFolder(tmp_path) as path:
        assert [*tmp_path.glob("*.tmp")] == [path]
    # On Windows the lock is there first.
    assert len(made) == (1 if os.name == "nt" else 2)


# ---- Temporary files of killed runs are removed by the next one; those of living runs are not.

_HOLDS = """
import os, sys
from pathlib import Path
from onnxq.files import ScratchFolder, replace_files
with replace_files([Path(sys.argv[1]) / "out"]) as files, ScratchFolder(Path(sys.argv[1])) as folder:
    (folder / "inside").write_text("")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_run_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        assert len([*tmp_path.glob("*.tmp")]) == 2
        remove_stale_files(tmp_path)
        assert len([*tmp_path.glob("*.tmp")]) == 2
        child.kill()
        child.wait()
    assert len([*tmp_path.glob("*.tmp")]) == 2
    remove_stale_files(tmp_path)
    # Of files Windows does not tell whether somebody is about to rename them.
    assert [path for path in tmp_path.iterdir() if os.name != "nt" or path.is_dir()] == []


@pytest.mark.skipif(os.name == "nt", reason="links are for administrators there")
def test_only_our_own_names_are_ever_removed(tmp_path: Path) -> None:
    names = [".onnxq-0123.tmp", "onnxq-0123456789abcdef.tmp", ".onnxq-0123456789abcdef.tmp.bak", "m.onnx"]
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / ".onnxq-0123456789abcdef.tmp").symlink_to(tmp_path / "m.onnx")
    (tmp_path / ".onnxq-fedcba9876543210.tmp").write_text("")
    remove_stale_files(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, ".onnxq-0123456789abcdef.tmp"])


_WAITS = """
import sys, time
from pathlib import Path
from onnxq.files.scratch import hold_lock
with hold_lock(Path(sys.argv[1])):
    print("in", flush=True)
"""


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock(path):
        child = subprocess.Popen([sys.executable, "-c", _WAITS, str(path)], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            child.communicate(timeout=1)
    assert child.communicate(timeout=60)[0] == "in\n"


def test_where_nothing_can_be_locked_the_work_goes_on(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "none" / "lock"):
        pass
