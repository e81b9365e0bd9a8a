"""Tries by number in a worker process that is started again when it dies; failures are kept with their input."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.case import ACCEPTED, FAILED, REFUSED, Outcome

ROOT = Path(__file__).resolve().parents[2]
# Seconds. A try takes a tenth of one; the rest is for machines with other things to do.
TRY_LIMIT = 60.0
START_LIMIT = 300.0
# A fresh process now and then: what one leaks must not be taken for what the next try needs.
TRIES_A_WORKER = 400


@dataclass
class Failure:
    """A failed try. folder: where its input is kept, None where nothing is."""

    fuzzer: str
    seed: int
    number: int
    outcome: Outcome
    folder: Path | None = None

    @property
    def signature(self) -> tuple[str, str, str]:
        """Alike for failures that have one cause, most likely."""
        return self.fuzzer, self.outcome.label, self.outcome.place


@dataclass
class Tally:
    """What became of one fuzzer's tries. refused: by exception class; places: their tries by class and source line."""

    fuzzer: str
    tries: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[int]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def add(self, number: int, outcome: Outcome) -> None:
        """Count one try."""
        self.tries += 1
        self.slowest = max(self.slowest, outcome.seconds)
        if outcome.kind == ACCEPTED:
            self.accepted += 1
        elif outcome.kind == REFUSED:
            self.refused[outcome.label] += 1
            self.places.setdefault(f"{outcome.label} {outcome.place}", []).append(number)


class Worker:
    """The process, and the folder it works in."""

    def __init__(self, fuzzer: str, folder: Path, limit: float) -> None:
        self.folder, self.limit, self.tries = folder, limit, 0
        self._log = (folder / "log.txt").open("a+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", fuzzer, str(folder), str(limit)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=_environment(),
        )  # fmt: skip
        if not self._answer(START_LIMIT):
            raise RuntimeError(f"the worker did not start:\n{self._said()}")

    def run(self, job: dict[str, int]) -> Outcome:
        """One try; a worker that dies or hangs is a failure, and gone afterwards."""
        self.tries += 1
        self._log.seek(0)
        self._log.truncate()
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        line = self._answer(self.limit)
        if line:
            return Outcome(**json.loads(line))
        hangs = line is None
        if hangs:
            self._process.kill()
        code = self._process.wait()
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return Outcome(FAILED, "hangs" if hangs else f"died of {name}", self._where(), self._said())

    def ended(self) -> bool:
        """True when the process is no more."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._log.close()

    def _answer(self, limit: float) -> bytes | None:
        """A line; b"" when the process has ended, None when the seconds have."""
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        return self._process.stdout.readline() if ready else None

    def _said(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-8000:]

    def _where(self) -> str:
        """The innermost line of ours in what faulthandler wrote."""
        for line in self._said().splitlines():
            if "/onnxq/" in line and "File" in line:
                name, _, rest = line.partition('", line ')
                return f"onnxq{name.rpartition('/onnxq')[2]}:{rest.split(' ')[0]}"
        return ""


def _environment() -> dict[str, str]:
    """This one, with our sources first and one BLAS thread, which numpy reads when it is imported."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**os.environ, "PYTHONPATH": paths, **dict.fromkeys(threads, "1")}


def run_tries(
    fuzzer: str, seed: int, numbers: Iterator[int], *, seconds: float = float("inf"), save: Path | None = None,
    limit: float = TRY_LIMIT,
) -> Tally:  # fmt: skip
    """Run the numbered tries of one fuzzer until they or the seconds end.

    save: a folder that gets one folder for each failure: its input, log and words.
    """
    tally, start, worker = Tally(fuzzer), time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix=f"onnxq-fuzz-{fuzzer}-") as name:
        folder = Path(name)
        try:
            for number in numbers:
                if time.monotonic() - start > seconds:
                    break
                if worker is None:
                    worker = Worker(fuzzer, folder, limit)
                outcome = worker.run({"seed": seed, "number": number})
                tally.add(number, outcome)
                if outcome.kind == FAILED:
                    failure = Failure(fuzzer, seed, number, outcome)
                    failure.folder = None if save is None else _keep(failure, folder, save)
                    tally.failures.append(failure)
                if worker.ended() or worker.tries >= TRIES_A_WORKER:
                    worker.stop()
                    worker = None
        finally:
            if worker is not None:
                worker.stop()
    tally.seconds = time.monotonic() - start
    return tally


def _keep(failure: Failure, folder: Path, save: Path) -> Path:
    """Copy what the failed try was given; the words go beside it."""
    kept = save / f"{failure.fuzzer}-{failure.seed}-{failure.number}"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder / "input", kept / "input")
    words = f"{failure.outcome.label} at {failure.outcome.place}\n\n{failure.outcome.detail}\n"
    (kept / "failure.txt").write_text(words, encoding="utf-8", errors="backslashreplace")
    return kept
