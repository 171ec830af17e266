#include "positions.h"

#include <cmath>

namespace gradcomp {

namespace {

enum Code { kAll = 0, kRice = 1, kBitmap = 2, kRaw = 3 };

constexpr uint64_t kHeaderBytes = 8;
constexpr int kGuesses = 4;  // from two below the guess to one above

// Appends groups of at most 32 bits, lowest bit first.
class BitWriter {
   public:
    explicit BitWriter(uint8_t* to) : to_(to) {}

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
    MarkWriter(uint8_t* to, uint64_t bytes) : to_(to), bytes_(bytes) {}

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

// The 8 bytes at `from`, zeros for those at or above `end`.
uint64_t load_word(const uint8_t* from, const uint8_t* end) {
    if (end - from >= 8) return load<uint64_t>(from);
    uint64_t word = 0;
    if (from < end) std::memcpy(&word, from, static_cast<size_t>(end - from));
    return word;
}

uint64_t count_bits(const uint8_t* data, uint64_t bytes) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < bytes; i += 8) {
        count += static_cast<uint64_t>(__builtin_popcountll(load_word(data + i, data + bytes)));
    }
    return count;
}

}  // namespace

PositionCode plan_positions(const int64_t* positions, size_t count, uint64_t size) {
    PositionCode plan;
    if (count == size) plan.bytes = kHeaderBytes;
    if (count == size && !positions) {
        plan.valid = true;
        return plan;
    }
    // The best parameter is near log2(ln 2 * mean gap).
    const double mean = count ? 0.69314718055994530942 * static_cast<double>(size) / static_cast<double>(count) : 1.0;
    const int guess = mean > 1.0 ? std::ilogb(mean) : 0;
    const int lowest = guess > 2 ? guess - 2 : 0;
    uint64_t sums[kGuesses] = {};
    int64_t following = 0;
    int64_t disorder = 0;
    for (size_t i = 0; i < count; ++i) {
        const int64_t gap = static_cast<int64_t>(static_cast<uint64_t>(positions[i]) - static_cast<uint64_t>(following));
        disorder |= gap | positions[i];
        following = static_cast<int64_t>(static_cast<uint64_t>(positions[i]) + 1);
        const uint64_t shifted = static_cast<uint64_t>(gap) >> lowest;
        for (int each = 0; each < kGuesses; ++each) sums[each] += shifted >> each;
    }
    plan.valid = disorder >= 0 && static_cast<uint64_t>(following) <= size;
    if (!plan.valid || count == size) return plan;

    plan.code = kRice;
    uint64_t least = ~uint64_t{0};
    for (int each = 0; count && each < kGuesses && lowest + each < guess + 2; ++each) {
        const uint64_t unary = count + sums[each];
        const uint64_t total = static_cast<uint64_t>(lowest + each) * count + unary;
        if (total < least) {
            least = total;
            plan.rice_bits = lowest + each;
            plan.unary_bits = unary;
        }
    }
    const uint64_t rice = octets(static_cast<uint64_t>(plan.rice_bits) * count) + octets(plan.unary_bits);
    const uint64_t bitmap = octets(size);
    const uint64_t raw = 4 * static_cast<uint64_t>(count);
    if (rice <= bitmap && rice <= raw) {
        plan.bytes = kHeaderBytes + padded(octets(static_cast<uint64_t>(plan.rice_bits) * count)) +
                     padded(octets(plan.unary_bits));
    } else {
        plan.code = bitmap <= raw ? kBitmap : kRaw;
        plan.rice_bits = 0;
        plan.bytes = kHeaderBytes + padded(plan.code == kBitmap ? bitmap : raw);
    }
    return plan;
}

void write_positions(const PositionCode& plan, const int64_t* positions, size_t count, uint64_t size, Writer* to) {
    uint8_t* header = to->room(kHeaderBytes);
    std::memset(header, 0, kHeaderBytes);
    header[0] = static_cast<uint8_t>(plan.code);
    if (plan.code == kRice) {
        const uint64_t unary_bytes = octets(plan.unary_bits);
        header[1] = static_cast<uint8_t>(plan.rice_bits);
        store(header + 4, static_cast<uint32_t>(unary_bytes));
        BitWriter low(to->room(octets(static_cast<uint64_t>(plan.rice_bits) * count)));
        MarkWriter unary(to->room(unary_bytes), unary_bytes);
        const uint64_t mask = (uint64_t{1} << plan.rice_bits) - 1;
        uint64_t following = 0;
        uint64_t end = 0;
        for (size_t i = 0; i < count; ++i) {
            const uint64_t gap = static_cast<uint64_t>(positions[i]) - following;
            following = static_cast<uint64_t>(positions[i]) + 1;
            low.put(gap & mask, plan.rice_bits);
            end += gap >> plan.rice_bits;
            unary.mark(end++);
        }
        low.finish();
        unary.finish();
    } else if (plan.code == kBitmap) {
        MarkWriter marks(to->room(octets(size)), octets(size));
        for (size_t i = 0; i < count; ++i) marks.mark(static_cast<uint64_t>(positions[i]));
        marks.finish();
    } else if (plan.code == kRaw) {
        uint8_t* raw = to->room(4 * count);
        for (size_t i = 0; i < count; ++i) store(raw + 4 * i, static_cast<uint32_t>(positions[i]));
    }
}

bool PositionReader::open(Reader* from, uint64_t size, uint64_t count) {
    const uint8_t* header = from->bytes(kHeaderBytes);
    if (!header || count > size || size > UINT32_MAX) return false;
    size_ = size;
    left_ = count;
    code_ = header[0];
    switch (code_) {
        case kAll:
            return count == size;
        case kRice: {
            rice_bits_ = header[1];
            if (rice_bits_ > 31) return false;
            const uint64_t low_bytes = octets(static_cast<uint64_t>(rice_bits_) * count);
            const uint64_t unary_bytes = load<uint32_t>(header + 4);
            low_ = from->bytes(low_bytes);
            bits_ = low_ ? from->bytes(unary_bytes) : nullptr;
            if (!bits_) return false;
            low_end_ = low_ + low_bytes;
            bits_end_ = bits_ + unary_bytes;
            if (count_bits(bits_, unary_bytes) != count) return false;
            break;
        }
        case kBitmap: {
            bits_ = from->bytes(octets(size));
            if (!bits_) return false;
            bits_end_ = bits_ + octets(size);
            // Bits behind the last element mean nothing, and are not looked at.
            uint64_t set = count_bits(bits_, octets(size));
            for (uint64_t bit = size; bit < 8 * octets(size); ++bit) set -= bits_[bit / 8] >> bit % 8 & 1;
            if (set != count) return false;
            break;
        }
        case kRaw:
            bits_ = from->bytes(4 * count);
            return bits_ != nullptr;
        default:
            return false;
    }
    word_ = load_word(bits_, bits_end_);
    return true;
}

bool PositionReader::next(uint32_t* out, size_t most, size_t* found) {
    const size_t count = left_ < most ? static_cast<size_t>(left_) : most;
    left_ -= count;
    *found = count;
    switch (code_) {
        case kRice:
            return next_rice(out, count);
        case kBitmap:
            return next_bitmap(out, count);
        case kRaw:
            return next_raw(out, count);
        default:
            for (size_t i = 0; i < count; ++i) out[i] = static_cast<uint32_t>(following_ + i);
            following_ += count;
            return true;
    }
}

bool PositionReader::next_rice(uint32_t* out, size_t count) {
    const uint64_t mask = (uint64_t{1} << rice_bits_) - 1;
    uint64_t word = word_, word_start = word_start_, last_end = last_end_, low_bit = low_bit_, following = following_;
    for (size_t i = 0; i < count; ++i) {
        // `open` has counted the set bits, so there is one more.
        while (word == 0) {
            word_start += 64;
            word = load_word(bits_ + word_start / 8, bits_end_);
        }
        const uint64_t bit = word_start + static_cast<uint64_t>(__builtin_ctzll(word));
        word &= word - 1;
        const uint64_t quotient = bit - last_end;
        last_end = bit + 1;
        const uint64_t low = load_word(low_ + low_bit / 8, low_end_) >> low_bit % 8 & mask;
        low_bit += static_cast<uint64_t>(rice_bits_);
        if (quotient >= size_) return false;
        const uint64_t position = following + (quotient << rice_bits_ | low);
        if (position >= size_) return false;
        out[i] = static_cast<uint32_t>(position);
        following = position + 1;
    }
    word_ = word;
    word_start_ = word_start;
    last_end_ = last_end;
    low_bit_ = low_bit;
    following_ = following;
    return true;
}

bool PositionReader::next_bitmap(uint32_t* out, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        while (word_ == 0) {
            word_start_ += 64;
            word_ = load_word(bits_ + word_start_ / 8, bits_end_);
        }
        const uint64_t position = word_start_ + static_cast<uint64_t>(__builtin_ctzll(word_));
        word_ &= word_ - 1;
        if (position >= size_) return false;
        out[i] = static_cast<uint32_t>(position);
    }
    return true;
}

bool PositionReader::next_raw(uint32_t* out, size_t count) {
    for (size_t i = 0; i < count; ++i, bits_ += 4) {
        const uint64_t position = load<uint32_t>(bits_);
        if (position < following_ || position >= size_) return false;
        out[i] = static_cast<uint32_t>(position);
        following_ = position + 1;
    }
    return true;
}

}  // namespace gradcomp
