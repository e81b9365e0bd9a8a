// Loops over contiguous memory for the CPU twin, which the compiler turns into vector code: spans of one scale, rows of
// a tile of columns with a scale each, and the same for half types by way of float buffers.
#ifndef ONNXQ_FQ_SPANS_H
#define ONNXQ_FQ_SPANS_H

#include "fq_math.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

typedef long long Index;

// Elements of a span (of one scale), columns of a tile, rows of a strip, lanes of a sum, and a task's least elements.
constexpr Index SPAN = 4096, TILE = 1024, STRIP = 128, LANES = 32, BUFFER = 512, TASK = 1 << 15;
// Elements of narrow rows taken as one, and columns of a tile between two requests for memory ahead: the processor
// does not foresee that what follows a piece of a wide row lies a row further on.
constexpr Index NARROW = 512, PIECE = 64;
// Channels shorter than this are handled as columns, if there are rows enough to share their scales.
constexpr Index SHORT = 48, FEW = 4;

Index up(Index count, Index size) { return (count + size - 1) / size; }

struct Sum {
    double scale = 0, cut = 0;
    void operator+=(const Sum &other) {
        scale += other.scale;
        cut += other.cut;
    }
};

// ---- half types to float and back ----

template <class T>
void widen(const T *from, float *to, Index count) {
    Index k = 0;
#if defined(__AVX512F__)
    if (__is_same(T, FqHalf))
        for (; k + 16 <= count; k += 16)
            _mm512_storeu_ps(to + k, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + k))));
#elif defined(__F16C__)
    if (__is_same(T, FqHalf))
        for (; k + 8 <= count; k += 8)
            _mm256_storeu_ps(to + k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + k))));
#endif
    for (; k < count; ++k) to[k] = fq_read(from[k]);
}

template <class T>
void narrow(const float *from, T *to, Index count) {
    Index k = 0;
#if defined(__AVX512F__)
    if (__is_same(T, FqHalf))
        for (; k + 16 <= count; k += 16)
            _mm256_storeu_si256((__m256i *)(to + k), _mm512_cvtps_ph(_mm512_loadu_ps(from + k), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    if (__is_same(T, FqHalf))
        for (; k + 8 <= count; k += 8)
            _mm_storeu_si128((__m128i *)(to + k), _mm256_cvtps_ph(_mm256_loadu_ps(from + k), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; k < count; ++k) to[k] = fq_write(from[k], T());
}

// ---- one span: contiguous elements of one scale ----

template <class A>
void forward_span(const A *__restrict x, A *__restrict y, Index count, const FqLevels<A> levels) {
    for (Index k = 0; k < count; ++k) y[k] = fq_forward(x[k], levels);
}

// LANES elements; the first `skip` were added before.
template <bool CLIP, class A>
inline __attribute__((always_inline)) void backward_lanes(const A *__restrict x, const A *__restrict dy,
                                                          A *__restrict dx, const FqLevels<A> levels,
                                                          A *__restrict scale, A *__restrict cut, int skip) {
    for (int j = 0; j < LANES; ++j) {
        const FqGradient<A> out = fq_backward(x[j], dy[j], levels, CLIP);
        dx[j] = out.dx;
        scale[j] += j < skip ? (A)0 : out.scale;
        cut[j] += j < skip ? (A)0 : out.cut;
    }
}

template <class A>
inline double fold(const A *lanes) {
    double half[LANES / 2];
    for (Index j = 0; j < LANES / 2; ++j) half[j] = (double)lanes[j] + (double)lanes[j + LANES / 2];
    for (Index j = 0; j < LANES / 4; ++j) half[j] += half[j + LANES / 4];
    for (Index j = 0; j < LANES / 8; ++j) half[j] += half[j + LANES / 8];
    return (half[0] + half[1]) + (half[2] + half[3]);
}

template <bool CLIP, class A>
Sum backward_span(const A *__restrict x, const A *__restrict dy, A *__restrict dx, Index count,
                  const FqLevels<A> levels) {
    A scale[LANES] = {}, cut[LANES] = {};
    Index k = 0;
    for (; k + LANES <= count; k += LANES) backward_lanes<CLIP>(x + k, dy + k, dx + k, levels, scale, cut, 0);
    if (k < count && k > 0) {
        const Index last = count - LANES;
        backward_lanes<CLIP>(x + last, dy + last, dx + last, levels, scale, cut, (int)(k - last));
    } else if (k < count) {
        // Where dy is 0 nothing is added.
        A in[LANES] = {}, gradient[LANES] = {}, out[LANES];
        std::memcpy(in, x, count * sizeof(A));
        std::memcpy(gradient, dy, count * sizeof(A));
        backward_lanes<CLIP>(in, gradient, out, levels, scale, cut, 0);
        std::memcpy(dx, out, count * sizeof(A));
    }
    return Sum{fold(scale), fold(cut)};
}

// ---- one row of a tile: contiguous elements, each with a scale of its own ----

template <class A>
struct Columns {
    const A *scale, *low, *high;
    FqLevels<A> at(Index k) const { return {scale[k], low[k], high[k]}; }
    Columns from(Index k) const { return {scale + k, low + k, high + k}; }
};

template <class A>
void forward_row(const A *__restrict x, A *__restrict y, Index count, const Columns<A> columns) {
    for (Index k = 0; k < count; ++k) y[k] = fq_forward(x[k], columns.at(k));
}

template <bool CLIP, class A>
void backward_row(const A *__restrict x, const A *__restrict dy, A *__restrict dx, Index count,
                  const Columns<A> columns, A *__restrict scale, A *__restrict cut) {
    for (Index k = 0; k < count; ++k) {
        const FqGradient<A> out = fq_backward(x[k], dy[k], columns.at(k), CLIP);
        dx[k] = out.dx;
        scale[k] += out.scale;
        cut[k] += out.cut;
    }
}

// body(k, count) for the pieces of a row, each after asking for what lies `ahead` elements behind it, which may be
// beyond the end of the tensors; the whole row at once if ahead is 0.
template <class A, class Body>
void in_pieces(std::initializer_list<const A *> tensors, Index count, Index ahead, Body body) {
    if (ahead == 0) return body(0, count);
    for (Index k = 0; k < count; k += PIECE) {
        for (const A *tensor : tensors)
            for (Index line = 0; line < PIECE; line += 64 / (Index)sizeof(A))
                __builtin_prefetch(tensor + k + ahead + line);
        body(k, std::min(PIECE, count - k));
    }
}

// ---- the same for any type of tensor, up to SPAN elements; dx may be null ----

template <class T>
struct Typed {
    typedef typename FqArithmetic<T>::Type A;

    template <class Body>
    static void forward(const T *x, T *y, Index count, Body body) {
        A in[BUFFER], out[BUFFER];
        for (Index k = 0; k < count; k += BUFFER) {
            const Index part = std::min(BUFFER, count - k);
            widen(x + k, in, part);
            body(in, out, k, part);
            narrow(out, y + k, part);
        }
    }

    template <class Body>
    static void backward(const T *x, const T *dy, T *dx, Index count, Body body) {
        A in[BUFFER], gradient[BUFFER], out[BUFFER];
        for (Index k = 0; k < count; k += BUFFER) {
            const Index part = std::min(BUFFER, count - k);
            widen(x + k, in, part);
            widen(dy + k, gradient, part);
            body(in, gradient, out, k, part);
            if (dx) narrow(out, dx + k, part);
        }
    }
};

template <class A>
struct Direct {
    template <class Body>
    static void forward(const A *x, A *y, Index count, Body body) {
        body(x, y, 0, count);
    }
    template <class Body>
    static void backward(const A *x, const A *dy, A *dx, Index count, Body body) {
        A unwanted[SPAN];
        body(x, dy, dx ? dx : unwanted, 0, count);
    }
};
template <>
struct Typed<float> : Direct<float> {
    typedef float A;
};
template <>
struct Typed<double> : Direct<double> {
    typedef double A;
};

}  // namespace

#endif
