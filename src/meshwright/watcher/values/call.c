// Of steps.c: threads and calls, what is fixed about a code object's steps, and how an event is said.
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *name, *calls;
    char busy;
} Thread;

typedef struct {
    PyObject_HEAD
    PyObject *key, *thing, *seen, *names;  // the latter three may be NULL
    long long start;
    void *frame;  // the identity of the frame that runs it; NULL where that is not asked
} Call;

// `Parts` of steps.py, in its order; all are held.
typedef struct {
    PyObject *local, *recorder, *buffer, *event, *now, *shift, *key, *name, *at, *file, *own, *known, *called, *returned;
    PyObject *plain, *names, *places, *arguments, *argument_places, *kinds, *nothing, *first, *rare, *pauses, *up, *full;
} Parts;

typedef struct {
    PyObject_HEAD
    Parts is;
    long long shift;
    Py_ssize_t up, full;
    int pauses, quiet;            // quiet: no wrapper has words for changes
    Py_ssize_t count, *places;    // of local variables that are followed
    Py_ssize_t shown, *arguments; // of arguments that are shown
    uint64_t last_id;             // of Python's state of a thread, and what was found for it last
    Thread *last;
} Steps;

// Where a change is said; `at` is made when somebody asks, from the line of a point or from what was left how.
typedef struct {
    Thread *thread;
    Py_ssize_t depth;
    PyObject *text, *at, *line, *left, *value;
} Where;

static PyTypeObject ThreadType, CallType;
static PyObject *s_set, *s_run, *s_end, *s_raise, *s_resume, *s_empty, *s_before, *s_thread, *s_on, *s_thing, *s_dict;
static PyObject *s_in_dict, *s_items, *s_look, *s_marks, *s_known, *s_weak, *s_f_locals, *s_get, *s_checker, *zero;
static PyObject *s_is_own, *s_first_look, *s_take, *s_gone, *s_forget, *s_excuse, *s_handled, *s_left_at;
static PyObject *s_kind_of, *s_mark_of, *s_describe, *s_write, *s_text;

static PyObject *new_thread(PyObject *module, PyObject *name) {
    Thread *self = PyObject_New(Thread, &ThreadType);
    if (!self) return NULL;
    self->name = Py_NewRef(name), self->calls = PyList_New(0), self->busy = 0;
    return (PyObject *)self;
}

static void forget_thread(PyObject *object) {
    Py_XDECREF(((Thread *)object)->name);
    Py_XDECREF(((Thread *)object)->calls);
    PyObject_Free(object);
}

static Call *new_call(PyObject *key, void *frame) {
    Call *self = PyObject_New(Call, &CallType);
    if (!self) return NULL;
    self->key = Py_NewRef(key), self->thing = self->seen = self->names = NULL, self->start = 0, self->frame = frame;
    return self;
}

static void forget_call(PyObject *object) {
    Call *self = (Call *)object;
    Py_XDECREF(self->key);
    Py_XDECREF(self->thing);
    Py_XDECREF(self->seen);
    Py_XDECREF(self->names);
    PyObject_Free(object);
}

// Nanoseconds since 1970; -1 with an exception.
static long long now(Steps *self) {
    PyObject *said = PyObject_CallNoArgs(self->is.now);
    if (!said) return -1;
    long long time = PyLong_AsLongLong(said);
    Py_DECREF(said);
    return time == -1 ? -1 : time + self->shift;
}

// What depends on the event; what is NULL becomes None, or an empty text.
typedef struct {
    PyObject *event, *name, *at, *took, *old, *new, *text;
} Said;

static int emit(Steps *self, Thread *thread, Py_ssize_t depth, long long time, Said said) {
    PyObject *when = PyLong_FromLongLong(time), *deep = PyLong_FromSsize_t(depth), *event = NULL;
    PyObject *empty = s_empty, *none = Py_None;
    PyObject *given[] = {
        said.event, when, zero, thread->name, deep, said.name, said.at ? said.at : empty, said.took ? said.took : none,
        said.old ? said.old : none, said.new ? said.new : none, said.text ? said.text : empty,
    };
    if (when && deep) event = PyObject_Vectorcall(self->is.event, given, sizeof(given) / sizeof(*given), NULL);
    int failed = !event || PyList_Append(self->is.buffer, event) < 0;
    Py_XDECREF(when);
    Py_XDECREF(deep);
    Py_XDECREF(event);
    return failed ? -1 : 0;
}

enum { PLAIN, STEADY, TENSOR, OTHER };  // `kind_of` of marks.py

static int kind_of(Steps *self, PyObject *value) {
    PyObject *known = Py_XNewRef(PyDict_GetItemWithError(self->is.kinds, (PyObject *)Py_TYPE(value)));
    if (!known && !PyErr_Occurred()) known = PyObject_CallMethodOneArg(self->is.rare, s_kind_of, value);
    if (!known) return -1;
    int kind = (int)PyLong_AsLong(known);
    Py_DECREF(known);
    return kind;
}

// As describe.py does.
static PyObject *text_of(Steps *self, PyObject *value) {
    int large = 0;
    if (PyLong_CheckExact(value)) PyLong_AsLongLongAndOverflow(value, &large);
    if (value == Py_None || PyFloat_CheckExact(value) || PyBool_Check(value) || (PyLong_CheckExact(value) && !large))
        return PyObject_Repr(value);
    return PyObject_CallMethodOneArg(self->is.rare, s_describe, value);
}

// Of plain values: whether one is the other; -1 with an exception.
static int equal_plain(PyObject *one, PyObject *other) {
    return Py_TYPE(one) == Py_TYPE(other) ? PyObject_RichCompareBool(one, other, Py_EQ) : 0;
}

// file:line, borrowed; NULL with an exception.
static PyObject *place_of(Steps *self, Where *where) {
    if (where->at) return where->at;
    if (where->line) {
        PyObject *line = where->line == Py_None ? PyObject_CallMethodNoArgs(self->is.rare, s_handled) : Py_NewRef(where->line);
        where->at = line ? PyUnicode_FromFormat("%U:%S", self->is.file, line) : NULL;
        Py_XDECREF(line);
    } else {
        where->at = PyObject_CallMethodObjArgs(self->is.rare, s_left_at, where->left, where->value, NULL);
    }
    return where->at;
}

// That a name has another value.
static int say_set(Steps *self, PyObject *name, PyObject *old, PyObject *new, Where *where) {
    PyObject *at = place_of(self, where);
    long long time = at ? now(self) : -1;
    if (time == -1) return -1;
    return emit(self, where->thread, where->depth, time, (Said){s_set, name, at, NULL, old, new, where->text});
}

// (file:line, depth, words)
static PyObject *tuple_of(Steps *self, Where *where) {
    PyObject *at = place_of(self, where);
    return at ? Py_BuildValue("(OnO)", at, where->depth, where->text) : NULL;
}

// An exception of the program's own __eq__, __len__ or properties is told; -1 where it is none of these and goes on.
static int excuse(Steps *self, Thread *thread) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    PyObject *done = PyObject_CallMethodObjArgs(self->is.rare, s_excuse, thread, error, NULL);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyMemberDef thread_members[] = {
    {"name", T_OBJECT_EX, offsetof(Thread, name)}, {"calls", T_OBJECT_EX, offsetof(Thread, calls), READONLY},
    {"busy", T_BOOL, offsetof(Thread, busy)}, {NULL},
};
static PyTypeObject ThreadType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Thread", .tp_basicsize = sizeof(Thread), .tp_dealloc = forget_thread,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, .tp_members = thread_members,
};
static PyMemberDef call_members[] = {{"thing", T_OBJECT, offsetof(Call, thing), READONLY}, {NULL}};
static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Call", .tp_basicsize = sizeof(Call), .tp_dealloc = forget_call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, .tp_members = call_members,
};
static PyMethodDef thread_def = {"thread", new_thread, METH_O};
