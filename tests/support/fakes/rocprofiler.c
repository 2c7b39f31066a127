/* A stand-in for librocprofiler-sdk with its rules: tools register once, services are configured during registration
 * only, kernels are named when code is loaded, records arrive on another thread. Built against the real header of 1.x;
 * with -DVERSION_0 it lays its structs out as 0.5 and 0.6 do. */
#define __HIP_PLATFORM_AMD__
typedef struct hipArrayMemoryRequirements hipArrayMemoryRequirements; /* the wheel has a prototype with it, no type */
#include <pthread.h>
#include <rocprofiler-sdk/fwd.h>
#include <rocprofiler-sdk/buffer.h>
#include <rocprofiler-sdk/buffer_tracing.h>
#include <rocprofiler-sdk/callback_tracing.h>
#include <rocprofiler-sdk/registration.h>
#include <string.h>

#ifdef VERSION_0
typedef struct {
  const char *name;
  uint32_t handle;
} client_id;
typedef struct {
  rocprofiler_context_id_t context_id;
  rocprofiler_thread_id_t thread_id;
  uint64_t internal, external;
  int kind, operation, phase;
  void *payload;
} callback_record;
typedef struct {
  uint64_t size, kernel_id, code_object_id;
  const char *kernel_name;
  uint64_t kernel_object;
  uint32_t sizes[7];
} kernel_symbol;
#else
typedef rocprofiler_client_id_t client_id;
typedef rocprofiler_callback_tracing_record_t callback_record;
typedef rocprofiler_callback_tracing_code_object_kernel_symbol_register_data_t kernel_symbol;
#endif
typedef void (*on_code)(callback_record, rocprofiler_user_data_t *, void *);
typedef rocprofiler_buffer_tracing_kernel_dispatch_record_t dispatch;
#define OK ROCPROFILER_STATUS_SUCCESS
#define LOCKED ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED

/* what the tests set and look at */
int fake_initialized, fake_mute, fake_dropped, fake_hold, fake_locked = LOCKED, fake_time = 1000, fake_broken_size;
int fake_major, fake_stops;
char fake_client[32];

static int configuring, active[3], contexts;
static on_code code_callback;
static uint64_t code_context, dispatch_context;
static rocprofiler_buffer_tracing_cb_t buffer_callback;
static dispatch records[64];
static int count;

rocprofiler_status_t rocprofiler_get_version(uint32_t *major, uint32_t *minor, uint32_t *patch) {
  return *major = fake_major, *minor = 5, *patch = 0, OK;
}
const char *rocprofiler_get_status_name(rocprofiler_status_t s) {
  return (int)s == fake_locked ? "ROCPROFILER_STATUS_ERROR_CONFIGURATION_LOCKED" : "ROCPROFILER_STATUS_ERROR_OTHER";
}
const char *rocprofiler_get_status_string(rocprofiler_status_t s) { return "in words"; }
rocprofiler_status_t rocprofiler_get_timestamp(rocprofiler_timestamp_t *t) { return *t = fake_time, OK; }
rocprofiler_status_t rocprofiler_is_initialized(int *status) { return *status = fake_initialized == 1, OK; }

static rocprofiler_tool_configure_result_t kept;
rocprofiler_status_t rocprofiler_force_configure(rocprofiler_configure_func_t configure) {
  if (fake_initialized) return fake_locked;
  if (fake_mute) return fake_initialized = 1, OK;
  client_id id;
  memset(&id, 0, sizeof id);
  kept = *configure(10500, "0.5", 0, (rocprofiler_client_id_t *)&id);
  strcpy(fake_client, id.name);
  if (kept.size != sizeof kept) return ROCPROFILER_STATUS_ERROR_INCOMPATIBLE_ABI;
  configuring = 1;
  kept.initialize(NULL, kept.tool_data);
  configuring = 0, fake_initialized = 1;
  return OK;
}
rocprofiler_status_t rocprofiler_create_context(rocprofiler_context_id_t *c) {
  if (c->handle) return ROCPROFILER_STATUS_ERROR_CONTEXT_ID_NOT_ZERO;
  return configuring ? (c->handle = ++contexts, OK) : fake_locked;
}
rocprofiler_status_t rocprofiler_context_is_valid(rocprofiler_context_id_t c, int *status) {
  return *status = 1, c.handle && c.handle <= contexts ? OK : ROCPROFILER_STATUS_ERROR_CONTEXT_INVALID;
}
rocprofiler_status_t rocprofiler_start_context(rocprofiler_context_id_t c) { return active[c.handle] = 1, OK; }
rocprofiler_status_t rocprofiler_stop_context(rocprofiler_context_id_t c) {
  return active[c.handle] = 0, fake_stops++, OK;
}
rocprofiler_status_t rocprofiler_configure_callback_tracing_service(
    rocprofiler_context_id_t c, rocprofiler_callback_tracing_kind_t kind, const rocprofiler_tracing_operation_t *o,
    size_t n, rocprofiler_callback_tracing_cb_t callback, void *data) {
  if (!configuring) return fake_locked;
  if (kind != ROCPROFILER_CALLBACK_TRACING_CODE_OBJECT) return ROCPROFILER_STATUS_ERROR_KIND_NOT_FOUND;
  return code_context = c.handle, code_callback = (on_code)callback, OK;
}
rocprofiler_status_t rocprofiler_create_buffer(rocprofiler_context_id_t c, size_t size, size_t watermark,
                                               rocprofiler_buffer_policy_t policy,
                                               rocprofiler_buffer_tracing_cb_t callback, void *data,
                                               rocprofiler_buffer_id_t *b) {
  if (!configuring) return fake_locked;
  if (policy != ROCPROFILER_BUFFER_POLICY_LOSSLESS || watermark >= size) return ROCPROFILER_STATUS_ERROR_INVALID_ARGUMENT;
  return buffer_callback = callback, b->handle = 77, OK;
}
rocprofiler_status_t rocprofiler_configure_buffer_tracing_service(rocprofiler_context_id_t c,
                                                                  rocprofiler_buffer_tracing_kind_t kind,
                                                                  const rocprofiler_tracing_operation_t *o, size_t n,
                                                                  rocprofiler_buffer_id_t b) {
  if (!configuring) return fake_locked;
  if (kind != ROCPROFILER_BUFFER_TRACING_KERNEL_DISPATCH || b.handle != 77)
    return ROCPROFILER_STATUS_ERROR_KIND_NOT_FOUND;
  return dispatch_context = c.handle, OK;
}

static void *deliver(void *unused) {
  rocprofiler_record_header_t headers[65], *pointers[65];
  uint64_t other[4] = {32};
  for (int i = 0; i <= count; i++) {
    int last = i == count; /* a record of another kind */
    headers[i].category = last ? ROCPROFILER_BUFFER_CATEGORY_COUNTERS : ROCPROFILER_BUFFER_CATEGORY_TRACING;
    headers[i].kind = ROCPROFILER_BUFFER_TRACING_KERNEL_DISPATCH;
    headers[i].payload = last ? (void *)other : &records[i];
    pointers[i] = &headers[i];
  }
  rocprofiler_context_id_t c = {dispatch_context};
  rocprofiler_buffer_id_t b = {77};
  buffer_callback(c, b, pointers, count + 1, NULL, fake_dropped);
  return NULL;
}
rocprofiler_status_t rocprofiler_flush_buffer(rocprofiler_buffer_id_t b) {
  if (b.handle != 77) return ROCPROFILER_STATUS_ERROR_BUFFER_NOT_FOUND;
  if (fake_hold-- > 0 || !count) return OK;
  pthread_t thread;
  pthread_create(&thread, NULL, deliver, NULL), pthread_join(thread, NULL);
  return count = 0, OK;
}

/* what the GPU would do */
void fake_load(const char *name, unsigned id, int operation, int phase) {
  kernel_symbol symbol;
  callback_record record;
  memset(&symbol, 0, sizeof symbol), memset(&record, 0, sizeof record);
  symbol.size = sizeof symbol, symbol.kernel_id = id, symbol.kernel_name = name;
  record.kind = ROCPROFILER_CALLBACK_TRACING_CODE_OBJECT, record.operation = operation, record.phase = phase;
  record.payload = &symbol;
  if (active[code_context]) code_callback(record, NULL, NULL);
}
void fake_launch(unsigned id, unsigned dispatch_id, unsigned start, unsigned end) {
  if (!active[dispatch_context]) return;
  dispatch *r = memset(&records[count++], 0, sizeof(dispatch));
  r->size = fake_broken_size ? fake_broken_size : sizeof(dispatch);
  r->kind = ROCPROFILER_BUFFER_TRACING_KERNEL_DISPATCH, r->start_timestamp = start, r->end_timestamp = end;
  r->dispatch_info.kernel_id = id, r->dispatch_info.dispatch_id = dispatch_id;
}
