"""Models timed side by side, as a table and as JSON."""

import json
from dataclasses import replace

import pytest

from onnxq.backends.engine import Untimed
from onnxq.commands.kernels import Kernels, find_missing_kernels
from onnxq.commands.results import show, write_json
from onnxq.engines.bench import Bench, BenchedModel
from onnxq.kernels import Built
from onnxq.runtime import Latency
from onnxq.sites import Caution
from tests.commands.test_prove import PROOF
from tests.report.kit import shown, warned


def latency(*times: float) -> Latency:
    return Latency(
        median_ms=times[0], min_ms=min(times), p99_ms=max(times), rounds=len(times), threads=0, times_ms=times
    )


FOUND = Bench(
    engine="tensorrt",
    version="TensorRT 11.1",
    device="NVIDIA H200",
    models=(
        BenchedModel(name="m.onnx", proof=PROOF, eager=latency(2.0, 3.0), graph=latency(1.5, 2.5)),
        BenchedModel(name="m.q.onnx", proof=PROOF, eager=latency(1.0, 2.5), reason="it waits for the CPU"),
    ),
    shapes={"x": (32, 3, 224, 224)},
    data="samples.npz: 4 samples",
    warnings=(Caution("W112", "sizes were guessed"),),
)
TABLE = """\
2 models  (TensorRT 11.1, NVIDIA H200, x 32x3x224x224)
model     heavy nodes        kernels  moving   median      p99  runs/s  graph median  graph p99  graph runs/s  faster
m.onnx    1 int8, 1 float32        1       0  2.00 ms  3.00 ms     400       1.50 ms    2.50 ms           500   1.00×
m.q.onnx  1 int8, 1 float32        1       0  1.00 ms  2.50 ms     571                                          1.25×

not timed  m.q.onnx: it waits for the CPU
data       samples.npz: 4 samples
warning[W112]: sizes were guessed
"""


def test_the_table() -> None:
    assert shown(show, FOUND, width=None) == TABLE


def test_kernels_alone_where_nothing_was_timed() -> None:
    bare = tuple(BenchedModel(name=one.name, proof=PROOF) for one in FOUND.models)
    text = shown(show, replace(FOUND, models=bare, untimed=Untimed.NO_GPU, device=""), width=None, verbose=True)
    assert "median" not in text
    assert "not timed  this machine has no NVIDIA GPU" in text
    assert "kernels    m.onnx: built in 0.3 s" in text


def test_json_has_times_in_milliseconds() -> None:
    document = json.loads(write_json(FOUND))
    first, second = document["models"]
    assert (first["eager"]["median_ms"], first["graph"]["per_second"], first["ratio"]) == (2.0, 500.0, 1.0)
    assert (second["graph"], second["ratio"], second["moving"]) == (None, 1.25, 0)
    assert "times_ms" not in first["eager"]
    assert warned(show, FOUND, as_json=True)[1].startswith("warning[W112]")


# ---- The results of build-kernels.

CACHE = "/home/a/.cache/onnxq/kernels"
BUILT = (
    Built("CPU", "built", "g++ (Debian 12.2.0) 12.2.0", (), f"{CACHE}/libfq_cpu-0123456789abcdef.so", 345_678, 41.27),
    Built("CUDA", "there", "nvcc 13.0", ("sm_80", "sm_90"), f"{CACHE}/fq-0123.fatbin", 2_345_678, 0.02),
)
MISSING = Built("CUDA", "missing", reason="there is no nvcc; install the CUDA toolkit")

KERNELS = """\
kernels  for          state  made by                      KiB     s  file
CPU      this         built  g++ (Debian 12.2.0) 12.2.0   338  41.3  /home…ef.so
         processor
CUDA     sm_80 sm_90  there  nvcc 13.0                   2291   0.0  /home…atbin
no CUDA kernels: there is no nvcc; install the CUDA toolkit
"""


def test_the_table_at_80_columns_and_quiet_only_what_is_missing() -> None:
    found = Kernels((*BUILT, MISSING))
    assert shown(show, found) == KERNELS
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
