"""A filter for what programs in the sandbox may ask of the kernel, in the form that bubblewrap's ``--seccomp`` takes.

Comes out: a classic BPF program (``struct sock_filter`` in native order, linux/filter.h, linux/seccomp.h). Refused are
memory that no process is seen to hold, keys and sockets that are not bound to a namespace, and entrances to large parts
of the kernel that no such program needs.
"""

import errno
import platform
import struct

__all__ = ("program",)

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in ``struct seccomp_data``; both machines are little-endian."""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OTHER_ABI = {"x86_64": 0x40000000}
"""Numbers from here on are the same calls by another name (x32)."""
_FAMILIES = (1, 2, 10, 16)
"""Sockets within namespaces: unix, IPv4, IPv6 and netlink. AF_VSOCK, for one, reaches the host of a virtual machine."""
_SOCKET = {"x86_64": 41, "aarch64": 198}
_REFUSED: dict[str, tuple[int, int, int]] = {
    # memory that belongs to no process until it is mapped: none would be seen to hold it
    "memfd_create": (319, 279, errno.ENOMEM),
    "memfd_secret": (447, 447, errno.ENOMEM),
    "shmget": (29, 194, errno.ENOMEM),
    "msgget": (68, 186, errno.ENOMEM),
    "semget": (64, 190, errno.ENOMEM),
    # keyrings belong to the uid, which all programs of a worker share
    "add_key": (248, 217, errno.EPERM),
    "request_key": (249, 218, errno.EPERM),
    "keyctl": (250, 219, errno.EPERM),
    "bpf": (321, 280, errno.EPERM),
    "perf_event_open": (298, 241, errno.EPERM),
    "userfaultfd": (323, 282, errno.EPERM),
    "io_uring_setup": (425, 425, errno.ENOSYS),
    "ptrace": (101, 117, errno.EPERM),
    "process_vm_readv": (310, 270, errno.EPERM),
    "process_vm_writev": (311, 271, errno.EPERM),
}
"""By name: the numbers on x86_64 and on aarch64, and what the program is told."""


def program(machine: str = "") -> bytes:
    """The filter for a machine (this one); empty for machines that it is not known for.

    >>> len(program("x86_64")) % 8, program("riscv64")
    (0, b'')
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return b""
    column = list(_MACHINES).index(machine)
    out = [_line(_LOAD, _MACHINE), _line(_EQUAL, _MACHINES[machine], 1, 0), _line(_RETURN, _KILL)]
    out.append(_line(_LOAD, _NUMBER))
    if machine in _OTHER_ABI:
        out += [_line(_AT_LEAST, _OTHER_ABI[machine], 0, 1), _line(_RETURN, _KILL)]
    for numbers in _REFUSED.values():
        out += [_line(_EQUAL, numbers[column], 0, 1), _line(_RETURN, _REFUSE | numbers[2])]
    out += [_line(_EQUAL, _SOCKET[machine], 1, 0), _line(_RETURN, _ALLOW), _line(_LOAD, _FIRST_ARGUMENT)]
    for place, family in enumerate(_FAMILIES):
        out.append(_line(_EQUAL, family, len(_FAMILIES) - place, 0))
    out += [_line(_RETURN, _REFUSE | errno.EAFNOSUPPORT), _line(_RETURN, _ALLOW)]
    return b"".join(out)


def _line(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)
