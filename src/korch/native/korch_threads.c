/* Threads: waits, barriers, teams, and the cores that they use.
 *
 * A team is created when no idle team of its size is left, and then serves region after region. Its threads wait by
 * spinning for about as long as a kernel takes, and then sleep. If other processes need the cores, too, a thread that
 * spins takes the core from the thread that it waits for; so threads that outnumber the cores spin only briefly.
 */
#include "korch_runtime.h"

#include <pthread.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

/* -- Cores ---------------------------------------------------------------------------------------------------------- */

static int cores = 1; /* that this process may use, when the library was loaded */

KORCH_API void korch_use_cores(int count) { cores = count; }

/* The cores that this process may use. The quota of a container limits the time that threads use, also those that spin: with
 * a quota of 2 cores on 8 cores, 8 threads run for a quarter of each period and are then stopped. Here it is only found if the
 * container has its own groups; `korch.system.cores`, which tells it to `korch_use_cores`, finds all. */
static int found_cores(void) {
    cpu_set_t found;
    const int count = sched_getaffinity(0, sizeof found, &found) == 0 ? CPU_COUNT(&found) : 1;
    long quota = 0, period = 0;
    FILE *const file = fopen("/sys/fs/cgroup/cpu.max", "re");
    const bool is_limited = file && fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0;
    if (file) fclose(file);
    return !is_limited || quota / period >= count ? count : quota < period ? 1 : (int)(quota / period);
}

/* -- Waits ---------------------------------------------------------------------------------------------------------- */

/* The limit of spinning is a time, not a count of pause instructions: one takes 10 cycles on some CPUs and 140 on others. */
static const int64_t LOOK_NS = 1000000, SHORT_LOOK_NS = 5000;

int64_t korch_look_ns(int64_t threads) { return cores >= threads ? LOOK_NS : SHORT_LOOK_NS; }

int64_t korch_now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield" ::: "memory");
#endif
}

static uint32_t count_now(const korch_count *count) { return __atomic_load_n(&count->value, __ATOMIC_ACQUIRE); }

bool korch_is_at(const korch_count *count, uint32_t wanted) { return (int32_t)(count_now(count) - wanted) >= 0; }

/* Spin for at most this long; return whether the count has reached the value. */
static bool look(const korch_count *count, uint32_t wanted, int64_t look_ns) {
    for (int64_t until_ns = 0;;) {
        for (int i = 0; i < 32; ++i) {
            if (korch_is_at(count, wanted)) return true;
            relax();
        }
        const int64_t time_ns = korch_now_ns();
        if (until_ns == 0) until_ns = time_ns + look_ns;
        else if (time_ns > until_ns) return false;
    }
}

/* Writes before this call are visible to threads that have waited. A counter is only set upwards. */
void korch_set(korch_count *count, uint32_t value) {
    __atomic_store_n(&count->value, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&count->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &count->value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* No wake-up is lost: a sleeper adds itself to `sleepers` before it reads `value`, and `korch_set` writes `value` before it
 * reads `sleepers`. All four are sequentially consistent, so either the sleeper sees the new value and does not sleep, or
 * `korch_set` sees the sleeper and wakes it; and the system call returns at once if the value is no longer the one that was
 * read. */
void korch_wait_for(korch_count *count, uint32_t wanted, int64_t look_ns) {
    if (look(count, wanted, look_ns)) return;
    __atomic_fetch_add(&count->sleepers, 1, __ATOMIC_SEQ_CST);
    for (uint32_t now; (int32_t)((now = __atomic_load_n(&count->value, __ATOMIC_SEQ_CST)) - wanted) < 0;)
        syscall(SYS_futex, &count->value, FUTEX_WAIT_PRIVATE, now, NULL, NULL, 0);
    __atomic_fetch_sub(&count->sleepers, 1, __ATOMIC_SEQ_CST);
}

/* -- Cores of a team ------------------------------------------------------------------------------------------------ */

static cpu_set_t bound; /* the cores of threads that are bound to one each */
static bool is_bound;

static bool bind_to(int64_t me) {
    cpu_set_t own;
    int core = 0;
    for (int64_t left = me; core < CPU_SETSIZE && (!CPU_ISSET(core, &bound) || left-- > 0);) ++core;
    CPU_ZERO(&own);
    if (core < CPU_SETSIZE) CPU_SET(core, &own);
    return sched_setaffinity(0, sizeof own, &own) == 0;
}

/* Bind the calling thread, and the threads of teams that are created later, to a core each, if there are `threads` cores.
 * For measurements: on a busy machine, the system would let two of them wait for the same core. */
KORCH_API void korch_bind(int threads) {
    if (sched_getaffinity(0, sizeof bound, &bound) == 0 && CPU_COUNT(&bound) == threads) is_bound = bind_to(0);
}

/* Let a thread of a team use all cores that the first one may use but its core, if there are enough. */
static void send_off(int number, const korch_team *team) {
    cpu_set_t own = team->allowed;
    if (CPU_COUNT(&own) < team->threads) return;
    CPU_CLR(team->core, &own);
    if (CPU_COUNT(&own) > 0) sched_setaffinity(number, sizeof own, &own);
}

/* Keep the other threads of a team off the core of the thread that opens a region.
 *
 * After a thread has slept for some milliseconds, Linux may wake it on the core of the thread that wakes it, although
 * other cores are idle. Both then share one core, each spinning while it waits for the other, until the system moves one
 * of them. This took 4 to 9 ms on two cores, for a plan that runs in 0.06 ms. When the first thread has moved to another
 * core, the others are sent off before the region begins, because they could otherwise be woken there. */
static void keep_apart(korch_team *team) {
    if (is_bound) return;
    const int core = sched_getcpu();
    if (core == team->core) return;
    team->core = core;
    CPU_ZERO(&team->allowed);
    sched_getaffinity(0, sizeof team->allowed, &team->allowed);
    for (int64_t i = 1; i < team->threads; ++i) {
        const int number = __atomic_load_n(&team->numbers[i], __ATOMIC_RELAXED);
        if (number) send_off(number, team);
    }
}

/* -- Teams ---------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t teams_mutex = PTHREAD_MUTEX_INITIALIZER;
static korch_team *idle; /* the teams that no region has */
static _Thread_local korch_member *inside;
static _Thread_local int usual_threads; /* 0: as many as there are cores */

int korch_max_threads(void) { return inside ? 1 : usual_threads ? usual_threads : cores; }

int korch_set_threads(int threads) {
    const int before = usual_threads ? usual_threads : cores;
    usual_threads = threads;
    return before;
}

/* Wait, as the first thread, until all others have reached a turn. */
static void await_others(korch_member *own) {
    korch_team *const team = own->team;
    const bool is_told = team->hooks && team->hooks->waited;
    for (int64_t i = 1; i < team->threads; ++i) {
        if (korch_is_at(&team->counts[i], own->turn)) continue;
        const int64_t since_ns = is_told || korch_traces ? korch_now_ns() : 0;
        korch_wait_for(&team->counts[i], own->turn, team->look_ns);
        if (korch_traces) korch_trace_wait(since_ns);
        if (is_told) team->hooks->waited(team->hooks, since_ns);
    }
}

static void meet(korch_member *own) {
    korch_team *const team = own->team;
    const uint32_t turn = ++own->turn;
    if (own->me != 0) {
        const int64_t since_ns = korch_traces ? korch_now_ns() : 0;
        korch_set(&team->counts[own->me], turn);
        korch_wait_for(&team->counts[0], turn, team->look_ns);
        if (since_ns) korch_trace_wait(since_ns);
        return;
    }
    await_others(own);
    if (team->hooks && team->hooks->all_came) team->hooks->all_came(team->hooks);
    korch_set(&team->counts[0], turn);
}

/* Note that a thread begins or ends its part of a region. */
static void note_part(const korch_team *team, korch_member *own, bool begins) {
    inside = begins ? own : NULL;
    if (korch_traces && !team->hooks) korch_trace_work(team->region, own->me, begins);
}

static void *serve(void *given) {
    korch_team *const team = given;
    const int64_t me = __atomic_add_fetch(&team->begun, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&team->numbers[me], (int)syscall(SYS_gettid), __ATOMIC_RELAXED);
    if (is_bound) bind_to(me);
    for (korch_member own = {me, 0, meet, team, 1};;) {
        korch_wait_for(&team->counts[0], ++own.turn, team->look_ns);
        own.threads = team->threads;
        if (!is_bound && sched_getcpu() == team->core) send_off(0, team);
        note_part(team, &own, true);
        if (team->run(team->given, &own)) __atomic_store_n(&team->failed, 1, __ATOMIC_RELAXED);
        note_part(team, &own, false);
        korch_set(&team->counts[me], ++own.turn);
    }
    return NULL;
}

/* Start a team's threads. If the system has no more threads, the team is smaller. */
static void start(korch_team *team) {
    pthread_t thread;
    for (team->threads = 1; team->threads < team->wanted; ++team->threads) {
        if (pthread_create(&thread, NULL, serve, team) != 0) break;
        pthread_detach(thread);
    }
}

/* An idle team of a size, or a new one; null if there is no memory. */
static korch_team *take(int64_t threads) {
    pthread_mutex_lock(&teams_mutex);
    korch_team **at = &idle;
    while (*at && (*at)->wanted != threads) at = &(*at)->next;
    korch_team *team = *at;
    if (team) *at = team->next;
    pthread_mutex_unlock(&teams_mutex);
    if (team) return team;
    team = korch_allocate((int64_t)(sizeof *team + threads * (sizeof(korch_count) + sizeof(int))));
    if (!team) return NULL;
    team->wanted = threads;
    team->look_ns = korch_look_ns(threads);
    team->core = -1;
    team->numbers = (int *)&team->counts[threads];
    start(team);
    return team;
}

static void give_back(korch_team *team) {
    pthread_mutex_lock(&teams_mutex);
    team->next = idle;
    idle = team;
    pthread_mutex_unlock(&teams_mutex);
}

int korch_parallel(int64_t threads, korch_job run, void *given, korch_hooks *hooks) {
    if (threads > KORCH_MOST_THREADS) threads = KORCH_MOST_THREADS;
    korch_team *const team = threads > 1 && !inside ? take(threads) : NULL;
    korch_member own = {.threads = 1};
    if (!team) return run(given, &own);
    team->run = run;
    team->given = given;
    team->hooks = hooks;
    team->failed = 0;
    if (korch_traces && !hooks) team->region = korch_trace_region();
    keep_apart(team);
    /* The last region has ended at the turn after the one that this thread has set. */
    own = (korch_member){0, team->threads, meet, team, count_now(&team->counts[0]) + 2};
    korch_set(&team->counts[0], own.turn);
    note_part(team, &own, true);
    int failed = run(given, &own);
    note_part(team, &own, false);
    ++own.turn;
    await_others(&own);
    failed |= __atomic_load_n(&team->failed, __ATOMIC_RELAXED);
    give_back(team);
    return failed;
}

int korch_region(int threads, korch_job team, void *const *buffers) {
    return korch_parallel(threads, team, (void *)buffers, NULL);
}

/* -- Forks ---------------------------------------------------------------------------------------------------------- */

/* fork() copies only the thread that calls it. So before a fork, all runs are completed, and no other begins; the child
 * has no teams, and creates new ones. */
static void before_fork(void) {
    korch_hold_handles(true);
    pthread_mutex_lock(&teams_mutex);
}

static void after_fork(void) {
    pthread_mutex_unlock(&teams_mutex);
    korch_hold_handles(false);
}

static void in_child(void) {
    while (idle) {
        korch_team *const team = idle;
        idle = team->next;
        korch_release(team);
    }
    after_fork();
}

__attribute__((constructor)) static void begin(void) {
    cores = found_cores();
    pthread_atfork(before_fork, after_fork, in_child);
}
