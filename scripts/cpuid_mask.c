/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded, it takes instruction sets from the answers of CPUID, for a process and its children.
 *
 * Most libraries have a variable of their own for that; vLLM's kernels and some others have none,
 * and ask CPUID. Linux can let CPUID fault (arch_prctl(2), ARCH_CPUID; Intel since Ivy Bridge, AMD
 * since Zen 4). The fault is answered here, with what CPUID says less what CPUID_MASK names:
 *
 *   avx2     no AVX-512, no AMX, no AVX-VNNI, no AVX-IFMA: as Haswell or Zen 2
 *   avx512   AVX-512 without BF16 and FP16, no AMX: as Cascade Lake
 *
 * It masks what software asks; an instruction that is run unasked runs as before.
 * scripts/as_cpu.sh builds and uses it. x86-64 Linux with glibc only.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static int no_avx512;
static struct sigaction theirs; /* what the program wants done at a fault of its own */

static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);
static int (*real_sigmask)(int, const sigset_t *, sigset_t *);

static void find_real(void) {
    if (real_sigaction == NULL)
        real_sigaction = dlsym(RTLD_NEXT, "sigaction");
    if (real_sigmask == NULL)
        real_sigmask = dlsym(RTLD_NEXT, "pthread_sigmask");
}

static void mask(uint32_t leaf, uint32_t part, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
    if (leaf == 7 && part == 0) {
        *d &= ~(BIT(22) | BIT(23) | BIT(24) | BIT(25)); /* amx_bf16, avx512_fp16, amx_tile, _int8 */
        if (no_avx512) {
            /* f, dq, ifma, pf, er, cd, bw, vl */
            *b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
            *c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14)); /* vbmi(2), vnni, bitalg, popcnt */
            *d &= ~(BIT(2) | BIT(3) | BIT(8)); /* 4vnniw, 4fmaps, vp2intersect */
        }
    } else if (leaf == 7 && part == 1) {
        *a &= ~(BIT(5) | BIT(21)); /* avx512_bf16, amx_fp16 */
        *d &= ~(BIT(8) | BIT(19)); /* amx_complex, avx10 */
        if (no_avx512) {
            *a &= ~(BIT(4) | BIT(23));            /* avx_vnni, avx_ifma */
            *d &= ~(BIT(4) | BIT(5) | BIT(10));   /* avx_vnni_int8, avx_ne_convert, _int16 */
        }
    } else if (leaf == 0xd && part == 0) {
        *a &= ~(BIT(17) | BIT(18)); /* state of tiles */
        if (no_avx512)
            *a &= ~(BIT(5) | BIT(6) | BIT(7)); /* state of opmasks and zmm */
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) { /* tiles, AVX10 */
        *a = *b = *c = *d = 0;
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (info->si_code == SI_KERNEL && memcmp((void *)regs[REG_RIP], "\x0f\xa2", 2) == 0) {
        uint32_t a, b, c, d;
        uint32_t leaf = (uint32_t)regs[REG_RAX], part = (uint32_t)regs[REG_RCX];
        syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1UL);
        __cpuid_count(leaf, part, a, b, c, d);
        syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0UL);
        mask(leaf, part, &a, &b, &c, &d);
        regs[REG_RAX] = a;
        regs[REG_RBX] = b;
        regs[REG_RCX] = c;
        regs[REG_RDX] = d;
        regs[REG_RIP] += 2;
        return;
    }
    if (theirs.sa_flags & SA_SIGINFO) {
        theirs.sa_sigaction(number, info, context);
    } else if (theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) {
        theirs.sa_handler(number);
    } else {
        struct sigaction end = {.sa_handler = SIG_DFL};
        real_sigaction(number, &end, NULL);
        raise(number);
    }
}

/* The handler of CPUID's faults stays, whoever else asks for faults. */
int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    find_real();
    if (number != SIGSEGV)
        return real_sigaction(number, wanted, before);
    struct sigaction was = theirs;
    if (wanted != NULL)
        theirs = *wanted;
    if (before != NULL)
        *before = was;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    sigemptyset(&wanted.sa_mask);
    return sigaction(number, &wanted, &before) ? SIG_ERR : before.sa_handler;
}

/* Linux ends a process whose CPUID faults where the signal is blocked. */
int pthread_sigmask(int how, const sigset_t *set, sigset_t *before) {
    find_real();
    sigset_t open;
    if (set != NULL && how != SIG_UNBLOCK) {
        open = *set;
        sigdelset(&open, SIGSEGV);
        set = &open;
    }
    return real_sigmask(how, set, before);
}

__attribute__((constructor)) static void start(void) {
    const char *level = getenv("CPUID_MASK");
    if (level == NULL || *level == '\0')
        return;
    no_avx512 = strcmp(level, "avx2") == 0;
    if (!no_avx512 && strcmp(level, "avx512") != 0) {
        fprintf(stderr, "CPUID_MASK must be avx2 or avx512, not '%s'\n", level);
        _exit(2);
    }
    find_real();
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&ours.sa_mask);
    real_sigaction(SIGSEGV, &ours, NULL);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0UL) != 0) {
        perror("this CPU cannot hide instruction sets (arch_prctl ARCH_SET_CPUID)");
        _exit(2);
    }
}
