"""Files of the user: outputs are checked before the work and written atomically, inputs are read with limits."""

from onnxq.files.atomic import replace_files, write_text
from onnxq.files.locks import hold_lock
from onnxq.files.outputs import (
    check_outputs,
    guard_outputs,
    is_stream,
    name_folder,
    prepare_folder,
    refuse_inputs,
    register_input,
)
from onnxq.files.reading import (
    check_input_kind,
    describe_os_error,
    find_calibrator,
    read_input,
    read_text,
    shorten_error,
)
from onnxq.files.scratch import ScratchFolder

__all__ = [
    "ScratchFolder",
    "check_input_kind",
    "check_outputs",
    "describe_os_error",
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
