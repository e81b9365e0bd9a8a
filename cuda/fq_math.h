// The arithmetic of fake quantization of one element, forward and backward, and reading and writing of float16 and
// bfloat16. Compiled by nvcc, NVRTC and the host's compiler; no includes beside the call's struct.
//
// The order of operations is part of the contract: y equals QuantizeLinear and DequantizeLinear bit for bit, so
// x / s is a true division (x * (1 / s) differs at half-way points), rounding is half to even, and nothing here has the
// form a * b + c where a fused multiply-add could change y or dx. Never build with -ffast-math or --use_fast_math.
//
// Functions of the types A and U alone also take GCC's vectors, for which ?: chooses lane by lane.
#ifndef ONNXQ_FQ_MATH_H
#define ONNXQ_FQ_MATH_H

#include "fq_call.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FQ_FN __host__ __device__ __forceinline__
#else
#define FQ_FN inline __attribute__((always_inline))
#endif

struct FqHalf {
    unsigned short bits;
};
struct FqBrain {
    unsigned short bits;
};

// The type of the arithmetic on a stored type.
template <class T>
struct FqArithmetic {
    typedef float Type;
};
template <>
struct FqArithmetic<double> {
    typedef double Type;
};

#if defined(__CUDA_ARCH__)
FQ_FN float fq_rint(float v) { return rintf(v); }
FQ_FN double fq_rint(double v) { return rint(v); }
FQ_FN unsigned fq_bits(float v) { return __float_as_uint(v); }
FQ_FN float fq_float(unsigned bits) { return __uint_as_float(bits); }
#elif !defined(__CUDACC_RTC__)
FQ_FN float fq_rint(float v) { return __builtin_rintf(v); }
FQ_FN double fq_rint(double v) { return __builtin_rint(v); }
FQ_FN unsigned fq_bits(float v) {
    unsigned bits;
    __builtin_memcpy(&bits, &v, 4);
    return bits;
}
FQ_FN float fq_float(unsigned bits) {
    float v;
    __builtin_memcpy(&v, &bits, 4);
    return v;
}
#endif

FQ_FN float fq_read(float v) { return v; }
FQ_FN double fq_read(double v) { return v; }
FQ_FN float fq_read(FqBrain v) { return fq_float((unsigned)v.bits << 16); }
FQ_FN float fq_read(FqHalf v) {
#if defined(__CUDA_ARCH__)
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v.bits));
    return out;
#else
    // Exponent and mantissa moved into place, then scaled by 2**112: exact, subnormals included.
    const unsigned size = (unsigned)(v.bits & 0x7fff) << 13;
    const float finite = fq_float(size) * fq_float(0x77800000u);
    const unsigned bits = size >= 0x0f800000u ? (size | 0x7f800000u) : fq_bits(finite);
    return fq_float(bits | (unsigned)(v.bits & 0x8000) << 16);
#endif
}

// The upper half of a float's bits, rounded; U is unsigned, or a vector of it.
template <class U>
FQ_FN U fq_brain_bits(U bits) {
    const U rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, nan = U() + 0x7fffu;
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

// To nearest, ties to even; every NaN becomes 0x7fff. The second argument only chooses the type.
FQ_FN float fq_write(float v, float) { return v; }
FQ_FN double fq_write(double v, double) { return v; }
FQ_FN FqBrain fq_write(float v, FqBrain) {
    FqBrain out;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(v));
#else
    out.bits = (unsigned short)fq_brain_bits(fq_bits(v));
#endif
    return out;
}
FQ_FN FqHalf fq_write(float v, FqHalf) {
    FqHalf out;
#if defined(__CUDA_ARCH__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(v));
#else
    const unsigned sign = fq_bits(v) >> 16 & 0x8000u, size = fq_bits(v) & 0x7fffffffu;
    // Below 2**-14 the float adder rounds at float16's last subnormal bit; above, the carry of an integer addition does.
    const unsigned small = fq_bits(fq_float(size) + 0.5f) - 0x3f000000u;
    const unsigned normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    const unsigned huge = size > 0x7f800000u ? 0x7fffu : 0x7c00u;
    const unsigned bits = size >= 0x477ff000u ? huge : size < 0x38800000u ? small : normal;
    out.bits = size > 0x7f800000u ? 0x7fff : (unsigned short)(bits | sign);
#endif
    return out;
}

// One scale and the ends of its integer range, less the zero point: qmin - rint(z) and qmax - rint(z).
template <class A>
struct FqLevels {
    A scale, low, high;
};

// T is the type of x: a float16 model stores its scale as float16. Of a scale that is not above 0 every result is NaN,
// which shows in the loss; to raise an error a GPU would have to be waited for.
template <class T, class A>
FQ_FN FqLevels<A> fq_levels(A scale, A zero_point, int qmin, int qmax, unsigned flags) {
    const A zero = fq_rint(zero_point);
    FqLevels<A> levels;
    levels.scale = flags & FQ_SCALE_AS_X ? fq_read(fq_write(scale, T())) : scale;
    if (!(scale > 0)) levels.scale = (A)fq_float(0x7fc00000u);
    levels.low = (A)qmin - zero;
    levels.high = (A)qmax - zero;
    return levels;
}

// Comparisons with NaN are false: it passes both. Adding 0 turns -0 into the +0 that an integer level gives.
template <class A>
FQ_FN A fq_forward(A x, const FqLevels<A> &at) {
    A level = fq_rint(x / at.scale);
    level = level < at.low ? at.low : level;
    level = level > at.high ? at.high : level;
    return (level + A()) * at.scale;
}

// An element's part of the gradients: dx is complete; `scale` and `cut` are summed, and cut is then multiplied by -s.
template <class A>
struct FqGradient {
    A dx, scale, cut;
};

// clip: FQ_EDGE_CLIP. NaN counts as inside: dx passes, and the sum for the scale becomes NaN.
template <class A>
FQ_FN FqGradient<A> fq_backward(A x, A dy, const FqLevels<A> &at, bool clip) {
    const A exact = x / at.scale, level = fq_rint(exact), edge = clip ? exact : level;
    const auto below = clip ? edge <= at.low : edge < at.low;
    const auto above = clip ? edge >= at.high : edge > at.high;
    const auto outside = below | above;
    const A nothing = A();
    FqGradient<A> out;
    out.dx = outside ? nothing : dy;
    out.scale = dy * (below ? at.low : above ? at.high : level - exact);
    out.cut = outside ? dy : nothing;
    return out;
}

#endif
