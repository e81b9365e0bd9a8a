"""The sweep in a run: what it changes and leaves, a plan repeats it without data, and who does it does not show."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import onnxq
from onnxq.config import Config, TensorConfig
from onnxq.errors import OutputError, PlanError
from onnxq.passes.assembly import build_quantized
from onnxq.passes.rounding import sequential
from onnxq.passes.rounding.layerwise import augment_samples
from onnxq.passes.rounding.sequential import FinishedOperators, OperatorNumbers, hash_rounding, round_sequentially
from onnxq.passes.rounding.shared_work import SharedWork, read_tensor, write_tensor
from onnxq.plan import from_json, to_json
from onnxq.progress import Task, silent
from onnxq.runtime import Session
from onnxq.runtime.crew import Crew
from onnxq.sites import Role
from onnxq.workers import Journal, Workers, WorkPiece, count_threads
from onnxq.workers.base import Finished, R, T, run_guarded
from tests.evaluation import selecting
from tests.graph.shape_nets import ShapeNet
from tests.passes.kit import parse
from tests.passes.rounding.kit import ALL, FOUR, calibrated
from tests.pipeline.models import images, list_accounts, quantize, residual, to_bytes


def error(model: onnx.ModelProto, wanted: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> float:
    got, ref = (Session(one, optimize=False).run(feeds) for one in (model, wanted))
    return float(sum(((got[name] - ref[name]) ** 2).sum() for name in ref))


@pytest.fixture(scope="module")
def done() -> onnxq.Result:
    return quantize(residual(), images(32), FOUR)


def test_four_bit_weights_lose_less_and_a_plan_repeats_them_without_data(done: onnxq.Result, tmp_path: Path) -> None:
    plain = quantize(residual(), images(32), FOUR, effort="fast")
    fresh = images(64, seed=9)
    assert error(done.model, residual(), fresh) < 0.5 * error(plain.model, residual(), fresh)
    assert "rounded by moments" in list_accounts(done, "rounding")[0]
    weights = [site for site in done.plan.sites if site.role is Role.WEIGHT]
    assert all(site.values is not None and abs(site.values).max() <= 7 for site in weights)
    (tmp_path / "plan.json").write_text(done.plan_json())
    applied = onnxq.apply(residual(), tmp_path / "plan.json")
    again = quantize(residual(), images(32), FOUR)
    # The same samples give the same bytes.
    assert to_bytes(applied) == to_bytes(again) == to_bytes(done)
    assert from_json((tmp_path / "plan.json").read_text()) == done.plan


def test_other_weights_are_not_given_the_old_ones_levels(done: onnxq.Result) -> None:
    trained = residual(seed=5)
    again = onnxq.apply(trained, done.plan, overrides={"new_weights": True})
    assert all(site.values is None for site in again.plan.sites)
    assert not again.plan.biases
    assert error(again.model, trained, images(8)) < 0.2 * float((Session(trained).run(images(8))["y"] ** 2).sum())


def test_values_that_do_not_fit_are_refused(done: onnxq.Result) -> None:
    first = next(site for site in done.plan.sites if site.role is Role.WEIGHT)
    for wrong in (first.values.T[:-1], first.values.astype(np.int16), np.full_like(first.values, 99)):
        sites = tuple(replace(s, values=wrong) if s is first else s for s in done.plan.sites)
        with pytest.raises(PlanError, match="do not fit"):
            onnxq.apply(residual(), replace(done.plan, sites=sites))


@pytest.mark.parametrize(
    ("overrides", "data"), [({"effort": "fast"}, images()), ({"skip": (*FOUR.skip, "rounding")}, images()), ({}, None)]
)
def test_fast_skip_and_made_up_samples_leave_the_plan(overrides: dict[str, Any], data: Any) -> None:
    found = quantize(residual(), data, FOUR, **overrides)
    assert all(site.values is None for site in found.plan.sites)
    assert list_accounts(found, "rounding") == []


def draw(seed: int, scale: float, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) / scale for name, shape in shapes.items()}


def matmuls() -> onnx.ModelProto:
    text = """g (float[N,6,32] x) => (float[N,6,16] y) {
        a = MatMul(x, w0) b = Add(a, b0) c = Relu(b) d = MatMul(c, w1) y = Relu(d)
    }"""
    return parse(text, **draw(0, 5, w0=(32, 48), b0=(48,), w1=(48, 16)))


def tokens(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Correlated, as tokens are: noise of independent columns leaves rounding nothing to spread."""
    mixed = np.random.default_rng(7).standard_normal((8, 32))
    drawn = np.random.default_rng(seed).standard_normal((count, 6, 8)) @ mixed / 3
    return {"x": (drawn + 0.5).astype(np.float32)}


@pytest.mark.parametrize(
    "weights",
    [
        TensorConfig(granularity="channel", bits=4),
        TensorConfig(granularity="block", block_size=16, bits=4, storage="int4"),
        TensorConfig(granularity="block", block_size=16, bits=4, scheme="asymmetric", storage="uint4"),
    ],
)
def test_weights_only(weights: TensorConfig) -> None:
    config = Config(mode="weight-only", weights=weights, rules=ALL)
    prepared, plan, samples = calibrated(matmuls(), tokens(24), config)
    found = round_sequentially(prepared.model, plan, samples, progress=silent)
    assert [one.kind for one in found.done] == ["MatMul", "MatMul"]
    fresh = tokens(24, seed=3)
    before, after = (error(build_quantized(prepared, p), matmuls(), fresh) for p in (plan, found.plan))
    assert after < 0.8 * before
    assert from_json(to_json(found.plan)) == found.plan


def test_the_add_behind_a_matmul_takes_the_correction_and_other_readers_do_not() -> None:
    proto = matmuls()
    proto.graph.node.append(onnx.helper.make_node("Identity", ["b0"], ["untouched"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("untouched", 1, [48]))
    config = Config(mode="weight-only", weights=TensorConfig(granularity="channel", bits=2), rules=ALL)
    prepared, plan, samples = calibrated(proto, tokens(24), config)
    found = round_sequentially(prepared.model, plan, samples, progress=silent)
    assert len(found.plan.biases) == 1
    runs = [Session(m, optimize=False).run(tokens(24)) for m in (build_quantized(prepared, found.plan), proto)]
    assert np.array_equal(runs[0]["untouched"], runs[1]["untouched"])
    bare = build_quantized(prepared, replace(found.plan, biases=()))
    assert error(build_quantized(prepared, found.plan), proto, tokens(24)) < 0.9 * error(bare, proto, tokens(24))


def test_a_convolution_without_bias_gets_one() -> None:
    text = """g (float[N,16,9,9] x) => (float[N,16,4,4] y) {
        a = Conv <group=4, strides=[2,2]>(x, w) y = Conv <group=16, pads=[1,1,1,1]>(a, v) }"""
    proto = parse(text, **draw(1, 1, w=(16, 4, 3, 3), v=(16, 1, 3, 3)))
    feeds = {"x": np.random.default_rng(2).standard_normal((24, 16, 9, 9)).astype(np.float32) + 1}
    config = FOUR.model_copy(update={"weights": TensorConfig(granularity="channel", bits=4)})
    prepared, plan, samples = calibrated(proto, feeds, config)
    found = round_sequentially(prepared.model, plan, samples, progress=silent)
    assert [one.kind for one in found.done] == ["Conv", "depthwise Conv"]
    assert len(found.plan.biases) == 2
    before, after = (error(build_quantized(prepared, p), proto, feeds) for p in (plan, found.plan))
    assert after < 0.7 * before


def branching() -> onnx.ModelProto:
    """Two convolutions in one branch of an If."""
    text = """g (bool on, float[N,32,8,8] x) => (float[N,32,8,8] y) {
        h = Relu(x)
        y = If (on) <
            then_branch = t () => (float[N,32,8,8] ty) { ta = Conv <pads=[1,1,1,1]>(h, w, b)
              tr = Relu(ta)
              ty = Conv <pads=[1,1,1,1]>(tr, v, b) },
            else_branch = e () => (float[N,32,8,8] ey) { ey = Neg(h) }>
    }"""
    return parse(text, **draw(2, 12, w=(32, 32, 3, 3), v=(32, 32, 3, 3), b=(32,)))


def flags() -> list[dict[str, np.ndarray]]:
    """Samples for `branching`, of which every other one takes the branch."""
    inputs = np.random.default_rng(3).standard_normal((12, 1, 32, 8, 8)).astype(np.float32)
    return [{"on": np.array(k % 2 == 0), "x": x} for k, x in enumerate(inputs)]


def test_inside_a_branch() -> None:
    proto, samples = branching(), flags()
    prepared, plan, _ = calibrated(proto, samples, FOUR)
    found = round_sequentially(prepared.model, plan, samples, progress=silent)
    assert len(found.done) == 2
    assert not found.skipped
    before, after = (
        sum(error(build_quantized(prepared, p), proto, one) for one in samples[::2]) for p in (plan, found.plan)
    )
    assert after < 0.7 * before
    unreached = round_sequentially(prepared.model, plan, samples[1::2], progress=silent)
    assert len(unreached.skipped) == 2
    assert unreached.plan.sites == plan.sites


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
    assert (found.count, found.scarce, found.values) == (7, True, None)
    # A name for people is no difference; the operators before are.
    renamed = hash_rounding(same[0], replace(plan, data="d.npz"), *same[2:])
    assert FinishedOperators(Journal(tmp_path), renamed).read_next("node")
    assert again.read_next("node") is None
    for k, other in enumerate((residual(seed=1), replace(plan, opset=99), changed, samples[:2], "others")):
        given = (*same[:k], other, *same[k + 1 :])
        key = hash_rounding(*given)  # type: ignore[arg-type]
        assert FinishedOperators(Journal(tmp_path), key).read_next("node") is None


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
