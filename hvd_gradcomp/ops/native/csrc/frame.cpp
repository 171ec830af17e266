#include "frame.h"

#include <algorithm>
#include <memory>
#include <new>

#include "bytes.h"
#include "loops.h"
#include "positions.h"
#include "values.h"

namespace gradcomp {

namespace {

constexpr uint8_t kSparseFrame = 1;
constexpr uint64_t kHeaderBytes = 16;
// Elements of `out` that are worked on at a time: they stay in the second level of cache.
constexpr size_t kBlock = size_t{1} << 15;
constexpr size_t kPending = 256;

// One frame on its way into `out`: positions are decoded some at a time, and wait until their block's turn comes.
class FrameReader {
   public:
    bool open(FrameBytes* frame, size_t size) {
        Reader reader{frame->data, frame->left};
        const uint8_t* header = reader.bytes(kHeaderBytes);
        if (!header || header[0] != kSparseFrame || load<uint32_t>(header + 4) != size) return false;
        const uint64_t count = load<uint32_t>(header + 8);
        const uint64_t body_bytes = load<uint32_t>(header + 12);
        const uint8_t* start = reader.bytes(body_bytes);
        if (count > size || !start) return false;
        Reader body{start, body_bytes};
        if (!positions_.open(&body, size, count) || !values_.open(&body, count) || body.left) return false;
        kept_ = static_cast<size_t>(count);
        frame->used = static_cast<uint64_t>(reader.data - frame->data);
        return true;
    }

    // Adds all values, after all positions have been read.
    bool add_all(float* out, size_t size) {
        if (positions_.all()) {
            values_.add_run(out, 0, size);
            return true;
        }
        std::unique_ptr<uint32_t[]> positions(new (std::nothrow) uint32_t[kept_]);
        size_t found;
        if (!positions || !positions_.next(positions.get(), kept_, &found)) return false;
        values_.add_far(out, positions.get(), 0, found);
        return true;
    }

    // Adds the values at positions below `end`; all below `start` have been added before.
    bool add_below(float* out, size_t start, size_t end) {
        if (positions_.all()) {
            values_.add_run(out + start, start, end - start);
            return true;
        }
        for (;;) {
            if (next_ == count_) {
                done_ += count_;
                next_ = 0;
                if (!positions_.next(pending_, kPending, &count_)) return false;
                if (!count_) return true;
            }
            size_t until = count_;
            if (pending_[count_ - 1] >= end) {
                until = static_cast<size_t>(std::lower_bound(pending_ + next_, pending_ + count_, end) - pending_);
            }
            values_.add_at(out, pending_ + next_, done_ + next_, until - next_);
            next_ = until;
            if (until != count_) return true;
        }
    }

   private:
    PositionReader positions_;
    ValueReader values_;
    uint32_t pending_[kPending];
    size_t kept_ = 0;
    size_t count_ = 0;   // positions in pending_
    size_t next_ = 0;    // the first of them that was not added yet
    uint64_t done_ = 0;  // values before those of pending_
};

}  // namespace

uint64_t encode_sparse8(float* x, size_t size, const int64_t* positions, size_t count, int block_log2, uint8_t* out,
                        uint64_t capacity) {
    const PositionCode plan = plan_positions(positions, count, size);
    const uint64_t body = plan.bytes + linear8_bytes(count, block_log2);
    if (!plan.valid || kHeaderBytes + body > capacity || body > UINT32_MAX) return 0;
    Writer writer{out};
    uint8_t* header = writer.room(kHeaderBytes);
    std::memset(header, 0, kHeaderBytes);
    header[0] = kSparseFrame;
    store(header + 4, static_cast<uint32_t>(size));
    store(header + 8, static_cast<uint32_t>(count));
    store(header + 12, static_cast<uint32_t>(body));
    PositionWriter position_writer(plan, count, size, &writer);
    write_linear8_residual(x, count == size ? nullptr : positions, count, block_log2, &position_writer, &writer);
    position_writer.finish();
    return static_cast<uint64_t>(writer.data - out);
}

bool decode_add(FrameBytes* frame, float* out, size_t size) {
    FrameReader reader;
    return reader.open(frame, size) && reader.add_all(out, size);
}

bool decode_mean(FrameBytes* frames, size_t count, float* out, size_t size, float divisor) {
    std::unique_ptr<FrameReader[]> readers(new (std::nothrow) FrameReader[count]);
    if (!readers) return false;
    for (size_t each = 0; each < count; ++each) {
        if (!readers[each].open(&frames[each], size)) return false;
    }
    for (size_t start = 0; start < size; start += kBlock) {
        const size_t end = std::min(size, start + kBlock);
        std::memset(out + start, 0, (end - start) * sizeof(float));
        for (size_t each = 0; each < count; ++each) {
            if (!readers[each].add_below(out, start, end)) return false;
        }
        if (divisor != 1.0f) loops().divide(out + start, end - start, divisor);
    }
    return true;
}

}  // namespace gradcomp
