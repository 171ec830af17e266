// Little-endian loads and stores at any address, and how many bytes things take. The format is little endian, and so
// must be the machine: elsewhere this extension is not built, and the package works without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native kernels need a little-endian machine"
#endif

namespace gradcomp {

// Every part of a frame is padded with zeros to this (wire/parts.py).
constexpr size_t kAlignment = 4;

template <typename T>
inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename T>
inline void store(void* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

// The 8 bytes at `from`, zeros for those at or above `end`.
inline uint64_t load_word(const uint8_t* from, const uint8_t* end) {
    if (end - from >= 8) return load<uint64_t>(from);
    uint64_t word = 0;
    if (from < end) std::memcpy(&word, from, static_cast<size_t>(end - from));
    return word;
}

inline uint64_t octets(uint64_t bits) { return (bits + 7) / 8; }

inline uint64_t padded(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Walks over bytes of another worker, never past their end: the twin of Reader in wire/parts.py.
struct Reader {
    const uint8_t* data;
    uint64_t left;

    // The next `count` bytes, the padding behind them skipped; null when fewer are left.
    const uint8_t* bytes(uint64_t count) {
        if (count > left) return nullptr;
        const uint8_t* start = data;
        const uint64_t skipped = padded(count) < left ? padded(count) : left;
        data += skipped;
        left -= skipped;
        return start;
    }
};

// Writes parts one after another into memory that the caller has made large enough.
struct Writer {
    uint8_t* data;

    // Room for `count` bytes, its padding zeroed.
    uint8_t* room(uint64_t count) {
        uint8_t* start = data;
        std::memset(start + count, 0, padded(count) - count);
        data += padded(count);
        return start;
    }
};

}  // namespace gradcomp
