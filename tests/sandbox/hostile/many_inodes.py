"""More empty files than the folder may hold."""

# ends: ok error
made = 0
try:
    for i in range(20000):
        open(f"file{i}", "w").close()
        made += 1
except OSError:
    pass
if made > 10000:
    print("ESCAPED", made)
