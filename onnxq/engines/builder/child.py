"""The process in which engines are built: `python -m onnxq.engines.builder.child FOLDER`; its files: process.py."""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from onnxq.engines.builder.library import ORT
from onnxq.engines.builder.process import JOB, RESULT, BuildResult, Job

# Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> int:
    """Do the job in `folder` and write its result there; a crash of the library ends this process first."""
    end_with_parent()
    job = Job(**json.loads((folder / JOB).read_text(encoding="utf-8")))
    # Imported here only, so that the parent never loads the library.
    builder = import_module(f"onnxq.engines.builder.{'ort' if job.engine == ORT else 'trt'}")
    result: BuildResult = builder.build(job, folder)
    (folder / RESULT).write_text(json.dumps(asdict(result)), encoding="utf-8")
    return 0


def end_with_parent() -> None:
    """Linux: be killed when the parent is, which then cannot do it; a build may take many minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
