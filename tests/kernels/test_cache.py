"""Built once, checked before every use, never loaded when wrong or stale."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxq.errors import OutputError
from onnxq.kernels import cache

KEY = {"kind": "test", "source": "1"}


def writer(text: str, count: list[int]) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        count.append(1)
        path.write_text(text)

    return build


def test_built_once_and_found_again_unless_forced(tmp_path: Path) -> None:
    count: list[int] = []
    first, second = (cache.fetch_entry(tmp_path, "lib{}.so", KEY, writer("code", count)) for _ in range(2))
    assert (first.fresh, second.fresh, len(count)) == (True, False, 1)
    assert first.path == second.path
    assert first.path.read_text() == "code"
    assert cache.find_entry(tmp_path, lambda key: key["source"] == "1") is not None
    assert cache.find_entry(tmp_path, lambda key: key["source"] == "2") is None
    assert cache.find_entry(tmp_path / "nowhere", lambda key: True) is None
    other = cache.fetch_entry(tmp_path, "lib{}.so", {**KEY, "source": "2"}, writer("other", []))
    assert other.path != first.path
    cache.fetch_entry(tmp_path, "lib{}.so", KEY, writer("code", count), force=True)
    assert len(count) == 2


def _swap(path: Path, **changes: object) -> None:
    note = path.with_name(f"{path.name}.json")
    note.write_text(json.dumps(json.loads(note.read_text()) | changes))


WRONG = {
    "changed": lambda path: path.write_text("other"),
    "cut short": lambda path: path.write_text("cod"),
    "gone": lambda path: path.unlink(),
    "no note": lambda path: path.with_name(f"{path.name}.json").unlink(),
    "torn note": lambda path: path.with_name(f"{path.name}.json").write_text('{"key": {"ki'),
    "strange note": lambda path: path.with_name(f"{path.name}.json").write_text("[1]"),
    "another's note": lambda path: _swap(path, key={**KEY, "source": "2"}),
    "no checksum": lambda path: _swap(path, sha256=None),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_does_not_fit_its_note_is_built_anew(tmp_path: Path, fault: str) -> None:
    count: list[int] = []
    path = cache.fetch_entry(tmp_path, "lib{}.so", KEY, writer("code", count)).path
    WRONG[fault](path)
    assert cache.find_entry(tmp_path, lambda key: key == KEY) is None
    again = cache.fetch_entry(tmp_path, "lib{}.so", KEY, writer("code", count))
    assert (again.fresh, again.path, again.path.read_text(), len(count)) == (True, path, "code", 2)
    assert not cache.fetch_entry(tmp_path, "lib{}.so", KEY, writer("code", count)).fresh


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("compiler died")

    with pytest.raises(RuntimeError, match="compiler died"):
        cache.fetch_entry(tmp_path, "lib{}.so", KEY, build)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert cache.fetch_entry(tmp_path, "lib{}.so", KEY, writer("code", [])).fresh


CHILD = """
import sys, time
from pathlib import Path
from onnxq.kernels import cache
place = Path(sys.argv[1])
def build(path):
    (place / f"built-{time.monotonic_ns()}").touch()
    time.sleep(0.3)
    path.write_text("code")
print(cache.fetch_entry(place, "lib{}.so", {"k": "v"}, build).path.read_text())
"""


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    many = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [one.communicate(timeout=60)[0] for one in many] == ["code\n"] * 4
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONNXQ_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.find_cache() == tmp_path / ".cache" / "onnxq"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.find_cache() == Path("/x/onnxq")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache.find_cache() == tmp_path / ".cache" / "onnxq"
    monkeypatch.setenv("ONNXQ_CACHE", "/y")
    assert cache.find_cache() == Path("/y")


def test_a_folder_that_others_may_write_to_and_one_that_cannot_be_made_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONNXQ_CACHE", str(tmp_path))
    place = cache.kernels_folder()
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    with pytest.raises(OutputError, match=r"others may write.*\[Q605\]"):
        cache.kernels_folder()
    place.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(place, 12345, -1)
        with pytest.raises(OutputError, match="others may write"):
            cache.kernels_folder()
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONNXQ_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError, match="ONNXQ_CACHE"):
        cache.kernels_folder()
