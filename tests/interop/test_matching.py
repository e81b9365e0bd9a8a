"""From a cache to a plan to a Q/DQ model with those very scales; every name accounted for."""

import json
import struct
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import onnxq
from onnxq.backends import load_config
from onnxq.commands.import_calibration import import_calibration
from onnxq.config import Config, Rule, RuleSet, TensorConfig
from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.interop import Imported, read_scales
from onnxq.interop.base import UnmatchedKind
from onnxq.interop.tensorrt import HEADER, ORIGIN, parse_cache
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.cli.kit import run as invoke
from tests.codes.kit import model as parse
from tests.interop.models import OWN, cache, collect_scales, network, ranges, samples, write_cache
from tests.networks import add_arrays

FORCED = Config(activations=TensorConfig(), rules=(Rule(op=("*",), set=RuleSet(quantize=True)),))
FOLDED = "c1"  # its BatchNormalization is folded into the convolution, which then writes n1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("interop")
    onnx.save(network(), place / "m.onnx")
    (place / "m.cache").write_text(cache(ranges(network())))
    np.savez(place / "data.npz", **samples())
    return place


def imported(folder: Path, tmp: Path, scales: dict[str, np.float32], **wanted: object) -> Imported:
    (tmp / "x.cache").write_text(cache(scales))
    return onnxq.import_calibration(tmp / "x.cache", folder / "m.onnx", **wanted)  # type: ignore[arg-type]


def scales_in(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Scale of every QuantizeLinear, by the tensor it quantizes."""
    values = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    return {node.input[0]: values[node.input[1]] for node in model.graph.node if node.op_type == "QuantizeLinear"}


def run(*args: object) -> Result:
    return invoke("import-calibration", *args)


@pytest.fixture(scope="module")
def done(folder: Path) -> Imported:
    """The cache with all its names."""
    return onnxq.import_calibration(folder / "m.cache", folder / "m.onnx")


def ranges_without(*names: str) -> dict[str, np.float32]:
    return {name: scale for name, scale in ranges(network()).items() if name not in names}


def test_the_model_has_the_very_scales_of_the_cache(folder: Path, done: Imported) -> None:
    result = onnxq.apply(folder / "m.onnx", done.plan, samples(), overrides={"latency": False})
    given = {entry.name: entry.scale for entry in read_scales(folder / "m.cache").entries}
    written = scales_in(result.model)
    assert set(written) == {"input", "r1", "f"}
    for name, scale in written.items():
        assert scale.shape == ()
        assert scale.tobytes() == given[name].tobytes(), name
    assert {one.site for one in done.matched} == set(written)
    activations = [site for site in done.plan.sites if site.role is not Role.WEIGHT]
    assert {site.qparams.origin for site in activations if site.qparams} == {ORIGIN}
    assert done.plan.target == "trt"
    assert done.plan.data == "TensorRT calibration cache m.cache (TRT-8601-EntropyCalibration2)"
    # Its answers are those of int8, and a second import gives the same bytes.
    assert min(result.report.checks[0].sqnr_db) > 25
    assert to_json(onnxq.import_calibration(folder / "m.cache", folder / "m.onnx").plan) == to_json(done.plan)


def test_weights_are_those_of_quantize(folder: Path, done: Imported) -> None:
    overrides = {"target": "trt", "effort": "fast", "latency": False}
    theirs = onnxq.quantize(folder / "m.onnx", samples(), overrides=overrides).plan
    weights = [site for site in theirs.sites if site.role is Role.WEIGHT]
    assert weights
    assert [done.plan.site(site.site).qparams for site in weights] == [site.qparams for site in weights]


def test_every_name_is_accounted_for(done: Imported) -> None:
    reasons = {one.name: one.why for one in done.unmatched}
    assert reasons == {FOLDED: UnmatchedKind.FOLDED, OWN: UnmatchedKind.TENSORRT}
    assert {one.name for one in done.unused} == {"n1", "c2", "s", "r2", "p", "logits"}
    assert done.missing == ()
    lines = [one.line for one in (*done.matched, *done.unmatched, *done.unused)]
    assert sorted(lines) == list(range(2, done.entries + 2))
    folded = next(one for one in done.unmatched if one.name == FOLDED)
    assert folded.reason == "preparation folded it: Conv node_c1"


def test_a_tensor_of_the_same_values_lends_its_scale(folder: Path, tmp_path: Path) -> None:
    scales, lent = ranges_without("f"), ranges(network())["f"]
    found = imported(folder, tmp_path, scales)
    match = next(one for one in found.matched if one.site == "f")
    assert (match.name, match.through) == ("p", "same values, by way of Reshape")
    assert np.float32(match.scale).tobytes() == scales["p"].tobytes() == lent.tobytes()
    assert "p" not in {one.name for one in found.unused}


def test_a_name_that_only_an_identity_had(folder: Path, tmp_path: Path) -> None:
    """TensorRT gives the tensor behind an Identity the Identity's name; our preparation takes the Identity out."""
    proto = network()
    proto.graph.node[3].input[0] = "copy"
    proto.graph.node.insert(3, helper.make_node("Identity", ["r1"], ["copy"], name="dropout"))
    onnx.save(proto, tmp_path / "m.onnx")
    scales = ranges(proto)
    del scales["r1"]
    (tmp_path / "m.cache").write_text(cache(scales))
    found = onnxq.import_calibration(tmp_path / "m.cache", tmp_path / "m.onnx")
    match = next(one for one in found.matched if one.name == "copy")
    assert match.site == "r1"
    assert match.through == "same values, by way of Identity"


@pytest.mark.parametrize("names", [{"r1"}, {"r1", "f"}])
def test_a_site_without_a_scale_is_an_error(folder: Path, tmp_path: Path, names: set[str]) -> None:
    scales = ranges_without(*names, "p")
    with pytest.raises(CalibrationError, match=r"has no scale for \d of \d tensors .*r1") as caught:
        imported(folder, tmp_path, scales)
    assert "`data=…`" in caught.value.fix
    assert "`allow_missing=True`" in caught.value.fix


def test_samples_fill_what_is_missing(folder: Path, tmp_path: Path) -> None:
    found = imported(folder, tmp_path, ranges_without("r1"), data=samples())
    assert [(one.tensor, one.done) for one in found.missing] == [("r1", "calibrated on the samples")]
    assert found.plan.calibrated
    by_name = {str(site.site): site.qparams for site in found.plan.sites}
    assert by_name["input"].origin == ORIGIN
    assert "samples" in by_name["r1"].origin
    assert "12 samples" in found.plan.data


def test_what_lacks_a_scale_may_stay_float(folder: Path, tmp_path: Path) -> None:
    found = imported(folder, tmp_path, ranges_without("r1"), overrides={"allow_missing": True})
    assert [one.tensor for one in found.missing] == ["r1"]
    assert "node_c2" in found.missing[0].done
    assert found.plan.calibrated
    model = onnxq.apply(folder / "m.onnx", found.plan).model
    assert set(scales_in(model)) == {"input", "f"}
    assert list(next(node for node in model.graph.node if node.name == "node_c2").input) == ["r1", "w1", "b1"]
    assert [refusal.rule for refusal in found.plan.refusals if refusal.subject == "node_c2"] == ["no-scale"]


def test_unknown_names_come_with_the_nearest(folder: Path, tmp_path: Path) -> None:
    found = imported(folder, tmp_path, {**ranges(network()), "inputt": np.float32(0.1)})
    stray = next(one for one in found.unmatched if one.name == "inputt")
    assert stray.why is UnmatchedKind.UNKNOWN
    assert stray.nearest == ("input",)


def test_a_cache_of_another_model(folder: Path, tmp_path: Path) -> None:
    scales = {f"layer{k}": np.float32(0.1) for k in range(5)}
    with pytest.raises(CalibrationError, match="none of its 6 names is a tensor of the model; the first is 'layer0'"):
        imported(folder, tmp_path, scales)


def test_a_group_takes_the_largest_scale(tmp_path: Path) -> None:
    """A pool between convolutions copies bytes: the pairs around it have one scale, whatever the cache says."""
    proto = network()
    proto.graph.node[4].CopyFrom(helper.make_node("MaxPool", ["c2"], ["s"], name="pool", kernel_shape=[1, 1]))
    onnx.save(proto, tmp_path / "m.onnx")
    scales = ranges(proto)
    scales["s"] = np.float32(1.5 * scales["c2"])
    (tmp_path / "m.cache").write_text(cache(scales))
    found = onnxq.import_calibration(
        tmp_path / "m.cache", tmp_path / "m.onnx", overrides={"target": "ort"}, config=FORCED
    )
    assert "c2, s share one scale and differ in the cache: the largest, of s, is used" in found.notes
    assert {note.code for note in found.notes} == {"W118"}
    assert {one.site: one.name for one in found.matched}["c2"] == "s"
    groups: dict[str, set[bytes]] = {}
    for site in found.plan.sites:
        if site.group and site.qparams is not None:
            groups.setdefault(site.group, set()).add(site.qparams.scale.tobytes())
    assert list(groups.values()) == [{scales["s"].tobytes()}]
    model = onnxq.apply(tmp_path / "m.onnx", found.plan).model
    assert Session(model, optimize=False).run(samples())["logits"].shape == (48, 10)


def test_ort_gets_symmetric_pairs(folder: Path) -> None:
    found = onnxq.import_calibration(folder / "m.cache", folder / "m.onnx", config=FORCED)
    activations = [site for site in found.plan.sites if site.role in (Role.ACTIVATION, Role.OUTPUT)]
    assert activations
    assert {site.spec.storage for site in activations} == {"int8"}
    assert not any(site.qparams.zero_point.any() for site in activations if site.qparams is not None)
    result = onnxq.apply(folder / "m.onnx", found.plan, samples(), overrides={"latency": False})
    assert min(result.report.checks[0].sqnr_db) > 25


def test_the_target_by_default(folder: Path, done: Imported) -> None:
    plan = onnxq.import_calibration(folder / "m.cache", folder / "m.onnx", overrides={"target": "ort"}).plan
    assert plan.target == "ort"
    assert all(site.spec.symmetric for site in plan.sites)
    # A file that names none is for TensorRT.
    (folder / "c.yaml").write_text("effort: fast\n")
    plan = onnxq.import_calibration(folder / "m.cache", folder / "m.onnx", config=folder / "c.yaml").plan
    assert (plan, plan.target) == (done.plan, "trt")


@pytest.mark.parametrize("config", ["ort-int8", "trt-fp8", "trt-int4-weights", "ort-uint16-activations"])
def test_configurations_a_cache_says_nothing_of(folder: Path, config: str) -> None:
    with pytest.raises(ConfigError, match=r"cache|weights only"):
        onnxq.import_calibration(folder / "m.cache", folder / "m.onnx", config=config)


def test_a_rule_for_other_bits_is_refused_by_site(folder: Path) -> None:
    config = Config(
        target="trt", bias="float", activations=TensorConfig(), rules=(Rule(tensor=("r1",), set=RuleSet(bits=4)),)
    )
    with pytest.raises(PlanError, match=r"^r1: line \d+ of the cache is a scale of symmetric int8.*4 bits"):
        onnxq.import_calibration(folder / "m.cache", folder / "m.onnx", config=config)


@settings(max_examples=10)
@given(st.lists(st.integers(0x34000000, 0x4C000000), min_size=3, max_size=3))
def test_any_scale_goes_through_plan_json_and_model_bit_for_bit(bits: list[int]) -> None:
    proto, names = network(), ("input", "r1", "f")
    scales = {name: np.uint32(word).view(np.float32) for name, word in zip(names, bits, strict=True)}
    plan = from_json(to_json(import_calibration(parse_cache(write_cache(scales).encode()), proto).plan))
    wanted = {name: scale.tobytes() for name, scale in scales.items()}
    for held in (collect_scales(plan), scales_in(onnxq.apply(proto, plan).model)):
        assert {name: scale.tobytes() for name, scale in held.items()} == wanted


def test_the_command(folder: Path, tmp_path: Path) -> None:
    done = run(
        folder / "m.cache", "--model", folder / "m.onnx", "-o", tmp_path / "p.json", "--apply", tmp_path / "q.onnx"
    )
    assert done.exit_code == 0, done.output
    assert "10 scales" not in done.stderr
    for text in ("3 of them used", "fused away", "c1 (line", "TensorRT's own layers", OWN, "6 sites for trt"):
        assert text in done.stdout, text
    again = onnxq.apply(folder / "m.onnx", from_json((tmp_path / "p.json").read_text())).model
    assert again.SerializeToString() == onnx.load(tmp_path / "q.onnx").SerializeToString()
    done = run(folder / "m.cache", "--model", folder / "m.onnx", "-v")
    assert done.exit_code == 0
    for entry in read_scales(folder / "m.cache").entries:
        assert entry.name in done.stdout, entry.name


def test_json_is_one_document(folder: Path, tmp_path: Path) -> None:
    done = run(folder / "m.cache", "--model", folder / "m.onnx", "--json", "--apply", tmp_path / "q.onnx")
    found = json.loads(done.stdout)
    assert found["header"] == "TRT-8601-EntropyCalibration2"
    assert {one["name"] for one in found["unmatched"]} == {FOLDED, OWN}
    assert {one["why"] for one in found["unmatched"]} == {"folded", "tensorrt"}
    assert [one["site"] for one in found["matched"]] == ["input", "r1", "f"]
    assert found["applied"]["output"] == str(tmp_path / "q.onnx")
    assert found["sites"] == 6


def test_nothing_is_written_when_a_scale_is_missing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.cache").write_text(cache(ranges_without("r1")))
    wanted = ("--model", folder / "m.onnx", "-o", tmp_path / "p.json", "--apply", tmp_path / "q.onnx")
    done = run(tmp_path / "x.cache", *wanted)
    assert done.exit_code == 1
    assert "error[Q" in done.stderr
    assert "--allow-missing" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.cache"]
    done = run(tmp_path / "x.cache", *wanted, "--allow-missing")
    assert done.exit_code == 0, done.output
    assert "left float: node_c2" in done.stdout


@pytest.mark.parametrize(("attention", "operands"), [("quantized", {"q", "k", "p", "v", "c"}), ("auto", set())])
def test_attention_is_taken_when_asked_for(attention: str, operands: set[str]) -> None:
    """Trying it out takes samples; without any only a plain wish counts."""
    proto = parse(
        """g (float[1,4,16,32] x) => (float[1,4,16,32] y) {
            q = MatMul(x, wq) k0 = MatMul(x, wk) v = MatMul(x, wv) k = Transpose <perm=[0,1,3,2]>(k0)
            s = MatMul(q, k) p = Softmax <axis=-1>(s) c = MatMul(p, v) y = MatMul(c, wo) }"""
    )
    weights = np.random.default_rng(0).standard_normal((4, 32, 32)).astype(np.float32) / 6
    add_arrays(proto.graph, **dict(zip(("wq", "wk", "wv", "wo"), weights, strict=True)))
    scales = {name: np.float32(0.01 + k / 1000) for k, name in enumerate(("x", "q", "k0", "v", "s", "p", "c", "y"))}
    config = load_config("trt-int8").model_copy(update={"attention": attention})
    found = import_calibration(parse_cache(write_cache(scales).encode()), proto, config=config)
    given = collect_scales(found.plan)
    assert set(given) == {"x", "c"} | operands
    if operands:
        assert given["k"] == scales["k0"]
        assert next(one for one in found.matched if one.site == "k").through == "same values, by way of Transpose"


# ---- The text form itself: what TensorRT and the scripts of the field write, and what is no cache.

BITS = st.integers(0x2C000000, 0x53000000)  # 2e-12 to 5e11
NAMES = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=30
).filter(lambda name: name == name.strip())  # fmt: skip


def parsed(text: str) -> dict[str, float]:
    return {entry.name: float(entry.scale) for entry in parse_cache(text.encode()).entries}


@given(st.dictionaries(NAMES, BITS, min_size=1, max_size=8))
def test_what_is_written_is_read_bit_for_bit(bits: dict[str, int]) -> None:
    scales = {name: np.uint32(value).view(np.float32) for name, value in bits.items()}
    found = parse_cache(write_cache(scales).encode())
    assert {entry.name: int(entry.scale.view(np.uint32)) for entry in found.entries} == bits
    assert [entry.line for entry in found.entries] == list(range(2, len(bits) + 2))
    assert found.header == HEADER


@given(st.floats(2.0**-30, 2.0**30, width=32))
def test_the_hex_is_that_of_the_struct_module(scale: float) -> None:
    assert write_cache({"x": scale}).splitlines()[1] == f"x: {struct.pack('>f', scale).hex()}"


def test_a_cache_as_tensorrt_writes_it() -> None:
    text = (
        "TRT-8510-EntropyCalibration2\nx: 4000890a\n/conv1/Conv_output_0: 3f9db09c\nonnx::Conv_329: 3c96d93c\n"
        "(Unnamed Layer* 8) [Constant]_output: 39137939\n(Unnamed Layer* 9) [Matrix Multiply]_output: 3e74c2e0\n"
    )
    found = parsed(text)
    assert list(found) == [line.rpartition(": ")[0] for line in text.splitlines()[1:]]
    assert found["x"] == struct.unpack(">f", bytes.fromhex("4000890a"))[0]


@pytest.mark.parametrize(
    "header", ["TRT-7103-EntropyCalibration2", "TRT-100300-MinMaxCalibration", "TRT-8XXX-EntropyCalibration2"]
)
def test_headers_of_any_version_and_calibrator(header: str) -> None:
    assert parse_cache(f"{header}\nx: 3c010a14\n".encode()).header == header


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\nx: 3c010a14\n",
        f"{HEADER}\r\nx: 3c010a14\r\n",
        f"{HEADER}\n\n  x :  3C010A14  \n\n",
        f"\n{HEADER}\nx: 3c010a14",
    ],
    ids=["byte order mark", "CRLF", "blanks and capitals", "no last line end"],
)
def test_what_editors_do_to_a_file(text: str) -> None:
    assert parsed(text) == {"x": struct.unpack(">f", bytes.fromhex("3c010a14"))[0]}


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ("x: 3c010a1g", "line 2: '3c010a1g' of x is not a float32 in 8 hex digits"),
        ("x: 3c010a1400", "line 2: '3c010a1400' of x is not"),
        ("x: 0.0078", "line 2: '0.0078' of x is not"),
        ("x: ", "line 2: '' of x is not"),
        ("x 3c010a14", "line 2: 'x 3c010a14' is not `tensor: scale`"),
        ("a: 3c010a14\nx: bf800000", "line 3: the scale of x is negative"),
        ("x: bc010a14", "line 2: the scale of x is negative"),
        ("x: 7f800000", "line 2: the scale of x is infinite"),
        ("x: ff800000", "line 2: the scale of x is negative"),
        ("x: 7fc00000", "line 2: the scale of x is not a number"),
        ("x: ffc00000", "line 2: the scale of x is not a number"),
        ("x: 3c010a14\ny: 3c010a14\nx: 3c010a14", "line 4: x stands in line 2 already"),
    ],
)
def test_a_bad_line_is_named_by_its_number(lines: str, cause: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parsed(f"{HEADER}\n{lines}\n")
    assert caught.value.cause.startswith(cause)
    assert caught.value.fix


def test_all_bad_lines_are_counted() -> None:
    with pytest.raises(CalibrationError, match=r"line 2: .*line 6: .*; and 4 more"):
        parsed(f"{HEADER}\n" + "".join(f"x{k}: bf800000\n" for k in range(9)))


def test_tensors_without_values_are_listed() -> None:
    # As TensorRT 8.4 writes them for what it folds away.
    text = f"{HEADER}\nx: 3caa54fc\n(Unnamed Layer* 64) [Shuffle]_output: 0\n366: 0\n395: 3cbe52af\n"
    table = parse_cache(text.encode())
    assert [entry.name for entry in table.entries] == ["x", "395"]
    assert [(row.name, row.line) for row in table.skipped] == [("(Unnamed Layer* 64) [Shuffle]_output", 3), ("366", 4)]


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (HEADER.encode(), "holds a header and no scales"),
        (b"x: 3c010a14\n", "is no header like"),
        (b'{"x": 0.5}', "is no header like"),
        (b'{"CLS": "TensorsData", "data": {}}', "is a calibration table of ONNX Runtime"),
        (b"h 2.0\nx 1.5e-07\n", "is a calibration table of ONNX Runtime"),
        (b"\x18\x00\x00\x00TRT-8601-EntropyCalibration2\nx: 3c010a14\n", "is binary"),
        (b"\xff\xfe\xf0", "is binary"),
    ],
)
def test_what_is_no_cache(data: bytes, cause: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parse_cache(data, source="some.cache")
    assert cause in caught.value.cause
    assert caught.value.subject.startswith("some.cache")


def test_swapped_bytes_are_seen() -> None:
    lines = "".join(f"x{k}: {struct.pack('<f', 0.01 * (k + 1)).hex()}\n" for k in range(10))
    with pytest.raises(CalibrationError, match="bytes swapped"):
        parsed(f"{HEADER}\n{lines}")


@given(st.binary(max_size=80))
def test_no_bytes_end_in_anything_but_our_error(data: bytes) -> None:
    for content in (data, HEADER.encode() + b"\n" + data):
        try:
            parse_cache(content)
        except CalibrationError:
            continue


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="No such file"):
        read_scales(tmp_path / "none.cache")
    with pytest.raises(CalibrationError, match="directory"):
        read_scales(tmp_path)
