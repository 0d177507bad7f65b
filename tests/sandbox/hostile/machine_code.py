"""Runs code of its own below Python: the call that ends every process."""

# ends: ok signal error
import ctypes
import mmap

code = bytes.fromhex("b83e00000048c7c7ffffffffbe090000000f05c3")  # kill(-1, SIGKILL) on x86_64
place = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
place.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(place))
ctypes.CFUNCTYPE(ctypes.c_long)(address)()
