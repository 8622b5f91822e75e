// The CUDA driver: what torch asks of it directly. Everything else is "not supported", and is logged.
//
// CUDA Driver API, "Primary Context Management", "Device Management", "Module Management".
#include <dlfcn.h>

#include <cstring>

#include "standin.h"

static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

API CUresult cuInit(unsigned) { return visible_devices().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
  *count = visible_devices().size();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  open_context(device, "cuDevicePrimaryCtxRetain");
  *context = (CUcontext)(long)(device + 1);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = has_context(current_device) ? (CUcontext)(long)(current_device + 1) : nullptr;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the stand-in's driver";
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr pointer) {
  *(CUdeviceptr*)value = pointer;
  return CUDA_SUCCESS;
}
API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  Locked lock(state);
  *status = stream_of(stream)->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

#define NOT_SUPPORTED(name)                     \
  API CUresult standin_##name() __asm__(#name); \
  API CUresult standin_##name() {               \
    log_line("NOT-SUPPORTED " #name);           \
    return CUDA_ERROR_NOT_SUPPORTED;            \
  }
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLaunchKernelEx)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
NOT_SUPPORTED(cuTensorMapEncodeIm2col)
NOT_SUPPORTED(cuPointerGetAttributes)

// torch finds the driver's functions through the runtime.
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  void* function = strncmp(name, "cu", 2) ? nullptr : dlsym(RTLD_DEFAULT, name);
  *found = function ? function : (void*)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
