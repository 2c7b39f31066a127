// Serves calls whose kernel is known: looks them up, allocates the result, patches a copy of the parameters and launches.
//
// Tensors are read through DLPack's C exchange functions, which PyTorch exports. Whatever is unusual returns None, and
// Python serves that call. Prepared launches never change, so threads share them; the GIL is released for the driver.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BLOCK = 8192, MOST_PARAMS = 256, MOST_ADDRESSES = 24, MOST_KEY = 1536, MOST_CALLS = 8192 };
// A key begins with what resolves calls, one for each operation, and eight letters of a precision.
enum { KEY_START = sizeof(PyObject *) + 8 };
enum { KERNEL_EX, KERNEL_HIP, CLEAR };

typedef struct { int32_t type, id; } Device;                       // DLDevice
typedef struct { uint8_t code, bits; uint16_t lanes; } DataType;   // DLDataType
typedef struct {                                                   // DLTensor
  void *data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} View;
typedef struct {                                                   // DLPackExchangeAPI of version 1
  struct { uint32_t major, minor; } version;
  void *previous, *allocate, *from_object, *to_object;
  int (*view)(void *object, View *out);
  int (*current_stream)(int32_t type, int32_t id, void **out);
} Exchange;

typedef struct { uint32_t id, pad, value[16]; } Attribute;         // CUlaunchAttribute
typedef struct {                                                   // CUlaunchConfig
  uint32_t grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  uint32_t count;
} Config;
typedef int (*LaunchEx)(const Config *, void *, void **, void **);
typedef int (*LaunchHip)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                         void **);
typedef int (*Clear)(uint64_t, unsigned char, size_t, void *);

typedef struct {
  int kind, end_key, start, bytes, offsets, offset_count, attribute_count;  // `start`: of its parameters in the block
  void *driver, *function;
  uint32_t shape[7];
  size_t cleared;
  Attribute attributes[3];
} Step;
typedef struct { int address, offset; uint64_t distance; } Slot;

typedef struct {
  PyObject_HEAD
  PyObject *refuse;     // raises what a status of the driver means
  PyObject *kept;       // what the driver's handles belong to
  int step_count, slot_count, block_bytes;
  Step *steps;
  Slot *slots;
  int *offsets;
  unsigned char *block;
} Launch;

static const Exchange *exchange;
static PyTypeObject *plain_types[2];
static PyTypeObject *dtype_type;
static PyObject *grad_enabled, *mode_count, *any_autocast, *tracing_state, *forward_module, *is_capturing;
static PyObject *current_device, *precision, *cuda_matmul, *level_name, *requires_grad_name;
// The first four of PyTorch's functions above without Python, or NULL.
static struct {
  _Bool (*grad)(void);
  int64_t (*modes)(void);
  _Bool (*autocast)(int8_t device);
  void *const *(*tracing)(void);
} direct;

static int start(Launch *launch, void *stream, const uint64_t *addresses) {
  unsigned char block[MOST_BLOCK] __attribute__((aligned(64)));
  void *params[MOST_PARAMS];
  int status = 0;
  memcpy(block, launch->block, launch->block_bytes);
  for (int i = 0; i < launch->slot_count; i++) {
    const Slot *slot = launch->slots + i;
    uint64_t address = addresses[slot->address] + slot->distance;
    memcpy(block + slot->offset, &address, sizeof address);
  }
  for (int i = 0; i < launch->step_count && !status; i++) {
    Step *step = launch->steps + i;
    size_t bytes = step->bytes;
    void *extra[] = {(void *)1, block + step->start, (void *)2, &bytes, (void *)(intptr_t)step->end_key};
    for (int j = 0; j < step->offset_count; j++)
      params[j] = block + step->start + launch->offsets[step->offsets + j];
    void **by_address = step->offset_count ? params : NULL, **as_block = step->offset_count ? NULL : extra;
    const uint32_t *s = step->shape;
    if (step->kind == KERNEL_EX) {
      Config config = {{s[0], s[1], s[2]}, {s[3], s[4], s[5]}, s[6], stream, step->attributes, step->attribute_count};
      status = ((LaunchEx)step->driver)(&config, step->function, by_address, as_block);
    } else if (step->kind == KERNEL_HIP) {
      status = ((LaunchHip)step->driver)(step->function, s[0], s[1], s[2], s[3], s[4], s[5], s[6], stream, by_address,
                                         as_block);
    } else {
      uint64_t address;
      memcpy(&address, block + step->start, sizeof address);
      status = ((Clear)step->driver)(address, 0, step->cleared, stream);
    }
  }
  return status;
}

// Launches without the GIL, as a full queue waits for the GPU; returns -1 with an exception where the driver refuses.
static int start_freely(Launch *launch, void *stream, const uint64_t *addresses) {
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = start(launch, stream, addresses);
  Py_END_ALLOW_THREADS
  if (!status) return 0;
  PyObject *none = PyObject_CallFunction(launch->refuse, "i", status);
  if (none) PyErr_Format(PyExc_RuntimeError, "the driver refused a launch with status %d", status);
  Py_XDECREF(none);
  return -1;
}

static void launch_free(PyObject *self) {
  Launch *launch = (Launch *)self;
  free(launch->steps), free(launch->slots), free(launch->offsets), free(launch->block);
  Py_XDECREF(launch->refuse), Py_XDECREF(launch->kept);
  Py_TYPE(self)->tp_free(self);
}

static int read_step(Launch *launch, Step *step, PyObject *item, int *offset_count) {
  Py_buffer params, attributes;
  PyObject *shape, *offsets;
  unsigned long long driver, function, cleared;
  if (!PyArg_ParseTuple(item, "iiKKO!y*iy*O!K", &step->kind, &step->end_key, &driver, &function, &PyTuple_Type, &shape, &attributes,
                        &step->attribute_count, &params, &PyTuple_Type, &offsets, &cleared))
    return -1;
  int fits = launch->block_bytes + params.len + 64 <= MOST_BLOCK && PyTuple_GET_SIZE(shape) == 7 &&
             attributes.len <= (Py_ssize_t)sizeof step->attributes && PyTuple_GET_SIZE(offsets) <= MOST_PARAMS;
  if (fits) {
    step->driver = (void *)(uintptr_t)driver, step->function = (void *)(uintptr_t)function, step->cleared = cleared;
    for (int i = 0; i < 7; i++) step->shape[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(shape, i));
    memcpy(step->attributes, attributes.buf, attributes.len);
    step->start = launch->block_bytes, step->bytes = (int)params.len;
    memcpy(launch->block + step->start, params.buf, params.len);
    launch->block_bytes += (int)(params.len + 63) / 64 * 64;
    step->offsets = *offset_count, step->offset_count = (int)PyTuple_GET_SIZE(offsets);
    for (int i = 0; i < step->offset_count; i++)
      launch->offsets[(*offset_count)++] = (int)PyLong_AsLong(PyTuple_GET_ITEM(offsets, i));
  } else
    PyErr_SetString(PyExc_ValueError, "a launch is larger than native calls take");
  PyBuffer_Release(&params), PyBuffer_Release(&attributes);
  return fits && !PyErr_Occurred() ? 0 : -1;
}

// Launch(refuse, kept, steps, slots): steps as `read_step` takes them, slots of (address, step, offset, distance)
static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  PyObject *refuse, *kept, *steps, *slots;
  int offset_count = 0;
  if (!PyArg_ParseTuple(args, "OOO!O!", &refuse, &kept, &PyTuple_Type, &steps, &PyTuple_Type, &slots))
    return NULL;
  Launch *launch = (Launch *)type->tp_alloc(type, 0);
  if (!launch) return NULL;
  launch->refuse = Py_NewRef(refuse), launch->kept = Py_NewRef(kept);
  launch->step_count = (int)PyTuple_GET_SIZE(steps), launch->slot_count = (int)PyTuple_GET_SIZE(slots);
  launch->steps = calloc(launch->step_count + 1, sizeof(Step));
  launch->slots = calloc(launch->slot_count + 1, sizeof(Slot));
  launch->offsets = calloc((size_t)launch->step_count * MOST_PARAMS + 1, sizeof(int));
  launch->block = calloc(1, MOST_BLOCK);
  int failed = !launch->steps || !launch->slots || !launch->offsets || !launch->block;
  if (failed) PyErr_NoMemory();
  for (int i = 0; i < launch->step_count && !failed; i++)
    failed = read_step(launch, launch->steps + i, PyTuple_GET_ITEM(steps, i), &offset_count);
  for (int i = 0; i < launch->slot_count && !failed; i++) {
    Slot *slot = launch->slots + i;
    int step;
    failed = !PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "iiiK", &slot->address, &step, &slot->offset, &slot->distance);
    if (failed) break;
    failed = slot->address < 0 || slot->address >= MOST_ADDRESSES || step < 0 || step >= launch->step_count ||
             slot->offset < 0 || slot->offset + 8 > launch->steps[step].bytes;
    if (failed) PyErr_SetString(PyExc_ValueError, "an address is outside of a launch's parameters");
    else slot->offset += launch->steps[step].start;
  }
  if (!failed) return (PyObject *)launch;
  Py_DECREF(launch);
  return NULL;
}

// start(stream, *addresses)
static PyObject *launch_start(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  uint64_t addresses[MOST_ADDRESSES] = {0};
  if (count < 1 || count > MOST_ADDRESSES) {
    PyErr_SetString(PyExc_TypeError, "a launch takes a stream and addresses");
    return NULL;
  }
  void *stream = PyLong_AsVoidPtr(args[0]);
  for (Py_ssize_t i = 1; i < count; i++) addresses[i - 1] = PyLong_AsUnsignedLongLong(args[i]);
  if (PyErr_Occurred() || start_freely((Launch *)self, stream, addresses)) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef launch_methods[] = {{"start", (PyCFunction)(void (*)(void))launch_start, METH_FASTCALL, NULL}, {0}};
static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tritongemm.native_calls.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = launch_new,
    .tp_dealloc = launch_free,
    .tp_methods = launch_methods,
};

typedef struct {
  PyObject_HEAD
  Launch *launch;
  PyObject *allocate, *layout;  // the function that makes new memory for a result, and its arguments
  PyObject *streams;            // {stream: (workspace, counters)}; None where a kernel shares no memory
  Device device;
  int out, alone, place_count, places[MOST_ADDRESSES];  // which argument each operand is
} Call;

static void call_free(PyObject *self) {
  Call *call = (Call *)self;
  Py_XDECREF(call->launch), Py_XDECREF(call->allocate), Py_XDECREF(call->layout), Py_XDECREF(call->streams);
  Py_TYPE(self)->tp_free(self);
}

// Call(launch, allocate, layout, streams, operand, alone, out, places): a call of operands on the device of one of them
static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  PyObject *launch, *allocate, *layout, *streams, *operand, *places;
  int alone, out;
  if (!PyArg_ParseTuple(args, "O!OO!OOiiO!", &LaunchType, &launch, &allocate, &PyTuple_Type, &layout, &streams, &operand,
                        &alone, &out, &PyTuple_Type, &places))
    return NULL;
  View view;
  if (exchange->view(operand, &view)) return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(places);
  if (count > MOST_ADDRESSES - 3) {
    PyErr_SetString(PyExc_ValueError, "a call has more operands than native calls take");
    return NULL;
  }
  Call *call = (Call *)type->tp_alloc(type, 0);
  if (!call) return NULL;
  call->launch = (Launch *)Py_NewRef(launch), call->allocate = Py_NewRef(allocate), call->layout = Py_NewRef(layout);
  call->streams = Py_NewRef(streams), call->device = view.device, call->alone = alone, call->out = out;
  call->place_count = (int)count;
  for (Py_ssize_t i = 0; i < count; i++) call->places[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(places, i));
  if (!PyErr_Occurred()) return (PyObject *)call;
  Py_DECREF(call);
  return NULL;
}

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tritongemm.native_calls.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = call_new,
    .tp_dealloc = call_free,
};

// 1 where a function without arguments returns `expected`, 0 where another, -1 with an exception.
static int returns(PyObject *function, PyObject *expected) {
  PyObject *result = PyObject_CallNoArgs(function);
  if (!result) return -1;
  int same = result == expected;
  Py_DECREF(result);
  return same;
}

// 1 where no mode, autocast or tracer is to see a call, 0 where one is, -1 with an exception.
static int is_unseen(void) {
  static PyObject *zero;
  if (!zero) zero = PyLong_FromLong(0);
  if (direct.grad) return !direct.modes() && !direct.autocast(1) && !*direct.tracing();
  int answer = returns(mode_count, zero);
  if (answer == 1) answer = returns(any_autocast, Py_False);
  return answer == 1 ? returns(tracing_state, Py_None) : answer;
}

// 1 where PyTorch does no more than compute a product, 0 where Python has to look, -1 with an exception.
static int is_usual(PyObject *const *args, Py_ssize_t count, const char *is_tensor) {
  int grad = direct.grad ? !direct.grad() : returns(grad_enabled, Py_False);
  if (grad < 0) return -1;
  for (Py_ssize_t i = 0; i < count && !grad; i++)
    if (is_tensor[i]) {
      PyObject *required = PyObject_GetAttr(args[i], requires_grad_name);
      if (!required) return -1;
      Py_DECREF(required);
      if (required != Py_False) return 0;
    }
  int answer = is_unseen();
  if (answer != 1) return answer;
  PyObject *level = PyObject_GetAttr(forward_module, level_name);
  if (!level) return -1;
  answer = PyLong_AsLong(level) < 0;
  Py_DECREF(level);
  return answer;
}

// Runs a call; None where an operand does not fit.
static PyObject *run(Call *call, PyObject *const *args, const View *views) {
  uint64_t addresses[MOST_ADDRESSES], all = 0;
  View of_result;
  void *stream = NULL;
  for (int i = 0; i < call->place_count; i++) {
    int place = call->places[i];
    const View *view = views + place;
    if (place < 0) {
      addresses[i + 1] = 0;
      continue;
    }
    if (view->device.type != call->device.type || view->device.id != call->device.id) Py_RETURN_NONE;
    all |= addresses[i + 1] = (uint64_t)(uintptr_t)view->data + view->byte_offset;
  }
  if (all & 15) Py_RETURN_NONE;
  if (!call->alone) {
    PyObject *index = PyObject_CallNoArgs(current_device);
    if (!index) return NULL;
    long current = PyLong_AsLong(index);
    Py_DECREF(index);
    if (current != call->device.id) Py_RETURN_NONE;
  }
  if (exchange->current_stream(call->device.type, call->device.id, &stream)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  uint64_t *shared = addresses + call->place_count + 1;
  shared[0] = shared[1] = 0;
  if (call->streams != Py_None) {
    int quiet = returns(is_capturing, Py_False);
    if (quiet < 0) return NULL;
    if (!quiet) Py_RETURN_NONE;
    PyObject *key = PyLong_FromVoidPtr(stream), *pair = key ? PyDict_GetItemWithError(call->streams, key) : NULL;
    Py_XDECREF(key);
    if (PyErr_Occurred()) return NULL;
    if (!pair) Py_RETURN_NONE;
    for (int i = 0; i < 2; i++) shared[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(pair, i));
  }
  PyObject *result = call->out < 0 ? PyObject_CallObject(call->allocate, call->layout) : Py_NewRef(args[call->out]);
  if (!result) return NULL;
  if (call->out >= 0) of_result = views[call->out];
  else if (exchange->view(result, &of_result)) {
    Py_DECREF(result);
    return NULL;
  }
  addresses[0] = (uint64_t)(uintptr_t)of_result.data + of_result.byte_offset;
  if (addresses[0] & 15) {
    Py_DECREF(result);
    Py_RETURN_NONE;
  }
  if (!start_freely(call->launch, stream, addresses)) return result;
  Py_DECREF(result);
  return NULL;
}

#define PUT(data, bytes)                       \
  do {                                         \
    if (used + (bytes) > MOST_KEY) return -1;  \
    memcpy(key + used, data, bytes);           \
    used += (bytes);                           \
  } while (0)

// Writes PyTorch's precision of float32 where the first operand is of it; -1 with an exception.
static int read_precision(const View *first, char *text) {
  memset(text, 0, 8);
  if (first->dtype.code != 2 || first->dtype.bits != 32) return 0;
  PyObject *set = PyObject_CallObject(precision, cuda_matmul);
  const char *name = set ? PyUnicode_AsUTF8(set) : NULL;
  if (name) strncpy(text, name, 8);
  Py_XDECREF(set);
  return name ? 0 : -1;
}

// Writes what decides which kernel serves arguments, and views of the tensors; -1 where Python has to look.
static Py_ssize_t read_arguments(PyObject *const *args, Py_ssize_t count, char *key, View *views, char *is_tensor) {
  Py_ssize_t used = KEY_START;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *arg = args[i];
    is_tensor[i] = 0;
    if (arg == Py_None || arg == Py_True || arg == Py_False || Py_TYPE(arg) == dtype_type) {
      PUT(&arg, sizeof arg);
    } else if (Py_TYPE(arg) == plain_types[0] || Py_TYPE(arg) == plain_types[1]) {
      View *view = views + i;
      is_tensor[i] = 1;
      if (exchange->view(arg, view)) {
        PyErr_Clear();
        return -1;
      }
      struct { Device device; int32_t ndim; DataType dtype; } kind = {view->device, view->ndim, view->dtype};
      PUT(&kind, sizeof kind);
      PUT(view->shape, sizeof(int64_t) * view->ndim);
      PUT(view->strides, sizeof(int64_t) * view->ndim);
    } else if (PyUnicode_CheckExact(arg)) {
      Py_ssize_t length;
      const char *text = PyUnicode_AsUTF8AndSize(arg, &length);
      if (!text) {
        PyErr_Clear();
        return -1;
      }
      PUT("\1", 1);
      PUT(&length, sizeof length);
      PUT(text, length);
    } else
      return -1;
  }
  return used;
}

// serve(resolve, table, *args): the result, or None where Python has to serve the call. `resolve` of a call that is not
// in the table returns what is kept there: a Call, another callable of the same arguments, or None.
static PyObject *serve(PyObject *module, PyObject *const *given, Py_ssize_t all) {
  PyObject *resolve = given[0], *table = given[1], *const *args = given + 2;
  Py_ssize_t count = all - 2;
  char key[MOST_KEY], is_tensor[MOST_ADDRESSES], set[8];
  View views[MOST_ADDRESSES];
  if (count < 1 || count > MOST_ADDRESSES || !PyDict_CheckExact(table)) Py_RETURN_NONE;
  Py_ssize_t used = read_arguments(args, count, key, views, is_tensor);
  if (used < 0 || !is_tensor[0]) Py_RETURN_NONE;
  memcpy(key, &resolve, sizeof resolve);
  if (read_precision(views, key + sizeof resolve)) return NULL;
  int usual = is_usual(args, count, is_tensor);
  if (usual < 0) return NULL;
  if (!usual) Py_RETURN_NONE;
  PyObject *name = PyBytes_FromStringAndSize(key, used);
  if (!name) return NULL;
  PyObject *call = Py_XNewRef(PyDict_GetItemWithError(table, name)), *result = NULL;
  if (!call && !PyErr_Occurred()) {
    call = PyObject_Vectorcall(resolve, args, count, NULL);
    if (call && read_precision(views, set)) Py_CLEAR(call);
    // Another thread may have set another precision while the call was resolved.
    if (call && call != Py_None && !memcmp(set, key + sizeof resolve, sizeof set)) {
      if (PyDict_GET_SIZE(table) >= MOST_CALLS) PyDict_Clear(table);
      if (PyDict_SetItem(table, name, call)) Py_CLEAR(call);
    }
  }
  Py_DECREF(name);
  if (!call) return NULL;
  if (Py_TYPE(call) == &CallType) result = run((Call *)call, args, views);
  else if (call == Py_None) result = Py_NewRef(Py_None);
  else result = PyObject_Vectorcall(call, args, count, NULL);
  Py_DECREF(call);
  return result;
}

// use_directly(grad, modes, autocast, tracing): addresses of functions of PyTorch, or none
static PyObject *use_directly(PyObject *module, PyObject *args) {
  unsigned long long grad = 0, modes = 0, autocast = 0, tracing = 0;
  if (!PyArg_ParseTuple(args, "|KKKK", &grad, &modes, &autocast, &tracing)) return NULL;
  direct.grad = (void *)(uintptr_t)grad, direct.modes = (void *)(uintptr_t)modes;
  direct.autocast = (void *)(uintptr_t)autocast, direct.tracing = (void *)(uintptr_t)tracing;
  Py_RETURN_NONE;
}

// sees(): whether gradients are enabled, and whether a mode, autocast or a tracer is to see a call
static PyObject *sees(PyObject *module, PyObject *none) {
  int grad = direct.grad ? direct.grad() : returns(grad_enabled, Py_True), unseen = is_unseen();
  return grad < 0 || unseen < 0 ? NULL : Py_BuildValue("NN", PyBool_FromLong(grad), PyBool_FromLong(!unseen));
}

// configure(capsule, tensor types, dtype type, functions): what `serve` asks PyTorch
static PyObject *configure(PyObject *module, PyObject *args) {
  PyObject *capsule, *tensor, *parameter, *dtype;
  PyObject *f[8];
  if (!PyArg_ParseTuple(args, "OOOO(OOOOOOOO)", &capsule, &tensor, &parameter, &dtype, f, f + 1, f + 2, f + 3, f + 4,
                        f + 5, f + 6, f + 7))
    return NULL;
  const Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!found) return NULL;
  if (found->version.major != 1 || !found->view || !found->current_stream) {
    PyErr_SetString(PyExc_ImportError, "PyTorch's tensors are read by another version of DLPack's exchange");
    return NULL;
  }
  exchange = found;
  plain_types[0] = (PyTypeObject *)Py_NewRef(tensor), plain_types[1] = (PyTypeObject *)Py_NewRef(parameter);
  dtype_type = (PyTypeObject *)Py_NewRef(dtype);
  for (int i = 0; i < 8; i++) Py_INCREF(f[i]);
  grad_enabled = f[0], mode_count = f[1], any_autocast = f[2], tracing_state = f[3], forward_module = f[4];
  is_capturing = f[5], current_device = f[6], precision = f[7];
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"serve", (PyCFunction)(void (*)(void))serve, METH_FASTCALL, NULL},
                                  {"configure", configure, METH_VARARGS, NULL},
                                  {"use_directly", use_directly, METH_VARARGS, NULL},
                                  {"sees", sees, METH_NOARGS, NULL},
                                  {0}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_calls", NULL, -1, functions};

PyMODINIT_FUNC PyInit_native_calls(void) {
  level_name = PyUnicode_InternFromString("_current_level");
  cuda_matmul = Py_BuildValue("(ss)", "cuda", "matmul");
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  PyObject *module = PyModule_Create(&definition);
  if (!module || PyModule_AddType(module, &LaunchType) || PyModule_AddType(module, &CallType)) return NULL;
  return module;
}
