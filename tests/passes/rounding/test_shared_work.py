"""Samples and sums that workers share: the same bytes, although every piece is done twice; tensors in files."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxq.config import Config, TensorConfig
from onnxq.errors import OutputError
from onnxq.passes.rounding.layerwise import augment_samples
from onnxq.passes.rounding.sequential import round_sequentially
from onnxq.passes.rounding.shared_work import SharedWork, read_tensor, write_tensor
from onnxq.plan import to_json
from onnxq.progress import silent
from onnxq.runtime.crew import Crew
from onnxq.workers import Workers, WorkPiece, count_threads
from onnxq.workers.base import Finished, R, T, run_guarded
from tests.evaluation import selecting
from tests.graph.shape_nets import ShapeNet
from tests.passes.rounding.kit import ALL, FOUR, calibrated
from tests.passes.rounding.test_sequential import branching, flags, matmuls, tokens
from tests.pipeline.models import images, residual


class Twice(Workers):
    """Does every piece twice, the last one first, as if workers had died over it."""

    count = 3

    def _finish_pieces(
        self, function: Callable[[T], R], todo: Sequence[tuple[int, WorkPiece[T]]]
    ) -> Iterator[Finished]:
        for k, piece in reversed(todo):
            run_guarded(function, piece.task, count_threads())
            yield k, run_guarded(function, piece.task, count_threads())


SIZES = ShapeNet(4, ["sequence", "resize_to_earlier", "resize_given"])
WEIGHTS = Config(mode="weight-only", weights=TensorConfig(granularity="channel", bits=8), rules=ALL)


@pytest.mark.parametrize(
    ("proto", "data", "config"),
    [
        (residual(), images(8), FOUR),
        (branching(), flags(), FOUR),
        (matmuls(), tokens(24), WEIGHTS),
        (SIZES.model(), SIZES.feeds(*[(8, 8), (6, 11)] * 4), FOUR),
        (selecting.network("queries"), dict(selecting.samples(16)), FOUR),
    ],
    ids=["pooled", "branch", "weights", "sizes and sequences", "choices"],
)
def test_who_does_it_does_not_show(proto: Any, data: Any, config: Config) -> None:
    prepared, plan, samples = calibrated(proto, data, config)
    others = augment_samples(samples, plan, ())
    crew = Crew(Twice())
    wanted, found = (
        round_sequentially(prepared.model, plan, samples, others=others, crew=one, progress=silent)
        for one in (None, crew)
    )
    assert wanted.done
    assert found.done == wanted.done
    assert to_json(found.plan) == to_json(wanted.plan)
    # Models alone are left: tensors went with their last readers, or at the end.
    assert {path.suffix for path in crew.make_folder().parent.iterdir() if path.is_file()} <= {".graph", ".json", ""}
    assert sum(path.is_dir() for path in crew.make_folder().parent.iterdir()) == 2
    crew.__exit__()


@pytest.mark.parametrize(
    "value",
    [
        np.array(3.5, np.float32),
        np.zeros((0, 4), np.int64),
        np.array([["ä", ""], ["b", "long"]], object),
        np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
        np.array([-8, 7], ml_dtypes.int4),
    ],
)
def test_tensors_come_back_as_they_were(tmp_path: Path, value: np.ndarray[Any, Any]) -> None:
    held = write_tensor(str(tmp_path / "t"), value)
    found = read_tensor(held)
    assert (found.dtype, found.shape) == (value.dtype, value.shape) == (held.dtype, held.shape)
    assert found.tolist() == value.tolist()
    assert held.finite
    assert read_tensor(value) is value


def test_what_is_not_finite_is_marked_and_no_room_is_said(tmp_path: Path) -> None:
    assert not write_tensor(str(tmp_path / "t"), np.array([1, np.inf], np.float32)).finite
    with pytest.raises(OutputError):
        write_tensor(str(tmp_path / "none" / "t"), np.zeros(1))


def test_the_folder_goes_with_the_work() -> None:
    crew = Crew(Twice())
    work = SharedWork(crew, one_thread=True)
    held = work.put_sample({"x": np.ones(3)})["x"]
    assert list(work.map("sizes", len, [[1], [1, 2], [], [0] * 7])) == [1, 2, 0, 7]
    assert list(work.map("none", len, [])) == []
    work.close()
    assert not Path(held.path).exists()
    crew.__exit__()
