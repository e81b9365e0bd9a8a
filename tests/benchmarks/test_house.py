"""The figures of the house stay within their limits, and the table of docs/architecture.md is that of the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import LIMITS, MARKS, OFFENDERS, PAGE, House, Source, find_cycles, is_participle, main, read_house


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


@pytest.fixture(scope="module")
def figures(house: House) -> dict[str, float]:
    return house.figures()


@pytest.mark.parametrize("name", LIMITS)
def test_no_figure_leaves_its_limit(name: str, house: House, figures: dict[str, float]) -> None:
    limit, value = LIMITS[name], figures[name]
    worst = house.offenders(name)[-20:] if name in OFFENDERS else []
    bound = "at least" if limit.at_least else "at most"
    assert limit.holds(value), f"{limit.what}: {value:.4g}, {bound} {limit.limit}\n" + "\n".join(map(str, worst))


@pytest.mark.parametrize("name", LIMITS)
def test_a_goal_that_is_reached_becomes_the_limit(name: str, figures: dict[str, float]) -> None:
    limit = LIMITS[name]
    reached = figures[name] >= limit.goal if limit.at_least else figures[name] <= limit.goal
    assert limit.limit == limit.goal or not reached, f"tighten LIMITS[{name!r}] in benchmarks/house.py"


def test_the_page_has_the_table_of_the_script() -> None:
    """Its figures may be some days old (`house.py --write` makes them new), its rows and bounds may not."""
    table = PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [limit.what for limit in LIMITS.values()]
    assert all(len(row) == 4 for row in rows)


@pytest.mark.parametrize("word", ["made", "ranged", "taken", "held", "swept", "unused", "known"])
def test_participles_are_found(word: str) -> None:
    assert is_participle(word)


@pytest.mark.parametrize("word", ["embed", "feed", "need", "speed", "read", "cut", "flatten", "len", "set"])
def test_verbs_are_no_participles(word: str) -> None:
    assert not is_participle(word)


def test_cycles_are_found_behind_others() -> None:
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}) == [("b", "c"), ("e",)]


def test_one_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        '"""What is here.\n\nAnd what is not.\n"""\n\nimport os  # for people\n\n'
        'TEXT = "# no comment"  # noqa: X\n\n\n'
        "def made(x):\n    # why\n    return os.path.join(TEXT, x)\n\n\n"
        "def read_file(x: int) -> int:\n    return x\n",
        encoding="utf-8",
    )
    source = Source(path)
    assert (source.lines, source.code, source.comments) == (17, 6, [6, 12])
    found = {name: [place.line for place in OFFENDERS[name](source)] for name in OFFENDERS}
    assert found["what"] == [1, 3]
    assert found["what-first"] == [1]
    assert found["one-word"] == found["participles"] == found["public-participles"] == [11]
    assert found["typed"] == [11]
    assert found["documented"] == [11, 16]
    assert found["comments"] == found["longest"] == found["long-functions"] == []


@pytest.mark.parametrize("mode", [["--rooms"], ["--loc"], ["--list", "one-word"], ["--markdown"]])
def test_every_listing_is_written(
    mode: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = House([Source(PAGE.parents[1] / "onnxq" / "progress.py")], tests=80)
    monkeypatch.setattr("benchmarks.house.read_house", lambda: room)
    main(mode)
    assert "progress" in capsys.readouterr().out or mode == ["--markdown"]
