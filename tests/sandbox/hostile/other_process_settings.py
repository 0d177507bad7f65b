"""Slows the evaluator down: lowers its priority, ties it to one processor, attaches to and removes its memory."""

# ends: ok
import ctypes
import json
import os

number = json.loads(input())["parent"]
libc = ctypes.CDLL(None, use_errno=True)
tries = [
    lambda: os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, number)),
    lambda: os.sched_setaffinity(number, os.sched_getaffinity(number)),
    lambda: os.sched_setparam(number, os.sched_getparam(number)),
    lambda: os.sched_setscheduler(number, os.sched_getscheduler(number), os.sched_param(0)),
]
for act in tries:
    try:
        act()
        print("ESCAPED")
    except OSError:
        pass
for name in ("shmat", "shmctl", "semctl", "msgctl"):
    ctypes.set_errno(0)
    getattr(libc, name)(-1, 0, 0, 0)
    print(name, ctypes.get_errno())  # 1: not permitted, whatever it is; 22: there is no such thing
    if ctypes.get_errno() != 1 and os.path.exists(f"/proc/{number}"):
        print("ESCAPED")
