// Of steps.c: the object that a method runs on, and what is different of it.

// The last look at it, held; 0 where the method runs on none, -1 with an exception.
static int seen_of(Steps *self, PyObject *thing, PyObject **seen) {
    PyObject *own = Py_XNewRef(PyDict_GetItemWithError(self->is.own, (PyObject *)Py_TYPE(thing)));
    if (!own && !PyErr_Occurred()) own = PyObject_CallMethodOneArg(self->is.rare, s_is_own, thing);
    int is_own = own ? PyObject_IsTrue(own) : -1;
    Py_XDECREF(own);
    if (is_own <= 0) return is_own;
    PyObject *id = PyLong_FromVoidPtr(thing);
    PyObject *found = id ? Py_XNewRef(PyDict_GetItemWithError(self->is.known, id)) : NULL;
    Py_XDECREF(id);
    if (found) {
        PyObject *thing_of = PyObject_GetAttr(found, s_thing), *alive = thing_of ? PyObject_CallNoArgs(thing_of) : NULL;
        int same = alive == thing;  // else another has its identity
        Py_XDECREF(thing_of);
        Py_XDECREF(alive);
        if (!same) Py_CLEAR(found);
    }
    if (!found && !PyErr_Occurred()) found = PyObject_CallMethodOneArg(self->is.rare, s_first_look, thing);
    *seen = found;
    return found ? 1 : -1;
}

static Entry *entry_of(Known *known, PyObject *name) {
    for (Py_ssize_t i = 0; i < known->count; i++)
        if (known->entries[i].key == name) return known->entries + i;
    return NULL;
}

// 'Class.name': its old value, then its new one, which are plain.
static int say_attribute(Steps *self, PyObject *thing, PyObject *name, PyObject *old, PyObject *value, Where *where) {
    PyObject *of = PyObject_GetAttr((PyObject *)Py_TYPE(thing), s_name);
    PyObject *full = of ? PyUnicode_FromFormat("%S.%U", of, name) : NULL;
    PyObject *before = full ? text_of(self, old) : NULL, *after = before ? text_of(self, value) : NULL;
    int failed = !after || say_set(self, full, before, after, where) < 0;
    Py_XDECREF(of);
    Py_XDECREF(full);
    Py_XDECREF(before);
    Py_XDECREF(after);
    return failed ? -1 : 0;
}

typedef struct {
    PyObject *name, *old, *value, *marks;
} Stored;

// Where it has another plain value in place of a plain one; 0 where that is not so, and somebody else has to look.
static int say_plain(Steps *self, Call *call, Known *known, Stored it, Where *where) {
    if (kind_of(self, it.value) != PLAIN || kind_of(self, it.old) != PLAIN) return PyErr_Occurred() ? -1 : 0;
    if (it.old == it.value) return 1;
    int equal = equal_plain(it.old, it.value);
    Entry *entry = equal < 0 ? NULL : entry_of(known, it.name);  // after all that may run other code
    if (!entry) return equal < 0 ? -1 : 0;
    fill(entry, it.name, it.value, Py_None);
    if (equal) return 1;
    if (PyDict_SetItem(it.marks, it.name, it.value) < 0) return -1;
    return say_attribute(self, call->thing, it.name, it.old, it.value, where) < 0 ? -1 : 1;
}

// Of one attribute that was stored, in a plain dict; 0 as above.
static int say_stored(Steps *self, Call *call, PyObject *items, Known *known, PyObject *stored, Where *where) {
    if (!self->quiet || PyTuple_GET_SIZE(stored) != 1 || !PyDict_CheckExact(items)) return 0;
    PyObject *marks = PyObject_GetAttr(call->seen, s_marks), *name = PyTuple_GET_ITEM(stored, 0);
    // held: another thread may take them away
    PyObject *value = marks ? Py_XNewRef(PyDict_GetItemWithError(items, name)) : NULL;
    PyObject *old = value ? Py_XNewRef(PyDict_GetItemWithError(marks, name)) : NULL;
    int said = old ? say_plain(self, call, known, (Stored){name, old, value, marks}, where) : PyErr_Occurred() ? -1 : 0;
    Py_XDECREF(marks);
    Py_XDECREF(value);
    Py_XDECREF(old);
    return said;
}

static int look_into(Steps *self, Call *call, PyObject *items, Known *known, PyObject *stored, Where *where) {
    int said = stored ? say_stored(self, call, items, known, stored, where) : 0;
    int differs = stored ? !said : known_differs(known, items);
    if (said < 0 || differs <= 0) return said < 0 || differs < 0 ? -1 : 0;
    PyObject *given = stored ? stored : Py_None, *place = tuple_of(self, where), *done = NULL;
    PyObject *rare = self->is.rare;
    if (place)
        done = PyObject_CallMethodObjArgs(rare, s_look, where->thread, call->thing, call->seen, items, given, place, NULL);
    Py_XDECREF(place);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

// Say what is different among all its attributes, or among those that were stored.
static int look_at_object(Steps *self, Call *call, PyObject *stored, Where *where) {
    PyObject *in_dict = PyObject_GetAttr(call->seen, s_in_dict), *known = PyObject_GetAttr(call->seen, s_known);
    PyObject *items = !in_dict || !known   ? NULL
                      : in_dict == Py_True ? PyObject_GetAttr(call->thing, s_dict)
                                           : PyObject_CallMethodOneArg(call->seen, s_items, call->thing);
    int failed = !items || look_into(self, call, items, (Known *)known, stored, where) < 0;
    Py_XDECREF(in_dict);
    Py_XDECREF(known);
    Py_XDECREF(items);
    return failed ? -1 : 0;
}
