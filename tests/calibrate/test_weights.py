"""Scales of weights: the same by workers and from a journal, read where they lie; errors name the site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.calibrate import constants
from onnxq.calibrate.constants import WeightTask, search_piece, weight_numbers
from onnxq.graph import get_index, light, load_model, name_nodes
from onnxq.plan import SitePlan
from onnxq.runtime.crew import Crew
from onnxq.sites import Role, TensorId
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, QParams, QuantSpec
from onnxq.workers import Journal, Workers
from tests.calibrate.kit import model

# The first three are large enough to stay in their file, the last is small enough for the task itself.
WIDTHS = (512, 8, 512, 4, 8)
SPECS = (QuantSpec(bits=4, granularity=PerBlock(0, 32)), QuantSpec(granularity=PerChannel(1)))
SITES = [
    SitePlan(site=TensorId(f"w{k}"), role=Role.WEIGHT, spec=SPECS[k % 2], observer=ObserverSpec("mse"))
    for k in range(len(WIDTHS))
]


def write_model(path: Path, *, seed: int = 0) -> Path:
    """A chain of MatMuls; the seed is for the third weight."""
    steps = " ".join(f"x{k + 1} = MatMul(x{k}, w{k})" for k in range(len(WIDTHS)))
    proto = model(f"g (float[N,32] x0) => (float[N,8] x{len(WIDTHS)}) {{ {steps} }}")
    for k, shape in enumerate(zip((32, *WIDTHS), WIDTHS, strict=False)):
        rng = np.random.default_rng(k + 10 * seed * (k == 2))
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_t(5, shape).astype(np.float32), f"w{k}"))
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}_data", size_threshold=1024)
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


def test_numbers_of_a_large_model_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.onnx")
    wanted = find_numbers(path)
    monkeypatch.setattr(light, "LARGE_BYTES", 1)
    index = get_index(name_nodes(load_model(path, lazy=True).light))
    found = weight_numbers(index, SITES, [], {})
    assert find_numbers(path) == wanted
    # Mapped, so that nobody writes into them and their memory can be let go of.
    assert not any(array.flags.writeable for one in found.values() for array in (one.scale, one.zero_point))
