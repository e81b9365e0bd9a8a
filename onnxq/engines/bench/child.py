"""The process in which engines are timed: `python -m onnxq.engines.bench.child FOLDER`; its files: trt.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from onnxq.engines.bench.engine import time_job
from onnxq.engines.builder.child import end_with_parent
from onnxq.engines.builder.process import JOB, RESULT


def main(folder: Path) -> int:
    """Do the job in `folder` and write its result there; a crash of the library ends this process first."""
    end_with_parent()
    found = time_job(json.loads((folder / JOB).read_text(encoding="utf-8")), folder)
    (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
