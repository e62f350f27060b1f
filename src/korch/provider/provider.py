"""The interface of a provider: something that turns a candidate into a kernel.

To add one, write a class with the members of `Provider` and register it under the entry-point
group `korch.providers`; `docs/add-a-provider.md` has a complete example. Plans are chosen by layouts
and measured costs alone. The identity of a kernel's provider only affects the estimates that decide
which kernels are measured first.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from korch.candidate.candidate import Group, Offer, Refusal
from korch.errors import ProviderError
from korch.ranges.live import Count
from korch.system.content_name import content_name
from korch.tile.ir.program import TileProgram

logger = logging.getLogger("korch.provider")
ENTRY_POINT_GROUP = "korch.providers"
"""The entry-point group of providers for the CPU."""

CUDA_ENTRY_POINT_GROUP = "korch.cuda_providers"
"""The entry-point group of providers for CUDA devices."""

SPLIT = "bf16x3"
"""The variant of an offer that multiplies float32 numbers on matrix units, each split into three bfloat16."""

TILES = "tiles"
"""The variant of an offer that multiplies bytes on matrix units."""


class Threading(Enum):
    """Which threads a kernel runs on."""

    CALLER = "caller"
    """The calling thread only."""

    TEAM = "team"
    """Threads that the caller has already started; each of them calls NAME_team."""

    OWN = "own"
    """The kernel's own threads: those of a library, or of regions that the kernel opens."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Source code that runs a candidate.

    The source is LLVM IR that defines, for its symbol NAME:

        void* NAME_create(int threads, char* error, size_t error_size);  // only with has_state
        int NAME_run(void* state, void* const* buffers);                 // 0 is success
        void NAME_destroy(void* state);                                  // only with has_state
        int NAME_team(void* const* buffers, korch_member* own);          // only with threading TEAM
        void NAME_task(int stage, void* const* buffers, long begin, long end, long me);  // see below

    `buffers` holds the inputs, then the outputs, in the offer's layouts, then the workspace;
    outputs do not overlap any other buffer. The model's inputs and outputs are the caller's memory,
    aligned to their element's size, and so are the parts of a model output that is a concatenation in
    place; all other buffers are aligned to 64 bytes. Each call of `run` may pass different buffers. A
    kernel may run concurrently with others: if its target has one thread, it uses the calling thread only;
    if several, its regions may get fewer threads than it requests. `create` returns null and writes a
    message if it fails. A kernel without state gets a null state. Many kernels are compiled in one
    unit, so every other name in the source is private or begins with NAME. With threading `TEAM`,
    every thread of the team calls NAME_team (`korch_runtime.h`); a team may have fewer or more threads than the
    target. If the kernel also has a program, NAME_task runs a range of the tasks of one stage of the program on
    the thread `me`; each thread has a private part of the workspace, which follows the program's buffers.

    Attributes:
        symbol: the name, unique to the kernel's content; empty if nothing runs.
        source: the text.
        has_state: whether `create` and `destroy` exist.
        workspace_bytes: scratch memory that `run` needs.
        opens: names of shared libraries that it opens itself when its state is created.
        threading: which threads it runs on. A kernel with a state is treated as `OWN`.
        program: the tile program, which says what memory each task accesses; None if unknown.
        size_input: the input of the model (64-bit integers) that is passed as the last buffer, after the workspace;
            "" for none. A kernel whose loops end at sizes reads them from it.
        thread_bytes: the size of each thread's private part of the workspace, if the workspace consists of such
            parts, stored one after another; else 0.
        units: the sources of further units that this kernel calls, and that other kernels may call as well.
        counts: how parameters of the program follow from that size.
    """

    symbol: str
    source: str
    has_state: bool = False
    workspace_bytes: int = 0
    threading: Threading = Threading.OWN
    program: TileProgram | None = field(default=None, compare=False, repr=False)
    size_input: str = ""
    opens: tuple[str, ...] = ()
    thread_bytes: int = 0
    units: tuple[str, ...] = ()
    counts: tuple[tuple[str, Count], ...] = field(default=(), compare=False, repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """Its source and its units: all that is compiled for it."""
        return self.source, *self.units


def named_kernel(
    text: str,
    *,
    has_state: bool = False,
    workspace_bytes: int = 0,
    opens: tuple[str, ...] = (),
    threading: Threading = Threading.OWN,
) -> Kernel:
    """Return the kernel of a source in which NAME stands for the symbol; the symbol is a hash of the source."""
    symbol = content_name("k", text)
    source = text.replace("NAME", symbol)
    return Kernel(symbol, source, has_state, workspace_bytes, threading, opens=opens)


T_contra = TypeVar("T_contra", contravariant=True)
K_co = TypeVar("K_co", covariant=True)


class Provider(Protocol[T_contra, K_co]):
    """Makes kernels for one kind of target."""

    name: str
    """A short name, unique among providers; it is part of a measurement's key."""

    version: str
    """Changes whenever its kernels may run differently: it is part of a measurement's key."""

    # A provider may also list the kinds of groups that it wants to be asked about, as `group_shapes`: see
    # `korch.candidate.shape`. A provider without this list is asked about groups of the `COMMON` kinds.
    # It may describe the kernel of an offer, as `describe(group, offer)`, and a whole search, as `report()`; both
    # return lines of text for `korch explain`.
    # A provider with `runs_opaque = True` runs operators that have no fission rule. Operators that it refuses run on
    # the host, and the reason of its refusal is reported.

    def offer(self, group: Group, target: T_contra) -> Sequence[Offer] | Refusal:
        """Return the ways in which the provider can run a group, or the reason why it can't.

        This must be fast and must not compile anything: it is called for every group of a model. The
        answer may depend only on the group's body and on the target, not on ids in the model.
        """
        ...

    def build(self, group: Group, offer: Offer, target: T_contra) -> K_co | Refusal:
        """Return the kernel for one of the provider's offers; a refusal here excludes the candidate."""
        ...


class Facts(Protocol):
    """A store for what a provider found, such as the database."""

    def fact(self, name: str) -> str | None:
        """Return the text that is stored under a name, or None."""

    def put_fact(self, name: str, value: str) -> None:
        """Store a text under a name."""


AnyProvider = Provider[Any, Any]
"""A provider for any kind of target."""

_registered: dict[str, list[Callable[[], AnyProvider]]] = {}


def register_provider(provider: Callable[[], AnyProvider], entry_point_group: str = ENTRY_POINT_GROUP) -> None:
    """Let this process use a provider that no installed package registers.

    Args:
        provider: the class, or another function that returns an instance.
        entry_point_group: the kind of target; `CUDA_ENTRY_POINT_GROUP` for CUDA devices.

    Raises:
        ImportError: a library that the provider needs is missing.
        ProviderError: the provider can't be instantiated, or lacks a required member.
    """
    _made(f"provider {provider!r}", provider)
    known = _registered.setdefault(entry_point_group, [])
    if provider not in known:
        known.append(provider)


def load_providers(entry_point_group: str = ENTRY_POINT_GROUP) -> tuple[AnyProvider, ...]:
    """Return one instance of every registered provider, sorted by name.

    A provider whose library is missing raises `ImportError` itself; it is then left out, and
    `korch doctor` reports it.

    Raises:
        ProviderError: a provider can't be loaded, or two providers have the same name.
    """
    found: dict[str, AnyProvider] = {}
    # Two distributions may register the same class.
    installed = {(e.name, e.value): e for e in entry_points(group=entry_point_group)}
    makers: list[tuple[str, Callable[[], AnyProvider]]]
    makers = [(f"provider {e.name!r} ({e.value})", partial(_instance, e)) for _, e in sorted(installed.items())]
    makers += [(f"provider {each!r}", each) for each in _registered.get(entry_point_group, ())]
    for where, make in makers:
        try:
            provider = _made(where, make)
        except ImportError as error:
            logger.info("%s is disabled: %s", where, error)
            continue
        if provider.name in found:
            raise ProviderError("two providers have this name", where=f"provider {provider.name!r}")
        found[provider.name] = provider
    return tuple(found[name] for name in sorted(found))


def _made(where: str, make: Callable[[], AnyProvider]) -> AnyProvider:
    """Instantiate a provider and check that it has all required members.

    Raises:
        ImportError: its library is missing.
        ProviderError: it can't be instantiated, or lacks a required member.
    """
    try:
        provider = make()
    except ImportError:
        raise
    except Exception as error:
        raise ProviderError(
            f"it can't be loaded: {error}", where=where, hint="Uninstall the package that registers it, or fix it"
        ) from error
    for member in ("name", "version", "offer", "build"):
        if not hasattr(provider, member):
            raise ProviderError(
                f"it has no member {member!r}", where=where, expected="the members of korch.provider.provider.Provider"
            )
    return provider


def _instance(entry: EntryPoint) -> AnyProvider:
    provider: AnyProvider = entry.load()()
    return provider
