#include "bits.h"

#include "bytes.h"

namespace gradcomp {

void pack_uint(const int64_t* values, size_t count, int width, uint8_t* out) {
    const uint64_t mask = (uint64_t{1} << width) - 1;
    uint64_t pending = 0;
    int used = 0;
    for (size_t i = 0; i < count; ++i) {
        pending |= (static_cast<uint64_t>(values[i]) & mask) << used;
        used += width;
        if (used >= 32) {
            store(out, static_cast<uint32_t>(pending));
            out += 4;
            pending >>= 32;
            used -= 32;
        }
    }
    for (; used > 0; used -= 8, pending >>= 8) *out++ = static_cast<uint8_t>(pending);
}

void unpack_uint(const uint8_t* data, size_t count, int width, int64_t* out) {
    const uint64_t mask = (uint64_t{1} << width) - 1;
    const uint8_t* end = data + octets(static_cast<uint64_t>(count) * static_cast<uint64_t>(width));
    uint64_t pending = 0;
    int held = 0;
    for (size_t i = 0; i < count; ++i) {
        if (held < width) {
            if (end - data >= 4) {
                pending |= static_cast<uint64_t>(load<uint32_t>(data)) << held;
                data += 4;
                held += 32;
            } else {
                for (; data < end; held += 8) pending |= static_cast<uint64_t>(*data++) << held;
            }
        }
        out[i] = static_cast<int64_t>(pending & mask);
        pending >>= width;
        held -= width;
    }
}

void pack_bits(const uint8_t* bits, size_t count, uint8_t* out) {
    for (size_t start = 0; start < count; start += 8) {
        unsigned octet = 0;
        const size_t length = count - start < 8 ? count - start : 8;
        for (size_t i = 0; i < length; ++i) octet |= static_cast<unsigned>(bits[start + i] != 0) << i;
        *out++ = static_cast<uint8_t>(octet);
    }
}

void unpack_bits(const uint8_t* data, size_t count, uint8_t* out) {
    for (size_t start = 0; start < count; start += 8) {
        const unsigned octet = *data++;
        const size_t length = count - start < 8 ? count - start : 8;
        for (size_t i = 0; i < length; ++i) out[start + i] = octet >> i & 1;
    }
}

}  // namespace gradcomp
