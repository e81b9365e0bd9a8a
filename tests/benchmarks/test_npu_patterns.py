"""The table of what Qualcomm's NPU does with single operators."""

from importlib import import_module
from pathlib import Path

import pytest

from onnxq.backends import find_target

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_rows_say_what_is_refused_and_how_near_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")
    monkeypatch.syspath_prepend(BENCHMARKS)
    patterns = import_module("npu_patterns")
    table = patterns.make_table(patterns.try_patterns(["Neg", "Tanh, wide"], {}))
    assert "| Neg |  | ElementWiseNeg | = | no (1) | = | no (1) |" in table
    # 16-bit Tanh has a scale of its own, whatever the file says.
    assert "| Tanh, wide scale |  | Tanh | = | = | **wrong** -4 | **wrong** -4 |" in table
    assert "\n1. QNN's validator refuses the operator with these types" in table
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- npu: begin -->\nold\n<!-- npu: end -->\nafter\n")
    monkeypatch.setattr(patterns, "PAGE", page)
    patterns.write_table(table)
    assert page.read_text() == f"before\n<!-- npu: begin -->\n{table}<!-- npu: end -->\nafter\n"


def test_every_rule_names_the_rows_that_it_was_measured_in() -> None:
    rules, _, patterns = (ROOT / "docs/engines.md").read_text().partition("<!-- npu: begin -->")
    measured = {line.split("|")[1].strip() for line in patterns.splitlines() if line.startswith("| ")}
    table = rules[rules.index("| measured in the rows |") :]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for row in rows if len(row) == 5 for name in row[0].split(",")}
    assert {rule.name for rule in find_target("qnn").rules} == named
    assert [name for row in rows if len(row) == 5 for name in row[4].split(";") if name.strip() not in measured] == []
