"""`onnxq variants`: the files of a model that hubs hold."""
