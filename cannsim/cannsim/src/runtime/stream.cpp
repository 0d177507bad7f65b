// Streams: one worker thread each, started by the first task. A task really runs later than its
// launch, so code that forgets to synchronise reads old data here as it does on hardware.
// CANNSIM_DELAY_US (fixed) and CANNSIM_JITTER_US (random, up to) delay every task to widen races.
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <set>

#include "internal.h"

namespace cannsim {

namespace {

constexpr size_t kQueueDepth = 4096;  // a launch waits when so many tasks are queued, as on hardware

// Leaked on purpose: worker threads live until the end of the process.
struct AllStreams {
  std::mutex mutex;
  std::set<Stream*> alive;
  Stream* defaults[kMaxDevices] = {};
  int next_id = 1;
  int taken[kMaxDevices] = {};
};

AllStreams& all_streams() {
  static auto* instance = new AllStreams;
  return *instance;
}

void delay_task(int stream_id) {
  static const long fixed = env_long("CANNSIM_DELAY_US", 0);
  static const long jitter = env_long("CANNSIM_JITTER_US", 0);
  if (fixed == 0 && jitter == 0) return;
  static thread_local std::mt19937 random(unsigned(env_long("CANNSIM_SEED", 0) + stream_id));
  long extra = jitter > 0 ? std::uniform_int_distribution<long>(0, jitter)(random) : 0;
  usleep(useconds_t(fixed + extra));
}

// Null when the device has none left.
Stream* create_stream() {
  if (!take_streams(current_device(), 1)) return nullptr;
  AllStreams& all = all_streams();
  std::lock_guard lock(all.mutex);
  auto* stream = new Stream(current_device(), all.next_id++);
  all.alive.insert(stream);
  return stream;
}

std::vector<Stream*> streams_of(int device_index) {
  AllStreams& all = all_streams();
  std::lock_guard lock(all.mutex);
  std::vector<Stream*> found;
  for (Stream* stream : all.alive) {
    if (stream->device_index == device_index) found.push_back(stream);
  }
  return found;
}

// A queued function that was told to hang: the device reports it after its timeout.
int hang_on_device(const char* name) {
  bool collective = std::string(name).rfind("Hccl", 0) == 0;
  double limit = collective ? env_double("HCCL_EXEC_TIMEOUT", 1836) : op_timeout_seconds();
  double end = now_seconds() + real_seconds(limit);
  while (now_seconds() < end) usleep(10000);
  int code = collective ? 507048 : 507014;
  set_error(describe_error(code, name));
  return code;
}

}  // namespace

bool take_streams(int device_index, int count) {
  static const long limit = env_long("CANNSIM_STREAMS", 2048);
  AllStreams& all = all_streams();
  std::lock_guard lock(all.mutex);
  if (all.taken[device_index] + count > limit) return false;
  all.taken[device_index] += count;
  return true;
}

void give_streams(int device_index, int count) {
  AllStreams& all = all_streams();
  std::lock_guard lock(all.mutex);
  all.taken[device_index] -= count;
}

void Stream::push(Task task) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return queue.size() < kQueueDepth || stopping; });
  if (!started) {
    started = true;
    std::thread(&Stream::work, this).detach();
  }
  queue.push_back(std::move(task));
  pushed++;
  changed.notify_all();
}

void Stream::work() {
  Device& my_device = device(device_index);
  set_current_device(device_index);
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return stopping || !queue.empty(); });
    if (stopping) break;
    {
      Task task = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      delay_task(id);
      bool failed;
      {
        std::lock_guard guard(my_device.mutex);
        failed = my_device.error != 0;
      }
      if (!failed || task.after_error) {
        const double begin = traces_detail() ? now_seconds() : 0;
        int code = task.run();
        trace_task(task.name, device_index, id, begin);
        if (code) {
          std::string text = take_thread_error();
          my_device.fail(code, text.empty() ? describe_error(code, task.name) : text);
        }
      }
    }  // what the task captured is released before it counts as done
    lock.lock();
    done++;
    changed.notify_all();
  }
  queue.clear();
  done = pushed;
  changed.notify_all();
}

bool Stream::wait_idle(double seconds) {
  std::unique_lock lock(mutex);
  const uint64_t target = pushed;
  auto finished = [&] { return done >= target; };
  if (seconds < 0) {
    changed.wait(lock, finished);
    return true;
  }
  return changed.wait_for(lock, std::chrono::duration<double>(seconds), finished);
}

bool Stream::idle() {
  std::lock_guard lock(mutex);
  return done == pushed;
}

Stream* resolve_stream(aclrtStream stream) {
  if (stream) return static_cast<Stream*>(stream);
  int index = current_device() < 0 ? 0 : current_device();
  AllStreams& all = all_streams();
  std::lock_guard lock(all.mutex);
  if (!all.defaults[index]) {
    all.defaults[index] = new Stream(index, 0);
    all.alive.insert(all.defaults[index]);
  }
  return all.defaults[index];
}

void submit(Stream* stream, Task task) {
  task.stream = stream->id;
  if (stream->update_group) {  // aclmdlRICaptureTaskUpdateBegin: replace the recorded tasks in order
    std::lock_guard lock(stream->update_group->mutex);
    auto& tasks = stream->update_group->tasks;
    if (stream->update_index < tasks.size()) tasks[stream->update_index++] = std::move(task);
    return;
  }
  if (stream->capture) {
    stream->capture->add(std::move(task), stream->open_group);
    return;
  }
  stream->push(std::move(task));
}

void enqueue(aclrtStream handle, const char* name, std::function<int()> task) {
  PendingFault pending = take_pending_fault(name);
  if (pending.fault == Fault::kFail) {
    task = [name, code = pending.code] {
      set_error(describe_error(code, name));
      return code;
    };
  } else if (pending.fault == Fault::kHang) {
    task = [name] { return hang_on_device(name); };
  }
  submit(resolve_stream(handle), Task{name, std::move(task)});
}

bool capturing(aclrtStream handle) { return resolve_stream(handle)->capture != nullptr; }

int pending_tasks(int device_index) {
  int count = 0;
  for (Stream* stream : streams_of(device_index)) {
    std::lock_guard lock(stream->mutex);
    count += int(stream->pushed - stream->done);
  }
  return count;
}

// Of a stream that is being captured: refused, and the capture goes on (torch_npu's tests rely on it).
aclError synchronize_stream(Stream* stream, double seconds, const char* where) {
  if (stream->capture) {
    set_error(std::string("EE1016: ") + where + " failed. Reason: the stream is being captured.");
    return ACL_ERROR_RT_STREAM_CAPTURED;
  }
  if (!stream->wait_idle(seconds)) {
    set_error(describe_error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, where));
    return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
  }
  return device(stream->device_index).report();
}

aclError synchronize_all(int device_index, double seconds) {
  double end = now_seconds() + seconds;
  for (Stream* stream : streams_of(device_index)) {
    if (stream->capture) continue;
    double left = seconds < 0 ? -1 : std::max(0.0, end - now_seconds());
    if (aclError error = synchronize_stream(stream, left, "aclrtSynchronizeDevice")) return error;
  }
  return device(device_index).report();
}

// At the end of the process: no new task starts; running ones get a moment to end.
void stop_streams() {
  std::vector<Stream*> streams;
  {
    AllStreams& all = all_streams();
    std::lock_guard lock(all.mutex);
    streams.assign(all.alive.begin(), all.alive.end());
  }
  for (Stream* stream : streams) {
    std::lock_guard lock(stream->mutex);
    stream->stopping = true;
    stream->changed.notify_all();
  }
  for (Stream* stream : streams) {
    if (stream->started) stream->wait_idle(1.0);
  }
}

}  // namespace cannsim

using cannsim::Stream;

static aclError create(aclrtStream* stream, const char* where) {
  *stream = cannsim::create_stream();
  if (*stream) return ACL_SUCCESS;
  cannsim::set_error(cannsim::describe_error(ACL_ERROR_RT_NO_STREAM_RESOURCE, where));
  return ACL_ERROR_RT_NO_STREAM_RESOURCE;
}

API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  ENTER_WITH_DEVICE();
  return create(stream, __func__);
}

API aclError aclrtCreateStream(aclrtStream* stream) {
  ENTER_WITH_DEVICE();
  return create(stream, __func__);
}

static aclError destroy(aclrtStream handle, bool wait) {
  auto* stream = static_cast<Stream*>(handle);
  if (!stream) return ACL_ERROR_INVALID_PARAM;
  if (wait && !stream->capture) stream->wait_idle(-1);
  auto& all = cannsim::all_streams();
  {
    std::lock_guard lock(all.mutex);
    all.alive.erase(stream);
  }
  cannsim::give_streams(stream->device_index, 1);
  std::lock_guard lock(stream->mutex);
  stream->stopping = true;  // the object stays: its worker may still hold it (a few hundred bytes)
  stream->changed.notify_all();
  return ACL_SUCCESS;
}

API aclError aclrtDestroyStream(aclrtStream stream) {
  ENTER();
  return destroy(stream, true);
}

API aclError aclrtDestroyStreamForce(aclrtStream stream) {
  ENTER();
  return destroy(stream, false);
}

API aclError aclrtSynchronizeStream(aclrtStream stream) {
  ENTER();
  return cannsim::synchronize_stream(cannsim::resolve_stream(stream), -1, __func__);
}

API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
  ENTER();
  double seconds = milliseconds < 0 ? -1 : cannsim::real_seconds(milliseconds / 1e3);
  return cannsim::synchronize_stream(cannsim::resolve_stream(stream), seconds, __func__);
}

API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  ENTER();
  Stream* stream = cannsim::resolve_stream(handle);
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return cannsim::device(stream->device_index).report();
}

API aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  *id = cannsim::resolve_stream(handle)->id;
  return ACL_SUCCESS;
}

API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }

API aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
  cannsim::resolve_stream(stream)->overflow_switch = flag;
  return ACL_SUCCESS;
}

API aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
  *flag = cannsim::resolve_stream(stream)->overflow_switch;
  return ACL_SUCCESS;
}

// Host functions in stream order.
API aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  ENTER();
  cannsim::enqueue(stream, "aclrtLaunchCallback", [=] { return function(data), 0; });
  return ACL_SUCCESS;
}

API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
  ENTER();
  cannsim::enqueue(stream, "aclrtLaunchHostFunc", [=] { return function(data), 0; });
  return ACL_SUCCESS;
}

// Callbacks run on the worker of their stream, so there is nothing to subscribe to or to process.
API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
API aclError aclrtProcessReport(int32_t) {
  usleep(1000);
  return ACL_SUCCESS;
}
