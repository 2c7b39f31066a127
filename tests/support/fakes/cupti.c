/* A stand-in for libcupti, compiled against its real header. The test "launches" kernels with fake_launch; records are
 * handed over by another thread, as CUPTI does. */
#include <cupti.h>
#include <pthread.h>
#include <string.h>

typedef CUpti_ActivityKernel9 record;

unsigned fake_version = CUPTI_API_VERSION, fake_time = 1000;
int fake_refuse, fake_dropped, fake_hold;

static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc complete;
static int enabled;
static uint8_t *buffer;
static size_t size, used;

CUptiResult cuptiGetVersion(uint32_t *v) { return *v = fake_version, CUPTI_SUCCESS; }
CUptiResult cuptiGetTimestamp(uint64_t *t) { /* asked at the start and at the end of a trace */
  static int ends;
  return *t = fake_time + 1000000 * (ends++ % 2), CUPTI_SUCCESS;
}
CUptiResult cuptiGetResultString(CUptiResult r, const char **s) { return *s = "CUPTI_ERROR_IN_A_NAME", CUPTI_SUCCESS; }
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc r, CUpti_BuffersCallbackCompleteFunc c) {
  return request = r, complete = c, fake_refuse ? CUPTI_ERROR_INSUFFICIENT_PRIVILEGES : CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind k) {
  return fake_refuse ? CUPTI_ERROR_INSUFFICIENT_PRIVILEGES : (enabled |= 1 << k, CUPTI_SUCCESS);
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind k) { return enabled &= ~(1 << k), CUPTI_SUCCESS; }
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext c, uint32_t s, size_t *n) {
  return *n = fake_dropped, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t *b, size_t valid, CUpti_Activity **r) {
  uint8_t *next = *r ? (uint8_t *)*r + sizeof(record) : b;
  if (next + sizeof(record) > b + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  return *r = (CUpti_Activity *)next, CUPTI_SUCCESS;
}

static void *deliver(void *unused) { return complete(NULL, 0, buffer, size, used), NULL; }
CUptiResult cuptiActivityFlushAll(uint32_t flags) {
  if (fake_hold-- > 0 || !buffer) return CUPTI_SUCCESS;
  pthread_t thread;
  pthread_create(&thread, NULL, deliver, NULL), pthread_join(thread, NULL);
  return buffer = NULL, CUPTI_SUCCESS;
}
static void *slot(int kind) { /* all records here take the room of the largest */
  size_t most = 0;
  if (!(enabled & 1 << kind)) return NULL;
  if (!buffer) request(&buffer, &size, &most), used = 0;
  used += sizeof(record);
  return memset(buffer + used - sizeof(record), 0, sizeof(record));
}
void fake_launch(const char *name, unsigned start, unsigned end, unsigned correlation) {
  record *r = slot(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  if (!r) return;
  r->kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
  r->start = start, r->end = end, r->correlationId = correlation, r->name = name;
}
void fake_memset(unsigned start, unsigned end, unsigned correlation) {
  CUpti_ActivityMemset4 *r = slot(CUPTI_ACTIVITY_KIND_MEMSET);
  if (r) r->kind = CUPTI_ACTIVITY_KIND_MEMSET, r->start = start, r->end = end, r->correlationId = correlation;
}
void fake_memcpy(unsigned start, unsigned end, unsigned correlation) {
  CUpti_ActivityMemcpy6 *r = slot(CUPTI_ACTIVITY_KIND_MEMCPY);
  if (r) r->kind = CUPTI_ACTIVITY_KIND_MEMCPY, r->start = start, r->end = end, r->correlationId = correlation;
}
