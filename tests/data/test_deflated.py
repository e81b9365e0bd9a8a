"""Large compressed arrays are unpacked by rows, and checked as far as they are read."""

import io
import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy

from onnxq.config import DataConfig
from onnxq.data import arrays as arrays_module
from onnxq.data import load_data
from onnxq.data.arrays import DeflatedArray, ScatteredArray, load_npz
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
def test_of_a_large_array_only_wanted_samples_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save) -> None:
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
        assert len(list(load_data(path, [ValueInfo("x", 2, ("N", 1))], DataConfig(samples=2)).samples())) == 2
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


# ---- Damaged arrays are refused with the file's and the array's name; of large ones only what is wanted is read.


ROWS = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)


def make_npy(header: str, values: bytes = b"", version: int = 1) -> bytes:
    """A .npy file with this header, whatever it says."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + values


def shaped(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


_HEADERS = {
    "negative": make_npy(shaped("(-4, 3)"), bytes(48)),
    "negative twice": make_npy(shaped("(-4, -3)"), bytes(48)),
    "huge": make_npy(shaped(f"({2**62}, 3)"), bytes(48)),
    "empty and huge": make_npy(shaped(f"(0, {2**70})")),
    "no tuple": make_npy(shaped("4"), bytes(48)),
    "no dtype": make_npy(shaped("(4, 3)", "'what'"), bytes(48)),
    "open bracket": make_npy("{'descr': ("),
    "open string": make_npy("{'descr': '''"),
    "deep": make_npy("(" * 5000),
    "object": make_npy(shaped("(4,)", "'|O'"), bytes(32)),
    "structured": make_npy(shaped("(4,)", "[('a', '<f4')]"), bytes(16)),
    "nested": make_npy(shaped("(4,)", "('<f4', (3,))"), bytes(48)),
    "short": make_npy(shaped("(4, 3)"), bytes(40)),
    "version": make_npy(shaped("(4, 3)"), bytes(48), version=7),
    "no magic": b"hello",
    "nothing": b"",
    "half a header": make_npy(shaped("(4, 3)"))[:20],
}


@pytest.mark.parametrize("case", _HEADERS)
@pytest.mark.parametrize("packed", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_header_is_told_with_file_and_array(tmp_path: Path, case: str, packed: int | None) -> None:
    path = tmp_path / ("a.npy" if packed is None else "a.npz")
    if packed is None:
        path.write_bytes(_HEADERS[case])
    else:
        with zipfile.ZipFile(path, "w", packed) as archive:
            archive.writestr("x.npy", _HEADERS[case])
    with pytest.raises(DataError) as caught:
        load_data(path, [X])
    assert str(path) in caught.value.subject
    assert packed is None or "'x'" in caught.value.subject


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_wrong_checksum_is_told_with_file_and_array(tmp_path: Path, save) -> None:
    path = tmp_path / "a.npz"
    save(path, other=ROWS, x=ROWS)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("x.npy")
    data = bytearray(path.read_bytes())
    # The directory at the end and the local header both have the sum.
    for at in (data.rfind(struct.pack("<I", info.CRC)), data.find(struct.pack("<I", info.CRC))):
        data[at] ^= 255
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.npz, array 'x': .*(CRC|checksum)"):
        load_data(path, [X])


@settings(max_examples=50)
@given(st.data())
def test_whatever_bytes_are_wrong_it_is_a_data_error_or_the_right_samples(data: st.DataObject) -> None:
    buffer = io.BytesIO()
    (np.savez if data.draw(st.booleans()) else np.savez_compressed)(buffer, x=ROWS)
    whole = bytearray(buffer.getvalue())
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
            whole[at] ^= data.draw(st.integers(1, 255))
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"damaged-{os.getpid()}.npz"
    path.write_bytes(whole)
    said, found = str(path), ROWS
    try:
        found = np.concatenate([one["x"] for one in load_data(path, [X]).samples()])
    except DataError as error:
        said = error.subject
    finally:
        path.unlink()
    assert str(path) in said
    np.testing.assert_array_equal(found, ROWS)


def test_polygraphy_json_with_a_damaged_array(tmp_path: Path) -> None:
    import base64

    for case in _HEADERS.values():
        encoded = base64.b64encode(case).decode()
        (tmp_path / "a.json").write_text(json.dumps([{"x": {"array": encoded, "polygraphy_class": "ndarray"}}]))
        with pytest.raises(DataError, match=r"a\.json"):
            load_data(tmp_path / "a.json", [X])
