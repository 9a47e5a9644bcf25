/* Builds trees from structures, and writes new content into objects of the caller.

A PROGRAM is a structure prepared for building: one step per record, children before parents. Each step appends one object
to the table, and refers to earlier ones by number. For an Equinox module Pair(w, [w, 3]):

    step   shape     numbers   values          table afterwards
    0      LEAF                                w
    1      STATIC              3               w  3
    2      LIST      0 1                       w  3  [w, 3]
    3      FIELDS    0 2       static fields   w  3  [w, 3]  Pair

Step 2 refers to the number 0 again, so the list and the module get the same `w`. Names are looked up and auxiliary data is
checked once, when the program is made.

WRITING BACK. Under `in_place=True` a result has new content for objects of the caller. `write_back` gets pairs:

    [m, new m, items, new items]      m.__dict__ becomes that of `new m`, and the list `items` gets the content of `new items`

It writes all or nothing. First it reads the old and the new content of every object into a `Writing`:

    held[TARGET]  held[HOLDER]    held[OLD_ITEMS]         held[NEW_ITEMS]        held[OLD_VALUES], held[NEW_VALUES]
    m             m.__dict__      {"a": 1}, a copy        {"a": 2}               ()     no slots
    items         items           [1, 2], a copy          [3]                    ()

Then it writes. If a write fails, it writes the old content of all objects back. All contents are held until the end, so that
no finaliser runs in between.

`BUILDERS`, at the end, says for each shape how an instance is built, and how content is written into one. */

#include "_native.h"

PyTypeObject *program_type;

static PyObject *empty_tuple;
static newfunc new_object;      /* `object.__new__` */
static descrsetfunc set_slot;   /* writes a slot by its descriptor */

static int set_attribute(PyObject *object, PyObject *name, PyObject *value)
{
    return Py_TYPE(name) == &PyMemberDescr_Type ? set_slot(name, object, value) : PyObject_GenericSetAttr(object, name, value);
}

/* --- programs: building trees from structures ----------------------------------------------------------------------- */

/* One step. It is read from one of the tuples that `_classes_in_native_walk.py` makes, and borrows all of its references from
   this tuple. */
struct Step {
    int shape;
    Kind *kind;               /* of a node. If its shape has changed since, the registered function builds the node. */
    PyObject *record;         /* of a node: the operation, and the numbers of the children */
    Py_ssize_t *numbers;      /* of the children; for attributes, NO_VALUE stands for a static one */
    Py_ssize_t size;          /* the number of them */
    PyObject *names;          /* of attributes, in order; or the keys of a dictionary */
    PyObject *values;         /* the static attributes; or a function to call; or the value itself */
    PyObject *target;         /* the number of the caller's object that gets the built object's content; or None */
};

/* The state of one build. */
typedef struct {
    const Program *program;
    PyObject *leaves, *table, *caller_objects, *update;
    PyObject *trace_state;    /* for all NNX objects of this build; NULL before the first one */
    Py_ssize_t next, num_leaves; /* the number of leaves that were used, and of all leaves */
} Run;

typedef struct Writing Writing;

/* One row of `BUILDERS`. A NULL leaves the work to Python and the functions that are registered for the class. */
typedef struct {
    PyObject *(*build)(Run *run, const Step *step);
    PyObject *(*holder)(PyObject *object); /* returns the list or dict to write into; NULL if there are only slots */
    PyObject *(*copy)(PyObject *items);
    int (*write)(const Writing *writing, PyObject *items, int is_rollback);
} Builder;

static const Builder BUILDERS[NUM_SHAPES];

static int read_numbers(Step *step, PyObject *numbers)
{
    step->size = PyTuple_Size(numbers);
    step->numbers = step->size < 0 ? NULL : PyMem_Calloc((size_t)step->size + 1, sizeof *step->numbers);
    if (step->numbers == NULL)
        return step->size < 0 ? FAILED : no_memory();
    for (Py_ssize_t i = 0; i < step->size && !PyErr_Occurred(); i++) {
        PyObject *number = PyTuple_GetItem(numbers, i);
        step->numbers[i] = number == Py_None ? NO_VALUE : PyLong_AsSsize_t(number);
    }
    return PyErr_Occurred() ? FAILED : DONE;
}

/* Reads a step from its tuple, and checks what `run_program` relies on. */
static int read_step(Step *step, PyObject *content)
{
    PyObject *type, *numbers;
    if (!PyTuple_CheckExact(content))
        return raise_failed(PyExc_TypeError, "not a step");
    if (!PyArg_ParseTuple(content, "iOOO!O!OO", &step->shape, &type, &step->record, &PyTuple_Type, &numbers, &PyTuple_Type,
                          &step->names, &step->values, &step->target))
        return FAILED;
    TRY(read_numbers(step, numbers));
    step->kind = kind_of((PyTypeObject *)type);
    int is_shape = step->shape >= 0 && step->shape < NUM_SHAPES, needs_kind = step->shape >= NOTHING && step->shape < OTHER;
    if (!is_shape || BUILDERS[step->shape].build == NULL || (needs_kind && step->kind == NULL))
        return raise_failed(PyExc_ValueError, "nothing that can be built");
    return DONE;
}

/* Makes a `Program(steps, caller_numbers, root, is_for_python, updates)`. */
static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *content, *caller_numbers;
    Py_ssize_t root;
    int is_for_python, updates;
    if (!PyArg_ParseTuple(args, "O!Onpp", &PyTuple_Type, &content, &caller_numbers, &root, &is_for_python, &updates))
        return NULL;
    PyObject *object = new_parts(type, content, caller_numbers, NULL);
    Program *program = (Program *)object;
    if (object == NULL)
        return NULL;
    program->root = root, program->is_for_python = is_for_python, program->updates = updates;
    program->steps = PyMem_Calloc((size_t)PyTuple_Size(content) + 1, sizeof *program->steps);
    int outcome = program->steps == NULL ? no_memory() : DONE;
    for (Py_ssize_t i = 0; outcome == DONE && i < PyTuple_Size(content); i++)
        outcome = read_step(&program->steps[program->num_steps++], PyTuple_GetItem(content, i));
    if (outcome != DONE)
        replace(&object, NULL);
    return object;
}

static void program_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Program *program = (Program *)self;
    for (Py_ssize_t i = 0; i < program->num_steps; i++)
        PyMem_Free(program->steps[i].numbers);
    PyMem_Free(program->steps);
    parts_dealloc(self);
}

static PyType_Slot program_slots[] = {
    {Py_tp_new, program_new}, {Py_tp_dealloc, program_dealloc}, {Py_tp_traverse, parts_traverse},
    {Py_tp_doc, "(steps, caller_numbers, root, is_for_python, updates): a structure, as `build` runs it."}, {0, NULL},
};

/* Tells Python how to make the step of a node: (NodeType, auxiliary data, number of children) -> (shape, names in order, bytes for
   the static ones, bytes of places); None if the registered function has to build it. */
static PyObject *native_recipe(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *node_type, *aux;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "OOn", &node_type, &aux, &size))
        return NULL;
    const Kind *kind = kind_described(node_type);
    if (kind == NULL)
        return NULL;
    /* A namedtuple's kind has no node type, which would keep the class alive. */
    int is_known = kind->shape == NAMEDTUPLE || kind->node_type == node_type;
    if (!is_known || BUILDERS[kind->shape].build == NULL || !fits_kind(kind, aux, size))
        return none();
    return Py_BuildValue("iOOO", kind->shape, kind->order, kind->is_static, kind->places);
}

/* Returns the item of a list at a number that is a Python object; a new reference. */
static PyObject *item_numbered(PyObject *list, PyObject *number)
{
    Py_ssize_t i = PyLong_AsSsize_t(number);
    return i == -1 && PyErr_Occurred() ? NULL : Py_XNewRef(PyList_GetItem(list, i));
}

/* Returns the items of a list at the numbers in a tuple, or, if this is NULL, at the step's; as a list or a tuple. */
PyObject *items_at(PyObject *list, PyObject *numbers, const Step *step, int as_list)
{
    Py_ssize_t size = numbers == NULL ? step->size : PyTuple_Size(numbers);
    PyObject *items = as_list ? PyList_New(size) : PyTuple_New(size);
    for (Py_ssize_t i = 0; items != NULL && i < size; i++) {
        PyObject *item = numbers == NULL ? Py_XNewRef(PyList_GetItem(list, step->numbers[i]))
                                         : item_numbered(list, PyTuple_GetItem(numbers, i));
        if (item == NULL)
            replace(&items, NULL);
        else if (as_list)
            PyList_SetItem(items, i, item);
        else
            PyTuple_SetItem(items, i, item);
    }
    return items;
}

/* Returns the i-th part of a step: an object from the table, or a static value; a new reference. */
static PyObject *object_at(const Run *run, const Step *step, Py_ssize_t i)
{
    Py_ssize_t number = i < step->size ? step->numbers[i] : OPEN; /* -1 is no index, so the lookup raises */
    return Py_XNewRef(number == NO_VALUE ? PyTuple_GetItem(step->values, i) : PyList_GetItem(run->table, number));
}

/* Returns the next leaf: a borrowed reference, unlike all other `build_` functions. `run_program` takes the reference. */
static PyObject *build_leaf(Run *run, const Step *Py_UNUSED(step))
{
    if (run->next < run->num_leaves)
        return PyTuple_GetItem(run->leaves, run->next++);
    PyErr_SetNone(PyExc_StopIteration);
    return NULL;
}

static PyObject *build_constant(Run *Py_UNUSED(run), const Step *step)
{
    return Py_NewRef(step->values);
}

/* Returns the object of the caller that has this number, from a list or by calling a function. */
static PyObject *caller_object(const Run *run, PyObject *number)
{
    if (PyList_CheckExact(run->caller_objects))
        return item_numbered(run->caller_objects, number);
    return PyObject_CallFunctionObjArgs(run->caller_objects, number, NULL);
}

static PyObject *build_caller_object(Run *run, const Step *step)
{
    return caller_object(run, step->values);
}

/* Returns the object of the caller that gets this content. A function writes it at once; a list collects both, to be written
   after the build. */
static PyObject *update_target(Run *run, const Step *step, PyObject *content)
{
    if (!PyList_CheckExact(run->update))
        return PyObject_CallFunctionObjArgs(run->update, step->target, content, NULL);
    PyObject *target = caller_object(run, step->target);
    if (target != NULL && (PyList_Append(run->update, target) < 0 || PyList_Append(run->update, content) < 0))
        replace(&target, NULL);
    return target;
}

/* Builds a node by the function registered for its class. It gets a tuple of children, as from JAX. */
static PyObject *build_registered(Run *run, const Step *step)
{
    PyObject *node = PyTuple_GetItem(step->record, 0), *numbers = PyTuple_GetItem(step->record, 1);
    OWNED *unflatten = node == NULL || numbers == NULL ? NULL : PyObject_GetAttr(node, name_unflatten);
    OWNED *children = unflatten == NULL ? NULL : items_at(run->table, numbers, NULL, 0);
    return children == NULL ? NULL : PyObject_CallFunctionObjArgs(unflatten, children, NULL);
}

static PyObject *build_sequence(Run *run, const Step *step)
{
    return items_at(run->table, NULL, step, step->shape == LIST);
}

/* Builds a dictionary of any kind. The other kinds are made from a `dict`. */
static PyObject *build_dict(Run *run, const Step *step)
{
    OWNED *dict = PyDict_New();
    PyObject *type = (PyObject *)step->kind->type;
    Py_ssize_t size = PyTuple_Size(step->names);
    for (Py_ssize_t i = 0; dict != NULL && i < size; i++) {
        /* Held, since setting an item may run a key's `__eq__`. */
        OWNED *child = object_at(run, step, i);
        if (child == NULL || PyDict_SetItem(dict, PyTuple_GetItem(step->names, i), child) < 0)
            return NULL;
    }
    if (dict == NULL || step->shape == DICT)
        return Py_XNewRef(dict);
    return step->shape == DEFAULT_DICT ? PyObject_CallFunctionObjArgs(type, step->values, dict, NULL)
                                       : PyObject_CallFunctionObjArgs(type, dict, NULL);
}

static PyObject *build_deque(Run *run, const Step *step)
{
    OWNED *items = items_at(run->table, NULL, step, 1);
    return items == NULL ? NULL : PyObject_CallFunctionObjArgs((PyObject *)step->kind->type, items, step->values, NULL);
}

static PyObject *build_by_call(Run *run, const Step *step)
{
    OWNED *children = items_at(run->table, NULL, step, 0);
    return children == NULL ? NULL : PyObject_CallFunctionObjArgs(step->values, children, NULL);
}

/* Sets the `_trace_state` of an NNX object to the active trace. All objects of one build share it, since nothing writes to it. */
static int set_trace_state(Run *run, PyObject *object, PyObject *slot)
{
    if (run->trace_state == NULL) {
        OWNED *trace = PyObject_CallNoArgs(current_trace);
        OWNED *state = trace == NULL ? NULL : new_object((PyTypeObject *)trace_type, empty_tuple, NULL);
        NEED(state);
        TRY(set_slot(jax_trace, state, trace));
        run->trace_state = Py_NewRef(state);
    }
    return set_slot(slot, object, run->trace_state);
}

/* Sets the attributes of a new object, which has none yet. */
static int set_attributes(Run *run, const Step *step, PyObject *object)
{
    /* NNX lets descriptors of the class take part, so its attributes are not written into the dictionary. */
    int is_dict = step->shape == FIELDS || step->shape == DATACLASS || step->shape == MODULE;
    OWNED *attributes = is_dict ? PyObject_GenericGetDict(object, NULL) : NULL;
    Py_ssize_t size = PyTuple_Size(step->names);
    if (is_dict && attributes == NULL)
        return FAILED;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *name = PyTuple_GetItem(step->names, i);
        OWNED *value = object_at(run, step, i);
        NEED(value);
        TRY(is_dict ? PyDict_SetItem(attributes, name, value) : set_attribute(object, name, value));
    }
    /* After the values of the names comes the value of the slot. */
    if (step->shape == MODULE) {
        PyObject *kinds_object = PyTuple_GetItem(step->values, size);
        return kinds_object == NULL ? FAILED : set_slot(kinds_of_attributes, object, kinds_object);
    }
    return step->shape == NNX_STATE ? set_trace_state(run, object, state_trace) : DONE;
}

static int set_variable(Run *run, const Step *step, PyObject *object)
{
    OWNED *metadata = PyDict_Copy(step->values), *value = metadata == NULL ? NULL : object_at(run, step, 0);
    NEED(value);
    TRY(set_trace_state(run, object, variable_trace));
    TRY(set_slot(raw_value, object, value));
    return set_slot(metadata_of, object, metadata);
}

static PyObject *build_object(Run *run, const Step *step)
{
    PyObject *object = new_object(step->kind->type, empty_tuple, NULL);
    if (object == NULL)
        return NULL;
    if ((step->shape == NNX_VARIABLE ? set_variable(run, step, object) : set_attributes(run, step, object)) != DONE)
        replace(&object, NULL);
    return object;
}

/* Runs the steps of a program. Each appends one object to the table. */
static int run_program(Run *run)
{
    for (Py_ssize_t i = 0; i < run->program->num_steps; i++) {
        const Step *step = &run->program->steps[i];
        int is_same_shape = step->kind == NULL || step->kind->shape == step->shape;
        PyObject *object = is_same_shape ? BUILDERS[step->shape].build(run, step) : build_registered(run, step);
        /* `build_leaf` returns a borrowed reference, unlike the others. */
        if (object != NULL && step->shape == LEAF) {
            TRY(PyList_Append(run->table, object));
            continue;
        }
        if (object != NULL && step->target != Py_None)
            replace(&object, update_target(run, step, object));
        TRY(append_new(run->table, object));
    }
    return DONE;
}

/* Returns the program of a structure, and makes it at the first build. */
PyObject *program_of(PyObject *structure)
{
    PyObject *program = PyObject_GetAttr(structure, name_program);
    if (program == Py_None)
        replace(&program, PyObject_CallFunctionObjArgs(compile, structure, NULL));
    if (program == NULL || Py_TYPE(program) == program_type)
        return program;
    Py_DECREF(program);
    return raise_null(PyExc_TypeError, "not a structure");
}

/* Runs a program, which appends one object per record to `table`. The caller holds the program, since the structure may lose it
   meanwhile. */
int build_onto(PyObject *table, PyObject *program, PyObject *leaf_sequence, PyObject *caller_objects, PyObject *update)
{
    OWNED *leaves = PySequence_Tuple(leaf_sequence);
    Run run = {.program = (Program *)program, .leaves = leaves, .table = table, .update = update};
    run.caller_objects = caller_objects;
    run.num_leaves = leaves == NULL ? 0 : PyTuple_Size(leaves);
    int outcome = leaves == NULL ? FAILED : run_program(&run);
    Py_XDECREF(run.trace_state);
    return outcome;
}

static PyObject *native_build(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *structure, *leaves, *table, *caller_objects, *update;
    if (!PyArg_ParseTuple(args, "OOO!OO", &structure, &leaves, &PyList_Type, &table, &caller_objects, &update))
        return NULL;
    OWNED *program = program_of(structure);
    return program == NULL || build_onto(table, program, leaves, caller_objects, update) != DONE ? NULL : none();
}

/* --- writing back ----------------------------------------------------------------------------------------------- */

enum { TARGET, HOLDER, NEW_ITEMS, NEW_VALUES, OLD_ITEMS, OLD_VALUES, NUM_HELD };

/* One object into which content is written back. */
struct Writing {
    const Kind *kind;
    const Builder *builder;   /* that of the kind's shape at the beginning, since a kind may change its shape */
    PyObject *slots;
    PyObject *held[NUM_HELD]; /* strong references */
};

static PyObject *copy_ordered(PyObject *dict)
{
    return PyObject_CallMethodObjArgs(dict, name_copy, NULL);
}

static int write_list(const Writing *writing, PyObject *items, int Py_UNUSED(is_rollback))
{
    return PyList_SetSlice(writing->held[HOLDER], 0, PY_SSIZE_T_MAX, items);
}

static int write_deque(const Writing *writing, PyObject *items, int Py_UNUSED(is_rollback))
{
    OWNED *outcome_of_clear = PyObject_CallMethodObjArgs(writing->held[HOLDER], name_clear, NULL), *outcome_of_extend = NULL;
    NEED(outcome_of_clear);
    outcome_of_extend = PyObject_CallMethodObjArgs(writing->held[HOLDER], name_extend, items, NULL);
    return outcome_of_extend == NULL ? FAILED : DONE;
}

/* Deletes the names that the new items do not have. */
static int remove_names(PyObject *dict, PyObject *names, PyObject *new_items)
{
    for (Py_ssize_t i = 0; i < length_of(names); i++) {
        OWNED *name = Py_NewRef(item_at(names, i));
        int stays = PyDict_Contains(new_items, name), is_there = stays ? stays : PyDict_Contains(dict, name);
        if (is_there < 0)
            return FAILED;
        if (!stays && is_there)
            TRY(PyObject_DelItem(dict, name));
    }
    return DONE;
}

/* Writes a dictionary so that keys keep their places, and attributes that no field declares remain. For an OrderedDict, its
   methods are called, since it has an order beside the one of `dict`. */
static int write_dict(const Writing *writing, PyObject *items, int is_rollback)
{
    PyObject *dict = writing->held[HOLDER];
    int are_fields = writing->builder == &BUILDERS[FIELDS] || writing->builder == &BUILDERS[DATACLASS];
    OWNED *names = are_fields && !is_rollback ? Py_NewRef(writing->kind->names) : PyDict_Keys(dict), *keys = NULL;
    NEED(names);
    TRY(remove_names(dict, names, items));
    if (writing->builder != &BUILDERS[ORDERED_DICT])
        return PyDict_Update(dict, items);
    keys = PyMapping_Keys(items);
    NEED(keys);
    for (Py_ssize_t i = 0; i < PyList_Size(keys); i++) {
        PyObject *key = PyList_GetItem(keys, i);
        OWNED *value = Py_XNewRef(PyDict_GetItemWithError(items, key));
        NEED(value);
        TRY(PyObject_SetItem(dict, key, value));
    }
    return DONE;
}

/* Reads the content of an object: its list or dictionary, and the values of its slots. UNHANDLED if only Python can. */
static int read_content(PyObject *object, const Builder *builder, PyObject *slots, PyObject **items, PyObject **values)
{
    Py_ssize_t size = PyTuple_Size(slots);
    if (builder->holder == NULL && size == 0)
        return UNHANDLED;
    *items = builder->holder == NULL ? NULL : builder->holder(object);
    if (*items == NULL && builder->holder != NULL)
        return PyErr_Occurred() ? FAILED : UNHANDLED;
    *values = PyTuple_New(size);
    for (Py_ssize_t i = 0; *values != NULL && i < size; i++) {
        PyObject *value = get_attribute(object, PyTuple_GetItem(slots, i));
        if (value == NULL)
            return drop_error(PyExc_AttributeError) ? UNHANDLED : FAILED;
        PyTuple_SetItem(*values, i, value);
    }
    return *values == NULL ? FAILED : DONE;
}

/* In new content this takes the place of an unchanged static value: the object keeps its value. `KEPT` in Python. */
static PyObject *kept_marker;

/* Replaces each `kept_marker` in new content by the object's old value. UNHANDLED if there is none, since another thread may have
   removed it meanwhile. */
static int keep_values(PyObject **held)
{
    PyObject *name, *value;
    Py_ssize_t cursor = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(held[NEW_VALUES]); i++) {
        if (PyTuple_GetItem(held[NEW_VALUES], i) == kept_marker)
            PyTuple_SetItem(held[NEW_VALUES], i, Py_NewRef(PyTuple_GetItem(held[OLD_VALUES], i)));
    }
    while (held[NEW_ITEMS] != NULL && PyDict_Check(held[NEW_ITEMS]) && PyDict_Next(held[NEW_ITEMS], &cursor, &name, &value)) {
        if (value != kept_marker)
            continue;
        PyObject *old_value = PyDict_GetItemWithError(held[OLD_ITEMS], name);
        NEED(old_value);
        /* The name is in the dictionary already, so its size does not change during the iteration. */
        TRY(PyDict_SetItem(held[NEW_ITEMS], name, old_value));
    }
    return DONE;
}

/* Reads the old and the new content of one object. */
static int prepare(Writing *writing, PyObject *target, PyObject *source)
{
    PyObject **held = writing->held;
    NEED(target);
    NEED(source);
    writing->kind = Py_TYPE(target) == Py_TYPE(source) ? kind_of(Py_TYPE(target)) : NULL;
    if (writing->kind == NULL)
        return UNHANDLED;
    writing->builder = &BUILDERS[writing->kind->shape];
    writing->slots = writing->kind->shape == OTHER ? empty_tuple : writing->kind->slots;
    held[TARGET] = Py_NewRef(target);
    TRY(read_content(target, writing->builder, writing->slots, &held[HOLDER], &held[OLD_VALUES]));
    TRY(read_content(source, writing->builder, writing->slots, &held[NEW_ITEMS], &held[NEW_VALUES]));
    /* A copy, since the original is written to. */
    if (held[HOLDER] != NULL && (held[OLD_ITEMS] = writing->builder->copy(held[HOLDER])) == NULL)
        return FAILED;
    return keep_values(held);
}

/* Writes the new or the old content of one object. */
static int write_content(const Writing *writing, PyObject *items, PyObject *values, int is_rollback)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++) {
        PyObject *slot = PyTuple_GetItem(writing->slots, i);
        TRY(set_attribute(writing->held[TARGET], slot, PyTuple_GetItem(values, i)));
    }
    return writing->builder->write == NULL ? DONE : writing->builder->write(writing, items, is_rollback);
}

/* Writes all objects, one after the other. If one fails, restores all that were written. */
static int write_all(const Writing *writings, Py_ssize_t size)
{
    PyObject *type, *value, *traceback;
    Py_ssize_t written = 0;
    int outcome = DONE;
    for (; outcome == DONE && written < size; written++)
        outcome = write_content(&writings[written], writings[written].held[NEW_ITEMS], writings[written].held[NEW_VALUES], 0);
    if (outcome == DONE)
        return DONE;
    PyErr_Fetch(&type, &value, &traceback);
    while (written-- > 0) {
        const Writing *writing = &writings[written];
        if (write_content(writing, writing->held[OLD_ITEMS], writing->held[OLD_VALUES], 1) != DONE)
            PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    return outcome;
}

/* Writes into targets: [target, source, target, source, ...]. UNHANDLED, with nothing written, if Python has to. */
int write_back(PyObject *pairs)
{
    Py_ssize_t size = PyList_Size(pairs) / 2;
    Writing *writings = PyMem_Calloc((size_t)size + 1, sizeof *writings);
    int outcome = writings == NULL ? no_memory() : DONE;
    for (Py_ssize_t i = 0; outcome == DONE && i < size; i++)
        outcome = prepare(&writings[i], PyList_GetItem(pairs, 2 * i), PyList_GetItem(pairs, 2 * i + 1));
    if (outcome == DONE)
        outcome = write_all(writings, size);
    /* Only now the old contents are released, and finalisers may run. */
    for (Py_ssize_t i = 0; writings != NULL && i < size * NUM_HELD; i++)
        Py_XDECREF(writings[i / NUM_HELD].held[i % NUM_HELD]);
    PyMem_Free(writings);
    return outcome;
}

static PyObject *native_write_back(PyObject *Py_UNUSED(module), PyObject *pairs)
{
    if (!PyList_CheckExact(pairs))
        return raise_null(PyExc_TypeError, "not a list");
    int outcome = write_back(pairs);
    return outcome == FAILED ? NULL : Py_NewRef(outcome == DONE ? Py_True : Py_False);
}

/* --- the row of each shape --------------------------------------------------------------------------------------- */

/* Columns: build, and for writing back: holder, copy, write. A row that ends early leaves the rest to Python. */

#define ITSELF Py_NewRef /* as `holder`: a list or a dictionary holds its items itself */

static const Builder BUILDERS[NUM_SHAPES] = {
    [STATIC] = {build_constant},
    [NOTHING] = {build_constant},
    [TUPLE] = {build_sequence},
    [LIST] = {build_sequence, ITSELF, PySequence_List, write_list},
    [DICT] = {build_dict, ITSELF, PyDict_Copy, write_dict},
    [ORDERED_DICT] = {build_dict, ITSELF, copy_ordered, write_dict},
    [DEFAULT_DICT] = {build_dict, ITSELF, PyDict_Copy, write_dict},
    [DEQUE] = {build_deque, ITSELF, PySequence_List, write_deque},
    [NAMEDTUPLE] = {build_by_call},
    [FIELDS] = {build_object, attributes_of, PyDict_Copy, write_dict},
    [DATACLASS] = {build_object, attributes_of, PyDict_Copy, write_dict},
    [SLOTS] = {build_object},
    [NNX_OBJECT] = {build_object, attributes_of, PyDict_Copy, write_dict},
    [NNX_VARIABLE] = {build_object},
    [NNX_STATE] = {build_object},
    [MODULE] = {build_object, attributes_of, PyDict_Copy, write_dict},
    [OTHER] = {build_by_call},
    [LEAF] = {build_leaf},
    [CALLER_OBJECT] = {build_caller_object},
};

/* --- the functions that Python calls -------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"recipe", native_recipe, METH_VARARGS, "(NodeType, auxiliary data, number of children) -> the parts of a step, or None."},
    {"build", native_build, METH_VARARGS,
     "(structure, leaves, table, caller_objects, update): see `sharedtree.core._walk.build`."},
    {"write_back", native_write_back, METH_O,
     "[target, source, ...]: writes content into targets, all or nothing; False if Python has to."},
    {NULL, NULL, 0, NULL},
};

static NewType types[] = {
    {&program_type, "Program", {"sharedtree._native.Program", sizeof(Program), 0, OBJECT, program_slots}},
};

/* Adds the functions and classes of this file to the module. */
int set_up_build(PyObject *module)
{
    TRY(PyModule_AddFunctions(module, methods));
    TRY(add_types(module, types, sizeof types / sizeof *types));
    kept_marker = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    NEED(kept_marker);
    TRY(PyModule_AddObjectRef(module, "KEPT", kept_marker));
    empty_tuple = PyTuple_New(0);
    NEED(empty_tuple);
    new_object = (newfunc)PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);
    set_slot = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);
    return DONE;
}
