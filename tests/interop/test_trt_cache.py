"""The text form itself: what TensorRT and the scripts of the field write, and what is no cache."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.errors import CalibrationError
from onnxq.interop import read_scales
from onnxq.interop.trt_cache import HEADER, parse_cache
from tests.interop.models import write_cache

BITS = st.integers(0x2C000000, 0x53000000)  # 2e-12 to 5e11
NAMES = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=30
).filter(lambda name: name == name.strip())  # fmt: skip


def parsed(text: str) -> dict[str, float]:
    return {entry.name: float(entry.scale) for entry in parse_cache(text.encode()).entries}


@given(st.dictionaries(NAMES, BITS, min_size=1, max_size=8))
def test_what_is_written_is_read_bit_for_bit(bits: dict[str, int]) -> None:
    scales = {name: np.uint32(value).view(np.float32) for name, value in bits.items()}
    found = parse_cache(write_cache(scales).encode())
    assert {entry.name: int(entry.scale.view(np.uint32)) for entry in found.entries} == bits
    assert [entry.line for entry in found.entries] == list(range(2, len(bits) + 2))
    assert found.header == HEADER


@given(st.floats(2.0**-30, 2.0**30, width=32))
def test_the_hex_is_that_of_the_struct_module(scale: float) -> None:
    line = write_cache({"x": scale}).splitlines()[1]
    assert line == f"x: {struct.pack('>f', scale).hex()}"


def test_a_cache_as_tensorrt_writes_it() -> None:
    text = (
        "TRT-8510-EntropyCalibration2\nx: 4000890a\n/conv1/Conv_output_0: 3f9db09c\nonnx::Conv_329: 3c96d93c\n"
        "(Unnamed Layer* 8) [Constant]_output: 39137939\n(Unnamed Layer* 9) [Matrix Multiply]_output: 3e74c2e0\n"
    )
    found = parsed(text)
    assert list(found) == [
        "x",
        "/conv1/Conv_output_0",
        "onnx::Conv_329",
        "(Unnamed Layer* 8) [Constant]_output",
        "(Unnamed Layer* 9) [Matrix Multiply]_output",
    ]
    assert found["x"] == struct.unpack(">f", bytes.fromhex("4000890a"))[0]


@pytest.mark.parametrize(
    "header", ["TRT-7103-EntropyCalibration2", "TRT-100300-MinMaxCalibration", "TRT-8XXX-EntropyCalibration2"]
)
def test_headers_of_any_version_and_calibrator(header: str) -> None:
    assert parse_cache(f"{header}\nx: 3c010a14\n".encode()).header == header


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\nx: 3c010a14\n",
        f"{HEADER}\r\nx: 3c010a14\r\n",
        f"{HEADER}\n\n  x :  3C010A14  \n\n",
        f"\n{HEADER}\nx: 3c010a14",
    ],
    ids=["byte order mark", "CRLF", "blanks and capitals", "no last line end"],
)
def test_what_editors_do_to_a_file(text: str) -> None:
    assert parsed(text) == {"x": struct.unpack(">f", bytes.fromhex("3c010a14"))[0]}


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ("x: 3c010a1g", "line 2: '3c010a1g' of x is not a float32 in 8 hex digits"),
        ("x: 3c010a1400", "line 2: '3c010a1400' of x is not"),
        ("x: 0.0078", "line 2: '0.0078' of x is not"),
        ("x: ", "line 2: '' of x is not"),
        ("x 3c010a14", "line 2: 'x 3c010a14' is not `tensor: scale`"),
        ("a: 3c010a14\nx: bf800000", "line 3: the scale of x is negative"),
        ("x: bc010a14", "line 2: the scale of x is negative"),
        ("x: 7f800000", "line 2: the scale of x is infinite"),
        ("x: ff800000", "line 2: the scale of x is negative"),
        ("x: 7fc00000", "line 2: the scale of x is not a number"),
        ("x: ffc00000", "line 2: the scale of x is not a number"),
        ("x: 3c010a14\ny: 3c010a14\nx: 3c010a14", "line 4: x stands in line 2 already"),
    ],
)
def test_a_bad_line_is_named_by_its_number(lines: str, cause: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parsed(f"{HEADER}\n{lines}\n")
    assert caught.value.cause.startswith(cause)
    assert caught.value.fix


def test_all_bad_lines_are_counted() -> None:
    with pytest.raises(CalibrationError, match=r"line 2: .*line 6: .*; and 4 more"):
        parsed(f"{HEADER}\n" + "".join(f"x{k}: bf800000\n" for k in range(9)))


def test_tensors_without_values_are_listed() -> None:
    # As TensorRT 8.4 writes them for what it folds away.
    text = f"{HEADER}\nx: 3caa54fc\n(Unnamed Layer* 64) [Shuffle]_output: 0\n366: 0\n395: 3cbe52af\n"
    table = parse_cache(text.encode())
    assert [entry.name for entry in table.entries] == ["x", "395"]
    assert [(row.name, row.line) for row in table.skipped] == [("(Unnamed Layer* 64) [Shuffle]_output", 3), ("366", 4)]


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (HEADER.encode(), "holds a header and no scales"),
        (b"x: 3c010a14\n", "is no header like"),
        (b'{"x": 0.5}', "is no header like"),
        (b'{"CLS": "TensorsData", "data": {}}', "is a calibration table of ONNX Runtime"),
        (b"h 2.0\nx 1.5e-07\n", "is a calibration table of ONNX Runtime"),
        (b"\x18\x00\x00\x00TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "is binary"),
        (b"\xff\xfe\xf0", "is binary"),
    ],
)
def test_what_is_no_cache(data: bytes, cause: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parse_cache(data, source="some.cache")
    assert cause in caught.value.cause
    assert caught.value.subject.startswith("some.cache")


def test_swapped_bytes_are_seen() -> None:
    lines = "".join(f"x{k}: {struct.pack('<f', 0.01 * (k + 1)).hex()}\n" for k in range(10))
    with pytest.raises(CalibrationError, match="bytes swapped"):
        parsed(f"{HEADER}\n{lines}")


@given(st.binary(max_size=80))
def test_no_bytes_end_in_anything_but_our_error(data: bytes) -> None:
    for content in (data, HEADER.encode() + b"\n" + data):
        try:
            parse_cache(content)
        except CalibrationError:
            continue


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="No such file"):
        read_scales(tmp_path / "none.cache")
    with pytest.raises(CalibrationError, match="directory"):
        read_scales(tmp_path)
