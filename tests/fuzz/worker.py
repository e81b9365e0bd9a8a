"""The process in which tries run, one after another: what kills it is recorded by its parent, with its input."""

import faulthandler
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnxq.errors import OnnxqError
from tests.fuzz.case import ACCEPTED, FAILED, REFUSED, Outcome, Wrong, find_fuzzer, seeded

# Bytes that a try may add to the process at its peak. The largest honest try stays below 100 MiB.
MEMORY_GROWTH = 512 * 2**20
# What may be asked of the system at all: damage must not take the machine down.
ADDRESS_SPACE = 24 * 2**30


def run_try(name: str, folder: Path) -> Outcome:
    """Run the case that lies in `folder/input`; scratch files and results go to `folder/work`, which must be empty."""
    work, temporary = folder / "work", folder / "tmp"
    for place in (work, temporary):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    tempfile.tempdir = str(temporary)
    before, start = _memory(reset=True), time.monotonic()
    try:
        made = set(find_fuzzer(name).run_case(folder / "input", work))
        outcome = Outcome(ACCEPTED)
    except OnnxqError as error:
        made, outcome = set(), Outcome(REFUSED, type(error).__name__, _place(error), str(error))
        if not error.subject or not error.cause or "Traceback" in str(error):
            outcome = Outcome(FAILED, "refusal without words", _place(error), str(error))
    except Wrong as error:
        return Outcome(FAILED, "wrong result", str(error).split(":")[0], traceback.format_exc())
    except Exception as error:
        return Outcome(FAILED, type(error).__name__, _place(error), traceback.format_exc())
    finally:
        tempfile.tempdir = None
    left = sorted(path.name for path in (*work.iterdir(), *temporary.iterdir()) if path.name not in made)
    if left:
        return Outcome(FAILED, "file left over", left[0].split(".")[-1], f"{left}\n{outcome.detail}")
    grown = _memory() - before
    if grown > MEMORY_GROWTH:
        return Outcome(FAILED, "memory", outcome.place, f"grew by {grown / 2**20:.0f} MiB\n{outcome.detail}")
    return Outcome(outcome.kind, outcome.label, outcome.place, outcome.detail, time.monotonic() - start)


def _place(error: BaseException) -> str:
    """file:line of the innermost frame of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        parts = Path(frame.filename).parts
        if "onnxq" in parts and "site-packages" not in parts:
            return f"{'/'.join(parts[len(parts) - parts[::-1].index('onnxq') - 1 :])}:{frame.lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _memory(*, reset: bool = False) -> int:
    """The process's peak memory in bytes, since the last reset where the system can do that."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Read jobs from stdin, a JSON object a line; answer each with the outcome as one line on the old stdout."""
    name, root, limit = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    faulthandler.enable(all_threads=False)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    find_fuzzer(name)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(_answer(name, root, json.loads(line), limit))), file=answers, flush=True)


def _answer(name: str, root: Path, job: dict[str, Any], limit: float) -> Outcome:
    # Shows where a try hangs, before the parent ends it.
    faulthandler.dump_traceback_later(limit * 0.9)
    try:
        given = root / "input"
        if "number" in job:
            shutil.rmtree(given, ignore_errors=True)
            given.mkdir(parents=True)
            words = find_fuzzer(name).make_case(seeded(job["seed"], name, job["number"]), given)
            (given / "how.txt").write_text(words, encoding="utf-8", errors="backslashreplace")
        return run_try(name, root)
    except Exception:
        return Outcome(FAILED, "the fuzzer itself", "", traceback.format_exc())
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
