"""`python -m onnxq` is `onnxq`."""

from onnxq.cli import main

if __name__ == "__main__":
    main()
