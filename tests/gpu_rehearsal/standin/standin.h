// A stand-in for the CUDA runtime, the CUDA driver and NCCL, on host memory.
//
// torch's CUDA build links these three dynamically. Preloaded (LD_PRELOAD), this library answers in their place, and all
// of torch above them is the real one: allocator, streams, events, CUDA graphs, autograd's threads, ProcessGroupNCCL.
// No kernel is launched: `emulation.py` computes each operator with the CPU's kernels, on the same memory.
//
// The rules come from the CUDA C++ Programming Guide (streams, events, graphs: section "CUDA Graphs", "Stream capture") and
// the CUDA Runtime API's reference; a comment at each rule names its page. The environment:
//
//   STANDIN_DEVICES=n     GPUs of the machine (1). CUDA_VISIBLE_DEVICES is obeyed.
//   STANDIN_NODE=n        which machine this process is on: GPUs of different machines are different ones (0)
//   STANDIN_LOG=file      what happened, one line each
//   STANDIN_LATE=order    work runs as late as it may: at a synchronisation that asks for it, or LATE_MS after its launch.
//                         Of independent streams the `oldest` or the `newest` goes first. Without it, work runs at once.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

// One lock for all the state below. Never held while work runs, and never while Python is called.
extern std::recursive_mutex& state;
using Locked = std::lock_guard<std::recursive_mutex>;

// ---- log.cpp
void log_line(const char* format, ...) __attribute__((format(printf, 1, 2)));
long number_from(const char* variable, long otherwise);
double now_ms();
int thread_number();  // of the calling thread, from 0

// ---- devices.cpp
constexpr int MOST_DEVICES = 64;
extern thread_local int current_device;
const std::vector<int>& visible_devices();  // by its number in this process: the machine's number of the GPU
bool is_device(int device);
void open_context(int device, const char* by);  // notes the first use of a device: it costs memory on the real one
bool has_context(int device);
cudaError_t failed(cudaError_t error);  // keeps it for cudaGetLastError

// ---- memory.cpp
enum class Kind { none, device, pinned };
struct Block {
  size_t bytes;
  Kind kind;
  int device;
};
Block block_of(const void* pointer);  // kind `none` for ordinary host memory

// ---- queue.cpp: work in streams
using Body = std::function<void()>;
constexpr double LATE_MS = 300;
bool works_late();
// Appends to a stream; `after` is other work to wait for. Work of a communicator may wait for other processes, so a launch
// does not run it in the caller; it also waits for what the communicator was given before, in whichever stream.
uint64_t enqueue(
    cudaStream_t stream, const char* name, Body body, std::set<uint64_t> after = {}, ncclComm_t comm = nullptr);
bool is_done(uint64_t work);
void reach(uint64_t work);         // runs what this work needs, and waits for it
void reach_end(cudaStream_t stream);
void reach_end_of_all();

// ---- streams.cpp
struct Capture;
struct CUstream_st {
  int id = 0;
  int device = 0;
  unsigned flags = 0;
  bool legacy = false;  // the default stream, which waits for others of its device and cannot be captured
  Capture* capture = nullptr;
  // While captured: how far this stream knows each stream of the capture. One that the origin does not know to its end
  // is not joined.
  std::map<CUstream_st*, uint64_t> clock;
  std::set<size_t> tail;  // while captured: the nodes that its next one waits for
};
struct EventTime {
  double ms = 0;
};
struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  uint64_t work = 0;        // done: the event has passed
  uint64_t capture_id = 0;  // recorded inside a capture: no event outside may be made of it
  std::map<CUstream_st*, uint64_t> clock;
  std::set<size_t> tail;
  std::shared_ptr<EventTime> time = std::make_shared<EventTime>();
};
CUstream_st* stream_of(cudaStream_t stream);  // the legacy stream of the current device for a null pointer
// Work of any kind: into the stream, or into the graph while the stream is captured.
cudaError_t submit(cudaStream_t stream, const char* name, Body body, ncclComm_t comm = nullptr);
void noticed(const char* what);  // tells Python of a host synchronisation, so that it is counted by its line

// ---- capture.cpp
struct Node {
  std::string name;
  Body body;
  ncclComm_t comm;
  std::function<void(uint64_t)> launched;  // told the number that the work has got at a launch
  CUstream_st* stream = nullptr;
  std::set<size_t> after = {};  // nodes
};
struct CUgraph_st {
  std::vector<Node> nodes;
};
struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  int owner;  // thread
  CUgraph_st* graph;
  bool broken = false;
  std::set<CUstream_st*> streams;
};
extern std::set<Capture*> captures;
Capture* capture_by(uint64_t id);
void break_capture(Capture* capture, const char* what, const char* why);
void add_node(CUstream_st* stream, Node node);
bool unsafe_now(const char* call);  // breaks the capture that this call may not happen beside
cudaError_t forbid_while_captured(cudaStream_t stream, const char* call);
bool legacy_stream_forbidden(const char* call);
