// Value codes: the native twin of wire/values.py, which describes the format, and of the rounding in compressors/linear.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bytes.h"
#include "positions.h"

namespace gradcomp {

// Bytes of the LINEAR8 code of `count` values, header and padding included.
uint64_t linear8_bytes(uint64_t count, int block_log2);

// Writes the LINEAR8 code of `values`, and what they decode to into `decoded`.
void write_linear8(const float* values, size_t count, int block_log2, float* decoded, Writer* to);

// The same for the values of x at `positions` (null means all), in whose place what the code leaves over is put.
// Writes the positions on the way, while values wait to come from memory.
void write_linear8_residual(float* x, const int64_t* positions, size_t count, int block_log2,
                            PositionWriter* position_writer, Writer* to);

// Reads values by their number among the kept ones.
class ValueReader {
   public:
    // False where the bytes are no value code known here.
    bool open(Reader* from, uint64_t count);
    // Value number first + i to out[i].
    void read(uint64_t first, size_t count, float* out) const;
    // out[i] += value number first + i.
    void add_run(float* out, uint64_t first, size_t count) const;

   private:
    template <typename Work>
    void in_blocks(uint64_t first, size_t count, Work work) const;

    int code_ = 0;
    int block_log2_ = 0;
    const uint8_t* steps_ = nullptr;
    const uint8_t* values_ = nullptr;
};

}  // namespace gradcomp
