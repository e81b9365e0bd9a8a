// The CUDA kernels under cuda_emu.h, as a library that is launched by name like a cubin.
#include "cuda_emu.h"
#include "fq_kernels.cuh"

#include <cstring>

#define EMU_KERNELS(NAME) \
    {"fq_forward_" #NAME, fq_forward_##NAME}, {"fq_dx_" #NAME, fq_dx_##NAME}, {"fq_rows_" #NAME, fq_rows_##NAME}, \
        {"fq_cols_" #NAME, fq_cols_##NAME}

static const struct {
    const char *name;
    void (*kernel)(FqCall);
} KERNELS[] = {
    EMU_KERNELS(f32), EMU_KERNELS(f16), EMU_KERNELS(bf16), EMU_KERNELS(f64),
    {"fq_finish_f32", fq_finish_f32}, {"fq_finish_f64", fq_finish_f64},
};

// Runs blocks `first` to `grid` - 1, such as the end of a large tensor. "" or an error, valid until the next call.
extern "C" const char *fq_emu_launch_from(const char *name, unsigned first, unsigned grid, unsigned threads,
                                          const FqCall *call) {
    static std::string said;
    said = std::string("no kernel ") + name;
    for (const auto &one : KERNELS)
        if (!std::strcmp(one.name, name)) said = emu_run<const FqCall>(one.kernel, first, grid, threads, *call);
    return said.c_str();
}

extern "C" const char *fq_emu_launch(const char *name, unsigned grid, unsigned threads, const FqCall *call) {
    return fq_emu_launch_from(name, 0, grid, threads, call);
}
