// The one argument of every entry point: CPU twin, CUDA kernels and their emulation take the same struct.
// Python mirrors it field by field in onnxq/kernels/abi.py; a test compares sizes and offsets.
//
// Layout. A dense tensor is read as [outer, channels, inner] in the order of its memory (dimensions sorted by stride,
// so channels_last and other permutations need no copy). x, dy, y and dx share that order. Scales:
//     per tensor    outer = channels = 1, inner = count                        scale[0]
//     per channel   block = 0                                                  scale[c]
//     per block     `block` elements along channels, the last may be shorter   scale[(o * blocks + c / block) * inner + i]
// scale, zero_point, dscale and dzero_point are float, for double tensors double, dense, in that order.
//
// Forward   q = clip(rint(x / s) + rint(z), qmin, qmax),  y = (q - rint(z)) * s;  NaN stays NaN, +-inf saturates;
//           all NaN unless s > 0
// Backward  dx = inside ? dy : 0
//           dscale      = grad_scale            * sum dy * (inside ? rint(x / s) - x / s : the level cut to, less rint(z))
//           dzero_point = zero_point_grad_scale * sum inside ? 0 : -s * dy
//           inside: FQ_EDGE_CLIP set     qmin - rint(z) < x / s < qmax - rint(z)          (clip, then round: LSQ's paper)
//                   FQ_EDGE_CLIP not set qmin - rint(z) <= rint(x / s) <= qmax - rint(z)  (round, then clip)
//
// CPU twin, C ABI; both return 0, or -1 for an unknown dtype:
//     int fq_cpu_forward(const FqCall *);
//     int fq_cpu_backward(const FqCall *);
//     int fq_cpu_abi(void);                    sizeof(FqCall)
// CUDA kernels take one FqCall by value, blocks of 256 threads, no dynamic shared memory, and only grid.x;
// <t> is f32, f16, bf16 or f64. onnxq.kernels.launch chooses kernels, grids and geometry:
//     fq_forward_<t>                           x -> y
//     fq_dx_<t>                                x, dy -> dx, when no gradient of scale or zero point is needed
//     fq_rows_<t> or fq_cols_<t>               x, dy -> dx, partial sums (or dscale, dzero_point when partial is null)
//     fq_finish_f32, fq_finish_f64             partial sums -> dscale, dzero_point
#ifndef ONNXQ_FQ_CALL_H
#define ONNXQ_FQ_CALL_H

enum FqType { FQ_F32 = 0, FQ_F16 = 1, FQ_BF16 = 2, FQ_F64 = 3 };

enum FqFlag {
    FQ_EDGE_CLIP = 1,   // gradients of clip, then round
    FQ_SCALE_AS_X = 2,  // round the scale to x's type first, as a model of that type stores it
};

// Division by a fixed number: magic = 2**64 / value + 1, 0 when value is 1.
struct FqDivisor {
    unsigned long long value, magic;
};

struct FqCall {
    const void *x, *dy;                // dy: backward only
    void *y;                           // forward: y; backward: dx, may be null
    const void *scale, *zero_point;    // zero_point may be null: 0
    void *dscale, *dzero_point;        // each may be null: not needed
    double *partial;                   // CUDA: scratch of Plan.partial_bytes, or null
    long long outer, channels, inner, block;
    double grad_scale, zero_point_grad_scale;
    int qmin, qmax;
    int dtype;                         // FqType; the CUDA kernels have it in their name
    unsigned flags;                    // FqFlag
    int threads;                       // CPU: 0 leaves the number to OpenMP
    // Geometry of the CUDA kernels, from onnxq.kernels.launch; the CPU twin ignores it.
    int lanes;                         // threads that share a segment (rows), a row of a tile (cols), a scale (finish)
    long long count;                   // elements
    long long scales;
    long long segments;                // pieces of work: rows: runs of one scale; cols: strips of rows times tiles
    long long run;                     // rows: longest contiguous run of a segment
    long long runs;                    // rows: runs of a segment; cols: rows of a strip
    long long splits;                  // partial sums per scale in the first kernel
    long long partial_outer, partial_inner;  // partial sum of (j, k, m) at (j * scales + k) * partial_inner + m
    FqDivisor by_inner, by_channels, by_block, by_blocks, by_pieces;
};

#endif
