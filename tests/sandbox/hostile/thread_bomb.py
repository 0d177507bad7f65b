"""More threads than anyone needs."""

# ends: ok memory error
import threading
import time

for _ in range(5000):
    try:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError:
        break
else:
    print("ESCAPED")
