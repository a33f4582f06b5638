"""System calls that programs are refused, as a seccomp filter: those that reach into other processes, such as the first
one of the sandbox, which the limits do not bind; memory that no limit counts; and parts of the kernel that no such
program needs."""

from __future__ import annotations

import platform
import struct

from examples.workloads.sandbox.permission import SandboxUnavailable

REFUSED: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "shmget": 29,
            "semget": 64,
            "msgget": 68,
            "ptrace": 101,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "perf_event_open": 298,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "memfd_create": 319,
            "bpf": 321,
            "userfaultfd": 323,
            "io_uring_setup": 425,
            "pidfd_getfd": 438,
            "memfd_secret": 447,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "ptrace": 117,
            "msgget": 186,
            "semget": 190,
            "shmget": 194,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "perf_event_open": 241,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "memfd_create": 279,
            "bpf": 280,
            "userfaultfd": 282,
            "io_uring_setup": 425,
            "pidfd_getfd": 438,
            "memfd_secret": 447,
        },
    ),
}
"""By machine: its number in `linux/audit.h`, and the numbers of the calls."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of BPF: BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K, BPF_RET|BPF_K."""
ALLOW, NOT_PERMITTED, KILL = 0x7FFF0000, 0x00050001, 0x80000000
OTHER_ABI = 0x40000000
"""Numbers from here on are those of x32, a second set of the same calls."""


def refusing_filter(machine: str = platform.machine()) -> bytes:
    """A filter of the form that `bwrap --seccomp` reads: the calls fail with EPERM, other machines' calls kill.

    Raises SandboxUnavailable for a machine whose numbers are not known.
    """
    if machine not in REFUSED:
        raise SandboxUnavailable(f"the sandbox knows {' and '.join(REFUSED)}, not {machine}. Nothing was run.")
    audit, calls = REFUSED[machine]
    count = len(calls)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 0, count + 3, audit), (LOAD, 0, 0, 0), (AT_LEAST, count + 1, 0, OTHER_ABI)]
    steps += [(EQUAL, count + 1 - place, 0, number) for place, number in enumerate(calls.values())]
    steps += [(RETURN, 0, 0, result) for result in (ALLOW, KILL, NOT_PERMITTED)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
