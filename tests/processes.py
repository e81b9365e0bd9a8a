"""Child processes of tests, with signals as a terminal gives them."""

import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def start(command: Sequence[str], *, ignored: Sequence[signal.Signals] = (), **how: Any) -> subprocess.Popen[str]:
    """Start a child that SIGINT, SIGTERM and SIGHUP end unless they are `ignored`, whatever the tests' own parent set.

    A shell's background jobs ignore SIGINT, and what is ignored stays so in children; what is handled does not.
    """
    asking = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in asking}
    for number in asking:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **how)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
