// What stands among the constants of a watched code on Python 3.11: calls a hook. Who pickles the code, as cloudpickle
// does with functions of a script, ships something that does nothing instead, and that every Python has.
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *hook, *nothing;  // `nothing`: takes as many arguments
} Hook;

static PyObject *call_hook(PyObject *object, PyObject *const *given, size_t count, PyObject *names) {
    return PyObject_Vectorcall(((Hook *)object)->hook, given, count, names);
}

static void forget_hook(PyObject *object) {
    Py_XDECREF(((Hook *)object)->hook);
    Py_XDECREF(((Hook *)object)->nothing);
    PyObject_Free(object);
}

static PyObject *reduce_hook(PyObject *object, PyObject *unused) {
    PyObject *tools = PyImport_ImportModule("functools");
    PyObject *partial = tools ? PyObject_GetAttrString(tools, "partial") : NULL;
    PyObject *found = partial ? Py_BuildValue("O(O)", partial, ((Hook *)object)->nothing) : NULL;
    Py_XDECREF(tools);
    Py_XDECREF(partial);
    return found;
}

static PyMethodDef hook_methods[] = {{"__reduce__", reduce_hook, METH_NOARGS}, {NULL}};
static PyTypeObject HookType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Hook", .tp_basicsize = sizeof(Hook), .tp_dealloc = forget_hook,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Hook, call), .tp_call = PyVectorcall_Call, .tp_methods = hook_methods,
};

// hook(function, nothing)
static PyObject *new_hook(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    Hook *self = given_all(count, 2) ? PyObject_New(Hook, &HookType) : NULL;
    if (!self) return NULL;
    self->call = call_hook, self->hook = Py_NewRef(given[0]), self->nothing = Py_NewRef(given[1]);
    return (PyObject *)self;
}

static PyMethodDef hook_def = {"hook", (PyCFunction)(void *)new_hook, METH_FASTCALL};
