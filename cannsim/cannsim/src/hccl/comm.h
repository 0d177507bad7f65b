// Private to libhccl: a communicator is an anonymous shared memory segment that all its ranks map.
//
// The segment is a memfd of the rank that made the root info; the others open it through /proc. It
// has no name anywhere, so nothing can be left behind in /dev/shm, whichever way the ranks die.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core.h"
#include "hccl/hccl_types.h"

#define HCCL_API extern "C" CANNSIM_API

namespace cannsim {

constexpr size_t kSlotBytes = size_t(1) << 20;      // per rank: what it publishes in one round
constexpr size_t kMailboxBytes = size_t(256) << 10;  // per pair of ranks: one part of a message
constexpr uint32_t kMaxRanks = 1024;
constexpr size_t kSubCommunicators = 64;

// What a rank is about to do: compared between ranks (EI0005) before any data moves.
struct Call {
  char name[24];
  uint64_t count;   // elements; kAnyCount where ranks may differ
  int32_t type;     // HcclDataType
  int32_t reduce;   // HcclReduceOp, -1: none
  int32_t root;     // -1: none
  uint64_t bytes;   // this rank moves at most so many bytes to or from one peer; may differ
};
constexpr uint64_t kAnyCount = ~uint64_t(0);

struct SubCommunicator {  // published by its rank 0 in the segment of the parent
  std::atomic<uint64_t> id;  // subCommId + 1; 0: free
  int32_t pid, fd;
  uint64_t token;
};

struct RankState {
  std::atomic<int32_t> pid;        // 0: not yet here
  std::atomic<uint32_t> arrivals;  // barriers this rank has reached
  Call call;
};

struct Header {
  uint64_t token;  // tells this segment from an older one with the same pid and fd
  std::atomic<uint32_t> arrived, generation;  // the barrier
  std::atomic<uint32_t> activity;             // changes with every mailbox
  SubCommunicator subs[kSubCommunicators];
  RankState ranks[];
};

struct Mailbox {
  std::atomic<uint32_t> full;
  uint32_t length;  // bytes of this part
  uint64_t total;   // bytes of the whole message
  char data[kMailboxBytes];
};

class Comm {
 public:
  static std::shared_ptr<Comm> attach(int fd, uint32_t rank, uint32_t size, const std::string& name);
  ~Comm();

  // All ranks are here; otherwise the ranks that are missing after `seconds`.
  std::vector<uint32_t> wait_for_ranks(double seconds);

  // False when a rank did not come within the execution timeout; `missing` names them.
  bool barrier(std::vector<uint32_t>& missing);

  char* slot(uint32_t rank) const { return slots_ + size_t(rank) * kSlotBytes; }
  Mailbox& mailbox(uint32_t from, uint32_t to) const { return mailboxes_[size_t(from) * size + to]; }
  Header& header() const { return *header_; }

  const uint32_t rank, size;
  const std::string name;
  double exec_timeout = 1836;  // simulated seconds; 0: wait for ever
  std::mutex collective_mutex;             // one collective at a time
  std::vector<std::mutex> send_mutexes, receive_mutexes;  // one message per peer and direction
  std::shared_ptr<void> device_buffer;     // HCCL_BUFFSIZE, counted as device memory

 private:
  Comm(uint32_t rank, uint32_t size, const std::string& name)
      : rank(rank), size(size), name(name), send_mutexes(size), receive_mutexes(size) {}
  Header* header_ = nullptr;
  char* slots_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  size_t bytes_ = 0;
};

inline std::shared_ptr<Comm>& comm_of(HcclComm handle) { return *static_cast<std::shared_ptr<Comm>*>(handle); }

double hccl_now();
// Sleeps until the word changes from `value`, or about 50 ms.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t value);
void wake_all(std::atomic<uint32_t>& word);

size_t type_size(HcclDataType type);
const char* type_name(HcclDataType type);
// The chip reduces this type with this operation (public tables of HcclAllReduce).
bool can_reduce(HcclDataType type, HcclReduceOp op);
// target[i] = op over sources[k][i], in the order of the ranks, so every rank gets the same bits.
void reduce(void* target, const std::vector<const void*>& sources, size_t count, HcclDataType type, HcclReduceOp op);

// Device errors (sticky) with their documented texts.
int notify_timeout(const Comm& comm, const char* name, const std::vector<uint32_t>& missing);
int inconsistent(const Comm& comm, const char* name, const char* parameter, const std::string& mine,
                 const std::string& theirs, uint32_t other);

}  // namespace cannsim
