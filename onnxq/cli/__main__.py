"""`python -m onnxq.cli` is `onnxq`."""

from onnxq.cli.commands import main

if __name__ == "__main__":
    main()
