// Kernels: registered when torch is loaded, and launched into their stream; they compute nothing.
//
// The names with two underscores are what nvcc puts into every library with device code (crt/host_runtime.h).
#include <cstring>
#include <unordered_map>

#include "standin.h"

static std::unordered_map<const void*, const char*>& names = *new std::unordered_map<const void*, const char*>;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  names[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

struct Shape {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Shape> shapes;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  shapes.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Shape shape = shapes.back();
  shapes.pop_back();
  *grid = shape.grid, *block = shape.block, *shared = shape.shared, *(void**)stream = shape.stream;
  return cudaSuccess;
}

// A kernel that torch launches itself: an operator that the emulation did not compute. Tests want to see none.
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  auto found = names.find(function);
  log_line("KERNEL %.150s", found == names.end() ? "?" : found->second);
  return submit(stream, "kernel", [] {});
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel((const void*)kernel, grid, block, arguments, shared, stream);
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, 0, config->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 2;
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** found, const void*) {
  static char somewhere[1 << 16];
  *found = somewhere;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// ---- for emulation.py: an operator that it computes is work like any other
using Compute = void (*)(long);
static Compute compute = nullptr;
API void standin_compute_with(Compute function) { compute = function; }
API int standin_submit(cudaStream_t stream, long number, const char* name) {
  return submit(stream, name, [number] {
    if (number) compute(number);
  });
}
API int standin_captures(cudaStream_t stream) {
  Locked lock(state);
  return stream_of(stream)->capture != nullptr;
}
API int standin_late() { return works_late(); }
API void standin_reach(cudaStream_t stream) { reach_end(stream_of(stream)); }
API int standin_context(int device) { return has_context(device); }
