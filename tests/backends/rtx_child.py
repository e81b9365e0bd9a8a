"""Builds models with TensorRT-RTX and prints the kernels of each: `rtx_child.py SM MODEL…`; see rtx.py.

It imports nothing of ours, which would take longer than a build.
"""

import json
import sys

import tensorrt_rtx as trt


def _print_layers(path: str, sm: str) -> int:
    said: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, _severity: object, message: str) -> None:
            said.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(path):
        print([parser.get_error(k).desc() for k in range(parser.num_errors)])
        return 1
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    profile = builder.create_optimization_profile()
    for k in range(network.num_inputs):
        given = network.get_input(k)
        shapes = [[size if dim < 0 else dim for dim in given.shape] for size in (1, 4, 8)]
        profile.set_shape(given.name, *shapes)
    config.add_optimization_profile(profile)
    if builder.build_serialized_network(network, config) is None:
        print(said[-5:])
        return 1
    print(json.dumps(next(text for text in reversed(said) if text.startswith("Layers:"))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(next((1 for path in sys.argv[2:] if _print_layers(path, sys.argv[1])), 0))
