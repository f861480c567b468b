// Whether a tensor is still what it was: `KnownTensor` of known.py and `_Tensor` of marks.py, which say what they do.
#include <Python.h>
#include <string.h>

enum { SAMPLE = 64 };  // bytes; as in describe.py

typedef struct {
    PyObject_HEAD
    long long version;                       // -1 of one that does not count
    PyObject *shape;                         // NULL: not asked
    int has_memory;                          // else that is not asked
    unsigned long long memory;
    PyObject *value, *kind, *dtype, *device; // of a mark: its identity, and what its text says; else NULL
    PyObject *text;                          // once somebody has asked
    PyObject *odd;                           // why it does not say its shape, as nested ones; else NULL
    size_t sampled;                          // bytes that were copied; 0 where there are none that can be read here
    char sample[SAMPLE];
} KnownTensor;

static PyTypeObject KnownTensorType;
static PyObject *s_version, *s_shape, *s_data_ptr, *s_same, *s_dtype, *s_device, *s_name;
static PyObject *s_is_cpu, *s_is_contiguous, *s_nbytes;
static PyObject *layout_text;  // of describe.py

// Of a function that gets so many arguments; 0 with an exception.
static int given_all(Py_ssize_t count, Py_ssize_t wanted) {
    if (count >= wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, count);
    return 0;
}

// Of all that ask whether something differs: 0 it is the same, 1 it is not, -1 an exception is set.
static int unequal(PyObject *now, PyObject *was) {
    if (!now) return -1;
    int equal = PyObject_RichCompareBool(now, was, Py_EQ);
    Py_DECREF(now);
    return equal < 0 ? -1 : !equal;
}

// Of a tensor, or -1: inference tensors do not count; -2 with an exception.
static long long version_of(PyObject *tensor) {
    PyObject *said = PyObject_GetAttr(tensor, s_version);
    if (!said) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -2;
        PyErr_Clear();
        return -1;
    }
    long long version = PyLong_AsLongLong(said);
    Py_DECREF(said);
    return version == -1 && PyErr_Occurred() ? -2 : version;
}

// Whether it has memory, which sparse ones have not; -1 with an exception.
static int memory_of(PyObject *tensor, unsigned long long *memory) {
    PyObject *said = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    if (!said) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
        return 0;
    }
    *memory = PyLong_AsUnsignedLongLong(said);
    Py_DECREF(said);
    return PyErr_Occurred() ? -1 : 1;
}

static int tensor_differs(KnownTensor *self, PyObject *value) {
    long long version = version_of(value);
    if (version != self->version) return version == -2 ? -1 : 1;
    int differs = self->shape ? unequal(PyObject_GetAttr(value, s_shape), self->shape) : 0;
    if (differs || !self->has_memory) return differs;
    unsigned long long memory = 0;
    int there = memory_of(value, &memory);
    if (there <= 0 || memory != self->memory) return there < 0 ? -1 : 1;
    return self->sampled && memcmp(self->sample, (void *)(uintptr_t)memory, self->sampled);
}

static void forget_tensor(PyObject *object) {
    KnownTensor *self = (KnownTensor *)object;
    Py_XDECREF(self->shape);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->device);
    Py_XDECREF(self->text);
    Py_XDECREF(self->odd);
    PyObject_Free(object);
}

static KnownTensor *new_tensor(void) {
    KnownTensor *self = PyObject_New(KnownTensor, &KnownTensorType);
    if (self) memset((char *)self + sizeof(PyObject), 0, sizeof(KnownTensor) - sizeof(PyObject));
    return self;
}

// known_tensor(version, shape or None, memory or None, sample)
static PyObject *known_tensor(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    KnownTensor *self = given_all(count, 4) ? new_tensor() : NULL;
    if (!self) return NULL;
    self->version = PyLong_AsLongLong(given[0]);
    self->shape = given[1] == Py_None ? NULL : Py_NewRef(given[1]);
    self->has_memory = given[2] != Py_None;
    if (self->has_memory) self->memory = PyLong_AsUnsignedLongLong(given[2]);
    char *bytes = NULL;
    Py_ssize_t length = 0;
    if (!PyErr_Occurred() && PyBytes_AsStringAndSize(given[3], &bytes, &length) == 0) {
        self->sampled = length < SAMPLE ? length : SAMPLE;
        memcpy(self->sample, bytes, self->sampled);
    }
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

// Instead of its shape: what came when it was asked for that; -1 where it is none of the program's own and goes on.
static int take_oddly(KnownTensor *self) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    Py_CLEAR(self->shape);
    self->odd = kind;
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return 0;
}

// All that its text says.
static PyObject *tensor_words(PyObject *value) {
    KnownTensor *self = new_tensor();
    if (!self) return NULL;
    self->value = value, self->kind = Py_NewRef(Py_TYPE(value));
    self->version = version_of(value);
    if (self->version != -2 && (self->shape = PyObject_GetAttr(value, s_shape)) &&
        (self->dtype = PyObject_GetAttr(value, s_dtype)) && (self->device = PyObject_GetAttr(value, s_device)))
        return (PyObject *)self;
    if (self->version != -2 && take_oddly(self) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

// What it begins with: `first_bytes` of describe.py. 0, or -1 with an exception.
static int take_sample(KnownTensor *self, PyObject *value) {
    PyObject *here = self->memory ? PyObject_GetAttr(value, s_is_cpu) : NULL, *whole = NULL, *bytes = NULL;
    if (here == Py_True) whole = PyObject_CallMethodNoArgs(value, s_is_contiguous);
    if (whole == Py_True) bytes = PyObject_GetAttr(value, s_nbytes);
    if (bytes) self->sampled = PyLong_AsSize_t(bytes);
    Py_XDECREF(here);
    Py_XDECREF(whole);
    Py_XDECREF(bytes);
    if (PyErr_Occurred()) {
        self->sampled = 0;
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
    }
    if (self->sampled > SAMPLE) self->sampled = SAMPLE;
    memcpy(self->sample, (void *)(uintptr_t)self->memory, self->sampled);
    return 0;
}

// tensor_mark(value): `_Tensor` of marks.py
static PyObject *tensor_mark(PyObject *module, PyObject *value) {
    KnownTensor *self = (KnownTensor *)tensor_words(value);
    if (self && (self->has_memory = memory_of(value, &self->memory)) < 0) Py_CLEAR(self);
    if (self && self->has_memory && take_sample(self, value) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *text_of_mark(PyObject *object) {
    KnownTensor *self = (KnownTensor *)object;
    if (self->text || !self->kind) return self->text ? Py_NewRef(self->text) : PyUnicode_FromString("");
    PyObject *name = PyObject_GetAttr(self->kind, s_name), *layout = NULL, *text = NULL;
    PyObject *why = self->odd ? PyObject_GetAttr(self->odd, s_name) : NULL;
    if (name && why) layout = PyUnicode_FromFormat("<%S not described: %S>", name, why);
    if (name && !self->odd)
        layout = PyObject_CallFunctionObjArgs(layout_text, name, self->shape, self->dtype, self->device, NULL);
    if (layout) text = PyUnicode_FromFormat("%U v%lld", layout, self->version);
    Py_XDECREF(name);
    Py_XDECREF(why);
    Py_XDECREF(layout);
    Py_XSETREF(self->text, Py_XNewRef(text));
    return text;
}

static PyObject *get_text(PyObject *self, void *unused) { return text_of_mark(self); }
static PyObject *get_checker(PyObject *self, void *unused) { return Py_NewRef(self); }
static PyObject *get_value_id(PyObject *self, void *unused) { return PyLong_FromVoidPtr(((KnownTensor *)self)->value); }

// since(old, value): the text; what is other where that says the same
static PyObject *text_since(PyObject *self, PyObject *was) {
    PyObject *text = text_of_mark(self);
    if (!text || !Py_IS_TYPE(was, &KnownTensorType) || ((KnownTensor *)was)->value != ((KnownTensor *)self)->value)
        return text;
    PyObject *old = text_of_mark(was);
    if (old && PyUnicode_Compare(old, text) == 0) Py_SETREF(text, PyUnicode_FromFormat("%U, other data", text));
    if (!old) Py_CLEAR(text);
    Py_XDECREF(old);
    return text;
}

static PyObject *since(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    return given_all(count, 2) ? text_since(self, given[0]) : NULL;
}

static PyObject *again(PyObject *self, PyObject *value) { return PyUnicode_FromString(""); }

static PyObject *same_tensor(PyObject *self, PyObject *value) {
    int differs = tensor_differs((KnownTensor *)self, value);
    return differs < 0 ? NULL : PyBool_FromLong(!differs);
}

static PyMethodDef tensor_methods[] = {
    {"same", same_tensor, METH_O}, {"since", (PyCFunction)(void *)since, METH_FASTCALL}, {"again", again, METH_O}, {NULL},
};
static PyGetSetDef tensor_facts[] = {
    {"text", get_text}, {"checker", get_checker}, {"value_id", get_value_id}, {NULL},
};
static PyTypeObject KnownTensorType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "KnownTensor", .tp_basicsize = sizeof(KnownTensor),
    .tp_dealloc = forget_tensor, .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_methods = tensor_methods, .tp_getset = tensor_facts, .tp_str = text_of_mark,
};
static PyMethodDef known_tensor_def = {"known_tensor", (PyCFunction)(void *)known_tensor, METH_FASTCALL};
static PyMethodDef tensor_mark_def = {"tensor_mark", tensor_mark, METH_O};
