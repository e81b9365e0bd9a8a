"""JSON by schema: faults name line and path."""

from __future__ import annotations

from onnxq.config.schema import find_line


def test_the_line_of_an_entry_of_json() -> None:
    text = '{\n "a": [1,\n {"b": "}, \\"", "c": []},\n {"b":\n  [[], {},\n 7]}],\n "d": 1\n}'
    found = {path: find_line(text, path) for path in [("a",), ("a", 1), ("a", 2, "b", 2), ("d",), ("a", 9), ("e",)]}
    assert list(found.values()) == [2, 3, 6, 7, 2, 1]
