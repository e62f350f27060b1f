/* Runs a segment of a plan as queues of tasks, one for each thread of a team.
 *
 * A thread runs the tasks of its queue in order. Each thread counts the tasks that it has finished, and a task may wait
 * until other threads have finished a certain number of their tasks. Threads wait as at a barrier: they spin briefly and
 * then sleep. If a run ends early, threads count their remaining tasks without running them, so that no thread waits
 * forever.
 */
#pragma once

#include "korch_plan.h"
#include "korch_wait.h"

/* `korch_threads.cpp` defines these functions if it is preloaded: they record a task that has run, or a wait for a task,
 * since a given time. */
extern "C" __attribute__((weak)) void korch_threads_task(int64_t task, int64_t step, int64_t stage, int64_t begin,
                                                         int64_t end, int64_t since_ns);
extern "C" __attribute__((weak)) void korch_threads_waited(int64_t task, int64_t since_ns);

namespace {
namespace korch_tasks {

/* Run the queue of a thread; return 1 + the number of a step that failed, or 0. `before` holds each thread's count of
 * `ended` at the begin of the segment. */
int run_queue(const korch_plan &plan, int64_t segment, int me, void *const *table, void *const *states, korch::Count *ended,
              const uint32_t *before, korch::Team &team) {
    const int64_t *const first = plan.first_tasks.rows + segment * plan.queues + me;
    const bool leads = me == 0 && team.waited;
    int failed = 0;
    for (int64_t i = first[0]; i < first[1]; ++i) {
        const plan::task &task = plan.tasks[i];
        for (int64_t w = task.first_wait; w < plan.tasks[i + 1].first_wait; ++w) {
            const plan::wait &wait = plan.waits[w];
            korch::Count &count = ended[wait.queue];
            const uint32_t wanted = before[wait.queue] + (uint32_t)wait.ended;
            if (count.is_at(wanted)) continue;
            const int64_t since_ns = leads || korch_threads_waited ? korch::now_ns() : 0;
            count.wait_for(wanted, team.look_ns);
            if (leads) team.waited(team, since_ns);
            if (korch_threads_waited)
                korch_threads_waited(first[wait.queue - me] + wait.ended - 1, since_ns);
        }
        const plan::step &own = plan.steps[task.step];
        const int64_t since_ns = korch_threads_task ? korch::now_ns() : 0;
        const int64_t begin = task.begin, end = task.end;
        if (team.ends && team.ends(team)) /* count it only */;
        else if (task.stage >= 0 && begin < end) own.tasks((int)task.stage, table + own.first_slot, begin, end, me);
        else if (task.stage < 0 && own.run(states[task.step], table + own.first_slot)) failed = (int)task.step + 1;
        if (korch_threads_task) korch_threads_task(i, task.step, task.stage, begin, end, since_ns);
        ended[me].set(ended[me].now() + 1);
    }
    return failed;
}

} // namespace korch_tasks
} // namespace
