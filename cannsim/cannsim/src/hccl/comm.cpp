// The shared segment of a communicator: mapping it, waiting for ranks, the barrier.
#include "comm.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

namespace cannsim {

namespace {

std::string join(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (uint32_t rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

size_t page_align(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

double hccl_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A shared futex works between processes that map the same memory at different addresses.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t value) {
  timespec limit{0, 50'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::shared_ptr<Comm> Comm::attach(int fd, uint32_t rank, uint32_t size, const std::string& name) {
  std::shared_ptr<Comm> comm(new Comm(rank, size, name));
  const size_t head = page_align(sizeof(Header) + size * sizeof(RankState));
  const size_t slots = size_t(size) * kSlotBytes;
  const size_t boxes = page_align(size_t(size) * size * sizeof(Mailbox));
  comm->bytes_ = head + slots + boxes;
  // Every rank sets the same length; pages take memory only when they are used.
  if (ftruncate(fd, off_t(comm->bytes_)) != 0) return nullptr;
  void* base = mmap(nullptr, comm->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return nullptr;
  comm->header_ = static_cast<Header*>(base);
  comm->slots_ = static_cast<char*>(base) + head;
  comm->mailboxes_ = reinterpret_cast<Mailbox*>(comm->slots_ + slots);
  comm->header_->ranks[rank].pid = getpid();
  return comm;
}

Comm::~Comm() {
  if (header_) munmap(header_, bytes_);
}

std::vector<uint32_t> Comm::wait_for_ranks(double seconds) {
  const double end = hccl_now() + seconds;
  for (;;) {
    std::vector<uint32_t> missing;
    for (uint32_t other = 0; other < size; other++) {
      if (header_->ranks[other].pid == 0) missing.push_back(other);
    }
    if (missing.empty() || hccl_now() > end) return missing;
    usleep(500);
  }
}

bool Comm::barrier(std::vector<uint32_t>& missing) {
  const uint32_t generation = header_->generation.load();
  const uint32_t mine = ++header_->ranks[rank].arrivals;
  if (header_->arrived.fetch_add(1) + 1 == size) {
    header_->arrived = 0;
    header_->generation.fetch_add(1);
    wake_all(header_->generation);
    return true;
  }
  const double end = hccl_now() + real_seconds(exec_timeout);
  while (header_->generation.load() == generation) {
    wait_for_change(header_->generation, generation);
    if (exec_timeout > 0 && hccl_now() > end && header_->generation.load() == generation) {
      for (uint32_t other = 0; other < size; other++) {
        if (header_->ranks[other].arrivals < mine) missing.push_back(other);
      }
      return false;
    }
  }
  return true;
}

int notify_timeout(const Comm& comm, const char* name, const std::vector<uint32_t>& missing) {
  set_error(
      "EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the "
      "Notify record from remote rank: [" + join(missing) + "]. base information: [rank: " + std::to_string(comm.rank) +
      ", timeout: " + std::to_string(int(comm.exec_timeout)) + " s]. task information: [" + name +
      "]. group information: [" + comm.name + ", ranks: " + std::to_string(comm.size) + "]");
  return ACL_ERROR_RT_FFTS_PLUS_TIMEOUT;
}

int inconsistent(const Comm& comm, const char* name, const char* parameter, const std::string& mine,
                 const std::string& theirs, uint32_t other) {
  set_error(std::string("EI0005: The arguments for collective communication are inconsistent between ranks: tag [") + name +
            "_" + comm.name + "], parameter [" + parameter + "], local [" + mine + " on rank " + std::to_string(comm.rank) +
            "], remote [" + theirs + " on rank " + std::to_string(other) + "]");
  return ACL_ERROR_RT_SUSPECT_REMOTE_ERROR;
}

}  // namespace cannsim
