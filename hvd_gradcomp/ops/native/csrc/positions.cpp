#include "positions.h"

#include <algorithm>
#include <cmath>

#include "loops.h"

namespace gradcomp {

namespace {

enum Code { kAll = 0, kRice = 1, kBitmap = 2, kRaw = 3 };

constexpr uint64_t kHeaderBytes = 8;
constexpr int kGuesses = 4;  // from two below the guess to one above

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

PositionWriter::PositionWriter(const PositionCode& plan, size_t count, uint64_t size, Writer* to)
    : code_(plan.code), rice_bits_(plan.rice_bits) {
    uint8_t* header = to->room(kHeaderBytes);
    std::memset(header, 0, kHeaderBytes);
    header[0] = static_cast<uint8_t>(plan.code);
    if (code_ == kRice) {
        const uint64_t unary_bytes = octets(plan.unary_bits);
        header[1] = static_cast<uint8_t>(plan.rice_bits);
        store(header + 4, static_cast<uint32_t>(unary_bytes));
        low_ = BitWriter(to->room(octets(static_cast<uint64_t>(plan.rice_bits) * count)));
        marks_ = MarkWriter(to->room(unary_bytes), unary_bytes);
    } else if (code_ == kBitmap) {
        marks_ = MarkWriter(to->room(octets(size)), octets(size));
    } else if (code_ == kRaw) {
        raw_ = to->room(4 * count);
    }
}

void PositionWriter::put(const int64_t* positions, size_t count) {
    if (code_ == kRice) {
        // In variables of its own, which no store of a byte can be suspected to change.
        BitWriter low = low_;
        MarkWriter marks = marks_;
        uint64_t following = following_, end = end_;
        const int bits = rice_bits_;
        const uint64_t mask = (uint64_t{1} << bits) - 1;
        for (size_t i = 0; i < count; ++i) {
            const uint64_t gap = static_cast<uint64_t>(positions[i]) - following;
            following = static_cast<uint64_t>(positions[i]) + 1;
            low.put(gap & mask, bits);
            end += gap >> bits;
            marks.mark(end++);
        }
        low_ = low;
        marks_ = marks;
        following_ = following;
        end_ = end;
    } else if (code_ == kBitmap) {
        for (size_t i = 0; i < count; ++i) marks_.mark(static_cast<uint64_t>(positions[i]));
    } else if (code_ == kRaw) {
        for (size_t i = 0; i < count; ++i, raw_ += 4) store(raw_, static_cast<uint32_t>(positions[i]));
    }
}

void PositionWriter::finish() {
    low_.finish();
    marks_.finish();
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
            rice_.width = header[1];
            // The reference refuses more low bits than a writer would consider.
            if (rice_.width > 31 || count << rice_.width > uint64_t{2} * size) return false;
            const uint64_t low_bytes = octets(static_cast<uint64_t>(rice_.width) * count);
            const uint64_t unary_bytes = load<uint32_t>(header + 4);
            rice_.low = from->bytes(low_bytes);
            rice_.unary = rice_.low ? from->bytes(unary_bytes) : nullptr;
            if (!rice_.unary) return false;
            rice_.low_end = rice_.low + low_bytes;
            rice_.unary_end = rice_.unary + unary_bytes;
            rice_.word = load_word(rice_.unary, rice_.unary_end);
            return loops().count_bits(rice_.unary, unary_bytes) == count;
        }
        case kBitmap: {
            bits_ = from->bytes(octets(size));
            if (!bits_) return false;
            bits_end_ = bits_ + octets(size);
            // Bits behind the last element mean nothing, and are not looked at.
            uint64_t set = loops().count_bits(bits_, octets(size));
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
    for (size_t start = 0; start < count; start += kRiceMost) {
        // `open` has counted the set bits, so there are as many more.
        const uint64_t quotients = loops().rice(&rice_, std::min(kRiceMost, count - start), out + start);
        if (quotients >= size_) return false;
        // Positions ascend, so that the last one speaks for all.
        if ((quotients << rice_.width) + rice_.low_sum + rice_.read - 1 >= size_) return false;
    }
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
