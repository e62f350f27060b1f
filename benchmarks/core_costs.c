/* What threads cost each other; `core_costs.py` compiles this with the runtime's sources. */
#include "korch_runtime.h"

enum { JOINS = 5000, WORDS = 32768, TURNS = 20 };

typedef struct {
    korch_count asked[2];
    uint64_t words[WORDS];
    double ns; /* of the last thread */
} exchange;

static int join(void *given, korch_member *own) {
    const int64_t since_ns = korch_now_ns();
    for (int i = 0; i < JOINS; ++i) own->meet(own);
    if (own->me == own->threads - 1) ((exchange *)given)->ns = (double)(korch_now_ns() - since_ns) / JOINS;
    return 0;
}

static int ask(void *given, korch_member *own) {
    exchange *const all = given;
    const bool asks = own->me == own->threads - 1;
    own->meet(own);
    const int64_t since_ns = korch_now_ns();
    for (uint32_t i = 1; i <= JOINS && (asks || own->me == 0); ++i) {
        if (asks) korch_set(&all->asked[1], i);
        korch_wait_for(&all->asked[!asks], i, korch_look_ns(1));
        if (!asks) korch_set(&all->asked[0], i);
    }
    if (asks) all->ns = (double)(korch_now_ns() - since_ns) / JOINS / 2;
    return 0;
}

static int fetch(void *given, korch_member *own) {
    exchange *const all = given;
    double ns = 0;
    for (int turn = 0; turn < TURNS; ++turn) {
        for (int i = 0; own->me == 0 && i < WORDS; ++i) all->words[i] += (uint64_t)turn;
        own->meet(own);
        for (int again = 0; again < 2 && own->me == own->threads - 1; ++again) {
            const int64_t since_ns = korch_now_ns();
            uint64_t sum = 0;
            for (int i = 0; i < WORDS; ++i) sum += all->words[i];
            __asm__ volatile("" : : "r"(sum) : "memory");
            ns += (again ? -1.0 : 1.0) * (double)(korch_now_ns() - since_ns);
        }
        own->meet(own);
    }
    if (own->me == own->threads - 1) all->ns = ns / TURNS / (8 * WORDS);
    return 0;
}

static double exchange_ns(int threads, korch_job job) {
    exchange *const all = korch_allocate(sizeof *all);
    if (!all) return 0;
    korch_parallel(threads, job, all, NULL);
    const double ns = all->ns;
    free(all);
    return ns;
}

/* Of a barrier; of half of what it takes until a thread has an answer of another one; of a byte from another core's cache. */
KORCH_API double korch_join_ns(int threads) { return exchange_ns(threads, join); }
KORCH_API double korch_wait_ns(int threads) { return exchange_ns(threads, ask); }
KORCH_API double korch_fetch_ns_per_byte(int threads) { return exchange_ns(threads, fetch); }
