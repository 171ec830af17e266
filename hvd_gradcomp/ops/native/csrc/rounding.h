// Arithmetic as IEEE says, whatever the thread was set to: TensorFlow lets its threads flush subnormal numbers to zero.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace gradcomp {

#if defined(__x86_64__)

class ExactArithmetic {
   public:
    ExactArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // round to nearest, nothing flushed, no traps
    ~ExactArithmetic() { _mm_setcsr(before_); }

   private:
    unsigned before_;
};

#elif defined(__aarch64__)

class ExactArithmetic {
   public:
    ExactArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~ExactArithmetic() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

   private:
    uint64_t before_;
};

#else

struct ExactArithmetic {
    ExactArithmetic() {}
};

#endif

}  // namespace gradcomp
