"""A first plan at once, and a better one later: the search goes on in a thread while the first plan is in use.

The first plan is chosen by estimates, built, and compared with the model. The plan that the search finds is compared
in the same way, and replaces it between two calls if it is faster: calls that run keep the executable that they began
with. One search runs at a time, because kernels are timed. It ends with its budget, as soon as what it is for is no
longer used, or when the interpreter exits.
"""

import atexit
import logging
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from korch.options import Options
from korch.primitive.op import Array
from korch.report.progress import Progress, Update
from korch.runtime.runnable import PlanExecutable, Runnable, random_feeds
from korch.system.deadline import Deadline

FIRST_SECONDS = 3.0
"""The seconds after which rewrites and candidates of a first plan end; to solve, build and check it takes more."""

END_SECONDS = 5.0
"""How long the end of the interpreter waits for a search that is stopped."""

ROUNDS = 5
"""How often two plans are timed in turn."""

logger = logging.getLogger("korch.background")

T = TypeVar("T")

Make = Callable[[Options, Progress, Deadline], T]
"""Returns the result of a search with these options, until the deadline."""

_TURN = threading.Lock()


class _AbandonedError(BaseException):
    """A search is no longer wanted; no handler of errors within a search may catch this."""


class BackgroundSearch:
    """A search in a thread.

    Attributes:
        error: why it failed; None if it did not.
    """

    def __init__(self, owner: object, search: Callable[[Progress, Deadline], None], budget_s: float | None) -> None:
        """Start the thread.

        Args:
            owner: the search is abandoned when this is no longer used; `search` must not refer to it strongly.
            search: searches until a deadline, and uses what it finds.
            budget_s: its budget in seconds, which begins when earlier searches have ended; None for no limit.
        """
        self.error: Exception | None = None
        self._owner, self._search, self._budget_s = weakref.ref(owner), search, budget_s
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run, name="korch-search", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the search has ended, at most some seconds; return whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Abandon the search; what is served now stays."""
        self._told.set()
        self.wait(END_SECONDS)

    def _run(self) -> None:
        try:
            with _TURN:
                self._tell(Update("background"))
                at_s = None if self._budget_s is None else time.monotonic() + self._budget_s
                self._search(self._tell, Deadline(at_s, self._told))
        except _AbandonedError:
            logger.info("the search in the background is abandoned")
        except Exception as error:  # noqa: BLE001 - it must not be lost in the thread
            self.error = error
            if threading.main_thread().is_alive():  # else the interpreter exits, and refuses new threads
                text = " ".join(str(error).split()) or type(error).__name__
                logger.warning("the search in the background has failed, so the first plan stays: %s", text)
        finally:
            atexit.unregister(self.stop)

    def _tell(self, update: Update) -> None:
        """Go on with the search if it is still wanted."""
        if self._told.is_set() or self._owner() is None or not threading.main_thread().is_alive():
            raise _AbandonedError


def has_background(options: Options) -> bool:
    """Return whether a search with these options finds more than its first plan does."""
    is_longer = options.budget_s is None or options.budget_s > FIRST_SECONDS
    return is_longer and options.measure and not options.is_cuda and options.replay is None


def first_plan(make: Make[T], options: Options, progress: Progress) -> T:
    """Return what a search finds without measuring kernels."""
    ablation = replace(options.ablation, baselines=False)
    own = replace(options, budget_s=None, superopt_s=None, schedule="joins", ledger=None, ablation=ablation)
    return make(own, progress, Deadline.after(FIRST_SECONDS, time.monotonic()))


def is_faster(new: Runnable, old: Runnable) -> bool:
    """Return whether a plan is faster than another one, in turn with it; of several plans, the searched are."""
    if not (isinstance(new, PlanExecutable) and isinstance(old, PlanExecutable)):
        return True
    arrays = list(random_feeds(old.get_inputs()).values())
    watches = [one.stopwatch(arrays) for one in (new, old)]
    times_ns = [[watch() for watch in watches] for _ in range(ROUNDS)]
    new_ns, old_ns = (float(statistics.median(row[i] for row in times_ns)) for i in range(2))
    return new_ns < old_ns


def search_on(owner: object, member: str, make: Make[Any], options: Options) -> BackgroundSearch:
    """Begin to search an executable that replaces a member of its owner if it is faster."""
    own = weakref.ref(owner)

    def search(tell: Progress, deadline: Deadline) -> None:
        found = make(options, tell, deadline)
        if (there := own()) is not None and is_faster(found, getattr(there, member)):
            setattr(there, member, found)

    return BackgroundSearch(owner, search, options.budget_s)


class BackgroundExecutable:
    """A model whose plan is replaced by a better one while it is in use. It may be called from several threads.

    All other members are those of the executable that is served, a `Runnable`.

    Attributes:
        served: the executable that the next call runs.
        background: the search for a better one.
    """

    def __init__(self, make: Make[Runnable], options: Options, progress: Progress) -> None:
        """Search a first plan, and begin to search a better one.

        Raises:
            KorchError: the model, an option or the machine is not suitable.
        """
        self.served = first_plan(make, options, progress)
        self.background = search_on(self, "served", make, options)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the search has ended, at most some seconds; return whether it has."""
        return self.background.wait(seconds)

    def __call__(self, *arrays: Any, **named: Any) -> tuple[Array, ...]:
        """Run the plan that is served; see `Runnable.__call__`."""
        return self.served(*arrays, **named)

    def __getattr__(self, name: str) -> Any:
        if name == "served":  # it is not there yet
            raise AttributeError(name)
        found = getattr(self.served, name)
        return partial(self._call, name) if callable(found) else found

    def _call(self, name: str, /, *args: Any, **named: Any) -> Any:
        """Call a method of what is served now. A method that is kept keeps this object, and so its search."""
        return getattr(self.served, name)(*args, **named)

    def __repr__(self) -> str:
        return repr(self.served)

    def __reduce__(self) -> tuple[Callable[[Any], Runnable], tuple[Any], dict[str, Any]]:
        """Pickle and copy what is served."""
        return self.served.__reduce__()


Runnable.register(BackgroundExecutable)
