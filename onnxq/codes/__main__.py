"""`python -m onnxq.codes` prints docs/errors.md."""

import sys

from onnxq.codes import catalogue_page

if __name__ == "__main__":
    sys.stdout.write(catalogue_page())
