"""Records of quantized models, and the pages and files made of them."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnxruntime.quantization import quantize_dynamic, quantize_static

import onnxq
from onnxq.commands.results import show
from onnxq.errors import ConfigError, DataError
from onnxq.evaluation.distributions import BINS, CHANNELS, Distribution
from onnxq.evaluation.sensitivity import JointCost
from onnxq.report.page import ROW, write_graph, write_markdown, write_mermaid, write_node_data, write_page
from onnxq.report.record import OperatorRecord, OutputRecord, ReportRecord, SiteRecord, ValueBars, read_record
from tests.cli.kit import run
from tests.engines.kit import needs_rtx
from tests.networks import parse_text
from tests.pipeline.models import ROUGH, Reader, images, quantize, residual
from tests.report.kit import shown

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tags(HTMLParser):
    """All tags of a page with their attributes, and whether all were closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "li") and self.open[-1] != tag:
            return
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    onnx.save(residual(), path / "m.onnx")
    options = {"latency": False, "report_out": str(path / "run.html")}
    onnxq.quantize(path / "m.onnx", images(), ROUGH, overrides=options, out=path / "q.onnx")
    onnx.save(quantize(path / "m.onnx", images()).model, path / "fine.onnx")
    return path


@pytest.fixture(scope="module")
def record(folder: Path) -> ReportRecord:
    return onnxq.make_report(
        folder / "m.onnx", folder / "q.onnx", images(), overrides={"samples": 4}, out=folder / "p.html"
    )


def test_the_page_holds_the_record_and_asks_for_nothing(folder: Path, record: ReportRecord) -> None:
    page = (folder / "p.html").read_text()
    assert read_record(folder / "p.html") == record
    tags = Tags(page)
    assert not tags.open
    assert not {"src", "href"} & {name for _, attributes in tags.found for name in attributes}
    assert not re.findall(r"url\(|@import|http", page)
    again = onnxq.make_report(record=folder / "p.html", out=folder / "again.html")
    assert again == record
    assert (folder / "again.html").read_bytes() == (folder / "p.html").read_bytes()


def test_the_rough_site_is_the_loudest_and_its_rule_mends_it(
    folder: Path, record: ReportRecord, tmp_path: Path
) -> None:
    rough = next(site for site in record.sites if site.name == "r")
    assert (rough.bits, rough.role) == (2, "activation")
    loudest = max(record.nodes, key=lambda node: node.share)
    assert "r" in loudest.sites
    assert loudest.red
    assert sum(node.share for node in record.nodes) == pytest.approx(1, abs=1e-3)
    advice = record.advice[0]
    assert loudest.name in advice.nodes
    assert advice.gain_db > 3
    config = tmp_path / "mine.yaml"
    config.write_text(f"extends: ort-int8\n{advice.rule}\n")
    mended = onnxq.load_config(config).rules[0]
    assert mended.set.float
    assert set(mended.node) == set(advice.nodes)


def test_a_rule_names_operators_in_any_letters() -> None:
    rule = JointCost(nodes=("检测/😀", "a\x85b\u2028\x9f\"'\\"), sqnr_db=1.0).rule
    assert yaml.safe_load(rule)[0]["node"] == ["检测/😀", "a\x85b\u2028\x9f\"'\\"]
    assert "检测/😀" in rule


RTX = pytest.param(quantize_static, "tensorrt-rtx", "", "refused", marks=needs_rtx)


@pytest.mark.recent_ort
@pytest.mark.parametrize(
    ("quantize", "engine", "engine_shown", "warning"),
    # ONNX Runtime's dynamic files hold no pairs, but are read as if they did.
    [(quantize_static, None, "ONNX Runtime", ""), (quantize_dynamic, None, "ONNX Runtime", ""), RTX],
)
def test_another_tools_file_has_a_page(tmp_path: Path, quantize, engine, engine_shown, warning) -> None:
    onnx.save(residual(), tmp_path / "m.onnx")
    reader = () if quantize is quantize_dynamic else (Reader(images()["x"]),)
    quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", *reader)
    options = {"samples": 2, "engine": engine}
    record = onnxq.make_report(tmp_path / "m.onnx", tmp_path / "q.onnx", images(4), overrides=options)
    assert record.sqnr_db is not None
    assert record.engine == engine_shown
    assert warning in "".join(record.warnings)
    assert "configuration" not in record.provenance
    assert "one size" not in "".join(record.warnings)
    assert not Tags(write_page(record)).open


def test_a_run_of_quantize_writes_its_page_with_what_passes_did(
    folder: Path, record: ReportRecord, tmp_path: Path
) -> None:
    options = {"latency": False, "report_out": str(tmp_path / "run.html")}
    result = onnxq.quantize(folder / "m.onnx", images(), overrides=options)
    page = read_record(tmp_path / "run.html")
    assert page.passes == result.report.accounts
    assert page.left_float == result.report.left_float
    assert any(page.passes)
    kept = read_record(folder / "run.html")
    assert {site.name for site in kept.sites} == {site.name for site in record.sites}
    assert kept.quantized.endswith("q.onnx")
    # The same file as that of the other page.
    for name in ("float model", "quantized model"):
        assert kept.provenance[name].split()[-1] == record.provenance[name].split()[-1]
    assert kept.quantized_bytes == record.quantized_bytes == (folder / "q.onnx").stat().st_size


def test_kernels_ranges_and_outputs_are_those_of_the_engines(record: ReportRecord) -> None:
    types = {node.type for node in record.nodes if node.op == "Conv"}
    assert types & {"int8", "uint8"}
    assert record.engine == "ONNX Runtime"
    for site in record.sites:
        if site.role == "activation" and site.range:
            assert sum(site.values.counts) > 0
            assert 0 <= site.clipped < 0.2
    output = record.outputs[0]
    assert set(output.runs) == {"as the file says", "as ORT runs it"}
    assert len(output.values) > 1


def test_other_tools_forms(record: ReportRecord) -> None:
    data = json.loads(write_node_data(record))["main"]
    tensors = {tensor for node in record.nodes for tensor in node.outputs}
    assert set(data["results"]) == tensors
    assert sum(entry["value"] for entry in data["results"].values()) == pytest.approx(100, abs=1)
    graph = json.loads(write_graph(record))["graphs"][0]
    ids = {node["id"] for node in graph["nodes"]}
    assert ids == {node.name for node in record.nodes}
    assert all(edge["sourceNodeId"] in ids for node in graph["nodes"] for edge in node["incomingEdges"])
    assert record.advice[0].rule in write_markdown(record)
    mermaid = write_mermaid(record).splitlines()
    assert mermaid[0] == "flowchart TD"
    assert sum("-->" in line for line in mermaid) >= len(record.nodes) - 2


UINT8: dict[str, Any] = {
    "role": "activation", "bits": 8, "type": "uint8", "scheme": "asymmetric", "granularity": "tensor",
}  # fmt: skip


def test_names_are_escaped_wherever_they_stand() -> None:
    evil = 'a"<script>alert(1)</script>|`'
    node = OperatorRecord(name=evil, op="Conv", outputs=(evil,), type="int8", share=1.0, isolated_db=3.0, sites=(evil,))
    site = SiteRecord(name=evil, **UINT8, range=(0.0, 1.0), clipped=0.5)
    record = ReportRecord(title=evil, nodes=(node,), sites=(site,), grade="broken", verdict=evil)
    tags = Tags(write_page(record))
    assert not tags.open
    assert [tag for tag, _ in tags.found].count("script") == 2
    assert "<script" not in write_mermaid(record)
    assert "<script" not in write_markdown(record)


def test_five_hundred_sites_make_a_page_under_a_megabyte() -> None:
    bars = ValueBars(low=-1.2345, high=1.2345, counts=tuple(range(1000, 1000 + BINS)))
    site = SiteRecord(
        name="/encoder/layer.12/attention/output_12", **UINT8, scales=(0.01234, 0.01234), range=(-1.2345, 1.2345),
        clipped=0.001, isolated_db=41.23, left_out_db=30.12, values=bars, channels=(0.123,) * CHANNELS, levels=31.5,
    )  # fmt: skip
    node = OperatorRecord(
        name="/encoder/layer.12/attention/MatMul", op="MatMul", inputs=("t123",), outputs=("t124",), type="int8",
        kernel="QLinearMatMul", share=1 / 500, isolated_db=41.2, left_out_db=30.1, gain_db=0.1,
    )  # fmt: skip
    page = write_page(ReportRecord(title="m", sites=(site,) * 500, nodes=(node,) * 500))
    assert len(page) < 1_000_000
    # Its pictures of the network have one scale.
    widths = re.findall(r'<svg class="strip" viewBox="0 0 (\d+)', page)
    assert widths == [str(ROW * 10)] * -(-500 // ROW)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clipped": 0.04}, "4.0 % of the values are cut off"),
        ({"levels": 5.0}, "half of the channels have 5 of 256 levels or fewer"),
        ({"values": (10_000, *[1] * 39)}, "99 % of the values lie in 2 % of the range"),
        ({}, ""),
    ],
)
def test_causes_are_named(changes: dict[str, Any], words: str) -> None:
    values = ValueBars(low=0, high=100, counts=changes.pop("values", (10,) * 40))
    site = SiteRecord(name="x", **UINT8, **{"clipped": 0.0, "levels": 100.0, **changes}, values=values)
    assert " ".join(site.list_causes()).startswith(words) if words else not list(site.list_causes())


def test_distributions_count_values_channels_and_what_is_outside() -> None:
    generator = np.random.default_rng(0)
    array = generator.normal(size=(4, 3, 50)).astype(np.float32) * np.array([[1], [10], [100]], np.float32)
    values = Distribution(1)
    for sample in array:
        values.add_values(sample[None])
    low, high, counts = values.count_bars()
    assert (low, high) == pytest.approx((float(array.min()), float(array.max())))
    assert sum(counts) == array.size
    assert values.list_channels() == tuple(float(f"{x:.3g}") for x in np.abs(array).max(axis=(0, 2)))
    outside = float((np.abs(array) > 20).mean())
    assert values.measure_clipped((-20.0, 20.0)) == pytest.approx(outside, abs=0.02)
    weight = np.ones((8, 4, 3, 3), np.float32)
    weight[:, :3] = 0.01
    shared = Distribution(None)
    shared.add_weight(weight, 0)
    assert shared.find_middle() == pytest.approx(0.01)


def test_compare_tells_sites_figures_and_conditions(folder: Path, record: ReportRecord) -> None:
    found = onnxq.compare(folder / "fine.onnx", folder / "q.onnx")
    changed = {change.site: change for change in found.sites}
    assert changed["r"].before.startswith("8-bit")
    assert changed["r"].after.startswith("2-bit")
    assert found.same + len(found.sites) == len(record.sites)
    bounds = ("sqnr_db<.2e+3", "sqnr_db<2E2", "sqnr_db>1e-6", "sqnr_db<-.5")
    assert onnxq.compare(record, record, bounds).failed == bounds[:3]
    again = onnxq.compare(record, folder / "p.html", "sqnr_db<200")
    assert not again.sites
    assert again.failed == ("sqnr_db<200",)
    assert "sites alike, 0 not" in shown(show, again)
    plan = onnxq.make_plan(folder / "m.onnx")
    dynamic = [replace(site, spec=replace(site.spec, dynamic=site.name == "r")) for site in plan.sites]
    (change,) = onnxq.compare(plan, plan.with_sites(dynamic)).sites
    assert change.after == f"dynamic {change.before}"
    with pytest.raises(ConfigError, match="no such figure"):
        onnxq.compare(record, record, "speed>1")
    with pytest.raises(ConfigError, match="is no condition"):
        onnxq.compare(record, record, "fast")


@pytest.mark.usefixtures("record")
def test_the_commands(folder: Path, tmp_path: Path) -> None:
    assert run("report", "--from", folder / "p.html", "--mermaid", tmp_path / "g.mmd").exit_code == 0
    assert (tmp_path / "g.mmd").read_text().startswith("flowchart")
    pages = (folder / "p.html", folder / "run.html")
    assert run("compare", *pages, "--fail-if", "sqnr_db<-200").exit_code == 0
    failed = run("compare", *pages, "--fail-if", "sqnr_db<200", "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["failed"] == ["sqnr_db<200"]
    other = run("report", "--from", folder / "m.onnx")
    assert other.exit_code == 1
    assert "Q226" in other.stderr


def test_a_page_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("<html></html>")
    (tmp_path / "new.json").write_text('{"version": 99, "title": "m"}')
    for name in ("x.html", "new.json", "missing.html"):
        with pytest.raises(DataError, match="Q226"):
            read_record(tmp_path / name)


def test_an_iterator_cannot_be_read_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is read once"):
        onnxq.quantize(residual(), iter([{}]), overrides={"report_out": str(tmp_path / "r.html")})


def read_in_browser(page: Path, *flags: str) -> str:
    """The text that a browser writes of the page."""
    base = [str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'user'}"]
    command = [*base, *flags, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(_BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.usefixtures("record")
def test_a_browser_shows_and_prints_the_page(folder: Path, tmp_path: Path) -> None:
    page = folder / "p.html"
    for width in (1300, 420):
        read_in_browser(page, f"--window-size={width},1600", f"--screenshot={tmp_path / 'page.png'}")
        assert (tmp_path / "page.png").read_bytes()[1:4] == b"PNG"
        (tmp_path / "page.png").unlink()
    # A long name makes no page wider than the window; keys sort, and rows without a figure come last either way.
    long = "fmnist_resnet_" * 9
    nodes = OperatorRecord(name="none", op="Relu"), OperatorRecord(name=long, op="Conv", isolated_db=3.0, share=1.0)
    outputs = (OutputRecord(name="score", float_values=(1.0,), values=(1.1,)),)
    text = write_page(ReportRecord(title=long, nodes=nodes, outputs=outputs, types={"int8": 1}))
    assert "operator in int8" in text
    assert "<figure>" not in text
    script = """<script>const root = document.documentElement, table = document.querySelector(".sortable");
    for (const _ of "12") table.rows[0].cells[4].dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
    document.title = `${root.scrollWidth - root.clientWidth} ${table.rows[1].cells[0].textContent}`</script>"""
    (folder / "long.html").write_text(text + script)
    assert f"<title>0 {long}</title>" in read_in_browser(folder / "long.html", "--window-size=500,900", "--dump-dom")
    read_in_browser(page, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes()[:4] == b"%PDF"
    assert 'class="js"' in read_in_browser(page, "--dump-dom")


def test_a_notebook_shows_results_as_tables(record: ReportRecord) -> None:
    result = quantize(residual(), images())
    for shown_result, words in ((result, "verdict"), (result.plan, "activation"), (record, "in float")):
        html = shown_result._repr_html_()
        assert not Tags(html).open
        assert html.startswith("<pre")
        assert words in html
        assert "\x1b" not in html


def test_the_plot_has_a_bar_for_each_operator(record: ReportRecord) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = record.plot()
    assert [bar.get_height() for bar in axes.patches] == [100 * node.share for node in record.nodes]
    assert max(record.nodes, key=lambda node: node.share).name in {label.get_text() for label in axes.get_xticklabels()}


def test_a_plot_needs_matplotlib(record: ReportRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(onnxq.OnnxqError, match="matplotlib is not installed"):
        record.plot()


@pytest.mark.parametrize("preset", ["ort-int8-weights", "ort-dynamic", "trt-int8"])
def test_files_of_every_kind_have_a_page(preset: str) -> None:
    result = quantize(residual(), images(4), preset, effort="fast")
    record = onnxq.make_report(residual(), result.model, images(4), preset, overrides={"samples": 2, "engine": "ort"})
    assert len(record.sites) >= result.report.pairs
    assert not Tags(write_page(record)).open


def test_the_verdict_counts_largest_scores_of_classes_alone() -> None:
    # An image: the largest channel of a pixel is no answer.
    weight = np.array([1, -2, 3, 2, 1, 1, -1, 2, 3, 2, -2, 1], np.float32).reshape(4, 3, 1, 1)
    model = parse_text("g (float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y) { [c] y = Conv(x, w) }", w=weight)
    samples = [{"x": values[None]} for values in images(4)["x"][:, :3, :8, :8]]
    result = quantize(model, samples)
    record = onnxq.make_report(model, result.model, samples, overrides={"samples": 2})
    assert record.verdict.startswith("y has")
    assert "top-1" not in record.verdict
