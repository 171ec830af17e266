#include "frame.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "bytes.h"
#include "loops.h"
#include "positions.h"
#include "threads.h"
#include "values.h"

namespace gradcomp {

namespace {

constexpr uint8_t kSparseFrame = 1;
constexpr uint64_t kHeaderBytes = 16;
// Elements of the mean that are worked on at a time.
constexpr size_t kBlock = size_t{1} << 13;
// From this size on results are stored past the caches: nobody will find them there when they are next read.
constexpr size_t kFar = size_t{1} << 16;
// A thread of its own pays from so many elements of a mean on, or values to add.
constexpr size_t kPart = size_t{1} << 18;
constexpr size_t kPartKept = size_t{1} << 14;
// Positions and values that are read at a time.
constexpr size_t kSome = 256;

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
        if (!positions_.open(&body, size, count) || !reader_.open(&body, count) || body.left) return false;
        kept_ = static_cast<size_t>(count);
        frame->used = static_cast<uint64_t>(reader.data - frame->data);
        return true;
    }

    // Adds all values, after all positions have been read.
    bool add_all(float* out, size_t size) {
        if (positions_.all()) {
            reader_.add_run(out, 0, size);
            return true;
        }
        std::unique_ptr<uint32_t[]> positions(new (std::nothrow) uint32_t[kept_]);
        size_t found;
        if (!positions || !positions_.next(positions.get(), kept_, &found)) return false;
        // Positions are distinct, so that no two threads add to one element.
        const size_t parts = parts_of(found, kPartKept);
        in_parts(parts, [&](size_t part) {
            add_at(out, positions.get(), part_start(part, parts, found, kSome), part_start(part + 1, parts, found, kSome));
        });
        return true;
    }

    // Reads on until the next value is at or above `start`.
    bool skip_below(size_t start) {
        while (!positions_.all()) {
            if (!refill()) return false;
            if (!count_) break;
            while (next_ < count_ && at_[next_] < start) ++next_;
            if (next_ < count_) break;
        }
        return true;
    }

    // Adds the values at positions from `start` on and below `end` to sums[position - start]; all below `start` have been
    // added before.
    bool add_below(float* sums, size_t start, size_t end) {
        if (positions_.all()) {
            reader_.add_run(sums, start, end - start);
            return true;
        }
        for (;;) {
            size_t next = next_;
            for (; next < count_ && at_[next] < end; ++next) sums[at_[next] - start] += values_[next];
            next_ = next;
            if (next < count_) return true;
            if (!refill()) return false;
            if (!count_) return true;
        }
    }

   private:
    bool refill() {
        done_ += count_;
        next_ = 0;
        if (!positions_.next(at_, kSome, &count_)) return false;
        reader_.read(done_, count_, values_);
        return true;
    }

    // Adds the values number `start` to `end`. `out` is expected to lie in memory: the next elements are fetched while
    // some are worked on.
    void add_at(float* out, const uint32_t* positions, size_t start, size_t end) const {
        float values[kSome];
        for (; start < end; start += kSome) {
            const size_t until = std::min(end, start + kSome);
            for (size_t i = until; i < std::min(end, until + kSome); ++i) __builtin_prefetch(out + positions[i], 1);
            reader_.read(start, until - start, values);
            for (size_t i = start; i < until; ++i) out[positions[i]] += values[i - start];
        }
    }

    PositionReader positions_;
    ValueReader reader_;
    uint32_t at_[kSome];   // positions that have been read
    float values_[kSome];  // and the values there
    size_t kept_ = 0;
    size_t count_ = 0;   // how many of them there are
    size_t next_ = 0;    // the first of them that was not added yet
    uint64_t done_ = 0;  // values before these
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
    const size_t parts = parts_of(size, kPart);
    // Every thread reads the positions for itself, from the first on: they can be found in no other way.
    std::unique_ptr<FrameReader[]> readers(new (std::nothrow) FrameReader[parts * count]);
    if (!readers) return false;
    for (size_t each = 0; each < count; ++each) {
        if (!readers[each].open(&frames[each], size)) return false;
        for (size_t part = 1; part < parts; ++part) readers[part * count + each] = readers[each];
    }
    const auto settle = size >= kFar ? loops().settle_far : loops().settle;
    std::atomic<bool> right{true};
    in_parts(parts, [&](size_t part) {
        const size_t end = part_start(part + 1, parts, size, kBlock);
        size_t start = part_start(part, parts, size, kBlock);
        FrameReader* from = &readers[part * count];
        // Sums are made in a block that stays in the first level of cache, and only results go to memory.
        alignas(64) float sums[kBlock] = {};
        for (size_t each = 0; start > 0 && each < count; ++each) {
            if (!from[each].skip_below(start)) right = false;
        }
        for (; right && start < end; start += kBlock) {
            const size_t length = std::min(kBlock, end - start);
            for (size_t each = 0; each < count; ++each) {
                if (!from[each].add_below(sums, start, start + length)) right = false;
            }
            settle(sums, out + start, length, divisor);
        }
    });
    return right;
}

}  // namespace gradcomp
