"""Files of the user: outputs are checked before the work and written atomically, inputs are read with limits."""

from onnxq.files.atomic import replacing, write_text
from onnxq.files.locks import hold_lock
from onnxq.files.names import readable
from onnxq.files.outputs import check_free, guarding, is_stream, note_input, refuse_inputs, saving_into
from onnxq.files.reading import check_regular, first_line_of, read_input, read_text, reason_of
from onnxq.files.scratch import ScratchFolder

__all__ = [
    "ScratchFolder",
    "check_free",
    "check_regular",
    "first_line_of",
    "guarding",
    "hold_lock",
    "is_stream",
    "note_input",
    "read_input",
    "read_text",
    "readable",
    "reason_of",
    "refuse_inputs",
    "replacing",
    "saving_into",
    "write_text",
]
