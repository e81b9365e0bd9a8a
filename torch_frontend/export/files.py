"""Write the files of one export: all of them, or none."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import onnx

from onnxq.errors import OutputError
from onnxq.files import ScratchFolder, check_outputs, is_stream, write_text
from onnxq.graph import save_model


def write_all(models: dict[Path, onnx.ModelProto], texts: dict[Path, str], *, overwrite: bool) -> tuple[Path, ...]:
    """Write everything into folders beside the targets, then move it into place; return the files, data files too.

    Raises OutputError if a file is in the way, cannot be written, or does not fit on the disk; no file is left then.
    """
    # Before anything is computed or written; again below, with the data files.
    check_outputs("", *models, *texts, force=overwrite)
    # A pipe or device can take one file, not three.
    for path in filter(is_stream, (*models, *texts)):
        raise OutputError(str(path), "is a pipe or device, and an export is several files", "name a file", code="Q603")
    staged: dict[Path, Path] = {}
    try:
        with ExitStack() as folders:
            for path, content in {**models, **texts}.items():
                # Beside the target: on one disk os.replace moves a file in one step.
                folder = folders.enter_context(ScratchFolder(path.parent))
                if isinstance(content, str):
                    write_text(folder / path.name, content)
                else:
                    save_model(content, folder / path.name)
                staged |= {file: path.with_name(file.name) for file in folder.iterdir()}
            check_outputs("", *staged.values(), force=overwrite)
            # Data before models: a model must never be there without the data that it refers to.
            for file in sorted(staged, key=lambda file: not file.name.endswith(".data")):
                os.replace(file, staged[file])
    except OSError as error:
        subject = str(next(iter(models), ""))
        raise OutputError(
            subject, error.strerror or str(error), "free space or choose another folder", code="Q604"
        ) from error
    return tuple(staged.values())
