"""Starts a program that has more rights than its caller."""

# ends: ok error
import os
import subprocess

for program in ("/usr/bin/su", "/usr/bin/sudo", "/usr/bin/mount"):
    if os.path.exists(program):
        try:
            found = subprocess.run([program, "-c", "id -u"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if found.stdout.strip() == "0":
                print("ESCAPED", program)
        except OSError:
            pass
