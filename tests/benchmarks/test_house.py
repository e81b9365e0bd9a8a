"""The figures of the house stay within their limits, and the table of docs/architecture.md is that of the script."""

import json
from pathlib import Path

import pytest

from benchmarks import house as script
from benchmarks.house import FIGURES, MARKS, PAGE, ROOT, House, Source, find_cycle, is_participle, main, read_limits

LIMITS = read_limits()
LISTED = [name for name, figure in FIGURES.items() if figure.find]


@pytest.fixture(scope="module")
def house() -> House:
    return script.read_house()


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_leaves_its_limit(name: str, house: House) -> None:
    figure, limit, value = FIGURES[name], LIMITS[name]["limit"], house.figures[name]
    bound = "at least" if figure.at_least else "at most"
    worst = "\n".join(map(str, house.list_offenders(name)[-20:]))
    assert figure.holds(value, limit), f"{figure.label}: {value:.4g}, {bound} {limit}\n{worst}"


@pytest.mark.parametrize("name", FIGURES)
def test_a_goal_that_is_reached_becomes_the_limit(name: str, house: House) -> None:
    bounds = LIMITS[name]
    reached = FIGURES[name].holds(house.figures[name], bounds["goal"])
    assert bounds["limit"] == bounds["goal"] or not reached, "run `python benchmarks/house.py --ratchet`"


def test_the_page_has_the_table_of_the_script() -> None:
    """Its figures may be some days old (`house.py --write` makes them new), its rows and bounds may not."""
    table = PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [figure.label for figure in FIGURES.values()]
    assert all(len(row) == 5 for row in rows)


def test_limits_move_towards_their_goals_only(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = {name: dict(bounds) for name, bounds in LIMITS.items()}
    far["longest"] = {"limit": 10_000, "goal": 500}
    far["file"] = {"limit": 1.0, "goal": 10_000}
    far["imports"] = {"limit": 0.1, "goal": 0.0}
    monkeypatch.setattr(script, "LIMITS", tmp_path / "house.json")
    script.write_limits(far)
    tightened = script.tighten_limits(house)
    assert tightened["longest"]["limit"] == 500
    assert 0 <= house.figures["file"] - tightened["file"]["limit"] < 0.01
    assert tightened["imports"] == far["imports"]
    script.write_limits(tightened)
    assert read_limits() == tightened
    assert json.loads(script.LIMITS.read_text(encoding="utf-8")).keys() == FIGURES.keys()


def test_participles_are_found_and_verbs_are_none() -> None:
    participles = {"made", "ranged", "taken", "held", "swept", "unused", "known"}
    verbs = {"embed", "feed", "need", "speed", "read", "cut", "flatten", "len", "set"}
    assert set(filter(is_participle, participles | verbs)) == participles


@pytest.mark.parametrize(
    ("graph", "modules"),
    [
        ({"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set()}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}, {"b", "c"}),
        ({"e": {"e"}}, {"e"}),
    ],
)
def test_circles_are_found_behind_others(graph: dict[str, set[str]], modules: set[str]) -> None:
    assert set(find_cycle(graph)) == modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A house of its own."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    return tmp_path


def write_source(folder: Path, text: str, name: str = "one.py") -> Source:
    (folder / name).write_text(text, encoding="utf-8")
    return Source(folder / name)


def test_lazy_imports_and_imports_by_name_count(folder: Path) -> None:
    source = write_source(
        folder,
        "if TYPE_CHECKING:\n    from onnxq import plan\n\n"
        "def f():\n    from onnxq.graph.light import LightModel\n    from onnxq import graph\n"
        "    return import_module('onnxq.emit')\n",
    )
    modules = frozenset({"onnxq", "onnxq.graph", "onnxq.graph.light", "onnxq.emit", "onnxq.plan"})
    assert source.list_imports(modules) == {"onnxq.graph", "onnxq.graph.light", "onnxq.emit"}


def test_one_file_is_counted(folder: Path) -> None:
    source = write_source(
        folder,
        '"""What is here.\n\nAnd what is not.\n"""\n\nimport os  # for people\n\n'
        'TEXT = "# no comment"  # noqa: X\n\n\n'
        "def made(x):\n    # why\n    return os.path.join(TEXT, x)\n\n\n"
        "class Box:\n    def fill(self, given: int) -> None:\n        self.held = given\n\n"
        "    @property\n    def size(self) -> int:\n        return self.held\n",
    )
    part = House([source])
    assert (source.lines, source.code, source.comments, source.import_lines) == (22, 10, [6, 12], 1)
    lines = {name: [place.line for place in part.list_offenders(name)] for name in LISTED if name != "entered"}
    assert lines["what"] == [1, 3]
    assert lines["what-first"] == [1]
    assert lines["one-word"] == lines["participles"] == [11]
    assert lines["one-word-methods"] == [17]
    assert lines["vague"] == [17, 18]
    assert part.figures["public-participles"] == 1
    assert lines["comments"] == lines["longest"] == lines["long-functions"] == lines["twins"] == []


def test_expressions_are_counted_wherever_they_stand(folder: Path) -> None:
    # y, the call, a.b, a, c, 2.
    part = House([write_source(folder, "y = a.b(c, 2)\n")])
    assert (part.expressions, part.figures["density"]) == (6, 6)


def test_classes_of_one_name_in_two_files_are_found(folder: Path) -> None:
    twins = [write_source(folder, "class Box: ...\n\nclass Lid: ...\n", f"{name}.py") for name in "ab"]
    twins.append(write_source(folder, "class Key: ...\n\nclass Key: ...\n", "c.py"))
    found = [f"{place.name} in {place.path.name}" for place in House(twins).list_offenders("twins")]
    assert found == ["Box in a.py", "Box in b.py", "Lid in a.py", "Lid in b.py"]


def test_a_run_enters_the_spine_and_no_other_command(house: House) -> None:
    names = {place.path.relative_to(ROOT).as_posix() for place in house.list_offenders("entered")}
    assert "onnxq/commands/quantize.py" in names
    assert not any(name.startswith(("onnxq/cli/", "onnxq/compat/", "torch_frontend/")) for name in names)
    # A table that is made when the module is read, by a comprehension, is no function that runs.
    assert "onnxq/graph/precision/narrow.py" not in names


@pytest.mark.parametrize("mode", [["--rooms"], ["--list", "one-word"], []])
def test_every_listing_is_written(
    mode: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = House([Source(ROOT / "onnxq" / "progress.py")])
    monkeypatch.setattr(script, "read_house", lambda: room)
    main(mode)
    assert capsys.readouterr().out.strip()
