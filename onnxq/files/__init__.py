"""Files of the user: outputs are checked before the work and written atomically, inputs are read with limits."""

from onnxq.files.access import (
    AnyPath,
    check_input_kind,
    check_outputs,
    describe_os_error,
    explain_unreadable,
    find_calibrator,
    guard_outputs,
    is_stream,
    name_folder,
    prepare_folder,
    read_input,
    read_text,
    refuse_inputs,
    register_input,
    replace_files,
    shorten_error,
    write_text,
)
from onnxq.files.scratch import ScratchFolder, hold_lock

__all__ = [
    "AnyPath",
    "ScratchFolder",
    "check_input_kind",
    "check_outputs",
    "describe_os_error",
    "explain_unreadable",
    "find_calibrator",
    "guard_outputs",
    "hold_lock",
    "is_stream",
    "name_folder",
    "prepare_folder",
    "read_input",
    "read_text",
    "refuse_inputs",
    "register_input",
    "replace_files",
    "shorten_error",
    "write_text",
]
