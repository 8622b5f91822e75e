// What torch links, or asks for by name, and no rehearsed path calls: the loader wants the names. A call is an error, and a line of the
// log that no test lets pass. It names the function that the stand-in then has to have.
#include "standin.h"

#define UNCALLED(name)                    \
  API int standin_##name() __asm__(#name); \
  API int standin_##name() {              \
    log_line("NOT-SUPPORTED " #name);     \
    return cudaErrorNotSupported;         \
  }
UNCALLED(cuCtxGetCurrent) UNCALLED(cuCtxSetCurrent) UNCALLED(cuDeviceGet) UNCALLED(cuDeviceGetAttribute)
UNCALLED(cuDevicePrimaryCtxRetain) UNCALLED(cuFuncGetAttribute) UNCALLED(cuFuncSetAttribute) UNCALLED(cuGetErrorString)
UNCALLED(cuLaunchCooperativeKernel) UNCALLED(cuLaunchKernel) UNCALLED(cuModuleGetFunction) UNCALLED(cuModuleLoad)
UNCALLED(cuModuleLoadData) UNCALLED(cuModuleLoadDataEx) UNCALLED(cuModuleUnload) UNCALLED(cuPointerGetAttribute)
UNCALLED(cuTensorMapEncodeTiled)
UNCALLED(__cudaGetKernel) UNCALLED(__cudaLaunchKernel) UNCALLED(__cudaPopCallConfiguration)
UNCALLED(cudaDeviceEnablePeerAccess) UNCALLED(cudaDeviceGetAttribute)
UNCALLED(cudaDeviceGetDefaultMemPool) UNCALLED(cudaDeviceGetPCIBusId) UNCALLED(cudaDriverGetVersion)
UNCALLED(cudaEventCreate) UNCALLED(cudaFuncGetAttributes) UNCALLED(cudaFuncSetAttribute) UNCALLED(cudaGetSymbolAddress)
UNCALLED(cudaGraphAddNode) UNCALLED(cudaGraphConditionalHandleCreate) UNCALLED(cudaGraphNodeGetDependencies)
UNCALLED(cudaHostRegister) UNCALLED(cudaHostUnregister) UNCALLED(cudaLaunchCooperativeKernel)
UNCALLED(cudaLaunchHostFunc) UNCALLED(cudaLaunchKernel) UNCALLED(cudaLaunchKernelExC) UNCALLED(cudaMallocHost)
UNCALLED(cudaMemcpy) UNCALLED(cudaMemcpyPeerAsync) UNCALLED(cudaMemcpyToSymbol) UNCALLED(cudaMemset)
UNCALLED(cudaMemsetAsync) UNCALLED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
UNCALLED(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) UNCALLED(cudaPeekAtLastError)
UNCALLED(cudaProfilerStart) UNCALLED(cudaProfilerStop) UNCALLED(cudaRuntimeGetVersion) UNCALLED(cudaStreamAddCallback)
UNCALLED(cudaStreamBeginCaptureToGraph) UNCALLED(cudaStreamCreate) UNCALLED(cudaStreamCreateWithFlags)
UNCALLED(cudaStreamDestroy) UNCALLED(cudaStreamGetPriority) UNCALLED(cudaStreamQuery)
UNCALLED(cudaStreamUpdateCaptureDependencies) UNCALLED(cudaUserObjectRelease)
UNCALLED(ncclCommFinalize) UNCALLED(ncclCommInitRank) UNCALLED(ncclCommInitRankScalable) UNCALLED(ncclGetVersion)
UNCALLED(ncclRedOpCreatePreMulSum) UNCALLED(ncclRedOpDestroy)
