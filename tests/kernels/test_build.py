"""Finding sources and compilers, building with each, and what is said where one is missing."""

import ctypes
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnxq.errors import ConfigError, MissingDependencyError, OutputError
from onnxq.kernels import KernelCall, cache, device, device_image, host, host_library, host_reason, load_host, sources
from onnxq.kernels.device import Nvrtc, find_nvrtc
from tests.cli.kit import run
from tests.kernels.conftest import GXX

ARCHS = (75, 80, 86, 89, 90, 100, 120)
KERNELS = [f"fq_{name}_{kind}" for name in ("forward", "dx", "rows", "cols") for kind in ("f32", "f16", "bf16", "f64")]

needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    device.find_nvcc.cache_clear()
    host._find_library.cache_clear()
    yield
    device.find_nvcc.cache_clear()
    host._find_library.cache_clear()


@pytest.fixture
def no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("ONNXQ_NVCC", "no-such-nvcc")
    for module in ("device", "build"):
        monkeypatch.setattr(f"onnxq.kernels.{module}.find_nvrtc", lambda extra=(): None)


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ONNXQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def write_script(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_gxx
def test_the_host_library_is_built_once_and_speaks_this_interface(own_cache: Path) -> None:
    library = load_host()
    assert host_reason() == ""
    assert library.fq_cpu_abi() == ctypes.sizeof(KernelCall)
    assert library.fq_cpu_forward(ctypes.byref(KernelCall(dtype=9))) == -1
    host._find_library.cache_clear()
    before = host_library().stat().st_mtime_ns
    assert not host.build_host().fresh
    assert host_library().stat().st_mtime_ns == before


@needs_gxx
def test_a_damaged_library_is_never_loaded(fresh_cache: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = host.build_host(own_cache).path
    monkeypatch.setenv("ONNXQ_CACHE", str(fresh_cache.parent))
    place = cache.kernels_folder()
    for path in (good, good.with_name(f"{good.name}.json")):
        shutil.copy(path, place)
    (place / good.name).write_bytes(good.read_bytes()[:5000])
    # No compiler to build it anew with: rather none.
    monkeypatch.setenv("CXX", "no-such-compiler")
    host._find_library.cache_clear()
    assert host_library() is None
    shutil.copy(good, place)
    host._find_library.cache_clear()
    assert host_library() == place / good.name


@pytest.mark.usefixtures("no_compilers", "fresh_cache")
def test_without_a_compiler_there_is_a_reason_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert host_library() is None
    assert load_host() is None
    assert "no C++ compiler (no-such-compiler)" in host_reason()
    assert "apt install g++" in host_reason()
    assert "compiling" not in caplog.text
    with pytest.raises(MissingDependencyError, match=r"sm_90.*\[Q808\]\n.*nvidia-cuda-nvrtc.*build-kernels"):
        device_image("sm_90")
    done = run("build-kernels")
    assert done.exit_code == 1
    assert "no-such-compiler" in done.output
    assert run("build-kernels", "--arch", "ninety").exit_code == 1
    (tmp_path / "file").touch()
    assert "choose another folder" in run("build-kernels", "-o", tmp_path / "file" / "x").output
    # Of no cache that can be written, either; which is said once.
    cache._replace_folder.cache_clear()
    monkeypatch.setenv("ONNXQ_CACHE", str(tmp_path / "file" / "x"))
    with pytest.raises(MissingDependencyError, match="Q808"):
        device_image("sm_90")
    assert "kernels go to" in caplog.text


@pytest.mark.usefixtures("fresh_cache")
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = write_script(tmp_path / "cxx", "case $1 in --version) echo cxx 1;; *) echo it broke >&2; exit 3;; esac")
    monkeypatch.setenv("CXX", str(bad))
    assert host_library() is None
    assert "it broke" in host_reason()


@needs_gxx
@pytest.mark.parametrize("noexec", [False, True])
def test_a_cache_that_cannot_be_used_is_replaced_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, noexec: bool
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONNXQ_CACHE", str(tmp_path / ("" if noexec else "file") / "cache"))
    if noexec:
        # Only root could mount such a folder.
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "cxx", f'exec {GXX} "$@" -O0')))
    # The wheel's own library would do.
    monkeypatch.setattr(host, "_runs_here", lambda key: False)
    host._find_library.cache_clear()
    with caplog.at_level(logging.WARNING, "onnxq"):
        found = host_library()
    assert found.parent.parent == Path(tempfile.gettempdir())
    assert "for this process alone" in caplog.text
    assert "set ONNXQ_CACHE to a folder of yours" in caplog.text
    assert "compiling the CPU kernels" in caplog.text


def test_the_key_tells_machines_and_compilers_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = []

    def fetch(place: Path, name: str, key: cache.Key, build: object, *, force: bool = False) -> cache.CacheEntry:
        keys.append(dict(key))
        return cache.CacheEntry(tmp_path, key)

    monkeypatch.setattr(cache, "fetch_entry", fetch)
    monkeypatch.setattr(host, "_find_compiler", lambda: ("g++", "g++ 12"))
    host.build_host(tmp_path)
    monkeypatch.setattr(host, "_find_compiler", lambda: ("g++", "g++ 13"))
    host.build_host(tmp_path)
    monkeypatch.setattr(host, "_read_features", lambda: frozenset({"another"}))
    host._hash_cpu.cache_clear()
    host.build_host(tmp_path)
    # What a wheel brings runs on any processor of its level, as long as the sources are its own.
    monkeypatch.setattr(host, "_read_features", lambda: host._V3)
    host.build_host(tmp_path, march=host.portable_march())
    assert host._runs_here(keys[-1])
    monkeypatch.setattr(sources, "hash_sources", lambda names: "changed")
    assert not host._runs_here(keys[-1])
    host.build_host(tmp_path)
    host._hash_cpu.cache_clear()
    assert len({json.dumps(key) for key in keys}) == 5


def _nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    return found


def test_the_newest_nvrtc_comes_first_whatever_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wheel, version in (("cuda_nvrtc", "12"), ("cu13", "13"), ("cu13", "13.alt.")):
        library = tmp_path / "nvidia" / wheel / device._FOLDERS[0] / device._LIBRARY.replace("*", version)
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    first = [path.relative_to(tmp_path).parts[1] for path in islice(device._list_candidates(()), 2)]
    assert first == ["cu13", "cuda_nvrtc"]


def test_nvrtc_compiles_without_a_driver_for_the_command_too(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_find_prebuilt", lambda number: None)
    monkeypatch.setenv("ONNXQ_NVCC", "no-such-nvcc")
    compiler = _nvrtc()
    # Generations without and with bfloat16.
    for arch in (75, 90):
        image = device_image(f"sm_{arch}")
        assert image.data.startswith(b"\x7fELF")
        assert compiler.version in image.origin
        assert all(name.encode() in image.data for name in [*KERNELS, "fq_finish_f32", "fq_finish_f64"])
        start = next(own_cache.glob(f"fq-sm_{arch}-*.cubin")).stat().st_mtime_ns
        assert device_image(f"{arch // 10}.{arch % 10}") == image
        assert next(own_cache.glob(f"fq-sm_{arch}-*.cubin")).stat().st_mtime_ns == start
    done = run("build-kernels", "--arch", "sm_90")
    assert done.exit_code == 0
    assert "NVRTC" in done.output


def test_a_gpu_newer_than_nvrtc_gets_ptx(own_cache: Path) -> None:
    compiler = _nvrtc()
    assert b".entry k" in compiler.compile_source("k.cu", 'extern "C" __global__ void k() {}', {}, 990)
    with pytest.raises(MissingDependencyError, match=r"NVRTC .* compiles for"):
        compiler.compile_source("k.cu", "", {}, 10)
    with pytest.raises(MissingDependencyError, match=r"undefined_thing"):
        compiler.compile_source("k.cu", "undefined_thing;", {}, 90)


@pytest.mark.slow
def test_nvcc_compiles_for_the_oldest_and_the_newest_gpus(own_cache: Path) -> None:
    try:
        _, version, known = device.find_nvcc()
    except MissingDependencyError as error:
        pytest.skip(error.cause)
    # The sources tell apart GPUs with and without bfloat16: before generation 80, and from there on.
    generations = [one for one in ARCHS if one in known]
    entry = device.build_fatbin((generations[0], generations[-1]))
    data = entry.path.read_bytes()
    assert data[:4] == b"\x50\xed\x55\xba"
    assert version == entry.key["compiler"]
    # A later minor number of the same generation runs it, another generation does not.
    assert device_image(f"sm_{generations[-1] + 1}").data == data
    assert device._find_prebuilt(generations[0]) is not None
    assert device._find_prebuilt(70) is None
    with pytest.raises(ConfigError, match="knows"):
        device.build_fatbin((3,))


def test_architectures_are_read_as_people_write_them() -> None:
    for text in ("sm_90", "9.0", "90", "compute_90", "sm_90a", " 90 "):
        assert device.arch_number(text) == 90
    assert device.arch_number("12.0") == device.arch_number("sm_120") == 120
    for text in ("", "x", "9", "ninety", "9.0.1"):
        with pytest.raises(ConfigError, match="sm_90"):
            device.arch_number(text)


@needs_gxx
def test_the_command_tells_what_it_built(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXQ_NVCC", "no-such-nvcc")
    monkeypatch.setattr("onnxq.kernels.build.find_nvrtc", lambda extra=(): None)
    device.find_nvcc.cache_clear()
    path = host.build_host().path
    table = run("build-kernels")
    assert table.exit_code == 0
    assert str(path) in table.output
    assert "there" in table.output
    assert "no CUDA kernels: there is no no-such-nvcc" in table.output
    document = json.loads(run("build-kernels", "--json").stdout)
    assert [one["state"] for one in document["kernels"]] == ["there", "missing"]
    assert document["kernels"][0]["path"] == str(path)
    asked = run("build-kernels", "--arch", "9.0")
    assert asked.exit_code == 1
    assert "no-such-nvcc" in asked.output
    assert str(path) not in run("build-kernels", "-q").output


# ---- Built once, checked before every use, never loaded when wrong or stale.

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


def test_a_folder_open_to_others_or_impossible_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    # The home folder of a user without one.
    for impossible in (tmp_path / "file" / "cache", "~no-such-user/cache"):
        monkeypatch.setenv("ONNXQ_CACHE", str(impossible))
        with pytest.raises(OutputError, match="ONNXQ_CACHE"):
            cache.kernels_folder()
