"""The suites by the tool whose they are."""

from tests.fuzz.peers import modelopt, nncf, ort_graphs, ort_operators
from tests.fuzz.peers.build import Peer

SUITES: dict[str, dict[str, Peer]] = {
    "ONNX Runtime": {**ort_operators.PEERS, **ort_graphs.PEERS},
    "ModelOpt": modelopt.PEERS,
    "NNCF": nncf.PEERS,
}
