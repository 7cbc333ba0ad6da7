"""The seccomp filter, run by a small interpreter of classic BPF: it must say the right thing for every call."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.sandbox import seccomp

ALLOW, EPERM, ENOSYS, EAFNOSUPPORT, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050061, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = sorted(ARCH)


def verdict(program: bytes, number: int, *, arch: int, first: int = 0) -> int:
    """What the kernel would return for this call."""
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    data = struct.pack("<IIQ6Q", number, arch, 0, first, 0, 0, 0, 0, 0)
    at = accumulator = 0
    while True:
        op, jump_true, jump_false, k = code[at]
        at += 1
        if op == 0x20:
            accumulator = int(struct.unpack_from("<I", data, k)[0])
        elif op == 0x06:
            return int(k)
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += jump_true if holds else jump_false


def column(machine: str) -> int:
    return 0 if machine == "x86_64" else 1


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("counted", [True, False])
def test_what_is_named_is_denied_and_nothing_else(machine: str, counted: bool) -> None:
    program = seccomp.program(machine, counted_memory=counted)
    special = {56, 435, 41} if machine == "x86_64" else {220, 435, 198}
    tables = [seccomp.DENIED] if counted else [seccomp.DENIED, seccomp.UNCOUNTED]
    denied = {pair[column(machine)] for table in tables for pair in table.values()} - {None}
    for number in set(range(1000)) - special:
        expected = EPERM if number in denied else ALLOW
        assert verdict(program, number, arch=ARCH[machine]) == expected, number


@pytest.mark.parametrize("machine", MACHINES)
def test_the_issue_s_list_is_denied(machine: str) -> None:
    must = {"mount", "ptrace", "keyctl", "bpf", "userfaultfd", "perf_event_open", "unshare", "setns", "kexec_load"}
    must |= {"init_module", "finit_module", "io_uring_setup", "process_vm_writev", "pidfd_getfd", "open_by_handle_at"}
    assert must <= set(seccomp.DENIED)
    assert all(seccomp.DENIED[name][column(machine)] is not None for name in must)


@given(flags=st.integers(0, 2**32 - 1), machine=st.sampled_from(MACHINES))
def test_clone_is_denied_with_a_namespace_flag_only(flags: int, machine: str) -> None:
    program = seccomp.program(machine, counted_memory=True)
    number = 56 if machine == "x86_64" else 220
    namespaces = 0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
    expected = EPERM if flags & namespaces else ALLOW
    assert verdict(program, number, arch=ARCH[machine], first=flags) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_clone3_looks_unimplemented(machine: str) -> None:
    program = seccomp.program(machine, counted_memory=True)
    assert verdict(program, 435, arch=ARCH[machine]) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_socket_families(machine: str) -> None:
    program = seccomp.program(machine, counted_memory=True)
    number = 41 if machine == "x86_64" else 198
    for family in range(64):
        expected = ALLOW if family in (1, 2, 10, 16) else EAFNOSUPPORT
        assert verdict(program, number, arch=ARCH[machine], first=family) == expected


def test_other_calling_conventions_are_fatal() -> None:
    for machine in MACHINES:
        assert verdict(seccomp.program(machine, counted_memory=True), 0, arch=0x40000003) == KILL
    program = seccomp.program("x86_64", counted_memory=True)
    assert verdict(program, 0x40000000 | 39, arch=ARCH["x86_64"]) == KILL


def test_other_machines_are_not_supported() -> None:
    assert not seccomp.supported("riscv64")
    with pytest.raises(KeyError):
        seccomp.program("riscv64", counted_memory=True)
