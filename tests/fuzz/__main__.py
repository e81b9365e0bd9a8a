"""Damage models, data, plans, configurations and caches, and see that onnxq answers right or refuses in words.

    python -m tests.fuzz --seconds 60 --seed 0                 every fuzzer for a minute
    python -m tests.fuzz --only plans --tries 500              the first 500 tries of one
    python -m tests.fuzz --only plans --seed 0 --try 123       one try, here, with its traceback
    python -m tests.fuzz --replay out/fuzz/plans-0-123         what a failure was given, again

Exit status: 1 if anything failed, else 0. See docs/robustness.md.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.case import FAILED, FUZZERS, Outcome, find_fuzzer, seeded
from tests.fuzz.run import TRY_LIMIT, Failure, Tally, run_tries


def main() -> int:
    """Run what the command line asks for."""
    asked = _arguments()
    if asked.replay is not None:
        name = asked.only[0] if asked.only else asked.replay.name.split("-")[0]
        return _show(name, asked.replay / "input")
    names = asked.only or list(FUZZERS)
    if asked.single is not None:
        with tempfile.TemporaryDirectory(prefix="onnxq-fuzz-") as folder:
            given = Path(folder) / "input"
            given.mkdir()
            print(find_fuzzer(names[0]).make_case(seeded(asked.seed, names[0], asked.single), given))
            return _show(names[0], given)
    tallies = []
    for name in names:
        numbers = iter(range(asked.start, asked.start + asked.tries)) if asked.tries else itertools.count(asked.start)
        seconds = asked.seconds if asked.seconds or asked.tries else 60.0
        tally = run_tries(
            name, asked.seed, numbers, seconds=seconds or float("inf"), save=asked.save, limit=asked.try_limit
        )
        tallies.append(tally)
        print(_line(tally), file=sys.stderr, flush=True)
    print(table(tallies, markdown=asked.markdown))
    failures = [failure for tally in tallies for failure in tally.failures]
    if asked.places:
        for tally in tallies:
            for place, numbers in sorted(tally.places.items(), key=lambda item: -len(item[1])):
                print(f"{tally.fuzzer:10} {len(numbers):6} {place}  tries {numbers[:4]}")
    for text in describe_failures(failures):
        print(text)
    return 1 if failures else 0


def table(tallies: Sequence[Tally], *, markdown: bool = False) -> str:
    """Counts by fuzzer: tries, accepted, refused by exception class, failures, seconds."""
    classes = sorted({name for tally in tallies for name in tally.refused})
    head = ["fuzzer", "tries", "accepted", *classes, "failures", "minutes", "slowest (s)"]
    rows = [
        [tally.fuzzer, str(tally.tries), str(tally.accepted), *(str(tally.refused[name]) for name in classes),
         str(len(tally.failures)), f"{tally.seconds / 60:.1f}", f"{tally.slowest:.1f}"]
        for tally in tallies
    ]  # fmt: skip
    if markdown:
        rule = ["---", *("---:" for _ in head[1:])]
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (head, *rows))


def describe_failures(failures: Sequence[Failure]) -> list[str]:
    """One paragraph for each kind of failure, with the tries it was seen in and how to see one again."""
    groups: dict[tuple[str, str, str], list[Failure]] = defaultdict(list)
    for failure in failures:
        groups[failure.signature].append(failure)
    found = []
    for (name, label, place), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        first = members[0]
        last = [line for line in first.outcome.detail.splitlines() if line.strip()]
        found.append(
            f"\nFAILED {name}: {label} {place} ({len(members)} times; tries {[m.number for m in members[:5]]})\n"
            f"  {last[-1][:300] if last else ''}\n"
            f"  again: python -m tests.fuzz --only {name} --seed {first.seed} --try {first.number}"
            + (f"   or --replay {first.folder}" if first.folder else "")
        )
    return found


def _line(tally: Tally) -> str:
    refused = ", ".join(f"{name} {count}" for name, count in tally.refused.most_common())
    return (
        f"{tally.fuzzer}: {tally.tries} tries in {tally.seconds:.0f} s, {tally.accepted} accepted, "
        f"{sum(tally.refused.values())} refused ({refused}), {len(tally.failures)} failed"
    )


def _show(name: str, given: Path) -> int:
    """Run one case in this process and print how it ends."""
    from tests.fuzz.worker import run_try

    with tempfile.TemporaryDirectory(prefix="onnxq-fuzz-") as folder:
        shutil.copytree(given, Path(folder) / "input")
        outcome: Outcome = run_try(name, Path(folder))
    print(f"{outcome.kind} {outcome.label} {outcome.place}\n{outcome.detail}")
    return 1 if outcome.kind == FAILED else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="of every fuzzer; 60 where --tries does not say")
    parser.add_argument("--tries", type=int, default=0, help="of every fuzzer")
    parser.add_argument("--start", type=int, default=0, help="number of the first try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(FUZZERS), help="this fuzzer; may be given again")
    parser.add_argument("--save", type=Path, default=Path("out/fuzz"), help="folder for what failed")
    parser.add_argument("--try", type=int, dest="single", help="run this one try here")
    parser.add_argument("--try-limit", type=float, default=TRY_LIMIT, help="seconds after which a try hangs")
    parser.add_argument("--replay", type=Path, help="run what a failure was given again, here")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--places", action="store_true", help="list the source lines that refused")
    asked = parser.parse_args()
    if asked.single is not None and len(asked.only or ()) != 1:
        parser.error("--try needs --only with one fuzzer")
    return asked


if __name__ == "__main__":
    sys.exit(main())
