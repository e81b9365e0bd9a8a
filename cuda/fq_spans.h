// Loops over contiguous memory for the CPU twin: spans of one scale, and rows of a tile of columns with a scale each.
// All take LANES elements at a time through registers, where half types are converted to float and back.
#ifndef ONNXQ_FQ_SPANS_H
#define ONNXQ_FQ_SPANS_H

#include "fq_vectors.h"

#include "fq_math.h"

#include <algorithm>

#define FQ_LANES inline __attribute__((always_inline))

namespace {

// Elements of a span (of one scale), columns of a tile, rows of a strip, and least elements of a task.
constexpr Index SPAN = 4096, TILE = 1024, STRIP = 128, TASK = 1 << 15;
// Elements of narrow rows taken as one.
constexpr Index NARROW = 512;
// Channels shorter than this are handled as columns, if enough rows share the scales: at least FEW, and a twelfth of the
// channel's length.
constexpr Index SHORT = 128, FEW = 4;
// Bytes. Larger outputs are written past the caches: little of them would still be there for the next reader, and a
// cache reads memory that it is about to overwrite. The size of the last cache is no guide: it may be shared.
constexpr Index STREAMED = 16 << 20;
// Prefetch distance in elements, in rows without gaps. Only when writing past the caches, which stops the processor's
// own prefetching.
constexpr Index NEAR = 2048;

Index up(Index count, Index size) { return (count + size - 1) / size; }

struct Sum {
    double scale = 0, cut = 0;
    void operator+=(const Sum &other) {
        scale += other.scale;
        cut += other.cut;
    }
};

template <class T>
using Arithmetic = typename FqArithmetic<T>::Type;

// ---- one register, from and to memory ----

// Keeps a load in place: where only some lanes are used, compilers merge it with the choice of lanes, and it then waits
// for a division before it reads memory.
template <class V>
FQ_LANES void load_now(V &v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
}

template <class A>
FQ_LANES Vector<A> read_register(const A *from) {
    Vector<A> v;
    std::memcpy(&v, from, sizeof(v));
    return v;
}

// Half types where the processor does not convert them.
template <class T>
FQ_LANES Floats each_register(const T *from) {
    float out[WIDTH<float>];
    for (int j = 0; j < WIDTH<float>; ++j) out[j] = fq_read(from[j]);
    return read_register(out);
}
template <class T>
FQ_LANES void each_register(Floats v, T *to) {
    float in[WIDTH<float>];
    std::memcpy(in, &v, sizeof(v));
    for (int j = 0; j < WIDTH<float>; ++j) to[j] = fq_write(in[j], T());
}

FQ_LANES Floats read_register(const FqBrain *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    return each_register(from);
#endif
}

FQ_LANES Floats read_register(const FqHalf *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return each_register(from);
#endif
}

// Destination of an output: none; memory; memory past the caches, if registers begin on multiples of their size.
enum class To { Nowhere, Memory, Past };

template <class V>
FQ_LANES void store(V v, void *to, To way) {
#if defined(__AVX__)
    if (way == To::Past) {
        if constexpr (sizeof(v) == 32)
            _mm256_stream_si256((__m256i *)to, (__m256i)v);
        else if constexpr (sizeof(v) == 16)
            _mm_stream_si128((__m128i *)to, (__m128i)v);
#if defined(__AVX512F__)
        else
            _mm512_stream_si512((__m512i *)to, (__m512i)v);
#endif
        return;
    }
#endif
    std::memcpy(to, &v, sizeof(v));
}

template <class A>
FQ_LANES void write_register(Vector<A> v, A *to, To way) {
    store(v, to, way);
}

FQ_LANES void write_register(Floats v, FqBrain *to, To way) {
#if defined(__AVX512F__)
    store(_mm512_cvtepi32_epi16((__m512i)fq_brain_bits((Bits)v)), to, way);
#elif defined(__AVX2__)
    const __m256i bits = (__m256i)fq_brain_bits((Bits)v);
    store(_mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)), to, way);
#else
    (void)way;
    each_register(v, to);
#endif
}

FQ_LANES void write_register(Floats v, FqHalf *to, To way) {
#if defined(__AVX512F__)
    store(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT), to, way);
#elif defined(__F16C__)
    store(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT), to, way);
#else
    (void)way;
    each_register(v, to);
#endif
}

// Makes writes past the caches visible to threads that wait for this one.
inline void settle(To way) {
#if defined(__AVX__)
    if (way == To::Past) _mm_sfence();
#endif
}

// ---- LANES elements ----

template <class A>
struct Lanes {
    Vector<A> part[PARTS<A>] = {};
    FQ_LANES void add(int at, Vector<A> more) { part[at] += more; }
    // All lanes of `more` from `first` on.
    FQ_LANES void add_from(Index first, const Lanes &more) {
        A from[LANES], to[LANES];
        std::memcpy(from, more.part, sizeof(from));
        std::memcpy(to, part, sizeof(to));
        for (Index j = 0; j < LANES; ++j) to[j] += j < first ? (A)0 : from[j];
        std::memcpy(part, to, sizeof(to));
    }
};

// One scale for all lanes.
template <class A>
struct Same {
    FqLevels<Vector<A>> levels;
    FQ_LANES explicit Same(const FqLevels<A> &one)
        : levels{one.scale + Vector<A>(), one.low + Vector<A>(), one.high + Vector<A>()} {}
    FQ_LANES const FqLevels<Vector<A>> &at(int) const { return levels; }
};

// A scale for each, in arrays that are filled up to whole LANES.
template <class A>
struct Columns {
    const A *scale, *low, *high;
    Columns from(Index k) const { return {scale + k, low + k, high + k}; }
    FQ_LANES FqLevels<Vector<A>> at(int part) const {
        const int k = part * WIDTH<A>;
        return {read_register(scale + k), read_register(low + k), read_register(high + k)};
    }
};

// Sums in such an array.
template <class A>
struct Summed {
    A *sums;
    FQ_LANES void add(int part, Vector<A> more) {
        A *to = sums + part * WIDTH<A>;
        write_register(read_register(to) + more, to, To::Memory);
    }
};

template <class T, class Levels>
FQ_LANES void forward_lanes(const T *x, T *y, const Levels &levels, To way) {
    constexpr int width = WIDTH<Arithmetic<T>>;
    for (int i = 0; i < PARTS<Arithmetic<T>>; ++i)
        write_register(fq_forward(read_register(x + i * width), levels.at(i)), y + i * width, way);
}

template <bool CLIP, bool SUMS, class T, class Levels, class Sums>
FQ_LANES void backward_lanes(const T *x, const T *dy, T *dx, const Levels &levels, Sums &scale, Sums &cut, To way) {
    constexpr int width = WIDTH<Arithmetic<T>>;
    for (int i = 0; i < PARTS<Arithmetic<T>>; ++i) {
        Vector<Arithmetic<T>> gradient = read_register(dy + i * width);
        load_now(gradient);
        const auto out = fq_backward(read_register(x + i * width), gradient, levels.at(i), CLIP);
        if (SUMS) scale.add(i, out.scale), cut.add(i, out.cut);
        if (way != To::Nowhere) write_register(out.dx, dx + i * width, way);
    }
}

// The same for fewer elements than LANES.
template <class T, class Levels>
FQ_LANES void forward_few(const T *x, T *y, Index count, const Levels &levels) {
    T in[LANES] = {}, out[LANES];
    std::memcpy(in, x, count * sizeof(T));
    forward_lanes(in, out, levels, To::Memory);
    std::memcpy(y, out, count * sizeof(T));
}

// Where dy is 0 nothing is added.
template <bool CLIP, bool SUMS, class T, class Levels, class Sums>
FQ_LANES void backward_few(const T *x, const T *dy, T *dx, Index count, const Levels &levels, Sums &scale, Sums &cut,
                           To way) {
    T in[LANES] = {}, gradient[LANES] = {}, out[LANES];
    std::memcpy(in, x, count * sizeof(T));
    std::memcpy(gradient, dy, count * sizeof(T));
    backward_lanes<CLIP, SUMS>(in, gradient, out, levels, scale, cut, To::Memory);
    if (way != To::Nowhere) std::memcpy(dx, out, count * sizeof(T));
}

// ---- one span: contiguous elements of one scale ----

template <class T>
void forward_span(const T *x, T *y, Index count, const FqLevels<Arithmetic<T>> &one, To way) {
    const Same<Arithmetic<T>> levels(one);
    const Index whole = count / LANES * LANES, last = count - LANES;
    for (Index k = 0; k < whole; k += LANES) forward_lanes(x + k, y + k, levels, way);
    if (whole < count && whole > 0)
        forward_lanes(x + last, y + last, levels, To::Memory);
    else if (whole < count)
        forward_few(x, y, count, levels);
}

template <class A>
inline double fold(const Lanes<A> &sums) {
    A lanes[LANES];
    std::memcpy(lanes, sums.part, sizeof(lanes));
    double half[LANES / 2];
    for (Index j = 0; j < LANES / 2; ++j) half[j] = (double)lanes[j] + (double)lanes[j + LANES / 2];
    for (Index j = 0; j < LANES / 4; ++j) half[j] += half[j + LANES / 4];
    for (Index j = 0; j < LANES / 8; ++j) half[j] += half[j + LANES / 8];
    return (half[0] + half[1]) + (half[2] + half[3]);
}

template <bool CLIP, bool SUMS, class T>
Sum backward_span(const T *x, const T *dy, T *dx, Index count, const FqLevels<Arithmetic<T>> &one, To way) {
    const Same<Arithmetic<T>> levels(one);
    Lanes<Arithmetic<T>> scale, cut;
    const Index whole = count / LANES * LANES, last = count - LANES;
    for (Index k = 0; k < whole; k += LANES)
        backward_lanes<CLIP, SUMS>(x + k, dy + k, dx + k, levels, scale, cut, way);
    if (whole < count && whole > 0) {
        Lanes<Arithmetic<T>> more, cuts;
        backward_lanes<CLIP, SUMS>(x + last, dy + last, dx + last, levels, more, cuts,
                                   way == To::Nowhere ? way : To::Memory);
        scale.add_from(whole - last, more);
        cut.add_from(whole - last, cuts);
    } else if (whole < count)
        backward_few<CLIP, SUMS>(x, dy, dx, count, levels, scale, cut, way);
    return SUMS ? Sum{fold(scale), fold(cut)} : Sum();
}

// ---- rows of a tile: contiguous elements, each with a scale of its own ----

// Prefetches the next LANES elements, which may lie beyond the end.
template <int WRITE, class T>
FQ_LANES void foresee(const T *from) {
    for (int at = 0; at < LANES * (int)sizeof(T); at += 64) __builtin_prefetch((const char *)from + at, WRITE);
}

// ahead: prefetch distance in elements; 0 where the processor prefetches by itself.
template <class T>
void forward_row(const T *x, T *y, Index count, Index ahead, Columns<Arithmetic<T>> columns, To way) {
    for (Index k = 0; k < count; k += LANES) {
        if (ahead) foresee<0>(x + k + ahead);
        if (ahead && way == To::Memory) foresee<1>(y + k + ahead);
        if (k + LANES <= count)
            forward_lanes(x + k, y + k, columns.from(k), way);
        else
            forward_few(x + k, y + k, count - k, columns.from(k));
    }
}

// Adds to scales and cuts, which are filled up to whole LANES too.
template <bool CLIP, bool SUMS, class T>
void backward_row(const T *x, const T *dy, T *dx, Index count, Index ahead, Columns<Arithmetic<T>> columns,
                  Arithmetic<T> *scales, Arithmetic<T> *cuts, To way) {
    for (Index k = 0; k < count; k += LANES) {
        if (ahead) {
            foresee<0>(x + k + ahead);
            foresee<0>(dy + k + ahead);
            if (way == To::Memory) foresee<1>(dx + k + ahead);
        }
        Summed<Arithmetic<T>> scale{scales + k}, cut{cuts + k};
        if (k + LANES <= count)
            backward_lanes<CLIP, SUMS>(x + k, dy + k, dx + k, columns.from(k), scale, cut, way);
        else
            backward_few<CLIP, SUMS>(x + k, dy + k, dx + k, count - k, columns.from(k), scale, cut, way);
    }
}

}  // namespace

#endif
