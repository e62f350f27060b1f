/* Detects whether other processes use the cores of a plan's threads. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Whether other processes use the cores so much that one thread is faster than all: some thread then has no core most of the
 * time, and the others wait for it. Used only by the thread that calls a plan (the first of its team). */
typedef struct {
    bool is_here, was_here; /* was_here: at any time of the run */
    int64_t begun_ns, waited_ns, alone_until_ns;
    int64_t work_ns;  /* the first thread's time without waits in a run on all threads; 0 if unknown */
    int64_t alone_ns; /* how long to run alone: grows with each oversubscription, shrinks with each run without one */
} oversubscription;

static const int64_t LEAST_NS = 1000000, MOST_NS = 300000000;

static void begin_oversubscription(oversubscription *own, int64_t now_ns) {
    own->begun_ns = now_ns;
    own->waited_ns = 0;
    own->is_here = own->was_here = now_ns < own->alone_until_ns;
}

/* Whether only the first thread should run kernels. */
static bool is_oversubscribed(oversubscription *own, int64_t (*clock_ns)(void)) {
    if (own && own->is_here) own->is_here = clock_ns() < own->alone_until_ns;
    return own && own->is_here;
}

/* Count that the first of `threads` threads has waited for the others. */
static void add_wait(oversubscription *own, int64_t wait_ns, int64_t now_ns, int64_t threads) {
    own->waited_ns += wait_ns;
    /* In the first run the amount of work is unknown. */
    if (own->is_here || own->work_ns == 0 || own->waited_ns < LEAST_NS) return;
    const int64_t so_far_ns = now_ns - own->begun_ns - own->waited_ns;
    const int64_t work_ns = so_far_ns > own->work_ns ? so_far_ns : own->work_ns;
    /* On one thread, the time without waits is `threads` times as long. */
    if (own->waited_ns <= work_ns * (threads - 1)) return;
    own->is_here = own->was_here = true;
    own->alone_ns = 2 * (own->alone_ns > own->waited_ns ? own->alone_ns : own->waited_ns);
    if (own->alone_ns > MOST_NS) own->alone_ns = MOST_NS;
    own->alone_until_ns = now_ns + own->alone_ns;
}

/* Count a step that took some time on threads whose waits are unknown. The time in excess of its usual time counts as
 * waiting. `usual_ns` is 0 at first, then the least time so far, which grows a little with each longer time, so that it
 * follows a lasting change. */
static void note_step(oversubscription *own, int64_t took_ns, int64_t now_ns, int64_t *usual_ns, int64_t threads) {
    const int64_t late_ns = took_ns - *usual_ns;
    if (*usual_ns == 0 || late_ns < 0) {
        *usual_ns = took_ns;
    } else {
        add_wait(own, late_ns, now_ns, threads);
        *usual_ns += late_ns < *usual_ns / 64 ? late_ns : *usual_ns / 64;
    }
}

static void end_oversubscription(oversubscription *own, int64_t now_ns) {
    if (own->was_here) return;
    const int64_t work_ns = now_ns - own->begun_ns - own->waited_ns;
    own->work_ns = own->work_ns == 0 || work_ns < own->work_ns ? work_ns : own->work_ns + (work_ns - own->work_ns) / 8;
    own->alone_ns /= 2;
}
