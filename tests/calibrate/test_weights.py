"""Scales of weights: the same by workers and from a journal, read where they lie; errors name the site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxq.calibrate import constants
from onnxq.calibrate.constants import WeightTask, search_piece, weight_numbers
from onnxq.errors import CalibrationError, ConfigError, OnnxqError
from onnxq.graph import get_index, light, load_model, name_nodes
from onnxq.plan import SitePlan
from onnxq.runtime.crew import Crew
from onnxq.sites import Role, TensorId
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, QParams, QuantSpec
from onnxq.workers import Journal, Workers
from tests.calibrate.kit import CHANNELS, W, X, bias_site, layer, scale, weight_site

# The first three are large enough to stay in their file, the last is small enough for the task itself.
WIDTHS = (512, 8, 512, 4, 8)
SPECS = (QuantSpec(bits=4, granularity=PerBlock(0, 32)), QuantSpec(granularity=PerChannel(1)))
SITES = [
    SitePlan(site=TensorId(f"w{k}"), role=Role.WEIGHT, spec=SPECS[k % 2], observer=ObserverSpec("mse"))
    for k in range(len(WIDTHS))
]


def write_model(path: Path, *, seed: int = 0) -> Path:
    """A chain of MatMuls; the seed is for the third weight."""
    nodes, tensors = [], []
    for k, (rows, columns) in enumerate(zip((32, *WIDTHS), WIDTHS, strict=False)):
        rng = np.random.default_rng(k + 10 * seed * (k == 2))
        tensors.append(numpy_helper.from_array(rng.standard_t(5, (rows, columns)).astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node("MatMul", [f"x{k}", f"w{k}"], [f"x{k + 1}"]))
    ends = [helper.make_tensor_value_info(name, 1, None) for name in ("x0", f"x{len(WIDTHS)}")]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors))
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}_data", size_threshold=1024)
    return path


def find_numbers(path: Path, crew: Crew | None = None, sites: Sequence[SitePlan] = SITES) -> list[bytes]:
    index = get_index(name_nodes(load_model(path, lazy=True).light))
    found = weight_numbers(index, sites, [], {}, crew=crew)
    return [array.tobytes() for one in found.values() for array in (one.scale, one.zero_point)]


def count_shared(crew: Crew) -> int:
    """Bytes of arrays in the crew's folder."""
    return sum(path.stat().st_size for path in Path(crew.share_feeds({}).folder).glob("weights"))


def test_workers_find_the_same_numbers_where_the_weights_lie(
    tmp_path: Path, processes: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.onnx")
    wanted, before = find_numbers(path), count_shared(processes)
    # Two and one of five.
    monkeypatch.setattr(constants, "_PIECE_MB", 2)
    assert find_numbers(path, processes) == wanted
    # The one before the last, which the model holds itself, was written; the others stay in their file.
    assert 0 < count_shared(processes) - before <= 3 * 4096


def test_a_run_goes_on_from_the_last_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write_model(tmp_path / "m.onnx"), tmp_path / "pieces"
    wanted = find_numbers(path)
    monkeypatch.setattr(constants, "_PIECE_MB", 0)

    def find(**given: Any) -> tuple[list[bytes], int, int]:
        journal = Journal(folder)
        found = find_numbers(path, Crew(Workers(journal)), **given)
        return found, journal.used, len(list(folder.iterdir()))

    class Killed(BaseException):
        pass

    def search(tasks: Sequence[WeightTask]) -> list[QParams]:
        if tasks[0].site == "w3":
            raise Killed
        return search_piece(tasks)

    with monkeypatch.context() as patch:
        patch.setattr(constants, "search_piece", search)
        with pytest.raises(Killed):
            find()
    assert find() == (wanted, 3, 5)
    # Another weight and another observer are searched anew.
    write_model(path, seed=1)
    assert find()[1:] == (4, 6)
    write_model(path)
    plain = [replace(site, observer=ObserverSpec()) if k == 1 else site for k, site in enumerate(SITES)]
    assert find(sites=plain)[1:] == (4, 7)


@pytest.mark.parametrize(
    ("observer", "code", "subject"),
    [
        (ObserverSpec("percentil"), "Q310", "w: weight observer 'percentil'"),
        (ObserverSpec("mse", (("bins", 3),)), "Q311", "w: weight observer 'mse'"),
    ],
)
def test_a_wrong_setting_is_named_beside_the_site(observer: ObserverSpec, code: str, subject: str) -> None:
    with pytest.raises(ConfigError) as caught:
        weight_numbers(layer(), [weight_site(observer=observer)], [], {})
    assert (caught.value.code, caught.value.subject) == (code, subject)


def test_a_weight_with_nan_is_named() -> None:
    with pytest.raises(CalibrationError, match="holds NaN or inf") as caught:
        weight_numbers(layer(np.full((3, 4), np.nan, np.float32)), [weight_site()], [], {})
    assert (caught.value.code, caught.value.subject) == ("Q503", "w")


def test_a_weight_scale_is_raised_for_a_bias_that_would_overflow() -> None:
    """A dead channel: its own values ask for the smallest scale, and the bias has to fit into int32 on it."""
    weight = np.ones((3, 4), np.float32)
    weight[1] = 0
    alone = weight_numbers(layer(weight), [weight_site()], [], {X: scale(1e-6)})[W].scale
    found = weight_numbers(layer(weight), [weight_site()], [bias_site()], {X: scale(1e-6)})[W].scale
    assert found[1] > alone[1]
    assert np.array_equal(found[[0, 2]], alone[[0, 2]])
    assert 2.0 / (np.float32(1e-6) * found[1]) <= 2**29 * 1.001


def test_only_constants_have_numbers_without_data() -> None:
    with pytest.raises(OnnxqError, match="is not a constant, as a weight must be"):
        weight_numbers(layer(), [SitePlan(site=X, role=Role.WEIGHT, spec=CHANNELS)], [], {})


def test_numbers_of_a_large_model_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.onnx")
    wanted = find_numbers(path)
    monkeypatch.setattr(light, "LARGE_BYTES", 1)
    index = get_index(name_nodes(load_model(path, lazy=True).light))
    found = weight_numbers(index, SITES, [], {})
    assert find_numbers(path) == wanted
    # Mapped, so that nobody writes into them and their memory can be let go of.
    assert not any(array.flags.writeable for one in found.values() for array in (one.scale, one.zero_point))
