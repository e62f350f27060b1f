/* Runs a segment of a plan as queues of tasks, one for each thread of a parallel region.
 *
 * A thread runs the tasks of its queue in order. Each thread counts the tasks that it has ended, and a task
 * may wait until other threads have ended some number of theirs. Threads wait as at barriers: they spin
 * briefly and sleep.
 */
#pragma GCC visibility push(hidden)

namespace korch_tasks {

/* What the threads of a segment share. */
struct run {
    void *const *table;
    void *const *states;
    korch_teams::Count *ended;     /* of each thread */
    const uint32_t *before;        /* its value when the segment begins */
    korch_teams::Oversubscription *oversubscription;
    int64_t segment;
    int64_t look_ns;
    int failed = 0;                /* atomic: the step after one that failed */

    void step(int64_t i) {
        const plan::step &own = plan::STEPS[i];
        if (own.run && own.run(states[i], table + own.first_slot))
            __atomic_store_n(&failed, (int)i + 1, __ATOMIC_RELAXED);
    }

    void wait(const plan::wait &wait, bool leads) {
        korch_teams::Count &count = ended[wait.queue];
        const uint32_t wanted = before[wait.queue] + wait.ended;
        if ((int32_t)(count.now() - wanted) >= 0) return;
        const int64_t since_ns = leads && oversubscription ? korch_teams::now_ns() : 0;
        count.wait_for(wanted, look_ns);
        if (since_ns) oversubscription->note_wait(since_ns, korch_teams::now_ns(), plan::QUEUES);
    }

    /* Run the queue of a thread. */
    void queue(int me) {
        const int64_t *const first = plan::FIRST_TASKS + segment * plan::QUEUES + me;
        for (int64_t i = first[0]; i < first[1]; ++i) {
            const plan::task &task = plan::TASKS[i];
            for (int64_t w = task.first_wait; w < plan::TASKS[i + 1].first_wait; ++w) wait(plan::WAITS[w], me == 0);
            const plan::step &own = plan::STEPS[task.step];
            if (task.stage < 0) step(task.step);
            else own.tasks(task.stage, table + own.first_slot, task.begin, task.end, me);
            ended[me].advance();
        }
    }

    /* Run all steps one after another, as where there is one thread. */
    void steps() {
        for (int64_t i = plan::SEGMENTS[segment].begin; i < plan::SEGMENTS[segment].end && !failed; ++i) step(i);
    }
};

/* Run a segment; return the step after one that failed, or 0. */
inline int run_segment(int64_t segment, void *const *table, void *const *states, korch_teams::Count *ended,
                       korch_teams::Oversubscription *oversubscription) {
    uint32_t before[plan::QUEUES];
    for (int t = 0; t < plan::QUEUES; ++t) before[t] = ended[t].now();
    const int64_t look_ns = korch_teams::cores >= plan::QUEUES ? korch_teams::LOOK_NS : korch_teams::SHORT_LOOK_NS;
    run own{table, states, ended, before, oversubscription, segment, look_ns};
#pragma omp parallel num_threads(plan::QUEUES)
    {
        const int me = omp_get_thread_num();
        if (omp_get_num_threads() == plan::QUEUES) own.queue(me);
        else if (me == 0) own.steps();
    }
    return own.failed;
}

} // namespace korch_tasks

#pragma GCC visibility pop
