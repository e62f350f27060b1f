"""The engines that Korch is compared with.

`PEERS` is the one list. A peer of one's own is named "package.module:OBJECT", where the object has
the methods of `Peer`.
"""

from __future__ import annotations

import importlib

from korch.errors import OptionError
from korch.report.peers.artifact import ArtifactPeer
from korch.report.peers.onnxruntime import OnnxRuntimePeer
from korch.report.peers.openvino import OpenVinoPeer
from korch.report.peers.peer import Peer
from korch.report.peers.torch_eager import TorchPeer

__all__ = ["PEERS", "Peer", "get_peer"]

_PEERS: tuple[Peer, ...] = (
    ArtifactPeer(),
    OnnxRuntimePeer(),
    OpenVinoPeer(),
    TorchPeer("inductor", is_compiled=True),
    TorchPeer("eager", is_compiled=False),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _PEERS}


def get_peer(name: str) -> Peer:
    """Return the peer called `name`, or the object that "package.module:OBJECT" names.

    Raises:
        OptionError: there is no such peer, or the module can't be imported.
    """
    if name in PEERS:
        return PEERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise OptionError(f"there is no peer {name!r}", "peers", ", ".join(PEERS))
    try:
        peer: Peer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"can't load the peer {name!r} ({error})", "peers", "package.module:OBJECT"
        ) from error
    return peer
