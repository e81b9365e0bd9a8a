"""The results of build-kernels."""

import json
from dataclasses import replace

import pytest

from onnxq.commands.kernels import Kernels, find_missing_kernels
from onnxq.commands.results import show, write_json
from onnxq.kernels import Built
from tests.report.kit import shown, warned

CACHE = "/home/a/.cache/onnxq/kernels"
BUILT = (
    Built("CPU", "built", "g++ (Debian 12.2.0) 12.2.0", (), f"{CACHE}/libfq_cpu-0123456789abcdef.so", 345_678, 41.27),
    Built("CUDA", "there", "nvcc 13.0", ("sm_80", "sm_90"), f"{CACHE}/fq-0123.fatbin", 2_345_678, 0.02),
)
MISSING = Built("CUDA", "missing", reason="there is no nvcc; install the CUDA toolkit")

TABLE = """\
kernels  for          state  made by                      KiB     s  file
CPU      this         built  g++ (Debian 12.2.0) 12.2.0   338  41.3  /home…ef.so
         processor
CUDA     sm_80 sm_90  there  nvcc 13.0                   2291   0.0  /home…atbin
no CUDA kernels: there is no nvcc; install the CUDA toolkit
"""


def test_the_table_at_80_columns_and_quiet_only_what_is_missing() -> None:
    found = Kernels((*BUILT, MISSING))
    assert shown(show, found) == TABLE
    assert warned(show, found, quiet=True) == ("", "no CUDA kernels: there is no nvcc; install the CUDA toolkit\n")
    assert warned(show, Kernels(BUILT), quiet=True) == ("", "")


def test_json_holds_every_field() -> None:
    found = json.loads(shown(show, Kernels((*BUILT, MISSING)), as_json=True, error={"code": "Q806"}))
    assert found == json.loads(write_json(Kernels((*BUILT, MISSING)), {"code": "Q806"}))
    assert (found["schema"], found["error"]) == (1, {"code": "Q806"})
    assert [one["state"] for one in found["kernels"]] == ["built", "there", "missing"]
    assert set(found["kernels"][0]) == set(Built.__dataclass_fields__)
    assert found["kernels"][1]["archs"] == ["sm_80", "sm_90"]


@pytest.mark.parametrize(
    ("built", "asked", "subject"),
    [
        (BUILT, True, ""),
        ((*BUILT, MISSING), False, ""),  # a machine without nvcc is no fault
        ((*BUILT, MISSING), True, "CUDA kernels"),
        ((replace(BUILT[0], state="missing", reason="no g++"), BUILT[1]), True, ""),
        ((replace(BUILT[0], state="missing", reason="no g++"), MISSING), False, "CPU kernels"),
        ((MISSING,), False, "CUDA kernels"),
    ],
)
def test_what_is_missing_is_a_fault_where_it_was_asked_for_or_nothing_is_there(
    built: tuple[Built, ...], asked: bool, subject: str
) -> None:
    found = find_missing_kernels(Kernels(built, asked))
    assert (found.subject if found else "") == subject
    assert found is None or found.cause in ("no g++", MISSING.reason)
