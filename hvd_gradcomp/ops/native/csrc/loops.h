// The loops that touch every element, in one version for each instruction set; `loops()` gives the processor's best.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradcomp {

// Magnitudes are compared as integers: the bits of a float without its sign are ordered as |x| is.
constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;

// `scan` may write this many elements past the last one that it counts.
constexpr size_t kScanSlack = 16;

// Where a reader of Rice-coded gaps has got to (positions.h).
struct RiceBits {
    const uint8_t* low = nullptr;  // the low bits of the gaps
    const uint8_t* low_end = nullptr;
    const uint8_t* unary = nullptr;  // as many set bits as there are gaps
    const uint8_t* unary_end = nullptr;
    int width = 0;            // of the low bits, at most 31
    uint64_t word = 0;        // what is not consumed yet of 64 bits of `unary`
    uint64_t word_start = 0;  // number of the bit that these begin with
    uint64_t read = 0;        // gaps read so far
    uint64_t low_sum = 0;     // of their low bits
};

// `rice` reads at most this many gaps at a time.
constexpr size_t kRiceMost = 256;

struct Loops {
    const char* name;

    // x += addend (unless null), and in the same pass the elements with magnitude bits >= bound: `first` + index into
    // positions, magnitude bits into keys, ascending. Both need room for n + kScanSlack. `largest` is raised to the
    // largest magnitude bits seen. Returns how many were found.
    size_t (*scan)(float* x, const float* addend, size_t n, uint32_t first, uint32_t bound, uint32_t* positions,
                   uint32_t* keys, uint32_t* largest);
    // The positions whose keys are >= bound, in their order, into `out`, `room` at most; returns how many.
    size_t (*keep)(const uint32_t* positions, const uint32_t* keys, size_t n, uint32_t bound, int64_t* out, size_t room);
    // x += addend (unless null); returns the largest magnitude bits.
    uint32_t (*add)(float* x, const float* addend, size_t n);
    // levels = round(values / step), halves to even, limited to +-127; decoded = levels * step. All 0 for step 0.
    // `decoded` may be `values`.
    void (*quantize)(const float* values, size_t n, float step, int8_t* levels, float* decoded);
    // x -= the same level * step, in place of giving it back.
    void (*quantize_residual)(float* x, size_t n, float step, int8_t* levels);
    // out = levels * step.
    void (*dequantize)(const int8_t* levels, size_t n, float step, float* out);
    // out += levels * step.
    void (*dequantize_add)(float* out, const int8_t* levels, size_t n, float step);
    // out = sums / divisor, and sums = 0; for a power of two by multiplication, which gives the same bits.
    void (*settle)(float* sums, float* out, size_t n, float divisor);
    // The same past the caches: no line of `out` is read before it is written, nor does it take another's place.
    void (*settle_far)(float* sums, float* out, size_t n, float divisor);
    // The next `count` positions, 1 to kRiceMost, into `out`, modulo 2**32; as many gaps must be left in `bits`. Returns
    // what the unary parts up to the last come to, which may be anything in bytes of another worker.
    uint64_t (*rice)(RiceBits* bits, size_t count, uint32_t* out);
    // How many bits of `bytes` bytes are set.
    uint64_t (*count_bits)(const uint8_t* data, uint64_t bytes);
    // Sum of (2 (first + i) + 1) * word_i modulo 2**32.
    uint32_t (*checksum)(const uint8_t* data, size_t words, uint32_t first);
};

const Loops& loops();

// The instruction sets that this processor has, best first, null at the end; for tests, `use_loops` picks one by name.
const Loops* const* available_loops();
bool use_loops(const char* name);

}  // namespace gradcomp
