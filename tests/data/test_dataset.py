"""Datasets: splits and batches, and positions that do not count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from onnxq.config import DataConfig
from onnxq.data import load_data, read_mask
from onnxq.graph import ValueInfo
from tests.data.kit import FRAMES, X, firsts


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12),
    wanted=st.one_of(st.none(), st.integers(1, 14)),
    holdout=st.integers(0, 14),
    seed=st.integers(0, 3),
)
def test_splits_are_disjoint_where_they_can_be(count: int, wanted: int | None, holdout: int, seed: int) -> None:
    dataset = load_data(
        {"x": np.arange(count * 3, dtype=np.float32).reshape(count, 3)}, [X], DataConfig(samples=wanted)
    )
    calibration, held = dataset.split(holdout, seed)
    mine, theirs = firsts(calibration), firsts(held)
    everything = firsts(dataset)
    assert mine
    assert theirs
    assert mine == sorted(mine)
    assert theirs == sorted(theirs)
    assert set(mine) <= set(everything)
    if holdout == 0 or count == 1:
        assert mine == theirs == everything
        return
    assert not set(mine) & set(theirs)
    assert len(theirs) == min(holdout, count - len(mine))
    spare = count - len(everything)
    assert len(mine) == max(1, len(everything) - max(0, holdout - spare))
    again = dataset.split(holdout, seed)
    assert [firsts(part) for part in again] == [mine, theirs]


def test_a_split_of_a_split_takes_only_what_it_was_given() -> None:
    dataset = load_data({"x": np.arange(60, dtype=np.float32).reshape(20, 3)}, [X], DataConfig(samples=12))
    calibration, held = dataset.split(4)
    few, rest = calibration.split(len(calibration) - 3)
    assert len(calibration) == 12
    assert len(few) == 3
    assert len(rest) == 9
    assert not set(firsts(held)) & (set(firsts(few)) | set(firsts(rest)))
    assert len(calibration.take(5)) == 5
    assert set(firsts(calibration.take(5))) <= set(firsts(calibration))


def test_batches_are_only_made_of_what_belongs_together() -> None:
    several = {"x": ValueInfo("x", TensorProto.FLOAT, ("A", 3)), "z": ValueInfo("z", TensorProto.FLOAT, ("B", 3))}
    arrays = {name: np.ones((4, 3), np.float32) for name in several}
    assert [b.count for b in load_data(arrays, list(several.values())).batches(4)] == [1] * 4
    square = ValueInfo("x", TensorProto.FLOAT, ("N", "N"))
    assert [b.count for b in load_data(np.ones((4, 1), np.float32), [square]).batches(4)] == [1] * 4
    scalar = ValueInfo("s", TensorProto.FLOAT, ())
    found = load_data({"x": np.ones((4, 3), np.float32), "s": np.ones(4, np.float32)}, [X, scalar])
    assert [b.count for b in found.batches(4)] == [1] * 4
    long = load_data([{"frames": np.ones((5, 3), np.float32)}] * 2, [FRAMES])
    assert [b.count for b in long.batches(2)] == [1, 1]


def test_further_inputs_are_given_when_a_sample_is_read() -> None:
    numbers: list[int] = []

    def extend(number: int, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        numbers.append(number)
        return {**feeds, "twice": 2 * feeds["x"]}

    dataset = load_data({"x": np.arange(15, dtype=np.float32).reshape(5, 3)}, [X])
    more = dataset.extended(extend)
    assert numbers == []
    assert all(np.array_equal(sample["twice"], 2 * sample["x"]) for sample in more.samples())
    assert numbers == [0, 1, 2, 3, 4]
    assert more.part([3])[0].keys() == {"x", "twice"}
    # The number in the source, whatever the part.
    assert numbers[-1] == 3
    assert more.describe() == dataset.describe()
    assert dataset[0].keys() == {"x"}


F = np.float32


def test_masked_positions_do_not_count() -> None:
    mask = np.array([[1, 1, 0]])
    feeds = {"x": np.ones((1, 3, 2), F), "attention_mask": mask}
    found = read_mask(feeds, (1, 3, 2))
    assert found is not None
    assert found.tolist() == [[True, True, False]]
    assert read_mask(feeds, (1, 4, 2)) is None
    assert read_mask(feeds, (1, 3)) is None
    assert read_mask({"x": feeds["x"]}, (1, 3, 2)) is None
    assert read_mask(feeds | {"attention_mask": mask * 7}, (1, 3, 2)) is None
    assert read_mask(feeds | {"attention_mask": mask * 0}, (1, 3, 2)) is None


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        pytest.param("src_key_padding_mask", [True, True, False], id="torch calls padding True"),
        pytest.param("padding_mask", [False, False, True], id="padding is True"),
        pytest.param("padding_mask", [True, True, False], id="tokens are True"),
    ],
)
def test_masks_of_padding_tell_tokens_from_padding(name: str, padding: list[bool]) -> None:
    value = np.array([padding])
    found = read_mask({"x": np.zeros((1, 3, 2), np.float32), name: value}, (1, 3, 2))
    assert found is not None
    np.testing.assert_array_equal(found, [[False, False, True]] if "key" in name else [[True, True, False]])
