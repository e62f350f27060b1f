"""Queues whose tasks wait for counters: the waits are sufficient for the order of the plan, and none is redundant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.events.check import check_queues
from korch.events.counters import as_queues, count_events
from korch.events.derive import derive_events
from korch.events.schedule import spread_orders
from tests.events.test_events import random_footprints, windows


def counted_queues(seed, queues=3):
    names, footprints = windows() if seed == 0 else random_footprints(np.random.default_rng(seed))
    graph = derive_events(names, footprints)
    times_ns = {task: 100.0 + 37 * i for i, task in enumerate(graph.tasks)}
    return graph, footprints, count_events(graph, spread_orders(graph, times_ns, queues))


@pytest.mark.parametrize("seed", range(30))
def test_counters_order_all_that_touches_the_same_bytes(seed):
    graph, footprints, counted = counted_queues(seed)
    check_queues(as_queues(counted), footprints)
    assert sorted(entry.task for queue in counted.queues for entry in queue) == list(graph.tasks)


@pytest.mark.parametrize("seed", range(15))
def test_no_wait_and_no_notification_is_too_much(seed):
    _, footprints, counted = counted_queues(seed)
    changes = 0
    for q, queue in enumerate(counted.queues):
        for i, entry in enumerate(queue):
            for event in entry.waits:
                fewer = replace(entry, waits=tuple(own for own in entry.waits if own != event))
                changed = [*counted.queues[:q], (*queue[:i], fewer, *queue[i + 1 :]), *counted.queues[q + 1 :]]
                with pytest.raises(InvalidGraphError, match="nothing orders task"):
                    check_queues(as_queues(replace(counted, queues=tuple(changed))), footprints)
                changes += 1
            for event in entry.notifies:
                fewer = replace(entry, notifies=tuple(own for own in entry.notifies if own != event))
                changed = [*counted.queues[:q], (*queue[:i], fewer, *queue[i + 1 :]), *counted.queues[q + 1 :]]
                with pytest.raises(InvalidGraphError, match=r"waits for \d+ notifications, but \d+ tasks notify it"):
                    as_queues(replace(counted, queues=tuple(changed)))
    assert changes or not counted.counts


def test_one_queue_waits_for_nothing():
    graph, footprints, counted = counted_queues(0, 1)
    assert counted.counts == () and not any(entry.waits for entry in counted.queues[0])
    check_queues(as_queues(counted), footprints)
    with pytest.raises(InvalidGraphError, match="waits forever"):
        count_events(graph, [list(graph.tasks)[::-1]])
    with pytest.raises(InvalidGraphError, match="not each task is in one queue"):
        count_events(graph, [list(graph.tasks)[1:]])


def test_free_queues_take_the_tasks_that_can_begin():
    graph, _, _ = counted_queues(0)
    orders = spread_orders(graph, dict.fromkeys(graph.tasks, 1000.0), 2)
    assert orders[0][:2] == [(0, 0), (0, 2)] and orders[1][:2] == [(0, 1), (0, 3)]
    assert all(order == sorted(order) for order in orders)
