"""Ignores every signal that can be ignored."""

# ends: time
import signal
import time

for kind in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(kind, signal.SIG_IGN)
while True:
    time.sleep(60)
