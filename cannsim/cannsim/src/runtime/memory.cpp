// Device memory is host memory of this process, counted per device against its limit. Behind every
// block lies a page without access, so an operator that writes too far crashes here and now.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <set>

#include "internal.h"

namespace cannsim {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t(2) << 20;  // granularity of device memory of 1 MB and more

struct Block {
  size_t bytes;  // accessible
  int device;
};

// Leaked on purpose: freed memory is looked up until the very end of the process.
struct Memory {
  std::mutex mutex;
  std::map<char*, Block> device_blocks;  // aclrtMalloc and reserved virtual ranges
  std::map<char*, size_t> pinned;        // page-locked host memory
  std::set<void*> shown;                 // parts of it that the device was told of
  std::map<char*, size_t> mapped;        // parts of virtual ranges with memory behind them
};

Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

size_t round_up(size_t bytes) {
  size_t unit = bytes >= (size_t(1) << 20) ? kHugePage : kPage;
  return (bytes + unit - 1) / unit * unit;
}

// Counts `bytes` on a device, or refuses: the real limit of the device, or CANNSIM_OOM_AT.
aclError charge(int index, size_t bytes, const char* where) {
  static const size_t fail_at = size_t(env_double("CANNSIM_OOM_AT", 0));
  Device& owner = device(index);
  size_t limit = fail_at ? std::min(fail_at, memory_limit()) : memory_limit();
  if (owner.allocated + bytes + machine_used_by_others(index) > limit) {
    set_error(describe_error(ACL_ERROR_RT_MEMORY_ALLOCATION, where) + " Requested " + std::to_string(bytes) +
              " bytes, " + std::to_string(owner.allocated) + " of " + std::to_string(limit) + " in use.");
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  owner.allocated += bytes;
  if (owner.allocated > owner.peak) owner.peak = owner.allocated.load();
  machine_set_used(index, owner.allocated);
  trace_value("memory", where, index, owner.allocated);
  return ACL_SUCCESS;
}

void uncharge(int index, size_t bytes) {
  device(index).allocated -= bytes;
  machine_set_used(index, device(index).allocated);
  trace_value("memory", "free", index, device(index).allocated);
}

// Uninitialised device memory is not zero on hardware: CANNSIM_POISON=1 fills it with 0xff (nan).
void poison(void* address, size_t bytes) {
  static const bool wanted = env_long("CANNSIM_POISON", 0) != 0;
  if (wanted) memset(address, 0xff, bytes);
}

aclError allocate(void** address, size_t bytes, const char* where) {
  *address = nullptr;
  if (bytes == 0) return ACL_ERROR_RT_PARAM_INVALID;
  const int index = current_device();
  const size_t size = round_up(bytes);
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (aclError error = charge(index, size, where)) return error;
  void* block = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) {
    uncharge(index, size);
    set_error(describe_error(ACL_ERROR_RT_MEMORY_ALLOCATION, where));
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  mprotect(static_cast<char*>(block) + size, kPage, PROT_NONE);
  poison(block, size);
  all.device_blocks[static_cast<char*>(block)] = {size, index};
  *address = block;
  return ACL_SUCCESS;
}

bool contains(const std::map<char*, size_t>& ranges, const void* address) {
  auto* wanted = static_cast<char*>(const_cast<void*>(address));
  auto after = ranges.upper_bound(wanted);
  if (after == ranges.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return wanted < start + bytes;
}

// The device that owns the address, -1: not device memory.
int owner_of(const void* address) {
  auto* wanted = static_cast<char*>(const_cast<void*>(address));
  const auto& blocks = memory().device_blocks;
  auto after = blocks.upper_bound(wanted);
  if (after == blocks.begin()) return -1;
  const auto& [start, block] = *std::prev(after);
  return wanted < start + block.bytes ? block.device : -1;
}

bool is_pageable(const void* address) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  return owner_of(address) < 0 && !contains(all.pinned, address);
}

int check_copy(void* target, size_t capacity, const void* source, size_t bytes, const char* where) {
  if (bytes == 0) return ACL_SUCCESS;
  if (target && source && bytes <= capacity) return ACL_SUCCESS;
  set_error(std::string("EE1011: ") + where + " failed. Value " + std::to_string(bytes) +
            " for parameter count is invalid. Reason: null pointer or larger than destMax " + std::to_string(capacity) + ".");
  return ACL_ERROR_RT_PARAM_INVALID;
}

// With pageable host memory the "asynchronous" copy returns when it is done (documented), and
// cannot be captured.
aclError copy_async(void* target, const void* source, size_t bytes, aclrtStream handle, const char* where) {
  Stream* stream = resolve_stream(handle);
  const bool blocking = bytes > 0 && (is_pageable(source) || is_pageable(target));
  if (blocking && stream->capture) {
    stream->capture->invalid = ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC;
    set_error(std::string("EE1016: ") + where + " failed. Reason: a copy of pageable host memory cannot be captured.");
    return ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC;
  }
  enqueue(handle, where, [=] { return memmove(target, source, bytes), 0; });
  if (blocking) stream->wait_idle(-1);
  return device(stream->device_index).report();
}

}  // namespace

}  // namespace cannsim

using namespace cannsim;

API aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  ENTER_WITH_DEVICE();
  return allocate(address, bytes + 32, __func__);  // CANN adds 32 bytes
}

API aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy) {
  ENTER_WITH_DEVICE();
  return allocate(address, bytes, __func__);
}

API aclError aclrtFree(void* address) {
  ENTER();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto found = all.device_blocks.find(static_cast<char*>(address));
  if (found == all.device_blocks.end()) return ACL_ERROR_RT_PARAM_INVALID;
  munmap(address, found->second.bytes + kPage);
  uncharge(found->second.device, found->second.bytes);
  all.device_blocks.erase(found);
  return ACL_SUCCESS;
}

API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  ENTER_WITH_DEVICE();
  size_t used = device(current_device()).allocated + machine_used_by_others(current_device());
  *total = memory_limit();
  *free_bytes = used < *total ? *total - used : 0;
  return ACL_SUCCESS;
}

API aclError aclrtGetMemUsageInfo(int32_t index, aclrtMemUsageInfo* info, size_t capacity, size_t* count) {
  *count = capacity > 0 ? 1 : 0;
  if (capacity == 0) return ACL_SUCCESS;
  memset(info, 0, sizeof *info);
  snprintf(info->name, sizeof info->name, "APP");
  info->curMemSize = device(index).allocated;
  info->memPeakSize = device(index).peak;
  return ACL_SUCCESS;
}

// ---- page-locked host memory

API aclError aclrtMallocHost(void** address, size_t bytes) {
  ENTER();
  if (bytes == 0) bytes = 1;
  if (posix_memalign(address, kPage, bytes) != 0) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  all.pinned[static_cast<char*>(*address)] = bytes;
  return ACL_SUCCESS;
}

API aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, bytes);
}

API aclError aclrtFreeHost(void* address) {
  ENTER();
  {
    Memory& all = memory();
    std::lock_guard lock(all.mutex);
    if (all.pinned.erase(static_cast<char*>(address)) == 0) return ACL_ERROR_RT_PARAM_INVALID;
  }
  free(address);
  return ACL_SUCCESS;
}

API aclError aclrtHostRegisterV2(void* address, uint64_t bytes, uint32_t) {
  ENTER();
  if (!address || !bytes) return ACL_ERROR_RT_PARAM_INVALID;
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  bool added = all.pinned.emplace(static_cast<char*>(address), bytes).second;
  return added ? ACL_SUCCESS : ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

// The device sees the memory under the address of the host. A part of what aclrtMallocHost gave is pinned
// already and only mapped.
API aclError aclrtHostRegister(void* address, uint64_t bytes, aclrtHostRegisterType, void** device_address) {
  *device_address = address;
  {
    Memory& all = memory();
    std::lock_guard lock(all.mutex);
    auto next = all.pinned.upper_bound(static_cast<char*>(address));
    if (bytes && next != all.pinned.begin()) {
      auto [start, size] = *std::prev(next);
      if (static_cast<char*>(address) + bytes <= start + size && all.shown.insert(address).second) return ACL_SUCCESS;
    }
  }
  return aclrtHostRegisterV2(address, bytes, 0);
}

API aclError aclrtHostUnregister(void* address) {
  ENTER();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (all.shown.erase(address)) return ACL_SUCCESS;
  return all.pinned.erase(static_cast<char*>(address)) ? ACL_SUCCESS : ACL_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

// Pageable host memory must be UNREGISTERED: is_pinned() of torch_npu depends on it, and with HOST
// its asynchronous copies would read memory that is already freed.
API aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  ENTER();
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (int owner = owner_of(address); owner >= 0) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = uint32_t(owner);
  } else if (contains(all.pinned, address)) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  }
  return ACL_SUCCESS;
}

// ---- copies

// Synchronous for the host, but ordered with no stream: whoever needs the result of a stream must
// synchronise it first.
API aclError aclrtMemcpy(void* target, size_t capacity, const void* source, size_t bytes, aclrtMemcpyKind) {
  ENTER_WITH_DEVICE();
  if (int error = check_copy(target, capacity, source, bytes, __func__)) return error;
  if (int error = device(current_device()).report()) return error;
  count_bytes(__func__, bytes);
  memmove(target, source, bytes);
  return ACL_SUCCESS;
}

API aclError aclrtMemcpyAsync(void* target, size_t capacity, const void* source, size_t bytes, aclrtMemcpyKind,
                              aclrtStream stream) {
  ENTER();
  if (int error = check_copy(target, capacity, source, bytes, __func__)) return error;
  count_bytes(__func__, bytes);
  return copy_async(target, source, bytes, stream, __func__);
}

API aclError aclrtMemcpyAsyncWithCondition(void* target, size_t capacity, const void* source, size_t bytes,
                                           aclrtMemcpyKind, aclrtStream stream) {
  ENTER();
  if (int error = check_copy(target, capacity, source, bytes, __func__)) return error;
  return copy_async(target, source, bytes, stream, __func__);
}

API aclError aclrtMemset(void* target, size_t capacity, int32_t value, size_t bytes) {
  ENTER_WITH_DEVICE();
  if (int error = check_copy(target, capacity, target, bytes, __func__)) return error;
  memset(target, value, bytes);
  return ACL_SUCCESS;
}

API aclError aclrtMemsetAsync(void* target, size_t capacity, int32_t value, size_t bytes, aclrtStream stream) {
  ENTER();
  if (int error = check_copy(target, capacity, target, bytes, __func__)) return error;
  enqueue(stream, __func__, [=] { return memset(target, value, bytes), 0; });
  return ACL_SUCCESS;
}

API aclError aclrtCmoAsync(void*, size_t, aclrtCmoType, aclrtStream) { return ACL_SUCCESS; }  // cache hint

// ---- virtual memory (expandable segments): reserve addresses, then map physical memory into them

namespace {
struct Physical {
  size_t bytes;
  int device;
};
}  // namespace

API aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  ENTER_WITH_DEVICE();
  *address = mmap(nullptr, bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  all.device_blocks[static_cast<char*>(*address)] = {bytes, current_device()};
  return ACL_SUCCESS;
}

API aclError aclrtReleaseMemAddress(void* address) {
  ENTER();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto found = all.device_blocks.find(static_cast<char*>(address));
  if (found == all.device_blocks.end()) return ACL_ERROR_RT_PARAM_INVALID;
  munmap(address, found->second.bytes + kPage);
  all.device_blocks.erase(found);
  return ACL_SUCCESS;
}

API aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties,
                                 uint64_t) {
  ENTER_WITH_DEVICE();
  bool named = properties && properties->location.type == ACL_MEM_LOCATION_TYPE_DEVICE;
  int index = named ? int(properties->location.id) : current_device();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (aclError error = charge(index, bytes, __func__)) return error;
  *handle = new Physical{bytes, index};
  return ACL_SUCCESS;
}

API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  ENTER();
  auto* physical = static_cast<Physical*>(handle);
  uncharge(physical->device, physical->bytes);
  delete physical;
  return ACL_SUCCESS;
}

API aclError aclrtMapMem(void* address, size_t bytes, size_t, aclrtDrvMemHandle, uint64_t) {
  ENTER();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) return ACL_ERROR_RT_PARAM_INVALID;
  poison(address, bytes);
  all.mapped[static_cast<char*>(address)] = bytes;
  return ACL_SUCCESS;
}

API aclError aclrtUnmapMem(void* address) {
  ENTER();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  auto found = all.mapped.find(static_cast<char*>(address));
  if (found == all.mapped.end()) return ACL_ERROR_RT_PARAM_INVALID;
  // A fresh inaccessible mapping gives the memory back to the host.
  mmap(address, found->second, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  all.mapped.erase(found);
  return ACL_SUCCESS;
}
