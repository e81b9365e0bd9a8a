// LANES elements in the vector registers of the host's processor: GCC's and clang's vector types, which know
// arithmetic, comparisons and ?: as scalars do, so that fq_math.h's functions take them. Read before it: it calls fq_rint.
#ifndef ONNXQ_FQ_VECTORS_H
#define ONNXQ_FQ_VECTORS_H

#include <cstring>

#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

typedef long long Index;

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
// Lanes of a sum. They decide its rounding, so they are the same for every width of registers.
constexpr int LANES = 32;

template <class A>
struct FqVector {
    typedef A Type __attribute__((vector_size(REGISTER)));
};
template <class A>
using Vector = typename FqVector<A>::Type;

// Elements of a register, and registers of LANES.
template <class A>
constexpr int WIDTH = REGISTER / (int)sizeof(A);
template <class A>
constexpr int PARTS = LANES / WIDTH<A>;

typedef Vector<float> Floats;
typedef Vector<double> Doubles;
typedef Vector<unsigned> Bits;

#if defined(__AVX512F__)
inline Floats fq_rint(Floats v) { return (Floats)_mm512_roundscale_ps((__m512)v, _MM_FROUND_CUR_DIRECTION); }
inline Doubles fq_rint(Doubles v) { return (Doubles)_mm512_roundscale_pd((__m512d)v, _MM_FROUND_CUR_DIRECTION); }
#elif defined(__AVX__)
inline Floats fq_rint(Floats v) { return (Floats)_mm256_round_ps((__m256)v, _MM_FROUND_CUR_DIRECTION); }
inline Doubles fq_rint(Doubles v) { return (Doubles)_mm256_round_pd((__m256d)v, _MM_FROUND_CUR_DIRECTION); }
#else
inline float rint_one(float v) { return __builtin_rintf(v); }
inline double rint_one(double v) { return __builtin_rint(v); }
template <class A, class V>
inline V rint_each(V v) {
    A lanes[WIDTH<A>];
    std::memcpy(lanes, &v, sizeof(v));
    for (A &lane : lanes) lane = rint_one(lane);
    std::memcpy(&v, lanes, sizeof(v));
    return v;
}
inline Floats fq_rint(Floats v) { return rint_each<float>(v); }
inline Doubles fq_rint(Doubles v) { return rint_each<double>(v); }
#endif

}  // namespace

#endif
