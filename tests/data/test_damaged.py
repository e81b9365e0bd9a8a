"""Damaged arrays are refused with the file's and the array's name; of large ones only what is wanted is read."""

import io
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.data import load_data
from onnxq.errors import DataError
from onnxq.graph import ValueInfo

X = ValueInfo("x", 1, ("N", 3))


ROWS = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)


def npy(header: str, values: bytes = b"", version: int = 1) -> bytes:
    """A .npy file with this header, whatever it says."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + values


def shaped(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


_HEADERS = {
    "negative": npy(shaped("(-4, 3)"), bytes(48)),
    "negative twice": npy(shaped("(-4, -3)"), bytes(48)),
    "huge": npy(shaped(f"({2**62}, 3)"), bytes(48)),
    "empty and huge": npy(shaped(f"(0, {2**70})")),
    "no tuple": npy(shaped("4"), bytes(48)),
    "no dtype": npy(shaped("(4, 3)", "'what'"), bytes(48)),
    "open bracket": npy("{'descr': ("),
    "open string": npy("{'descr': '''"),
    "deep": npy("(" * 5000),
    "object": npy(shaped("(4,)", "'|O'"), bytes(32)),
    "structured": npy(shaped("(4,)", "[('a', '<f4')]"), bytes(16)),
    "nested": npy(shaped("(4,)", "('<f4', (3,))"), bytes(48)),
    "short": npy(shaped("(4, 3)"), bytes(40)),
    "version": npy(shaped("(4, 3)"), bytes(48), version=7),
    "no magic": b"hello",
    "nothing": b"",
    "half a header": npy(shaped("(4, 3)"))[:20],
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
