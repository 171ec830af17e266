// Frames of positions and values: the native twin of wire/frame.py and compressors/chain.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradcomp {

// One frame as it lies in a payload: `left` bytes from `data` on, of which it takes the first.
struct FrameBytes {
    const uint8_t* data;
    uint64_t left;
    uint64_t used;  // set by `decode_frames`
};

// The frame of the int8 levels of x at `positions` (int64, ascending; null for all or none) into `out`; what the levels leave
// over is put in their place in x. Returns the bytes written, or 0, with nothing changed, where positions are not
// ascending inside x or `capacity` is too small.
uint64_t encode_sparse8(float* x, size_t size, const int64_t* positions, size_t count, int block_log2, uint8_t* out,
                        uint64_t capacity);

// Adds the frame onto `out`. Where it is wrong, or of a kind unknown here, returns false with `out` unchanged.
bool decode_add(FrameBytes* frame, float* out, size_t size);

// out = (frame 0 + frame 1 + ...) / divisor, each sum in that order. One pass over `out`, whatever the number of frames.
// Where some frame is wrong, or of a kind unknown here, returns false, and `out` holds anything.
bool decode_mean(FrameBytes* frames, size_t count, float* out, size_t size, float divisor);

}  // namespace gradcomp
