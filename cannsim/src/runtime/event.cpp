// Events. A record is a task of its stream; a wait blocks the waiting stream (not the host) until
// the latest record launched before the wait has run. An event never recorded does not block.
#include <cmath>

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

void complete(Event& event, uint64_t number) {
  std::lock_guard lock(event.mutex);
  if (number <= event.completed) number = event.completed;  // replay of a graph
  event.completed = number;
  event.seconds = cannsim::now_seconds();
  event.changed.notify_all();
}

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
  delete static_cast<EventPointer*>(event);
  return ACL_SUCCESS;
}

API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  ENTER();
  EventPointer event = event_of(handle);
  Stream* stream = cannsim::resolve_stream(stream_handle);
  uint64_t number;
  {
    std::lock_guard lock(event->mutex);
    number = ++event->requested;
    event->capture = stream->capture;
  }
  // Inside a graph the tasks of all streams replay in one order, so the record itself has no effect
  // there; the replay only marks the event, for hosts that look at it.
  cannsim::submit(stream, {"aclrtRecordEvent", [event, number] { return complete(*event, number), 0; }, true});
  return ACL_SUCCESS;
}

API aclError aclrtResetEvent(aclrtEvent, aclrtStream) {
  ENTER();
  return ACL_SUCCESS;
}

API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  ENTER();
  EventPointer event = event_of(handle);
  Stream* stream = cannsim::resolve_stream(stream_handle);
  uint64_t target;
  std::shared_ptr<Graph> capture;
  {
    std::lock_guard lock(event->mutex);
    target = event->requested;
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
  auto wait = [event, target] {
    std::unique_lock lock(event->mutex);
    event->changed.wait(lock, [&] { return event->completed >= target; });
    return 0;
  };
  cannsim::submit(stream, {"aclrtStreamWaitEvent", wait});
  return ACL_SUCCESS;
}

API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t milliseconds) {
  ENTER();
  EventPointer event = event_of(handle);
  {
    std::unique_lock lock(event->mutex);
    if (event->capture) return ACL_ERROR_RT_EVENT_CAPTURED;
    const uint64_t target = event->requested;
    auto finished = [&] { return event->completed >= target; };
    if (milliseconds < 0) {
      event->changed.wait(lock, finished);
    } else if (!event->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), finished)) {
      cannsim::set_error(cannsim::describe_error(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, __func__));
      return ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
    }
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
  Event& event = *event_of(handle);
  std::lock_guard lock(event.mutex);
  bool ready = event.requested > 0 && event.completed >= event.requested;
  *status = ready ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

API aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  ENTER();
  Event& event = *event_of(handle);
  std::lock_guard lock(event.mutex);
  *status = event.completed >= event.requested ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  ENTER();
  double seconds[2];
  aclrtEvent handles[2] = {start, end};
  for (int i = 0; i < 2; i++) {
    Event& event = *event_of(handles[i]);
    std::lock_guard lock(event.mutex);
    if (event.requested == 0 || event.completed < event.requested) {
      cannsim::set_error("EE1019: aclrtEventElapsedTime failed. Reason: an event has not been recorded or has not completed.");
      return ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID;
    }
    seconds[i] = event.seconds;
  }
  *milliseconds = float((seconds[1] - seconds[0]) * 1e3);
  return ACL_SUCCESS;
}

API aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  ENTER();
  Event& event = *event_of(handle);
  std::lock_guard lock(event.mutex);
  if (event.completed == 0) return ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID;
  *microseconds = uint64_t(event.seconds * 1e6);
  return ACL_SUCCESS;
}
