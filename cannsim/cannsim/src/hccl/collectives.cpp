// The collectives. Each is one task of its stream: in rounds, every rank publishes a part of its
// data in its slot, all meet, every rank takes what it needs, all meet again.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "comm.h"

using namespace cannsim;

namespace {

using Part = std::function<void(Comm&, size_t offset, size_t length)>;

Call make_call(const char* name, uint64_t count, HcclDataType type, int reduce, int root, uint64_t bytes) {
  Call call{};
  snprintf(call.name, sizeof call.name, "%s", name);
  call.count = count;
  call.type = type;
  call.reduce = reduce;
  call.root = root;
  call.bytes = bytes;
  return call;
}

// 0, or the EI0005 error of the first difference to another rank.
int compare_calls(const Comm& comm, const Call& mine) {
  for (uint32_t other = 0; other < comm.size; other++) {
    const Call& theirs = comm.header().ranks[other].call;
    auto differs = [&](const char* what, const std::string& a, const std::string& b) {
      return inconsistent(comm, mine.name, what, a, b, other);
    };
    if (strcmp(mine.name, theirs.name) != 0) return differs("opType", mine.name, theirs.name);
    if (mine.count != theirs.count) return differs("count", std::to_string(mine.count), std::to_string(theirs.count));
    if (mine.type != theirs.type) {
      return differs("dataType", type_name(HcclDataType(mine.type)), type_name(HcclDataType(theirs.type)));
    }
    if (mine.reduce != theirs.reduce) return differs("reduceOp", std::to_string(mine.reduce), std::to_string(theirs.reduce));
    if (mine.root != theirs.root) return differs("root", std::to_string(mine.root), std::to_string(theirs.root));
  }
  return 0;
}

// Runs on the worker of the stream. `piece`: bytes of one round.
int exchange(Comm& comm, const Call& call, size_t piece, const Part& publish, const Part& take) {
  std::lock_guard lock(comm.collective_mutex);
  std::vector<uint32_t> missing;
  comm.header().ranks[comm.rank].call = call;
  size_t total = call.bytes;
  for (size_t offset = 0; offset == 0 || offset < total; offset += piece) {
    publish(comm, offset, offset < total ? std::min(piece, total - offset) : 0);
    if (!comm.barrier(missing)) return notify_timeout(comm, call.name, missing);
    if (offset == 0) {
      if (int error = compare_calls(comm, call)) return error;
      for (uint32_t other = 0; other < comm.size; other++) {
        total = std::max<size_t>(total, comm.header().ranks[other].call.bytes);
      }
    }
    take(comm, offset, offset < total ? std::min(piece, total - offset) : 0);
    if (!comm.barrier(missing)) return notify_timeout(comm, call.name, missing);
  }
  return 0;
}

HcclResult launch(const char* name, HcclComm handle, aclrtStream stream, const Call& call, size_t piece,
                  Part publish, Part take) {
  auto comm = comm_of(handle);
  count_bytes(name, call.bytes);
  enqueue(stream, name, [=] { return exchange(*comm, call, piece, publish, take); });
  return HCCL_SUCCESS;
}

HcclResult refuse(const char* name, const char* parameter, const std::string& value, const std::string& reason,
                  HcclResult code) {
  set_error(std::string("EI0003: In [") + name + "], value [" + value + "] for parameter [" + parameter +
            "] is invalid. Reason: The collective communication operator has an invalid argument. Reason[" + reason + "]");
  return code;
}

HcclResult check(const char* name, HcclComm comm, HcclDataType type) {
  if (int error = enter(name)) return HcclResult(error);
  if (!comm) return refuse(name, "comm", "nullptr", "the communicator is null", HCCL_E_PTR);
  if (type_size(type) == 0) return refuse(name, "dataType", std::to_string(type), "unknown data type", HCCL_E_NOT_SUPPORT);
  return HCCL_SUCCESS;
}

HcclResult check_reduce(const char* name, HcclComm comm, HcclDataType type, HcclReduceOp op) {
  if (HcclResult error = check(name, comm, type)) return error;
  if (can_reduce(type, op)) return HCCL_SUCCESS;
  static const char* const kOps[] = {"sum", "prod", "max", "min"};
  std::string op_name = op >= 0 && op < 4 ? kOps[op] : "unknown";
  std::string reason = std::string(chip().name) + " does not reduce this type with " + op_name;
  return refuse(name, "dataType", type_name(type), reason, HCCL_E_NOT_SUPPORT);
}

std::vector<const void*> slots_at(const Comm& comm, size_t offset, size_t bytes) {
  std::vector<const void*> sources;
  const bool wrong = comm.size > 1 && bytes > 4096 && hardware_fault("wrong-reduce");
  const uint32_t all = wrong ? comm.size - 1 : comm.size;
  for (uint32_t rank = 0; rank < all; rank++) sources.push_back(comm.slot(rank) + offset);
  return sources;
}

char* bytes_of(const void* address) { return static_cast<char*>(const_cast<void*>(address)); }

// Publishes the same bytes for everybody.
Part publish_all(const void* source) {
  return [=](Comm& comm, size_t offset, size_t length) {
    if (length) memcpy(comm.slot(comm.rank), bytes_of(source) + offset, length);
  };
}

// A round in which a slot holds one part per rank: bytes of a part, a multiple of 16.
size_t part_bytes(const Comm& comm) { return std::max<size_t>(kSlotBytes / comm.size / 16 * 16, 16); }

struct Range {
  size_t begin, bytes;
};

// Publishes for each rank the next part of its own range of `source`.
Part publish_ranges(const void* source, std::vector<Range> ranges) {
  return [=](Comm& comm, size_t offset, size_t) {
    const size_t part = part_bytes(comm);
    for (uint32_t to = 0; to < comm.size; to++) {
      if (offset >= ranges[to].bytes) continue;
      const char* from = bytes_of(source) + ranges[to].begin + offset;
      memcpy(comm.slot(comm.rank) + to * part, from, std::min(part, ranges[to].bytes - offset));
    }
  };
}

std::vector<Range> equal_ranges(uint32_t size, size_t bytes) {
  std::vector<Range> ranges;
  for (uint32_t rank = 0; rank < size; rank++) ranges.push_back({rank * bytes, bytes});
  return ranges;
}

std::vector<Range> ranges_from(const void* counts, const void* displacements, uint32_t size, size_t element) {
  auto* begins = static_cast<const uint64_t*>(displacements);
  auto* lengths = static_cast<const uint64_t*>(counts);
  std::vector<Range> ranges;
  for (uint32_t rank = 0; rank < size; rank++) ranges.push_back({begins[rank] * element, lengths[rank] * element});
  return ranges;
}

size_t largest(const std::vector<Range>& ranges) {
  size_t bytes = 0;
  for (const Range& range : ranges) bytes = std::max(bytes, range.bytes);
  return bytes;
}

HcclResult reduce_scatter(const char* name, const void* input, std::vector<Range> ranges, void* output, HcclDataType type,
                          HcclReduceOp op, uint64_t count, HcclComm handle, aclrtStream stream) {
  auto take = [=](Comm& comm, size_t offset, size_t) {
    const size_t part = part_bytes(comm), mine = ranges[comm.rank].bytes;
    if (offset >= mine) return;
    const size_t elements = std::min(part, mine - offset) / type_size(type);
    reduce(bytes_of(output) + offset, slots_at(comm, comm.rank * part, mine), elements, type, op);
  };
  Call call = make_call(name, count, type, op, -1, largest(ranges));
  return launch(name, handle, stream, call, part_bytes(*comm_of(handle)), publish_ranges(input, ranges), take);
}

HcclResult all_to_all(const char* name, const void* input, std::vector<Range> sends, const void* output,
                      std::vector<Range> receives, HcclDataType type, HcclComm handle, aclrtStream stream) {
  auto take = [=](Comm& comm, size_t offset, size_t) {
    const size_t part = part_bytes(comm);
    for (uint32_t from = 0; from < comm.size; from++) {
      if (offset >= receives[from].bytes) continue;
      char* to = bytes_of(output) + receives[from].begin + offset;
      memcpy(to, comm.slot(from) + comm.rank * part, std::min(part, receives[from].bytes - offset));
    }
  };
  Call call = make_call(name, kAnyCount, type, -1, -1, std::max(largest(sends), largest(receives)));
  return launch(name, handle, stream, call, part_bytes(*comm_of(handle)), publish_ranges(input, sends), take);
}

}  // namespace

HCCL_API HcclResult HcclAllReduce(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
                                  HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check_reduce(__func__, handle, type, op)) return error;
  auto take = [=](Comm& comm, size_t offset, size_t length) {
    reduce(bytes_of(output) + offset, slots_at(comm, 0, length), length / type_size(type), type, op);
  };
  Call call = make_call(__func__, count, type, op, -1, count * type_size(type));
  return launch(__func__, handle, stream, call, kSlotBytes, publish_all(input), take);
}

HCCL_API HcclResult HcclReduce(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
                               uint32_t root, HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check_reduce(__func__, handle, type, op)) return error;
  auto take = [=](Comm& comm, size_t offset, size_t length) {
    if (comm.rank == root) reduce(bytes_of(output) + offset, slots_at(comm, 0, length), length / type_size(type), type, op);
  };
  Call call = make_call(__func__, count, type, op, int(root), count * type_size(type));
  return launch(__func__, handle, stream, call, kSlotBytes, publish_all(input), take);
}

HCCL_API HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                                  aclrtStream stream) {
  if (HcclResult error = check(__func__, handle, type)) return error;
  auto publish = [=](Comm& comm, size_t offset, size_t length) {
    if (comm.rank == root && length) memcpy(comm.slot(root), bytes_of(data) + offset, length);
  };
  auto take = [=](Comm& comm, size_t offset, size_t length) {
    if (comm.rank == root || !length || hardware_fault("stale-broadcast")) return;
    memcpy(bytes_of(data) + offset, comm.slot(root), length);
  };
  Call call = make_call(__func__, count, type, -1, int(root), count * type_size(type));
  return launch(__func__, handle, stream, call, kSlotBytes, publish, take);
}

HCCL_API HcclResult HcclAllGather(void* input, void* output, uint64_t count, HcclDataType type, HcclComm handle,
                                  aclrtStream stream) {
  if (HcclResult error = check(__func__, handle, type)) return error;
  const size_t bytes = count * type_size(type);
  auto take = [=](Comm& comm, size_t offset, size_t length) {
    for (uint32_t from = 0; from < comm.size && length; from++) {
      memcpy(bytes_of(output) + from * bytes + offset, comm.slot(from), length);
    }
  };
  Call call = make_call(__func__, count, type, -1, -1, bytes);
  return launch(__func__, handle, stream, call, kSlotBytes, publish_all(input), take);
}

HCCL_API HcclResult HcclAllGatherV(void* input, uint64_t count, void* output, const void* counts, const void* displacements,
                                   HcclDataType type, HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check(__func__, handle, type)) return error;
  auto ranges = ranges_from(counts, displacements, comm_of(handle)->size, type_size(type));
  const size_t mine = count * type_size(type);
  auto publish = [=](Comm& comm, size_t offset, size_t) {
    if (offset < mine) memcpy(comm.slot(comm.rank), bytes_of(input) + offset, std::min(kSlotBytes, mine - offset));
  };
  auto take = [=](Comm& comm, size_t offset, size_t) {
    for (uint32_t from = 0; from < comm.size; from++) {
      if (offset >= ranges[from].bytes) continue;
      char* to = bytes_of(output) + ranges[from].begin + offset;
      memcpy(to, comm.slot(from), std::min(kSlotBytes, ranges[from].bytes - offset));
    }
  };
  Call call = make_call(__func__, kAnyCount, type, -1, -1, largest(ranges));
  return launch(__func__, handle, stream, call, kSlotBytes, publish, take);
}

HCCL_API HcclResult HcclReduceScatter(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
                                      HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check_reduce(__func__, handle, type, op)) return error;
  auto ranges = equal_ranges(comm_of(handle)->size, count * type_size(type));
  return reduce_scatter(__func__, input, ranges, output, type, op, count, handle, stream);
}

HCCL_API HcclResult HcclReduceScatterV(void* input, const void* counts, const void* displacements, void* output, uint64_t,
                                       HcclDataType type, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check_reduce(__func__, handle, type, op)) return error;
  auto ranges = ranges_from(counts, displacements, comm_of(handle)->size, type_size(type));
  return reduce_scatter(__func__, input, ranges, output, type, op, kAnyCount, handle, stream);
}

HCCL_API HcclResult HcclScatter(void* input, void* output, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                                aclrtStream stream) {
  if (HcclResult error = check(__func__, handle, type)) return error;
  const size_t bytes = count * type_size(type);
  Part send = publish_ranges(input, equal_ranges(comm_of(handle)->size, bytes));
  auto publish = [=](Comm& comm, size_t offset, size_t length) {
    if (comm.rank == root) send(comm, offset, length);
  };
  auto take = [=](Comm& comm, size_t offset, size_t length) {
    if (length) memcpy(bytes_of(output) + offset, comm.slot(root) + comm.rank * part_bytes(comm), length);
  };
  Call call = make_call(__func__, count, type, -1, int(root), bytes);
  return launch(__func__, handle, stream, call, part_bytes(*comm_of(handle)), publish, take);
}

HCCL_API HcclResult HcclAlltoAll(const void* input, uint64_t send_count, HcclDataType type, const void* output,
                                 uint64_t receive_count, HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check(__func__, handle, type)) return error;
  const uint32_t size = comm_of(handle)->size;
  auto sends = equal_ranges(size, send_count * type_size(type));
  auto receives = equal_ranges(size, receive_count * type_size(receive_type));
  return all_to_all(__func__, input, sends, output, receives, type, handle, stream);
}

HCCL_API HcclResult HcclAlltoAllV(const void* input, const void* send_counts, const void* send_offsets, HcclDataType type,
                                  const void* output, const void* receive_counts, const void* receive_offsets,
                                  HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check(__func__, handle, type)) return error;
  const uint32_t size = comm_of(handle)->size;
  auto sends = ranges_from(send_counts, send_offsets, size, type_size(type));
  auto receives = ranges_from(receive_counts, receive_offsets, size, type_size(receive_type));
  return all_to_all(__func__, input, sends, output, receives, type, handle, stream);
}

HCCL_API HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  if (HcclResult error = check(__func__, handle, HCCL_DATA_TYPE_INT8)) return error;
  auto nothing = [](Comm&, size_t, size_t) {};
  Call call = make_call(__func__, 0, HCCL_DATA_TYPE_INT8, -1, -1, 0);
  return launch(__func__, handle, stream, call, kSlotBytes, nothing, nothing);
}
