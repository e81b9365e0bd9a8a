/* Preloaded (LD_PRELOAD), it shows a process an x86 CPU with AVX2 and FMA but no AVX-512, VNNI or AMX.
 *
 * The kernel lets CPUID fault where the CPU can (Intel since Ivy Bridge, AMD since Zen 5 on recent kernels); the handler
 * answers in its place. /proc/cpuinfo is read from the file that ONNXQ_CPUINFO names. Everything else runs at the CPU's
 * own speed. Exit status 97: this CPU or kernel has no CPUID faulting.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_CPUID 0x1012
#define BIT(n) (1u << (n))

typedef int (*sigaction_type)(int, const struct sigaction *, struct sigaction *);

/* The program's own SIGSEGV action (Python's faulthandler has one); ours stands in front of it. */
static struct sigaction program_action;

static sigaction_type libc_sigaction(void) {
    static sigaction_type found;
    if (!found) found = (sigaction_type)dlsym(RTLD_NEXT, "sigaction");
    return found;
}

static long allow_cpuid(int allowed) { return syscall(SYS_arch_prctl, ARCH_CPUID, (unsigned long)allowed); }

static void hide_features(uint32_t leaf, uint32_t subleaf, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
    if (leaf == 7 && subleaf == 0) {
        *b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31)); /* AVX-512 F to VL */
        *c &= ~(BIT(1) | BIT(6) | BIT(8) | BIT(9) | BIT(10) | BIT(11) | BIT(12) | BIT(14)); /* VBMI, GFNI, VAES, VNNI */
        *d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25)); /* AVX512-FP16, AMX */
    } else if (leaf == 7 && subleaf == 1) {
        *a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23)); /* AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA */
        *d &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19)); /* AVX-VNNI-INT8 and -INT16, AMX-COMPLEX, AVX10 */
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {
        *a = *b = *c = *d = 0; /* tiles of AMX, AVX10 */
    }
}

static void handle_fault(int signal, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)r[REG_RIP];
    /* A general protection fault, not a bad address: the instruction can be read. */
    if (info->si_code == SI_KERNEL && code[0] == 0x0f && code[1] == 0xa2) {
        uint32_t leaf = (uint32_t)r[REG_RAX], subleaf = (uint32_t)r[REG_RCX];
        uint32_t a = leaf, b = 0, c = subleaf, d = 0;
        allow_cpuid(1);
        __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        allow_cpuid(0);
        hide_features(leaf, subleaf, &a, &b, &c, &d);
        r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
        r[REG_RIP] += 2;
    } else if (program_action.sa_flags & SA_SIGINFO) {
        program_action.sa_sigaction(signal, info, context);
    } else if (program_action.sa_handler != SIG_DFL && program_action.sa_handler != SIG_IGN) {
        program_action.sa_handler(signal);
    } else {
        struct sigaction action = {.sa_handler = SIG_DFL};
        libc_sigaction()(SIGSEGV, &action, NULL); /* the instruction faults again, and the process ends */
    }
}

int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    if (number != SIGSEGV) return libc_sigaction()(number, action, before);
    if (before) *before = program_action;
    if (action) program_action = *action;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &action, &before) ? SIG_ERR : before.sa_handler;
}

static const char *redirect(const char *path) {
    const char *other = getenv("ONNXQ_CPUINFO");
    return path && other && strcmp(path, "/proc/cpuinfo") == 0 ? other : path;
}

#define DEFINE_OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                       \
        static int (*next)(const char *, int, ...);                                    \
        if (!next) next = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);    \
        va_list rest;                                                                  \
        va_start(rest, flags);                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;        \
        va_end(rest);                                                                  \
        return next(redirect(path), flags, mode);                                      \
    }
#define DEFINE_FOPEN(name)                                                             \
    FILE *name(const char *path, const char *mode) {                                   \
        static FILE *(*next)(const char *, const char *);                              \
        if (!next) next = (FILE * (*)(const char *, const char *))dlsym(RTLD_NEXT, #name); \
        return next(redirect(path), mode);                                             \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_FOPEN(fopen)
DEFINE_FOPEN(fopen64)

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {.sa_sigaction = handle_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    libc_sigaction()(SIGSEGV, &action, NULL);
    if (allow_cpuid(0)) _exit(97);
}
