"""Writes the table of docs/formats.md from the registry of formats: `python docs/make_formats.py`."""

from pathlib import Path

from onnxq.interop.registry import FORMATS

MARKS = ("<!-- formats: begin -->\n", "<!-- formats: end -->")
PAGE = Path(__file__).with_name("formats.md")


def make_table() -> str:
    """The table, a row for each format."""
    head = "| format | files of | recognized by | read | written | cannot hold |\n|---|---|---|---|---|---|\n"
    rows = []
    for row in FORMATS:
        written = "no" if row.write is None else "yes"
        rows.append(
            f"| `{row.name}` | {row.title} | {row.mark} | yes | {written} | {row.limits or '–'} |\n"
        )
    return head + "".join(rows)


def insert_table(text: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + make_table() + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
