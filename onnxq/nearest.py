"""Suggestions for unknown names. Standard library only, because every room that reports a name imports this."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from onnxq.sites import Names

# Characters of a list of names: the longest of onnxq's own, the options of `search`, has 731.
_MOST = 800


def find_nearest(name: str, candidates: Iterable[str], limit: int = 3) -> Names:
    """Up to `limit` candidates similar to `name`, best first; () without any. Letter case does not count."""
    known = sorted({str(candidate) for candidate in candidates})
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(candidate.casefold(), candidate)
    # 0.6 is difflib's own default: one wrong letter in three still matches.
    close = get_close_matches(name.casefold(), folded, n=limit, cutoff=0.6)
    return tuple(folded[key] for key in close)


def suggest_names(name: str, candidates: Iterable[str]) -> str:
    """A fix for an unknown name: the nearest candidates, else as many of all as fit into a few lines."""
    known = sorted({str(candidate) for candidate in candidates})
    close = find_nearest(name, known)
    if close:
        return _ask(close)
    if not known:
        return "there are none"
    listed = ", ".join(known)
    if len(listed) <= _MOST:
        return f"known: {listed}"
    return f"known: {listed[:_MOST].rpartition(', ')[0] or known[0]}, … ({len(known)} in all)"


def suggest_files(path: Path) -> str:
    """A fix for a file that is not there: the nearest names in its folder; "" for none."""
    beside = os.listdir(path.parent) if os.path.isdir(path.parent) else ()
    close = find_nearest(path.name, beside)
    return _ask([str(path.parent / name) for name in close]) if close else ""


def _ask(names: Iterable[str]) -> str:
    return f"did you mean {' or '.join(map(repr, names))}?"
