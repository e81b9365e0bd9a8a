"""The process in which engines are built: `python -m onnxq.engines.build.child FOLDER`. See builds.py for what lies there."""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from onnxq.engines.build.process import JOB, RESULT

# Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Which module builds with which library; they are imported here only, so that the parent never loads the library.
_BUILDERS = {
    "tensorrt_rtx": "onnxq.engines.build.trt",
    "tensorrt": "onnxq.engines.build.trt",
    "onnxruntime": "onnxq.engines.build.ort",
}


def main(folder: Path) -> int:
    """Carry out the job in `folder` and write its result there; what crashes the library ends this process first."""
    end_with_parent()
    job: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
    told = import_module(_BUILDERS[job["library"]]).build(job, folder)
    (folder / RESULT).write_text(json.dumps(told), encoding="utf-8")
    return 0


def end_with_parent() -> None:
    """Linux: be killed when the parent is, which then cannot do it; a build may take many minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
