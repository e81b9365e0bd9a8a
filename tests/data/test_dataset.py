"""Datasets: splits and batches, and positions that do not count."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from onnxq.config import Config, DataConfig
from onnxq.data import Dataset, find_extremes, load_data, read_mask
from onnxq.graph import ValueInfo
from onnxq.pipeline.prepared import load_state, read_data
from tests.data.kit import FRAMES, X, firsts
from tests.networks import parse_text
from tests.pipeline.models import images, residual


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


# ---- Samples that ranges hang on are not the ones held back.

INPUT = (ValueInfo("x", 1, (None, 2)),)


def test_the_least_the_greatest_the_loudest_and_the_longest_are_found() -> None:
    rows = [np.array([0.0, 1.0]), np.array([-3.0, 0.1]), np.array([0.5, 2.0]), np.array([1.9, 1.9, 1.9]), np.zeros(2)]
    found = find_extremes({"x": row.astype(np.float32), "name": np.array([k])} for k, row in enumerate(rows))
    assert found == {1, 2, 3}


def test_names_and_what_is_the_same_everywhere_count_for_nothing() -> None:
    assert find_extremes({"ids": np.array([k]), "rate": np.array(16000.0)} for k in range(4)) == frozenset()


def test_masks_of_the_lowest_number_have_no_square_and_warn_of_nothing() -> None:
    rows = [np.zeros(3, np.float32), np.array([0, 0, np.finfo(np.float32).min], np.float32), np.zeros(3, np.float32)]
    assert find_extremes({"mask": row} for row in rows) >= {1}


def test_where_inputs_are_many_extremes_that_hardly_lead_are_left_out() -> None:
    rng = np.random.default_rng(0)
    samples = [{f"x{k}": rng.standard_normal(500).astype(np.float32) for k in range(40)} for _ in range(32)]
    # Beside these every sample is extreme somewhere, and two are alone.
    samples[5]["x7"] *= 3
    samples[9] = {name: np.tile(value, 2) for name, value in samples[9].items()}
    assert len(find_extremes(samples)) > 30
    kept = find_extremes(samples, 8)
    assert len(kept) == 24
    assert {5, 9} <= kept
    for name in samples[0]:
        reached = max(samples[k][name].max() for k in kept)
        assert reached >= 0.9 * max(sample[name].max() for sample in samples)


@given(st.integers(0, 2**16), st.integers(1, 7), st.sets(st.integers(0, 7), max_size=8))
def test_of_what_is_to_be_kept_nothing_is_ever_held_back(seed: int, hold: int, keep: set[int]) -> None:
    data = load_data({"x": np.arange(16, dtype=np.float32).reshape(8, 2)}, INPUT)
    kept, held = data.split(hold, seed, keep)
    mine = [int(sample["x"].flat[0]) // 2 for sample in kept.samples()]
    others = [int(sample["x"].flat[0]) // 2 for sample in held.samples()]
    if len(keep) == 8:
        # The check has to look at something.
        assert mine == others == list(range(8))
        return
    assert sorted([*mine, *others]) == list(range(8))
    assert len(others) == min(hold, 8 - len(keep))
    assert not keep & set(others)


def test_a_run_never_holds_back_its_loudest_sample() -> None:
    prepared = load_state(residual())
    for loud in range(8):
        feeds = images(8)
        feeds["x"][loud] *= 9.0
        for seed in range(4):
            inputs = read_data(prepared, feeds, Config.model_validate({"effort": "balanced", "data": {"seed": seed}}))
            most = max(float(np.abs(sample["x"]).max()) for sample in inputs.calibration.samples())
            assert most == float(np.abs(feeds["x"]).max())


@given(st.integers(0, 2**16), st.integers(1, 12), st.integers(1, 4), st.none() | st.integers(1, 20))
def test_ranges_reach_all_extremes_however_few_samples_there_are(
    seed: int, count: int, inputs: int, holdout: int | None
) -> None:
    values = np.random.default_rng(seed).standard_normal((inputs, count, 2)).astype(np.float32)
    feeds = {f"x{k}": value for k, value in enumerate(values)}
    prepared = load_state(_adding(inputs))
    wishes = {"effort": "balanced", "verify": {"holdout": holdout}}
    samples = read_data(prepared, feeds, Config.model_validate(wishes))
    observed = [samples.calibration[k] for k in range(len(samples.calibration))]
    for name, value in feeds.items():
        assert min(sample[name].min() for sample in observed) <= value.min() + 0.11 * abs(value.min())
        assert max(sample[name].max() for sample in observed) >= value.max() - 0.11 * abs(value.max())
    shared = set(_rows(samples.test)) & set(_rows(samples.calibration))
    assert bool(shared) == bool(samples.seen)


def _rows(dataset: Dataset) -> list[bytes]:
    return [sample["x0"].tobytes() for sample in dataset.samples()]


def _adding(inputs: int) -> onnx.ModelProto:
    names = [f"x{k}" for k in range(inputs)]
    values = ", ".join(f"float[N, 2] {name}" for name in names)
    return parse_text(f"g ({values}) => (float[N, 2] y) {{ y = Sum({', '.join(names)}) }}")
