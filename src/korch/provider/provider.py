"""The interface of a provider: something that turns a candidate into a kernel.

To add one, write a class with the members of `Provider` and register it under the entry-point
group `korch.providers`; `docs/add-a-provider.md` shows the whole of it. Plans are chosen by layouts
and measured costs alone. Which provider makes a kernel counts only for the estimates that say what
is measured first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from korch.candidate.candidate import Group, Offer, Refusal
from korch.content_name import content_name
from korch.errors import KorchError, ProviderError
from korch.tile.program import TileProgram
from korch.tile.trim import Count

logger = logging.getLogger("korch.provider")
ENTRY_POINT_GROUP = "korch.providers"
"""Providers for the CPU."""

CUDA_ENTRY_POINT_GROUP = "korch.cuda_providers"
"""Those for CUDA devices."""

SPLIT = "bf16x3"
"""The variant of an offer whose matrix units multiply float32 numbers as three bfloat16 each."""

TILES = "tiles"
"""The variant of an offer whose matrix units multiply bytes."""


class Threading(Enum):
    """Which threads a kernel runs on."""

    CALLER = "caller"
    """The calling thread only."""

    TEAM = "team"
    """Threads that are there already, each of which calls NAME_team."""

    OWN = "own"
    """Others: a library's, or those of regions that it opens."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Source code that runs a candidate.

    The source is a C++20 translation unit that exports, with C linkage, for its symbol NAME:

        void* NAME_create(int threads, char* error, size_t error_size);  // only with has_state
        int NAME_run(void* state, void* const* buffers);                 // 0 is success
        void NAME_destroy(void* state);                                  // only with has_state
        int NAME_team(void* const* buffers, korch::Member& own);         // only with threading TEAM
        void NAME_task(int stage, void* const* buffers, long begin, long end, long me);  // see below

    `buffers` holds the inputs, then the outputs, in the offer's layouts, then the workspace;
    outputs overlap nothing. The model's inputs and outputs are the caller's memory, aligned to
    their element's size, and so are the parts of a model output that is a concatenation in place;
    all other buffers are aligned to 64 bytes. `run` may be called with other buffers each time. A
    kernel may run beside others: if its target has one thread, it uses the calling thread only; if
    several, its regions may get fewer than it asks for. `create` returns null and writes a message
    if it fails. A kernel without state gets a null state. Kernels are compiled many to a unit, so
    every other name in the source is static or begins with NAME. With threading `TEAM`, each of some threads,
    which may be fewer or more than those of the target, calls NAME_team (`korch_team.h`). With a program, too,
    NAME_task runs the tasks of a range of a stage of the program on the thread `me`, which has a part of the
    workspace for itself behind the program's buffers.

    Attributes:
        symbol: the name, unique to the kernel's content; empty if nothing runs.
        source: the text.
        has_state: whether `create` and `destroy` exist.
        workspace_bytes: scratch memory that `run` needs.
        libraries: shared libraries that it calls, as the compiler's -l names them.
        opens: names of shared libraries that it opens itself when its state is created.
        threading: which threads it runs on. With a state or a library it counts as `OWN`.
        program: what its tasks touch, if that is known.
        size_input: the input of the model, integers of 64 bits, that is a last buffer behind the workspace; "" for
            none. It says for which size of a range a trimmed kernel runs.
        thread_bytes: the part of the workspace that each thread has for itself, if the workspace is made of such parts,
            one thread's behind the other's; else 0.
        shared: the source of a unit that it calls, as kernels for other sizes do, too; "" for none.
        marked: the text from which such a unit may be made (`korch.tile.cpp.numbers`); "" for none.
        counts: how parameters of the program follow from that size.
    """

    symbol: str
    source: str
    has_state: bool = False
    workspace_bytes: int = 0
    libraries: tuple[str, ...] = ()
    threading: Threading = Threading.OWN
    program: TileProgram | None = field(default=None, compare=False, repr=False)
    size_input: str = ""
    opens: tuple[str, ...] = ()
    thread_bytes: int = 0
    shared: str = ""
    marked: str = field(default="", compare=False, repr=False)
    counts: tuple[tuple[str, Count], ...] = field(default=(), compare=False, repr=False)


def named_kernel(
    text: str,
    *,
    has_state: bool = False,
    workspace_bytes: int = 0,
    libraries: tuple[str, ...] = (),
    opens: tuple[str, ...] = (),
    threading: Threading = Threading.OWN,
) -> Kernel:
    """Return the kernel of a source in which NAME stands for the symbol, made from the content."""
    symbol = content_name("k", text)
    source = text.replace("NAME", symbol)
    return Kernel(symbol, source, has_state, workspace_bytes, libraries, threading, opens=opens)


T_contra = TypeVar("T_contra", contravariant=True)
K_co = TypeVar("K_co", covariant=True)


class Provider(Protocol[T_contra, K_co]):
    """Makes kernels for a kind of targets."""

    name: str
    """A short name, unique among providers; it is part of a measurement's key."""

    version: str
    """Changes whenever its kernels may run differently: it is part of a measurement's key."""

    # A provider may also list the kinds of groups that it asks for, as `group_shapes`: see
    # `korch.candidate.shape`. One without the list is offered the `COMMON` ones.
    # One with `runs_opaque = True` runs operators that have no fission rule: the host is given those that it refuses,
    # with its reason.

    def offer(self, group: Group, target: T_contra) -> Sequence[Offer] | Refusal:
        """Return how it would run a group, or why it does not.

        It must be quick and must not compile: it is asked for every group of a model. The answer
        may depend on the group's body and on the target only, not on ids in the model.
        """
        ...

    def build(self, group: Group, offer: Offer, target: T_contra) -> K_co | Refusal:
        """Return the kernel for one of its offers; a refusal here excludes the candidate."""
        ...


AnyProvider = Provider[Any, Any]
"""A provider for some kind of targets."""

_registered: dict[str, list[Callable[[], AnyProvider]]] = {}


def register_provider(provider: Callable[[], AnyProvider], entry_point_group: str = ENTRY_POINT_GROUP) -> None:
    """Let this process use a provider that no installed package registers.

    Args:
        provider: the class, or another function that returns an instance.
        entry_point_group: the kind of target; `CUDA_ENTRY_POINT_GROUP` for CUDA devices.

    Raises:
        ImportError: a library that the provider needs is missing.
        ProviderError: the provider can't be made, or has not all members.
    """
    _made(f"provider {provider!r}", provider)
    known = _registered.setdefault(entry_point_group, [])
    if provider not in known:
        known.append(provider)


def load_providers(entry_point_group: str = ENTRY_POINT_GROUP) -> tuple[AnyProvider, ...]:
    """Return one instance of every registered provider, in the order of their names.

    A provider whose library is missing raises `ImportError`; it is disabled, and `korch doctor`
    says so.

    Raises:
        ProviderError: a provider can't be loaded, or two have one name.
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


@contextmanager
def faults_named(provider: AnyProvider, group: Group) -> Iterator[None]:
    """Report what a provider raises for a group as its error.

    Raises:
        ProviderError: the provider raised something other than a `KorchError`.
    """
    try:
        yield
    except KorchError:
        raise
    except Exception as error:
        operations = ", ".join(primitive.op for primitive in group.body.primitives) or "a change of layout"
        types = ", ".join(map(str, group.input_types))
        raise ProviderError(
            f"it raised {type(error).__name__} ({error}) for the group of {operations} on {types or 'no input'}",
            where=f"provider {provider.name!r}",
            expected="offers or a Refusal from `offer`, a kernel or a Refusal from `build`",
            hint="Uninstall the package that registers it, or fix it",
        ) from error


def _made(where: str, make: Callable[[], AnyProvider]) -> AnyProvider:
    """Return a provider.

    Raises:
        ImportError: its library is missing.
        ProviderError: it can't be made, or has not all members.
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
