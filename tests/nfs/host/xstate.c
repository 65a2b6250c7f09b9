/* Preloaded into user-mode-linux, whose buffer for a process's vector registers has 2,696 bytes (Linux 6.1).
 *
 * A processor with AMX has more of them, and the machine's kernel takes only all (EFAULT, arch/x86/kernel/fpu/regset.c):
 * without this the guest's first process is killed. Those that the guest knows nothing of stay as they are.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char registers[64 << 10]; /* not on the stack: those of the guest's kernel are small */

static long set_registers(pid_t pid, struct iovec *given)
{
    struct iovec all = {registers, sizeof registers};
    sigset_t every, before;
    long result;

    sigfillset(&every);
    sigprocmask(SIG_SETMASK, &every, &before); /* a signal may switch to a thread that comes here, too */
    result = syscall(SYS_ptrace, PTRACE_GETREGSET, pid, NT_X86_XSTATE, &all);
    if (result == 0 && all.iov_len > given->iov_len) {
        memcpy(registers, given->iov_base, given->iov_len);
        given = &all;
    }
    result = syscall(SYS_ptrace, PTRACE_SETREGSET, pid, NT_X86_XSTATE, given);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return result;
}

long ptrace(enum __ptrace_request request, ...)
{
    va_list arguments;
    long word, result;
    int peeks = request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;

    va_start(arguments, request);
    pid_t pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);
    if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE)
        return set_registers(pid, data);
    result = syscall(SYS_ptrace, request, pid, address, peeks ? &word : data);
    if (peeks && result == 0) {
        errno = 0;
        return word;
    }
    return result;
}
