/* The call of a wrapped function: its arguments are walked, their leaves split into groups, the result is built.

A WARM CALL f(m, x), where `f = st.jit(step)`, `m` has a weight `w`, and all leaves are in one group:

    pattern     found in the settings by the number of arguments and the keywords, here 2
    walk        Arguments(m, x)  →  key  →  structure S, leaves [w, x]
    plan        found in S.plans by the pattern's PLAN_KEY: one group, with all leaves
    function    found in the pattern by the plan's labels: `jax.jit` of the function on groups
    operands    LeafGroup([w, x], LeafSelection(S, None))
    result      LeafGroup([y], LeafSelection(T, None))  →  the program of T builds the result from [y]

THE RECORDS, which `transforms._caller_side` makes as named tuples and C reads by position:

    settings    calls of one wrapper under one policy, from `Caller.settings`
        POLICY_IN_FORCE     the policy
        FLAGS               the rules of the walk
        PATTERNS            a pattern for each number of arguments and set of keywords; None if Python does every call
        IN_PLACE            True if changes are written back
        FINISHES            True if C may build the result; False if the transform returns something else, such as a gradient
        WRITE               a Python function that writes what C cannot
    pattern     calls with one number of arguments and one set of keywords
        NAMES_OF            the auxiliary data of the arguments
        BOUND               how they are bound to the function's signature, or None
        PLAN_KEY            the constant part of the key of plans
        KEY_FROM_LEAVES     leaves -> the other part of this key, or None
        DONATES             True if buffers are donated
        LATEST              a `Latest`: the key of the last such call
        TRANSFORMED         labels of the groups -> transformed function
    plan        how the leaves of one structure are split into groups
        STRUCTURE_IN        the structure of the groups
        ORIGINS             its records among those of the walked tree; None if it is the same structure
        LABELS, SELECTIONS  for each group its label and its `LeafSelection`
        SOURCES             for each group the numbers of its leaves among the walked ones; None for all
        CUTS                the ties that are cut

WHAT C CANNOT DO. At each step something may be missing: a call like this never came before, or only Python can do it. Until the
function is called, `deferred` is returned, and Python does the whole call. After that, the function must not run again: Python
gets the result and finishes the call. */

#include "_native.h"

enum { POLICY_IN_FORCE, FLAGS, PATTERNS, IN_PLACE, FINISHES, WRITE, NUM_OF_SETTINGS };
enum { NAMES_OF, BOUND, PLAN_KEY, KEY_FROM_LEAVES, DONATES, LATEST, TRANSFORMED, NUM_OF_PATTERN };
enum { STRUCTURE_IN, ORIGINS, LABELS, SELECTIONS, SOURCES, CUTS, NUM_OF_PLAN };

/* Indices of the parts of objects. */
enum { STRUCTURE_OF, NUMBERS_OF, CALL_OF }; /* of a LeafSelection */
enum { LEAVES_OF, SELECTION_OF };           /* of a LeafGroup */
enum { POLICY_OF, SETTINGS_OF };            /* of a Caller */

PyTypeObject *selection_base, *group_base, *arguments_base;
static PyTypeObject *caller_base;

/* --- leaf groups and arguments ------------------------------------------------------------------------------------ */

/* A `LeafGroup` is a pytree node for JAX. Its children are the leaves of one label, and its auxiliary data is a
   `LeafSelection`. For `vmap` with axis 0 for `w` and `b`, and None for `x`, of a structure with the leaves w, x, b:

       LeafGroup(leaves=[w, b], selection=LeafSelection(structure, numbers=(0, 2)))
       LeafGroup(leaves=[x], selection=LeafSelection(structure, numbers=(1,)))

   JAX compares and hashes selections in each call, so these are in C. Equal structures are one object, so their address
   suffices. */
static PyObject *selection_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"structure", "numbers", "call", NULL};
    PyObject *structure, *numbers = Py_None, *call = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO", names, &structure, &numbers, &call))
        return NULL;
    return new_parts(type, structure, numbers, call);
}

static Py_hash_t selection_hash(PyObject *self)
{
    PyObject **parts = parts_of(self);
    size_t hash = hash_address(parts[STRUCTURE_OF]);
    if (parts[NUMBERS_OF] != NULL && parts[NUMBERS_OF] != Py_None)
        hash ^= (size_t)PyObject_Size(parts[NUMBERS_OF]) + 1;
    PyErr_Clear();
    return (Py_hash_t)hash == -1 ? -2 : (Py_hash_t)hash;
}

static PyObject *selection_compare(PyObject *self, PyObject *other, int op)
{
    if ((op != Py_EQ && op != Py_NE) || Py_TYPE(self) != Py_TYPE(other))
        return Py_NewRef(Py_NotImplemented);
    PyObject **left = parts_of(self), **right = parts_of(other);
    int are_equal = left[STRUCTURE_OF] == right[STRUCTURE_OF];
    if (are_equal && left[NUMBERS_OF] != right[NUMBERS_OF])
        are_equal = left[NUMBERS_OF] != NULL && right[NUMBERS_OF] != NULL
                        ? PyObject_RichCompareBool(left[NUMBERS_OF], right[NUMBERS_OF], Py_EQ)
                        : 0;
    return are_equal < 0 ? NULL : Py_NewRef(are_equal == (op == Py_EQ) ? Py_True : Py_False);
}

static PyType_Slot selection_slots[] = {
    {Py_tp_new, selection_new}, PARTS, {Py_tp_hash, selection_hash}, {Py_tp_richcompare, selection_compare},
    {Py_tp_doc, "The leaves of a structure that are in one group."},
    MEMBERS(FIXED_PART("structure", STRUCTURE_OF, "The structure of the whole tree."),
            FIXED_PART("numbers", NUMBERS_OF, "The numbers of these leaves; None for all."),
            PART("call", CALL_OF, "The caller's side of the call in progress. Not compared.")),
    {0, NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_doc, "The leaves of one label, as one argument."},
    MEMBERS(PART("leaves", LEAVES_OF, "The leaves, in order."),
            PART("selection", SELECTION_OF, "Their numbers in the whole tree.")),
    {0, NULL},
};

static PyType_Slot arguments_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_doc, "The arguments of a call."},
    MEMBERS(PART("aux", AUX_OF, "The names of all arguments."), PART("args", ARGS_OF, "The positional arguments."),
            PART("kwargs", KWARGS_OF, "The keyword arguments.")), {0, NULL},
};

/* The flatten function of groups in JAX's registry. */
static PyObject *native_group_parts(PyObject *Py_UNUSED(module), PyObject *group)
{
    int is_group = PyObject_TypeCheck(group, group_base);
    PyObject *leaves = is_group ? parts_of(group)[LEAVES_OF] : NULL, *selection = is_group ? parts_of(group)[SELECTION_OF] : NULL;
    if (leaves == NULL || selection == NULL)
        return raise_null(is_group ? PyExc_AttributeError : PyExc_TypeError, "not a whole group");
    return PyTuple_Pack(2, leaves, selection);
}

/* The unflatten function of groups. */
static PyObject *native_group_of(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || group_type == NULL)
        return raise_null(PyExc_TypeError, "a selection and leaves");
    OWNED *leaves = PySequence_Tuple(args[1]);
    return leaves == NULL ? NULL : new_parts((PyTypeObject *)group_type, leaves, args[0], NULL);
}

/* --- the whole call ---------------------------------------------------------------------------------------------- */

/* The class of answers for Python: the empty one asks for a whole call, (result, call) asks to finish one. A separate
   class, so that no result of a user is mistaken for one. */
static PyTypeObject *deferred_type;
static PyObject *deferred; /* the empty one */
static PyType_Slot deferred_slots[] = {
    {Py_tp_doc, "Work for Python: a whole call if empty; else to finish a call, with its result and the call."},
    {0, NULL},
};
static PyType_Spec deferred_spec = {"sharedtree._native.Deferred", 0, 0, Py_TPFLAGS_DEFAULT, deferred_slots};

/* The state of a call. All references are borrowed. */
typedef struct {
    PyObject *settings, *pattern;
    Tags *tags;
    PyObject *arguments, *structure, *leaves, *plan;
} Call;

static int is_true(PyObject *record, Py_ssize_t i)
{
    return PyTuple_GetItem(record, i) == Py_True;
}

/* Makes the key of a pattern: 2 for f(m, x), which is the number of positional arguments; (1, ("rate",)) for f(m, rate=r). */
static PyObject *pattern_key(PyObject *args, PyObject *kwargs)
{
    OWNED *count = PyLong_FromSsize_t(PyTuple_Size(args)), *names = NULL;
    PyObject *name, *value;
    Py_ssize_t cursor = 0, i = 0;
    /* The common case needs no tuple. */
    if (count == NULL || PyDict_Size(kwargs) == 0)
        return Py_XNewRef(count);
    names = PyTuple_New(PyDict_Size(kwargs));
    while (names != NULL && PyDict_Next(kwargs, &cursor, &name, &value))
        PyTuple_SetItem(names, i++, Py_NewRef(name));
    return names == NULL ? NULL : PyTuple_Pack(2, count, names);
}

/* Returns the value of a key, a new reference; NULL without an error if there is none, or if the dictionary or key is NULL. */
static PyObject *look_up(PyObject *dict, PyObject *key)
{
    return dict == NULL || key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(dict, key));
}

/* Looks up the pattern of a call. UNHANDLED if Python has to prepare it first. */
static int find_pattern(PyObject *settings, PyObject *args, PyObject *kwargs, PyObject **pattern)
{
    if (!is_record(settings, NUM_OF_SETTINGS) || !PyLong_Check(PyTuple_GetItem(settings, FLAGS)))
        return raise_failed(PyExc_TypeError, "no settings of calls");
    if (!PyDict_CheckExact(PyTuple_GetItem(settings, PATTERNS)))
        return UNHANDLED;
    OWNED *key = pattern_key(args, kwargs);
    *pattern = look_up(PyTuple_GetItem(settings, PATTERNS), key);
    NEED(*pattern);
    /* None marks patterns of calls that only Python can do. */
    if (*pattern == Py_None)
        return UNHANDLED;
    if (!is_record(*pattern, NUM_OF_PATTERN) || !is_tuple_of(PyTuple_GetItem(*pattern, NAMES_OF), 3) ||
        Py_TYPE(PyTuple_GetItem(*pattern, LATEST)) != latest_type || !PyDict_CheckExact(PyTuple_GetItem(*pattern, TRANSFORMED)))
        return raise_failed(PyExc_TypeError, "not a pattern");
    return DONE;
}

/* Binds the arguments of a call to a signature. `bound` is a tuple: the values that come before all arguments, which the caller has
   put into `bound_args`; the names of the keywords that become positional; and the names of the other keywords. Appends the
   positional arguments and the former keywords to `bound_args`, and enters the others into `bound_kwargs`. */
static int bind(PyObject *bound, PyObject *args, PyObject *kwargs, PyObject *bound_args, PyObject *bound_kwargs)
{
    PyObject *by_keyword = PyTuple_GetItem(bound, 1), *by_name = PyTuple_GetItem(bound, 2);
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
        TRY(PyList_Append(bound_args, PyTuple_GetItem(args, i)));
    for (Py_ssize_t i = 0; i < PyTuple_Size(by_keyword); i++)
        TRY(append_new(bound_args, look_up(kwargs, PyTuple_GetItem(by_keyword, i))));
    for (Py_ssize_t i = 0; i < PyTuple_Size(by_name); i++) {
        PyObject *name = PyTuple_GetItem(by_name, i), *value = PyDict_GetItemWithError(kwargs, name);
        NEED(value);
        TRY(PyDict_SetItem(bound_kwargs, name, value));
    }
    return DONE;
}

/* Makes the `Arguments` of a call, bound to the signature if the pattern says so. */
static PyObject *new_arguments(PyObject *pattern, PyObject *args, PyObject *kwargs)
{
    PyTypeObject *type = (PyTypeObject *)arguments_type;
    PyObject *names = PyTuple_GetItem(pattern, NAMES_OF), *bound = PyTuple_GetItem(pattern, BOUND);
    if (bound == Py_None)
        return new_parts(type, names, args, kwargs);
    OWNED *bound_list = PySequence_List(PyTuple_GetItem(bound, 0)), *bound_kwargs = bound_list == NULL ? NULL : PyDict_New();
    if (bound_kwargs == NULL || bind(bound, args, kwargs, bound_list, bound_kwargs) != DONE)
        return NULL;
    OWNED *bound_args = PyList_AsTuple(bound_list);
    return bound_args == NULL ? NULL : new_parts(type, names, bound_args, bound_kwargs);
}

/* Looks up the plan of a structure for a pattern of calls. UNHANDLED if there is none yet. */
static int plan_of(PyObject *pattern, PyObject *structure, PyObject *leaves, PyObject **plan)
{
    PyObject *key_from_leaves = PyTuple_GetItem(pattern, KEY_FROM_LEAVES);
    OWNED *plans = PyObject_GetAttr(structure, name_plans), *key = Py_NewRef(PyTuple_GetItem(pattern, PLAN_KEY)), *answers = NULL;
    NEED(plans);
    /* Some plans depend on the leaves, too: those of `grad` on which ones are floating point. Python answers, with None if it has
       to do the call. */
    if (key_from_leaves != Py_None) {
        answers = PyObject_CallFunctionObjArgs(key_from_leaves, leaves, NULL);
        NEED(answers);
        if (answers == Py_None)
            return UNHANDLED;
        replace(&key, PyTuple_Pack(2, key, answers));
    }
    *plan = look_up(plans, key);
    NEED(*plan);
    return DONE;
}

/* Up to so many objects are compared pair by pair, since it takes longer to make a table. */
#define MAX_PAIRWISE 32

static int is_among(const void *object, const void *const *objects, Py_ssize_t count)
{
    int is_there = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        is_there |= objects[i] == object;
    return is_there;
}

/* Returns 1 if no object, or no array, is in a list or tuple twice; -1 on an error. */
static int are_distinct(PyObject *items, int only_arrays)
{
    Table seen = {0};
    const void *first[MAX_PAIRWISE];
    Py_ssize_t size = length_of(items), count = 0;
    int are_different = 1;
    for (Py_ssize_t i = 0; i < size && are_different == 1; i++) {
        PyObject *object = item_at(items, i);
        if (only_arrays && !is_instance(object, concrete_array))
            continue;
        if (size <= MAX_PAIRWISE) {
            are_different = !is_among(object, first, count);
            first[count++] = object;
            continue;
        }
        are_different = get_value(&seen, object) == NO_VALUE;
        if (set_value(&seen, object, 0) < 0)
            are_different = -1;
    }
    free_table(&seen);
    return are_different;
}

/* Makes the i-th group of a call. The first one has a new selection, through which the trace finds the call. */
static PyObject *new_group(const Call *c, Py_ssize_t i, PyObject *call, PyObject **first)
{
    PyObject *source = PyTuple_GetItem(PyTuple_GetItem(c->plan, SOURCES), i);
    OWNED *selection = Py_XNewRef(PyTuple_GetItem(PyTuple_GetItem(c->plan, SELECTIONS), i));
    OWNED *group_leaves = source == Py_None ? Py_NewRef(c->leaves) : items_at(c->leaves, source, NULL, 1);
    if (i == 0 && is_instance(selection, selection_type)) {
        PyObject **parts = parts_of(selection);
        replace(&selection, new_parts((PyTypeObject *)selection_type, parts[STRUCTURE_OF], parts[NUMBERS_OF], call));
        *first = Py_XNewRef(selection);
    }
    if (group_leaves == NULL || selection == NULL)
        return NULL;
    return new_parts((PyTypeObject *)group_type, group_leaves, selection, NULL);
}

/* Collects the operands of the transformed function: the groups of the plan, then the static arguments. */
static int selection(const Call *c, PyObject *call, PyObject *operands, PyObject **first)
{
    PyObject *args = parts_of(c->arguments)[ARGS_OF], *kwargs = parts_of(c->arguments)[KWARGS_OF];
    PyObject *aux = PyTuple_GetItem(c->pattern, NAMES_OF);
    PyObject *names = PyTuple_GetItem(aux, 0), *static_names = PyTuple_GetItem(aux, 2);
    for (Py_ssize_t i = 0; i < PyTuple_Size(PyTuple_GetItem(c->plan, SELECTIONS)); i++)
        TRY(append_new(operands, new_group(c, i, call, first)));
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
        if (PyTuple_GetItem(names, i) == Py_None)
            TRY(append_new(operands, Py_XNewRef(PyTuple_GetItem(args, i))));
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(static_names); i++)
        TRY(append_new(operands, look_up(kwargs, PyTuple_GetItem(static_names, i))));
    return DONE;
}

/* Reads the leaves of a group and the parts of its selection, borrowed. Returns 0 if the object is no group. */
static int read_group(PyObject *group, PyObject **leaves, PyObject ***selection)
{
    if (!is_instance(group, group_type) || parts_of(group)[LEAVES_OF] == NULL || parts_of(group)[SELECTION_OF] == NULL ||
        !is_instance(parts_of(group)[SELECTION_OF], selection_type))
        return 0;
    *leaves = parts_of(group)[LEAVES_OF], *selection = parts_of(parts_of(group)[SELECTION_OF]);
    return 1;
}

/* Puts the leaves of a group in their places among the leaves of the whole tree. */
static int put_leaves(PyObject *all_leaves, PyObject *leaves, PyObject *numbers)
{
    OWNED *new_leaves = PySequence_Tuple(leaves);
    Py_ssize_t size = new_leaves == NULL ? -1 : PyTuple_Size(new_leaves);
    if (size < 0 || size != PyTuple_Size(numbers))
        return FAILED;
    for (Py_ssize_t i = 0; i < size; i++)
        TRY(PyList_SetItem(all_leaves, PyLong_AsSsize_t(PyTuple_GetItem(numbers, i)), Py_NewRef(PyTuple_GetItem(new_leaves, i))));
    return DONE;
}

/* Collects the leaves of a result from its groups, and reads its structure. FAILED, perhaps without an error, if the result does
   not consist of groups. */
static int gather(PyObject *result, PyObject **structure, PyObject **leaves)
{
    OWNED *groups = NULL;
    PyObject *group_leaves, **selection;
    if (read_group(result, &group_leaves, &selection)) {
        *structure = Py_NewRef(selection[STRUCTURE_OF]);
        if (selection[NUMBERS_OF] == Py_None)
            *leaves = PyTuple_CheckExact(group_leaves) ? Py_NewRef(group_leaves) : PySequence_List(group_leaves);
        return *leaves == NULL ? FAILED : DONE;
    }
    if (is_instance(result, groups_type) && (groups = get_slot(groups_parts, result, NULL)) != NULL)
        replace(&groups, PySequence_Tuple(groups));
    for (Py_ssize_t i = 0; groups != NULL && i < PyTuple_Size(groups); i++) {
        if (!read_group(PyTuple_GetItem(groups, i), &group_leaves, &selection) || selection[NUMBERS_OF] == Py_None)
            return FAILED;
        if (i == 0) {
            *structure = Py_NewRef(selection[STRUCTURE_OF]);
            OWNED *count = PyObject_GetAttr(*structure, name_num_leaves), *one_none = Py_BuildValue("[O]", Py_None);
            *leaves = count == NULL || one_none == NULL ? NULL : PySequence_Repeat(one_none, PyLong_AsSsize_t(count));
        }
        NEED(*leaves);
        TRY(put_leaves(*leaves, group_leaves, selection[NUMBERS_OF]));
    }
    return *leaves == NULL ? FAILED : DONE;
}

/* Returns 1 if a JAX array is committed to a device; -1 on an error. */
static int is_committed(PyObject *array)
{
    OWNED *committed = PyObject_GetAttr(array, name_committed);
    return committed == NULL ? -1 : committed == Py_True;
}

/* Returns 1 if vanilla `jax.jit` would return equal arrays for the objects that pass through: all of their leaves are JAX arrays,
   and are committed as its outputs would be. `jax.jit` commits all outputs if any input is committed. The structure's plans say
   which leaves to ask. Returns -1 on an error, and 0 also if only Python knows. */
static int passes_through(PyObject *structure, PyObject *caller_numbers, PyObject *leaves)
{
    OWNED *plans = PyObject_GetAttr(structure, name_plans), *places = look_up(plans, caller_numbers);
    int are_committed = 1;
    if (places == NULL)
        return PyErr_Occurred() ? -1 : 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(places); i++) {
        PyObject *leaf = PyList_GetItem(leaves, PyLong_AsSsize_t(PyTuple_GetItem(places, i)));
        if (leaf == NULL || !is_instance(leaf, concrete_array))
            return leaf == NULL ? -1 : 0;
        int committed = is_committed(leaf);
        if (committed < 0)
            return -1;
        are_committed &= committed;
    }
    for (Py_ssize_t i = 0; !are_committed && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        Kind *kind = kind_of(Py_TYPE(leaf));
        int is_array = is_instance(leaf, concrete_array), committed = is_array ? is_committed(leaf) : 0;
        int is_number = kind != NULL && (kind->shape == NUMBER || kind->shape == NUMPY_ARRAY || kind->shape == NUMPY_NUMBER);
        if (committed || !(is_array || is_number))
            return committed < 0 ? -1 : 0;
    }
    return 1;
}

/* Returns 1 if C can finish a call with such a result; 0 if Python has to; -1 on an error. It is Python's work if the program says
   so, if there is content for objects of the caller without `in_place`, if one leaf comes twice, or if an object of the caller
   would not pass through as it is. */
static int can_finish(const Call *c, const Program *program, PyObject *leaves)
{
    int in_place = is_true(c->settings, IN_PLACE);
    if (program->is_for_python || (program->updates && !in_place))
        return 0;
    int are_different = are_distinct(leaves, 0);
    if (are_different != 1 || program->caller_numbers == Py_None || in_place)
        return are_different;
    return passes_through(c->structure, program->caller_numbers, c->leaves);
}

/* Builds the result of a call from its groups, and under `in_place` writes content back. Returns `deferred`, or NULL without an
   error, if Python has to finish the call. */
static PyObject *finish_result(const Call *c, PyObject *result)
{
    OWNED *structure = NULL, *leaves = NULL, *program = NULL, *table = NULL, *pending = NULL, *object = NULL;
    if (gather(result, &structure, &leaves) != DONE || (program = program_of(structure)) == NULL)
        return NULL;
    int is_possible = can_finish(c, (Program *)program, leaves);
    if (is_possible != 1)
        return is_possible < 0 ? NULL : Py_NewRef(deferred);
    table = PyList_New(0), pending = PyList_New(0);
    if (table == NULL || pending == NULL || build_onto(table, program, leaves, c->tags->objects, pending) != DONE)
        return NULL;
    object = Py_XNewRef(PyList_GetItem(table, ((Program *)program)->root));
    if (object == NULL || !is_true(c->settings, IN_PLACE))
        return Py_XNewRef(object);
    /* Python writes whatever C cannot. The root is a tuple whose last item is the result of the function. */
    int outcome = write_back(pending);
    OWNED *written = NULL;
    if (outcome == UNHANDLED)
        written = PyObject_CallFunctionObjArgs(PyTuple_GetItem(c->settings, WRITE), pending, NULL);
    if (outcome != DONE && written == NULL)
        return NULL;
    return Py_XNewRef(PyTuple_GetItem(object, PyTuple_Size(object) - 1));
}

/* Calls the transformed function and finishes its result. */
static PyObject *call_transformed(const Call *c, PyObject *transformed)
{
    OWNED *trace = PyObject_GetAttr(trace_holder, name_trace), *first = NULL, *result = NULL;
    OWNED *call = trace == NULL ? NULL : PyTuple_Pack(5, c->arguments, c->plan, c->leaves, c->tags->objects, trace);
    OWNED *operands = call == NULL ? NULL : PyList_New(0);
    PyObject *outcome = NULL, *type, *value, *traceback;
    if (operands != NULL && selection(c, call, operands, &first) == DONE) {
        OWNED *args = PyList_AsTuple(operands);
        result = args == NULL ? NULL : PyObject_Call(transformed, args, NULL);
    }
    if (result != NULL)
        outcome = is_true(c->settings, FINISHES) ? finish_result(c, result) : Py_NewRef(deferred);
    if (outcome == deferred || (outcome == NULL && result != NULL && !PyErr_Occurred())) {
        /* The trace may have replaced the call in the first selection. */
        OWNED *call_part = Py_XNewRef(first == NULL ? call : parts_of(first)[CALL_OF]);
        OWNED *pair = PyTuple_Pack(2, result, call_part);
        replace(&outcome, pair == NULL ? NULL : PyObject_CallFunctionObjArgs((PyObject *)deferred_type, pair, NULL));
    }
    /* JAX's caches keep selections alive, and these must not keep the arguments alive. */
    if (first != NULL) {
        PyErr_Fetch(&type, &value, &traceback);
        replace(&parts_of(first)[CALL_OF], none());
        PyErr_Restore(type, value, traceback);
    }
    return outcome;
}

/* Walks the arguments and looks up the plan and the transformed function. UNHANDLED if Python has to do the call. */
static int read_call(Call *c, Walk *w, PyObject **structure, PyObject **plan, PyObject **transformed)
{
    TRY(walk_tree(w, c->arguments, entries, PyTuple_GetItem(c->pattern, LATEST), structure));
    TRY(plan_of(c->pattern, *structure, w->leaves, plan));
    if (!is_record(*plan, NUM_OF_PLAN) || PyTuple_GetItem(*plan, ORIGINS) != Py_None ||
        PyObject_Size(PyTuple_GetItem(*plan, CUTS)) != 0)
        return UNHANDLED; /* some ties are cut between groups */
    c->structure = *structure, c->leaves = w->leaves, c->plan = *plan;
    *transformed = look_up(PyTuple_GetItem(c->pattern, TRANSFORMED), PyTuple_GetItem(*plan, LABELS));
    NEED(*transformed);
    /* XLA refuses to donate one buffer twice. */
    int is_separate = is_true(c->pattern, DONATES) ? are_distinct(w->leaves, 1) : 1;
    return is_separate < 0 ? FAILED : is_separate ? DONE : UNHANDLED;
}

/* Does a call. Returns the result; `deferred` if Python has to do the call, in which case the function was not called; or a
   `Deferred` of (result, call) if Python has to finish it. */
static PyObject *call_with_settings(PyObject *settings, PyObject *args, PyObject *kwargs)
{
    OWNED *pattern = NULL, *tags = NULL, *arguments = NULL, *structure = NULL, *plan = NULL, *transformed = NULL;
    PyObject *result = NULL;
    int outcome = find_pattern(settings, args, kwargs, &pattern);
    if (outcome != DONE)
        return outcome == UNHANDLED ? Py_NewRef(deferred) : NULL;
    tags = tags_new(tags_type, NULL, NULL);
    arguments = tags == NULL ? NULL : new_arguments(pattern, args, kwargs);
    long flags = PyLong_AsLong(PyTuple_GetItem(settings, FLAGS));
    if (arguments == NULL || PyErr_Occurred())
        return NULL;
    Call c = {.settings = settings, .pattern = pattern, .tags = (Tags *)tags, .arguments = arguments};
    Walk w = new_walk(c.tags, flags);
    outcome = read_call(&c, &w, &structure, &plan, &transformed);
    if (outcome != FAILED)
        result = outcome == UNHANDLED ? Py_NewRef(deferred) : call_transformed(&c, transformed);
    end_walk(&w);
    return result;
}

static PyObject *native_call(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_CheckExact(args[1]) || !PyDict_CheckExact(args[2]) || arguments_type == NULL)
        return raise_null(PyExc_TypeError, "not a call");
    return call_with_settings(args[0], args[1], args[2]);
}

static Py_ssize_t num_contexts; /* the number of contexts that are entered now, in all threads */

static PyObject *native_count_contexts(PyObject *Py_UNUSED(module), PyObject *change)
{
    Py_ssize_t num_more = PyLong_AsSsize_t(change);
    if (num_more == -1 && PyErr_Occurred())
        return NULL;
    num_contexts += num_more;
    return PyLong_FromSsize_t(num_contexts);
}

/* Finds the policy in force, and the wrapper's settings under it, NULL if it has none yet. Both are new references. */
static int read_caller(PyObject *self, PyObject **policy, PyObject **settings_in_force)
{
    OWNED *policy_option = Py_XNewRef(parts_of(self)[POLICY_OF]);
    if (policy_option == Py_None && num_contexts == 0)
        replace(&policy_option, Py_NewRef(default_policy));
    int is_policy = policy_option != NULL && is_instance(policy_option, policy_type);
    *policy = is_policy ? Py_NewRef(policy_option) : PyObject_CallFunctionObjArgs(current_policy, policy_option, NULL);
    PyObject *settings = parts_of(self)[SETTINGS_OF]; /* read after the call into Python, which may replace it */
    if (settings != NULL && is_record(settings, NUM_OF_SETTINGS) && PyTuple_GetItem(settings, POLICY_IN_FORCE) == *policy)
        *settings_in_force = Py_NewRef(settings);
    return *policy == NULL ? FAILED : DONE;
}

/* Calls a wrapped function: `Caller.__call__`. Python's `go_on` gets what is deferred, and each error, to raise it with paths. */
static PyObject *caller_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    OWNED *policy = NULL, *settings = NULL, *error = NULL, *keywords = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    if (keywords == NULL || read_caller(self, &policy, &settings) != DONE)
        return NULL;
    PyObject *result = settings == NULL ? Py_NewRef(deferred) : call_with_settings(settings, args, keywords);
    if (result == NULL) {
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL)
            PyException_SetTraceback(error, traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
    }
    if (result == NULL || Py_TYPE(result) == deferred_type) {
        PyObject *remainder = result == NULL ? error : result;
        replace(&result, PyObject_CallMethodObjArgs(self, name_go_on, remainder, policy, args, keywords, NULL));
    }
    return result;
}

static PyType_Slot caller_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_call, caller_call},
    MEMBERS(PART("policy", POLICY_OF, "The policy that the user chose, or None."),
            PART("settings", SETTINGS_OF, "The settings for calls under one policy.")),
    {Py_tp_doc, "A function under a transform. Its `go_on` gets (deferred work or error, policy, args, kwargs)."}, {0, NULL},
};

/* --- the functions that Python calls -------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"group_parts", native_group_parts, METH_O, "A group -> (its leaves, its selection)."},
    {"group_of", (PyCFunction)(void (*)(void))native_group_of, METH_FASTCALL, "(selection, leaves) -> a group."},
    {"count_contexts", native_count_contexts, METH_O,
     "Adds to the number of contexts that are entered, in all threads, and returns it."},
    {"call", (PyCFunction)(void (*)(void))native_call, METH_FASTCALL,
     "(settings, args, kwargs) -> the result, or a `Deferred`."},
    {NULL, NULL, 0, NULL},
};

static NewType types[] = {
    {&selection_base, "LeafSelection", {"sharedtree._native.LeafSelection", sizeof(Parts), 0, BASE, selection_slots}},
    {&group_base, "LeafGroup", {"sharedtree._native.LeafGroup", sizeof(Parts), 0, BASE, group_slots}},
    {&arguments_base, "Arguments", {"sharedtree._native.Arguments", sizeof(Parts), 0, BASE, arguments_slots}},
    {&caller_base, "Caller", {"sharedtree._native.Caller", sizeof(Parts), 0, BASE, caller_slots}},
};

int set_up_call(PyObject *module)
{
    TRY(PyModule_AddFunctions(module, methods));
    TRY(add_types(module, types, sizeof types / sizeof *types));
    OWNED *bases = PyTuple_Pack(1, &PyTuple_Type);
    deferred_type = bases == NULL ? NULL : (PyTypeObject *)PyType_FromSpecWithBases(&deferred_spec, bases);
    deferred = deferred_type == NULL ? NULL : PyObject_CallNoArgs((PyObject *)deferred_type);
    NEED(deferred);
    TRY(PyModule_AddObjectRef(module, "Deferred", (PyObject *)deferred_type));
    return DONE;
}
