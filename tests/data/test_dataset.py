"""Datasets: splits and batches, and positions that do not count."""

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from onnxq.config import Config, DataConfig
from onnxq.data import Dataset, find_extremes, load_data, read_mask, sources
from onnxq.errors import DataError
from onnxq.graph import ValueInfo
from onnxq.pipeline.prepared import load_state, read_data
from tests.data.kit import FRAMES, X, feed, firsts
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
    assert len(mine) == max(1, len(everything) - max(0, holdout - (count - len(everything))))
    assert [firsts(part) for part in dataset.split(holdout, seed)] == [mine, theirs]


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


def test_masked_positions_do_not_count() -> None:
    mask = np.array([[1, 1, 0]])
    feeds = {"x": np.ones((1, 3, 2), np.float32), "attention_mask": mask}
    assert read_mask(feeds, (1, 3, 2)).tolist() == [[True, True, False]]
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
    found = read_mask({"x": np.zeros((1, 3, 2), np.float32), name: np.array([padding])}, (1, 3, 2))
    np.testing.assert_array_equal(found, [[False, False, True]] if "key" in name else [[True, True, False]])


# ---- Samples that ranges hang on are not the ones held back.


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
    data = load_data({"x": np.arange(16, dtype=np.float32).reshape(8, 2)}, [ValueInfo("x", 1, (None, 2))])
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
def test_ranges_of_few_samples_reach_all_extremes(seed: int, count: int, inputs: int, holdout: int | None) -> None:
    values = np.random.default_rng(seed).standard_normal((inputs, count, 2)).astype(np.float32)
    feeds = {f"x{k}": value for k, value in enumerate(values)}
    declared, added = ", ".join(f"float[N, 2] {name}" for name in feeds), ", ".join(feeds)
    prepared = load_state(parse_text(f"g ({declared}) => (float[N, 2] y) {{ y = Sum({added}) }}"))
    wishes = {"effort": "balanced", "verify": {"holdout": holdout}}
    samples = read_data(prepared, feeds, Config.model_validate(wishes))
    observed = [samples.calibration[k] for k in range(len(samples.calibration))]
    for name, value in feeds.items():
        assert min(sample[name].min() for sample in observed) <= value.min() + 0.11 * abs(value.min())
        assert max(sample[name].max() for sample in observed) >= value.max() - 0.11 * abs(value.max())
    assert bool(set(_rows(samples.test)) & set(_rows(samples.calibration))) == bool(samples.seen)


def _rows(dataset: Dataset) -> list[bytes]:
    return [sample["x0"].tobytes() for sample in dataset.samples()]


# ---- Samples from lists of feeds, arrays, datasets, and iterables, which come only once.


def test_a_feed_is_cut_only_where_its_axis_is_surely_the_batch() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert len(load_data([{"x": rows}], [X])) == 4
    kept = load_data([{"frames": rows}], [FRAMES])
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0]["frames"], rows)
    fixed = ValueInfo("x", TensorProto.FLOAT, (2, 3))
    assert [sample["x"].shape for sample in load_data([{"x": rows}], [fixed]).samples()] == [(2, 3), (2, 3)]


def test_feeds_with_inputs_that_cannot_be_cut_stay_whole() -> None:
    state = ValueInfo("state", TensorProto.FLOAT, (2, None))
    item = {"x": np.ones((4, 3), np.float32), "state": np.ones((2, 4), np.float32)}
    dataset = load_data([item], [X, state])
    assert len(dataset) == 1
    assert {name: value.shape for name, value in dataset[0].items()} == {"x": (4, 3), "state": (2, 4)}


def test_bare_arrays_for_one_input_and_objects_that_act_like_arrays() -> None:
    class Tensor:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.full((1, 3), 7, np.float32)

    assert firsts(load_data([np.full((1, 3), 7, np.float32), Tensor()], [X])) == [7, 7]
    assert firsts(load_data(iter([Tensor()]), [X])) == [7]
    assert firsts(load_data({"x": Tensor()}, [X])) == [7]


def test_samples_that_are_the_same_are_told() -> None:
    same = "the first and the last are the same"
    assert same in load_data({"x": np.zeros((4, 3), np.float32)}, [X]).describe()
    assert same not in load_data({"x": np.zeros((1, 3), np.float32)}, [X]).describe()
    assert same not in load_data([feed(0), feed(1)], [X]).describe()


class Learned:
    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ([], "empty"),
        (iter([]), "empty"),
        ({}, "no array for the model's input 'x'"),
        ([3], "item 0: is of type int"),
        (iter([feed(0), "hello"]), "item 1: is of type str"),
        ([{"x": [[1.0, 2.0, 3.0], [1.0]]}], "item 0"),
        (iter([feed(0), {"y": np.zeros((1, 3), np.float32)}]), "item 1: has no array"),
        (iter([{"x": np.zeros((1, 4), np.float32)}]), "item 0, input 'x': axis 1"),
        ([Learned()], r"item 0: cannot become an array \(.*detach"),
        (42, "is of type int"),
    ],
)
def test_what_is_no_data(source: object, told: str) -> None:
    with pytest.raises(DataError, match=told):
        load_data(source, [X])


def test_a_dataset_goes_through_if_it_is_of_this_model() -> None:
    dataset = load_data([feed(1)], [X])
    assert load_data(dataset, [X]) is dataset
    with pytest.raises(DataError, match="frames"):
        load_data(dataset, [FRAMES])


@pytest.mark.parametrize("source", [None, [{"x": [np.zeros(2, np.float32)]}]])
def test_an_input_that_is_a_sequence_is_told(source: object) -> None:
    proto = parse_text("g (seq(float[N]) x) => (float[M] y) { y = ConcatFromSequence<axis = 0>(x) }")
    with pytest.raises(DataError, match=r"input 'x': is a sequence, and samples hold tensors.*\[Q206\]"):
        load_data(source, [ValueInfo("x", 0, None)], model=proto)


def test_a_generator_is_read_once_and_only_as_far_as_needed() -> None:
    asked: list[int] = []

    def endless() -> Iterator[dict[str, np.ndarray]]:
        for k in itertools.count():
            asked.append(k)
            yield feed(k)

    dataset = load_data(endless(), [X], DataConfig(samples=4))
    assert firsts(dataset) == [0, 1, 2, 3]
    assert firsts(dataset) == [0, 1, 2, 3]
    assert asked == [0, 1, 2, 3]


def test_a_stream_may_fill_one_buffer_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = np.zeros((1, 3), np.float32)

    def reused() -> Iterator[dict[str, np.ndarray]]:
        for k in range(5):
            buffer[:] = k
            yield {"x": buffer}

    assert firsts(load_data(reused(), [X])) == [0, 1, 2, 3, 4]
    monkeypatch.setattr(sources, "_IN_MEMORY", 2 * buffer.nbytes)
    assert firsts(load_data(reused(), [X])) == [0, 1, 2, 3, 4]


def test_what_does_not_fit_in_memory_goes_to_disk_and_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = load_data((feed(k) for k in range(3)), [X])
    assert len(list(tmp_path.rglob("*.npy"))) == 3
    assert firsts(dataset) == [0, 1, 2]
    del dataset
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
def test_files_are_mapped_only_while_a_sample_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pages of files count as the process's memory, and a container is stopped for them."""
    monkeypatch.setattr(sources, "_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = load_data((feed(k, rows=2) for k in range(3)), [X])
    assert firsts(dataset) == [0, 0, 1, 1, 2, 2]
    assert dataset.name(3) == "data, item 1, sample 1"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_what_the_generator_raises_is_told_as_its_own() -> None:
    def failing() -> Iterator[dict[str, np.ndarray]]:
        yield feed(0)
        raise RuntimeError("disk on fire")

    with pytest.raises(DataError, match="raised RuntimeError: disk on fire"):
        load_data(failing(), [X])


def test_nan_in_a_stream_names_the_item() -> None:
    bad = [feed(0), feed(1), {"x": np.array([[1, np.nan, 2]], np.float32)}]
    with pytest.raises(DataError, match=r"item 2, input 'x': holds NaN"):
        list(load_data(iter(bad), [X]).samples())
