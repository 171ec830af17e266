#include "values.h"

#include <algorithm>
#include <atomic>

#include "loops.h"
#include "threads.h"

namespace gradcomp {

namespace {

enum Code { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kLinear8 = 3 };

constexpr uint64_t kHeaderBytes = 4;
constexpr float kLevels = 127.0f;
// Above this a block's largest value could decode to infinity by rounding (compressors/blocks.py).
constexpr float kLargest = 3.4028e38f;
// Steps below this count as zero (compressors/blocks.py).
constexpr float kSmallest = 0x1p-100f;
// Values that are read at a time.
constexpr size_t kSome = 256;
// Threads take turns of this many values; one more pays from so many values, scattered or all, for each.
constexpr size_t kTurn = size_t{1} << 12;
constexpr size_t kPartKept = size_t{1} << 14;
constexpr size_t kPart = size_t{1} << 18;
// Gathered values wait in a buffer of this many.
constexpr size_t kBuffer = 1024;

uint64_t blocks_of(uint64_t count, int block_log2) {
    return (count >> block_log2) + ((count & ((uint64_t{1} << block_log2) - 1)) != 0);
}

float step_of(uint32_t largest_key) {
    const float largest = load<float>(&largest_key);
    const float step = (largest > kLargest ? kLargest : largest) / kLevels;
    return step >= kSmallest ? step : 0.0f;
}

float from_float16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31;
    const uint32_t fraction = half & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = kInfinity | fraction << 13;
    } else if (exponent) {
        bits = (exponent + 112) << 23 | fraction << 13;
    } else {
        const float value = static_cast<float>(fraction) * 0x1p-24f;  // subnormal: exact in float32
        bits = load<uint32_t>(&value);
    }
    bits |= sign;
    return load<float>(&bits);
}

// Where the steps and levels of a LINEAR8 code lie; writes its header.
struct Linear8Room {
    uint8_t* steps;
    int8_t* levels;

    Linear8Room(Writer* to, uint64_t count, int block_log2) {
        uint8_t* header = to->room(kHeaderBytes);
        std::memset(header, 0, kHeaderBytes);
        header[0] = kLinear8;
        header[1] = static_cast<uint8_t>(block_log2);
        steps = to->room(4 * blocks_of(count, block_log2));
        levels = reinterpret_cast<int8_t*>(to->room(count));
    }
};

}  // namespace

uint64_t linear8_bytes(uint64_t count, int block_log2) {
    return kHeaderBytes + 4 * blocks_of(count, block_log2) + padded(count);
}

void write_linear8(const float* values, size_t count, int block_log2, float* decoded, Writer* to) {
    const Linear8Room room(to, count, block_log2);
    const size_t block = size_t{1} << block_log2;
    for (size_t start = 0; start < count; start += block) {
        const size_t length = std::min(block, count - start);
        // With nothing to add, `add` only reads.
        const float step = step_of(loops().add(const_cast<float*>(values) + start, nullptr, length));
        store(room.steps + 4 * (start >> block_log2), step);
        loops().quantize(values + start, length, step, room.levels + start, decoded + start);
    }
}

namespace {

// What quantizing some blocks needs: of all values of x, or of those at `positions`.
struct Residual {
    float* x;
    const int64_t* positions;
    size_t count;
    int block_log2;
    Linear8Room room;

    size_t block() const { return size_t{1} << block_log2; }

    // The blocks of values `start` to `end`; `fetched(from, length)` is called while values wait to come from memory.
    template <typename Fetched>
    void quantize(size_t start, size_t end, const Fetched& fetched) const {
        for (; start < end; start += block()) {
            const size_t block_end = std::min(end, start + block());
            if (positions) {
                quantize_at(start, block_end, end, fetched);
            } else {
                const float step = step_of(loops().add(x + start, nullptr, block_end - start));
                store(room.steps + 4 * (start >> block_log2), step);
                loops().quantize_residual(x + start, block_end - start, step, room.levels + start);
            }
        }
    }

   private:
    // One block, while values up to `last` are fetched.
    template <typename Fetched>
    void quantize_at(size_t start, size_t end, size_t last, const Fetched& fetched) const {
        float buffer[kBuffer];
        const auto gather = [&](size_t from, size_t length) {
            for (size_t i = 0; i < length; ++i) buffer[i] = x[positions[from + i]];
        };
        uint32_t largest = 0;
        for (size_t from = start; from < end; from += kBuffer) {
            const size_t length = std::min(kBuffer, end - from);
            for (size_t i = from + length; i < std::min(last, from + 2 * length); ++i) {
                __builtin_prefetch(x + positions[i], 1);
            }
            fetched(from, length);
            gather(from, length);
            largest = std::max(largest, loops().add(buffer, nullptr, length));
        }
        const float step = step_of(largest);
        store(room.steps + 4 * (start >> block_log2), step);
        for (size_t from = start; from < end; from += kBuffer) {
            const size_t length = std::min(kBuffer, end - from);
            if (end - start > kBuffer) gather(from, length);  // else it is all there still
            loops().quantize_residual(buffer, length, step, room.levels + from);
            for (size_t i = 0; i < length; ++i) x[positions[from + i]] = buffer[i];
        }
    }
};

}  // namespace

void write_linear8_residual(float* x, const int64_t* positions, size_t count, int block_log2,
                            PositionWriter* position_writer, Writer* to) {
    const Residual residual{x, positions, count, block_log2, Linear8Room(to, count, block_log2)};
    const size_t turn = std::max(residual.block(), kTurn);
    const size_t parts = std::min(parts_of(count, positions ? kPartKept : kPart), (count + turn - 1) / turn);
    if (parts <= 1) {
        residual.quantize(0, count, [&](size_t from, size_t length) { position_writer->put(positions + from, length); });
        return;
    }
    // Positions are one stream of bits, which the first thread writes while the others begin with the values.
    std::atomic<size_t> next{0};
    in_parts(parts, [&](size_t part) {
        if (part == 0 && positions) position_writer->put(positions, count);
        for (size_t start; (start = next.fetch_add(turn)) < count;) {
            residual.quantize(start, std::min(count, start + turn), [](size_t, size_t) {});
        }
    });
}

bool ValueReader::open(Reader* from, uint64_t count) {
    const uint8_t* header = from->bytes(kHeaderBytes);
    if (!header) return false;
    code_ = header[0];
    block_log2_ = header[1];
    switch (code_) {
        case kFloat32:
            values_ = from->bytes(4 * count);
            break;
        case kFloat16:
        case kBfloat16:
            values_ = from->bytes(2 * count);
            break;
        case kLinear8:
            if (block_log2_ > 31) return false;
            steps_ = from->bytes(4 * blocks_of(count, block_log2_));
            values_ = steps_ ? from->bytes(count) : nullptr;
            for (uint64_t i = 0; values_ && i < blocks_of(count, block_log2_); ++i) {
                if ((load<uint32_t>(steps_ + 4 * i) & kMagnitude) >= kInfinity) return false;
            }
            break;
        default:
            return false;
    }
    return values_ != nullptr;
}

template <typename Work>
void ValueReader::in_blocks(uint64_t first, size_t count, Work work) const {
    const int8_t* levels = reinterpret_cast<const int8_t*>(values_) + first;
    for (size_t i = 0; i < count;) {
        const uint64_t block = (first + i) >> block_log2_;
        const size_t end = std::min<uint64_t>(first + count, (block + 1) << block_log2_) - first;
        work(i, end - i, levels + i, load<float>(steps_ + 4 * block));
        i = end;
    }
}

void ValueReader::read(uint64_t first, size_t count, float* out) const {
    const uint8_t* from;
    switch (code_) {
        case kFloat32:
            std::memcpy(out, values_ + 4 * first, 4 * count);
            break;
        case kFloat16:
            from = values_ + 2 * first;
            for (size_t i = 0; i < count; ++i) out[i] = from_float16(load<uint16_t>(from + 2 * i));
            break;
        case kBfloat16:
            from = values_ + 2 * first;
            for (size_t i = 0; i < count; ++i) {
                const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(from + 2 * i)) << 16;
                out[i] = load<float>(&bits);
            }
            break;
        default:
            in_blocks(first, count, [&](size_t i, size_t length, const int8_t* levels, float step) {
                loops().dequantize(levels, length, step, out + i);
            });
    }
}

void ValueReader::add_run(float* out, uint64_t first, size_t count) const {
    if (code_ == kLinear8) {
        in_blocks(first, count, [&](size_t i, size_t length, const int8_t* levels, float step) {
            loops().dequantize_add(out + i, levels, length, step);
        });
        return;
    }
    float values[kSome];
    for (size_t start = 0; start < count; start += kSome) {
        const size_t length = std::min(kSome, count - start);
        read(first + start, length, values);
        for (size_t i = 0; i < length; ++i) out[start + i] += values[i];
    }
}

}  // namespace gradcomp
