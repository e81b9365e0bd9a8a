"""The catalogue of codes: complete, used, and printed where people look."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from onnxq import errors
from onnxq.codes import AREAS, CODES, catalogue_page

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for room in ("onnxq", "torch_frontend")
    for path in sorted((ROOT / room).rglob("*.py"))
    if (ROOT / "onnxq" / "codes") not in path.parents
]
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OnnxqError)]


def used_codes() -> set[str]:
    return {code for path in SOURCES for code in re.findall(r'"([QRFW]\d{3})"', path.read_text(encoding="utf-8"))}


def test_the_page_is_made_from_the_catalogue() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == catalogue_page(), "run `python -m onnxq.codes > docs/errors.md`"


def test_every_code_of_the_source_is_in_the_catalogue() -> None:
    assert used_codes() - set(CODES) == set()


def test_every_entry_of_the_catalogue_is_used() -> None:
    assert set(CODES) - used_codes() == set()


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
