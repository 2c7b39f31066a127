// The two calls of a driver that serving makes by itself, as each vendor has them.
#ifdef nvidia
#include <cuda.h>
#undef cuStreamGetCaptureInfo_v2
CUresult cuStreamGetCaptureInfo_v2(CUstream s, CUstreamCaptureStatus *on, cuuint64_t *id, CUgraph *g,
                                   const CUgraphNode **d, size_t *n) {
  return s == (CUstream)9 ? 901 : (*on = s ? CU_STREAM_CAPTURE_STATUS_ACTIVE : 0, *id = 41, 0);
}
CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *at) {
  return (size_t)map % 64 || (size_t)at % 16 ? 1 : (map->opaque[0] = (cuuint64_t)at, 0);
}
#else
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t s, hipStreamCaptureStatus *on, unsigned long long *id,
                                      hipGraph_t *g, const hipGraphNode_t **d, size_t *n) {
  return s == (hipStream_t)9 ? 901 : (*on = s ? hipStreamCaptureStatusActive : 0, *id = 41, 0);
}
#endif
