// Stream capture and graphs. What is captured runs at a launch, and only there.
//
// Programming Guide, "Stream capture": prohibited and unhandled operations, invalidation, cross-stream dependencies;
// Runtime API, cudaStreamBeginCapture and cudaThreadExchangeStreamCaptureMode for the modes.
#include "standin.h"

std::set<Capture*> captures;
static uint64_t captures_begun = 0;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

struct CUgraphExec_st {
  std::vector<Node> nodes;
  std::map<CUstream_st*, CUstream_st*> streams = {};  // where the nodes of each captured stream run
};

void add_node(CUstream_st* stream, Node node) {
  auto& nodes = stream->capture->graph->nodes;
  node.stream = stream;
  node.after = std::move(stream->tail);
  stream->tail = {nodes.size()};
  stream->clock[stream]++;
  nodes.push_back(std::move(node));
}

Capture* capture_by(uint64_t id) {
  for (Capture* capture : captures)
    if (capture->id == id) return capture;
  return nullptr;
}

void break_capture(Capture* capture, const char* what, const char* why) {
  capture->broken = true;
  log_line("VIOLATION %s %s", what, why);
}

// Potentially unsafe calls (cudaMalloc, an event's query, …) break a capture of this thread, and those of other threads in
// the mode "global"; unless this thread has said that it knows what it does ("relaxed").
bool unsafe_now(const char* call) {
  Locked lock(state);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  for (Capture* capture : captures) {
    bool mine = capture->owner == thread_number() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool other = capture->owner != thread_number() && capture->mode == cudaStreamCaptureModeGlobal &&
                 thread_mode == cudaStreamCaptureModeGlobal;
    if (!mine && !other) continue;
    break_capture(capture, call, "is not safe while a stream is captured");
    return true;
  }
  return false;
}

cudaError_t forbid_while_captured(cudaStream_t stream, const char* call) {
  Locked lock(state);
  if (Capture* capture = stream_of(stream)->capture) {
    break_capture(capture, call, "on a captured stream");
    return cudaErrorStreamCaptureUnsupported;
  }
  return unsafe_now(call) ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

// The legacy stream waits for every blocking stream of its device: it would wait for a capture.
bool legacy_stream_forbidden(const char* call) {
  for (Capture* capture : captures)
    for (CUstream_st* stream : capture->streams)
      if (!(stream->flags & cudaStreamNonBlocking)) {
        break_capture(capture, call, "on the legacy stream beside a captured blocking one");
        return true;
      }
  return false;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Locked lock(state);
  CUstream_st* stream = stream_of(handle);
  if (stream->legacy) {
    log_line("VIOLATION capture of the legacy stream");
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  if (stream->capture) return failed(cudaErrorIllegalState);
  auto* capture = new Capture{++captures_begun, mode, thread_number(), new CUgraph_st, false, {stream}};
  captures.insert(capture);
  stream->capture = capture;
  stream->clock.clear();
  stream->clock[stream] = 1;
  stream->tail.clear();
  log_line("CAPTURE begins stream=%d", stream->id);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Locked lock(state);
  CUstream_st* stream = stream_of(handle);
  Capture* capture = stream->capture;
  *graph = nullptr;
  if (!capture) return failed(cudaErrorIllegalState);
  cudaError_t error = cudaSuccess;
  if (capture->owner != thread_number() && capture->mode != cudaStreamCaptureModeRelaxed)
    error = cudaErrorStreamCaptureWrongThread;
  for (CUstream_st* other : capture->streams)
    if (other != stream && stream->clock[other] < other->clock[other]) {
      error = cudaErrorStreamCaptureUnjoined;
      log_line("VIOLATION stream %d was not joined at the end of the capture", other->id);
    }
  if (capture->broken) error = cudaErrorStreamCaptureInvalidated;
  for (CUstream_st* other : capture->streams) other->capture = nullptr;
  captures.erase(capture);
  log_line("CAPTURE ends nodes=%zu error=%d", capture->graph->nodes.size(), error);
  if (!error) *graph = capture->graph;
  return failed(error);
}

static cudaStreamCaptureStatus status_of(CUstream_st* stream) {
  if (!stream->capture) return cudaStreamCaptureStatusNone;
  return stream->capture->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Locked lock(state);
  *status = status_of(stream_of(stream));
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  Locked lock(state);
  CUstream_st* stream = stream_of(handle);
  *status = status_of(stream);
  if (stream->capture && id) *id = stream->capture->id;
  if (stream->capture && graph) *graph = stream->capture->graph;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

// A graph starts when its stream comes to it, and the stream goes on when all of it is done. In between a node waits for
// what it waited for in the capture, and for nothing else.
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  CUstream_st* stream = stream_of(handle);
  if (stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
  open_context(current_device, "cudaGraphLaunch");
  log_line("LAUNCH nodes=%zu stream=%d", executable->nodes.size(), stream->id);
  uint64_t start = enqueue(stream, "graph starts", [] {});
  std::vector<uint64_t> numbers;
  for (const Node& node : executable->nodes) {
    CUstream_st*& own = executable->streams[node.stream];
    if (!own) own = new CUstream_st(*node.stream);
    std::set<uint64_t> after = {start};
    for (size_t earlier : node.after) after.insert(numbers[earlier]);
    numbers.push_back(enqueue(own, node.name.c_str(), node.body, after, node.comm));
    if (node.launched) node.launched(numbers.back());
  }
  enqueue(stream, "graph ends", [] {}, {numbers.begin(), numbers.end()});
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = (cudaUserObject_t)1;
  return cudaSuccess;
}
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
