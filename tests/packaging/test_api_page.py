"""docs/api.md lists what is public, as it is now."""

import importlib.util
import re
from pathlib import Path

import pytest

import onnxq

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_api.py"
_spec = importlib.util.spec_from_file_location("make_api", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
make_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_api)


def test_the_page_is_current() -> None:
    assert make_api.PAGE.read_text(encoding="utf-8") == make_api.make_page(), "run `make docs`"


def test_every_public_name_is_on_the_page() -> None:
    listed = re.findall(r"^### onnxq\.(\w+)$", make_api.make_page(), re.MULTILINE)
    assert listed == list(onnxq.__all__)


@pytest.mark.parametrize("package", make_api.PACKAGES)
def test_chosen_names_are_public(package: str) -> None:
    _, chosen = make_api.PACKAGES[package]
    assert set(chosen) <= set(make_api.list_public(package))
