// Of steps.c: the local variables of a watched frame, and what they held when last looked at.
#if PY_VERSION_HEX < 0x030C0000
#include "internal/pycore_frame.h"

// A dict of them (`f_locals`) would be made, and filled again at every look; here they lie in the frame itself.
typedef _PyInterpreterFrame *View;

static View view_of(Steps *self, PyObject *frame) {
    return frame ? ((PyFrameObject *)frame)->f_frame : PyThreadState_Get()->cframe->current_frame;
}

static PyObject *variable(View view, PyObject *name, Py_ssize_t place) {
    PyObject *value = view->localsplus[place < 0 ? ~place : place];
    if (place < 0 && value && PyCell_Check(value)) value = PyCell_GET(value);
    return Py_XNewRef(value);
}

static void close_view(View view) {}

static void *frame_id(Steps *self, PyObject *frame) { return view_of(self, frame); }
#endif

// The frame whose code calls us, `up` frames from what Python sees of that; held.
static PyObject *watched_frame(Steps *self) {
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef(PyEval_GetFrame());
    for (Py_ssize_t i = 1; frame && i < self->up; i++) Py_SETREF(frame, PyFrame_GetBack(frame));
    if (!frame) PyErr_SetString(PyExc_RuntimeError, "no frame is watched");
    return (PyObject *)frame;
}

#if PY_VERSION_HEX >= 0x030C0000
typedef PyObject *View;  // a dict

static View view_of(Steps *self, PyObject *given) {
    PyObject *frame = given ? Py_NewRef(given) : watched_frame(self), *dict = NULL;
    PyObject *held = frame ? PyFrame_GetLocals((PyFrameObject *)frame) : NULL;
    Py_XDECREF(frame);
    if (!held || PyDict_CheckExact(held)) return held;
    dict = PyDict_New();  // from Python 3.13 on it only looks like one
    if (dict && PyDict_Update(dict, held) < 0) Py_CLEAR(dict);
    Py_DECREF(held);
    return dict;
}

static PyObject *variable(View view, PyObject *name, Py_ssize_t place) {
    return Py_XNewRef(PyDict_GetItemWithError(view, name));
}

static void close_view(View view) { Py_DECREF(view); }

// Only of generators: of several of one function, which is it? Else it would cost more than it tells.
static void *frame_id(Steps *self, PyObject *given) {
    PyObject *frame = !self->pauses ? NULL : given ? Py_NewRef(given) : watched_frame(self);
    Py_XDECREF(frame);
    return frame;
}
#endif

// What a variable held: it is held on until the next look, as `f_locals` does, so that no other gets its identity.
typedef struct {
    PyObject *value;    // NULL: it had none
    int kind;
    PyObject *mark;     // of a PLAIN one NULL, of a STEADY one its text, or NULL until somebody asks
    PyObject *checker;  // NULL where nothing can be different inside
    PyObject *next;     // during a look: what it holds now
    char moved;         // during a look: that is another, or different inside
} Held;

typedef struct {
    PyObject_VAR_HEAD
    Held held[1];
} Locals;

static void forget_locals(PyObject *object) {
    Locals *self = (Locals *)object;
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        Py_XDECREF(self->held[i].value);
        Py_XDECREF(self->held[i].mark);
        Py_XDECREF(self->held[i].checker);
    }
    PyObject_Free(object);
}

static PyTypeObject LocalsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Locals", .tp_basicsize = sizeof(Locals) - sizeof(Held),
    .tp_itemsize = sizeof(Held), .tp_dealloc = forget_locals,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
};

static PyObject *variable_of(Steps *self, View view, Py_ssize_t i) {
    return variable(view, PyTuple_GET_ITEM(self->is.names, i), self->places[i]);
}

// Remember a value with its mark, which are both stolen; where there is an exception nothing is remembered.
static int hold(Held *held, int kind, PyObject *value, PyObject *mark) {
    PyObject *checker = NULL;
    if (kind == TENSOR) checker = Py_XNewRef(mark);
    if (kind == OTHER && mark) checker = PyObject_GetAttr(mark, s_checker);
    if (checker == Py_None) Py_CLEAR(checker);
    if (PyErr_Occurred()) {
        Py_DECREF(value);
        Py_XDECREF(mark);
        Py_XDECREF(checker);
        return -1;
    }
    held->kind = kind;
    Py_XSETREF(held->value, value);
    Py_XSETREF(held->mark, mark);
    Py_XSETREF(held->checker, checker);
    return 0;
}

// A first look; nothing is said.
static PyObject *new_locals(Steps *self, PyObject *frame) {
    View view = view_of(self, frame);
    if (!view) return NULL;
    Locals *locals = PyObject_NewVar(Locals, &LocalsType, self->count);
    if (locals) memset(locals->held, 0, self->count * sizeof(Held));
    for (Py_ssize_t i = 0; locals && i < self->count; i++) {
        PyObject *value = variable_of(self, view, i), *mark = NULL;
        if (!value) continue;
        int kind = kind_of(self, value);
        if (kind == TENSOR) mark = tensor_mark(NULL, value);
        if (kind == OTHER) mark = PyObject_CallMethodOneArg(self->is.rare, s_mark_of, value);
        if (hold(locals->held + i, kind, value, mark) < 0) Py_CLEAR(locals);
    }
    close_view(view);
    return (PyObject *)locals;
}

// What it was, as snapshot.py knows it.
static PyObject *old_of(Steps *self, Held *held) {
    if (!held->value) return Py_NewRef(self->is.nothing);
    if (held->kind == STEADY) return PyObject_CallMethodOneArg(self->is.rare, s_mark_of, held->value);
    return Py_NewRef(held->kind == PLAIN ? held->value : held->mark);
}

// What it was, for an event: a text, or the mark of a tensor, whose text is made when it is written; None.
static PyObject *old_text(Steps *self, Held *held) {
    if (!held->value) return Py_NewRef(Py_None);
    if (held->kind == OTHER) return PyObject_GetAttr(held->mark, s_text);
    return held->mark ? Py_NewRef(held->mark) : text_of(self, held->value);
}

// Whose new text does not depend on what it was. The new mark, held; NULL with an exception, and of what is plain.
static PyObject *say_simple(Steps *self, int kind, PyObject *name, Held *held, PyObject *value, Where *where) {
    if (kind == PLAIN && held->value && held->kind == PLAIN) {
        int equal = equal_plain(held->value, value);
        if (equal) return NULL;
    }
    PyObject *mark = kind == TENSOR ? tensor_mark(NULL, value) : text_of(self, value);
    PyObject *old = mark ? old_text(self, held) : NULL, *said = NULL;
    // the text of another tensor is made when it is written, that of the same one now
    if (old) said = kind == TENSOR && held->value == value ? text_since(mark, old) : Py_NewRef(mark);
    int failed = !said || say_set(self, name, old, said, where) < 0;
    Py_XDECREF(old);
    Py_XDECREF(said);
    if (failed || kind == PLAIN) Py_CLEAR(mark);
    return mark;
}

static int say_new(Steps *self, Py_ssize_t i, Held *held, Where *where) {
    PyObject *name = PyTuple_GET_ITEM(self->is.names, i), *value = held->next, *mark = NULL;
    int kind = kind_of(self, value);
    held->next = NULL;
    if (self->quiet && kind >= 0 && kind != OTHER) {
        mark = say_simple(self, kind, name, held, value, where);
    } else if (kind >= 0) {
        PyObject *old = old_of(self, held), *said = old ? tuple_of(self, where) : NULL;
        if (said) mark = PyObject_CallMethodObjArgs(self->is.rare, s_take, where->thread, name, old, value, said, NULL);
        Py_XDECREF(old);
        Py_XDECREF(said);
        if (kind == PLAIN || kind == STEADY) Py_CLEAR(mark);
    }
    return hold(held, kind, value, mark);
}

static int say_gone(Steps *self, Py_ssize_t i, Held *held, Where *where) {
    PyObject *old = old_of(self, held), *said = old ? tuple_of(self, where) : NULL, *done = NULL;
    PyObject *name = PyTuple_GET_ITEM(self->is.names, i);
    if (said) done = PyObject_CallMethodObjArgs(self->is.rare, s_gone, where->thread, name, old, said, NULL);
    Py_XDECREF(old);
    Py_XDECREF(said);
    Py_XDECREF(done);
    Py_CLEAR(held->value);
    Py_CLEAR(held->mark);
    Py_CLEAR(held->checker);
    return done ? 0 : -1;
}

// Marks what is different; 1 where anything is, -1 with an exception.
static int find_moved(Steps *self, Locals *locals, View view) {
    int any = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Held *held = locals->held + i;
        PyObject *value = variable_of(self, view, i);
        int moved = value != held->value;
        if (!moved && held->checker) moved = inside_differs(held->checker, value);
        if (moved < 0) {
            Py_XDECREF(value);
            return -1;
        }
        held->moved = moved, held->next = moved ? value : NULL;
        if (!moved) Py_XDECREF(value);
        any |= moved;
    }
    return any;
}

// Another look: what is new is said first, then what is gone.
static int look_at_locals(Steps *self, Locals *locals, PyObject *frame, Where *where) {
    View view = view_of(self, frame);
    if (!view) return -1;
    int found = find_moved(self, locals, view);
    close_view(view);
    for (int gone = 0; found > 0 && gone < 2; gone++) {
        for (Py_ssize_t i = 0; found > 0 && i < self->count; i++) {
            Held *held = locals->held + i;
            if (!held->moved || gone == (held->next != NULL)) continue;
            held->moved = 0;
            if ((gone ? say_gone(self, i, held, where) : say_new(self, i, held, where)) < 0) found = -1;
        }
    }
    if (found < 0)
        for (Py_ssize_t i = 0; i < self->count; i++) {
            locals->held[i].moved = 0;
            Py_CLEAR(locals->held[i].next);
        }
    return found < 0 ? -1 : 0;
}
