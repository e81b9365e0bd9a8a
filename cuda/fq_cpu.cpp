// The CPU twin: the arithmetic of fq_math.h over spans that the compiler turns into vector code, threads by OpenMP.
//
// Work is cut up by shape alone and sums are added in fixed order: float in 32 lanes over a span, double above, so
// results are the same bits for any number of threads and any vector width. Half types go through float buffers.
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
    T *y;
    const bool clip;
    int threads = 1;

    explicit Pass(const FqCall &from)
        : call(from), x((const T *)from.x), dy((const T *)from.dy), y((T *)from.y),
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
                    Typed<T>::forward(x + start, y + start, tile.filled(row),
                                      [&](const A *in, A *out, Index k, Index part) {
                                          in_pieces<A>({in, out}, part, tile.ahead, [&](Index at, Index piece) {
                                              forward_row(in + at, out + at, piece, tile.columns.from(k + at));
                                          });
                                      });
                }
            });
        else
            each_span([&](const Span &span) {
                const FqLevels<A> at = levels(span.scale);
                Typed<T>::forward(x + span.start, y + span.start, span.count,
                                  [&](const A *in, A *out, Index, Index part) { forward_span(in, out, part, at); });
            });
    }

    void backward() const {
        if (empty()) {
            const Index scales = call.block ? call.outer * blocks() * call.inner : call.channels;
            for (Index index = 0; index < scales; ++index) result(index, Sum());
            return;
        }
        if (by_columns())
            clip ? backward_columns<true>() : backward_columns<false>();
        else
            clip ? backward_spans<true>() : backward_spans<false>();
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
        for (Index task = 0; task < tasks; ++task)
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
    }

    template <bool CLIP>
    void backward_spans() const {
        const Index per_run = pieces();
        std::vector<Sum> sums(wants_sums() ? call.outer * (call.block ? blocks() : call.channels) * per_run : 0);
        each_span([&](const Span &span) {
            const FqLevels<A> at = levels(span.scale);
            Sum sum;
            Typed<T>::backward(x + span.start, dy + span.start, y ? y + span.start : nullptr, span.count,
                               [&](const A *in, const A *gradient, A *out, Index, Index part) {
                                   sum += backward_span<CLIP>(in, gradient, out, part, at);
                               });
            if (!wants_sums()) return;
            sums[span.slot] = sum;
            if (!call.block || !span.last) return;
            for (Index slot = span.slot + 1 - per_run; slot < span.slot; ++slot) sum += sums[slot];
            result(span.scale, sum);
        });
        if (!wants_sums() || call.block) return;
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
        return call.block ? call.inner > 1 : call.inner < SHORT && call.outer >= FEW && call.channels > 1;
    }

    // Rows of a strip, columns of a tile. Narrow rows are taken several at a time, as one row of repeated scales.
    struct Tile {
        Index start, rows, stride, ahead, count, short_row, strip, left;
        Columns<A> columns;
        // The last row of all may have fewer elements.
        Index filled(Index row) const { return row == short_row ? std::max<Index>(0, count - missing) : count; }
        Index missing;
    };

    Index repeats() const {
        return call.block ? 1 : std::max<Index>(1, std::min(call.outer, NARROW / (call.channels * call.inner)));
    }
    Index width() const { return (call.block ? 1 : call.channels) * call.inner * repeats(); }
    Index strips() const { return call.block ? call.outer * blocks() : up(up(call.outer, repeats()), STRIP); }

    template <class Body>
    void each_tile(Body body) const {
        const Index wide = width(), tiles = up(wide, TILE), total = strips() * tiles;
        const Index all_rows = up(call.outer, repeats());
#pragma omp parallel for schedule(static) num_threads(threads)
        for (Index task = 0; task < total; ++task) {
            A scale[TILE], low[TILE], high[TILE];
            Tile tile;
            tile.strip = task / tiles;
            tile.left = (task - tile.strip * tiles) * TILE;
            tile.count = std::min(TILE, wide - tile.left);
            tile.stride = wide;
            // Only where rows have gaps between them; half types are read through buffers.
            tile.ahead = sizeof(T) == sizeof(A) && tiles > 1 ? wide : 0;
            tile.short_row = -1;
            tile.missing = 0;
            Index row;
            if (call.block) {
                const Index outer = tile.strip / blocks(), first = (tile.strip - outer * blocks()) * call.block;
                row = outer * call.channels + first;
                tile.rows = std::min(call.block, call.channels - first);
            } else {
                row = tile.strip * STRIP;
                tile.rows = std::min(STRIP, all_rows - row);
                if (row + tile.rows == all_rows) {
                    tile.short_row = tile.rows - 1;
                    tile.missing = all_rows * wide - call.outer * call.channels * call.inner;
                }
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
            tile.columns = Columns<A>{scale, low, high};
            body(tile);
        }
    }

    template <bool CLIP>
    void backward_columns() const {
        const Index wide = width();
        std::vector<Sum> sums(wants_sums() && !call.block ? strips() * wide : 0);
        each_tile([&](const Tile &tile) {
            A scale[TILE] = {}, cut[TILE] = {};
            Sum sum[TILE];
            for (Index row = 0; row < tile.rows; ++row) {
                const Index start = tile.start + row * tile.stride;
                Typed<T>::backward(x + start, dy + start, y ? y + start : nullptr, tile.filled(row),
                                   [&](const A *in, const A *gradient, A *out, Index k, Index part) {
                                       in_pieces<A>({in, gradient, out}, part, tile.ahead, [&](Index at, Index piece) {
                                           backward_row<CLIP>(in + at, gradient + at, out + at, piece,
                                                              tile.columns.from(k + at), scale + k + at, cut + k + at);
                                       });
                                   });
                if ((row + 1) % STRIP != 0 && row + 1 != tile.rows) continue;
                for (Index k = 0; k < tile.count; ++k) {
                    sum[k] += Sum{(double)scale[k], (double)cut[k]};
                    scale[k] = cut[k] = 0;
                }
            }
            for (Index k = 0; wants_sums() && k < tile.count; ++k)
                if (call.block)
                    result(tile.strip * wide + tile.left + k, sum[k]);
                else
                    sums[tile.strip * wide + tile.left + k] = sum[k];
        });
        if (!wants_sums() || call.block) return;
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
