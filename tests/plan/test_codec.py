"""Plan <-> JSON: nothing is lost, bytes are stable, and what a person mistypes is named."""

import base64
import json
import random
import re
import time
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import onnxq
from onnxq.errors import OnnxqError, PlanError
from onnxq.plan import (
    AttentionChoice,
    AttentionKind,
    BiasPlan,
    PlacementChoice,
    PlacementMethod,
    Plan,
    SitePlan,
    from_json,
    to_json,
)
from onnxq.plan.forms import read_array, read_mark, write_array, write_mark
from onnxq.sites import Caution, Edge, LeftFloat, Refusal, Role, TensorId
from onnxq.spec import (
    FLOAT8,
    STORAGE_BITS,
    ObserverSpec,
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    find_numpy_storage,
)
from tests.pipeline.models import EVERYTHING, images, residual

names = st.text(min_size=1, max_size=12)
sites = st.one_of(
    st.builds(TensorId, names, st.sampled_from(["", "If_0.then_branch"])),
    st.builds(Edge, names, st.integers(0, 5), st.sampled_from(["", "Loop.body"])),
)
grains = st.one_of(
    st.just(PerTensor()),
    st.builds(PerChannel, st.integers(0, 3)),
    st.builds(PerBlock, st.just(0), st.sampled_from([16, 32])),
)
specs = st.builds(
    QuantSpec,
    bits=st.sampled_from([2, 3, 4, 8, 16]),
    signed=st.booleans(),
    symmetric=st.booleans(),
    granularity=grains,
    footroom=st.booleans(),
    min_range=st.sampled_from([0.0, 1e-4, 2.0]),
)
scales = st.lists(st.floats(2**-20, 2**20, width=32), min_size=1, max_size=100)
bounds = st.one_of(st.none(), st.floats(-10, 10))


@st.composite
def site_plans(draw: st.DrawFn) -> SitePlan:
    numbers = None
    if draw(st.booleans()):
        scale = np.asarray(draw(scales), np.float32)
        numbers = QParams(scale, np.arange(scale.size, dtype=np.int32), draw(names))
    return SitePlan(
        site=draw(sites),
        role=draw(st.sampled_from(Role)),
        spec=draw(specs),
        qparams=numbers,
        observer=draw(st.sampled_from([ObserverSpec(), ObserverSpec("percentile", (("percentile", 99.9),))])),
        rule=draw(names),
        reason=draw(names),
        consumers=draw(st.none() | st.lists(st.builds(Edge, names, st.integers(0, 3)), max_size=3).map(tuple)),
        bound=(draw(bounds), draw(bounds)),
        derived=draw(st.none() | st.tuples(sites, sites)),
        group=draw(st.sampled_from(["", "x"])),
        tensor=draw(st.none() | st.builds(TensorId, names, st.sampled_from(["", "If_0.then_branch"]))),
        anchor=draw(st.sampled_from(["", "ab12"])),
    )


placements = st.builds(
    PlacementChoice,
    method=st.sampled_from(PlacementMethod),
    cpu=st.sampled_from(["", "any", "avx2"]),
    candidate=names,
    threads=st.integers(0, 8),
    speedups=st.dictionaries(names, st.floats(0.01, 9.0), max_size=2),
)
decibels = st.just(np.inf) | st.floats(-20, 200)
attentions = st.builds(
    AttentionChoice,
    kind=st.sampled_from(AttentionKind),
    float_db=decibels,
    quantized_db=decibels,
    samples=st.integers(1, 99),
)
plans = st.builds(
    Plan,
    target=st.just("ort"),
    model=names,
    topology=names,
    weights=names,
    opset=st.integers(13, 21),
    prepare=st.lists(names, max_size=3).map(tuple),
    sites=st.lists(site_plans(), max_size=4).map(tuple),
    float_nodes=st.lists(names, max_size=2).map(tuple),
    refusals=st.lists(st.builds(Refusal, names, names, names, names), max_size=2).map(tuple),
    kept=st.lists(names, max_size=2).map(tuple),
    left_float=st.lists(st.builds(LeftFloat, names, names, names, names), max_size=2).map(tuple),
    warnings=st.lists(st.builds(Caution, names, names), max_size=2).map(tuple),
    data=names,
    placement=st.none() | placements,
    attention=st.none() | attentions,
    nodes=st.dictionaries(names, names, max_size=2),
)


@given(plans)
def test_round_trip_keeps_everything(plan: Plan) -> None:
    text = to_json(plan)
    again = from_json(text)
    assert again == plan
    assert to_json(again) == text


def simple() -> Plan:
    site = SitePlan(
        site=TensorId("x"), role=Role.ACTIVATION, spec=QuantSpec(signed=False, symmetric=False), rule="conv"
    )
    return Plan(target="ort", model="m.onnx", topology="t", weights="w", sites=(site,))


def test_a_person_can_read_it() -> None:
    raw = json.loads(to_json(simple()))
    assert raw["sites"][0]["site"] == "x"
    assert raw["sites"][0]["spec"] == {"bits": 8, "type": "uint8", "scheme": "asymmetric", "granularity": "tensor"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw["sites"][0].update(site=3), "sites[0]"),
        (lambda raw: raw["sites"][0]["spec"].update(bits=9), "bit width"),
        (lambda raw: raw["sites"][0]["spec"].update(scheme="affine"), "affine"),
        (lambda raw: raw["sites"][0].update(role="wieght"), "wieght"),
        (lambda raw: raw["sites"][0].update(extra=1), "unknown key 'extra'"),
        (lambda raw: raw.update(schema=99), "schema 99"),
        (lambda raw: raw.update(extra=1), "unknown key 'extra'"),
        (lambda raw: raw.pop("target"), "target"),
        (lambda raw: raw.update(sites=3), "sites: must be a list, not 3"),
        (lambda raw: raw.update(sites=[3]), "sites[0]: must be a mapping of keys to values, not 3"),
        (lambda raw: raw["sites"][0].update(spec=3), "sites[0]"),
        (lambda raw: raw["sites"][0].update(observer=3), "sites[0]"),
        (lambda raw: raw.update(biases=[{"site": ["n", 2]}]), "values"),
        (lambda raw: raw.update(refusals=[3]), "refusals[0]: must be a mapping of keys to values, not 3"),
        (lambda raw: raw.update(refusals=[{"subject": "n", "reason": "r", "code": ""}]), "refusals[0].code"),
    ],
)
def test_a_wrong_entry_is_named(edit: object, message: str) -> None:
    raw = json.loads(to_json(simple()))
    edit(raw)  # type: ignore[operator]
    with pytest.raises(PlanError, match=re.escape(message)):
        from_json(json.dumps(raw), source="plan.json")


@pytest.mark.parametrize(
    ("text", "tool", "fix"),
    [
        ("TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "TensorRT", "onnxq import-calibration"),
        ('{"CLS": "TensorsData", "data": {"x": {"lowest": -1.0}}}', "ONNX Runtime", "give `quantize` the samples"),
        ("h 2.0\nx 1.0\n", "ONNX Runtime", "give `quantize` the samples"),
    ],
)
def test_calibration_files_of_other_tools_are_known(text: str, tool: str, fix: str) -> None:
    with pytest.raises(PlanError, match=f"is a calibration file of {tool}, and no plan") as caught:
        from_json(text, source="calibration.json")
    assert caught.value.code == "Q401"
    assert fix in caught.value.fix


@given(
    st.sampled_from([name for name in STORAGE_BITS if name != FLOAT8]),
    st.lists(st.integers(1, 12), max_size=3),
    st.integers(0, 99),
)
def test_levels_and_biases_survive(storage: str, shape: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = int(re.sub(r"\D", "", storage))
    signed = not storage.startswith("u")
    kind = np.dtype(find_numpy_storage(storage))
    low = -(2 ** (bits - 1)) if signed else 0
    values = rng.integers(low, low + 2**bits, shape).astype(kind)
    spec = QuantSpec(bits=bits, signed=signed, storage=storage)
    weight = SitePlan(site=TensorId("w"), role=Role.WEIGHT, spec=spec, values=values)
    bias = BiasPlan(edge=Edge("n", 2, "If_0.then_branch"), values=rng.standard_normal(shape).astype(np.float32))
    plan = Plan(target="ort", model="m", topology="", weights="", sites=(weight,), biases=(bias,))
    back = from_json(to_json(plan))
    assert back == plan
    assert back.sites[0].values.dtype == kind
    assert to_json(back) == to_json(plan)
    other = values.copy()
    other.flat[0] ^= 1
    assert SitePlan(site=TensorId("w"), role=Role.WEIGHT, spec=spec, values=other) != weight


def test_reasons_without_a_subject_survive() -> None:
    """A person may have taken the text out; what is written reads back all the same."""
    plan = Plan(
        target="ort", model="m", topology="t", weights="w",
        refusals=(Refusal("", "", rule="size"),), left_float=(LeftFloat("", "int8 would not pay"),),
    )  # fmt: skip
    assert from_json(to_json(plan)) == plan


# ---- Arrays in JSON: both forms, at every size and type, and the marks that say which spec numbers belong to.


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from([np.float32, np.int32, np.int8, np.uint8, np.int16, np.uint16])))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=9))
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else None
    return draw(hnp.arrays(dtype, shape, elements=finite))


@given(arrays())
def test_arrays_survive_json(array: np.ndarray) -> None:
    back = read_array(json.loads(json.dumps(write_array(array))), array.dtype)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


@pytest.mark.parametrize(("size", "packed"), [(0, False), (1, False), (64, False), (65, True)])
def test_long_arrays_are_packed(size: int, packed: bool) -> None:
    raw = write_array(np.arange(size, dtype=np.int32))
    assert isinstance(raw, dict) == packed
    assert read_array(raw, np.int32).tolist() == list(range(size))


def test_a_person_may_write_either_form_at_any_size() -> None:
    long = list(range(200))
    assert read_array(long, np.int32).tolist() == long
    short = {"shape": [2], "zlib64": base64.b64encode(zlib.compress(np.array([3, 5], "<i4").tobytes())).decode()}
    assert read_array(short, np.int32).tolist() == [3, 5]


def pack(data: bytes, shape: object) -> dict[str, object]:
    return {"shape": shape, "zlib64": base64.b64encode(zlib.compress(data)).decode()}


REFUSED = {
    "a word": ("x", np.float32, "must be numbers, not str"),
    "a truth value": ([True], np.int32, "must be numbers, not bool"),
    "nothing": ([None], np.float32, "must be numbers, not NoneType"),
    "ragged": ([[1, 2], [3]], np.int32, "lists of one length at each depth"),
    "beyond float32": ([1e39], np.float32, "must be finite float32 numbers"),
    "not a number": ([float("nan")], np.float32, "must be finite float32 numbers"),
    "beyond int8": ([128], np.int8, "whole numbers from -128 to 127"),
    "a fraction": ([0.5], np.int32, "must be whole numbers"),
    "another key": ({"shape": [1], "zlib": "x"}, np.int32, "must be numbers, or"),
    "a negative dim": (pack(b"", [-1]), np.int32, "a shape of whole numbers"),
    "a huge shape": (pack(b"", [2**20, 2**20]), np.int32, "must be smaller"),
    "too few bytes": (pack(b"1234", [2]), np.int32, "must hold 8 bytes"),
    "too many bytes": (pack(b"1" * 1000, [2]), np.int32, "must hold 8 bytes"),
    "no base64": ({"shape": [1], "zlib64": "?"}, np.int32, "cannot be unpacked"),
    "no deflate": ({"shape": [1], "zlib64": base64.b64encode(b"1234").decode()}, np.int32, "cannot be unpacked"),
    "a packed NaN": (pack(np.array([np.nan], "<f4").tobytes(), [1]), np.float32, "must be finite"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_wrong_array_says_what_it_must_be(name: str) -> None:
    raw, dtype, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        read_array(raw, dtype)


SPEC = QuantSpec(bits=4, signed=True, storage="int8", granularity=PerChannel(0))


def numbers(*scales: float, computed_for: str = "") -> QParams:
    scale = np.asarray(scales, np.float32)
    return QParams(scale, np.zeros(scale.shape, np.int32), computed_for=computed_for)


def test_a_mark_names_the_spec_of_its_numbers() -> None:
    assert read_mark(write_mark(numbers(0.5, 0.25), SPEC), numbers(0.5, 0.25)) == SPEC.levels
    older = write_mark(numbers(0.5, computed_for="8 bits signed symmetric"), SPEC)
    assert read_mark(older, numbers(0.5)) == "8 bits signed symmetric"


def test_a_mark_is_void_once_the_numbers_are_edited() -> None:
    mark = write_mark(numbers(0.5, 0.25), SPEC)
    assert read_mark(mark, numbers(0.5, 0.125)) == ""
    assert read_mark(mark, QParams(np.asarray([0.5, 0.25], np.float32), np.asarray([0, 1], np.int32))) == ""
    assert read_mark("", numbers(0.5)) == ""
    assert read_mark("8 bits signed symmetric", numbers(0.5)) == ""


# ---- Plan files that are damaged, hostile or oddly edited: a PlanError with line and path, or a plan; nothing else.

BOMB = base64.b64encode(zlib.compress(bytes(50_000_000), 9)).decode()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return onnxq.quantize(residual(), images(), EVERYTHING, overrides={"latency": False}).plan


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return to_json(plan)


VALUES = [
    10**30, 1e308, float("inf"), float("nan"), -1, 0, 1.5, True, None, "", "x", "x\0y", [], [1], [[1, 2], [3]], ["x"],
    {}, {"a": 1}, {"shape": [2**40], "zlib64": ""}, {"shape": [4], "zlib64": "!"}, {"shape": [4], "zlib64": BOMB},
    {"shape": [], "zlib64": []}, [["x", 2**70]], ["a/Conv", 99],
]  # fmt: skip


def test_odd_values_anywhere_end_in_words(text: str) -> None:
    for key in ("scale", "zero_point", "rule", "site", "scope", "bound", "consumers", "derived", "anchor", "values"):
        for value in VALUES:
            raw = json.loads(text)
            raw["sites"] = raw["sites"][:2]
            raw["sites"][1][key] = value
            fault = _fault(json.dumps(raw))
            assert fault is None or (fault.subject.startswith("p.json:") and "sites[1]" in fault.subject)


def _fault(content: str) -> PlanError | None:
    try:
        from_json(content, source="p.json")
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "recursion limit"),
        ('{"schema": 1, "sites": ' + "[" * 500 + "]" * 500 + "}", "recursion limit"),
        ('{"schema": ' + "9" * 5000 + "}", "number out of range"),
        ('{\n"schema": ,}', "p.json:2"),
        ('{"schema": 1,\n "target": "\0"}', "p.json:2"),
        ('{"schema": 1,\n "target": "\\ud800"}', "p.json:2"),
        ('{"schema": 1, "target": "ort", "target": "trt"}', "gives 'target' twice"),
        ("", "p.json:1"),
        ("\0", "p.json:1"),
    ],
)
def test_what_is_no_json_is_told_with_its_line(content: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_json(content, source="p.json")
    assert said in str(caught.value)


def test_a_fault_names_line_and_path(text: str) -> None:
    lines = text.splitlines()
    number = next(k for k, line in enumerate(lines) if '"bits"' in line)
    lines[number] = lines[number].replace("8", '"eight"')
    with pytest.raises(PlanError) as caught:
        from_json("\n".join(lines), source="p.json")
    assert caught.value.subject == f"p.json:{number + 1}: sites[0].spec.bits"
    assert (caught.value.code, caught.value.file, caught.value.line) == ("Q403", "p.json", number + 1)


def _mutate(node: Any, rng: random.Random) -> Any:
    """The JSON value with one entry, anywhere in it, changed."""
    if isinstance(node, (dict, list)) and node and rng.random() < 0.9:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        change = rng.random()
        if change < 0.15:
            del node[key]
        elif change < 0.25 and isinstance(node, dict):
            node[f"{key}x"] = node.pop(key)
        elif change < 0.35 and isinstance(node, list):
            node.append(json.loads(json.dumps(node[key])))
        else:
            node[key] = _mutate(node[key], rng)
        return node
    return rng.choice(VALUES)


def test_no_mutation_of_a_plan_is_a_defect(text: str) -> None:
    """Read, and of those that can be read a few carried out."""
    rng, outcomes, applied, model = random.Random(3), [], 0, residual()
    end = time.process_time() + 1
    for _ in range(600):
        raw = json.loads(text)
        for _ in range(rng.randint(1, 2)):
            raw["sites"] = _mutate(raw["sites"], rng) if rng.random() < 0.7 else raw["sites"]
            raw = _mutate(raw, rng) if rng.random() < 0.3 else raw
            if not isinstance(raw, dict) or not isinstance(raw.get("sites"), list):
                break
        try:
            plan = from_json(json.dumps(raw), source="p.json")
            if applied < 25:
                applied += 1
                onnxq.apply(model, plan)
            outcomes.append("carried out")
        except OnnxqError as error:
            outcomes.append(type(error).__name__)
        if time.process_time() > end:
            break
    assert {"carried out", "PlanError"} <= set(outcomes)
