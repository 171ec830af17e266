// Two steps: a sampled bound leaves few candidates in one pass over the array, and a radix selection finds the exact
// threshold among them. The sample decides how fast this is, never what is selected.
#include "select.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "bytes.h"
#include "loops.h"
#include "threads.h"

namespace gradcomp {

namespace {

// Elements of one call of `scan`: its input and candidates stay in the first two levels of cache.
constexpr size_t kChunk = 4096;
// Below this size all elements are candidates.
constexpr size_t kSampleFrom = size_t{1} << 15;
// Up to this size the sum is made first and stays in cache, where a sample of it is cheap.
constexpr size_t kSumFirst = size_t{1} << 17;
// A thread of its own pays from so many elements on.
constexpr size_t kPart = size_t{1} << 18;
// A sample is to hold this many of the values sought.
constexpr double kLeastExpected = 16;

struct Threshold {
    uint32_t key;  // of the k-th largest
    size_t ties;   // how many elements of just this key are among the k largest
};

// The k-th largest of the keys key_of(0) ... key_of(count - 1), by their upper, middle and lowest bits.
template <typename KeyOf>
Threshold kth_key(KeyOf key_of, size_t count, size_t k) {
    constexpr int kUpper = 12, kMiddle = 10, kLowest = 10;
    constexpr int kWidths[] = {kUpper, kMiddle, kLowest};
    uint32_t prefix = 0;
    int shift = 32;
    size_t rank = k;
    for (const int width : kWidths) {
        uint32_t counts[1 << kUpper] = {};
        const int above = shift;
        shift -= width;
        const uint32_t mask = (1u << width) - 1;
        if (above == 32) {
            for (size_t i = 0; i < count; ++i) ++counts[key_of(i) >> shift];
        } else {
            for (size_t i = 0; i < count; ++i) {
                const uint32_t key = key_of(i);
                if (key >> above == prefix) ++counts[key >> shift & mask];
            }
        }
        uint32_t bucket = mask;
        while (bucket > 0 && counts[bucket] < rank) rank -= counts[bucket--];
        prefix = prefix << width | bucket;
    }
    return {prefix, rank};
}

// The same for candidates, of which all keys are at or above `bound`, and the k-th largest is a little above it.
Threshold kth_candidate(const uint32_t* keys, size_t count, uint32_t bound, size_t k) {
    // 1024 neighbouring floats share a bucket; the buckets reach half an octave above the bound.
    constexpr int kShift = 10;
    constexpr uint32_t kBuckets = 4096;
    uint32_t counts[kBuckets] = {};
    for (size_t i = 0; i < count; ++i) ++counts[std::min((keys[i] - bound) >> kShift, kBuckets - 1)];
    uint32_t bucket = kBuckets - 1;
    size_t rank = k;
    while (bucket > 0 && counts[bucket] < rank) rank -= counts[bucket--];
    if (bucket == kBuckets - 1) return kth_key([&](size_t i) { return keys[i]; }, count, k);
    uint32_t within[1 << kShift] = {};
    for (size_t i = 0; i < count; ++i) {
        const uint32_t above = keys[i] - bound;
        if (above >> kShift == bucket) ++within[above & ((1 << kShift) - 1)];
    }
    uint32_t lowest = (1 << kShift) - 1;
    while (lowest > 0 && within[lowest] < rank) rank -= within[lowest--];
    return {bound + (bucket << kShift) + lowest, rank};
}

uint32_t magnitude_at(const float* x, const float* addend, size_t i) {
    const float value = addend ? x[i] + addend[i] : x[i];
    return load<uint32_t>(&value) & kMagnitude;
}

// How many of an array are looked at to find a bound, and which of these, by rank, is the bound.
struct Sample {
    size_t count = 0;
    size_t rank = 0;

    Sample(size_t size, size_t k) {
        if (size < kSampleFrom || k == 0 || k > size / 4) return;
        const double share = static_cast<double>(k) / static_cast<double>(size);
        // A value looked at, alone in its cache line, costs some five times what a candidate too many does, of which
        // there are 3 k / sqrt(count * share): this count makes the sum of both least.
        const double best = std::pow(0.3 * static_cast<double>(k) / std::sqrt(share), 2.0 / 3.0);
        count = std::min(size / 8, static_cast<size_t>(std::max(best, kLeastExpected / share)));
        const double expected = static_cast<double>(count) * share;
        if (expected < kLeastExpected - 1) {
            count = 0;
            return;
        }
        // Three standard deviations above, so that the bound hardly ever leaves fewer than k candidates.
        rank = std::min(count, static_cast<size_t>(expected + 3 * std::sqrt(expected)) + 1);
    }

    // How many elements should reach the value of this rank in the sample.
    size_t expected(size_t rank, size_t size) const {
        return static_cast<size_t>(static_cast<double>(rank) / static_cast<double>(count) * static_cast<double>(size));
    }
};

// x += addend (unless null), on as many threads as pay; returns the largest magnitude bits.
uint32_t sum(float* x, const float* addend, size_t size) {
    const size_t parts = parts_of(size, kPart);
    std::vector<uint32_t> largest(parts);
    in_parts(parts, [&](size_t part) {
        const size_t start = part_start(part, parts, size, kChunk), end = part_start(part + 1, parts, size, kChunk);
        largest[part] = loops().add(x + start, addend ? addend + start : nullptr, end - start);
    });
    return *std::max_element(largest.begin(), largest.end());
}

// The magnitude bits of a sample; none when there is no memory for them.
std::unique_ptr<uint32_t[]> sampled(const float* x, const float* addend, size_t size, const Sample& sample) {
    std::unique_ptr<uint32_t[]> keys(new (std::nothrow) uint32_t[sample.count]);
    const size_t stride = size / sample.count;
    uint64_t random = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; keys && i < sample.count; ++i) {
        // Somewhere in its stride: a fixed step could walk along one channel of a convolution.
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t offset = static_cast<size_t>((random >> 32) * stride >> 32);
        keys[i] = magnitude_at(x, addend, i * stride + offset);
    }
    return keys;
}

// What one thread finds in its part of an array: `capacity` candidates at most.
struct Part {
    size_t capacity = 0;
    uint32_t* positions = nullptr;
    uint32_t* keys = nullptr;
    size_t count = 0;
    uint32_t largest = 0;
    bool all = true;  // whether there was room for all

    void scan(float* x, const float* addend, size_t start, size_t end, uint32_t bound) {
        for (; start < end; start += kChunk) {
            const size_t length = std::min(kChunk, end - start);
            const float* added = addend ? addend + start : nullptr;
            all = all && count + kChunk + kScanSlack <= capacity;
            if (all) {
                count += loops().scan(x + start, added, length, static_cast<uint32_t>(start), bound, positions + count,
                                      keys + count, &largest);
            } else {
                largest = std::max(largest, loops().add(x + start, added, length));
            }
        }
    }
};

// One pass: x += addend, and all elements that reach `bound`, of which about `expected` should. Returns the largest
// magnitude bits; nothing is found where that is not finite or far more elements reach the bound.
uint32_t scan(float* x, const float* addend, uint32_t bound, size_t expected, Candidates* found) {
    const size_t size = found->size;
    const size_t parts = parts_of(size, kPart);
    // Any part may hold nearly all; memory that is not written to costs nothing.
    const size_t capacity = std::min(size, 2 * expected + 1024) + kChunk + kScanSlack;
    found->memory.reset(new (std::nothrow) uint32_t[2 * parts * capacity]);
    std::vector<Part> done(parts);
    for (size_t part = 0; found->memory && part < parts; ++part) {
        done[part].capacity = capacity;
        done[part].positions = found->memory.get() + part * capacity;
        done[part].keys = found->memory.get() + (parts + part) * capacity;
    }
    in_parts(parts, [&](size_t part) {
        Part mine = done[part];
        mine.scan(x, addend, part_start(part, parts, size, kChunk), part_start(part + 1, parts, size, kChunk), bound);
        done[part] = mine;
    });
    uint32_t largest = 0;
    bool all = true;
    for (const Part& each : done) {
        largest = std::max(largest, each.largest);
        all = all && each.all;
    }
    found->bound = bound;
    found->count = 0;
    if (!all || largest >= kInfinity) return largest;
    found->positions = done[0].positions;
    found->keys = done[0].keys;
    for (const Part& each : done) {
        std::memmove(found->positions + found->count, each.positions, each.count * sizeof *each.positions);
        std::memmove(found->keys + found->count, each.keys, each.count * sizeof *each.keys);
        found->count += each.count;
    }
    return largest;
}

}  // namespace

Candidates look(float* x, const float* addend, size_t size, size_t wanted, bool* finite) {
    Candidates found;
    found.size = size;
    const Sample sample(size, wanted);
    uint32_t largest = 0;
    if (addend && (!sample.count || size <= kSumFirst)) {
        largest = sum(x, addend, size);
        addend = nullptr;
        if (!sample.count) {
            *finite = largest < kInfinity;
            return found;
        }
    }
    std::unique_ptr<uint32_t[]> keys;
    if (sample.count) keys = sampled(x, addend, size, sample);
    // Should the sample have misled, a second one of its values, further down, leaves the candidates needed.
    for (size_t rank = sample.rank; keys && rank <= sample.count; rank *= 4) {
        const uint32_t bound = kth_key([&](size_t i) { return keys[i]; }, sample.count, rank).key;
        if (bound == 0 || bound >= kInfinity) break;
        const size_t expected = sample.expected(rank, size);
        largest = std::max(largest, scan(x, addend, bound, expected, &found));
        addend = nullptr;
        const bool too_few = found.positions && found.count < wanted;
        *finite = largest < kInfinity;
        if (!too_few || !*finite) {
            found.wanted = found.count < wanted ? 0 : wanted;
            return found;
        }
        found.positions = nullptr;
    }
    *finite = std::max(largest, sum(x, addend, size)) < kInfinity;
    return found;
}

namespace {

// Takes candidates in ascending order and writes down those that the threshold lets pass.
struct Sieve {
    Threshold threshold;
    size_t k;
    int64_t* out;
    size_t count = 0;

    void offer(const uint32_t* positions, const uint32_t* keys, size_t candidates) {
        // Up to the last tie that passes, ties do; behind it they do not.
        size_t until = 0;
        for (; threshold.ties && until < candidates; ++until) threshold.ties -= keys[until] == threshold.key;
        count += loops().keep(positions, keys, until, threshold.key, out + count, k - count);
        count += loops().keep(positions + until, keys + until, candidates - until, threshold.key + 1, out + count,
                              k - count);
    }
};

}  // namespace

size_t top_positions(const float* x, size_t size, size_t k, const Candidates* known, int64_t* out) {
    if (size == 0 || k == 0) return 0;
    k = std::min(k, size);
    Candidates own;
    if (!known || !known->usable() || known->size != size || known->wanted != k) {
        bool finite;
        // With nothing to add, `look` only reads.
        own = look(const_cast<float*>(x), nullptr, size, k, &finite);
        known = &own;
    }
    if (known->usable()) {
        const uint32_t* keys = known->keys;
        Sieve sieve{kth_candidate(keys, known->count, known->bound, k), k, out};
        sieve.offer(known->positions, keys, known->count);
        return sieve.count;
    }
    Threshold threshold = kth_key([&](size_t i) { return magnitude_at(x, nullptr, i); }, size, k);
    if (threshold.key == 0) threshold = {1, k};  // all that are not zero, which are fewer than k
    Sieve sieve{threshold, k, out};
    uint32_t positions[kChunk + kScanSlack];
    uint32_t keys[kChunk + kScanSlack];
    uint32_t largest = 0;
    for (size_t start = 0; start < size; start += kChunk) {
        const size_t found = loops().scan(const_cast<float*>(x) + start, nullptr, std::min(kChunk, size - start),
                                          static_cast<uint32_t>(start), threshold.key, positions, keys, &largest);
        sieve.offer(positions, keys, found);
    }
    return sieve.count;
}

float kth_largest(const float* x, size_t size, size_t k) {
    // Integers ordered as the floats are: negative ones reversed and below the others. -0 counts as 0.
    const auto key_of = [&](size_t i) {
        const uint32_t bits = load<uint32_t>(&x[i]);
        if (bits == ~kMagnitude) return ~kMagnitude;
        return bits & ~kMagnitude ? ~bits : bits | ~kMagnitude;
    };
    const uint32_t key = kth_key(key_of, size, k).key;
    const uint32_t bits = key & ~kMagnitude ? key & kMagnitude : ~key;
    return load<float>(&bits);
}

}  // namespace gradcomp
