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
from tests.sources import ROOT, SOURCES

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

for _path in sorted(Path(__file__).parent.glob("reach_*.py")):
    import_module(f"tests.codes.{_path.stem}")


@pytest.mark.usefixtures("engines_here")
@pytest.mark.parametrize(("code", "provoke"), REACHED)
def test_the_code_comes_out(code: str, provoke: Provoke, tmp_path: Path) -> None:
    try:
        found = provoke(tmp_path)
    except OnnxqError as error:
        found = error
    assert code in set(codes_in(found))


def test_every_code_is_provoked_once() -> None:
    provoked = Counter(param.values[0] for param in REACHED)
    assert sorted(set(CODES) - set(provoked)) == []
    assert [code for code, count in provoked.items() if count > 1] == []
