"""Text that the compiler cannot digest."""

# ends: error memory signal output
compile("(" * 100_000 + ")" * 100_000, "x", "eval")
