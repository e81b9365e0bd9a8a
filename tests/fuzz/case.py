"""What a fuzzer is, and what a try may end in."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Protocol

# Names as on the command line, and the modules that hold make_case and run_case.
FUZZERS = {
    "bytes": "tests.fuzz.model_bytes",
    "semantics": "tests.fuzz.model_semantics",
    "data": "tests.fuzz.data",
    "plans": "tests.fuzz.plans",
    "configs": "tests.fuzz.configs",
    "caches": "tests.fuzz.caches",
    "motifs": "tests.fuzz.motifs",
    "engines": "tests.fuzz.engines",
}
ACCEPTED, REFUSED, FAILED = "accepted", "refused", "failed"


class Fuzzer(Protocol):
    """A module of this folder."""

    def make_case(self, rng: Random, folder: Path) -> str:
        """Write a damaged input into the empty `folder`; a few words on how it was made."""
        ...

    def run_case(self, folder: Path, work: Path) -> Iterable[str]:
        """Give the input to onnxq. Returns the names of the files that it wrote into `work`.

        Raises OnnxqError for an input refused in words, Wrong for an answer that is not right.
        """
        ...


class Wrong(Exception):
    """onnxq took the input, and what it made of it is not right."""


@dataclass(frozen=True)
class Outcome:
    """How one try ended. kind: accepted, refused or failed; label: the exception's class or the kind of failure.

    place: where in the source, "" where nobody knows; detail: the message, or the traceback of a failure.
    """

    kind: str
    label: str = ""
    place: str = ""
    detail: str = ""
    seconds: float = 0.0


def find_fuzzer(name: str) -> Fuzzer:
    """A fuzzer by its name on the command line, or by its module's."""
    return import_module(FUZZERS.get(name, name))  # type: ignore[return-value]


def seeded(seed: int, fuzzer: str, number: int) -> Random:
    """The generator of one try, alike on every machine and whatever was tried before it."""
    return Random(f"{seed}/{fuzzer}/{number}")
