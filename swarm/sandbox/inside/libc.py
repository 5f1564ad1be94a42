"""Linux calls that Python 3.11 does not offer. Each raises OSError that names the call."""

import ctypes
import os
import select

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 32, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x2008_0522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442  # on every processor
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    _check(f"mount {target}", _libc.mount(*arguments))


def set_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only, without set-user-id programs and devices (Linux 5.12)."""
    wanted = (ctypes.c_uint64 * 4)(
        MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0
    )  # struct mount_attr: first the flags to set
    arguments = (ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(wanted))
    result = _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments, ctypes.c_size_t(ctypes.sizeof(wanted)))
    _check(f"mount_setattr {target}", result)


def detach(target: str) -> None:
    _check(f"umount {target}", _libc.umount2(target.encode(), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    number = ctypes.c_long(_PIVOT_ROOT[os.uname().machine])
    _check("pivot_root", _libc.syscall(number, new.encode(), old.encode()))


def set_host_name(name: str) -> None:
    """Set the host name of this namespace, and an empty domain name."""
    _check("sethostname", _libc.sethostname(name.encode(), ctypes.c_size_t(len(name))))
    _check("setdomainname", _libc.setdomainname(b"", ctypes.c_size_t(0)))


def prctl(option: int, value: int, pointer: object = None) -> None:
    rest = (ctypes.c_ulong(0) if pointer is None else pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(value), *rest))


def system_call(number: int, *arguments: object) -> int:
    """Make a system call and return its result. Integers are passed as C long, other arguments unchanged."""
    passed = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    return _check(f"system call {number}", _libc.syscall(ctypes.c_long(number), *passed))


def drop_capabilities() -> None:
    """Drop all capabilities for good, from the bounding set and from the process."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last capability of this kernel
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    number = ctypes.c_long(_CAPSET[os.uname().machine])
    _check("capset", _libc.syscall(number, ctypes.byref(header), ctypes.byref(nothing)))


def has_no_reader(pipe: int) -> bool:
    """Whether all readers of this pipe are gone."""
    poll = select.poll()
    poll.register(pipe, select.POLLERR)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _check(call: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
