// Packing of small integers and single bits, lowest bit first: the native twin of the bit primitives in ops/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradcomp {

// Integers of at most this many bits can be packed here.
constexpr int kWidest = 32;

// Values of `width` bits each into octets(width * count) bytes; bits above `width` are dropped.
void pack_uint(const int64_t* values, size_t count, int width, uint8_t* out);
// The reverse; `data` holds octets(width * count) bytes.
void unpack_uint(const uint8_t* data, size_t count, int width, int64_t* out);
// One bit for each byte, set where that is not zero, and the reverse.
void pack_bits(const uint8_t* bits, size_t count, uint8_t* out);
void unpack_bits(const uint8_t* data, size_t count, uint8_t* out);

}  // namespace gradcomp
