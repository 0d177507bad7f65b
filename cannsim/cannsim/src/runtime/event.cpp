// Events. A record is a task of its stream; a wait blocks the waiting stream (not the host) until
// the latest record launched before the wait has run. An event never recorded does not block.
#include <cmath>
#include <deque>

#include "internal.h"

using cannsim::Event;
using cannsim::Graph;
using cannsim::Stream;
using EventPointer = std::shared_ptr<Event>;

namespace {

// The handle is a pointer to a shared_ptr: destroying the handle leaves queued tasks their event.
EventPointer& event_of(aclrtEvent handle) { return *static_cast<EventPointer*>(handle); }

aclError create(aclrtEvent* handle, uint32_t flags) {
  auto event = std::make_shared<Event>();
  event->flags = flags;
  *handle = new EventPointer(event);
  return ACL_SUCCESS;
}

// torch_npu destroys an event in the queue of the device that records it and waits for it in the queue of another
// device, in no order, so a wait may come behind the end: the last handles stay valid for waits that are on the way,
// several queues of 4096 tasks.
constexpr size_t kept_handles = 16384;
std::mutex ended_mutex;
std::deque<EventPointer*>& ended() {
  static auto* all = new std::deque<EventPointer*>;  // never freed: threads of torch_npu outlive the end of main
  return *all;
}

using RecordPointer = std::shared_ptr<cannsim::EventRecord>;

RecordPointer latest_record(Event& event) {
  std::lock_guard lock(event.mutex);
  return event.latest;
}

void complete(cannsim::EventRecord& record) {
  std::lock_guard lock(record.mutex);
  record.done = true;
  record.seconds = cannsim::now_seconds();
  record.changed.notify_all();
}

// False when it has not run within the time; negative: no limit.
bool wait_for(cannsim::EventRecord& record, double seconds) {
  std::unique_lock lock(record.mutex);
  auto done = [&] { return record.done; };
  if (seconds >= 0) return record.changed.wait_for(lock, std::chrono::duration<double>(seconds), done);
  record.changed.wait(lock, done);
  return true;
}

// An event that a graph waits for and that is recorded outside of it, before every replay: a flag that the wait
// of the replay sees and the reset behind it takes down.
bool external(const Event& event) { return (event.flags & ACL_EVENT_EXTERNAL) != 0; }

void set_flag(Event& event, bool value) {
  std::lock_guard lock(event.mutex);
  event.flag = value;
  event.changed.notify_all();
}

int wait_for_flag(Event& event) {
  std::unique_lock lock(event.mutex);
  event.changed.wait(lock, [&] { return event.flag; });
  return 0;
}

bool has_run(const RecordPointer& record) { return record && wait_for(*record, 0); }

}  // namespace

API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) {
  ENTER();
  return create(event, flags);
}

API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
  ENTER();
  return create(event, flags);
}

API aclError aclrtCreateEvent(aclrtEvent* event) {
  ENTER();
  return create(event, ACL_EVENT_TIME_LINE | ACL_EVENT_SYNC);
}

API aclError aclrtDestroyEvent(aclrtEvent event) {
  ENTER();
  if (!event) return ACL_ERROR_INVALID_PARAM;
  {
    Event& ending = *event_of(event);
    std::lock_guard lock(ending.mutex);
    if (ending.ended) return ACL_ERROR_INVALID_PARAM;
    ending.ended = true;
    ending.capture.reset();  // a graph is not kept by an event that is gone
  }
  std::lock_guard lock(ended_mutex);
  ended().push_back(static_cast<EventPointer*>(event));
  if (ended().size() > kept_handles) {
    delete ended().front();
    ended().pop_front();
  }
  return ACL_SUCCESS;
}

API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  ENTER();
  EventPointer event = event_of(handle);
  Stream* stream = cannsim::resolve_stream(stream_handle);
  if (external(*event)) {
    cannsim::submit(stream, {"aclrtRecordEvent", [event] { return set_flag(*event, true), 0; }, true});
    return ACL_SUCCESS;
  }
  auto record = std::make_shared<cannsim::EventRecord>();
  {
    std::lock_guard lock(event->mutex);
    event->latest = record;
    event->capture = stream->capture;
  }
  // Inside a graph the tasks of all streams replay in one order, so the record itself has no effect
  // there; the replay only marks the event, for hosts that look at it.
  cannsim::submit(stream, {"aclrtRecordEvent", [record] { return complete(*record), 0; }, true});
  return ACL_SUCCESS;
}

API aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream_handle) {
  ENTER();
  EventPointer event = event_of(handle);
  if (external(*event)) {
    cannsim::submit(cannsim::resolve_stream(stream_handle),
                    {"aclrtResetEvent", [event] { return set_flag(*event, false), 0; }, true});
  }
  return ACL_SUCCESS;
}

API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  ENTER();
  EventPointer event = event_of(handle);
  Stream* stream = cannsim::resolve_stream(stream_handle);
  if (external(*event)) {
    cannsim::submit(stream, {"aclrtStreamWaitEvent", [event] { return wait_for_flag(*event); }});
    return ACL_SUCCESS;
  }
  RecordPointer record;
  std::shared_ptr<Graph> capture;
  {
    std::lock_guard lock(event->mutex);
    record = event->latest;
    capture = event->capture;
  }
  if (capture) {  // the waiting stream joins the capture, as a fork or as the join of one
    if (!stream->capture) {
      std::lock_guard lock(capture->mutex);
      stream->capture = capture;
      capture->streams.push_back(stream);
    }
    return stream->capture == capture ? ACL_SUCCESS : ACL_ERROR_STREAM_CAPTURE_CONFLICT;
  }
  if (record) cannsim::submit(stream, {"aclrtStreamWaitEvent", [record] { return wait_for(*record, -1), 0; }});
  return ACL_SUCCESS;
}

API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t milliseconds) {
  ENTER();
  EventPointer event = event_of(handle);
  RecordPointer record;
  {
    std::lock_guard lock(event->mutex);
    if (event->capture) return ACL_ERROR_RT_EVENT_CAPTURED;
    record = event->latest;
  }
  if (record && !wait_for(*record, milliseconds / 1e3)) {
    cannsim::set_error(cannsim::describe_error(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, __func__));
    return ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
  }
  int index = cannsim::current_device();
  return index < 0 ? ACL_SUCCESS : cannsim::device(index).report();
}

API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  ENTER();
  return aclrtSynchronizeEventWithTimeout(handle, -1);
}

API aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  ENTER();
  bool ready = has_run(latest_record(*event_of(handle)));
  *status = ready ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

API aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  ENTER();
  RecordPointer record = latest_record(*event_of(handle));
  *status = !record || has_run(record) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  ENTER();
  double seconds[2];
  aclrtEvent handles[2] = {start, end};
  for (int i = 0; i < 2; i++) {
    RecordPointer record = latest_record(*event_of(handles[i]));
    if (!has_run(record)) {
      cannsim::set_error("EE1019: aclrtEventElapsedTime failed. Reason: an event has not been recorded or has not completed.");
      return ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID;
    }
    seconds[i] = record->seconds;
  }
  *milliseconds = float((seconds[1] - seconds[0]) * 1e3);
  return ACL_SUCCESS;
}

API aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  ENTER();
  RecordPointer record = latest_record(*event_of(handle));
  if (!has_run(record)) return ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID;
  *microseconds = uint64_t(record->seconds * 1e6);
  return ACL_SUCCESS;
}
