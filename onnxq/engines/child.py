"""The process in which engines are built: `python -m onnxq.engines.child FOLDER`. See builds.py for what lies there."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from onnxq.engines.builds import JOB, RESULT

# Which module builds with which library; they are imported here only, so that the parent never loads the library.
_BUILDERS = {
    "tensorrt_rtx": "onnxq.engines.build_trt",
    "tensorrt": "onnxq.engines.build_trt",
    "onnxruntime": "onnxq.engines.build_ort",
}


def main(folder: Path) -> int:
    """Carry out the job in `folder` and write its result there; what crashes the library ends this process first."""
    job: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
    told = import_module(_BUILDERS[job["library"]]).build(job, folder)
    (folder / RESULT).write_text(json.dumps(told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
