// Memory: a device's is host memory that is known by its address, so that a wrong pointer is seen.
//
// CUDA Runtime API, "Memory Management", and its page "API synchronization behavior" for what copies make the host wait.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "standin.h"

static std::map<char*, Block> blocks;
static size_t used[MOST_DEVICES];
constexpr size_t PAGE = 4096;
constexpr size_t TOTAL = 16ull << 30;

Block block_of(const void* pointer) {
  Locked lock(state);
  auto after = blocks.upper_bound((char*)pointer);
  if (after == blocks.begin()) return {0, Kind::none, -1};
  auto [start, block] = *std::prev(after);
  return (char*)pointer < start + block.bytes ? block : Block{0, Kind::none, -1};
}

static void* map_pages(size_t bytes) {
  void* found = mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

static cudaError_t allocate(void** pointer, size_t bytes, Kind kind, const char* call) {
  if (unsafe_now(call)) return failed(cudaErrorStreamCaptureUnsupported);
  Locked lock(state);
  open_context(current_device, call);
  if (kind == Kind::device && used[current_device] + bytes > TOTAL) return failed(cudaErrorMemoryAllocation);
  size_t whole = (std::max(bytes, (size_t)1) + PAGE - 1) / PAGE * PAGE;
  *pointer = map_pages(whole);
  if (!*pointer) return failed(cudaErrorMemoryAllocation);
  blocks[(char*)*pointer] = {whole, kind, current_device};
  if (kind == Kind::device) used[current_device] += whole;
  return cudaSuccess;
}

// Freeing waits for the device ("API synchronization behavior": cudaFree, cudaFreeHost).
static cudaError_t release(void* pointer, const char* call) {
  if (!pointer) {
    open_context(current_device, call);
    return cudaSuccess;
  }
  if (unsafe_now(call)) return failed(cudaErrorStreamCaptureUnsupported);
  reach_end_of_all();
  Locked lock(state);
  auto found = blocks.find((char*)pointer);
  if (found == blocks.end()) return failed(cudaErrorInvalidValue);
  if (found->second.kind == Kind::device) used[found->second.device] -= found->second.bytes;
  munmap(pointer, found->second.bytes + PAGE);
  blocks.erase(found);
  return cudaSuccess;
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, Kind::device, "cudaMalloc"); }
API cudaError_t cudaFree(void* pointer) { return release(pointer, "cudaFree"); }
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return allocate(pointer, bytes, Kind::pinned, "cudaHostAlloc");
}
API cudaError_t cudaFreeHost(void* pointer) { return release(pointer, "cudaFreeHost"); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  open_context(current_device, "cudaMemGetInfo");
  *total = TOTAL;
  *free = TOTAL - used[current_device];
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  Block block = block_of(pointer);
  found->device = block.kind == Kind::none ? -2 : block.device;
  found->type = block.kind == Kind::none ? cudaMemoryTypeUnregistered
                : block.kind == Kind::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  if (block.kind != Kind::none) found->devicePointer = (void*)pointer;
  if (block.kind == Kind::pinned) found->hostPointer = (void*)pointer;
  return cudaSuccess;
}

static const char* side(Kind kind) {
  return kind == Kind::device ? "device" : kind == Kind::pinned ? "pinned" : "pageable";
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (!bytes) return cudaSuccess;
  Kind target = block_of(to).kind, source = block_of(from).kind;
  char name[64];
  snprintf(name, sizeof name, "copy %s->%s", side(source), side(target));
  if (source == Kind::none && !stream_of(stream)->capture) {
    // From pageable memory the call returns when the bytes are staged.
    auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
    return submit(stream, name, [=] { memcpy(to, staged->data(), bytes); });
  }
  if (stream_of(stream)->capture && (source == Kind::none || target == Kind::none))
    log_line("PAGEABLE-IN-CAPTURE %s", name);  // the address is kept, and read at each launch
  cudaError_t error = submit(stream, name, [=] { memcpy(to, from, bytes); });
  // To pageable memory the call returns when the copy has been made.
  if (target == Kind::none && !error && !stream_of(stream)->capture) reach_end(stream_of(stream));
  return error;
}

