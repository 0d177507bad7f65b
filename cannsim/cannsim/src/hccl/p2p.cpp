// Point to point. A message moves in parts through the mailbox of its pair of ranks. All messages of
// a group (HcclGroupStart/End, HcclBatchSendRecv) advance together, so their order cannot deadlock.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "comm.h"

using namespace cannsim;

namespace {

struct Message {
  bool send;
  char* data;
  size_t bytes;
  uint32_t peer;
  size_t moved = 0;
  bool started = false;
  bool done() const { return started && moved == bytes; }
};

// One part, if the mailbox is ready. Returns whether something moved; `error` is set on a mismatch.
bool advance(Comm& comm, Message& message, int& error) {
  Mailbox& box = message.send ? comm.mailbox(comm.rank, message.peer) : comm.mailbox(message.peer, comm.rank);
  if (message.done() || (box.full.load() != 0) == message.send) return false;
  if (message.send) {
    size_t length = std::min(kMailboxBytes, message.bytes - message.moved);
    box.total = message.bytes;
    box.length = uint32_t(length);
    if (length) memcpy(box.data, message.data + message.moved, length);
    message.moved += length;
    box.full = 1;
  } else {
    if (box.total != message.bytes) {
      error = inconsistent(comm, "HcclRecv", "count", std::to_string(message.bytes) + " bytes",
                           std::to_string(box.total) + " bytes", message.peer);
      return false;
    }
    if (box.length) memcpy(message.data + message.moved, box.data, box.length);
    message.moved += box.length;
    box.full = 0;
  }
  message.started = true;
  comm.header().activity++;
  wake_all(comm.header().activity);
  return true;
}

// CANNSIM_HARDWARE=slow-link: every message that leaves the process with RANK=1 takes 0.2 s more.
void wait_on_a_slow_link(const std::vector<Message>& messages) {
  static const char* const rank = std::getenv("RANK");
  if (!rank || strcmp(rank, "1") != 0 || !hardware_fault("slow-link")) return;
  for (const Message& message : messages) {
    if (message.send) usleep(200000);
  }
}

int transfer(Comm& comm, std::vector<Message> messages, const char* name) {
  wait_on_a_slow_link(messages);
  // One user of a mailbox at a time; sorted, so that two groups cannot wait for each other.
  std::vector<std::mutex*> needed;
  for (const Message& message : messages) {
    needed.push_back(message.send ? &comm.send_mutexes[message.peer] : &comm.receive_mutexes[message.peer]);
  }
  std::sort(needed.begin(), needed.end());
  needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
  std::vector<std::unique_lock<std::mutex>> locks;
  for (std::mutex* mutex : needed) locks.emplace_back(*mutex);

  double last_progress = hccl_now();
  for (;;) {
    const uint32_t activity = comm.header().activity;
    bool moved = false, all_done = true;
    int error = 0;
    std::vector<std::pair<bool, uint32_t>> blocked;  // messages of one pair keep their order
    for (Message& message : messages) {
      std::pair<bool, uint32_t> lane{message.send, message.peer};
      if (message.done() || std::find(blocked.begin(), blocked.end(), lane) != blocked.end()) continue;
      moved |= advance(comm, message, error);
      if (error) return error;
      if (!message.done()) blocked.push_back(lane), all_done = false;
    }
    for (const Message& message : messages) all_done &= message.done();
    if (all_done) return 0;
    if (moved) {
      last_progress = hccl_now();
      continue;
    }
    if (comm.exec_timeout > 0 && hccl_now() - last_progress > real_seconds(comm.exec_timeout)) {
      std::vector<uint32_t> missing;
      for (const Message& message : messages) {
        if (!message.done()) missing.push_back(message.peer);
      }
      return notify_timeout(comm, name, missing);
    }
    wait_for_change(comm.header().activity, activity);
  }
}

struct Pending {
  HcclComm comm;
  aclrtStream stream;
  const char* name;
  std::vector<Message> messages;
};
thread_local int t_group_depth = 0;
thread_local std::vector<Pending> t_group;

void launch(HcclComm handle, aclrtStream stream, const char* name, const std::vector<Message>& messages) {
  auto comm = comm_of(handle);
  for (const Message& message : messages) count_bytes(name, message.bytes);
  enqueue(stream, name, [=] { return transfer(*comm, messages, name); });
}

HcclResult submit(const char* name, const Message& message, HcclComm comm, aclrtStream stream) {
  if (message.peer >= comm_of(comm)->size) {
    set_error(std::string("EI0003: In [") + name + "], value [" + std::to_string(message.peer) +
              "] for parameter [remote rank] is invalid. Reason: The collective communication operator has an invalid argument.");
    return HCCL_E_PARA;
  }
  if (t_group_depth == 0) {
    launch(comm, stream, name, {message});
    return HCCL_SUCCESS;
  }
  for (Pending& pending : t_group) {
    if (pending.comm == comm && pending.stream == stream) {
      pending.messages.push_back(message);
      return HCCL_SUCCESS;
    }
  }
  t_group.push_back({comm, stream, name, {message}});
  return HCCL_SUCCESS;
}

}  // namespace

HCCL_API HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm,
                             aclrtStream stream) {
  if (int error = enter(__func__)) return HcclResult(error);
  return submit(__func__, {true, static_cast<char*>(data), count * type_size(type), to}, comm, stream);
}

HCCL_API HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm,
                             aclrtStream stream) {
  if (int error = enter(__func__)) return HcclResult(error);
  return submit(__func__, {false, static_cast<char*>(data), count * type_size(type), from}, comm, stream);
}

HCCL_API HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  if (int error = enter(__func__)) return HcclResult(error);
  std::vector<Message> messages;
  for (const HcclSendRecvItem* item = items; item != items + count; item++) {
    const size_t bytes = item->count * type_size(item->dataType);
    messages.push_back({item->sendRecvType == HCCL_SEND, static_cast<char*>(item->buf), bytes, item->remoteRank});
  }
  launch(comm, stream, __func__, messages);
  return HCCL_SUCCESS;
}

// In CANN these two are exported by libhcomm.
HCCL_API HcclResult HcclGroupStart() {
  if (int error = enter(__func__)) return HcclResult(error);
  t_group_depth++;
  return HCCL_SUCCESS;
}

HCCL_API HcclResult HcclGroupEnd() {
  if (int error = enter(__func__)) return HcclResult(error);
  if (t_group_depth == 0) return HCCL_E_PARA;
  if (--t_group_depth > 0) return HCCL_SUCCESS;
  auto group = std::move(t_group);
  t_group.clear();
  for (const Pending& pending : group) launch(pending.comm, pending.stream, pending.name, pending.messages);
  return HCCL_SUCCESS;
}
