"""Variants of task queues, each with one wait removed or with a lower count."""

from collections.abc import Iterator, Sequence

from korch.events.queues import QueuedTask

Queues = Sequence[tuple[QueuedTask, ...]]


def with_fewer_waits(queues: Queues) -> Iterator[tuple[QueuedTask, Queues]]:
    """Yield each task that waits, and the queues in which one of its waits is left out or is for one task less."""
    for q, queue in enumerate(queues):
        for i, entry in enumerate(queue):
            for w, (other, n) in enumerate(entry.waits):
                for fewer in ((other, n - 1),), ():
                    waits = (*entry.waits[:w], *(wait for wait in fewer if wait[1]), *entry.waits[w + 1 :])
                    changed = (*queue[:i], QueuedTask(entry.task, waits), *queue[i + 1 :])
                    yield entry, (*queues[:q], changed, *queues[q + 1 :])
