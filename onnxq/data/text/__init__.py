"""Text as samples: tokenizers, the inputs that tokens become, and windows of a file."""

from onnxq.data.text.inputs import TextInputs, find_text_inputs
from onnxq.data.text.samples import LENGTH, find_tokenizer, make_generated_samples, make_text_samples
from onnxq.data.text.tokenizer import Tokenizer, load_tokenizer
from onnxq.data.text.windows import Window, choose_windows, read_windows

__all__ = [
    "LENGTH",
    "TextInputs",
    "Tokenizer",
    "Window",
    "choose_windows",
    "find_text_inputs",
    "find_tokenizer",
    "load_tokenizer",
    "make_generated_samples",
    "make_text_samples",
    "read_windows",
]
