"""Weights: the same scales by workers and from a journal, channels that count, broken values; calibration in parts."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxq.backends import load_config
from onnxq.calibrate import calibrate, constants
from onnxq.calibrate.constants import WeightTask, check_constants, estimate_importance, search_piece, weight_numbers
from onnxq.calibrate.parts import Part, join_parts, read_part, split_evenly, write_part
from onnxq.calibrate.run import observe_part
from onnxq.commands.quantize import quantize
from onnxq.errors import CalibrationError, PlanError
from onnxq.graph import GraphIndex, get_index, light, load_model, name_nodes
from onnxq.numerics import fake_quant
from onnxq.observers import list_observers
from onnxq.plan import Plan, SitePlan
from onnxq.runtime.crew import Crew
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, QParams, QuantSpec
from onnxq.workers import Journal, Workers
from tests.calibrate.kit import EXACT, EXACT_SITES, dataset, integers, model, numbers, plan, site, watch_steps
from tests.networks import add_arrays, parse_text
from tests.passes.rounding.test_sequential import Twice

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
        add_arrays(proto.graph, **{f"w{k}": rng.standard_t(5, shape).astype(np.float32)})
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}_data", size_threshold=1024)
    return path


def find_numbers(path: Path, crew: Crew | None = None, sites: Sequence[SitePlan] = SITES) -> list[bytes]:
    found = weight_numbers(get_index(name_nodes(load_model(path, lazy=True).light)), sites, [], {}, crew=crew)
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
        if tasks[0].site.name == "w3":
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
    found = weight_numbers(get_index(name_nodes(load_model(path, lazy=True).light)), SITES, [], {})
    assert find_numbers(path) == wanted
    # Mapped, so that nobody writes into them and their memory can be let go of.
    assert not any(array.flags.writeable for one in found.values() for array in (one.scale, one.zero_point))


# ---- What the inputs of a weight say of its channels.

GAMMA = np.array([0.1, 1, 2, 4], np.float32)
TEXT = """
<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>
net (float[N, 4] x) => (float[N, 3] y)
<float[4] gamma = {0.1, 1, 2, 4}, float[4] beta = {1, 0, 0, 0}, float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12},
 float[3, 4] t = {1,2,3,4,5,6,7,8,9,10,11,12}>
"""


def _weigh(body: str, name: str = "w", shape: tuple[int, ...] = (4, 3)) -> Any:
    index = GraphIndex(parser.parse_model(TEXT + body))
    edges = tuple(Edge(node.name, 1) for node in index.nodes if node.op_type in ("MatMul", "Gemm"))
    return estimate_importance(
        index, SitePlan(site=TensorId(name), role=Role.WEIGHT, spec=QuantSpec(), consumers=edges), shape
    )


@pytest.mark.parametrize(
    ("norm", "beta"),
    [
        ("LayerNormalization (x, gamma, beta)", 1),
        ("LayerNormalization (x, gamma)", 0),
        ("com.microsoft.SkipSimplifiedLayerNormalization (x, x, gamma)", 0),
        ("Mul (gamma, x)", 0),
    ],
)
def test_power_of_channels_is_that_of_the_norms_scale_and_bias(norm: str, beta: float) -> None:
    power = GAMMA**2 + [beta, 0, 0, 0]
    wanted = np.maximum(power / power.mean(), 1e-3)
    found = _weigh(f"{{ [n] h = {norm} [m] y = MatMul (h, w) }}")
    np.testing.assert_allclose(found, wanted[:, None], rtol=1e-6)
    turned = _weigh(f"{{ [n] h = {norm} [m] y = Gemm <transB = 1> (h, t) }}", "t", (3, 4))
    np.testing.assert_allclose(turned, wanted[None, :], rtol=1e-6)


def test_other_inputs_say_nothing() -> None:
    assert _weigh("{ [n] h = Relu (x) [m] y = MatMul (h, w) }") is None
    assert _weigh("{ [m] y = MatMul (x, w) }") is None
    # A weight with another reader counts both.
    found = _weigh("{ [n] h = Mul (x, gamma) [m] y = MatMul (h, w) [r] a = Relu (x) [k] b = MatMul (a, w) }")
    assert found.mean() == pytest.approx(1)
    assert found.max() < (GAMMA**2 / np.mean(GAMMA**2)).max()


def test_blocks_behind_a_norm_are_rounded_for_the_output() -> None:
    rng = np.random.default_rng(0)
    gamma, w = np.exp(rng.normal(size=64)).astype(np.float32), rng.laplace(size=(64, 16)).astype(np.float32)
    errors = []
    x = rng.normal(size=(500, 64)).astype(np.float32)
    for norm in ("LayerNormalization (x, g)", "Relu (x)"):
        text = f"net (float[N, 64] x) => (float[N, 16] y) {{ [n] h = {norm} [m] y = MatMul (h, w) }}"
        proto = parse_text(text, opset=21, ir=10, g=gamma, w=w)
        site = quantize(proto, None, load_config("ort-int4-weights")).plan.sites[0]
        gap = fake_quant(w, site.qparams, site.spec) - w
        errors.append(np.square((x * gamma) @ gap).sum())
    assert errors[0] < 0.95 * errors[1]


# ---- Constants that hold NaN or inf: errors name them and the node that they break.


def index_of(body: str, value: float) -> GraphIndex:
    """A model of this body, in which one element of the constant c is `value`."""
    proto = model(f"g (float[2,4] x, bool[2,4] b) => (float[n,k] y) {{ {body} }}")
    constant = np.ones((4, 4), np.float32)
    constant[1, 2] = value
    proto.graph.initializer.append(numpy_helper.from_array(constant, "c"))
    return GraphIndex(name_nodes(onnx.shape_inference.infer_shapes(proto)))


PRODUCTS = ("y = MatMul(x, c)", "y = Gemm(x, c)", "t = Transpose(c) h = Cast<to=1>(t) y = MatMul(x, h)")
# A NaN is one whatever it is added to or multiplied by; infinities are masks, or make 0 of what they divide.
SUMS = ("h = MatMul(x, x) y = Add(h, c)", "y = Mul(c, c)", "y = LayerNormalization(x, c, c)", "y = Gemm(x, x, c)")
LEGAL = ("y = Where(b, x, c)", "y = Gather(c, x)", "y = Max(x, c)", "h = IsNaN(c) y = Cast<to=1>(h)")


@pytest.mark.parametrize("body", PRODUCTS + SUMS)
def test_a_weight_that_holds_nan_is_named_with_its_node(body: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        check_constants(index_of(body, np.nan))
    assert (caught.value.code, caught.value.subject) == ("Q503", "c")
    assert re.fullmatch(r"is a weight of \S+ \(\w+\) and holds 1 NaN", caught.value.cause)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_weight_of_a_product_is_broken_and_any_other_is_not(value: float) -> None:
    for body in PRODUCTS:
        with pytest.raises(CalibrationError, match="holds 1 inf"):
            check_constants(index_of(body, value))
    for body in SUMS + LEGAL:
        check_constants(index_of(body, value))


@pytest.mark.parametrize("body", LEGAL)
def test_a_value_that_may_not_be_used_is_legal(body: str) -> None:
    check_constants(index_of(body, np.nan))


ROWS = integers(10)
SAMPLES = dataset(EXACT, ROWS)
PLAN = plan(*(site(name, observer) for name, observer in zip(EXACT_SITES, list_observers(), strict=False)))
SHARDS = [range(4), range(4, 5), range(5, 10)]


def save(folder: Path, part: Part, name: str) -> Part:
    path = folder / name
    path.write_text(write_part(part))
    return read_part(path)


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    return [save(tmp_path, observe_part(EXACT, PLAN, SAMPLES, run), f"{k}.json") for k, run in enumerate(SHARDS)]


def test_joined_parts_give_the_same_numbers(parts: list[Part], tmp_path: Path) -> None:
    assert [len(part.missing) for part in parts] == [6, 9, 5]
    first = save(tmp_path, join_parts([parts[2], parts[0]]), "some.json")
    whole = save(tmp_path, join_parts([parts[1], first]), "all.json")
    found = calibrate(EXACT, PLAN, SAMPLES, observed=whole)
    assert numbers(found) == numbers(calibrate(EXACT, PLAN, SAMPLES))


def test_a_constant_of_a_group_counts_once() -> None:
    shared = plan(*(site(name, group="g") for name in ("m", "c")))
    found = calibrate(EXACT, shared, SAMPLES, observed=observe_part(EXACT, shared, SAMPLES, range(10)))
    assert numbers(found) == numbers(calibrate(EXACT, shared, SAMPLES))


def test_parts_that_do_not_belong_together_are_refused(parts: list[Part]) -> None:
    with pytest.raises(CalibrationError, match=r"lacks 6 of 10 samples: .*sample 4, .* and 1 more \[Q512\]"):
        calibrate(EXACT, PLAN, SAMPLES, observed=parts[0])
    with pytest.raises(CalibrationError, match=r"holds sample 4, which another part holds too \[Q512\]"):
        join_parts([parts[1], parts[1]])
    whole = join_parts(parts)
    for changed, name in (
        ({"proto": EXACT, "plan": plan(site("x"))}, "configuration"),
        ({"dataset": dataset(EXACT, integers(10, seed=3))}, "data"),
    ):
        given: dict[str, Any] = {"proto": EXACT, "plan": PLAN, "dataset": SAMPLES} | changed
        with pytest.raises(CalibrationError, match=rf"made with another {name} than this run \[Q511\]"):
            calibrate(**given, observed=whole)
        other = observe_part(**given, positions=range(5))
        with pytest.raises(CalibrationError, match=rf"another {name} than "):
            join_parts([parts[2], other])
    # The first sample alone tells data sets apart; the others show when they are read.
    rows = ROWS.copy()
    rows[7] = 0
    with pytest.raises(CalibrationError, match=r"made with other values of .*sample 7 \[Q511\]"):
        calibrate(EXACT, PLAN, dataset(EXACT, rows), observed=whole)


def test_a_plan_of_weights_has_no_parts() -> None:
    with pytest.raises(PlanError, match="nothing to calibrate"):
        observe_part(EXACT, plan(), SAMPLES, range(3))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "onnxq.ranges", "schema": 2}', '{"kind": "onnxq.ranges", "schema": 1}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match="Q513"):
        read_part(path)


def test_damaged_numbers_are_refused(parts: list[Part], tmp_path: Path) -> None:
    good = (tmp_path / "0.json").read_text()
    for old, new in (
        ('"arrays": [\n  "', '"arrays": [\n  "AAAA'),
        ("minimum", "minimal"),
        ('\\"aciq\\"', '\\"aciqq\\"'),
    ):
        assert old in good
        (tmp_path / "0.json").write_text(good.replace(old, new))
        with pytest.raises(CalibrationError, match=r"is damaged .*\[Q513\]"):
            read_part(tmp_path / "0.json")


# ---- Parts that workers do: the same numbers as in this process, whoever did which chunk, and from a journal.


def test_processes_and_journals_give_the_same_numbers(processes: Crew, tmp_path: Path) -> None:
    wanted = numbers(calibrate(EXACT, PLAN, SAMPLES))

    def find(crew: Crew, given: Plan = PLAN) -> list[tuple[bytes, bytes] | None]:
        return numbers(calibrate(EXACT, given, SAMPLES, batch=3, crew=crew))

    assert find(processes) == wanted
    assert find(Crew(Workers(Journal(tmp_path)))) == wanted
    assert len(list(tmp_path.iterdir())) == len(ROWS)
    with Crew(Workers(Journal(tmp_path))) as again:
        assert find(again) == wanted
        assert again.workers.journal.used == len(ROWS)
        # Of another configuration none is taken.
        assert find(again, plan(*(site(name, "percentile") for name in EXACT_SITES))) != wanted
        assert again.workers.journal.used == len(ROWS)


@pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there")
def test_a_killed_worker_changes_nothing(processes: Crew) -> None:
    killed: list[int] = []

    def kill(_: int) -> None:
        if not killed:
            killed.append(processes.workers.members[0].process.pid)  # type: ignore[attr-defined]
            os.kill(killed[0], signal.SIGKILL)

    found = calibrate(EXACT, PLAN, SAMPLES, crew=processes, progress=watch_steps(kill))
    assert killed
    assert numbers(found) == numbers(calibrate(EXACT, PLAN, SAMPLES))


def test_the_sample_at_fault_is_named(processes: Crew) -> None:
    rows = ROWS.copy()
    rows[[5, 7], 0, 0] = np.finfo(np.float32).max
    # The last one of these crews meets sample 7 first.
    for crew in (None, processes, Crew(Twice())):
        with pytest.raises(CalibrationError, match=r"y: .*, sample 5"):
            calibrate(EXACT, plan(site("y")), dataset(EXACT, {"x": rows}), crew=crew)


def test_runs_are_even_and_none_is_empty() -> None:
    assert [list(run) for run in split_evenly(range(7), 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(run) for run in split_evenly(range(2), 64)] == [[0], [1]]
