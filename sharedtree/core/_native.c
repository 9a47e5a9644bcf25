/* The module `_native`: its objects' memory, and what Python passes in.

The C files import nothing. When the package is imported, Python passes in the classes, functions and tables that they use, once
for each subject:

    take_over("walk", entries, classify, describe, ...)        sets the variables `entries`, `classify`, `describe`, ...
    take_over("calls", ...)                                    sets `concrete_array`, `group_type`, ...

`dependencies` has the variables of each subject and the type that each object must have. Before a subject is taken over, its
variables are NULL. `_native.h` says what each is. */

#include "_native.h"

#define DEFINED(name) PyObject *name_##name;
NAMES(DEFINED)

PyObject *entries;
PyObject *classify;
PyObject *describe;
PyObject *settle;
PyObject *contents, *remember;
PyObject *compile;
PyObject *missing_type;
PyObject *dtypes;
PyObject *registry;
PyObject *concrete_array;
PyObject *group_type, *selection_type, *arguments_type, *groups_type;
PyObject *groups_parts;
PyObject *trace_holder, *name_trace;
PyObject *policy_type, *default_policy;
PyObject *current_policy;
PyObject *layout_of, *mapping_type, *trace_type, *current_trace, *name_nodes, *name_mapping;
PyObject *raw_value, *variable_trace, *metadata_of, *state_trace, *jax_trace;
PyObject *attribute_kinds_type, *kinds_of_attributes, *names_in_kinds, *statics_in_kinds;
descrgetfunc get_slot;

/* --- objects: three references each ---------------------------------------------------------------------------- */

PyObject *new_parts(PyTypeObject *type, PyObject *first, PyObject *second, PyObject *third)
{
    PyObject *object = PyType_GenericAlloc(type, 0), *values[3] = {first, second, third};
    for (int i = 0; object != NULL && i < 3; i++)
        parts_of(object)[i] = Py_XNewRef(values[i]);
    return object;
}

/* Makes an object without parts, which its `__init__` sets. */
PyObject *parts_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    return new_parts(type, NULL, NULL, NULL);
}

int parts_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < 3; i++)
        Py_VISIT(parts_of(self)[i]);
    return 0;
}

int parts_clear(PyObject *self)
{
    for (int i = 0; i < 3; i++)
        Py_CLEAR(parts_of(self)[i]);
    return 0;
}

/* Frees an object. A class with more than the parts untracks the object, frees the rest, and then calls this. */
void parts_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    parts_clear(self);
    release(self);
    Py_DECREF(type);
}

/* --- the module: what Python passes in, and the functions that it calls -------------------------------------------- */

/* For each subject a letter for the type of each object, and the variables to set. T is a class; H, D and A are
   subclasses of LeafGroup, LeafSelection and Arguments; S is the descriptor of a slot; M a dict; U a tuple; N an interned name; O
   any object. */
static const struct {
    const char *subject, *letters; /* a letter for each of `places` */
    PyObject **places[11];
} dependencies[] = {
    {"walk", "MOOOMOOOUM",
     {&entries, &classify, &describe, &settle, &contents, &remember, &compile, &missing_type, &dtypes, &registry}},
    {"nnx", "OTTONNSSSSS",
     {&layout_of, &mapping_type, &trace_type, &current_trace, &name_nodes, &name_mapping, &raw_value, &variable_trace,
      &metadata_of, &state_trace, &jax_trace}},
    {"modules", "TSSS", {&attribute_kinds_type, &kinds_of_attributes, &names_in_kinds, &statics_in_kinds}},
    {"calls", "THDATSONTOO",
     {&concrete_array, &group_type, &selection_type, &arguments_type, &groups_type, &groups_parts, &trace_holder, &name_trace,
      &policy_type, &default_policy, &current_policy}},
};

static int is_below(PyObject *object, PyTypeObject *base)
{
    return PyType_Check(object) && PyType_IsSubtype((PyTypeObject *)object, base);
}

/* Tells whether an object has the type that a letter of `dependencies` stands for. */
static int fits_letter(PyObject *object, char letter)
{
    switch (letter) {
    case 'T': return PyType_Check(object);
    case 'H': return is_below(object, group_base);
    case 'D': return is_below(object, selection_base);
    case 'A': return is_below(object, arguments_base);
    case 'S': return Py_TYPE(object) == &PyMemberDescr_Type;
    case 'M': return PyDict_Check(object);
    case 'U': return PyTuple_Check(object);
    case 'N': return PyUnicode_Check(object);
    }
    return 1;
}

/* Sets the variables of one subject: (subject, objects...) -> True the first time. All or nothing, and only once: a second import
   of the package has other classes of the same names, and continues in Python. */
static PyObject *native_take_over(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *subject = PyTuple_Size(args) == 0 ? NULL : PyTuple_GetItem(args, 0);
    size_t row = 0, size = sizeof dependencies / sizeof *dependencies;
    if (subject == NULL || !PyUnicode_Check(subject))
        return raise_null(PyExc_TypeError, "of what?");
    while (row < size && PyUnicode_CompareWithASCIIString(subject, dependencies[row].subject) != 0)
        row++;
    const char *letters = row == size ? "" : dependencies[row].letters;
    Py_ssize_t count = (Py_ssize_t)strlen(letters);
    if (count == 0 || PyTuple_Size(args) != count + 1)
        return raise_null(PyExc_TypeError, "another number of arguments");
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!fits_letter(PyTuple_GetItem(args, i + 1), letters[i]))
            return raise_null(PyExc_TypeError, "an argument of another type");
    }
    PyObject **const *places = dependencies[row].places;
    int is_first = *places[0] == NULL;
    for (Py_ssize_t i = 0; is_first && i < count; i++)
        *places[i] = Py_NewRef(PyTuple_GetItem(args, i + 1));
    return Py_NewRef(is_first ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"take_over", native_take_over, METH_VARARGS, "(subject, objects...) -> True the first time, else False."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "The walk and its inverse, in C.", -1,
                                        methods, NULL, NULL, NULL, NULL};

/* Makes classes and adds the public ones to the module. */
int add_types(PyObject *module, NewType *types, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *type = PyType_FromSpec(&types[i].spec);
        *types[i].type = (PyTypeObject *)type;
        NEED(type);
        if (types[i].name != NULL)
            TRY(PyModule_AddObjectRef(module, types[i].name, type));
    }
    return DONE;
}

static int set_up(PyObject *module)
{
#define INTERNED(name)                                         \
    if ((name_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return FAILED;
    NAMES(INTERNED)
    get_slot = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    TRY(set_up_walk(module));
    TRY(set_up_build(module));
    TRY(set_up_call(module));
    return PyModule_AddStringConstant(module, "built_from", SHAREDTREE_BUILT_FROM);
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && set_up(module) != DONE)
        replace(&module, NULL);
    return module;
}
