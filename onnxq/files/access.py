"""Files of the user: outputs are checked before the work and written atomically, inputs are read with limits.

No input of a command is ever one of its outputs. A failure, a full disk or a signal leaves earlier files untouched.
Endless or oversized inputs are refused with a message.
"""

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from onnxq.errors import ErrorClass, OutputError, replace_surrogates
from onnxq.files import scratch

EXISTS_FIX = "choose another name, or overwrite it with `force=True`"
_INPUT_FIX = "choose another name; inputs are never overwritten"

AnyPath = str | Path
# Device and inode, which identify a file whatever its name.
_Identity = tuple[int, int]


@dataclass(frozen=True, eq=False)
class _Guard:
    """Inputs and outputs of one command."""

    # Existing files that will be replaced.
    targets: dict[_Identity, Path]
    # Files read so far.
    read: set[_Identity] = field(default_factory=set)


# A stack: one command may call another. Per context, so that commands in threads do not see each other's files.
_guards: ContextVar[tuple[_Guard, ...]] = ContextVar("onnxq_guards", default=())


def check_outputs(model: AnyPath, *outputs: AnyPath | None, force: bool = False) -> None:
    """Raise OutputError for an output that is the input, exists without `force`, or cannot be written.

    model: path of the input, "" if it is no file.
    """
    if str(model) and not os.path.exists(model):
        return  # Reading the model gives an error that says more than one about the output.
    for output in outputs:
        if isinstance(output, str):
            _check_spelling(output)
    wanted = [Path(output) for output in outputs if output is not None]
    for position, path in enumerate(wanted):
        status = check_output_kind(path)
        if str(model) and _is_same_file(path, Path(model)):
            raise OutputError(
                path,
                "is the input model, which is never overwritten",
                "choose another name",
                code="Q602",
            )
        if any(_is_same_file(path, other) for other in wanted[:position]) and not is_stream(path):
            raise OutputError(
                path, "is asked for twice", "give the outputs different names", code="Q602"
            )
        if status is not None and not force and not is_stream(path):
            raise OutputError(path, "exists", EXISTS_FIX, code="Q601")
    for folder, path in {path.parent: path for path in wanted if not is_stream(path)}.items():
        _probe_folder(folder, path)


@contextmanager
def guard_outputs(model: AnyPath, *outputs: AnyPath | None, force: bool = False) -> Iterator[None]:
    """Call `check_outputs`; in the block raise OutputError as soon as a file is read that an output would replace."""
    check_outputs(model, *outputs, force=force)
    with suppress(OSError):  # no temporary folder: a step that needs one raises its own error
        scratch.remove_leftovers(Path(tempfile.gettempdir()))
    paths = [Path(output) for output in outputs if output is not None]
    targets = {key: path for path in paths if (key := _find_identity(path)) is not None}
    token = _guards.set((*_guards.get(), _Guard(targets)))
    try:
        yield
    finally:
        _guards.reset(token)


def name_folder(output: AnyPath | None) -> Path | None:
    """The path of a folder for results, if one is asked for. Raises OutputError for text that names none."""
    if output == "-":
        cause = "is the standard output elsewhere, and here it would be a folder of this name"
        raise OutputError(output, cause, "name a folder, or ./- for that one", code="Q603")
    return None if output is None else Path(output)


@contextmanager
def prepare_folder(folder: Path, names: Iterable[str], *, parents: bool = False) -> Iterator[None]:
    """Make a folder for results if it does not exist, and guard the files of these names in it.

    parents: also make missing folders above. A new folder that stays empty is removed at the end.
    Raises OutputError if it is a file, or cannot be made or written to.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise OutputError(folder, "is a file", "name a folder", code="Q603")
    new = not os.path.exists(folder)
    make_folder(folder, parents=parents)
    try:
        with guard_outputs("", *(folder / name for name in names), force=True):
            yield
    finally:
        if new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def make_folder(folder: Path, *, parents: bool = True) -> None:
    """Make a folder unless it exists. parents: also missing folders above. Raises OutputError if it cannot be made."""
    try:
        folder.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        fix = "choose another folder" if parents else "create the folder it is to be in first"
        raise OutputError(folder, describe_os_error(error), fix, code="Q604") from error


def register_input(path: AnyPath) -> None:
    """Register a file as an input. Raises OutputError if the running command would overwrite it."""
    guards = _guards.get()
    key = _find_identity(Path(path)) if guards else None
    if key is None:
        return
    for guard in guards:
        guard.read.add(key)
        target = guard.targets.get(key)
        if target is not None:
            known = "" if str(target) == str(path) else f", as {path}"
            raise OutputError(target, f"is read by this command{known}", _INPUT_FIX, code="Q602")


def refuse_inputs(targets: Iterable[Path], inputs: Iterable[Path] = ()) -> None:
    """Raise OutputError for a target that the running command has read or that is one of `inputs`."""
    read = {key for guard in _guards.get() for key in guard.read} | {
        _find_identity(path) for path in inputs
    }
    for target in targets:
        key = _find_identity(target)
        if key is not None and key in read:
            raise OutputError(target, "is an input of this command", _INPUT_FIX, code="Q602")


def is_stream(path: Path) -> bool:
    """True for a device or pipe. It is written directly, and nothing in it can be overwritten."""
    try:
        mode = path.stat().st_mode
    # ValueError: a name with a null character.
    except (OSError, ValueError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def check_output_kind(path: Path) -> os.stat_result | None:
    """Return the status of an output's path without following links; None if nothing is there.

    Raises OutputError for a folder, a block device, a socket, the standard streams, and a name no file can have.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if not os.path.isdir(path.parent):
            raise OutputError(
                path, f"there is no folder {path.parent}", "create it first", code="Q603"
            ) from None
        return None
    except NotADirectoryError:
        raise OutputError(
            path, f"{path.parent} is not a folder", "name a file in a folder", code="Q603"
        ) from None
    except (OSError, ValueError) as error:
        cause = describe_os_error(error)
        raise OutputError(
            path,
            f"cannot be the name of an output ({cause})",
            "choose another name",
            code="Q603",
        ) from error
    # Of what a link leads to; of the link itself where it leads nowhere.
    mode = path.stat().st_mode if os.path.exists(path) else status.st_mode
    if stat.S_ISDIR(mode):
        raise OutputError(path, "is a folder", "give a file name", code="Q603")
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        cause = "is a socket" if stat.S_ISSOCK(mode) else "is a block device"
        raise OutputError(path, cause, "name a file", code="Q603")
    if _leads_to_standard_stream(path):
        raise OutputError(
            path,
            "is a standard stream, where messages and reports go",
            "name a file",
            code="Q603",
        )
    return status


def _check_spelling(output: str) -> None:
    """Raise OutputError for text that names something other than a file, which a Path does not show."""
    if output == "-":
        cause = "is the standard output elsewhere, and here it would be a file of this name"
        raise OutputError(output, cause, "name a file, or ./- for that one", code="Q603")
    if output.endswith(("/", os.sep)):
        raise OutputError(output, "is the name of a folder", "give a file name", code="Q603")


def _leads_to_standard_stream(path: Path) -> bool:
    """True for /dev/stdout and the like: links to open files, which must not be replaced by a file."""
    here = os.path.abspath(path)
    for _ in range(40):  # MAXSYMLINKS: as many links as Linux follows
        folder, name = os.path.split(here)
        real = os.path.realpath(folder)
        if real.startswith("/proc/") and real.endswith("/fd"):
            # Pipes made by the shell, `>(gzip)`, are allowed like other streams.
            return name in ("0", "1", "2") or not is_stream(path)
        if not os.path.islink(here):
            return False
        here = os.path.join(real, os.readlink(here))
    return False


def _probe_folder(folder: Path, path: Path) -> None:
    """Check that files can be made in the folder of an output, and remove leftovers of ended runs there."""
    trial = folder / scratch.make_temporary_name()
    try:
        os.close(os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        trial.unlink(missing_ok=True)
    except OSError as error:
        cause = f"cannot be written: no file can be made in its folder ({describe_os_error(error)})"
        raise OutputError(
            path, cause, "choose another folder, or check this one's permissions", code="Q604"
        ) from error
    finally:
        with suppress(OSError):  # still there if a signal came between the two calls
            trial.unlink(missing_ok=True)
    scratch.remove_stale_files(folder)


def _find_identity(path: Path) -> _Identity | None:
    """Return device and inode of a regular file, links followed; None for anything else."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _is_same_file(path: Path, other: Path) -> bool:
    """True for two names of one file, which need not exist yet."""
    key = _find_identity(path)
    return os.path.realpath(path) == os.path.realpath(other) or (
        key is not None and key == _find_identity(other)
    )


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write `text` to a temporary file beside `path` and rename it. Raises OutputError if that fails."""
    with replace_files([path], overwrite=overwrite) as files:
        files[0].write(replace_surrogates(text).encode())


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
            raise OutputError(target, "exists already", EXISTS_FIX, code="Q601")
    refuse_inputs(targets, inputs)
    scratch.remove_stale_files(targets[0].parent)
    temporary: list[Path] = []
    try:
        with ExitStack() as stack:
            files = [_open_temporary(target, temporary, stack) for target in targets]
            yield files
            for target, file in zip(targets, files, strict=True):
                file.flush()
                if not is_stream(target):
                    # Without it a crash of the system after the rename can leave an empty file in the target's place.
                    os.fsync(file.fileno())
                # Where an open file cannot be renamed; elsewhere closing would end its lock.
                if os.name == "nt":
                    file.close()
            if len(temporary) > 1:
                _replace_all(temporary, targets)
            elif temporary:
                os.replace(temporary[0], targets[0])
    except OSError as error:
        raise make_write_error(targets[0], error) from error
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def make_write_error(path: Path, error: OSError) -> OutputError:
    """Make the error for a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutputError(
            path, "there is no room left on the disk", "free some space", code="Q604"
        )
    cause = f"cannot be written ({describe_os_error(error)})"
    return OutputError(
        path, cause, "choose another folder, or check this one's permissions", code="Q604"
    )


def _open_temporary(target: Path, temporary: list[Path], stack: ExitStack) -> BinaryIO:
    """Open the target itself if it is a stream, else a locked temporary file beside it."""
    while True:
        if is_stream(target):
            file = target.open("wb")
        else:
            temporary.append(target.with_name(scratch.make_temporary_name()))
            file = temporary[-1].open("xb")
        stack.callback(_close_quietly, file)
        if is_stream(target) or scratch.lock_new_file(file.fileno(), temporary[-1]):
            return file
        temporary.pop()  # another run removed it before it was locked


def _close_quietly(file: BinaryIO) -> None:
    with suppress(OSError):  # a full disk shows again when the buffer is flushed
        file.close()


def _replace_all(temporary: list[Path], targets: Sequence[Path]) -> None:
    """Replace several files: all of them, or on any failure none."""
    aside = []
    placed = []
    try:
        for target in targets:
            if os.path.lexists(target):
                aside.append((target.with_name(scratch.make_temporary_name()), target))
                os.replace(target, aside[-1][0])
        for path, target in reversed(list(zip(temporary, targets, strict=True))):
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


MIB = 2**20
# Bytes. A pipe or device may have no end; text files that people or scripts write are far smaller.
_FROM_A_PIPE = 64 * MIB
# Calibration files of other tools, which are taken for plans and for each other. ONNX Runtime writes its table as JSON
# and as lines of a tensor and a number.
_CALIBRATIONS = {
    "TensorRT": re.compile(r"\s*TRT-[0-9A-Za-z.]+-\w+\s*$", re.MULTILINE),
    "ONNX Runtime": re.compile(r'\s*(\{\s*"CLS": "TensorsData"|(\S+ [-+.e\d]+\s*)+\Z)'),
}


def read_input(path: AnyPath, error: ErrorClass, *, limit: int, pipes: bool = False) -> bytes:
    """Read an input file of at most `limit` bytes.

    error: the class to raise for larger files, and for devices and pipes. pipes: read them as well.
    Raises OSError as `open` does.
    """
    check_input_kind(path, error, pipes=pipes)
    status = os.stat(path)
    size = status.st_size
    regular = stat.S_ISREG(status.st_mode)
    limit = limit if regular else min(limit, _FROM_A_PIPE)
    with open(path, "rb") as file:
        # One byte more than allowed shows that a stream is too long, without reading it to its end.
        data = b"" if size > limit else file.read() if regular else file.read(limit + 1)
    if max(size, len(data)) > limit:
        raise error(path, f"is larger than {limit // MIB} MiB", "name the right file")
    return data


def read_text(
    path: AnyPath, error: ErrorClass, fix: str, *, limit: int = 64 * MIB, code: str = ""
) -> str:
    """Read the text of a file or pipe, without a byte order mark. Raises `error` (fix, code) if that fails."""
    try:
        return read_input(path, error, limit=limit, pipes=True).decode("utf-8-sig")
    except UnicodeDecodeError as found:
        raise error(Path(path), "is not a text file", fix, code=code) from found
    except (OSError, ValueError) as found:  # ValueError: a name with a NUL in it
        subject = repr(str(path)) if "\0" in str(path) else Path(path)
        raise error(subject, describe_os_error(found), fix, code=code) from found


def find_calibrator(text: str) -> str:
    """The tool that wrote a calibration file, "TensorRT" or "ONNX Runtime"; "" for other text."""
    return next((tool for tool, form in _CALIBRATIONS.items() if form.match(text)), "")


def describe_os_error(error: Exception) -> str:
    """Return the system's reason, "No such file or directory", without error number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def explain_unreadable(error: OSError) -> str:
    """The cause of an error about an input that the system does not read."""
    return f"cannot be read ({describe_os_error(error)})"


def shorten_error(error: Exception) -> str:
    """Return the first line of a message, at most 200 characters; the class name for an empty message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def check_input_kind(path: AnyPath, error: ErrorClass, *, pipes: bool = False) -> None:
    """Raise `error` for a device or (unless pipes) a pipe, OutputError for an output of the running command.

    Raises OSError for a path that does not exist.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        register_input(path)
    elif stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not pipes):
        raise error(path, "is a device, not a file", "name a file")
    elif not pipes:
        raise error(
            path,
            "is a pipe, and is read more than once",
            "write it to a file first, and name that",
        )
