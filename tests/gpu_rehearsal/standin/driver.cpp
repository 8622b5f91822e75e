// The CUDA driver: what torch asks of it directly.
//
// CUDA Driver API, "Primary Context Management".
#include <dlfcn.h>

#include <cstring>

#include "standin.h"

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device);
  return CUDA_SUCCESS;
}

static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

// torch finds the driver's functions through the runtime.
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  void* function = strncmp(name, "cu", 2) ? nullptr : dlsym(RTLD_DEFAULT, name);
  *found = function ? function : (void*)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
