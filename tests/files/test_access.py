"""Where outputs may go: found out before the work, inputs never among them, nothing replaced that is no file."""

import os
import threading
from pathlib import Path

import pytest

from onnxq.errors import DataError, OutputError
from onnxq.files import (
    check_outputs,
    guard_outputs,
    prepare_folder,
    read_input,
    register_input,
    replace_files,
    scratch,
    write_text,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, devices and pipes")


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_no_output_is_an_input_by_any_name(tmp_path: Path, link) -> None:
    """Told when the input is read, whoever reads it and whenever."""
    given, out = tmp_path / "in.npz", tmp_path / "in.npz"
    given.write_text("precious")
    if link is not None:
        out = tmp_path / "out.onnx"
        link(given, out)
    with pytest.raises(OutputError, match="is read by this command"), guard_outputs("", out, force=True):
        read_input(given, DataError, limit=100)
    with guard_outputs("", out, force=True):
        (tmp_path / "other").write_text("")
        register_input(tmp_path / "other")
    register_input(given)  # no command runs
    with pytest.raises(OutputError, match="is the input model"):
        check_outputs(given, out, force=True)
    assert given.read_text() == "precious"


def test_what_a_command_has_read_is_not_written_over_under_a_name_found_late(tmp_path: Path) -> None:
    weights = tmp_path / "q.onnx_data"
    weights.write_text("precious")
    with guard_outputs("", tmp_path / "q.onnx", force=True):
        register_input(weights)
        with (
            pytest.raises(OutputError, match="is an input"),
            replace_files([tmp_path / "q.onnx", weights], overwrite=True),
        ):
            pass
    assert weights.read_text() == "precious"


def test_guards_inside_each_other_all_hold(tmp_path: Path) -> None:
    outer, given = tmp_path / "outer", tmp_path / "given"
    outer.write_text("")
    given.write_text("")
    with guard_outputs("", outer, force=True), guard_outputs("", tmp_path / "inner"):
        register_input(given)
        with pytest.raises(OutputError):
            register_input(outer)


@pytest.mark.parametrize("folder", ["/proc", "/sys", "/proc/self/fd"])
def test_a_folder_that_takes_no_files_is_told_before_the_work(folder: str) -> None:
    """For root too, who may write to every folder that can be written at all."""
    if not Path(folder).is_dir():
        pytest.skip(f"no {folder}")
    with pytest.raises(OutputError, match="no file can be made in its folder"):
        check_outputs("", Path(folder) / "q.onnx")


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 255)
    check_outputs("", longest)
    write_text(longest, "text")
    assert longest.read_text() == "text"
    with pytest.raises(OutputError, match="File name too long"):
        check_outputs("", tmp_path / ("n" * 256))
    with pytest.raises(OutputError, match="null"):
        check_outputs("", tmp_path / "a\0b")


def test_every_fault_of_a_place_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    for name, said in (
        ("none/q.onnx", "there is no folder"),
        ("file/q.onnx", "is not a folder"),
        (".", "is a folder"),
        ("file", "exists"),
        ("dangling", "exists"),
    ):
        with pytest.raises(OutputError, match=said):
            check_outputs("", tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]


def test_standard_streams_and_block_devices_are_refused(tmp_path: Path) -> None:
    os.symlink("/dev/stdout", tmp_path / "mine")
    for path in ("/dev/stdout", "/dev/fd/2", "/proc/self/fd/1", tmp_path / "mine"):
        with pytest.raises(OutputError, match="standard stream"):
            check_outputs("", path, force=True)
    if os.geteuid() == 0:
        try:
            os.mknod(tmp_path / "disk", 0o600 | 0o060000, os.makedev(259, 999))
        except OSError:
            return  # a container without the right to make devices
        with pytest.raises(OutputError, match="is a block device"):
            check_outputs("", tmp_path / "disk", force=True)


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with prepare_folder(tmp_path / "new", ["a"]):
        pass
    assert os.listdir(tmp_path) == []
    with prepare_folder(tmp_path / "new", ["a"]):
        (tmp_path / "new" / "a").write_text("")
    assert os.listdir(tmp_path / "new") == ["a"]
    with pytest.raises(OutputError, match="is read by this command"), prepare_folder(tmp_path / "new", ["a"]):
        register_input(tmp_path / "new" / "a")


def test_commands_look_beside_outputs_and_in_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    for folder in (out, temporary):
        (folder / ".onnxq-0123456789abcdef.tmp").mkdir(parents=True)
        (folder / ".onnxq-0123456789abcdef.tmp" / "inside").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(scratch, "_looked_through", set())
    with guard_outputs("", out / "q.onnx"):
        assert (os.listdir(out), os.listdir(temporary)) == ([], [])


@pytest.mark.parametrize("name", ["-", "new/", f"new{os.sep}"])
def test_text_that_names_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They became files named "-" and "new"."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError) as caught:
        check_outputs("", "a.onnx", name)
    assert (caught.value.code, caught.value.subject) == ("Q603", name)
    check_outputs("", "./-", "-a", Path("-b"))


# ---- Files are replaced whole or not at all; devices and pipes are written directly.


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


def test_between_two_files_the_referring_one_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed there leaves no model beside the weights of another."""
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
