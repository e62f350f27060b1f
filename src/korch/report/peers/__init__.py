"""The engines that Korch is compared with.

`PEERS` lists them. A peer of another package is named "package.module:OBJECT", where the object has the methods
of `Peer`. "eager:package.module:OBJECT" and "inductor:..." run a PyTorch module.
"""

from difflib import get_close_matches

from korch.errors import OptionError
from korch.report.peers.artifact import ArtifactPeer
from korch.report.peers.onnxruntime import OnnxRuntimePeer
from korch.report.peers.openvino import OpenVinoPeer
from korch.report.peers.peer import Peer, import_object
from korch.report.peers.pytorch import TorchPeer

__all__ = ["PEERS", "Peer", "get_peer"]

PEERS: dict[str, Peer] = {
    "korch": ArtifactPeer(),
    "onnxruntime": OnnxRuntimePeer(),
    "openvino": OpenVinoPeer(),
    "inductor": TorchPeer("inductor", is_compiled=True),
    "eager": TorchPeer("eager", is_compiled=False),
}
"""The peers by their names on the command line."""


ALIASES = {
    "ort": "onnxruntime",
    "ov": "openvino",
    "torch": "eager",
    "pytorch": "eager",
    "compile": "inductor",
    "torch.compile": "inductor",
}
"""Other names of peers, for the hint of an error."""


def get_peer(name: str) -> Peer:
    """Return the peer called `name`, with its PyTorch module if it runs one, or the object "package.module:OBJECT".

    Raises:
        OptionError: there is no such peer, or the module can't be imported.
    """
    if name in PEERS:
        return PEERS[name]
    engine, colon, rest = name.partition(":")
    if engine in PEERS:
        known = PEERS[engine]
        if not isinstance(known, TorchPeer):
            raise OptionError(f"{engine} has no options", "peers", engine)
        return known.with_module(rest)
    if not colon:
        similar = ALIASES.get(name.lower()) or next(iter(get_close_matches(name, PEERS, 1)), "")
        raise OptionError(
            f"there is no engine {name!r}",
            "option --against",
            ", ".join((*PEERS, "package.module:OBJECT")),
            f"Do you mean {similar!r}?" if similar else "",
        )
    peer: Peer = import_object(name)
    return peer
