// Of steps.c: arguments and what is returned, as `Plain` of wrappers.py says them; texts are made when they are written.
typedef struct {
    PyObject_VAR_HEAD
    PyObject *names;     // of arguments; NULL: what is returned
    PyObject *shown[1];  // a text, or the mark of a tensor; NULL of an argument that is gone
} Words;

static void forget_words(PyObject *object) {
    Words *self = (Words *)object;
    Py_XDECREF(self->names);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) Py_XDECREF(self->shown[i]);
    PyObject_Free(object);
}

static PyObject *text_of_words(PyObject *object) {
    Words *self = (Words *)object;
    PyObject *text = PyUnicode_FromString("");
    if (!self->names) Py_SETREF(text, PyUnicode_FromFormat("-> %S", self->shown[0]));
    for (Py_ssize_t i = 0, first = 1; text && self->names && i < Py_SIZE(self); i++) {
        if (!self->shown[i]) continue;
        PyObject *name = PyTuple_GET_ITEM(self->names, i);
        Py_SETREF(text, PyUnicode_FromFormat(first ? "%U%U=%S" : "%U, %U=%S", text, name, self->shown[i]));
        first = 0;
    }
    return text;
}

static PyTypeObject WordsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Words", .tp_basicsize = sizeof(Words) - sizeof(PyObject *),
    .tp_itemsize = sizeof(PyObject *), .tp_dealloc = forget_words, .tp_str = text_of_words,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
};

static Words *new_words(PyObject *names, Py_ssize_t count) {
    Words *self = PyObject_NewVar(Words, &WordsType, count);
    if (!self) return NULL;
    self->names = Py_XNewRef(names);
    memset(self->shown, 0, count * sizeof(PyObject *));
    return self;
}

static PyObject *shown(Steps *self, PyObject *value) {
    int kind = kind_of(self, value);
    return kind < 0 ? NULL : kind == TENSOR ? tensor_words(value) : text_of(self, value);
}

static PyObject *words_of_call(Steps *self, PyObject *frame) {
    if (!self->shown) return Py_NewRef(s_empty);
    View view = view_of(self, frame);
    Words *words = view ? new_words(self->is.arguments, self->shown) : NULL;
    for (Py_ssize_t i = 0; words && i < self->shown; i++) {
        PyObject *value = variable(view, PyTuple_GET_ITEM(self->is.arguments, i), self->arguments[i]);
        if (!value) continue;
        words->shown[i] = shown(self, value);
        Py_DECREF(value);
        if (!words->shown[i]) Py_CLEAR(words);
    }
    if (view) close_view(view);
    return (PyObject *)words;
}

static PyObject *words_of_value(Steps *self, PyObject *value) {
    Words *words = new_words(NULL, 1);
    if (words && !(words->shown[0] = shown(self, value))) Py_CLEAR(words);
    return (PyObject *)words;
}

// Of a wrapper; `value` is what is returned, NULL of a call; NULL with an exception, or where there is none.
static PyObject *words_of(Steps *self, PyObject *wrapper, PyObject *frame, PyObject *value) {
    if (wrapper == Py_None) return NULL;
    if (self->is.plain == Py_True && (!value || wrapper == self->is.returned)) {
        PyObject *words = value ? words_of_value(self, value) : words_of_call(self, frame);
        if (words || !PyErr_ExceptionMatches(PyExc_Exception)) return words;
        PyErr_Clear();  // it is the program's own: the wrapper tells of it
    }
    PyObject *asked = value ? Py_NewRef(value) : frame ? Py_NewRef(frame) : watched_frame(self);
    PyObject *said = asked ? PyObject_CallFunctionObjArgs(wrapper, self->is.name, asked, NULL) : NULL;
    Py_XDECREF(asked);
    return said;
}
