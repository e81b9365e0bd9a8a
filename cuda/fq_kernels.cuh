// The CUDA kernels; geometry comes from onnxq/kernels/launch.py, arithmetic from fq_math.h. See README.md.
#ifndef ONNXQ_FQ_KERNELS_CUH
#define ONNXQ_FQ_KERNELS_CUH

#include "fq_math.h"

enum { FQ_THREADS = 256, FQ_VECTORS = 2 };
typedef long long FqIndex;

// n / d. n below 2**32: exact as n * d < 2**64. Above, the estimate is at most 1 too large (n < 2**63).
__device__ __forceinline__ FqIndex fq_divide(FqIndex n, const FqDivisor &by) {
    if (by.magic == 0) return n;
    FqIndex quotient = (FqIndex)__umul64hi((unsigned long long)n, by.magic);
    if (n >> 32 && quotient * (FqIndex)by.value > n) --quotient;
    return quotient;
}

template <class T>
struct FqVector {
    enum { SIZE = 16 / sizeof(T) };
    union {
        uint4 raw;
        T item[SIZE];
    };
    __device__ __forceinline__ FqVector() {}
    __device__ __forceinline__ void load(const T *from) { raw = *(const uint4 *)from; }
    __device__ __forceinline__ void store(T *to) const { *(uint4 *)to = raw; }
};

__device__ __forceinline__ bool fq_aligned(const void *a, const void *b, const void *c) {
    return (((size_t)a | (size_t)b | (size_t)c) & 15) == 0;
}

template <class T>
struct FqTensors {
    typedef typename FqArithmetic<T>::Type A;
    const T *x, *dy;
    T *y;
    const A *scale, *zero_point;

    __device__ __forceinline__ explicit FqTensors(const FqCall &call)
        : x((const T *)call.x), dy((const T *)call.dy), y((T *)call.y), scale((const A *)call.scale),
          zero_point((const A *)call.zero_point) {}

    __device__ __forceinline__ FqLevels<A> levels(const FqCall &call, FqIndex index) const {
        const A zero = zero_point ? zero_point[index] : (A)0;
        return fq_levels<T>(scale[index], zero, call.qmin, call.qmax, call.flags);
    }
};

// ---- elementwise: x -> y, and x, dy -> dx ----

// The scale of any element.
__device__ __forceinline__ FqIndex fq_scale_of(const FqCall &call, FqIndex element) {
    const FqIndex row = fq_divide(element, call.by_inner), column = element - row * call.inner;
    const FqIndex outer = fq_divide(row, call.by_channels), channel = row - outer * call.channels;
    if (!call.block) return channel;
    return (outer * (FqIndex)call.by_blocks.value + fq_divide(channel, call.by_block)) * call.inner + column;
}

// Order of scales along memory: `left` more elements of this one, then `period` elements of each next one.
struct FqPlace {
    FqIndex scale, left, period, wrap;
};

// False where blocks end early or columns of blocks do not fill vectors: there every element computes its own scale.
template <class T>
__device__ __forceinline__ bool fq_regular(const FqCall &call) {
    if (!call.block) return true;
    return call.inner == 1 ? call.channels % call.block == 0 : call.inner % FqVector<T>::SIZE == 0;
}

__device__ __forceinline__ FqPlace fq_place(const FqCall &call, FqIndex element) {
    FqPlace place;
    place.scale = fq_scale_of(call, element);
    place.wrap = call.scales;
    const FqDivisor &by = call.block ? call.by_block : call.by_inner;
    place.period = call.block && call.inner > 1 ? 1 : (FqIndex)by.value;
    place.left = place.period > 1 ? place.period - (element - fq_divide(element, by) * place.period) : 1;
    return place;
}

// BACK: x, dy -> dx, else x -> y; in place of x.
template <bool BACK, class T, class A>
__device__ __forceinline__ void fq_element(const FqCall &call, T &x, T dy, const FqLevels<A> &levels) {
    x = fq_write(BACK ? fq_backward(fq_read(x), fq_read(dy), levels, call.flags & FQ_EDGE_CLIP).dx
                      : fq_forward(fq_read(x), levels), T());
}

template <bool BACK, class T>
__device__ __forceinline__ void fq_scalar(const FqCall &call, const FqTensors<T> &at, FqIndex element) {
    T x = at.x[element];
    fq_element<BACK>(call, x, BACK ? at.dy[element] : T(), at.levels(call, fq_scale_of(call, element)));
    at.y[element] = x;
}

// A block takes FQ_VECTORS vectors per thread: all loads first, so that enough bytes are in flight.
template <class T, bool BACK>
__device__ __forceinline__ void fq_elementwise(const FqCall &call) {
    typedef typename FqArithmetic<T>::Type A;
    enum { SIZE = FqVector<T>::SIZE };
    const FqTensors<T> at(call);
    const FqIndex share = FQ_THREADS * FQ_VECTORS * SIZE, begin = blockIdx.x * share;
    const bool vectors = fq_aligned(at.x, at.y, BACK ? at.dy : 0) && fq_regular<T>(call);
    if (!vectors || begin + share > call.count) {
#pragma unroll 1
        for (int k = 0; k < FQ_VECTORS * SIZE; ++k) {
            const FqIndex element = begin + k * FQ_THREADS + threadIdx.x;
            if (element < call.count) fq_scalar<BACK>(call, at, element);
        }
        return;
    }
    FqVector<T> x[FQ_VECTORS], dy[FQ_VECTORS];
#pragma unroll
    for (int v = 0; v < FQ_VECTORS; ++v) {
        const FqIndex first = begin + (v * FQ_THREADS + threadIdx.x) * SIZE;
        x[v].load(at.x + first);
        if (BACK) dy[v].load(at.dy + first);
    }
    FqLevels<A> levels = at.levels(call, 0);
    const bool many = call.scales > 1;
#pragma unroll
    for (int v = 0; v < FQ_VECTORS; ++v) {
        const FqIndex first = begin + (v * FQ_THREADS + threadIdx.x) * SIZE;
        FqPlace place = {0, 0, SIZE, 1};
        if (many) place = fq_place(call, first);
        // No branch between elements where a vector lies in one scale, or has whole scales of one element.
        if (place.period % SIZE == 0) {
            if (many) levels = at.levels(call, place.scale);
#pragma unroll
            for (int k = 0; k < SIZE; ++k) fq_element<BACK>(call, x[v].item[k], dy[v].item[k], levels);
        } else if (place.period == 1 && place.wrap % SIZE == 0) {
#pragma unroll
            for (int k = 0; k < SIZE; ++k)
                fq_element<BACK>(call, x[v].item[k], dy[v].item[k], at.levels(call, place.scale + k));
        } else {
            levels = at.levels(call, place.scale);
#pragma unroll
            for (int k = 0; k < SIZE; ++k) {
                if (place.left == 0) {
                    place.scale = place.scale + 1 == place.wrap ? 0 : place.scale + 1;
                    place.left = place.period;
                    levels = at.levels(call, place.scale);
                }
                --place.left;
                fq_element<BACK>(call, x[v].item[k], dy[v].item[k], levels);
            }
        }
        x[v].store(at.y + first);
    }
}

// ---- sums for the gradients of scale and zero point ----

struct FqSum {
    double scale, cut;
};

template <class A>
__device__ __forceinline__ void fq_result(const FqCall &call, FqIndex index, const FqSum &sum) {
    // The caller's scale as given; y was computed with the one rounded to x's type.
    if (call.dscale) ((A *)call.dscale)[index] = (A)(call.grad_scale * sum.scale);
    if (call.dzero_point)
        ((A *)call.dzero_point)[index] =
            (A)(call.zero_point_grad_scale * -(double)((const A *)call.scale)[index] * sum.cut);
}

// A partial sum, or the whole where a scale has but one.
template <class A>
__device__ __forceinline__ void fq_keep(const FqCall &call, FqIndex slot, FqIndex index, const FqSum &sum) {
    if (call.partial)
        ((FqSum *)call.partial)[slot] = sum;
    else
        fq_result<A>(call, index, sum);
}

// Thread by thread in halves, `stride` apart; the sum of a column ends in its first thread. All threads must call it.
__device__ __forceinline__ FqSum fq_tree(FqSum mine, int lane, int lanes, int stride) {
    __shared__ double scale[FQ_THREADS], cut[FQ_THREADS];
    const int me = threadIdx.x;
    scale[me] = mine.scale;
    cut[me] = mine.cut;
    __syncthreads();
    for (int half = lanes / 2; half > 0; half /= 2) {
        if (lane < half) {
            scale[me] += scale[me + half * stride];
            cut[me] += cut[me + half * stride];
        }
        __syncthreads();
    }
    return FqSum{scale[me], cut[me]};
}

template <class T, class A>
__device__ __forceinline__ void fq_add(const FqCall &call, A &scale, A &cut, T &x, T dy, const FqLevels<A> &levels) {
    const FqGradient<A> gradient = fq_backward(fq_read(x), fq_read(dy), levels, call.flags & FQ_EDGE_CLIP);
    scale += gradient.scale;
    cut += gradient.cut;
    x = fq_write(gradient.dx, T());
}

// ---- rows: a group of `lanes` threads adds up contiguous runs of one scale ----

struct FqSegment {
    FqIndex start, length, runs, scale, slot;
};

__device__ __forceinline__ FqSegment fq_segment(const FqCall &call, FqIndex index) {
    FqSegment out;
    if (call.block) {
        const FqIndex outer = fq_divide(index, call.by_blocks);
        const FqIndex begin = (index - outer * (FqIndex)call.by_blocks.value) * call.block, left = call.channels - begin;
        out.start = outer * call.channels + begin;
        out.length = left < call.block ? left : call.block;
        out.runs = 1;
        out.scale = out.slot = index;
    } else if (call.by_pieces.value > 1) {
        const FqIndex row = fq_divide(index, call.by_pieces), piece = index - row * (FqIndex)call.by_pieces.value;
        const FqIndex outer = fq_divide(row, call.by_channels), begin = piece * call.run, left = call.inner - begin;
        out.start = row * call.inner + begin;
        out.length = left < call.run ? left : call.run;
        out.runs = 1;
        out.scale = row - outer * call.channels;
        out.slot = out.scale * call.splits + outer * (FqIndex)call.by_pieces.value + piece;
    } else {
        const FqIndex strip = fq_divide(index, call.by_channels), outer = strip * call.runs, left = call.outer - outer;
        out.scale = index - strip * call.channels;
        out.start = (outer * call.channels + out.scale) * call.inner;
        out.length = call.inner;
        out.runs = left < call.runs ? left : call.runs;
        out.slot = out.scale * call.splits + strip;
    }
    return out;
}

template <class T>
__device__ __forceinline__ FqSum fq_segment_sum(const FqCall &call, const FqSegment &segment, int lane) {
    typedef typename FqArithmetic<T>::Type A;
    enum { SIZE = FqVector<T>::SIZE };
    const FqTensors<T> at(call);
    const FqLevels<A> levels = at.levels(call, segment.scale);
    const int lanes = call.lanes;
    A scale = 0, cut = 0;
    // Offset k of the segment lies at k in its only run, or in run k / inner.
    const FqIndex gap = segment.runs > 1 ? (call.channels - 1) * call.inner : 0, total = segment.length * segment.runs;
    // Runs of whole vectors only, or one run, whose ends are then taken one by one.
    const bool whole = segment.runs == 1 || ((call.inner | gap) % SIZE == 0 && segment.start % SIZE == 0);
    FqIndex head = total, tail = total;
    if (whole && fq_aligned(at.x, at.dy, at.y)) {
        head = (SIZE - segment.start % SIZE) % SIZE;
        head = head < total ? head : total;
        tail = head + (total - head) / SIZE * SIZE;
    }
#pragma unroll 2
    for (FqIndex k = head + (FqIndex)lane * SIZE; k < tail; k += (FqIndex)lanes * SIZE) {
        const FqIndex first = segment.start + k + (gap ? fq_divide(k, call.by_inner) * gap : 0);
        FqVector<T> x, dy;
        x.load(at.x + first);
        dy.load(at.dy + first);
#pragma unroll
        for (int j = 0; j < SIZE; ++j) fq_add(call, scale, cut, x.item[j], dy.item[j], levels);
        if (at.y) x.store(at.y + first);
    }
#pragma unroll 4
    for (FqIndex k = lane; k < head + (total - tail); k += lanes) {
        const FqIndex offset = k < head ? k : k - head + tail;
        const FqIndex element = segment.start + offset + (gap ? fq_divide(offset, call.by_inner) * gap : 0);
        T x = at.x[element];
        fq_add(call, scale, cut, x, at.dy[element], levels);
        if (at.y) at.y[element] = x;
    }
    return FqSum{(double)scale, (double)cut};
}

template <class T>
__device__ __forceinline__ void fq_rows(const FqCall &call) {
    typedef typename FqArithmetic<T>::Type A;
    const int lanes = call.lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    const FqIndex index = (FqIndex)blockIdx.x * (FQ_THREADS / lanes) + group;
    FqSum sum = {0, 0};
    FqSegment segment = {0, 0, 0, 0, 0};
    if (index < call.segments) {
        segment = fq_segment(call, index);
        sum = fq_segment_sum<T>(call, segment, lane);
    }
    sum = fq_tree(sum, lane, lanes, 1);
    if (lane != 0 || index >= call.segments) return;
    fq_keep<A>(call, segment.slot, segment.scale, sum);
}

// ---- cols: a thread goes down 16 bytes of columns, `lanes` threads side by side, the others on the next rows ----

template <class T>
__device__ __forceinline__ void fq_cols(const FqCall &call) {
    typedef typename FqArithmetic<T>::Type A;
    enum { SIZE = FqVector<T>::SIZE };
    __shared__ A scales[SIZE][FQ_THREADS], cuts[SIZE][FQ_THREADS];
    const FqTensors<T> at(call);
    const int lanes = call.lanes, steps = FQ_THREADS / lanes, lane = threadIdx.x % lanes, step = threadIdx.x / lanes;
    const FqIndex strip = fq_divide(blockIdx.x, call.by_pieces), width = call.run;
    const FqIndex left = (blockIdx.x - strip * (FqIndex)call.by_pieces.value) * lanes * SIZE;
    FqIndex row, rows;
    if (call.block) {
        const FqIndex outer = fq_divide(strip, call.by_blocks);
        const FqIndex begin = (strip - outer * (FqIndex)call.by_blocks.value) * call.block;
        row = outer * call.channels + begin;
        rows = call.channels - begin;
    } else {
        row = strip * call.runs;
        rows = call.outer - row;
    }
    rows = rows < call.runs ? rows : call.runs;

    // Vectors where every row begins at a multiple of 16 bytes, else neighbouring threads take neighbouring columns.
    const bool vectors = width % SIZE == 0 && fq_aligned(at.x, at.dy, at.y);
    const FqIndex column = left + (vectors ? lane * SIZE : lane), apart = vectors ? 1 : lanes;
    FqLevels<A> levels[SIZE];
    A scale[SIZE], cut[SIZE];
#pragma unroll
    for (int k = 0; k < SIZE; ++k) {
        const FqIndex mine = column + k * apart, safe = mine < width ? mine : 0;
        levels[k] = at.levels(call, call.block ? strip * width + safe : fq_divide(safe, call.by_inner));
        scale[k] = cut[k] = 0;
    }
    if (vectors && column < width) {
#pragma unroll 2
        for (FqIndex r = step; r < rows; r += steps) {
            const FqIndex first = (row + r) * width + column;
            FqVector<T> x, dy;
            x.load(at.x + first);
            dy.load(at.dy + first);
#pragma unroll
            for (int k = 0; k < SIZE; ++k) fq_add(call, scale[k], cut[k], x.item[k], dy.item[k], levels[k]);
            if (at.y) x.store(at.y + first);
        }
    } else if (!vectors) {
        for (FqIndex r = step; r < rows; r += steps) {
#pragma unroll
            for (int k = 0; k < SIZE; ++k) {
                const FqIndex mine = column + k * apart, element = (row + r) * width + mine;
                if (mine >= width) continue;
                T x = at.x[element];
                fq_add(call, scale[k], cut[k], x, at.dy[element], levels[k]);
                if (at.y) at.y[element] = x;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < SIZE; ++k) {
        scales[k][threadIdx.x] = scale[k];
        cuts[k][threadIdx.x] = cut[k];
    }
    __syncthreads();
    // Now a thread per column of the tile adds up the rows' threads, in their order.
    for (int mine = threadIdx.x; mine < lanes * SIZE; mine += FQ_THREADS) {
        const int k = vectors ? mine % SIZE : mine / lanes, from = vectors ? mine / SIZE : mine % lanes;
        const FqIndex at_column = left + mine;
        if (at_column >= width) break;
        FqSum sum = {0, 0};
        for (int s = 0; s < steps; ++s) {
            sum.scale += scales[k][s * lanes + from];
            sum.cut += cuts[k][s * lanes + from];
        }
        fq_keep<A>(call, strip * width + at_column, call.block ? strip * width + at_column : at_column, sum);
    }
}

// ---- finish: the partial sums of a scale, in fixed order ----

template <class A>
__device__ __forceinline__ void fq_finish(const FqCall &call) {
    const int lanes = call.lanes, width = FQ_THREADS / lanes, lane = threadIdx.x / width;
    const FqIndex index = (FqIndex)blockIdx.x * width + threadIdx.x % width;
    FqSum sum = {0, 0};
    if (index < call.scales) {
        const FqSum *partial = (const FqSum *)call.partial;
        const bool flat = call.partial_inner == 1;
        for (FqIndex j = flat ? lane : 0; j < call.partial_outer; j += flat ? lanes : 1)
            for (FqIndex k = flat ? 0 : lane; k < call.partial_inner; k += lanes) {
                const FqSum one = partial[(j * call.scales + index) * call.partial_inner + k];
                sum.scale += one.scale;
                sum.cut += one.cut;
            }
    }
    sum = fq_tree(sum, lane, lanes, width);
    if (lane == 0 && index < call.scales) fq_result<A>(call, index, sum);
}

// ---- entry points ----

#define FQ_KERNEL extern "C" __global__ void __launch_bounds__(FQ_THREADS)

#define FQ_KERNELS(NAME, T)                                                                 \
    FQ_KERNEL fq_forward_##NAME(const FqCall call) { fq_elementwise<T, false>(call); }      \
    FQ_KERNEL fq_dx_##NAME(const FqCall call) { fq_elementwise<T, true>(call); }            \
    FQ_KERNEL fq_rows_##NAME(const FqCall call) { fq_rows<T>(call); }                       \
    FQ_KERNEL fq_cols_##NAME(const FqCall call) { fq_cols<T>(call); }

FQ_KERNELS(f32, float)
FQ_KERNELS(f16, FqHalf)
FQ_KERNELS(bf16, FqBrain)
FQ_KERNELS(f64, double)
FQ_KERNEL fq_finish_f32(const FqCall call) { fq_finish<float>(call); }
FQ_KERNEL fq_finish_f64(const FqCall call) { fq_finish<double>(call); }

#endif
