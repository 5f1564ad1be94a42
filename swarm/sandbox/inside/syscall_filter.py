"""Which system calls a program may not make: a seccomp filter, as numbers, for x86-64 and 64-bit ARM.

A list of what is denied, not of what is allowed: what Python and its C library call differs between their versions, and
namespaces and limits stand behind this list. It takes away what makes new processes, sockets, shared memory and mounts, what
looks into other processes or signals them, what has often been a hole in kernels (io_uring, bpf, keys), and sleeping, which
costs the one who waits. A denied call fails with EPERM.
"""

import ctypes
import os

from swarm.sandbox.inside import libc

_DENIED: dict[str, dict[str, int]] = {
    "x86_64": {
        "fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "execve": 59, "execveat": 322, "setsid": 112, "setpgid": 109,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
        "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
        "socket": 41, "socketpair": 53, "connect": 42, "bind": 49, "listen": 50,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250,
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "mount_setattr": 442,
        "name_to_handle_at": 303, "open_by_handle_at": 304,
        "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240,
        "prctl": 157, "seccomp": 317, "personality": 135, "setrlimit": 160, "prlimit64": 302, "modify_ldt": 154,
        "nanosleep": 35, "clock_nanosleep": 230, "pause": 34,
        "kexec_load": 246, "init_module": 175, "finit_module": 313, "delete_module": 176, "reboot": 169,
        "swapon": 167, "syslog": 103, "acct": 163, "fanotify_init": 300, "inotify_init1": 294, "timer_create": 222,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "setsid": 157, "setpgid": 154,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
        "socket": 198, "socketpair": 199, "connect": 203, "bind": 200, "listen": 201,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217, "request_key": 218, "keyctl": 219,
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "mount_setattr": 442,
        "name_to_handle_at": 264, "open_by_handle_at": 265,
        "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "shmat": 196, "msgget": 186, "semget": 190, "mq_open": 180,
        "prctl": 167, "seccomp": 277, "personality": 92, "setrlimit": 164, "prlimit64": 261,
        "nanosleep": 101, "clock_nanosleep": 115,
        "kexec_load": 104, "init_module": 105, "finit_module": 273, "delete_module": 106, "reboot": 142,
        "swapon": 224, "syslog": 116, "acct": 89, "fanotify_init": 262, "inotify_init1": 26, "timer_create": 107,
    },
}  # fmt: skip
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000  # x86-64 numbers from here on are those of the x32 ABI: the same calls by other numbers
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _DENY, _KILL = 0x7FFF_0000, 0x0005_0001, 0x8000_0000


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def deny_system_calls() -> None:
    """For this process, for good. Needs no_new_privs. Raises OSError, also on a processor without a list."""
    machine = os.uname().machine
    if machine not in _DENIED:
        raise OSError(f"no list of system calls for {machine}")
    steps = _instructions(_ARCHITECTURE[machine], sorted(_DENIED[machine].values()))
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    libc.prctl(libc.PR_SET_SECCOMP, libc.SECCOMP_MODE_FILTER, ctypes.byref(program))


def _instructions(architecture: int, denied: list[int]) -> list[tuple[int, int, int, int]]:
    """(code, steps to skip if true, if false, value); `seccomp_data` has the number at byte 0, the architecture at 4."""
    head = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    checks = [(_JUMP_AT_LEAST, len(denied) + 1, 0, _X32_BIT)]
    checks += [(_JUMP_EQUAL, len(denied) - position, 0, number) for position, number in enumerate(denied)]
    return [*head, *checks, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY)]
