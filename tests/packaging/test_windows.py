"""No module imports on Windows what is not there; mypy checks the same of each attribute (`make lint`)."""

import subprocess
import sys

import pytest

# Packages of others decide by `sys.platform`, too: they are imported before it changes.
_PROGRAM = """
import pkgutil, sys
import click, filelock, google.protobuf.json_format, highspy, jinja2, multiprocessing.connection, onnx.helper
import onnx_graphsurgeon, onnxruntime, pydantic, rich.console, rich.live, rich.progress, rich.table, threadpoolctl, yaml
import concurrent.futures, logging.handlers, subprocess, tempfile, uuid, zoneinfo
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
import onnxq
for module in pkgutil.walk_packages(onnxq.__path__, "onnxq."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
"""


# Older tools of ONNX Runtime import torch, which loads libraries of Windows there.
@pytest.mark.recent_ort
def test_every_module_is_imported_without_what_windows_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
