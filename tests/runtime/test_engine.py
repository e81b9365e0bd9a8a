"""Options of sessions: quiet, without spinning, as optimized and as thrifty as asked for."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime
import pytest

from onnxq.errors import MissingDependencyError
from onnxq.runtime.session import import_onnxruntime, list_faults, make_session_options

LEVEL = onnxruntime.GraphOptimizationLevel


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ({"optimize": True}, LEVEL.ORT_ENABLE_ALL),
        ({"optimize": True, "layout": False}, LEVEL.ORT_ENABLE_EXTENDED),
        ({"optimize": False}, LEVEL.ORT_DISABLE_ALL),
        ({"optimize": False, "layout": False}, LEVEL.ORT_DISABLE_ALL),
    ],
)
def test_levels_of_optimization(asked: dict[str, Any], level: object) -> None:
    options = make_session_options(threads=2, **asked)
    assert options.graph_optimization_level == level
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    assert options.log_severity_level == 4
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_memory_goes_back_to_the_system_without_an_arena() -> None:
    usual, thrifty = (make_session_options(optimize=True, threads=0, arena=arena) for arena in (True, False))
    assert (usual.enable_cpu_mem_arena, usual.enable_mem_pattern) == (True, True)
    assert (thrifty.enable_cpu_mem_arena, thrifty.enable_mem_pattern) == (False, False)


def test_shapes_run_first_and_the_optimized_graph_is_written_where_asked(tmp_path: Path) -> None:
    plain = make_session_options(optimize=True, threads=0)
    asked = make_session_options(optimize=True, threads=0, shapes_first=True, save=tmp_path / "o.onnx")
    order = onnxruntime.ExecutionOrder
    assert (plain.execution_order, asked.execution_order) == (order.DEFAULT, order.PRIORITY_BASED)
    assert (plain.optimized_model_filepath, asked.optimized_model_filepath) == ("", str(tmp_path / "o.onnx"))


def test_every_fault_of_onnxruntime_is_caught() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, NoSuchFile

    assert {Fail, InvalidArgument, NoSuchFile, ValueError, MemoryError} <= set(list_faults())
    assert not issubclass(KeyboardInterrupt, list_faults())


@pytest.mark.parametrize(
    ("there", "cause"),
    [(None, "cannot be imported"), (ModuleType("onnxruntime"), "is damaged: several of its packages")],
)
def test_a_missing_or_damaged_package_is_an_install_line(
    monkeypatch: pytest.MonkeyPatch, there: ModuleType | None, cause: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", there)
    with pytest.raises(MissingDependencyError) as caught:
        import_onnxruntime()
    assert caught.value.code == "Q801"
    assert cause in caught.value.cause
    assert "never both" in caught.value.fix
    assert there or "pip install 'onnxq[cpu]'" in caught.value.fix
