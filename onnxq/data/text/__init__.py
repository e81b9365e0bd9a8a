"""Text as samples: tokenizers, the inputs that tokens become, and windows of a file."""

from onnxq.data.text.generate import find_text_inputs
from onnxq.data.text.samples import (
    LENGTH,
    Window,
    choose_windows,
    find_tokenizer,
    load_tokenizer,
    make_generated_samples,
    make_text_samples,
    read_windows,
)

__all__ = [
    "LENGTH",
    "Window",
    "choose_windows",
    "find_text_inputs",
    "find_tokenizer",
    "load_tokenizer",
    "make_generated_samples",
    "make_text_samples",
    "read_windows",
]
