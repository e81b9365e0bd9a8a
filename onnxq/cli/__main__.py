"""`python -m onnxq.cli` is `onnxq`."""

from onnxq.cli.app import main

if __name__ == "__main__":
    main()
