// Index codes: the native twin of wire/positions.py, which describes the format.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bytes.h"
#include "loops.h"

namespace gradcomp {

// The smallest code for given positions, and what it takes.
struct PositionCode {
    int code = 0;
    int rice_bits = 0;
    uint64_t unary_bits = 0;
    uint64_t bytes = 0;  // header and padding included
    bool valid = false;  // positions are ascending, distinct and inside the array
};

// `positions` may be null when `count` is 0 or `size`.
PositionCode plan_positions(const int64_t* positions, size_t count, uint64_t size);

// Appends groups of at most 32 bits, lowest bit first.
class BitWriter {
   public:
    explicit BitWriter(uint8_t* to = nullptr) : to_(to) {}

    void put(uint64_t value, int width) {
        pending_ |= value << used_;
        used_ += width;
        if (used_ >= 32) {
            store(to_, static_cast<uint32_t>(pending_));
            to_ += 4;
            pending_ >>= 32;
            used_ -= 32;
        }
    }

    void finish() {
        for (; used_ > 0; used_ -= 8, pending_ >>= 8) *to_++ = static_cast<uint8_t>(pending_);
    }

   private:
    uint8_t* to_;
    uint64_t pending_ = 0;
    int used_ = 0;
};

// Sets single bits, given in ascending order, and clears all others of `bytes` bytes.
class MarkWriter {
   public:
    explicit MarkWriter(uint8_t* to = nullptr, uint64_t bytes = 0) : to_(to), bytes_(bytes) {}

    void mark(uint64_t bit) {
        while (bit >= start_ + 64) flush();
        word_ |= uint64_t{1} << (bit - start_);
    }

    void finish() {
        while (start_ / 8 < bytes_) flush();
    }

   private:
    void flush() {
        const uint64_t at = start_ / 8;
        std::memcpy(to_ + at, &word_, bytes_ - at < 8 ? bytes_ - at : 8);
        word_ = 0;
        start_ += 64;
    }

    uint8_t* to_;
    uint64_t bytes_;
    uint64_t start_ = 0;
    uint64_t word_ = 0;
};

// Writes the plan's `bytes`, of which the first are there at once and the others as positions are put.
class PositionWriter {
   public:
    PositionWriter(const PositionCode& plan, size_t count, uint64_t size, Writer* to);
    // The next positions; all are needed before `finish`, unless the plan is for all of the array.
    void put(const int64_t* positions, size_t count);
    void finish();

   private:
    int code_;
    int rice_bits_;
    uint64_t following_ = 0;  // one above the last position
    uint64_t end_ = 0;        // one above the last mark of the unary stream
    BitWriter low_;
    MarkWriter marks_;
    uint8_t* raw_ = nullptr;
};

// Reads positions step by step, each checked to be inside the array and above the one before.
class PositionReader {
   public:
    // False where the bytes are no valid code of `count` positions below `size`.
    bool open(Reader* from, uint64_t size, uint64_t count);
    // The next positions, at most `most`, into `out`; 0 at the end. False where the bytes turn out to be wrong.
    bool next(uint32_t* out, size_t most, size_t* found);
    bool all() const { return code_ == 0; }

   private:
    bool next_rice(uint32_t* out, size_t count);
    bool next_bitmap(uint32_t* out, size_t count);
    bool next_raw(uint32_t* out, size_t count);

    int code_ = 0;
    uint64_t size_ = 0;
    uint64_t left_ = 0;
    uint64_t following_ = 0;  // the lowest position that may come next
    RiceBits rice_;
    // A bitmap, or raw positions.
    const uint8_t* bits_ = nullptr;
    const uint8_t* bits_end_ = nullptr;
    uint64_t word_ = 0;        // what is not consumed yet of the current 64 bits
    uint64_t word_start_ = 0;  // number of the bit that these begin with
};

}  // namespace gradcomp
