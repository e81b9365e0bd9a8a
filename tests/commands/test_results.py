"""The JSON of every command: its keys, which programs read, and a form for every class of result."""

import json
from importlib import import_module

import pytest

from onnxq.commands.kernels import Kernels
from onnxq.commands.results import _MODULES, find_form, write_json
from onnxq.report import ResultFormat
from tests.commands import (
    test_bench,
    test_diff,
    test_import_calibration,
    test_inspect,
    test_perplexity,
    test_profile,
    test_prove,
    test_quantize,
    test_variants,
)

# As they were written before there was one writer; a key that goes or changes its meaning raises SCHEMA.
KEYS = [
    (test_bench.FOUND, "chosen data device engine error models provider shapes synthetic untimed version warnings"),
    (
        test_diff.FOUND,
        (
            "bisections choices data divergences error float_model holds layers messages missing notes outputs "
            "quantized_model runs samples saved skipped synthetic top_k unmet verdict worst"
        ),
    ),
    (
        test_import_calibration.FOUND,
        "applied cache entries header left_float matched missing notes refusals sites target unit unmatched unused",
    ),
    (test_inspect.FOUND, "disagreements error float_types operators output pairs source warnings weights"),
    (Kernels(test_bench.BUILT), "error kernels"),
    (test_perplexity.FOUND, "data device generate length models prompts threads tokens windows"),
    (
        test_profile.FOUND,
        "choices data fixed groups joint outputs prefixes quantized samples source sqnr_db synthetic warnings",
    ),
    (
        test_prove.PROOF,
        (
            "build changes chosen compared cost counts error holds kernels max_partitions nodes placement "
            "require_exact requirements sites source unmet warnings weights"
        ),
    ),
    (
        test_quantize.REPORT,
        (
            "accounts alarms already checked checks choices code config cpu data dynamic effort engines error "
            "float_types forced kept latency left_float made_up mode note_bytes ops output output_bytes pairs "
            "placement promotion refusals rewrites roles saturating seen segments sites slower source source_bytes "
            "stages synthetic target unchecked verdict warnings"
        ),
    ),
    (
        test_variants.FOUND,
        "checked config cpu data error metric options seed shapes source synthetic variants versions",
    ),
]


@pytest.mark.parametrize(("result", "keys"), KEYS, ids=[type(result).__name__ for result, _ in KEYS])
def test_a_document_keeps_its_keys(result: object, keys: str) -> None:
    document = json.loads(write_json(result))
    assert sorted(document) == sorted(["schema", *keys.split()])
    assert document["schema"] == 1
    assert ("error" in document) == (find_form(result).find_fault is not None)


@pytest.mark.parametrize("kind", _MODULES)
def test_every_class_has_its_form(kind: str) -> None:
    module = import_module(f"onnxq.commands.{_MODULES[kind]}")
    assert isinstance(module.FORM, ResultFormat)
    assert hasattr(module, kind)
