"""The engines that Korch is compared with.

`PEERS` lists them. "NAME:OPTION" is a peer with an option. A peer of another package is named
"package.module:OBJECT", where the object has the methods of `Peer`.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches

from korch.errors import OptionError
from korch.report.peers.artifact import ArtifactPeer
from korch.report.peers.iree import IreePeer
from korch.report.peers.onnxruntime import OnnxRuntimePeer
from korch.report.peers.openvino import OpenVinoPeer
from korch.report.peers.peer import Adjustable, Peer
from korch.report.peers.torch_eager import TorchPeer
from korch.report.peers.tvm import TvmPeer

__all__ = ["PEERS", "Peer", "get_peer"]

PEERS: dict[str, Peer] = {
    "korch": ArtifactPeer(),
    "onnxruntime": OnnxRuntimePeer(),
    "openvino": OpenVinoPeer(),
    "inductor": TorchPeer("inductor", is_compiled=True),
    "eager": TorchPeer("eager", is_compiled=False),
    "tvm": TvmPeer(),
    "iree": IreePeer(),
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
    """Return the peer called `name`, with its option if it has one, or the object "package.module:OBJECT".

    Raises:
        OptionError: there is no such peer or option, or the module can't be imported.
    """
    if name in PEERS:
        return PEERS[name]
    module, colon, attribute = name.partition(":")
    if module in PEERS:
        known = PEERS[module]
        if not isinstance(known, Adjustable):
            raise OptionError(f"{module} has no options", "peers", module)
        return known.with_option(attribute)
    if not colon:
        similar = ALIASES.get(name.lower()) or next(iter(get_close_matches(name, PEERS, 1)), "")
        raise OptionError(
            f"there is no engine {name!r}",
            "option --against",
            ", ".join(PEERS),
            f"Do you mean {similar!r}?" if similar else "",
        )
    try:
        peer: Peer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"can't load the peer {name!r} ({error})", "peers", "package.module:OBJECT") from error
    return peer
