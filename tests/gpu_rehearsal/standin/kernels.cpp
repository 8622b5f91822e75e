// Kernels: registered when torch is loaded. A launch of torch's own is an error: `emulation.py` computes each operator.
//
// The names with two underscores are what nvcc puts into every library with device code (crt/host_runtime.h).
#include "standin.h"

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// Comes before each launch, which this error leaves out; torch raises it at the operator that the emulation did not compute.
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) {
  log_line("KERNEL");
  return failed(cudaErrorNotSupported);
}

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
