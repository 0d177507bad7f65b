// Captured graphs (torch.npu.NPUGraph): while a stream is captured its launches are recorded; a
// replay is one task that runs the recorded ones in order. Task groups can be replaced later
// (aclmdlRICaptureTaskUpdate*), which torch_npu uses for attention with new sequence lengths.
#include <cstdio>

#include "internal.h"

namespace cannsim {

// Tasks outside an explicit group are a group of one.
void Graph::add(Task task, std::shared_ptr<TaskGroup> open_group) {
  std::lock_guard lock(mutex);
  if (open_group) {
    open_group->tasks.push_back(std::move(task));
    return;
  }
  auto group = std::make_shared<TaskGroup>();
  group->tasks.push_back(std::move(task));
  groups.push_back(std::move(group));
}

namespace {

using GraphPointer = std::shared_ptr<Graph>;

GraphPointer& graph_of(aclmdlRI handle) { return *static_cast<GraphPointer*>(handle); }

int refuse(int code, const char* where, const char* reason) {
  set_error(std::string("EE1018: ") + where + " failed. Reason: " + reason);
  return code;
}

int replay(Graph& graph) {
  std::vector<std::shared_ptr<TaskGroup>> groups;
  {
    std::lock_guard lock(graph.mutex);
    groups = graph.groups;
  }
  for (const auto& group : groups) {
    std::vector<Task> tasks;
    {
      std::lock_guard lock(group->mutex);
      tasks = group->tasks;
      group->updated = false;
    }
    for (const Task& task : tasks) {
      if (int code = task.run()) return code;
    }
  }
  return 0;
}

}  // namespace

}  // namespace cannsim

using namespace cannsim;

API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode) {
  ENTER();
  if (!handle) return refuse(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, __func__, "the default stream cannot be captured.");
  Stream* stream = resolve_stream(handle);
  if (stream->capture) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, __func__, "the stream is already being captured.");
  static std::atomic<uint32_t> next_id{1};
  auto graph = std::make_shared<Graph>();
  graph->id = next_id++;
  graph->handle = new GraphPointer(graph);
  graph->streams.push_back(stream);
  stream->capture = graph;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  ENTER();
  Stream* stream = resolve_stream(handle);
  auto graph = stream->capture;
  if (!graph) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, __func__, "the stream is not being captured.");
  if (graph->streams.front() != stream) {
    return refuse(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, __func__, "the capture began on another stream.");
  }
  for (Stream* member : graph->streams) {
    member->capture = nullptr;
    member->open_group = nullptr;
  }
  *model = nullptr;
  if (graph->invalid) {
    delete graph->handle;
    return refuse(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, __func__, "a forbidden call broke the capture.");
  }
  const int streams = int(graph->streams.size());
  if (!take_streams(stream->device_index, streams)) {
    delete graph->handle;
    set_error(describe_error(ACL_ERROR_RT_NO_STREAM_RESOURCE, __func__));
    return ACL_ERROR_RT_NO_STREAM_RESOURCE;
  }
  graph->held = streams;
  *model = graph->handle;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  Stream* stream = resolve_stream(handle);
  *status = !stream->capture           ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : stream->capture->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                       : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  if (model) *model = stream->capture ? stream->capture->handle : nullptr;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  static thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, current);
  return ACL_SUCCESS;
}

API aclError aclmdlRIGetId(aclmdlRI model, uint32_t* id) {
  *id = graph_of(model)->id;
  return ACL_SUCCESS;
}

API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  ENTER();
  auto graph = graph_of(model);
  ++*graph->replays;
  enqueue(stream, "aclmdlRIExecuteAsync", [graph] {
    int code = replay(*graph);
    --*graph->replays;
    return code;
  });
  return ACL_SUCCESS;
}

API aclError aclmdlRIDestroy(aclmdlRI model) {
  ENTER();
  const Graph& graph = *graph_of(model);
  give_streams(graph.streams.front()->device_index, graph.held);
  delete static_cast<GraphPointer*>(model);
  return ACL_SUCCESS;
}

API aclError aclmdlRIDebugPrint(aclmdlRI model) {
  const Graph& graph = *graph_of(model);
  printf("graph %u: %zu task groups\n", graph.id, graph.groups.size());
  return ACL_SUCCESS;
}

// A Chrome trace with a row per stream, as torch_npu reads it (debug_dump writes a second file from it). A graph has no
// times: tasks come one after the other, in the order of their launch.
API aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char* path, uint32_t) {
  FILE* file = fopen(path, "w");
  if (!file) return ACL_ERROR_RT_FILE_OPEN;
  fprintf(file, "[");
  const Graph& graph = *graph_of(model);
  int number = 0;
  for (const auto& group : graph.groups) {
    std::lock_guard lock(group->mutex);
    for (const Task& task : group->tasks) {
      fprintf(file,
              "%s\n  {\"name\": \"%s\", \"ph\": \"X\", \"pid\": \"graph %u\", \"tid\": \"stream%d\", \"ts\": %d, \"dur\": 0.5, "
              "\"args\": {\"Stream Id\": %d, \"Task Id\": %d}}",
              number ? "," : "", task.name, graph.id, task.stream, number, task.stream, number);
      number++;
    }
  }
  fprintf(file, "\n]\n");
  fclose(file);
  return ACL_SUCCESS;
}

// ---- task groups

API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  ENTER();
  Stream* stream = resolve_stream(handle);
  if (!stream->capture) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, __func__, "the stream is not being captured.");
  if (stream->open_group) return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, __func__, "a task group is already open.");
  stream->open_group = std::make_shared<TaskGroup>();
  stream->open_group->replays = stream->capture->replays;
  std::lock_guard lock(stream->capture->mutex);
  stream->capture->groups.push_back(stream->open_group);
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
  ENTER();
  Stream* stream = resolve_stream(handle);
  if (!stream->open_group) return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, __func__, "no task group is open.");
  *group = new std::shared_ptr<TaskGroup>(stream->open_group);  // CANN has no call to free a handle
  stream->open_group = nullptr;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  ENTER();
  Stream* stream = resolve_stream(handle);
  stream->wait_idle(-1);
  auto tasks = *static_cast<std::shared_ptr<TaskGroup>*>(group);
  {  // hardware has no such check: the replay under way would run with the values of the next one
    std::lock_guard lock(tasks->mutex);
    if (tasks->updated && *tasks->replays > 0) {
      return refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED, __func__, "a replay has not yet used the values of the last update.");
    }
    tasks->updated = true;
  }
  stream->update_group = tasks;
  stream->update_index = 0;
  return ACL_SUCCESS;
}

API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  ENTER();
  Stream* stream = resolve_stream(handle);
  if (!stream->update_group) return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, __func__, "no update is open.");
  bool complete = stream->update_index == stream->update_group->tasks.size();
  stream->update_group = nullptr;
  if (!complete) return refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED, __func__, "the update launched fewer tasks than the group has.");
  return ACL_SUCCESS;
}
