"""Writing files so that a failure, a full disk or a signal leaves what was there before untouched."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from onnxq.errors import OutputError
from onnxq.files.locks import lock_new, remove_stale, temporary_name
from onnxq.files.names import readable
from onnxq.files.outputs import EXISTS_FIX, check_kind, is_stream, refuse_inputs


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write `text` to a temporary file beside `path` and rename it; OutputError when that cannot be done."""
    with replacing([path], overwrite=overwrite) as files:
        files[0].write(readable(text).encode("utf-8"))


@contextmanager
def replacing(
    targets: Sequence[Path], *, overwrite: bool = False, inputs: Sequence[Path] = ()
) -> Iterator[list[BinaryIO]]:
    """Open one temporary file per target; on success they take the targets' places, the last one first.

    The first target is the one that refers to the others: while they are replaced it is not there, so that it never
    stands beside files of another run. Devices and pipes are written through.
    Raises OutputError for what exists (unless overwrite), is one of `inputs` or an input of the running command, or
    cannot be written.
    """
    for target in targets:
        check_kind(target)
        if os.path.lexists(target) and not (overwrite or is_stream(target)):
            raise OutputError(str(target), "exists already", EXISTS_FIX, code="Q601")
    refuse_inputs(targets, inputs)
    remove_stale(targets[0].parent)
    made: list[Path] = []
    try:
        with ExitStack() as stack:
            files = [_opened(target, made, stack) for target in targets]
            yield files
            for target, file in zip(targets, files, strict=True):
                file.flush()
                if not is_stream(target):
                    os.fsync(file.fileno())
                if os.name == "nt":  # where an open file cannot be renamed; elsewhere closing would end its lock
                    file.close()
            if len(made) > 1:
                _exchange(made, targets)
            elif made:
                os.replace(made[0], targets[0])
    except OSError as error:
        raise cannot_write(targets[0], error) from error
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> OutputError:
    """What a failed write to `path` means."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutputError(str(path), "there is no room left on the disk", "free some space", code="Q604")
    cause = f"cannot be written ({error.strerror or error})"
    return OutputError(str(path), cause, "choose another folder, or check this one's permissions", code="Q604")


def _opened(target: Path, made: list[Path], stack: ExitStack) -> BinaryIO:
    """The target itself where it is a stream, else a locked temporary file beside it."""
    while True:
        if is_stream(target):
            file = target.open("wb")
        else:
            made.append(target.with_name(temporary_name()))
            file = made[-1].open("xb")
        stack.callback(_close, file)
        if is_stream(target) or lock_new(file.fileno(), made[-1]):
            return file
        made.pop()


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # a full disk shows again when the buffer is flushed
        file.close()


def _exchange(made: list[Path], targets: Sequence[Path]) -> None:
    """Put several files in place: all of them, or what was there before again."""
    aside: list[tuple[Path, Path]] = []
    placed: list[Path] = []
    try:
        for target in targets:
            if os.path.lexists(target):
                aside.append((target.with_name(temporary_name()), target))
                os.replace(target, aside[-1][0])
        for path, target in reversed(list(zip(made, targets, strict=True))):
            placed.append(target)
            os.replace(path, target)
    except BaseException:
        for target in placed:
            target.unlink(missing_ok=True)
        for path, target in reversed(aside):
            if os.path.lexists(path):
                os.replace(path, target)
        raise
    for path, _ in aside:
        path.unlink(missing_ok=True)
