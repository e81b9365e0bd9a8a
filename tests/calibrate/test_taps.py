"""What the numbers must not depend on, and what the runs may cost."""

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.calibrate import calibrate, taps
from onnxq.calibrate.run import observe_part
from onnxq.errors import ModelError
from onnxq.runtime import Session
from onnxq.runtime.tap import lay_out_convolutions
from onnxq.sites import TensorId
from tests.calibrate.kit import EXACT, EXACT_SITES, dataset, integers, model, numbers, plan, site, watch_steps

OBSERVERS = ("minmax", "moving_average", "percentile", "mse", "entropy", "aciq")


@settings(max_examples=40, deadline=None)
@given(
    observer=st.sampled_from(OBSERVERS),
    count=st.integers(1, 9),
    batch=st.integers(1, 10),
    limit=st.sampled_from([1, 100, 200, 2**30]),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 3),
)
def test_numbers_do_not_depend_on_batch_order_or_memory(
    observer: str, count: int, batch: int, limit: int, order: object, seed: int
) -> None:
    rows = integers(count, seed)
    sites = plan(*(site(name, observer, group="g" if name in "ab" else "") for name in EXACT_SITES))
    expected = calibrate(EXACT, sites, dataset(EXACT, rows))
    shuffled = list(range(count))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    found = calibrate(EXACT, sites, dataset(EXACT, rows[shuffled]), batch=batch, memory_limit=limit)
    assert numbers(found) == numbers(expected)
    assert found.refusals == expected.refusals == ()


def test_ragged_samples_are_all_seen() -> None:
    pool = model("g (float[N,L] x) => (float[N,L] y) { [abs] y = Abs(x) }")
    feeds = [{"x": np.full((1, length), -length, np.float32)} for length in (3, 9, 9, 4, 2)]
    sites = plan(site("x"), site("y"))
    alone = calibrate(pool, sites, dataset(pool, feeds))
    assert numbers(alone) == numbers(calibrate(pool, sites, dataset(pool, feeds), batch=4))
    assert alone.sites[1].qparams.scale == np.float32(9 / 255)


def _residual() -> onnx.ModelProto:
    shapes = {"v": (16, 16, 3, 3), "w": (16, 16, 3, 3), "u": (16,)}
    arrays = {name: np.random.default_rng(3).standard_normal(shape) / 8 for name, shape in shapes.items()}
    return model(
        """g (float[N,16,9,9] x) => (float[N,16,8,8] y) {
            [c0] a = Conv<pads = [1,1,1,1]>(x, v, u) [r0] b = Relu(a) [c1] c = Conv<pads = [1,1,1,1]>(b, w, u)
            [add] d = Add(c, b) [r1] e = HardSwish(d) [c2] f = Conv<pads = [1,1,1,1]>(e, v, u) [sum] g = Add(e, f)
            [pool] y = AveragePool<kernel_shape = [2,2]>(g) }""",
        **{name: value.astype(np.float32) for name, value in arrays.items()},
    )


def test_a_tensor_has_the_same_bits_in_the_layout_of_the_cpu_whatever_else_is_tapped() -> None:
    residual, names = _residual(), [TensorId(name) for name in "abcdefgy"]
    data = dataset(residual, np.random.default_rng(7).standard_normal((6, 16, 9, 9)).astype(np.float32))

    def observe(wanted: list[TensorId], limit: int, batch: int) -> dict[TensorId, bytes]:
        tapped, values = taps.Taps(residual, wanted, limit, many=True), dict.fromkeys(wanted, b"")
        for group in tapped.form_groups(data.batches(batch)):
            for _, tensor, value in tapped.run(group, data.batches(batch), data):
                values[tensor] += value.tobytes()
        return values

    whole = observe(names, 2**30, 1)
    assert observe(names, 1, 1) == observe(names, 2**30, 4) == whole
    assert observe(names[::3], 2**30, 1) == {name: whole[name] for name in names[::3]}
    domains = {node.domain for node in lay_out_convolutions(residual).graph.node}
    assert ("com.microsoft.nchwc" in domains) == (platform.machine() in ("x86_64", "AMD64"))


def test_parts_of_many_samples_are_laid_out_as_their_whole() -> None:
    residual, count = _residual(), taps.MANY
    rows = np.random.default_rng(7).standard_normal((count, 16, 9, 9)).astype(np.float32)
    data, sites = dataset(residual, rows), plan(*(site(name) for name in "abcdefgy"))
    part = observe_part(residual, sites, data, range(count))
    assert numbers(calibrate(residual, sites, data, observed=part)) == numbers(calibrate(residual, sites, data))


def test_every_part_runs_as_many_batches_side_by_side_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's threads decide the last bits of sums."""
    sizes = [8] * taps.MANY + [32, 32]
    feeds = [{"x": np.ones((1, 4, size), np.float32)} for size in sizes]
    free = model("g (float[N,4,L] x) => (float[N,4,L] y) { [relu] y = Relu(x) }")
    threads: list[int] = []
    monkeypatch.setattr(taps, "share_cores", lambda runs: 8 // runs)
    monkeypatch.setattr(taps, "Session", lambda *args, **kw: threads.append(kw["threads"]) or Session(*args, **kw))
    for positions in (range(3), range(taps.MANY, len(sizes))):
        observe_part(free, plan(site("y")), dataset(free, feeds), positions, memory_limit=1024)
    assert threads == [1, 1]


FIXED = model(
    """g (float[N,2,3] x) => (float[1,6] y) <int64[2] shape = {1, 6}, float[2,1] w = {3, 5}> {
        [scale] a = Mul(x, w) [flat] y = Reshape(a, shape) }"""
)


@pytest.mark.parametrize("limit", [1, 2**30])
def test_a_batch_the_model_cannot_take_goes_through_sample_by_sample(limit: int) -> None:
    data = dataset(FIXED, np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32))
    batch = next(iter(data.batches(3)))
    assert batch.count == 3
    with pytest.raises(ModelError, match="flat"):
        Session(FIXED).run(batch.feeds)
    sites = plan(site("a"), site("y"), site("x"))
    one_by_one = calibrate(FIXED, sites, data, batch=1)
    assert numbers(calibrate(FIXED, sites, data, batch=3, memory_limit=limit)) == numbers(one_by_one)


def test_a_model_that_cannot_run_says_where() -> None:
    gather = model("g (float[N,3] x, int64[N,1] i) => (float[N,1,3] y) { [pick] y = Gather(x, i) }")
    data = {"x": np.ones((4, 3), np.float32), "i": np.array([[0], [0], [5], [0]])}
    for batch in (1, 4):
        with pytest.raises(ModelError, match=r"pick.*sample 2"):
            calibrate(gather, plan(site("y")), dataset(gather, data), batch=batch)


@pytest.mark.parametrize("declared", [True, False])
def test_no_run_gives_more_than_the_limit(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"t{k}" for k in range(9)]
    lines = [f"[n{k}] t{k + 1} = Relu(t{k})" for k in range(8)]
    chain = model(f"g (float[N,8] t0) => (float[N,8] t8) {{ {' '.join(lines)} }}")
    if not declared:
        del chain.graph.value_info[:]
    seen: list[int] = []
    run = Session.run

    def watched(self: Session, feeds: object, outputs: object = None) -> dict[str, np.ndarray]:
        found = run(self, feeds, outputs)  # type: ignore[arg-type]
        if all(value.dtype == np.float32 for value in found.values()):
            seen.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(Session, "run", watched)
    rows = np.random.default_rng(0).standard_normal((10, 8)).astype(np.float32)
    sites = plan(*(site(name) for name in names))
    # A sample's tensor has 32 bytes; three samples in a batch, three tensors a run.
    limited = calibrate(chain, sites, dataset(chain, rows), batch=3, memory_limit=300)
    assert max(seen) == 288
    assert len(seen) == 3 * 4
    seen.clear()
    free = calibrate(chain, sites, dataset(chain, rows), batch=3)
    assert max(seen) == 9 * 96
    assert numbers(limited) == numbers(free)


def test_a_larger_sample_later_on_is_split_up(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = model("g (float[N,L] a) => (float[N,L] c) { [n0] b = Relu(a) [n1] c = Neg(b) }")
    monkeypatch.setattr("onnxq.calibrate.taps._LOOK_AHEAD", 1)
    feeds = [{"a": np.ones((1, length), np.float32)} for length in (2, 50, 2)]
    made: list[tuple[TensorId, ...]] = []
    runner = taps.Taps._open_runner

    def watched(self: taps.Taps, group: tuple[TensorId, ...]) -> object:
        made.append(group)
        return runner(self, group)

    monkeypatch.setattr(taps.Taps, "_open_runner", watched)
    sites = plan(site("a"), site("b"), site("c"))
    found = calibrate(chain, sites, dataset(chain, feeds), memory_limit=400)
    assert [len(group) for group in made] == [3, 2, 1]
    assert found.calibrated


def test_progress_is_told_for_every_sample_of_every_pass() -> None:
    steps: list[int] = []
    totals: list[int | None] = []
    sites = plan(*(site(name) for name in EXACT_SITES))
    progress = watch_steps(steps.append, totals.append)
    calibrate(EXACT, sites, dataset(EXACT, integers(6)), batch=2, memory_limit=200, progress=progress)
    assert (totals, sum(steps)) == ([3 * 6], 3 * 6)


_CHILD = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from tests.calibrate.kit import dataset, model, plan, site
from onnxq.calibrate import calibrate
lines = " ".join(f"[n{k}] t{k + 1} = Relu(t{k})" for k in range(12))
chain = model(f"g (float[N,1000000] t0) => (float[N,1000000] t12) {{ {lines} }}")
feeds = [{"t0": np.ones((1, 1000000), np.float32)}] * int(sys.argv[2])
sites = plan(*(site(f"t{k}", "percentile") for k in range(13)))
limit = int(sys.argv[3])
found = calibrate(chain, sites, dataset(chain, feeds), memory_limit=limit)
assert found.calibrated
# Not ru_maxrss: it still holds the peak of the process this one was forked from.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def _peak_mib(samples: int, limit: int) -> float:
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", _CHILD, root, str(samples), str(limit)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_by_one_batch_and_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 MB a tensor, 52 MB of taps for a sample.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    few, many = _peak_mib(2, 2**30), _peak_mib(14, 2**30)
    tight = _peak_mib(2, 10 * 2**20)
    assert many - few < 16
    assert few - tight > 20


def test_the_model_is_not_changed() -> None:
    before = EXACT.SerializeToString(deterministic=True)
    calibrate(EXACT, plan(site("a"), site("c")), dataset(EXACT, integers(3)), memory_limit=1)
    assert EXACT.SerializeToString(deterministic=True) == before
