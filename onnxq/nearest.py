"""The names a person may have meant; standard library only, for every room that reports an unknown name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Up to `limit` candidates that look like `name`, best first; () when none does."""
    known = sorted({str(candidate) for candidate in candidates})
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(candidate.casefold(), candidate)
    close = get_close_matches(name.casefold(), folded, n=limit, cutoff=0.6)
    return tuple(folded[key] for key in close)


def did_you_mean(name: str, candidates: Iterable[str], limit: int = 3, show: int = 8) -> str:
    """A fix line: the nearest names, else the known ones (at most `show` of them)."""
    known = sorted({str(candidate) for candidate in candidates})
    close = nearest(name, known, limit)
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    if not known:
        return "there are none"
    more = f", … ({len(known)} in all)" if len(known) > show else ""
    return f"known: {', '.join(known[:show])}{more}"
