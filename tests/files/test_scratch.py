"""Temporary folders go with their object, or with the next run."""

import gc
import os
from pathlib import Path

import pytest

from onnxq.errors import OutputError
from onnxq.files import ScratchFolder
from onnxq.files.scratch import remove_stale_files

pytestmark = pytest.mark.skipif(os.name == "nt", reason="locks")


def test_a_scratch_folder_goes_with_its_object(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path)
    (folder.path / "inside").write_text("")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    del folder
    gc.collect()
    assert os.listdir(tmp_path) == []
    with ScratchFolder(tmp_path) as path:
        assert path.is_dir()
    assert os.listdir(tmp_path) == []


def test_no_place_for_scratch_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no temporary folder can be made there"):
        ScratchFolder(tmp_path / "none")


def test_a_folder_that_another_run_takes_for_stale_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a folder and its lock, it looks like one of a run that was killed."""
    make, made = Path.mkdir, []

    def make_and_lose(self: Path, mode: int = 0o777) -> None:
        make(self, mode)
        made.append(self)
        if len(made) == 1:
            remove_stale_files(tmp_path)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with ScratchFolder(tmp_path) as path:
        assert os.listdir(tmp_path) == [path.name]
    assert len(made) == 2
