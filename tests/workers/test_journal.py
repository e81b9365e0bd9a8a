"""Finished pieces are read back exactly, damaged files are not, and a second run does only the rest."""

import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onnxq.errors import ConfigError
from onnxq.observers import create_observer, list_observers
from onnxq.spec import ObserverSpec, QuantSpec
from onnxq.workers import Journal, Workers, WorkPiece, pack_value, restore_object, unpack_value
from tests.workers.work import square

VALUE = {
    "numbers": [1, -(2**70), 0.1, math.inf, True, None, np.float32(0.25)],
    "both": (Fraction(1, 3), "text"),
    3: np.arange(6, dtype=np.int8).reshape(2, 3),
    "narrow": np.array([-8, 7, 3], ml_dtypes.int4),
    "none": np.zeros((0, 4)),
    "scalar": np.asarray(2.5),
}


def test_values_come_back_exactly(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "made" / "here")
    journal.write("k", VALUE)
    found = Journal(journal.folder).read("k")
    assert list(found) == list(VALUE)
    assert found["numbers"] == VALUE["numbers"]
    assert found["both"] == VALUE["both"]
    for key in (3, "narrow", "none", "scalar"):
        assert found[key].dtype == VALUE[key].dtype
        np.testing.assert_array_equal(found[key], VALUE[key])


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps a set"):
        pack_value({"x": {1, 2}})


@pytest.mark.parametrize("name", list_observers())
def test_observers_come_back(name: str) -> None:
    quant, spec = QuantSpec(signed=False, symmetric=False), ObserverSpec(name)
    made, fresh = create_observer(spec, quant), create_observer(spec, quant)
    made.update(np.random.default_rng(0).standard_normal(999).astype(np.float32))
    restore_object(fresh, unpack_value(*pack_value(made)))
    assert fresh.count == made.count
    assert fresh.range() == made.range()
    fresh.merge(made)
    assert fresh.count == 2 * made.count
    with pytest.raises(ValueError, match="not the numbers"):
        restore_object(fresh, {"other": 1})


def test_only_what_is_missing_or_damaged_is_done(tmp_path: Path) -> None:
    pieces = [WorkPiece(f"piece {k}", k, f"key{k}") for k in range(4)]
    assert list(Workers(Journal(tmp_path)).map(square, pieces)) == [0, 1, 4, 9]
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"key{k}.piece" for k in range(4)]
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:40])
    (tmp_path / "stale.piece").write_bytes(b"")
    # Their results are on the disk: other tasks show which were done again.
    changed = [WorkPiece(piece.title, 10 + piece.task, piece.key) for piece in pieces]
    again = Workers(Journal(tmp_path))
    assert list(again.map(square, changed)) == [100, 121, 4, 9]
    assert (again.journal.earlier, again.journal.used) == (4, 2)
