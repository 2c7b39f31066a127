/* A stand-in for libcuda and libamdhip64. Device memory is host memory, and the one kernel, "fill", writes n copies of
 * a 32-bit value. Compiled once against each vendor's real header, which thereby checks every signature used here. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef NVIDIA
#include <cuda.h>
#undef cuEventElapsedTime
typedef CUresult status;
typedef CUdeviceptr address;
typedef CUmodule module;
typedef CUfunction function;
typedef CUstream stream;
typedef CUevent event;
typedef CUgraph graph;
typedef CUgraphExec graph_exec;
typedef CUdevice device;
#define N(cuda, hip) cuda
#define BAD_VALUE CUDA_ERROR_INVALID_VALUE
#define NOT_FOUND CUDA_ERROR_NOT_FOUND
#define BAD_CODE CUDA_ERROR_NO_BINARY_FOR_GPU
#define NO_DEVICE CUDA_ERROR_NO_DEVICE
#define OUT_OF_MEMORY CUDA_ERROR_OUT_OF_MEMORY
#define CAPTURE_BROKEN CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
typedef CUfunction_attribute function_attribute;
typedef CUdevice_attribute device_attribute;
typedef CUstreamCaptureMode capture_mode;
#define VALUE CUDA_SUCCESS
#define END CU_LAUNCH_PARAM_END
#else
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
typedef hipError_t status;
typedef hipDeviceptr_t address;
typedef hipModule_t module;
typedef hipFunction_t function;
typedef hipStream_t stream;
typedef hipEvent_t event;
typedef hipGraph_t graph;
typedef hipGraphExec_t graph_exec;
typedef hipDevice_t device;
#define N(cuda, hip) hip
#define BAD_VALUE hipErrorInvalidValue
#define NOT_FOUND hipErrorNotFound
#define BAD_CODE hipErrorNoBinaryForGpu
#define NO_DEVICE hipErrorNoDevice
#define OUT_OF_MEMORY hipErrorOutOfMemory
#define CAPTURE_BROKEN hipErrorStreamCaptureInvalidated
typedef hipFunction_attribute function_attribute;
typedef hipDeviceAttribute_t device_attribute;
typedef hipStreamCaptureMode capture_mode;
#define VALUE hipSuccess
#define END HIP_LAUNCH_PARAM_END
#endif

typedef struct {
  int32_t *to;
  int32_t n, value;
} fill;

/* what the tests look at */
int fake_devices = 2, fake_current = -1, fake_broken, fake_destroyed, fake_version = 13000;
int fake_kind, fake_policy = 1, fake_fork, fake_mode, fake_together, fake_rows = 1, fake_refuses, fake_early;
int fake_reserved, fake_created, fake_mapped;
unsigned fake_last[7], fake_cluster, fake_spread, fake_limit, fake_prefer, fake_wide, fake_overlap;
void *fake_last_stream;

static int capturing;
static fill recorded[16];
static int recorded_count;

/* how each of them was launched */
static struct {
  unsigned shape[7], cluster, overlap;
  int complete, zeroes;
} launched[16];

static status run(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                  stream s, void **params, void **extra) {
  unsigned shape[7] = {gx, gy, gz, bx, by, bz, shared};
  fill job;
  if (params) {
    memcpy(&job.to, params[0], 8), memcpy(&job.n, params[1], 4), memcpy(&job.value, params[2], 4);
  } else {
    if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != END || *(size_t *)extra[3] != sizeof job)
      return BAD_VALUE;
    memcpy(&job, extra[1], sizeof job);
  }
  if (bx * by * bz > 1024 || (N(1, 0) && shared > 49152 && shared > fake_limit)) return BAD_VALUE;
  memcpy(fake_last, shape, sizeof shape);
  fake_last_stream = s;
  if (capturing) {
    memcpy(launched[recorded_count].shape, shape, sizeof shape);
    launched[recorded_count].cluster = fake_cluster, launched[recorded_count].overlap = fake_overlap;
    launched[recorded_count].complete = !params, launched[recorded_count].zeroes = 0;
    recorded[recorded_count++] = job;
    return VALUE;
  }
  for (int i = 0; i < job.n; i++) job.to[i] = job.value;
  return VALUE;
}

status N(cuInit, hipInit)(unsigned flags) { return fake_devices ? VALUE : NO_DEVICE; }
status N(cuDriverGetVersion, hipDriverGetVersion)(int *v) { return *v = fake_version, VALUE; }
status N(cuDeviceGetCount, hipGetDeviceCount)(int *n) { return *n = fake_devices, VALUE; }
status N(cuDeviceGet, hipDeviceGet)(device *d, int i) { return *d = i, VALUE; }
status N(cuDeviceGetName, hipDeviceGetName)(char *s, int n, device d) { return strncpy(s, "Fake One", n), VALUE; }
status N(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId)(char *s, int n, device d) {
  return strncpy(s, "0000:0c:00.0", n), VALUE;
}
status N(cuDeviceTotalMem, hipDeviceTotalMem)(size_t *n, device d) { return *n = 1ull << 37, VALUE; }
status N(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *v, device_attribute a, device d) {
  switch ((int)a) {
#ifdef NVIDIA
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return *v = 132, VALUE;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return *v = 232448, VALUE;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return *v = 50 << 20, VALUE;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return *v = 1980000, VALUE;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return *v = 32, VALUE;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return *v = 1024, VALUE;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return *v = 3201000, VALUE;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return *v = 6144, VALUE;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return *v = 9, VALUE;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return *v = 0, VALUE;
#else
  case hipDeviceAttributeMultiprocessorCount: return *v = 304, VALUE;
  case hipDeviceAttributeMaxSharedMemoryPerBlock: return *v = 65536, VALUE;
  case hipDeviceAttributeL2CacheSize: return *v = 4 << 20, VALUE;
  case hipDeviceAttributeClockRate: return *v = 2100000, VALUE;
  case hipDeviceAttributeWarpSize: return *v = 64, VALUE;
  case hipDeviceAttributeMaxThreadsPerBlock: return *v = 1024, VALUE;
  case hipDeviceAttributeMemoryClockRate: return *v = 1300000, VALUE;
  case hipDeviceAttributeMemoryBusWidth: return *v = 8192, VALUE;
#endif
  default: return BAD_VALUE;
  }
}

status N(cuMemGetInfo, hipMemGetInfo)(size_t *f, size_t *t) { return *f = 1000, *t = 2000, VALUE; }
status N(cuMemAlloc, hipMalloc)(N(address, void *) * p, size_t n) {
  if (n > 1ull << 37) return OUT_OF_MEMORY;
  return *p = N((address), (void *)) aligned_alloc(256, (n + 255) / 256 * 256), VALUE;
}
status N(cuMemFree, hipFree)(N(address, void *) p) { return free((void *)p), VALUE; }
/* Memory is mapped by pages of 64 KiB; a handle is its size, and what is reserved but not mapped can't be touched. */
enum { PAGE = 1 << 16 };
typedef N(CUmemAllocationProp, hipMemAllocationProp) memory_properties;
static int on_the_device(const memory_properties *p) {
  return (int)p->type == 1 && (int)p->location.type == 1 && p->location.id == fake_current && !p->requestedHandleTypes;
}
status N(cuMemGetAllocationGranularity, hipMemGetAllocationGranularity)(
    size_t *n, const memory_properties *p, N(CUmemAllocationGranularity_flags, hipMemAllocationGranularity_flags) f) {
  return *n = PAGE, f == 0 && on_the_device(p) ? VALUE : BAD_VALUE;
}
status N(cuMemAddressReserve, hipMemAddressReserve)(N(address, void *) * p, size_t n, size_t align, N(address, void *) at,
                                                     unsigned long long flags) {
  void *found = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  fake_reserved += n / PAGE;
  return *p = N((address), ) found, n % PAGE || align || at || flags ? BAD_VALUE : VALUE;
}
status N(cuMemAddressFree, hipMemAddressFree)(N(address, void *) p, size_t n) {
  return fake_reserved -= n / PAGE, munmap((void *)p, n) ? BAD_VALUE : VALUE;
}
status N(cuMemCreate, hipMemCreate)(N(CUmemGenericAllocationHandle, hipMemGenericAllocationHandle_t) * h, size_t n,
                                    const memory_properties *p, unsigned long long flags) {
  if (n > 1ull << 32) return OUT_OF_MEMORY;
  fake_created++;
  return *h = N(, (void *)) n, n % PAGE || !on_the_device(p) || flags ? BAD_VALUE : VALUE;
}
status N(cuMemRelease, hipMemRelease)(N(CUmemGenericAllocationHandle, hipMemGenericAllocationHandle_t) h) {
  return fake_created--, VALUE;
}
status N(cuMemMap, hipMemMap)(N(address, void *) p, size_t n, size_t offset,
                              N(CUmemGenericAllocationHandle, hipMemGenericAllocationHandle_t) h,
                              unsigned long long flags) {
  return fake_mapped++, (size_t)h != n || offset || flags ? BAD_VALUE : VALUE;
}
status N(cuMemUnmap, hipMemUnmap)(N(address, void *) p, size_t n) {
  return fake_mapped--, mprotect((void *)p, n, PROT_NONE) ? BAD_VALUE : VALUE;
}
status N(cuMemSetAccess, hipMemSetAccess)(N(address, void *) p, size_t n,
                                          const N(CUmemAccessDesc, hipMemAccessDesc) * a, size_t count) {
  if (count != 1 || (int)a->flags != 3 || a->location.id != fake_current || (int)a->location.type != 1) return BAD_VALUE;
  return mprotect((void *)p, n, PROT_READ | PROT_WRITE) ? BAD_VALUE : VALUE;
}
status N(cuMemsetD8Async, hipMemsetD8Async)(address to, unsigned char v, size_t n, stream s) {
  if (capturing) {
    memset(&launched[recorded_count], 0, sizeof *launched), launched[recorded_count].zeroes = 1;
    recorded[recorded_count++] = (fill){(int32_t *)to, (int32_t)n, v};
    return VALUE;
  }
  return fake_refuses ? BAD_VALUE : (memset((void *)to, v, n), fake_last_stream = s, VALUE);
}

status N(cuModuleLoadData, hipModuleLoadData)(module *m, const void *code) {
  return memcmp(code, "co\0de", 5) ? BAD_CODE : (*m = (module)77, VALUE);
}
status N(cuModuleUnload, hipModuleUnload)(module m) { return fake_destroyed++, m == (module)77 ? VALUE : BAD_VALUE; }
status N(cuModuleGetFunction, hipModuleGetFunction)(function *f, module m, const char *name) {
  return strcmp(name, "fill") ? NOT_FOUND : (*f = (function)0x7fff12345678, VALUE);
}
status N(cuFuncGetAttribute, hipFuncGetAttribute)(int *v, function_attribute a, function f) {
  switch ((int)a) {
  case N(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK): return *v = 256, VALUE;
  case N(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES): return *v = 1024, VALUE;
  case N(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES): return *v = 16, VALUE;
  case N(CU_FUNC_ATTRIBUTE_NUM_REGS, HIP_FUNC_ATTRIBUTE_NUM_REGS): return *v = 40, VALUE;
  default: return BAD_VALUE;
  }
}
status N(cuLaunchKernel, hipModuleLaunchKernel)(function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                                unsigned by, unsigned bz, unsigned shared, stream s, void **params,
                                                void **extra) {
  fake_cluster = fake_overlap = 0;
  return f == (function)0x7fff12345678 ? run(gx, gy, gz, bx, by, bz, shared, s, params, extra) : BAD_VALUE;
}

status N(cuStreamCreate, hipStreamCreateWithFlags)(stream *s, unsigned flags) {
  return *s = (stream)0x5555aaaa0001, flags == 1 ? VALUE : BAD_VALUE;
}
status N(cuStreamDestroy, hipStreamDestroy)(stream s) { return fake_destroyed++, VALUE; }
status N(cuStreamSynchronize, hipStreamSynchronize)(stream s) { return fake_broken ? (status)fake_broken : VALUE; }
status N(cuCtxSynchronize, hipDeviceSynchronize)(void) { return fake_broken ? (status)fake_broken : VALUE; }
status N(cuEventCreate, hipEventCreateWithFlags)(event *e, unsigned flags) {
  return *e = (event)calloc(1, 4), flags ? BAD_VALUE : VALUE;
}
status N(cuEventDestroy, hipEventDestroy)(event e) { return free(e), fake_destroyed++, VALUE; }
status N(cuEventRecord, hipEventRecord)(event e, stream s) {
  static int now;
  return *(int *)e = now += 5, VALUE;
}
status N(cuEventSynchronize, hipEventSynchronize)(event e) { return VALUE; }
status N(cuEventElapsedTime, hipEventElapsedTime)(float *ms, event a, event b) {
  return *ms = *(int *)b - *(int *)a, VALUE;
}
status N(cuStreamBeginCapture, hipStreamBeginCapture)(stream s, capture_mode mode) {
  return capturing = 1, recorded_count = 0, (int)mode == 1 || (int)mode == 2 ? VALUE : BAD_VALUE;
}
status N(cuStreamEndCapture, hipStreamEndCapture)(stream s, graph *g) {
  return capturing = 0, *g = (graph)(intptr_t)recorded_count, recorded_count ? VALUE : CAPTURE_BROKEN;
}
status N(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(capture_mode *mode) {
  int old = fake_mode;
  return fake_mode = (int)*mode, *mode = (capture_mode)old, VALUE;
}
status N(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags)(graph_exec *e, graph g, unsigned long long flags) {
  return *e = (graph_exec)g, flags ? BAD_VALUE : VALUE;
}
status N(cuGraphLaunch, hipGraphLaunch)(graph_exec e, stream s) {
  for (int k = 0; k < (intptr_t)e; k++)
    if (launched[k].zeroes) memset(recorded[k].to, recorded[k].value, recorded[k].n);
    else for (int i = 0; i < recorded[k].n; i++) recorded[k].to[i] = recorded[k].value;
  return VALUE;
}
status N(cuGraphExecDestroy, hipGraphExecDestroy)(graph_exec e) { return fake_destroyed++, VALUE; }
status N(cuGraphDestroy, hipGraphDestroy)(graph g) { return fake_destroyed++, VALUE; }

#ifdef NVIDIA
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return *c = (CUcontext)(intptr_t)(1000 + d), VALUE; }
CUresult cuCtxSetCurrent(CUcontext c) { return fake_current = (int)(intptr_t)c - 1000, VALUE; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  if (a == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) return fake_wide = v, VALUE;
  if (a != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || v > 232448 - 1024) return BAD_VALUE;
  return fake_limit = v, VALUE;
}
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) {
  return fake_prefer += c == CU_FUNC_CACHE_PREFER_SHARED, VALUE;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  fake_cluster = fake_overlap = 0;
  for (unsigned i = 0; i < c->numAttrs; i++) {
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      fake_cluster = c->attrs[i].value.clusterDim.x * 100 + c->attrs[i].value.clusterDim.y * 10 +
                     c->attrs[i].value.clusterDim.z;
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
      fake_spread = c->attrs[i].value.clusterSchedulingPolicyPreference == CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      fake_overlap = c->attrs[i].value.programmaticStreamSerializationAllowed;
  }
  return run(c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes,
             c->hStream, params, extra);
}
/* The graph's nodes are the launches that were recorded, counted from one. */
CUresult cuGraphGetNodes(CUgraph g, CUgraphNode *nodes, size_t *count) {
  if (nodes)
    for (size_t i = 0; i < *count; i++) nodes[i] = (CUgraphNode)(i + 1);
  return *count = (size_t)(intptr_t)g, VALUE;
}
CUresult cuGraphGetEdges_v2(CUgraph g, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count) {
  size_t edges = (size_t)(intptr_t)g - 1 - !!fake_fork;
  if (from && !edges) return BAD_VALUE;
  for (size_t i = 0; from && i < edges; i++) {
    int early = fake_early || launched[i + 1].overlap;
    from[i] = (CUgraphNode)(i + 1), to[i] = (CUgraphNode)(i + 2);
    data[i] = (CUgraphEdgeData){.from_port = early ? CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC : 0,
                                .type = early ? CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC : 0};
  }
  return *count = edges, VALUE;
}
CUresult cuGraphNodeGetType(CUgraphNode n, CUgraphNodeType *t) {
  int zeroes = launched[(intptr_t)n - 1].zeroes;
  return *t = zeroes ? CU_GRAPH_NODE_TYPE_MEMSET : (CUgraphNodeType)fake_kind, VALUE;
}
CUresult cuGraphMemsetNodeGetParams(CUgraphNode n, CUDA_MEMSET_NODE_PARAMS *p) {
  fill *job = &recorded[(intptr_t)n - 1];
  *p = (CUDA_MEMSET_NODE_PARAMS){.dst = (CUdeviceptr)job->to, .value = job->value, .elementSize = 4,
                                 .width = job->n / 4, .height = fake_rows};
  return VALUE;
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode n, CUDA_KERNEL_NODE_PARAMS *p) {
  static void *values[3], *extra[5];
  static size_t size = sizeof(fill);
  int i = (int)(intptr_t)n - 1;
  unsigned *s = launched[i].shape;
  values[0] = &recorded[i].to, values[1] = &recorded[i].n, values[2] = &recorded[i].value;
  extra[0] = CU_LAUNCH_PARAM_BUFFER_SIZE, extra[1] = &size; /* the other way round than `run` takes them */
  extra[2] = CU_LAUNCH_PARAM_BUFFER_POINTER, extra[3] = &recorded[i], extra[4] = CU_LAUNCH_PARAM_END;
  *p = (CUDA_KERNEL_NODE_PARAMS){.func = (CUfunction)0x7fff12345678, .gridDimX = s[0], .gridDimY = s[1],
                                 .gridDimZ = s[2], .blockDimX = s[3], .blockDimY = s[4], .blockDimZ = s[5],
                                 .sharedMemBytes = s[6], .kernelParams = launched[i].complete ? NULL : values,
                                 .extra = launched[i].complete ? extra : NULL};
  return VALUE;
}
CUresult cuGraphKernelNodeGetAttribute(CUgraphNode n, CUkernelNodeAttrID a, CUkernelNodeAttrValue *v) {
  memset(v, 0, sizeof *v);
  unsigned cluster = launched[(intptr_t)n - 1].cluster;
  if (a == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    v->clusterDim.x = cluster / 100, v->clusterDim.y = cluster / 10 % 10, v->clusterDim.z = cluster % 10;
  if (a == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) v->cooperative = fake_together;
  if (a == CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
    v->clusterSchedulingPolicyPreference = (CUclusterSchedulingPolicy)fake_policy;
  return VALUE;
}
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
  static const size_t places[3][2] = {{0, 8}, {8, 4}, {12, 4}};
  return i > 2 ? BAD_VALUE : (*offset = places[i][0], *size = places[i][1], VALUE);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *at,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  uint64_t facts[16] = {(uintptr_t)map % 128, 1 << 21, type, rank,     (uintptr_t)at, dims[0], dims[1],   strides[0],
                        box[0],              box[1],  steps[0], steps[1], interleave,    swizzle, l2,        fill};
  return memcpy(map, facts, sizeof facts), rank == 2 && box[0] <= 256 ? VALUE : BAD_VALUE;
}
CUresult cuGetErrorName(CUresult e, const char **s) {
  *s = e == BAD_VALUE ? "CUDA_ERROR_INVALID_VALUE" : e == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_OTHER";
  return VALUE;
}
CUresult cuGetErrorString(CUresult e, const char **s) { return *s = "in words", VALUE; }
#else
hipError_t hipSetDevice(int d) { return fake_current = d, VALUE; }
hipError_t hipGetDeviceProperties(hipDeviceProp_t *p, int d) {
  memset(p, 0, sizeof *p);
  return strcpy(p->gcnArchName, "gfx942:sramecc+:xnack-"), VALUE;
}
hipError_t hipDrvGetErrorName(hipError_t e, const char **s) {
  *s = e == BAD_VALUE ? "hipErrorInvalidValue" : e == NOT_FOUND ? "hipErrorNotFound" : "hipErrorOther";
  return VALUE;
}
hipError_t hipDrvGetErrorString(hipError_t e, const char **s) { return *s = "in words", VALUE; }
#endif
