// One namespace for each instruction set, and the choice among them when the library is loaded.
#include "loops.h"

#include "bytes.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GRADCOMP_X86 1
#include <immintrin.h>
#endif

namespace gradcomp {

// -- any processor: SSE2 on x86-64, NEON on 64-bit ARM -----------------------------------------------------------------

namespace baseline {
#define TARGET
#include "loops_plain.inc"
#include "loops_unfold.inc"
#include "loops_unfold_scalar.inc"
#include "loops_rice.inc"

// Groups of 16 in which nothing reaches the bound, nearly all when few values are kept, cost no branch an element.
static size_t scan(float* x, const float* addend, size_t n, uint32_t first, uint32_t bound, uint32_t* positions,
                   uint32_t* keys, uint32_t* largest) {
    constexpr size_t kGroup = 16;
    size_t found = 0;
    for (size_t start = 0; start < n; start += kGroup) {
        const size_t length = n - start < kGroup ? n - start : kGroup;
        const uint32_t top = add(x + start, addend ? addend + start : nullptr, length);
        *largest = top > *largest ? top : *largest;
        if (top < bound) continue;
        for (size_t i = start; i < start + length; ++i) {
            const uint32_t key = load<uint32_t>(&x[i]) & kMagnitude;
            positions[found] = first + static_cast<uint32_t>(i);
            keys[found] = key;
            found += key >= bound;
        }
    }
    return found;
}

#ifdef GRADCOMP_X86
#define VECTOR __m128
#define LOAD _mm_loadu_ps
#define STORE _mm_storeu_ps
#define STREAM _mm_stream_ps
#define SET1 _mm_set1_ps
#define MULTIPLY _mm_mul_ps
#define DIVIDE _mm_div_ps
#include "loops_stream.inc"
#else
static void settle_far(float* sums, float* out, size_t n, float divisor) { settle(sums, out, n, divisor); }
#endif
#undef TARGET
}  // namespace baseline

#ifdef GRADCOMP_X86

// -- AVX2 --------------------------------------------------------------------------------------------------------------

namespace avx2 {
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#include "loops_plain.inc"
#include "loops_unfold.inc"
#include "loops_unfold_scalar.inc"
#include "loops_rice.inc"

TARGET static inline uint64_t reach(float* x, const float* addend, uint32_t bound, __m256i* top) {
    const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kMagnitude));
    // Magnitudes are less than 2**31, so that a comparison of signed integers does.
    const __m256i below = _mm256_set1_epi32(static_cast<int>(bound - 1));
    uint64_t mask = 0;
    for (int lane = 0; lane < 64; lane += 8) {
        __m256 value = _mm256_loadu_ps(x + lane);
        if (addend) {
            value = _mm256_add_ps(value, _mm256_loadu_ps(addend + lane));
            _mm256_storeu_ps(x + lane, value);
        }
        const __m256i key = _mm256_and_si256(_mm256_castps_si256(value), magnitude);
        *top = _mm256_max_epu32(*top, key);
        const __m256i reached = _mm256_cmpgt_epi32(key, below);
        mask |= static_cast<uint64_t>(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(reached)))) << lane;
    }
    return mask;
}

TARGET static size_t scan(float* x, const float* addend, size_t n, uint32_t first, uint32_t bound,
                          uint32_t* positions, uint32_t* keys, uint32_t* largest) {
    const size_t whole = n - n % 64;
    __m256i top = _mm256_setzero_si256();
    size_t found = 0;
    for (size_t i = 0; i < whole; i += 64) {
        const uint64_t mask = reach(x + i, addend ? addend + i : nullptr, bound, &top);
        found = unfold(mask, first + static_cast<uint32_t>(i), positions, found);
    }
    for (size_t i = 0; i < found; ++i) keys[i] = load<uint32_t>(&x[positions[i] - first]) & kMagnitude;
    alignas(32) uint32_t tops[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(tops), top);
    for (const uint32_t each : tops) *largest = each > *largest ? each : *largest;
    return found + baseline::scan(x + whole, addend ? addend + whole : nullptr, n - whole,
                                  first + static_cast<uint32_t>(whole), bound, positions + found, keys + found,
                                  largest);
}

#define VECTOR __m256
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define STREAM _mm256_stream_ps
#define SET1 _mm256_set1_ps
#define MULTIPLY _mm256_mul_ps
#define DIVIDE _mm256_div_ps
#include "loops_stream.inc"
#undef TARGET
}  // namespace avx2

// -- AVX-512 -----------------------------------------------------------------------------------------------------------

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt")))
#define OWN_KEEP
#include "loops_plain.inc"
#undef OWN_KEEP
#include "loops_unfold.inc"

// As `unfold`, for masks of many bits; needs room for 16 more than it counts.
TARGET static inline size_t unfold_dense(uint64_t mask, uint32_t first, uint32_t* positions, size_t found) {
    __m512i each = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                                    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (int lane = 0; lane < 64; lane += 16) {
        const __mmask16 set = static_cast<__mmask16>(mask >> lane);
        // Not stored by the compressing instruction itself, which is slow on some processors.
        _mm512_storeu_si512(positions + found, _mm512_maskz_compress_epi32(set, each));
        found += static_cast<size_t>(__builtin_popcount(set));
        each = _mm512_add_epi32(each, _mm512_set1_epi32(16));
    }
    return found;
}

// Positions from `ends`, eight at a time while their low bits fill whole bytes of one word; returns how many.
TARGET static inline size_t place_eights(const RiceBits& bits, size_t count, const uint32_t* ends, uint64_t* sum,
                                         uint32_t* out) {
    if (bits.width > 8 || bits.read % 8) return 0;
    const int width = bits.width;
    // Every instruction with a mask, although all lanes count: GCC 12 warns of the others.
    const __mmask8 all = 0xff;
    const __m512i zero = _mm512_setzero_si512(), number = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i shifts = _mm512_setr_epi64(0, width, 2 * width, 3 * width, 4 * width, 5 * width, 6 * width, 7 * width);
    const __m512i mask = _mm512_set1_epi64((int64_t{1} << width) - 1);
    __m512i index = _mm512_add_epi64(number, _mm512_set1_epi64(static_cast<int64_t>(bits.read)));
    __m512i total = _mm512_set1_epi64(static_cast<int64_t>(*sum));
    const uint8_t* low = bits.low + bits.read / 8 * static_cast<uint64_t>(width);
    size_t i = 0;
    for (; i + 8 <= count && bits.low_end - low >= 8; i += 8, low += width) {
        const __m512i eight = _mm512_set1_epi64(load<int64_t>(low));
        __m512i sums = _mm512_and_si512(_mm512_maskz_srlv_epi64(all, eight, shifts), mask);
        sums = _mm512_add_epi64(sums, _mm512_maskz_alignr_epi64(all, sums, zero, 7));
        sums = _mm512_add_epi64(sums, _mm512_maskz_alignr_epi64(all, sums, zero, 6));
        sums = _mm512_add_epi64(sums, _mm512_maskz_alignr_epi64(all, sums, zero, 4));
        sums = _mm512_add_epi64(sums, total);
        total = _mm512_maskz_permutexvar_epi64(all, _mm512_set1_epi64(7), sums);
        const __m512i end = _mm512_maskz_cvtepu32_epi64(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ends + i)));
        const __m512i quotients = _mm512_maskz_sll_epi64(all, _mm512_sub_epi64(end, index), _mm_cvtsi32_si128(width));
        const __m512i positions = _mm512_add_epi64(_mm512_add_epi64(quotients, sums), index);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_maskz_cvtepi64_epi32(all, positions));
        index = _mm512_add_epi64(index, _mm512_set1_epi64(8));
    }
    alignas(64) uint64_t totals[8];
    _mm512_store_si512(totals, total);
    *sum = totals[0];
    return i;
}

#include "loops_rice.inc"

TARGET static inline uint64_t reach(float* x, const float* addend, uint32_t bound, __m512i* top) {
    const __m512i magnitude = _mm512_set1_epi32(static_cast<int>(kMagnitude));
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(bound));
    uint64_t mask = 0;
    for (int lane = 0; lane < 64; lane += 16) {
        __m512 value = _mm512_loadu_ps(x + lane);
        if (addend) {
            value = _mm512_add_ps(value, _mm512_loadu_ps(addend + lane));
            _mm512_storeu_ps(x + lane, value);
        }
        const __m512i key = _mm512_and_si512(_mm512_castps_si512(value), magnitude);
        *top = _mm512_maskz_max_epu32(0xffff, *top, key);
        mask |= static_cast<uint64_t>(_mm512_cmpge_epu32_mask(key, limit)) << lane;
    }
    return mask;
}

TARGET static size_t scan(float* x, const float* addend, size_t n, uint32_t first, uint32_t bound,
                          uint32_t* positions, uint32_t* keys, uint32_t* largest) {
    const size_t whole = n - n % 64;
    __m512i top = _mm512_setzero_si512();
    size_t found = 0;
    for (size_t i = 0; i < whole; i += 64) {
        const uint64_t mask = reach(x + i, addend ? addend + i : nullptr, bound, &top);
        found = unfold(mask, first + static_cast<uint32_t>(i), positions, found);
    }
    for (size_t i = 0; i < found; ++i) keys[i] = load<uint32_t>(&x[positions[i] - first]) & kMagnitude;
    alignas(64) uint32_t tops[16];
    _mm512_store_si512(tops, top);
    for (const uint32_t each : tops) *largest = each > *largest ? each : *largest;
    return found + baseline::scan(x + whole, addend ? addend + whole : nullptr, n - whole,
                                  first + static_cast<uint32_t>(whole), bound, positions + found, keys + found,
                                  largest);
}

TARGET static size_t keep(const uint32_t* positions, const uint32_t* keys, size_t n, uint32_t bound, int64_t* out,
                          size_t room) {
    // Keys are magnitudes, so signed numbers order them as well.
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(bound) - 1);
    size_t kept = 0, i = 0;
    // Whole vectors are stored, so there has to be room for one.
    for (; i + 8 <= n && kept + 8 <= room; i += 8) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
        const __m256i each = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions + i));
        // Not as a mask: where GCC 12 has to spill one of 8 bits (seen with ThreadSanitizer), it counts 32 bits of it.
        const int set = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, limit)));
        const __m256i some = _mm256_maskz_compress_epi32(static_cast<__mmask8>(set), each);
        _mm512_storeu_si512(out + kept, _mm512_maskz_cvtepu32_epi64(0xff, some));
        kept += static_cast<size_t>(__builtin_popcount(static_cast<unsigned>(set)));
    }
    return kept + baseline::keep(positions + i, keys + i, n - i, bound, out + kept, room - kept);
}

#define VECTOR __m512
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define STREAM _mm512_stream_ps
#define SET1 _mm512_set1_ps
#define MULTIPLY _mm512_mul_ps
#define DIVIDE _mm512_div_ps
#include "loops_stream.inc"
#undef TARGET
}  // namespace avx512

#endif  // GRADCOMP_X86

// -- the choice --------------------------------------------------------------------------------------------------------

#define LOOPS(set, name)                                                                                           \
    {                                                                                                              \
        name, set::scan, set::keep, set::add, set::quantize, set::quantize_residual, set::dequantize,          \
            set::dequantize_add, set::settle, set::settle_far, set::rice,     \
            set::count_bits, set::checksum                                                                                          \
    }

static const Loops kBaseline = LOOPS(baseline, "baseline");
#ifdef GRADCOMP_X86
static const Loops kAvx2 = LOOPS(avx2, "avx2");
static const Loops kAvx512 = LOOPS(avx512, "avx512");
#endif

namespace {

struct Choice {
    const Loops* available[4] = {};
    const Loops* used;

    Choice() {
        size_t count = 0;
#ifdef GRADCOMP_X86
        __builtin_cpu_init();
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                              __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
        if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            available[count++] = &kAvx512;
        }
        if (has_avx2) available[count++] = &kAvx2;
#endif
        available[count++] = &kBaseline;
        used = available[0];
    }
};

Choice& choice() {
    static Choice chosen;
    return chosen;
}

}  // namespace

const Loops& loops() { return *choice().used; }

const Loops* const* available_loops() { return choice().available; }

bool use_loops(const char* name) {
    for (const Loops* each : choice().available) {
        if (each && std::strcmp(each->name, name) == 0) {
            choice().used = each;
            return true;
        }
    }
    return false;
}

}  // namespace gradcomp
