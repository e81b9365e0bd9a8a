"""Every code comes out of what a person can really do."""

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from onnxq.codes import CODES
from onnxq.errors import OnnxqError
from tests.codes.kit import REACHED, Provoke, codes_in

for _path in sorted(Path(__file__).parent.glob("reach_*.py")):
    import_module(f"tests.codes.{_path.stem}")


@pytest.mark.usefixtures("ort_here")
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
