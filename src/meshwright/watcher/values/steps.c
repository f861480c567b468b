// What a watched call does, step by step: `Steps` of steps.py, which says what that is; without global variables.

// The thread, held; NULL where it is not known yet and not to be made, or with an exception. The last one is kept: the
// number of Python's state of a thread never comes again.
static Thread *thread_of(Steps *self, int make) {
    uint64_t id = PyThreadState_GetID(PyThreadState_Get());
    if (id == self->last_id) return (Thread *)Py_NewRef(self->last);
    PyObject *found = PyObject_GetAttr(self->is.local, s_thread);
    if (!found && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        if (make) found = PyObject_CallMethodNoArgs(self->is.rare, s_thread);
    }
    if (found && !Py_IS_TYPE(found, &ThreadType)) {
        PyErr_Format(PyExc_TypeError, "a thread of C is needed, not %R", found);
        Py_CLEAR(found);
    }
    if (found) {
        self->last_id = id;
        Py_XSETREF(self->last, (Thread *)Py_NewRef(found));
    }
    return (Thread *)found;
}

// Likewise, where its calls are followed now.
static Thread *thread_to_follow(Steps *self, int make) {
    Thread *thread = thread_of(self, make);
    if (!thread) return NULL;
    PyObject *on = thread->busy ? NULL : PyObject_GetAttr(self->is.recorder, s_on);
    if (on != Py_True) Py_CLEAR(thread);
    Py_XDECREF(on);
    return thread;
}

// The place of this frame's call; -1 where it has not begun, as far as we know. Those above it were left without a word:
// there were too many calls to tell.
static Py_ssize_t place_of_call(Steps *self, Thread *thread, void *frame) {
    Py_ssize_t i = PyList_GET_SIZE(thread->calls) - 1;
    for (; i >= 0; i--) {
        Call *call = (Call *)PyList_GET_ITEM(thread->calls, i);
        if (Py_IS_TYPE(call, &CallType) && call->key == self->is.key && call->frame == frame) break;
    }
    return i;
}

// The call of this frame, held, and out with what lies above it; NULL where it began before the watch.
static Call *pop(Steps *self, Thread *thread, void *frame) {
    Py_ssize_t i = place_of_call(self, thread, frame);
    if (i < 0) return NULL;
    Call *call = (Call *)Py_NewRef(PyList_GET_ITEM(thread->calls, i));
    if (PyList_SetSlice(thread->calls, i, PyList_GET_SIZE(thread->calls), NULL) < 0) Py_CLEAR(call);
    return call;
}

static int look_at_start(Steps *self, Call *call, PyObject *thing, PyObject *frame, Where *where, PyObject **text) {
    int own = self->is.first == Py_None ? 0 : seen_of(self, thing, &call->seen);
    if (own > 0) {
        call->thing = Py_NewRef(thing);
        own = look_at_object(self, call, NULL, where);
    }
    if (own < 0) return -1;
    if (self->count && !(call->names = new_locals(self, frame))) return -1;
    *text = words_of(self, self->is.called, frame, NULL);
    return PyErr_Occurred() ? -1 : 0;
}

static int started(Steps *self, Thread *thread, PyObject *thing, PyObject *event, PyObject *frame) {
    Py_ssize_t depth = PyList_GET_SIZE(thread->calls);
    Where where = {thread, depth, s_before, Py_NewRef(self->is.at)};
    PyObject *text = NULL;
    Call *call = new_call(self->is.key, frame_id(self, frame));
    if (!call) return -1;
    thread->busy = 1;
    int failed = look_at_start(self, call, thing, frame, &where, &text) < 0 && excuse(self, thread) < 0;
    thread->busy = 0;
    Py_XDECREF(where.at);
    failed = failed || (call->start = now(self)) == -1;
    Said said = {event, self->is.name, self->is.at, NULL, NULL, NULL, text};
    failed = failed || emit(self, thread, depth, call->start, said) < 0;
    failed = failed || PyList_Append(thread->calls, (PyObject *)call) < 0;
    Py_DECREF(call);
    Py_XDECREF(text);
    return failed ? -1 : 0;
}

// start(thing, event="run", frame=None)
static PyObject *start(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Steps *self = (Steps *)object;
    Thread *thread = given_all(count, 1) ? thread_to_follow(self, 1) : NULL;
    if (thread) started(self, thread, given[0], count > 1 ? given[1] : s_run, count > 2 ? given[2] : NULL);
    Py_XDECREF(thread);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static int woken(Steps *self, Thread *thread, PyObject *given) {
    PyObject *frame = given ? Py_NewRef(given) : watched_frame(self), *thing = Py_NewRef(Py_None);
    if (frame && self->is.first != Py_None) {
        PyObject *held = PyObject_GetAttr(frame, s_f_locals);
        Py_SETREF(thing, held ? PyObject_CallMethodOneArg(held, s_get, self->is.first) : NULL);
        Py_XDECREF(held);
    }
    int failed = !frame || !thing || started(self, thread, thing, s_resume, frame) < 0;
    Py_XDECREF(frame);
    Py_XDECREF(thing);
    return failed ? -1 : 0;
}

static PyObject *wake(PyObject *object, PyObject *frame) {
    Thread *thread = thread_to_follow((Steps *)object, 1);
    if (thread) woken((Steps *)object, thread, frame);
    Py_XDECREF(thread);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

// (line, stored, frame, whole), see points.py
static int look_at_point(Steps *self, Call *call, PyObject *point, Where *where) {
    int in_frame = PyTuple_GET_ITEM(point, 2) == Py_True, whole = PyTuple_GET_ITEM(point, 3) == Py_True;
    if (call->seen && look_at_object(self, call, whole ? NULL : PyTuple_GET_ITEM(point, 1), where) < 0) return -1;
    if (!self->count || !(in_frame || whole)) return 0;
    if (call->names) return look_at_locals(self, (Locals *)call->names, NULL, where);
    call->names = new_locals(self, NULL);  // the look at its start has failed
    return call->names ? 0 : -1;
}

static PyObject *point(PyObject *object, PyObject *point) {
    Steps *self = (Steps *)object;
    Thread *thread = thread_to_follow(self, 0);
    if (!thread) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    Py_ssize_t place = place_of_call(self, thread, frame_id(self, NULL));
    if (place >= 0) {
        Call *call = (Call *)Py_NewRef(PyList_GET_ITEM(thread->calls, place));
        Where where = {thread, PyList_GET_SIZE(thread->calls), s_empty, NULL, PyTuple_GET_ITEM(point, 0)};
        thread->busy = 1;
        if (look_at_point(self, call, point, &where) < 0) excuse(self, thread);
        thread->busy = 0;
        Py_DECREF(call);
        Py_XDECREF(where.at);
    } else if (self->pauses) {
        woken(self, thread, NULL);  // by `throw`
    }
    Py_DECREF(thread);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static int look_at_end(Steps *self, Call *call, PyObject *frame, Where *where) {
    if (call->seen) {
        if (look_at_object(self, call, NULL, where) < 0) return -1;
        PyObject *weak = PyObject_GetAttr(call->seen, s_weak), *done = Py_None;
        if (weak == Py_False) {
            done = PyObject_CallMethodObjArgs(self->is.rare, s_forget, where->thread, call->thing, NULL);
            Py_XDECREF(done);
        }
        Py_XDECREF(weak);
        if (!weak || !done) return -1;
    }
    return call->names ? look_at_locals(self, (Locals *)call->names, frame, where) : 0;
}

typedef struct {
    PyObject *event, *words, *value, *frame, *left;  // the frame may be NULL: the one that calls us
} Stop;

static int stopped(Steps *self, Thread *thread, Call *call, long long time, Stop how) {
    Py_ssize_t depth = PyList_GET_SIZE(thread->calls);
    Where where = {thread, depth + 1, s_empty, NULL, NULL, how.left, how.value};
    PyObject *text = NULL;
    thread->busy = 1;
    int failed = look_at_end(self, call, how.frame, &where) < 0;
    if (!failed) text = words_of(self, how.words, how.frame, how.value);
    failed = PyErr_Occurred() && excuse(self, thread) < 0;
    thread->busy = 0;
    long long last = failed ? -1 : now(self);
    PyObject *took = PyLong_FromLongLong(time - call->start), *at = self->is.at;
    if (last != -1 && PyUnicode_Compare(how.event, s_raise) == 0) at = place_of(self, &where);
    if (PyUnicode_Compare(how.event, s_end) == 0) at = s_empty;
    failed = last == -1 || !took || !at;
    Said said = {how.event, self->is.name, at, took, NULL, NULL, text};
    failed = failed || emit(self, thread, depth, last, said) < 0;
    Py_XDECREF(where.at);
    Py_XDECREF(took);
    Py_XDECREF(text);
    return failed ? -1 : 0;
}

static PyObject *leaving(Steps *self, Stop how) {
    Thread *thread = thread_to_follow(self, 1);
    void *frame = frame_id(self, how.frame);
    if (thread && self->pauses && place_of_call(self, thread, frame) < 0) woken(self, thread, how.frame);  // by `throw`
    if (thread && !PyErr_Occurred()) {
        long long time = now(self);  // before our looking
        Call *call = time == -1 ? NULL : pop(self, thread, frame);
        if (call && stopped(self, thread, call, time, how) == 0 && PyList_GET_SIZE(self->is.buffer) >= self->full)
            Py_XDECREF(PyObject_CallMethodNoArgs(self->is.rare, s_write));
        Py_XDECREF(call);
    }
    Py_XDECREF(thread);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

// leave(value, at)
static PyObject *leave(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Steps *self = (Steps *)object;
    if (!given_all(count, 2)) return NULL;
    return leaving(self, (Stop){s_end, self->is.returned, given[0], NULL, given[1]});
}

// stop(event, words, value, frame, at)
static PyObject *stop(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    if (!given_all(count, 5)) return NULL;
    return leaving((Steps *)object, (Stop){given[0], given[1], given[2], given[3], given[4]});
}

static void forget_steps(PyObject *object) {
    Steps *self = (Steps *)object;
    PyObject **parts = (PyObject **)&self->is;
    for (size_t i = 0; i < sizeof(Parts) / sizeof(*parts); i++) Py_XDECREF(parts[i]);
    Py_XDECREF(self->last);
    PyMem_Free(self->places);
    PyMem_Free(self->arguments);
    PyObject_Free(object);
}

static PyMethodDef steps_methods[] = {
    {"start", (PyCFunction)(void *)start, METH_FASTCALL}, {"point", point, METH_O},
    {"leave", (PyCFunction)(void *)leave, METH_FASTCALL}, {"stop", (PyCFunction)(void *)stop, METH_FASTCALL},
    {"wake", wake, METH_O}, {NULL},
};
static PyTypeObject StepsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Steps", .tp_basicsize = sizeof(Steps), .tp_dealloc = forget_steps,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, .tp_methods = steps_methods,
};

static Py_ssize_t *numbers(PyObject *tuple) {
    Py_ssize_t count = PyTuple_GET_SIZE(tuple), *found = PyMem_Calloc(count + 1, sizeof(Py_ssize_t));
    for (Py_ssize_t i = 0; found && i < count; i++) found[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
    return found;
}

// steps(parts)
static PyObject *new_steps(PyObject *module, PyObject *given) {
    if (!PyTuple_Check(given) || !given_all(PyTuple_GET_SIZE(given), sizeof(Parts) / sizeof(PyObject *))) return NULL;
    Steps *self = PyObject_New(Steps, &StepsType);
    if (!self) return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof(Steps) - sizeof(PyObject));
    PyObject **parts = (PyObject **)&self->is;
    for (size_t i = 0; i < sizeof(Parts) / sizeof(*parts); i++) parts[i] = Py_NewRef(PyTuple_GET_ITEM(given, i));
    self->shift = PyLong_AsLongLong(self->is.shift), self->up = PyLong_AsSsize_t(self->is.up);
    self->full = PyLong_AsSsize_t(self->is.full), self->pauses = self->is.pauses == Py_True;
    self->quiet = self->is.called == Py_None || self->is.plain == Py_True;
    self->count = PyTuple_GET_SIZE(self->is.names), self->places = numbers(self->is.places);
    self->shown = PyTuple_GET_SIZE(self->is.arguments), self->arguments = numbers(self->is.argument_places);
    if (self->places && self->arguments && !PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static PyMethodDef steps_def = {"steps", new_steps, METH_O};

static int intern_all(void) {
    struct { PyObject **name; const char *text; } all[] = {
        {&s_version, "_version"}, {&s_shape, "shape"}, {&s_data_ptr, "data_ptr"}, {&s_same, "same"}, {&s_dtype, "dtype"},
        {&s_device, "device"}, {&s_name, "__name__"}, {&s_set, "set"}, {&s_run, "run"}, {&s_end, "end"},
        {&s_is_cpu, "is_cpu"}, {&s_is_contiguous, "is_contiguous"}, {&s_nbytes, "nbytes"},
        {&s_raise, "raise"}, {&s_resume, "resume"}, {&s_empty, ""}, {&s_before, "before this call"},
        {&s_thread, "thread"}, {&s_on, "on"}, {&s_thing, "thing"}, {&s_dict, "__dict__"}, {&s_in_dict, "in_dict"},
        {&s_items, "items"}, {&s_look, "look"}, {&s_marks, "marks"}, {&s_known, "known"}, {&s_weak, "weak"},
        {&s_f_locals, "f_locals"}, {&s_get, "get"}, {&s_checker, "checker"}, {&s_is_own, "is_own"},
        {&s_first_look, "first_look"}, {&s_take, "take"}, {&s_gone, "gone"}, {&s_forget, "forget"},
        {&s_excuse, "excuse"}, {&s_handled, "handled"}, {&s_left_at, "left_at"}, {&s_kind_of, "kind_of"},
        {&s_mark_of, "mark_of"}, {&s_describe, "describe"}, {&s_write, "write"}, {&s_text, "text"},
    };
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        if (!(*all[i].name = PyUnicode_InternFromString(all[i].text))) return -1;
    return (zero = PyLong_FromLong(0)) ? 0 : -1;
}

// `Makers` of known.py; given what makes the text of a tensor's shape, type and device
PyObject *functions(PyObject *text_of_layout) {
    PyTypeObject *types[] = {&KnownType,  &KnownTensorType, &ThreadType, &CallType,
                             &LocalsType, &WordsType,       &StepsType,  &HookType};
    PyMethodDef *makers[] = {&known_def, &known_tensor_def, &thread_def, &tensor_mark_def, &steps_def, &hook_def};
    enum { TYPES = sizeof(types) / sizeof(*types), MAKERS = sizeof(makers) / sizeof(*makers) };
    layout_text = Py_NewRef(text_of_layout);
    for (int i = 0; i < TYPES; i++)
        if (PyType_Ready(types[i]) < 0) return NULL;
    PyObject *found = intern_all() < 0 ? NULL : PyTuple_New(MAKERS);
    for (int i = 0; found && i < MAKERS; i++) PyTuple_SET_ITEM(found, i, PyCFunction_New(makers[i], NULL));
    return found;
}
