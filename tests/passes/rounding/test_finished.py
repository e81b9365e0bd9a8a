"""A rounding that is interrupted after each operator: the next run takes those before from the journal."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxq.passes.rounding import sequential
from onnxq.passes.rounding.layerwise import augment_samples
from onnxq.passes.rounding.sequential import FinishedOperators, OperatorNumbers, hash_rounding, round_sequentially
from onnxq.plan import to_json
from onnxq.progress import Task, silent
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, Workers
from tests.passes.rounding.kit import FOUR, calibrated
from tests.pipeline.models import images, residual


class Stopped(Exception):
    """In place of a signal."""


class Steps(Task):
    """Stops the run after so many steps."""

    def __init__(self, left: int) -> None:
        self.left = left

    def advance(self, steps: int = 1) -> None:
        self.left -= steps
        if not self.left:
            raise Stopped


def test_every_run_rounds_one_operator_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Gemm looks in front of its pooling, and at augmented samples, also where nothing ran before it."""
    prepared, plan, samples = calibrated(residual(), images(8), FOUR)
    others = augment_samples(samples, plan, ())
    wanted = round_sequentially(prepared.model, plan, samples, others=others, progress=silent)
    assert len(wanted.done) == 4
    gathered: list[str] = []

    def gather(*args: object, threads: int) -> object:
        gathered.append(args[2].reader)  # type: ignore[attr-defined]
        return real(*args, threads=threads)  # type: ignore[arg-type]

    real = sequential.gather_statistics
    monkeypatch.setattr(sequential, "gather_statistics", gather)
    for count in (1, 2, 3, 4, 0):

        @contextmanager
        def stop_progress(_: str, __: int | None = None, count: int = count) -> Iterator[Task]:
            yield Steps(count)

        crew = Crew(Workers(Journal(tmp_path)))
        if count:
            with pytest.raises(Stopped):
                round_sequentially(prepared.model, plan, samples, others=others, crew=crew, progress=stop_progress)
        else:
            found = round_sequentially(prepared.model, plan, samples, others=others, crew=crew, progress=stop_progress)
        # The third reads what the second did, whose statistics are gone with its run.
        assert len(gathered) == (count or 4)
    assert to_json(found.plan) == to_json(wanted.plan)
    assert (found.done, found.skipped, found.thin) == (wanted.done, wanted.skipped, wanted.thin)


def test_nothing_is_taken_from_another_rounding(tmp_path: Path) -> None:
    prepared, plan, samples = calibrated(residual(), images(4), FOUR)
    changed = [{"x": samples[0]["x"] + np.float32(1e-3)}, *samples[1:]]
    same = (prepared.model, plan, samples, samples[:1], "options")
    FinishedOperators(Journal(tmp_path), hash_rounding(*same)).read_next("node")
    written = FinishedOperators(Journal(tmp_path), hash_rounding(*same))
    assert written.read_next("node") is None
    written.write_numbers(OperatorNumbers(7, True, bias=np.ones(3)))
    again = FinishedOperators(Journal(tmp_path), hash_rounding(*same))
    found = again.read_next("node")
    assert found is not None
    assert (found.count, found.scarce, found.values) == (7, True, None)
    # A name for people is no difference; the operators before are.
    renamed = hash_rounding(same[0], replace(plan, data="d.npz"), *same[2:])
    assert FinishedOperators(Journal(tmp_path), renamed).read_next("node")
    assert again.read_next("node") is None
    for k, other in enumerate((residual(seed=1), replace(plan, opset=99), changed, samples[:2], "others")):
        given = (*same[:k], other, *same[k + 1 :])
        key = hash_rounding(*given)  # type: ignore[arg-type]
        assert FinishedOperators(Journal(tmp_path), key).read_next("node") is None
