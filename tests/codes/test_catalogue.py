"""The catalogue of codes: complete, used, and printed where people look."""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from onnxq import errors
from onnxq.codes import AREAS, CODES, catalogue_page
from onnxq.errors import OnnxqError
from tests.codes.kit import REACHED, Provoke, codes_in
from tests.sources import ROOT, SOURCES, list_texts

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OnnxqError)]


def test_the_source_uses_every_entry_and_no_other_code() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES if path.parent.name != "codes"]
    used = {code for text in texts for code in re.findall(r'"([QRFW]\d{3})"', text)}
    assert (used - set(CODES), set(CODES) - used) == (set(), set())


def test_the_page_is_made_from_the_catalogue() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == catalogue_page(), "run `python -m onnxq.codes > docs/errors.md`"


def test_no_code_is_given_twice() -> None:
    every = Counter(code.id for area in AREAS for code in area.codes)
    assert [code for code, count in every.items() if count > 1] == []


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_an_entry_says_what_it_means_and_what_to_do(code) -> None:
    assert re.fullmatch(r"[QRFW]\d{3}", code.id)
    assert code.title
    assert not code.title.endswith(".")
    assert code.meaning.endswith(".")
    assert code.fix.endswith(".")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_class_of_errors_is_without_a_code(kind) -> None:
    error = kind("subject", "cause")
    assert error.code in CODES
    assert error.code.endswith("00")
    assert str(error) == f"subject: cause [{error.code}]"


# ---- Every code comes out of what a person can really do.

import_module("tests.codes.reach")


@pytest.mark.usefixtures("engines_here")
@pytest.mark.parametrize(("code", "provoke"), REACHED)
def test_the_code_comes_out(code: str, provoke: Provoke, tmp_path: Path) -> None:
    try:
        found = provoke(tmp_path)
    except OnnxqError as error:
        found = error
    assert code in set(codes_in(found))


# Codes that tests of other rooms provoke, each of which asserts its code or matches the message that ends with it.
SHOWN = {
    "annotate/test_forms.py": "Q518 W145",
    "annotate/test_read.py": "W106",
    "annotate/test_sidecar.py": "Q411",
    "backends/qnn/test_engine.py": "R116",
    "backends/trt/test_parser.py": "W129",
    "calibrate/test_run.py": "Q407 R106",
    "calibrate/test_weights.py": "Q503",
    "cli/test_analysis.py": "Q711",
    "cli/test_app.py": "Q001 Q002 Q003 Q101 Q303 Q713",
    "cli/test_end_to_end.py": "Q324",
    "cli/test_streams.py": "Q604",
    "commands/test_export_calibration.py": "Q516 Q517 W143 W144 W151",
    "commands/test_import_weights.py": "Q515 Q602 W139",
    "commands/test_search.py": "Q712",
    "compat/test_quantize.py": "Q319 W130 W135 W136",
    "config/test_schema.py": "Q401",
    "custom_ops/test_commands.py": "W131",
    "custom_ops/test_plugins.py": "F108 Q322",
    "data/test_arrays.py": "Q204",
    "data/test_files.py": "Q206 Q214",
    "data/test_scripts.py": "Q213",
    "data/text/test_samples.py": "Q221 Q225",
    "engines/diff/test_diff_command.py": "Q218 Q703 Q704 R111 W109",
    "engines/diff/test_layers.py": "Q114",
    "engines/prove/test_compare.py": "Q217",
    "engines/prove/test_prove.py": "Q317 Q601",
    "engines/prove/test_prove_command.py": "Q706 Q805",
    "engines/saturation/test_commands.py": "Q707 W107",
    "engines/saturation/test_emulate.py": "R114",
    "engines/test_bench.py": "Q708",
    "engines/test_shapes.py": "W112",
    "files/test_access.py": "Q603",
    "graph/test_functions.py": "Q108",
    "graph/test_index.py": "Q117",
    "graph/test_load.py": "Q104 Q105 Q106 Q107 W113",
    "graph/test_opset.py": "Q109",
    "graph/test_scopes.py": "Q103",
    "interop/test_checkpoints.py": "Q514",
    "interop/test_markers_plan.py": "Q119 Q120",
    "interop/test_matching.py": "W118",
    "kernels/test_build.py": "Q605 Q808",
    "observers/test_base.py": "Q310 Q311",
    "passes/mixed_precision/test_candidates.py": "F106",
    "passes/mixed_precision/test_promotion.py": "Q709",
    "passes/rewrites/test_activations.py": "R112",
    "passes/test_registry.py": "Q320",
    "pipeline/test_check.py": "Q701 W116 W120 W150",
    "pipeline/test_configuration.py": "Q312",
    "pipeline/test_dynamic.py": "Q307",
    "pipeline/test_fixed_sizes.py": "Q315",
    "pipeline/test_record.py": "Q226",
    "pipeline/test_requantize.py": "Q125",
    "pipeline/test_selecting_models.py": "W108 W117",
    "pipeline/test_several_engines.py": "Q325 W138",
    "pipeline/test_stale_numbers.py": "Q403 Q404 Q405 Q408",
    "pipeline/test_traps.py": "R104",
    "planner/test_choose.py": "F101 F102 F103 F104 R105",
    "planner/test_existing.py": "F107 R115 W121 W124 W125",
    "planner/test_place.py": "W122",
    "planner/test_problem.py": "R103",
    "planner/test_requests.py": "Q304 Q309 R101 W102 W104 W149",
    "planner/test_rewritten.py": "Q402",
    "planner/test_tables.py": "F109",
    "report/test_verdicts.py": "W111",
    "runtime/test_faults.py": "Q110 Q111 Q112 Q113",
    "runtime/test_session.py": "Q210 Q801",
    "runtime/test_tap.py": "R107",
    "torch/export/test_files.py": "Q121 W126",
    "torch/export/test_graph.py": "Q122",
    "torch/fake_quant/test_kernels.py": "W119",
    "torch/qat/test_steps.py": "Q318 Q510",
    "torch/qmodules/test_layers.py": "R110",
    "torch/qmodules/test_torch_ops.py": "R109",
    "torch/quant_model/test_model.py": "Q409",
    "torch/quant_model/test_norms.py": "Q410",
    "torch/quantizers/test_base.py": "Q316 Q508 Q509",
    "torch/reconstruct/test_run.py": "Q124",
    "torch/tracing/test_capture.py": "Q123 R108",
    "torch/tracing/test_tracer.py": "Q205",
}


@pytest.mark.parametrize(("module", "codes"), SHOWN.items(), ids=SHOWN)
def test_the_code_comes_out_in_its_own_room(module: str, codes: str) -> None:
    texts = "\n".join(text for _, text in list_texts(ROOT / "tests" / module))
    assert [code for code in codes.split() if code not in texts] == []


def test_every_code_is_provoked_once() -> None:
    provoked = Counter(param.values[0] for param in REACHED)
    provoked.update(code for codes in SHOWN.values() for code in codes.split())
    assert sorted(set(CODES) - set(provoked)) == []
    assert [code for code, count in provoked.items() if count > 1] == []
