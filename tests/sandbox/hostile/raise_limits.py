"""Raises its own limits."""

# ends: ok
import resource

for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("ESCAPED", kind)
    except (OSError, ValueError):
        pass
