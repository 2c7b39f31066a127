/* Counts calls of a linear layer: a function that stands in PyTorch's place, without a frame of Python.
 *
 * A call is looked up by its weight's identity, the number of x's elements and whether it has a bias. One that is not
 * known, or has arguments of another form, goes to `first`. All of this runs under Python's global lock.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uintptr_t weight; /* 0 for a place that is free */
    Py_ssize_t elements;
    int has_bias;
    Py_ssize_t slot;
} Entry;

typedef struct {
    PyObject_HEAD
    PyObject *layer, *first, *numel;
    Entry *entries;
    size_t places, used; /* places: a power of two */
    uint64_t *counts;
    Py_ssize_t slots, room;
} Counter;

static size_t place_of(uintptr_t weight, Py_ssize_t elements, int has_bias, size_t places) {
    uint64_t mixed = ((uint64_t)weight >> 4) * 0x9E3779B97F4A7C15u ^ (uint64_t)elements * 0xC2B2AE3D27D4EB4Fu;
    return (size_t)((mixed ^ mixed >> 29) + (uint64_t)has_bias) & (places - 1);
}

/* The entry of a call, or the free place where it belongs. */
static Entry *entry_of(Counter *self, uintptr_t weight, Py_ssize_t elements, int has_bias) {
    size_t place = place_of(weight, elements, has_bias, self->places);
    for (;; place = (place + 1) & (self->places - 1)) {
        Entry *entry = &self->entries[place];
        if (!entry->weight ||
            (entry->weight == weight && entry->elements == elements && entry->has_bias == has_bias))
            return entry;
    }
}

static PyObject *call(PyObject *object, PyObject *const *args, Py_ssize_t given, PyObject *names) {
    Counter *self = (Counter *)object;
    if (names == NULL && (given == 2 || given == 3)) {
        PyObject *number = PyObject_CallOneArg(self->numel, args[0]);
        Py_ssize_t elements = number && PyLong_CheckExact(number) ? PyLong_AsSsize_t(number) : -1;
        Py_XDECREF(number);
        if (elements < 0) {
            PyErr_Clear(); /* x is no tensor, or has a symbolic shape */
        } else {
            Entry *entry = entry_of(self, (uintptr_t)args[1], elements, given == 3 && args[2] != Py_None);
            if (entry->weight) {
                self->counts[entry->slot]++;
                return PyObject_Vectorcall(self->layer, args, given, NULL);
            }
        }
    }
    return PyObject_Vectorcall(self->first, args, given, names);
}

static PyMethodDef call_definition = {"linear", (PyCFunction)(void (*)(void))call, METH_FASTCALL | METH_KEYWORDS, NULL};

static PyObject *counter_slot(Counter *self, PyObject *none) {
    if (self->slots == self->room) {
        Py_ssize_t room = self->room ? 2 * self->room : 64;
        uint64_t *counts = PyMem_Realloc(self->counts, room * sizeof *counts);
        if (!counts)
            return PyErr_NoMemory();
        self->counts = counts;
        self->room = room;
    }
    self->counts[self->slots] = 0;
    return PyLong_FromSsize_t(self->slots++);
}

static int is_slot(Counter *self, Py_ssize_t slot) {
    if (slot >= 0 && slot < self->slots)
        return 1;
    PyErr_SetString(PyExc_IndexError, "there is no such count");
    return 0;
}

static PyObject *counter_read(Counter *self, PyObject *number) {
    Py_ssize_t slot = PyLong_AsSsize_t(number);
    if (PyErr_Occurred() || !is_slot(self, slot))
        return NULL;
    return PyLong_FromUnsignedLongLong(self->counts[slot]);
}

/* Put the entries into a table of this many places, without those of one weight. */
static int rebuild(Counter *self, size_t places, uintptr_t without) {
    Entry *before = self->entries, *larger = PyMem_Calloc(places, sizeof *larger);
    size_t count = self->places;
    if (!larger)
        return 0;
    self->entries = larger;
    self->places = places;
    self->used = 0;
    for (size_t i = 0; i < count; i++) {
        if (before[i].weight && before[i].weight != without) {
            *entry_of(self, before[i].weight, before[i].elements, before[i].has_bias) = before[i];
            self->used++;
        }
    }
    PyMem_Free(before);
    return 1;
}

static PyObject *counter_learn(Counter *self, PyObject *args) {
    unsigned long long weight;
    Py_ssize_t elements, slot;
    int has_bias;
    if (!PyArg_ParseTuple(args, "Knpn", &weight, &elements, &has_bias, &slot) || !is_slot(self, slot))
        return NULL;
    if (2 * (self->used + 1) > self->places && !rebuild(self, 2 * self->places, 0))
        return PyErr_NoMemory();
    Entry *entry = entry_of(self, (uintptr_t)weight, elements, has_bias);
    self->used += !entry->weight;
    *entry = (Entry){(uintptr_t)weight, elements, has_bias, slot};
    Py_RETURN_NONE;
}

static PyObject *counter_forget(Counter *self, PyObject *number) {
    uintptr_t weight = (uintptr_t)PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    for (size_t i = 0; i < self->places; i++) {
        if (self->entries[i].weight == weight && weight)
            return rebuild(self, self->places, weight) ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *counter_clear(Counter *self, PyObject *none) {
    memset(self->entries, 0, self->places * sizeof *self->entries);
    self->used = 0;
    Py_RETURN_NONE;
}

static PyMethodDef counter_methods[] = {
    {"slot", (PyCFunction)counter_slot, METH_NOARGS, NULL},
    {"read", (PyCFunction)counter_read, METH_O, NULL},
    {"learn", (PyCFunction)counter_learn, METH_VARARGS, NULL},
    {"forget", (PyCFunction)counter_forget, METH_O, NULL},
    {"clear", (PyCFunction)counter_clear, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *counter_function(Counter *self, void *none) {
    PyObject *module = PyUnicode_FromString("tritongemm.workloads.capturing"); /* of which torch.compile asks */
    PyObject *function = module ? PyCFunction_NewEx(&call_definition, (PyObject *)self, module) : NULL;
    Py_XDECREF(module);
    return function;
}

static PyGetSetDef counter_values[] = {
    {"function", (getter)counter_function, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *counter_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *layer, *first, *numel;
    if (!PyArg_ParseTuple(args, "OOO", &layer, &first, &numel))
        return NULL;
    Counter *self = (Counter *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->layer = Py_NewRef(layer);
    self->first = Py_NewRef(first);
    self->numel = Py_NewRef(numel);
    if (!rebuild(self, 256, 0)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void counter_dealloc(Counter *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->layer);
    Py_XDECREF(self->first);
    Py_XDECREF(self->numel);
    PyMem_Free(self->entries);
    PyMem_Free(self->counts);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot counter_slots[] = {
    {Py_tp_new, counter_new},
    {Py_tp_dealloc, counter_dealloc},
    {Py_tp_methods, counter_methods},
    {Py_tp_getset, counter_values},
    {0, NULL},
};

static PyType_Spec counter_spec = {"tritongemm_counter.Counter", sizeof(Counter), 0, Py_TPFLAGS_DEFAULT, counter_slots};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tritongemm_counter", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_tritongemm_counter(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module ? PyType_FromSpec(&counter_spec) : NULL;
    if (!type || PyModule_AddObject(module, "Counter", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
