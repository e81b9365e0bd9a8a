"""Large compressed arrays are unpacked by rows, and checked as far as they are read."""

import io
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from onnxq.config import DataConfig
from onnxq.data import arrays as arrays_module
from onnxq.data import load_data
from onnxq.data.arrays import DeflatedArray, ScatteredArray, load_npz
from onnxq.data.dataset import Unchosen
from onnxq.errors import DataError
from onnxq.graph import ValueInfo

X = ValueInfo("x", 1, ("N", 3))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if 64 MiB were 1 KiB."""
    monkeypatch.setattr(arrays_module, "_IN_MEMORY", 2**10)
    monkeypatch.setattr(arrays_module, "_BLOCK_BYTES", 2**9)


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_a_large_compressed_array_in_any_order(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((300, 7)).astype(np.float32)
    np.savez_compressed(tmp_path / "a.npz", x=values, y=values.T)
    for name, whole in (("x", values), ("y", values.T)):
        for order in (range(len(whole)), reversed(range(len(whole))), np.random.default_rng(1).permutation(len(whole))):
            array = load_npz(tmp_path / "a.npz")[name]
            assert (array.shape, array.dtype) == (whole.shape, whole.dtype)
            for k in map(int, order):
                np.testing.assert_array_equal(array[k], whole[k])
            np.testing.assert_array_equal(array[3:9], whole[3:9])
            np.testing.assert_array_equal(np.asarray(array), whole)
    assert isinstance(load_npz(tmp_path / "a.npz")["x"], DeflatedArray)


@pytest.mark.usefixtures("small_blocks")
def test_a_large_compressed_array_is_checked_as_far_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).standard_normal((5000, 3)).astype(np.float32))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        crc = struct.pack("<I", archive.getinfo("x.npy").CRC)
    path.write_bytes(whole.replace(crc, bytes(byte ^ 255 for byte in crc)))
    with pytest.raises(DataError, match=r"a\.npz, array 'x': is damaged \(its checksum is wrong\)"):
        list(load_data(path, [X]).samples())
    middle = bytearray(whole)
    middle[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)
    path.write_bytes(middle)
    with pytest.raises(DataError, match="array 'x': is damaged"):
        list(load_data(path, [X]).samples())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_of_a_large_array_only_the_samples_that_are_wanted_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save
) -> None:
    """36 MB, of which 8 samples of 1.2 kB are wanted; as if 64 MiB were 1 MiB."""
    monkeypatch.setattr(arrays_module, "_IN_MEMORY", 2**20)
    values = np.zeros((30_000, 300), np.float32)
    values[:, 0] = np.arange(len(values))
    save(tmp_path / "a.npz", x=values)
    del values
    wide = ValueInfo("x", 1, ("N", 300))
    tracemalloc.start()
    dataset = load_data(tmp_path / "a.npz", [wide], DataConfig(samples=8))
    firsts = [float(sample["x"][0, 0]) for sample in dataset.samples()]
    assert firsts == [float(sample["x"][0, 0]) for sample in dataset.samples()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(firsts)) == 8
    assert peak < 12e6


def write_zeros(path: Path, head: bytes, count: int, kind: int = zipfile.ZIP_DEFLATED) -> None:
    """An archive of a few kilobytes: one member of a head and `count` zeros."""
    with zipfile.ZipFile(path, "w", kind, compresslevel=1) as archive, archive.open("x.npy", "w") as member:
        member.write(head)
        for _ in range(0, count, 2**20):
            member.write(bytes(2**20))


def measure_peak(path: Path) -> tuple[int, str]:
    """The most bytes held while two samples of the archive are read, and the error, if any."""
    error = ""
    tracemalloc.start()
    try:
        dataset = load_data(path, [ValueInfo("x", 2, ("N", 1))], DataConfig(samples=2))
        assert len(list(dataset.samples())) == 2
    except DataError as refused:
        error = str(refused)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, error


def test_a_few_kilobytes_never_take_hundreds_of_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of rows, of which two are wanted; a header that goes on for ever; a block that is one of zeros."""
    monkeypatch.setattr(arrays_module, "_IN_MEMORY", 2**20)
    path, count = tmp_path / "a.npz", 16 * 2**20
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (count, 1)})
    write_zeros(path, head.getvalue(), count)
    peak, error = measure_peak(path)
    assert (peak < 24e6, error) == (True, "")
    write_zeros(path, npy.magic(2, 0) + struct.pack("<I", count), count)
    peak, error = measure_peak(path)
    assert peak < 8e6
    assert "its header says that it is 16777216 bytes long" in error
    write_zeros(path, head.getvalue(), count, zipfile.ZIP_BZIP2)
    peak, error = measure_peak(path)
    assert peak < 8e6
    assert "fix: save it by np.savez or np.savez_compressed" in error


def test_the_samples_that_were_not_chosen_are_those_between() -> None:
    for chosen in ([], [0], [9], [0, 1, 5, 9], list(range(10))):
        rest = [k for k in range(10) if k not in chosen]
        unchosen = Unchosen(10, chosen)
        assert (len(unchosen), list(unchosen)) == (len(rest), rest)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(9, 40), (9, 7, 20), (300, 1), (1, 300), (40, 9, 2, 3)])
def test_rows_in_fortran_order_are_those_of_the_array(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape)
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": True, "shape": shape})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", head.getvalue() + values.tobytes(order="F"))
    array = load_npz(tmp_path / "a.npz")["x"]
    assert isinstance(array, ScatteredArray)
    assert (array.shape, array.dtype, array.ndim) == (values.shape, values.dtype, values.ndim)
    for key in (0, -1, np.int64(0), slice(2, 5), (slice(0, 1),), (slice(None), slice(0, 1)), slice(None)):
        np.testing.assert_array_equal(array[key], values[key])
    np.testing.assert_array_equal(np.asarray(array), values)


def test_samples_in_fortran_order_are_read_piece_by_piece(tmp_path: Path) -> None:
    """All pages of the file hold a part of each row; mapped at once, they were all of it."""
    rows = np.broadcast_to(np.arange(40_000, dtype=np.float32), (500, 40_000))
    np.savez_compressed(tmp_path / "a.npz", x=np.asfortranarray(rows))
    code = f"""
import numpy, onnxq.data
from onnxq.config import DataConfig
from onnxq.graph import ValueInfo
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
dataset = onnxq.data.load_data({str(tmp_path / "a.npz")!r}, [ValueInfo("x", 1, ("N", 40_000))], DataConfig(samples=2))
assert [feeds["x"].tolist() == [list(range(40_000))] for feeds in dataset.samples()] == [True, True]
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 40_000
