// Whether a dict or list is still what it was: `Known` of known.py, which says what it does. Nothing is held alive but keys.
typedef struct {
    PyObject *key;      // of a dict, held
    PyObject *value;    // only its identity: it may be gone
    PyObject *checker;  // held; NULL where nothing can be different inside, () of a container that was empty
} Entry;

typedef struct {
    PyObject_HEAD
    int is_list;
    Py_ssize_t count, room;
    Entry *entries;
} Known;

static PyTypeObject KnownType;
static int known_differs(Known *self, PyObject *value);

static int inside_differs(PyObject *checker, PyObject *value) {
    if (Py_TYPE(checker) == &KnownTensorType) return tensor_differs((KnownTensor *)checker, value);
    if (Py_TYPE(checker) == &KnownType) return known_differs((Known *)checker, value);
    if (PyTuple_CheckExact(checker)) {
        Py_ssize_t length = PyObject_Size(value);
        return length < 0 ? -1 : length > 0;
    }
    PyObject *said = PyObject_CallMethodOneArg(checker, s_same, value);
    return said ? unequal(said, Py_True) : -1;
}

// Every time all of them: a dict's version tells less, since Python 3.11 counts it up only after what an attribute held is
// gone, and what runs until then (a destructor, another thread) would find a dead one here. Runs no code of the program.
static int identities_differ(Known *self, PyObject *value) {
    Entry *entry = self->entries, *end = entry + self->count;
    if (self->is_list) {
        if (!PyList_Check(value) || PyList_GET_SIZE(value) != self->count) return 1;
        for (Py_ssize_t i = 0; entry < end; entry++, i++)
            if (PyList_GET_ITEM(value, i) != entry->value) return 1;
        return 0;
    }
    if (!PyDict_Check(value) || PyDict_GET_SIZE(value) != self->count) return 1;
    PyObject *key, *one;
    for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &one); entry++)
        if (entry == end || key != entry->key || one != entry->value) return 1;
    return 0;
}

// For the same identities. Checking may run code that takes values out of the container, or that teaches us other
// entries: checkers and values are held, a few at a time, until they are through.
static int insides_differ(Known *self, PyObject *value) {
    enum { FEW = 32 };
    PyObject *checkers[FEW], *values[FEW];
    int found = 0;
    for (Py_ssize_t i = 0; i < self->count; i++)  // the program has run in between: all of them are far away
        if (self->entries[i].checker) __builtin_prefetch(self->entries[i].value);
    for (Py_ssize_t i = 0; i < self->count && !found;) {
        if (i && identities_differ(self, value)) return 1;
        int held = 0;
        for (; i < self->count && held < FEW; i++) {
            if (!self->entries[i].checker) continue;
            checkers[held] = Py_NewRef(self->entries[i].checker);
            values[held++] = Py_NewRef(self->entries[i].value);
        }
        for (int j = 0; j < held; j++) {
            if (!found) found = inside_differs(checkers[j], values[j]);
            Py_DECREF(checkers[j]);
            Py_DECREF(values[j]);
        }
    }
    return found;
}

static int known_differs(Known *self, PyObject *value) {
    return identities_differ(self, value) ? 1 : insides_differ(self, value);
}

static PyObject *same(PyObject *self, PyObject *value) {
    int found = inside_differs(self, value);
    return found < 0 ? NULL : PyBool_FromLong(!found);
}

// What is different in a copy of a dict's items, added to the places; NULL with or without an exception.
static PyObject *different(Known *self, PyObject *items, PyObject *places) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        PyObject *key = PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 0);
        PyObject *value = PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 1);
        int found = 1;
        if (i < self->count) {
            if (self->entries[i].key != key) return NULL;  // names went, or came in between
            PyObject *checker = Py_XNewRef(self->entries[i].checker);
            if (self->entries[i].value == value) found = checker ? inside_differs(checker, value) : 0;
            Py_XDECREF(checker);
        }
        if (!found) continue;
        PyObject *place = found < 0 ? NULL : Py_BuildValue("(nOO)", i, key, value);
        int failed = !place || PyList_Append(places, place) < 0;
        Py_XDECREF(place);
        if (failed) return NULL;
    }
    return PyList_GET_SIZE(items) < self->count ? NULL : places;
}

static PyObject *moved(PyObject *object, PyObject *value) {
    Known *self = (Known *)object;
    int found = known_differs(self, value);
    if (found < 0) return NULL;
    if (!found) return PyTuple_New(0);
    if (!PyDict_Check(value)) Py_RETURN_NONE;
    PyObject *items = PyDict_Items(value), *places = PyList_New(0);
    if (items && places && different(self, items, places)) {
        Py_DECREF(items);
        return places;
    }
    Py_XDECREF(items);
    Py_XDECREF(places);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static int reserve(Known *self, Py_ssize_t room) {
    if (room <= self->room) return 0;
    Entry *entries = PyMem_Realloc(self->entries, room * sizeof(Entry));
    if (!entries) {
        PyErr_NoMemory();
        return -1;
    }
    memset(entries + self->room, 0, (room - self->room) * sizeof(Entry));
    self->entries = entries, self->room = room;
    return 0;
}

// What was there is let go at the end: that may run code which moves the entries.
static void fill(Entry *entry, PyObject *key, void *value, PyObject *checker) {
    Entry old = *entry;
    *entry = (Entry){Py_NewRef(key), value, checker == Py_None ? NULL : Py_NewRef(checker)};
    Py_XDECREF(old.key);
    Py_XDECREF(old.checker);
}

// put(place, key, value, checker)
static PyObject *put(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Known *self = (Known *)object;
    if (!given_all(count, 4)) return NULL;
    Py_ssize_t place = PyLong_AsSsize_t(given[0]);
    if (place == -1 && PyErr_Occurred()) return NULL;
    if (place == self->count) {
        if (reserve(self, place + 4) < 0) return NULL;
        self->count++;
    }
    if (place >= 0 && place < self->count) fill(self->entries + place, given[1], given[2], given[3]);
    Py_RETURN_NONE;
}

static void forget_known(PyObject *object) {
    Known *self = (Known *)object;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_XDECREF(self->entries[i].key);
        Py_XDECREF(self->entries[i].checker);
    }
    PyMem_Free(self->entries);
    PyObject_Free(object);
}

// known(keys or None, identities, checkers)
static PyObject *known(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (!given_all(count, 3)) return NULL;
    PyObject *keys = given[0], *ids = given[1], *checkers = given[2];
    int of_list = keys == Py_None, lists = PyList_Check(ids) && PyList_Check(checkers) && (of_list || PyList_Check(keys));
    Py_ssize_t length = lists ? PyList_GET_SIZE(ids) : -1;
    if (!lists || PyList_GET_SIZE(checkers) != length || (!of_list && PyList_GET_SIZE(keys) != length)) {
        PyErr_SetString(PyExc_ValueError, "keys, identities and checkers are lists of one length");
        return NULL;
    }
    Known *self = PyObject_New(Known, &KnownType);
    if (!self) return NULL;
    self->is_list = of_list, self->count = self->room = 0, self->entries = NULL;
    if (reserve(self, length) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    for (; self->count < length; self->count++) {
        Py_ssize_t i = self->count;
        PyObject *key = self->is_list ? Py_None : PyList_GET_ITEM(keys, i);
        fill(self->entries + i, key, PyLong_AsVoidPtr(PyList_GET_ITEM(ids, i)), PyList_GET_ITEM(checkers, i));
    }
    return (PyObject *)self;
}

static PyMethodDef known_methods[] = {
    {"same", same, METH_O}, {"moved", moved, METH_O}, {"put", (PyCFunction)(void *)put, METH_FASTCALL}, {NULL},
};
static PyTypeObject KnownType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Known", .tp_basicsize = sizeof(Known), .tp_dealloc = forget_known,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, .tp_methods = known_methods,
};
static PyMethodDef known_def = {"known", (PyCFunction)(void *)known, METH_FASTCALL};
