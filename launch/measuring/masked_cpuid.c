/* A library for LD_PRELOAD: CPUID shows a program fewer instructions than the CPU has, whichever library asks.

   Linux can make CPUID fault (arch_prctl(2), ARCH_SET_CPUID). The handler of the fault executes it, clears what
   TOWERS_ISA leaves out, and goes on behind the instruction. Threads and forks inherit this; a program that is
   executed loads the library anew. Other faults reach the handler that the program has set, or end it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

enum { EAX, EBX, ECX, EDX };

/* What is cleared in leaf 7: bits of EBX, ECX and EDX of subleaf 0, of EAX of subleaf 1 (all of its EDX). */
struct hidden {
    const char *isa;
    uint32_t ebx, ecx, edx, next_eax;
};

#define AVX512_FOUNDATION (BIT(16) | BIT(17) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31))
#define AVX512_INTEGERS BIT(21)
#define AVX512_LATER (BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14))
#define AVX512_OF_EDX (BIT(2) | BIT(3) | BIT(8) | BIT(23))
#define AVX512_FLOAT16 BIT(23)
#define AMX (BIT(22) | BIT(24) | BIT(25))
#define AVX_VNNI BIT(4)
#define AVX512_BFLOAT16 BIT(5)
#define LATER (BIT(21) | BIT(23))

static const struct hidden known[] = {
    {"avx2", AVX512_FOUNDATION | AVX512_INTEGERS, AVX512_LATER, AVX512_OF_EDX | AMX,
     AVX_VNNI | AVX512_BFLOAT16 | LATER},
    {"avx512", AVX512_INTEGERS, AVX512_LATER, AVX512_OF_EDX | AMX, AVX_VNNI | AVX512_BFLOAT16 | LATER},
    {"avx512_bf16", 0, 0, AVX512_FLOAT16 | AMX, LATER},
};

static const struct hidden *hidden;
static int is_masked;
static struct sigaction of_program;

static long set_cpuid(unsigned long runs) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, runs); }

static void masked_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t found[4]) {
    set_cpuid(1);
    __asm__ volatile("cpuid"
                     : "=a"(found[EAX]), "=b"(found[EBX]), "=c"(found[ECX]), "=d"(found[EDX])
                     : "a"(leaf), "c"(subleaf));
    set_cpuid(0);
    if (leaf == 7 && subleaf == 0) {
        found[EBX] &= ~hidden->ebx;
        found[ECX] &= ~hidden->ecx;
        found[EDX] &= ~hidden->edx;
    } else if (leaf == 7 && subleaf == 1) {
        found[EAX] &= ~hidden->next_eax;
        found[EDX] = 0;
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *instruction = (const uint8_t *)registers[REG_RIP];
    /* The kernel reports a general protection fault so; at an address without code there would be another. */
    if (info->si_code == SI_KERNEL && instruction[0] == 0x0f && instruction[1] == 0xa2) {
        uint32_t found[4];
        masked_cpuid(registers[REG_RAX], registers[REG_RCX], found);
        registers[REG_RAX] = found[EAX];
        registers[REG_RBX] = found[EBX];
        registers[REG_RCX] = found[ECX];
        registers[REG_RDX] = found[EDX];
        registers[REG_RIP] += 2;
    } else if (of_program.sa_flags & SA_SIGINFO) {
        of_program.sa_sigaction(number, info, context);
    } else if (of_program.sa_handler != SIG_DFL && of_program.sa_handler != SIG_IGN) {
        of_program.sa_handler(number);
    } else {
        /* The instruction faults again. */
        signal(number, SIG_DFL);
    }
}

int sigaction(int number, const struct sigaction *set, struct sigaction *before) {
    if (number != SIGSEGV || !is_masked) {
        int (*real)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
        return real(number, set, before);
    }
    if (before) *before = of_program;
    if (set) of_program = *set;
    return 0;
}

/* Whether this process sees fewer instructions. */
int towers_cpuid_is_masked(void) { return is_masked; }

__attribute__((constructor)) static void mask(void) {
    const char *isa = getenv("TOWERS_ISA");
    for (size_t i = 0; isa && i < sizeof known / sizeof *known; ++i)
        if (!strcmp(isa, known[i].isa)) hidden = &known[i];
    if (!hidden) return;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &of_program);
    is_masked = set_cpuid(0) == 0;
    if (!is_masked) sigaction(SIGSEGV, &of_program, NULL);
}
