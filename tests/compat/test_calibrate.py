"""Data readers, read sample by sample."""

import weakref

import numpy as np
import pytest

from onnxq.compat import CalibrationDataReader
from onnxq.compat.calibrate import read_samples


class Array(np.ndarray):
    """An array that can be watched."""


class Counting(CalibrationDataReader):
    """Makes a sample when it is asked for; with a range, of that range only."""

    def __init__(self, count: int) -> None:
        self.count, self.position, self.end, self.made = count, 0, count, 0

    def __len__(self) -> int:
        return self.count

    def set_range(self, start_index: int, end_index: int) -> None:
        self.position, self.end = start_index, min(end_index, self.count)

    def get_next(self):
        if self.position >= self.end:
            return None
        self.position += 1
        self.made += 1
        return {"x": np.full(3, self.position).view(Array)}

    def rewind(self) -> None:
        self.position = 0


def values(samples) -> list[int]:
    return [int(sample["x"][0]) for sample in samples]


def test_nothing_is_read_before_it_is_asked_for_and_nothing_kept() -> None:
    reader = Counting(1000)
    stream = read_samples(reader)
    assert reader.made == 0
    first = weakref.ref(next(stream)["x"])
    assert reader.made == 1
    next(stream)
    next(stream)
    assert first() is None
    assert reader.made == 3


def test_a_reader_is_an_iterable_begins_again_and_is_asked_for_ranges() -> None:
    assert values(Counting(3)) == values(read_samples(Counting(3))) == [1, 2, 3]
    reader = Counting(5)
    list(reader)
    assert values(read_samples(reader)) == [1, 2, 3, 4, 5]
    reader.set_range(0, 0)
    assert values(read_samples(reader, 2)) == [1, 2, 3, 4, 5]


def test_other_data_is_left_as_it_is_and_the_base_class_asks_for_its_methods() -> None:
    assert read_samples("samples.npz") == "samples.npz"
    with pytest.raises(TypeError, match="get_next"):
        CalibrationDataReader()
