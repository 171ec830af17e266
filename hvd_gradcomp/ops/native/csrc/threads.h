// Parts of one call on several threads. They are started for the call and end with it, which costs some 20 us each and
// leaves nothing behind: no pool that a forked child would wait for, no thread that spins between steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "rounding.h"

namespace gradcomp {

// How many threads a call may use, the caller's own included; 1 until `use_threads` is told otherwise.
size_t threads();
void use_threads(size_t count);

// Into how many parts to divide `work` of which one thread is to get `least` or more.
inline size_t parts_of(size_t work, size_t least) { return std::max<size_t>(1, std::min(threads(), work / least)); }

// Where part `part` of `parts` begins in `count` things; a multiple of `step`, so that no two parts share a group.
inline size_t part_start(size_t part, size_t parts, size_t count, size_t step) {
    return part == parts ? count : std::min(count, count / parts * part / step * step);
}

// work(0) ... work(parts - 1), the first on this thread and each of the others on one of its own; returns when all are
// done. Where the system gives no more threads, this one does their parts.
template <typename Work>
void in_parts(size_t parts, const Work& work) {
    if (parts == 1) {
        work(size_t{0});
        return;
    }
    std::vector<std::thread> started;
    size_t next = 1;
    try {
        for (started.reserve(parts); next < parts; ++next) {
            started.emplace_back([&work, next] {
                const ExactArithmetic exact;
                work(next);
            });
        }
    } catch (const std::system_error&) {
    }
    work(size_t{0});
    for (; next < parts; ++next) work(next);
    for (std::thread& each : started) each.join();
}

}  // namespace gradcomp
