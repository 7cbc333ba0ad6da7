"""The seccomp filter of a sandbox, assembled as classic BPF without any library.

Everything is allowed but what :data:`DENIED` names, clone with a namespace flag, and sockets outside the local and
internet families (vsock would reach the hypervisor: it has no namespaces). A denied call fails with EPERM, ``clone3``
with ENOSYS, so that C libraries fall back to ``clone`` whose flags a filter can read. A foreign calling convention
(32-bit, x32) kills the process: its numbers mean other calls.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data (little endian: the low half comes first)

_NAMESPACES = 0x7E020080  # CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink

_AUDIT_ARCH: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name -> (x86_64, aarch64); None: the machine has no such call
_Numbers = Mapping[str, tuple[int | None, int | None]]
DENIED: _Numbers = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "afs_syscall": (183, None),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}

# Memory that no rlimit counts: denied where no memory cgroup counts it either.
UNCOUNTED: _Numbers = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "shmget": (29, 194),
}

_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)


def supported(machine: str) -> bool:
    return machine in _AUDIT_ARCH


def program(machine: str, *, counted_memory: bool) -> bytes:
    """The filter as an array of ``struct sock_filter``, the form that ``bwrap --seccomp`` reads.

    ``counted_memory``: a memory cgroup holds the sandbox, so shared memory may be allowed. Raises ``KeyError`` for a
    machine that is not supported.
    """
    column = 0 if machine == "x86_64" else 1
    tables = [DENIED] if counted_memory else [DENIED, UNCOUNTED]
    denied = sorted({n for table in tables for pair in table.values() if (n := pair[column]) is not None})
    code: list[bytes] = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NR),
    ]
    if machine == "x86_64":
        code += [_op(_AT_LEAST, 0x40000000, 0, 1), _op(_RETURN, _KILL)]  # x32
    code += _block(_CLONE[column], [_op(_LOAD, _ARG0), _op(_ANY_BIT, _NAMESPACES, 1, 0), _op(_RETURN, _ALLOW)], _EPERM)
    code += _block(_CLONE3[column], [], _ENOSYS)
    code += _block(_SOCKET[column], _one_of(_FAMILIES), _EAFNOSUPPORT)
    for number in denied:
        code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | _EPERM)]
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _block(number: int, checks: Sequence[bytes], errno: int) -> list[bytes]:
    """When the call is ``number``: run ``checks`` (which may allow it), else fail with ``errno``."""
    body = [*checks, _op(_RETURN, _ERRNO | errno)]
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _one_of(values: Sequence[int]) -> list[bytes]:
    """Allow the call when its first argument is one of ``values``."""
    last = len(values) - 1
    tests = [_op(_EQUAL, value, last - i, int(i == last)) for i, value in enumerate(values)]
    return [_op(_LOAD, _ARG0), *tests, _op(_RETURN, _ALLOW)]


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jump_true, jump_false, k)
