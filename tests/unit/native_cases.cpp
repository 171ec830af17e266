// The kernels without Python, against the cases of native_cases.py: for processors that are only emulated here. Every
// instruction set there is, with one thread and with three. Prints what differs; exits with 1 if anything does.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "frame.h"
#include "loops.h"
#include "rounding.h"
#include "select.h"
#include "threads.h"

using namespace gradcomp;

namespace {

struct Input {
    const char* at;

    template <typename T>
    std::vector<T> take(size_t count) {
        std::vector<T> found(count);
        std::memcpy(found.data(), at, count * sizeof(T));
        at += count * sizeof(T);
        return found;
    }
};

struct Case {
    size_t size, k, block_log2, kept, frame_bytes, checksum, workers;
    std::vector<float> x, residual, corrected;
    std::vector<int64_t> positions;
    std::vector<uint8_t> frame;
    std::vector<float> left, start, added, mean;

    explicit Case(Input* from) {
        const std::vector<uint64_t> numbers = from->take<uint64_t>(7);
        size = numbers[0], k = numbers[1], block_log2 = numbers[2], kept = numbers[3], frame_bytes = numbers[4];
        checksum = numbers[5], workers = numbers[6];
        x = from->take<float>(size), residual = from->take<float>(size), corrected = from->take<float>(size);
        positions = from->take<int64_t>(kept);
        frame = from->take<uint8_t>(frame_bytes);
        left = from->take<float>(size), start = from->take<float>(size);
        added = from->take<float>(size), mean = from->take<float>(size);
    }
};

int differences = 0;

template <typename T>
void compare(const char* what, const Case& each, const std::vector<T>& found, const std::vector<T>& expected) {
    if (found.size() == expected.size() && !std::memcmp(found.data(), expected.data(), found.size() * sizeof(T))) return;
    ++differences;
    std::printf("%s, %zu threads: %s differ(s) at size %zu, k %zu\n", loops().name, threads(), what, each.size, each.k);
}

void check(const Case& each) {
    const ExactArithmetic exact;
    std::vector<float> x = each.x;
    bool finite = false;
    const Candidates candidates = look(x.data(), each.residual.data(), each.size, each.k, &finite);
    compare("the sum", each, x, each.corrected);
    for (const Candidates* known : {&candidates, static_cast<const Candidates*>(nullptr)}) {
        std::vector<int64_t> positions(each.k);
        positions.resize(top_positions(x.data(), each.size, each.k, known, positions.data()));
        compare("positions", each, positions, each.positions);
    }
    std::vector<uint8_t> frame(16 * each.size + 256);
    frame.resize(encode_sparse8(x.data(), each.size, each.positions.data(), each.kept,
                                static_cast<int>(each.block_log2), frame.data(), frame.size()));
    compare("the frame", each, frame, each.frame);
    compare("the residual", each, x, each.left);
    std::vector<float> added = each.start;
    FrameBytes bytes{each.frame.data(), each.frame.size(), 0};
    if (!decode_add(&bytes, added.data(), each.size)) added.clear();
    compare("the decoded", each, added, each.added);
    std::vector<float> mean(each.size, 7.0f);
    std::vector<FrameBytes> frames(each.workers, bytes);
    if (!decode_mean(frames.data(), frames.size(), mean.data(), each.size, static_cast<float>(each.workers))) mean.clear();
    compare("the mean", each, mean, each.mean);
    frame.resize((each.frame.size() + 3) / 4 * 4);
    const std::vector<uint64_t> sum{loops().checksum(frame.data(), frame.size() / 4, 0)};
    compare("the checksum", each, sum, {each.checksum});
}

}  // namespace

int main(int, char** arguments) {
    std::ifstream file(arguments[1], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    for (const Loops* const* set = available_loops(); *set; ++set) {
        use_loops((*set)->name);
        for (const size_t count : {1, 3}) {
            use_threads(count);
            Input input{bytes.data()};
            const size_t cases = input.take<uint64_t>(1)[0];
            for (size_t i = 0; i < cases; ++i) check(Case(&input));
            std::printf("%s, %zu threads: %zu cases\n", loops().name, count, cases);
        }
    }
    std::printf(differences ? "%d differences\n" : "the same bytes\n", differences);
    return differences != 0;
}
