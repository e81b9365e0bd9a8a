"""Files are replaced whole or not at all; devices and pipes are written directly."""

import os
import threading
from pathlib import Path

import pytest

from onnxq.errors import OutputError
from onnxq.files import check_outputs, replace_files, write_text

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, devices and pipes")


def test_devices_are_written_through_and_stay_what_they_are() -> None:
    check_outputs("", "/dev/null")
    write_text(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_told() -> None:
    with pytest.raises(OutputError, match="no room left"):
        write_text(Path("/dev/full"), "text")


def test_a_pipe_gets_the_bytes_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    check_outputs("", pipe)
    write_text(pipe, "text")
    reader.join()
    assert got == [b"text"]
    assert pipe.is_fifo()


def test_several_files_are_exchanged_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [tmp_path / "q.onnx", tmp_path / "q.onnx_data"]
    for target in targets:
        target.write_bytes(b"before")
    real = os.replace

    def write() -> None:
        with replace_files(targets, overwrite=True) as files:
            for file in files:
                file.write(b"after")

    for fails in range(1, 5):
        left = fails

        def broken(source: Path, target: Path) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(5, "Input/output error")
            real(source, target)

        monkeypatch.setattr(os, "replace", broken)
        with pytest.raises(OutputError, match="Input/output error"):
            write()
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
            target.name: b"before" for target in targets
        }
    monkeypatch.undo()
    write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        target.name: b"after" for target in targets
    }


def test_between_two_files_the_one_that_refers_to_the_other_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed there, no model is left beside the weights of another."""
    model, weights = targets = [tmp_path / "q.onnx", tmp_path / "q.onnx_data"]
    for target in targets:
        target.write_bytes(b"before")
    seen, real = [], os.replace

    def watched(source: Path, target: Path) -> None:
        real(source, target)
        seen.append((model.exists() and model.read_bytes(), weights.exists() and weights.read_bytes()))

    monkeypatch.setattr(os, "replace", watched)
    with replace_files(targets, overwrite=True) as files:
        for file in files:
            file.write(b"after")
    assert (b"before", b"after") not in seen
    assert (b"after", b"before") not in seen
    assert seen[-1] == (b"after", b"after")
