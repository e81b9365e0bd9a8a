// CUDA's keywords for a host compiler, so that kernels run unchanged without a GPU: blocks one after another, the
// threads of a block as fibers that switch at __syncthreads(), or, with EMU_THREADS defined, as threads of the operating
// system, with which ThreadSanitizer sees accesses that no barrier separates.
//
// emu_run(kernel, first, grid, threads, argument) runs blocks first to grid - 1 and returns "" or an error: a barrier
// that not all threads reached (with EMU_THREADS the process ends there).
// No warps, no atomics, one dimension: only the parts of CUDA that the kernels use. Linux.
#ifndef ONNXQ_CUDA_EMU_H
#define ONNXQ_CUDA_EMU_H

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#ifdef EMU_THREADS
#include <condition_variable>
#include <mutex>
#include <thread>
#else
#include <ucontext.h>
#endif

static const char EMU_PARTED[] = "a barrier was not reached by all threads of its block";

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// Blocks run one after another and may share one copy, as they may on a GPU: nothing in it survives a block there.
#define __shared__ static

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct EmuIndex {
    unsigned x;
};
static thread_local EmuIndex threadIdx, blockIdx;

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

#ifdef EMU_THREADS

// Why a thread waits: at a barrier of the kernel, or at the end of a block.
enum EmuStop { EMU_BARRIER, EMU_END };

struct EmuBarrier {
    std::mutex mutex;
    std::condition_variable moved;
    unsigned threads = 0, arrived = 0, round = 0;
    EmuStop first = EMU_END;

    void wait(EmuStop stop) {
        std::unique_lock<std::mutex> lock(mutex);
        if (arrived == 0) first = stop;
        if (stop != first) {
            // The others would wait for ever.
            std::fprintf(stderr, "%s\n", EMU_PARTED);
            std::_Exit(68);
        }
        const unsigned mine = round;
        if (++arrived == threads) {
            arrived = 0;
            ++round;
            moved.notify_all();
        } else {
            moved.wait(lock, [&] { return round != mine; });
        }
    }
};

static EmuBarrier emu_barrier;
static inline void __syncthreads() { emu_barrier.wait(EMU_BARRIER); }

template <class Argument>
std::string emu_run(void (*kernel)(Argument), unsigned first, unsigned grid, unsigned threads,
                    const Argument &argument) {
    std::vector<std::thread> all;
    emu_barrier.threads = threads;
    for (unsigned me = 0; me < threads; ++me)
        all.emplace_back([=] {
            threadIdx.x = me;
            for (unsigned block = first; block < grid; ++block) {
                blockIdx.x = block;
                kernel(argument);
                emu_barrier.wait(EMU_END);
            }
        });
    for (std::thread &one : all) one.join();
    return "";
}

#else

struct EmuFiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
};

static struct {
    ucontext_t scheduler;
    std::vector<EmuFiber> fibers;
    EmuFiber *running;
    void (*body)(const void *, const void *);
    const void *kernel, *argument;
} emu;

static inline void __syncthreads() { swapcontext(&emu.running->context, &emu.scheduler); }

static void emu_fiber() {
    emu.body(emu.kernel, emu.argument);
    emu.running->done = true;
}

template <class Argument>
std::string emu_run(void (*kernel)(Argument), unsigned first, unsigned grid, unsigned threads,
                    const Argument &argument) {
    emu.kernel = (const void *)&kernel;
    emu.argument = &argument;
    emu.body = [](const void *call, const void *with) { (*(void (*const *)(Argument))call)(*(const Argument *)with); };
    if (emu.fibers.size() != threads) emu.fibers = std::vector<EmuFiber>(threads);
    for (blockIdx.x = first; blockIdx.x < grid; ++blockIdx.x) {
        for (EmuFiber &fiber : emu.fibers) {
            fiber.stack.resize(64 << 10);
            fiber.done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &emu.scheduler;
            makecontext(&fiber.context, emu_fiber, 0);
        }
        unsigned done = 0;
        while (done < threads) {
            const unsigned before = done;
            for (unsigned me = 0; me < threads; ++me) {
                emu.running = &emu.fibers[me];
                if (emu.running->done) return EMU_PARTED;
                threadIdx.x = me;
                swapcontext(&emu.scheduler, &emu.running->context);
                done += emu.running->done;
            }
            if (done != before && done != threads) return EMU_PARTED;
        }
    }
    return "";
}

#endif
#endif
