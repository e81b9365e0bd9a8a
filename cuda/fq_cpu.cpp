// The CPU twin: the arithmetic of fq_math.h over spans that the compiler turns into vector code, threads by OpenMP.
//
// Work is cut up by shape alone and sums are added in fixed order: float in 32 lanes over a span, double above, so
// results are the same bits for any number of threads and any vector width.
#include "fq_spans.h"

#include <algorithm>
#include <new>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

// ---- a whole tensor ----

template <class T>
struct Pass {
    typedef typename FqArithmetic<T>::Type A;
    const FqCall &call;
    const T *x, *dy;
    T *y;  // without an output dy, which is not written: only so that pointers may be computed
    const To way;
    const bool clip;
    int threads = 1;

    explicit Pass(const FqCall &from)
        : call(from), x((const T *)from.x), dy((const T *)from.dy), y((T *)(from.y ? from.y : from.dy)),
          way(to(from.y)),
          clip((from.flags & FQ_EDGE_CLIP) != 0) {
#if defined(_OPENMP)
        if (call.outer * call.channels * call.inner >= 2 * TASK)
            threads = call.threads > 0 ? call.threads : omp_get_max_threads();
#endif
    }

    FqLevels<A> levels(Index index) const {
        const A zero = call.zero_point ? ((const A *)call.zero_point)[index] : (A)0;
        return fq_levels<T>(((const A *)call.scale)[index], zero, call.qmin, call.qmax, call.flags);
    }

    void result(Index index, const Sum &sum) const {
        if (call.dscale) ((A *)call.dscale)[index] = (A)(call.grad_scale * sum.scale);
        if (call.dzero_point)
            ((A *)call.dzero_point)[index] =
                (A)(call.zero_point_grad_scale * -(double)((const A *)call.scale)[index] * sum.cut);
    }

    bool empty() const { return call.outer * call.channels * call.inner == 0; }
    bool wants_sums() const { return call.dscale || call.dzero_point; }
    Index blocks() const { return call.block ? up(call.channels, call.block) : 1; }

    void forward() const {
        if (empty()) return;
        if (by_columns())
            each_tile([&](const Tile &tile) {
                for (Index row = 0; row < tile.rows; ++row) {
                    const Index start = tile.start + row * tile.stride;
                    forward_row(x + start, y + start, tile.filled(row), tile.ahead, tile.columns, way);
                }
            });
        else
            each_span([&](const Span &span) {
                forward_span(x + span.start, y + span.start, span.count, levels(span.scale), way);
            });
    }

    void backward() const {
        if (empty()) {
            const Index scales = call.block ? call.outer * blocks() * call.inner : call.channels;
            for (Index index = 0; index < scales; ++index) result(index, Sum());
            return;
        }
        if (wants_sums())
            clip ? backward<true, true>() : backward<false, true>();
        else
            clip ? backward<true, false>() : backward<false, false>();
    }

    template <bool CLIP, bool SUMS>
    void backward() const {
        by_columns() ? backward_columns<CLIP, SUMS>() : backward_spans<CLIP, SUMS>();
    }

    // Past the caches where an output is too large for them, and all its pieces begin on a line.
    To to(const void *output) const {
        const Index line = 64 / (Index)sizeof(T), size = call.outer * call.channels * call.inner;
        if (!output) return To::Nowhere;
        if (size * (Index)sizeof(T) < STREAMED || (size_t)output % 64 != 0) return To::Memory;
        const Index piece = by_columns() ? width() : call.block ? call.block : call.inner;
        return piece % line == 0 && (!call.block || call.channels % line == 0) ? To::Past : To::Memory;
    }

    // ---- spans: pieces of runs of one scale ----

    struct Span {
        Index start, count, scale, slot;
        bool last;  // of its run
    };

    Index longest() const { return call.block ? std::min(call.block, call.channels) : call.inner; }
    Index pieces() const { return up(longest(), SPAN); }

    // Calls body(span) for every span; the spans of one task in order, and of a block's run always in one task.
    template <class Body>
    void each_span(Body body) const {
        const Index per_run = pieces(), runs = call.outer * (call.block ? blocks() : call.channels), spans = runs * per_run;
        Index together = std::max<Index>(1, TASK / std::min(longest(), SPAN));
        if (call.block) together = up(together, per_run) * per_run;
        const Index tasks = up(spans, together);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (Index task = 0; task < tasks; ++task) {
            for (Index slot = task * together; slot < std::min(spans, (task + 1) * together); ++slot) {
                const Index run = slot / per_run, begin = (slot - run * per_run) * SPAN;
                Index start, length;
                if (call.block) {
                    const Index outer = run / blocks(), first = (run - outer * blocks()) * call.block;
                    start = outer * call.channels + first;
                    length = std::min(call.block, call.channels - first);
                } else {
                    start = run * call.inner;
                    length = call.inner;
                }
                const Index count = std::max<Index>(0, std::min(SPAN, length - begin));  // 0: a short block
                body(Span{start + begin, count, call.block ? run : run % call.channels, slot,
                          slot - run * per_run + 1 == per_run});
            }
            settle(way);
        }
    }

    template <bool CLIP, bool SUMS>
    void backward_spans() const {
        const Index per_run = pieces();
        std::vector<Sum> sums(SUMS ? call.outer * (call.block ? blocks() : call.channels) * per_run : 0);
        each_span([&](const Span &span) {
            Sum sum = backward_span<CLIP, SUMS>(x + span.start, dy + span.start, y + span.start, span.count,
                                                levels(span.scale), way);
            if (!SUMS) return;
            sums[span.slot] = sum;
            if (!call.block || !span.last) return;
            for (Index slot = span.slot + 1 - per_run; slot < span.slot; ++slot) sum += sums[slot];
            result(span.scale, sum);
        });
        if (!SUMS || call.block) return;
#pragma omp parallel for schedule(static) num_threads(sums.size() >= TASK ? threads : 1)
        for (Index channel = 0; channel < call.channels; ++channel) {
            Sum sum;
            for (Index outer = 0; outer < call.outer; ++outer)
                for (Index piece = 0; piece < per_run; ++piece)
                    sum += sums[(outer * call.channels + channel) * per_run + piece];
            result(channel, sum);
        }
    }

    // ---- columns: where scales change from element to element ----

    bool by_columns() const {
        if (call.block) return call.inner > 1;
        return call.inner < std::min(SHORT, 12 * call.outer) && call.outer >= FEW && call.channels > 1;
    }

    // Rows of a strip, columns of a tile. Narrow rows are taken several at a time, as one row of repeated scales.
    struct Tile {
        Index start, rows, stride, ahead, count, strip, left;
        Index missing;  // from the last row of all
        bool last;
        Columns<A> columns;
        Index filled(Index row) const { return last && row + 1 == rows ? std::max<Index>(0, count - missing) : count; }
    };

    // As many narrow rows as make one of whole vectors, if any number does.
    Index repeats() const {
        const Index period = call.channels * call.inner;
        Index most = std::max<Index>(1, std::min(call.outer, NARROW / period)), whole = LANES;
        if (call.block) return 1;
        while (whole > 1 && period * (whole / 2) % LANES == 0) whole /= 2;
        return most >= whole ? most / whole * whole : most;
    }
    Index width() const { return (call.block ? 1 : call.channels) * call.inner * repeats(); }
    Index strips() const { return call.block ? call.outer * blocks() : up(up(call.outer, repeats()), STRIP); }

    template <class Body>
    void each_tile(Body body) const {
        const Index wide = width(), tiles = up(wide, TILE), total = strips() * tiles;
        const Index all_rows = up(call.outer, repeats());
#pragma omp parallel for schedule(static) num_threads(threads)
        for (Index task = 0; task < total; ++task) {
            A scale[TILE + LANES], low[TILE + LANES], high[TILE + LANES];
            Tile tile;
            tile.strip = task / tiles;
            tile.left = (task - tile.strip * tiles) * TILE;
            tile.count = std::min(TILE, wide - tile.left);
            tile.stride = wide;
            tile.ahead = tiles > 1 ? wide : way == To::Past ? NEAR : 0;
            tile.last = false;
            tile.missing = all_rows * wide - call.outer * call.channels * call.inner;
            Index row;
            if (call.block) {
                const Index outer = tile.strip / blocks(), first = (tile.strip - outer * blocks()) * call.block;
                row = outer * call.channels + first;
                tile.rows = std::min(call.block, call.channels - first);
            } else {
                row = tile.strip * STRIP;
                tile.rows = std::min(STRIP, all_rows - row);
                tile.last = row + tile.rows == all_rows;
            }
            tile.start = row * wide + tile.left;
            Index index = call.block ? tile.strip * call.inner + tile.left : tile.left / call.inner % call.channels;
            Index left = call.block ? 1 : call.inner - tile.left % call.inner;
            for (Index k = 0; k < tile.count; ++k) {
                const FqLevels<A> at = levels(index);
                scale[k] = at.scale;
                low[k] = at.low;
                high[k] = at.high;
                if (--left > 0) continue;
                left = call.block ? 1 : call.inner;
                if (++index == call.channels && !call.block) index = 0;
            }
            for (Index k = tile.count; k < up(tile.count, LANES) * LANES; ++k) {
                scale[k] = 1;
                low[k] = high[k] = 0;
            }
            tile.columns = Columns<A>{scale, low, high};
            body(tile);
            settle(way);
        }
    }

    template <bool CLIP, bool SUMS>
    void backward_columns() const {
        const Index wide = width();
        std::vector<Sum> sums(SUMS && !call.block ? strips() * wide : 0);
        each_tile([&](const Tile &tile) {
            A scale[TILE + LANES] = {}, cut[TILE + LANES] = {};
            Sum sum[TILE];
            for (Index row = 0; row < tile.rows; ++row) {
                const Index start = tile.start + row * tile.stride;
                backward_row<CLIP, SUMS>(x + start, dy + start, y + start, tile.filled(row), tile.ahead, tile.columns,
                                         scale, cut, way);
                if (!SUMS || ((row + 1) % STRIP != 0 && row + 1 != tile.rows)) continue;
                for (Index k = 0; k < tile.count; ++k) {
                    sum[k] += Sum{(double)scale[k], (double)cut[k]};
                    scale[k] = cut[k] = 0;
                }
            }
            for (Index k = 0; SUMS && k < tile.count; ++k)
                if (call.block)
                    result(tile.strip * wide + tile.left + k, sum[k]);
                else
                    sums[tile.strip * wide + tile.left + k] = sum[k];
        });
        if (!SUMS || call.block) return;
        const Index period = call.channels * call.inner, rows = (Index)sums.size() / period;
        std::vector<Sum> totals(call.channels);
        for (Index row = 0; row < rows; ++row)
            for (Index channel = 0; channel < call.channels; ++channel)
                for (Index k = 0; k < call.inner; ++k) totals[channel] += sums[row * period + channel * call.inner + k];
        for (Index channel = 0; channel < call.channels; ++channel) result(channel, totals[channel]);
    }
};

template <class T>
void run(const FqCall &call, bool forward) {
    const Pass<T> pass(call);
    forward ? pass.forward() : pass.backward();
}

int dispatch(const FqCall *call, bool forward) {
    try {
        switch (call->dtype) {
            case FQ_F32: run<float>(*call, forward); return 0;
            case FQ_F16: run<FqHalf>(*call, forward); return 0;
            case FQ_BF16: run<FqBrain>(*call, forward); return 0;
            case FQ_F64: run<double>(*call, forward); return 0;
        }
    } catch (const std::bad_alloc &) {
        return -2;
    }
    return -1;
}

}  // namespace

extern "C" int fq_cpu_forward(const FqCall *call) { return dispatch(call, true); }
extern "C" int fq_cpu_backward(const FqCall *call) { return dispatch(call, false); }
extern "C" int fq_cpu_abi(void) { return (int)sizeof(FqCall); }
