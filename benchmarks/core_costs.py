"""Measures what synchronization costs on this machine: joins, waits, and reads from the caches of other cores.

    python -m benchmarks.core_costs [--threads 2,4,8]

A join is the barrier that the threads of a plan call after a kernel (`native/korch_wait.h`). The cost of a byte from
another core's cache is measured on a buffer of 256 KB that another thread has just written: the time of the first read
minus the time of a second read.
"""

from __future__ import annotations

import argparse
import ctypes
from statistics import median

from korch.events.simulate import CoreCosts
from korch.measure.compiler import Builder
from korch.target import detect_target

REPEATED = 9
SOURCE = r"""
#include <omp.h>
#include <vector>
#include "korch_wait.h"

namespace {
constexpr long JOINS = 5000, WORDS = 32768;

// Each thread's time for `work`, in turns that all begin together; the last thread's number counts.
template <typename Work> double on_team(int threads, Work work) {
    std::vector<korch::Count> counts(threads);
    korch::Team team{counts.data(), threads, korch::LOOK_NS};
    double found = 0;
#pragma omp parallel num_threads(threads)
    {
        korch::Member own = korch::member(team, omp_get_thread_num(), threads, 0);
        own.meet();
        const double ns = work(own);
        if (own.me == threads - 1) found = ns;
        own.meet();
    }
    return found;
}
}  // namespace

extern "C" double join_ns(int threads) {
    return on_team(threads, [](korch::Member &own) {
        const int64_t since_ns = korch::now_ns();
        for (long i = 0; i < JOINS; ++i) own.meet();
        return double(korch::now_ns() - since_ns) / JOINS;
    });
}

// Half of what it takes until a thread has an answer of another one.
extern "C" double wait_ns(int threads) {
    std::vector<korch::Count> asked(2);
    return on_team(threads, [&](korch::Member &own) {
        const int64_t since_ns = korch::now_ns();
        const bool asks = own.me == threads - 1;
        if (!asks && own.me != 0) return 0.0;
        for (uint32_t i = 1; i <= JOINS; ++i) {
            if (asks) asked[1].set(i);
            asked[asks ? 0 : 1].wait_for(i, korch::LOOK_NS);
            if (!asks) asked[0].set(i);
        }
        return double(korch::now_ns() - since_ns) / JOINS / 2;
    });
}

extern "C" double fetch_ns_per_byte(int threads) {
    std::vector<uint64_t> words(WORDS);
    volatile uint64_t kept = 0;
    return on_team(threads, [&](korch::Member &own) {
        double ns = 0;
        for (long turn = 0; turn < 20; ++turn) {
            if (own.me == 0) for (long i = 0; i < WORDS; ++i) words[i] += turn;
            own.meet();
            for (int again = 0; again < 2 && own.me == own.threads - 1; ++again) {
                const int64_t since_ns = korch::now_ns();
                uint64_t sum = 0;
                for (long i = 0; i < WORDS; ++i) sum += words[i];
                kept = kept + sum;
                ns += (again ? -1.0 : 1.0) * double(korch::now_ns() - since_ns);
            }
            own.meet();
        }
        return ns / 20 / (8 * WORDS);
    });
}
"""


def measure_costs(threads: int, isa: str) -> CoreCosts:
    """Return the costs for a number of threads, at least two: medians of `REPEATED` measurements."""
    library = ctypes.CDLL(str(Builder(isa).library([SOURCE])))
    found = {}
    for name in ("join_ns", "wait_ns", "fetch_ns_per_byte"):
        function = getattr(library, name)
        function.restype = ctypes.c_double
        found[name] = median(function(threads) for _ in range(REPEATED))
    return CoreCosts(**found)


def main() -> None:
    """Measure, and print a line for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="2")
    for threads in map(int, parser.parse_args().threads.split(",")):
        print(threads, "threads:", measure_costs(threads, detect_target(threads, "").isa), flush=True)


if __name__ == "__main__":
    main()
