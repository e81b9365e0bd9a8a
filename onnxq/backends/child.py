"""The process in which engines build and time: `python -m onnxq.backends.child FOLDER`; its files: building.py."""

import ctypes
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from onnxq.backends import find_engine
from onnxq.backends.building import JOB, RESULT
from onnxq.backends.engine import Job

# Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> int:
    """Do the job in `folder` and write its result there; a crash of the library ends this process first."""
    end_with_parent()
    task = json.loads((folder / JOB).read_bytes())
    # The library is imported here only, so that the parent never loads it.
    engine = find_engine(task["engine"])
    job = task["job"]
    result = (
        asdict(engine.build(Job(**job), folder)) if task["builds"] else engine.run_job(job, folder)
    )
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    return 0


def end_with_parent() -> None:
    """Linux: be killed when the parent is, which then cannot do it; a build may take many minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
