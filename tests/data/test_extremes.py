"""Samples that ranges hang on are not the ones held back."""

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st

from onnxq.config import Config
from onnxq.data import Dataset, find_extremes, load_data
from onnxq.graph import ValueInfo
from onnxq.pipeline.prepared import load_state, read_data
from tests.pipeline.models import images, residual

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
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({values}) => (float[N, 2] y) {{ y = Sum({", ".join(names)}) }}'
    )
