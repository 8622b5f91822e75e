// Devices: which there are, what they are called, and which of them this process has touched.
//
// CUDA Runtime API, "Device Management"; Programming Guide, "CUDA Environment Variables" for CUDA_VISIBLE_DEVICES.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "standin.h"

thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static bool contexts[MOST_DEVICES];

// A number that is none, or of no device, hides itself and all behind it.
static std::vector<int> visible_now() {
  std::vector<int> found;
  const int count = number_from("STANDIN_DEVICES", 1);
  const char* named = getenv("CUDA_VISIBLE_DEVICES");
  if (!named) {
    for (int device = 0; device < count; device++) found.push_back(device);
    return found;
  }
  std::string text(named);
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string one = text.substr(at, end - at);
    if (one.empty() || !isdigit(one[0]) || atoi(one.c_str()) >= count) break;
    found.push_back(atoi(one.c_str()));
    at = end + 1;
  }
  return found;
}

const std::vector<int>& visible_devices() {
  static std::vector<int> found = visible_now();  // read once, as by the driver
  return found;
}

bool is_device(int device) { return device >= 0 && (size_t)device < visible_devices().size(); }

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

// The runtime opens a device's primary context with the first call that needs it; since CUDA 12, cudaSetDevice does, too.
void open_context(int device, const char* by) {
  if (!is_device(device) || contexts[device]) return;
  contexts[device] = true;
  log_line("CONTEXT device=%d gpu=%d by=%s", device, visible_devices()[device], by);
}

bool has_context(int device) { return is_device(device) && contexts[device]; }

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = visible_devices().size();
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

API cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  current_device = device;
  open_context(device, "cudaSetDevice");
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

API const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char name[64];
  snprintf(name, sizeof name, "cudaError%d", error);
  return name;
}

API const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// What torch reads of an H100, so that it chooses the paths that it would choose there.
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "Rehearsal");
  found->major = 9;
  found->totalGlobalMem = 16ull << 30;
  found->multiProcessorCount = 132;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->warpSize = 32;
  found->regsPerMultiprocessor = found->regsPerBlock = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->l2CacheSize = 50 << 20;
  found->memoryBusWidth = 5120;
  found->maxBlocksPerMultiProcessor = 32;
  found->managedMemory = found->concurrentKernels = found->unifiedAddressing = 1;
  found->pciBusID = visible_devices()[device] + 1;
  for (int axis = 0; axis < 3; axis++) {
    found->maxGridSize[axis] = axis ? 65535 : 2147483647;
    found->maxThreadsDim[axis] = 1024;
  }
  memcpy(found->uuid.bytes, "REHEARSAL", 9);  // NCCL and the project tell GPUs apart by it
  found->uuid.bytes[14] = number_from("STANDIN_NODE", 0);
  found->uuid.bytes[15] = visible_devices()[device];
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
