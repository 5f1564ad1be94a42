"""The system calls that a sandboxed process may make: seccomp filters, as numbers, for x86-64 and 64-bit ARM.

A stranger's program may make only the listed calls: those that Python needs to compute, to read its library and to write into
its own folder. No listed call makes a process, a thread, a socket, shared memory, a mount or a signal, inspects another
process, or sleeps. Services run packages that a person has installed and that need more, such as threads; for them a list of
calls is refused. That list has sockets, since some families leave a network namespace (AF_VSOCK reaches the host of a virtual
machine), and memory that no process limit counts.

A refused call fails with EPERM. A call newer than these tables fails with ENOSYS, as on a kernel without it: C libraries then
do without it, and calls of future kernels stay refused until they are reviewed.
"""

import ctypes
import os

from swarm.sandbox.inside import libc

_ALLOWED: dict[str, dict[str, int]] = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "newfstatat": 262, "statx": 332, "lseek": 8, "pread64": 17,
        "pwrite64": 18, "readv": 19, "writev": 20, "preadv": 295, "pwritev": 296, "open": 2, "openat": 257, "openat2":
        437, "creat": 85, "access": 21, "faccessat": 269, "faccessat2": 439, "mmap": 9, "munmap": 11, "mprotect": 10,
        "mremap": 25, "madvise": 28, "msync": 26, "mincore": 27, "brk": 12, "membarrier": 324, "rt_sigaction": 13,
        "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130,
        "sigaltstack": 131, "restart_syscall": 219, "ioctl": 16, "fcntl": 72, "flock": 73, "dup": 32, "dup2": 33, "dup3":
        292, "pipe": 22, "pipe2": 293, "eventfd2": 290, "close_range": 436, "select": 23, "pselect6": 270, "poll": 7,
        "ppoll": 271, "epoll_create": 213, "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232, "epoll_pwait": 281,
        "stat": 4, "lstat": 6, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "renameat": 264,
        "renameat2": 316, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "link": 86, "linkat": 265, "unlink": 87, "unlinkat":
        263, "symlink": 88, "symlinkat": 266, "readlink": 89, "readlinkat": 267, "chmod": 90, "fchmod": 91, "fchmodat":
        268, "umask": 95, "truncate": 76, "ftruncate": 77, "fallocate": 285, "fadvise64": 221, "fsync": 74, "fdatasync":
        75, "statfs": 137, "fstatfs": 138, "utimensat": 280, "utime": 132, "utimes": 235, "sendfile": 40,
        "copy_file_range": 326, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193, "listxattr": 194, "llistxattr": 195,
        "flistxattr": 196, "getpid": 39, "getppid": 110, "gettid": 186, "getpgid": 121, "getpgrp": 111, "getsid": 124,
        "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108, "getresuid": 118, "getresgid": 120, "getgroups":
        115, "getrlimit": 97, "getrusage": 98, "getpriority": 140, "times": 100, "sysinfo": 99, "uname": 63, "getcpu":
        309, "alarm": 37, "getitimer": 36, "setitimer": 38, "sched_yield": 24, "sched_getaffinity": 204, "sched_getparam":
        143, "sched_getscheduler": 145, "sched_get_priority_max": 146, "sched_get_priority_min": 147, "clock_gettime":
        228, "clock_getres": 229, "gettimeofday": 96, "time": 201, "getrandom": 318, "futex": 202, "set_robust_list": 273,
        "get_robust_list": 274, "set_tid_address": 218, "rseq": 334, "arch_prctl": 158, "exit": 60, "exit_group": 231,
    },
    "aarch64": {
        "read": 63, "write": 64, "close": 57, "fstat": 80, "newfstatat": 79, "statx": 291, "lseek": 62, "pread64": 67,
        "pwrite64": 68, "readv": 65, "writev": 66, "preadv": 69, "pwritev": 70, "openat": 56, "openat2": 437, "faccessat":
        48, "faccessat2": 439, "mmap": 222, "munmap": 215, "mprotect": 226, "mremap": 216, "madvise": 233, "msync": 227,
        "mincore": 232, "brk": 214, "membarrier": 283, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
        "rt_sigpending": 136, "rt_sigtimedwait": 137, "rt_sigsuspend": 133, "sigaltstack": 132, "restart_syscall": 128,
        "ioctl": 29, "fcntl": 25, "flock": 32, "dup": 23, "dup3": 24, "pipe2": 59, "eventfd2": 19, "close_range": 436,
        "pselect6": 72, "ppoll": 73, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "getdents64": 61, "getcwd":
        17, "chdir": 49, "fchdir": 50, "renameat": 38, "renameat2": 276, "mkdirat": 34, "linkat": 37, "unlinkat": 35,
        "symlinkat": 36, "readlinkat": 78, "fchmod": 52, "fchmodat": 53, "umask": 166, "truncate": 45, "ftruncate": 46,
        "fallocate": 47, "fadvise64": 223, "fsync": 82, "fdatasync": 83, "statfs": 43, "fstatfs": 44, "utimensat": 88,
        "sendfile": 71, "copy_file_range": 285, "getxattr": 8, "lgetxattr": 9, "fgetxattr": 10, "listxattr": 11,
        "llistxattr": 12, "flistxattr": 13, "getpid": 172, "getppid": 173, "gettid": 178, "getpgid": 155, "getsid": 156,
        "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "getresuid": 148, "getresgid": 150, "getgroups":
        158, "getrlimit": 163, "getrusage": 165, "getpriority": 141, "times": 153, "sysinfo": 179, "uname": 160, "getcpu":
        168, "getitimer": 102, "setitimer": 103, "sched_yield": 124, "sched_getaffinity": 123, "sched_getparam": 121,
        "sched_getscheduler": 120, "sched_get_priority_max": 125, "sched_get_priority_min": 126, "clock_gettime": 113,
        "clock_getres": 114, "gettimeofday": 169, "getrandom": 278, "futex": 98, "set_robust_list": 99, "get_robust_list":
        100, "set_tid_address": 96, "rseq": 293, "exit": 93, "exit_group": 94,
    },
}  # fmt: skip
_REFUSED_TO_SERVICES: dict[str, dict[str, int]] = {
    "x86_64": {
        "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "process_madvise": 440, "pidfd_open": 434, "pidfd_getfd": 438,
        "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "open_tree": 428, "move_mount":
        429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "name_to_handle_at":
        303, "open_by_handle_at": 304, "memfd_secret": 447, "personality": 135, "kexec_load": 246, "kexec_file_load": 320,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "reboot": 169, "swapon": 167, "swapoff": 168,
        "syslog": 103, "acct": 163, "quotactl": 179, "fanotify_init": 300, "socket": 41, "memfd_create": 319, "shmget": 29,
        "semget": 64, "msgget": 68,
    },
    "aarch64": {
        "execve": 221, "execveat": 281, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "process_madvise": 440, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "add_key": 217, "request_key": 218, "keyctl": 219, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "unshare": 97, "setns": 268, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "fspick": 433, "mount_setattr": 442, "name_to_handle_at": 264, "open_by_handle_at": 265, "memfd_secret": 447,
        "personality": 92, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273,
        "delete_module": 106, "reboot": 142, "swapon": 224, "swapoff": 225, "syslog": 116, "acct": 89, "quotactl": 60,
        "fanotify_init": 262, "socket": 198, "memfd_create": 279, "shmget": 194, "semget": 190, "msgget": 186,
    },
}  # fmt: skip
_LAST_KNOWN = 450
"""set_mempolicy_home_node of Linux 5.17. Newer calls have the same numbers on all processors."""
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_CLONE_THREAD = 0x0001_0000
_CLONE_NEW_NAMESPACES = 0x7E02_0080
"""Flags of clone for new mount, cgroup, host name, IPC, user, process, network and time namespaces."""
_STARTS_PROCESSES = ("fork", "vfork", "execve")
_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_ALLOW, _DENY, _UNKNOWN, _KILL = 0x7FFF_0000, 0x0005_0001, 0x0005_0026, 0x8000_0000
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16  # bytes in `seccomp_data`


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


Step = tuple[int, int, int, int]
"""(code, instructions to skip if true, instructions to skip if false, value)."""


def allow_computing_only(*, starts_program: bool = False) -> None:
    """Allow only the listed calls, for good. Needs no_new_privs. Raises OSError, also on a processor without a list.

    With `starts_program` the process may become another program, under the same rules.
    """
    machine = _machine()
    calls = _ALLOWED[machine] | ({"execve": _REFUSED_TO_SERVICES[machine]["execve"]} if starts_program else {})
    _install([*_head(machine), *_unless_listed(calls, _ALLOW), (_RETURN, 0, 0, _DENY)])


def allow_processes() -> None:
    """Refuse what services may not call, except for new processes and programs, and new namespaces, for good.

    For compilers, shells and interpreters with threads, whose number of processes is limited. Raises OSError as the others.
    """
    machine = _machine()
    clone: list[Step] = [
        (_JUMP_EQUAL, 0, 1, _CLONE3),  # its flags are behind a pointer, and C libraries do without it
        (_RETURN, 0, 0, _UNKNOWN),
        (_JUMP_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_JUMP_BITS, 1, 0, _CLONE_NEW_NAMESPACES),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    refused = {name: number for name, number in _REFUSED_TO_SERVICES[machine].items() if name not in _STARTS_PROCESSES}
    _install([*_head(machine), *clone, *_unless_listed(refused, _DENY), (_RETURN, 0, 0, _ALLOW)])


def deny_new_processes() -> None:
    """Allow threads but no processes and programs, and refuse calls that have often been kernel vulnerabilities, for good.

    Needs no_new_privs. Raises OSError, also on a processor without a list.
    """
    machine = _machine()
    clone: list[Step] = [
        (_JUMP_EQUAL, 0, 1, _CLONE3),  # its flags are behind a pointer, and C libraries do without it
        (_RETURN, 0, 0, _UNKNOWN),
        (_JUMP_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_JUMP_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    _install([*_head(machine), *clone, *_unless_listed(_REFUSED_TO_SERVICES[machine], _DENY), (_RETURN, 0, 0, _ALLOW)])


def _machine() -> str:
    machine = os.uname().machine
    if machine not in _ALLOWED:
        raise OSError(f"no list of system calls for {machine}")
    return machine


def _head(machine: str) -> list[Step]:
    """Kill on calls of another architecture; numbers above _LAST_KNOWN, and with them the x32 ABI, are unknown."""
    return [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _LAST_KNOWN + 1),
        (_RETURN, 0, 0, _UNKNOWN),
    ]


def _unless_listed(calls: dict[str, int], verdict: int) -> list[Step]:
    """Return `verdict` for the listed calls; other calls continue after the last of these instructions."""
    numbers = sorted(calls.values())
    checks: list[Step] = [(_JUMP_EQUAL, len(numbers) - position, 0, number) for position, number in enumerate(numbers)]
    return [*checks, (_JUMP, 0, 0, 1), (_RETURN, 0, 0, verdict)]


def _install(steps: list[Step]) -> None:
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    libc.prctl(libc.PR_SET_SECCOMP, libc.SECCOMP_MODE_FILTER, ctypes.byref(program))
