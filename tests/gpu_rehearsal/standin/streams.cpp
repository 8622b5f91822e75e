// Streams and events, outside and inside a capture.
//
// CUDA Runtime API, "Stream Management" and "Event Management"; Programming Guide, "Stream capture" for what is forbidden.
#include "standin.h"

static CUstream_st legacy_streams[MOST_DEVICES];
static int streams_made = 0;
using Told = void (*)(const char*);
static Told told = nullptr;

// Python's ear: called without a lock, because it waits for the interpreter's.
API void standin_on_synchronisation(Told function) { told = function; }

void noticed(const char* what) {
  log_line("SYNC %s", what);
  if (told) told(what);
}

CUstream_st* stream_of(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread) return stream;
  CUstream_st* found = &legacy_streams[current_device];
  found->legacy = true;
  found->device = current_device;
  return found;
}

cudaError_t submit(cudaStream_t handle, const char* name, Body body, ncclComm_t comm) {
  CUstream_st* stream = stream_of(handle);
  {
    Locked lock(state);
    open_context(stream->device, name);
    if (Capture* capture = stream->capture) {
      if (capture->broken) return failed(cudaErrorStreamCaptureInvalidated);
      add_node(stream, {name, std::move(body), comm, nullptr});
      return cudaSuccess;
    }
    if (stream->legacy && legacy_stream_forbidden(name)) return failed(cudaErrorStreamCaptureImplicit);
    log_line("WORK %s stream=%d", name, stream->id);
  }
  enqueue(stream, name, std::move(body), {}, comm);
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  Locked lock(state);
  open_context(current_device, "cudaStreamCreate");
  *stream = new CUstream_st;
  (*stream)->id = ++streams_made;
  (*stream)->device = current_device;
  (*stream)->flags = flags;
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (cudaError_t error = forbid_while_captured(handle, "cudaStreamSynchronize")) return failed(error);
  noticed("cudaStreamSynchronize");
  reach_end(stream_of(handle));
  return cudaSuccess;
}

// In every mode, from every thread: it would have to wait for the captured stream.
API cudaError_t cudaDeviceSynchronize() {
  {
    Locked lock(state);
    for (Capture* capture : captures) break_capture(capture, "cudaDeviceSynchronize", "while a stream is captured");
    if (!captures.empty()) return failed(cudaErrorStreamCaptureUnsupported);
  }
  noticed("cudaDeviceSynchronize");
  reach_end_of_all();
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Locked lock(state);
  open_context(current_device, "cudaEventCreate");
  *event = new CUevent_st;
  (*event)->device = current_device;
  (*event)->flags = flags;
  return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // work that is under way may still know it

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  CUstream_st* stream = stream_of(handle);
  auto time = event->time;
  Body pass = [time] { time->ms = now_ms(); };
  {
    Locked lock(state);
    if (event->device != stream->device) {
      log_line("VIOLATION an event of device %d is recorded on device %d", event->device, stream->device);
      return failed(cudaErrorInvalidResourceHandle);
    }
    if (stream->capture && (flags & cudaEventRecordExternal)) {
      // A node of the graph: every launch records the event anew, for the world outside.
      auto launched = [event](uint64_t work) { event->work = work, event->recorded = true, event->capture_id = 0; };
      add_node(stream, {"event", pass, nullptr, launched});
      return cudaSuccess;
    }
    event->recorded = true;
    event->capture_id = stream->capture ? stream->capture->id : 0;
    if (stream->capture) {
      event->clock = stream->clock;
      event->tail = stream->tail;
      return cudaSuccess;
    }
  }
  event->work = enqueue(stream, "event", pass);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

// An event of a capture marks a place in a graph, and no moment.
static cudaError_t forbid_captured_event(cudaEvent_t event, const char* call) {
  Locked lock(state);
  if (event->capture_id) {
    if (Capture* capture = capture_by(event->capture_id)) break_capture(capture, call, "of an event of the capture");
    return cudaErrorCapturedEvent;
  }
  return unsafe_now(call) ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (cudaError_t error = forbid_captured_event(event, "cudaEventQuery")) return failed(error);
  return is_done(event->work) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (cudaError_t error = forbid_captured_event(event, "cudaEventSynchronize")) return failed(error);
  noticed("cudaEventSynchronize");
  if (event->recorded) reach(event->work);
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  if ((first->flags | second->flags) & cudaEventDisableTiming) return failed(cudaErrorInvalidResourceHandle);
  if (!first->recorded || !second->recorded || first->device != second->device)
    return failed(cudaErrorInvalidResourceHandle);
  if (first->capture_id || second->capture_id) return failed(cudaErrorCapturedEvent);
  if (!is_done(first->work) || !is_done(second->work)) return failed(cudaErrorNotReady);
  *ms = second->time->ms - first->time->ms;
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  CUstream_st* stream = stream_of(handle);
  {
    Locked lock(state);
    if (event->capture_id) {  // the stream joins the capture
      Capture* capture = capture_by(event->capture_id);
      if (!capture) return failed(cudaErrorCapturedEvent);
      if (stream->capture && stream->capture != capture) {
        break_capture(stream->capture, "cudaStreamWaitEvent", "merges two captures");
        capture->broken = true;
        return failed(cudaErrorStreamCaptureMerge);
      }
      if (!stream->capture && stream->legacy) {
        break_capture(capture, "cudaStreamWaitEvent", "makes the legacy stream wait for a capture");
        return failed(cudaErrorStreamCaptureImplicit);
      }
      if (!stream->capture) {
        stream->capture = capture;
        stream->clock.clear();
        stream->clock[stream] = 1;
        stream->tail.clear();
        capture->streams.insert(stream);
      }
      for (auto& [other, known] : event->clock) stream->clock[other] = std::max(stream->clock[other], known);
      stream->tail.insert(event->tail.begin(), event->tail.end());
      return cudaSuccess;
    }
    if (!event->recorded) return cudaSuccess;
    if (stream->capture) {  // a graph cannot wait for something outside of it
      break_capture(stream->capture, "cudaStreamWaitEvent", "makes a captured stream wait for an event outside");
      return failed(cudaErrorStreamCaptureIsolation);
    }
  }
  if (!is_done(event->work)) enqueue(stream, "wait", [] {}, {event->work});
  return cudaSuccess;
}
