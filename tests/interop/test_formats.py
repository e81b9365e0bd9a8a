"""Scales go through every format, plan and carrier: what a format accepts comes back to the bit, the rest is named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import onnxq
from onnxq.errors import CalibrationError, ModelError, PlanError
from onnxq.interop import ScaleTable, find_format, read_scales
from onnxq.interop.base import ImportFormat, TensorScale
from onnxq.interop.exporting import is_same_grid, write_scales
from onnxq.interop.registry import FORMATS
from onnxq.plan import Plan, SitePlan, from_json, to_json
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.networks import parse_text

WRITTEN = [row for row in FORMATS if row.write is not None]
NAMES = st.text('ab/:._ é"\\', min_size=1, max_size=6).filter(lambda text: text.strip() == text)


@st.composite
def entries(draw: st.DrawFn) -> list[TensorScale]:
    """Entries of every width, sign, granularity and role, each under a name of its own."""
    found = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        bits, signed = draw(st.sampled_from([2, 3, 4, 7, 8, 16])), draw(st.booleans())
        grain, shape = draw(
            st.sampled_from([(PerTensor(), ()), (PerChannel(0), (3,)), (PerChannel(1), (2,)), (PerBlock(1, 4), (2, 3))])
        )
        spec = QuantSpec(bits=bits, signed=signed, symmetric=False, granularity=grain)
        zero = draw(st.integers(spec.qmin, spec.qmax))
        scale = np.float32(draw(st.floats(2.0**-30, 2.0**10, width=32))) * np.arange(1, 1 + np.prod(shape, dtype=int))
        role = draw(st.sampled_from([Role.ACTIVATION, Role.WEIGHT])) if shape == () else Role.WEIGHT
        shaped = scale.astype(np.float32).reshape(shape)
        # As files say it: symmetric where the zero point is the middle.
        spec = replace(spec, symmetric=zero == (0 if signed else 1 << (bits - 1)))
        found.append(TensorScale(name, shaped, len(found) + 1, np.full(shape, zero, np.int32), spec, role))
    return found


@settings(max_examples=40, deadline=None)
@given(entries(), st.sampled_from(WRITTEN))
def test_what_a_format_accepts_comes_back_to_the_bit(given_entries, row) -> None:
    accepted = [entry for entry in given_entries if not row.refuse(entry)]
    if not accepted:
        return
    data = row.write(accepted)
    assert [other.name for other in FORMATS if other.recognizes(data)][:1] == [row.name]
    again = {entry.name: entry for entry in row.parse(data, "file").entries}
    assert again.keys() == {entry.name for entry in accepted}
    for entry in accepted:
        assert is_same_grid(entry, again[entry.name]), entry
    # Written again it is the same file.
    order = [replace(again[entry.name], role=entry.role) for entry in accepted]
    assert row.write(order) == data


# Random networks: layers in a row, with sums, on 8 x 8 images.
@st.composite
def networks(draw: st.DrawFn) -> onnx.ModelProto:
    rng, lines, last, weights = np.random.default_rng(draw(st.integers(0, 99))), [], "x", {}
    for k, kind in enumerate(draw(st.lists(st.sampled_from(["conv", "relu", "add", "pool"]), min_size=1, max_size=4))):
        name = f"t{k}"
        if kind == "conv":
            weights[f"w{k}"] = rng.standard_normal((16, 16, 3, 3)) / 12
            weights[f"b{k}"] = rng.standard_normal(16)
            lines.append(f"{name} = Conv <pads=[1,1,1,1]>({last}, w{k}, b{k})")
        elif kind == "relu":
            lines.append(f"{name} = Relu({last})")
        elif kind == "add":
            lines.append(f"{name} = Add({last}, x)")
        else:
            lines.append(f"{name} = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1]>({last})")
        last = name
    weights["wl"] = rng.standard_normal((16, 16, 1, 1)) / 4
    lines.append(f"y = Conv({last}, wl)")
    arrays = {name: value.astype(np.float32) for name, value in weights.items()}
    proto = parse_text(f"g (float[1,16,8,8] x) => (float[1,16,8,8] y) {{ {' '.join(lines)} }}", **arrays)
    for node in proto.graph.node:
        node.name = f"node_{node.output[0]}"
    return proto


def fill(plan: Plan, seed: int) -> Plan:
    """The plan with random numbers that its specs allow; those of one group are the same."""
    rng, groups, numbers = np.random.default_rng(seed), {}, {}
    sites = []
    for site in plan.sites:
        spec = site.spec
        if site.derived is not None:
            sites.append(site)
            continue
        shape = () if spec.has_one_scale else (16,)
        scale = rng.uniform(0.001, 0.1, shape).astype(np.float32)
        middle = 0 if spec.signed else 1 << (spec.bits - 1)
        zero = middle if spec.symmetric else int(rng.integers(spec.qmin, spec.qmax + 1))
        qparams = QParams(np.asarray(scale), np.full(shape, zero, np.int32), "drawn")
        qparams = groups.setdefault(site.group or str(site.site), qparams)
        numbers[site.site] = qparams
        sites.append(replace(site, qparams=qparams, sum_orders=()))
    return plan.with_sites(tuple(sites))


CONFIGS = {
    "qnn": ("qnn-int8", {}),
    "qnn-wide": ("qnn-a16w8", {}),
    "trt": ("trt-int8", {}),
    "virtual": ("virtual-int8", {"weights.bits": 4}),
}


def carry(plan: Plan, model: onnx.ModelProto, carrier: str, folder: Path) -> object:
    """The plan, in memory, as a file, or as a quantized model with its notes or without."""
    if carrier == "plan":
        return plan
    if carrier == "json":
        (folder / "p.json").write_text(to_json(plan))
        return folder / "p.json"
    model = onnxq.apply(model, plan, overrides={"latency": False}).model
    return model if carrier == "model" else onnxq.annotate_bits(model, strip=True).model


def list_configs(row: ImportFormat) -> list[str]:
    """The configurations whose numbers a format can hold; TensorRT's files have symmetric int8 alone."""
    return ["trt"] if row.name.startswith("tensorrt") else sorted(CONFIGS)


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: row.name)
@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(networks(), st.data(), st.sampled_from(["plan", "json", "model", "stripped"]), st.integers(0, 2**16))
def test_a_plan_comes_back_from_every_format(tmp_path: Path, row, model, data, carrier, seed) -> None:
    config = data.draw(st.sampled_from(list_configs(row)))
    preset, overrides = CONFIGS[config]
    plan = fill(onnxq.make_plan(model, config=preset, overrides=overrides), seed)
    assume(plan.sites)
    exported = onnxq.export_calibration(carry(plan, model, carrier, tmp_path), row.name)
    # Every site is accounted for.
    ours = {str(site.site) for site in plan.sites}
    named = {site.site for site in (*exported.written, *exported.left)}
    assert ours <= named if carrier != "stripped" else named
    (tmp_path / "file").write_bytes(exported.content)
    again = onnxq.import_calibration(
        tmp_path / "file", model, config=preset, overrides={**overrides, "allow_missing": True}
    ).plan
    returned = {str(site.site): site for site in again.sites}
    written = {site.site for site in exported.written if not site.change}
    for site in plan.sites:
        if str(site.site) in written and site.derived is None:
            other = returned[str(site.site)]
            # Of a file without notes the integers alone tell how many bits a weight has.
            assert other.spec.bits == site.spec.bits or (carrier == "stripped" and other.spec.bits < site.spec.bits)
            # A file in float16 has its scales in that.
            narrowed = config == "trt" and carrier in ("model", "stripped")
            scale = site.qparams.scale.astype(np.float16).astype(np.float32) if narrowed else site.qparams.scale
            np.testing.assert_array_equal(other.qparams.scale, scale)
            np.testing.assert_array_equal(other.qparams.zero_point, site.qparams.zero_point)


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: row.name)
@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(networks(), st.data(), st.integers(0, 2**16))
def test_a_file_comes_back_from_its_plan(tmp_path: Path, row, model, data, seed) -> None:
    """The file of another tool, with a random number for each activation, and what its plan exports."""
    preset, overrides = CONFIGS[data.draw(st.sampled_from(list_configs(row)))]
    plan = fill(onnxq.make_plan(model, config=preset, overrides=overrides), seed)
    sites = {site.quantized_tensor.name: site for site in reversed(plan.sites) if not site.role.is_constant}
    assume(all(site.spec == sites.get(site.quantized_tensor.name, site).spec for site in plan.sites))
    table = [
        TensorScale(name, site.qparams.scale, line, site.qparams.zero_point, site.spec)
        for line, (name, site) in enumerate(sites.items(), 1)
    ]
    assume(table and not any(map(row.refuse, table)))
    (tmp_path / "file").write_bytes(row.write(table))
    imported = onnxq.import_calibration(tmp_path / "file", model, config=preset, overrides=overrides)
    assert not imported.missing
    assert not [match for match in imported.matched if match.kept]
    exported = onnxq.export_calibration(imported.plan, row.name)
    again = {entry.name: entry for entry in row.parse(exported.content, "file").entries}
    for entry in table:
        assert is_same_grid(again[entry.name], entry), entry


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    from tests.interop.real.make import make_network

    return make_network()


def make_site(name: str, spec: QuantSpec, shape: tuple[int, ...] = (), **others: object) -> SitePlan:
    qparams = QParams(np.full(shape, 0.5, np.float32), np.zeros(shape, np.int32))
    return SitePlan(site=TensorId(name), role=Role.ACTIVATION, spec=spec, qparams=qparams, **others)  # type: ignore[arg-type]


def test_each_site_that_a_format_cannot_hold_is_named_with_its_reason() -> None:
    sites = (
        make_site("plain", QuantSpec(signed=False, symmetric=False)),
        make_site("three", QuantSpec(bits=3)),
        replace(make_site("blocks", QuantSpec(bits=4, granularity=PerBlock(1, 4)), (2, 3)), role=Role.WEIGHT),
        replace(make_site("empty", QuantSpec()), qparams=None),
        replace(make_site("inner", QuantSpec()), site=TensorId("inner", "then")),
        make_site("each", QuantSpec(bits=8, signed=False, symmetric=False, storage="uint8", dynamic=True)),
    )
    reasons = {row.name: {s.tensor: s.reason for s in write_scales(sites, row).left} for row in WRITTEN[2:]}
    common = {"empty", "inner", "each"}
    assert {name: set(left) - common for name, left in reasons.items()} == {
        "aimet-0.6.1": {"blocks"},
        "aimet-1.0": {"blocks"},
        "aimet-2.0": {"three"},
        "aimet-2.1": {"three"},
        "tensor-quant-overrides": {"three", "blocks"},
    }
    assert all(left.keys() >= common and all(left.values()) for left in reasons.values())
    with pytest.raises(CalibrationError, match="has no site that tensorrt-cache can hold; plain: the format has symm"):
        write_scales(sites[:1], WRITTEN[0])


def test_two_kinds_of_numbers_on_one_tensor_are_an_override_that_converts() -> None:
    wide = QuantSpec(bits=16, signed=False, symmetric=False)
    sites = (
        make_site("x", QuantSpec(signed=False, symmetric=False)),
        replace(make_site("x", wide), site=Edge("reader", 0), tensor=TensorId("x")),
        replace(make_site("x", replace(wide, bits=4)), site=Edge("third", 0), tensor=TensorId("x")),
    )
    done = write_scales(sites, find_format("tensor-quant-overrides"))
    (row,) = json.loads(done.content)["x"]
    assert (row["quant_type"], row["convert"]["quant_type"], row["convert"]["recv_nodes"]) == (
        "QUInt8",
        "QUInt16",
        ["reader"],
    )
    assert [(site.site, site.reason) for site in done.left] == [("third/in0", "a third kind of numbers on one tensor")]
    (site,) = write_scales(sites[:2], find_format("aimet-2.0")).left
    assert site.reason == "the format has one encoding for all that reads a tensor"


def test_an_override_that_converts_is_imported_at_nodes_that_receive_it(net: onnx.ModelProto, tmp_path: Path) -> None:
    names = ("x", "r1", "c2", "s", "r2", "p", "f", "y")
    root = {name: [{"quant_type": "QUInt8", "scale": 0.02, "zero_point": 100}] for name in names}
    root["r1"][0]["convert"] = {"quant_type": "QUInt16", "scale": 0.0001, "zero_point": 7, "recv_nodes": ["node_s"]}
    (tmp_path / "o.json").write_text(json.dumps(root))
    found = {
        str(site.site): (site.spec.bits, int(site.qparams.zero_point))
        for site in onnxq.import_calibration(tmp_path / "o.json", net, config="qnn-int8").plan.sites
        if site.quantized_tensor.name == "r1"
    }
    assert sorted(found.values()) == [(8, 100), (16, 7)], found


def test_ranges_and_types_of_overrides(net: onnx.ModelProto, tmp_path: Path) -> None:
    root = {
        "x": [{"quant_type": "QuantType.QInt8", "rmin": -2.0, "rmax": 1.0, "symmetric": True}],
        "r1": [{"rmin": 0.0, "rmax": 5.1}],
        "c2": [{"quant_type": "QUInt16"}],
        "w1": [{"quant_type": "QInt8", "scale": 0.5, "zero_point": 0, "axis": 0, "reduce_range": True}],
        "s": [{"quant_type": "QFLOAT8E4M3FN", "scale": 0.5, "zero_point": 0}],
    }
    (tmp_path / "o.json").write_text(json.dumps(root))
    table = read_scales(tmp_path / "o.json")
    by_name = {entry.name: entry for entry in table.entries}
    assert (float(by_name["x"].scale), by_name["x"].spec.signed) == (np.float32(2 / 127), True)
    assert (float(by_name["r1"].scale), int(by_name["r1"].zero_point)) == (np.float32(5.1 / 255), 0)
    assert {entry.name for entry in table.skipped} == {"c2", "w1", "s"}


def test_a_sign_changes_no_value_and_another_scheme_keeps_the_range(net: onnx.ModelProto) -> None:
    """uint8 around 128 is int8 around 0; a range that TensorRT's scheme does not have is said to be widened."""
    spec = QuantSpec(signed=False, symmetric=False)
    middle, moved = (
        TensorScale(n, np.float32(0.02), k, np.int32(z), spec) for k, (n, z) in enumerate((("x", 128), ("r1", 0)), 1)
    )
    table = ScaleTable(source="t", header="h", entries=(middle, moved), tool="T", origin="T", only_int8=False)
    found = onnxq.import_calibration(table, net, config="trt-int8", overrides={"allow_missing": True})
    sites = {site.site: site for site in found.matched}
    assert (sites["x"].scale, sites["x"].kept) == (np.float32(0.02), "")
    assert sites["r1"].kept == "its range, asymmetric uint8 in int8"
    assert sites["r1"].scale == pytest.approx(0.02 * 255 / 127)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "uint8"}]}', "line 1: x: lacks 'y_scale'"),
        ('{"version": "2.0.0", "encodings": [{"name": "x", "output_dtype": "int8", "y_scale": -1}]}', "not a positive"),
        ('{"version": "2.0.0", "encodings": []}', "holds no entry"),
        ('{"activation_encodings": {"x": [{"bitwidth": 8, "is_symmetric": "False", "scale": 1}]}}', "lacks 'offset'"),
        (
            '{"activation_encodings": [{"name": "x", "bw": 8, "is_sym": false, "scale": [1], "offset": [9]}]}',
            "outside 0…255",
        ),
        ('{"act_quant_info": {"x": "much"}}', "could not convert"),
        ('{"x": [{"scale": [1, 2], "zero_point": 0}]}', "scales of shape"),
        ('{"quant_info": {"x": {"q_min": 0}}}', "line 1: x: lacks 'q_max'"),
        ('{"activation_encodings": [1]}', "line 1: entry 1: is built otherwise"),
        # One entry in the place of the list of them.
        ('{"param_encodings": {"bw": 8, "name": "w"}}', "line 1: bw: is built otherwise"),
        ('{"activation_encodings": {}, "param_encodings": 1}', "is built otherwise"),
        ('{"quant_info": [1]}', "is built otherwise"),
        ('{"configs": {"conv": 1}, "values": {}}', "is built otherwise"),
        ('{"x": [{"quant_type": "QInt8", "scale": 1, "zero_point": 0, "convert": 3}]}', "is built otherwise"),
        ('{"something": 1}', "JSON of none of the formats"),
        ("{", "not JSON|JSON of none"),
    ],
)
def test_wrong_entries_are_named_with_their_lines(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(CalibrationError, match=fault):
        read_scales(tmp_path / "f")


def test_formats_by_name(net: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"format 'aimet': is not known"):
        onnxq.export_calibration(net, "aimet")
    with pytest.raises(CalibrationError, match=r"format 'ppq': is only read"):
        write_scales((), find_format("ppq"))
    with pytest.raises(ModelError, match="has no pair"):
        onnxq.export_calibration(net, "aimet-2.0")
    with pytest.raises(PlanError):
        onnxq.export_calibration(tmp_path / "none.json", "aimet-2.0")
    (tmp_path / "f").write_text('{"act_quant_info": {"x": 1.27}}')
    assert read_scales(tmp_path / "f").kind == "tensorrt-ranges"
    with pytest.raises(CalibrationError, match="holds no entry"):
        read_scales(tmp_path / "f", "aimet-2.0")


def test_a_plan_is_json_without_loss_after_an_import(net: onnx.ModelProto) -> None:
    plan = onnxq.import_calibration(Path(__file__).parent / "real" / "aimet.2.0.0.encodings", net).plan
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("start", [b"PK\x03\x04 archive/data.pkl", b"\x80\x04\x95 frame"])
def test_a_pickle_is_refused_with_what_to_export(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "net.native"
    path.write_bytes(start)
    with pytest.raises(CalibrationError, match="is a Python pickle") as caught:
        read_scales(path)
    assert "PPQ writes ONNX and JSON" in caught.value.fix
