"""Atomic writing: a failure, a full disk or a signal leaves earlier files untouched."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from onnxq.errors import OutputError
from onnxq.escapes import replace_surrogates
from onnxq.files.locks import lock_new_file, make_temporary_name, remove_stale_files
from onnxq.files.outputs import EXISTS_FIX, check_output_kind, is_stream, refuse_inputs


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write `text` to a temporary file beside `path` and rename it. Raises OutputError if that fails."""
    with replace_files([path], overwrite=overwrite) as files:
        files[0].write(replace_surrogates(text).encode("utf-8"))


@contextmanager
def replace_files(
    targets: Sequence[Path], *, overwrite: bool = False, inputs: Sequence[Path] = ()
) -> Iterator[list[BinaryIO]]:
    """Open one temporary file per target; on success they replace the targets, the last one first.

    The first target is the file that refers to the others. It is absent while they are replaced, so that it never
    stands beside files of another run. Devices and pipes are written directly.
    Raises OutputError for a target that exists (unless overwrite), is one of `inputs` or an input of the running
    command, or cannot be written.
    """
    for target in targets:
        check_output_kind(target)
        if os.path.lexists(target) and not (overwrite or is_stream(target)):
            raise OutputError(str(target), "exists already", EXISTS_FIX, code="Q601")
    refuse_inputs(targets, inputs)
    remove_stale_files(targets[0].parent)
    made: list[Path] = []
    try:
        with ExitStack() as stack:
            files = [_open_temporary(target, made, stack) for target in targets]
            yield files
            for target, file in zip(targets, files, strict=True):
                file.flush()
                if not is_stream(target):
                    # Without it a crash of the system after the rename can leave an empty file in the target's place.
                    os.fsync(file.fileno())
                if os.name == "nt":  # where an open file cannot be renamed; elsewhere closing would end its lock
                    file.close()
            if len(made) > 1:
                _replace_all(made, targets)
            elif made:
                os.replace(made[0], targets[0])
    except OSError as error:
        raise make_write_error(targets[0], error) from error
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def make_write_error(path: Path, error: OSError) -> OutputError:
    """Make the error for a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutputError(str(path), "there is no room left on the disk", "free some space", code="Q604")
    cause = f"cannot be written ({error.strerror or error})"
    return OutputError(str(path), cause, "choose another folder, or check this one's permissions", code="Q604")


def _open_temporary(target: Path, made: list[Path], stack: ExitStack) -> BinaryIO:
    """Open the target itself if it is a stream, else a locked temporary file beside it."""
    while True:
        if is_stream(target):
            file = target.open("wb")
        else:
            made.append(target.with_name(make_temporary_name()))
            file = made[-1].open("xb")
        stack.callback(_close_quietly, file)
        if is_stream(target) or lock_new_file(file.fileno(), made[-1]):
            return file
        made.pop()  # another run removed it before it was locked


def _close_quietly(file: BinaryIO) -> None:
    with suppress(OSError):  # a full disk shows again when the buffer is flushed
        file.close()


def _replace_all(made: list[Path], targets: Sequence[Path]) -> None:
    """Replace several files: all of them, or on any failure none."""
    aside: list[tuple[Path, Path]] = []
    placed: list[Path] = []
    try:
        for target in targets:
            if os.path.lexists(target):
                aside.append((target.with_name(make_temporary_name()), target))
                os.replace(target, aside[-1][0])
        for path, target in reversed(list(zip(made, targets, strict=True))):
            placed.append(target)
            os.replace(path, target)
    except BaseException:  # a signal, too, must not leave files of two runs side by side
        for target in placed:
            target.unlink(missing_ok=True)
        for path, target in reversed(aside):
            if os.path.lexists(path):
                os.replace(path, target)
        raise
    for path, _ in aside:
        path.unlink(missing_ok=True)
