// Selection of the values of largest magnitude, exact, ties to the lower position, zeros never: the native twin of
// ops/selection.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace gradcomp {

// Positions and magnitude bits of all elements that reach some bound, in ascending order of position.
struct Candidates {
    size_t size = 0;    // of the array they are from
    size_t wanted = 0;  // the k they were looked for
    size_t count = 0;
    uint32_t bound = 0;
    // In one piece of memory, which allocators keep at hand for the next step rather than two.
    std::unique_ptr<uint32_t[]> memory;
    uint32_t* positions = nullptr;
    uint32_t* keys = nullptr;

    bool usable() const { return count >= wanted && wanted > 0; }
};

// One pass: x += addend (unless null), and candidates for the `wanted` largest of the sum (none when `wanted` is 0 or
// no sample tells where to look; then `usable` is false). `finite` says whether the sum holds neither NaN nor infinity.
Candidates look(float* x, const float* addend, size_t size, size_t wanted, bool* finite);

// The positions of the k largest magnitudes of x, ascending, into `out` (room for k). `known` are candidates for the
// same k from `look` at the same values, or null. Returns how many there are: fewer than k where zeros would be next.
size_t top_positions(const float* x, size_t size, size_t k, const Candidates* known, int64_t* out);

// The k-th largest of `size` floats, none NaN; 1 <= k <= size.
float kth_largest(const float* x, size_t size, size_t k);

}  // namespace gradcomp
