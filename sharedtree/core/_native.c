/* The walk over a DAG, and the way back, in C. `_walk.py` is the reference: this gives the same or nothing.

`walk` takes a tree apart and describes what it met by a text of bytes, the *key*. A tree with the same key has the same
structure, so a dictionary leads from the key to the structure, and no record is made. For
    Pair(w, [w, 3])     with an Equinox module `Pair`, under Equinox's convention
the key is, after a header:  F <Pair> 0   L   N <list> 2   R <number of w>   S i 3.

    F kind statics          a node that is read field by field          R number   an object that was seen before
    A kind there statics    the same, with some fields absent           L          a traced leaf
    N kind n                a plain container; for dicts, its keys, and whatever else a container has beside its items
                                                                        S value    a static leaf
    O kind form statics     an NNX object
    M kind kinds statics    a `sharedtree.Module`
    G kind n aux            any other node

The children of a node follow it. A static value is written out if it is made of what nobody can confuse (N T F i d s, and
( [ { for containers); any other is its address and that of its class, P, and is pinned: whoever keeps the key has to keep
the pins alive. What need not be the same value for ever has a token in its place, V, one for each value, which Python gives.

What stands for a node follows from its children and its auxiliary data, however it was read. So the reference, which reads
a tree for which no structure is known, has the same key written from what it read (`key_of`), and no object is read twice.

A call is such a tree: the root is an `Arguments`. `call` walks over it, deals its leaves in hands by the plan that the
structure has, calls what is transformed with these, gathers the leaves of the result from its hands, and builds it.
Whatever it does not know it leaves to Python before anything was called.

Rules of this file. Nothing recurses but over static values, to a fixed depth.
Whatever a call into Python could free is held by a strong reference before: children on a stack of their own, objects
in the tags. No borrowed reference is used after such a call. All that is uncommon, and each error, ends the walk, and
the caller asks the reference.

Only the limited API is used, and no `Py_RETURN_NONE` and the like: those of Python 3.12 and 3.13 count no reference, and
what was compiled with them is loaded by 3.11, too, where None is counted. The interpreter's lock is needed: free-threaded
Python does not load this. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_DEPTH 100000
#define MAX_STATIC_DEPTH 16
#define MAX_STATIC_PARTS 100000
#define MAX_TEXT 4096
#define MAX_METADATA 64 /* entries that are sorted by insertion */
#define MAX_LAYOUTS 4096 /* that are asked for of a class; of a list each length is one */

enum { FILTERED = 1, CONTAINERS = 2, ARRAYS = 4, VALUES = 8 };
enum { JAX, EQUINOX, ANY, INHERITED, IN_VARIABLE, OUTSIDE };
enum { FAILED = -1, DONE = 0, OPENED = 1 };

/* Puts another reference, or NULL, in the place of one, which may run finalisers. */
static void replace(PyObject **place, PyObject *object)
{
    PyObject *before = *place;
    *place = object;
    Py_XDECREF(before);
}

/* --- classes that are known by address, and are not kept alive -------------------------------------------------- */

static PyObject *references; /* (address of a class, address of a function) -> the reference that calls it when the class goes */

/* Called with the key of an entry as `self`, and the reference. */
static PyObject *gone(PyObject *key, PyObject *reference)
{
    int (*then)(void *) = NULL;
    void *address = PyLong_AsVoidPtr(PyTuple_GetItem(key, 0)), *function = PyLong_AsVoidPtr(PyTuple_GetItem(key, 1));
    memcpy(&then, &function, sizeof then);
    if (then(address) < 0)
        return NULL;
    if (PyDict_GetItemWithError(references, key) == reference && PyDict_DelItem(references, key) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

static PyMethodDef gone_method = {"gone", gone, METH_O, "A class is no more."};

/* Calls a function with the address of a class when the class goes. It runs no Python. */
static int when_gone(PyObject *type, int (*then)(void *))
{
    void *function;
    memcpy(&function, &then, sizeof function);
    PyObject *key = Py_BuildValue("NN", PyLong_FromVoidPtr(type), PyLong_FromVoidPtr(function));
    PyObject *callback = key == NULL ? NULL : PyCFunction_New(&gone_method, key);
    PyObject *reference = callback == NULL ? NULL : PyWeakref_NewRef(type, callback);
    int outcome = reference == NULL ? -1 : PyDict_SetItem(references, key, reference);
    Py_XDECREF(reference);
    Py_XDECREF(callback);
    Py_XDECREF(key);
    return outcome;
}

static size_t mixed(const void *pointer)
{
    uint64_t x = (uint64_t)(uintptr_t)pointer;
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    return (size_t)(x ^ (x >> 29));
}

/* What is known of a value, or of all instances of a class, as long as that lives. */
typedef struct {
    PyObject *value;    /* its address; NULL in a free slot */
    PyTypeObject *type; /* that it had; NULL where it is gone */
    PyObject *token;    /* a weak reference to what stands for it in keys, which may lead back to it; NULL for a class whose
                           instances are the same for ever */
    Py_ssize_t holders; /* a weak reference, and each `Held` */
} Fact;

static Fact *facts; /* open addressing */
static size_t facts_size, num_facts;

static Fact *place_of_fact(Fact *table, size_t size, const void *value)
{
    size_t i = mixed(value) & (size - 1);
    while (table[i].value != NULL && table[i].value != value)
        i = (i + 1) & (size - 1);
    return &table[i];
}

/* What is known of an object, if it is still of the class that it was of. */
static Fact *fact_of(PyObject *value, PyTypeObject *type)
{
    Fact *fact = facts_size == 0 ? NULL : place_of_fact(facts, facts_size, value);
    return fact == NULL || fact->value == NULL || fact->type != type ? NULL : fact;
}

static int is_settled(PyTypeObject *type)
{
    Fact *fact = fact_of((PyObject *)type, &PyType_Type);
    return fact != NULL && fact->token == NULL;
}

/* One who keeps a value, or is told when it goes, is no more. Runs finalisers of tokens last. */
static int let_go_of(void *value)
{
    Fact *fact = place_of_fact(facts, facts_size, value);
    if (fact->value == NULL || fact->type == NULL || --fact->holders > 0)
        return 0;
    PyObject *token = fact->token;
    fact->type = NULL, fact->token = NULL;
    Py_XDECREF(token);
    return 0;
}

/* Remembers something of a value, of whose end the caller takes care. */
static int add_fact(PyObject *value, PyTypeObject *type, PyObject *of_token)
{
    PyObject *token = of_token == NULL ? NULL : PyWeakref_NewRef(of_token, NULL);
    if (token == NULL && of_token != NULL)
        return -1;
    if (2 * (num_facts + 1) > facts_size) {
        size_t size = facts_size ? 2 * facts_size : 64;
        Fact *table = PyMem_Calloc(size, sizeof *table);
        if (table == NULL) {
            Py_XDECREF(token);
            PyErr_NoMemory();
            return -1;
        }
        num_facts = 0;
        for (size_t i = 0; i < facts_size; i++) {
            if (facts[i].value != NULL && facts[i].type != NULL) {
                *place_of_fact(table, size, facts[i].value) = facts[i];
                num_facts++;
            }
        }
        PyMem_Free(facts);
        facts = table;
        facts_size = size;
    }
    Fact *fact = place_of_fact(facts, facts_size, value);
    if (fact->value != NULL && fact->type != NULL) {
        fact->holders++;
        replace(&fact->token, token); /* which may be another, if the first one is gone */
        return 0;
    }
    num_facts += fact->value == NULL;
    *fact = (Fact){value, type, token, 1};
    return 0;
}

/* What stands for a value in keys, if that is known; a new reference. NULL otherwise, without an error. */
static PyObject *token_of(PyObject *value, PyTypeObject *type)
{
    Fact *fact = fact_of(value, type);
    PyObject *token = fact == NULL || fact->token == NULL ? NULL : PyObject_CallNoArgs(fact->token);
    if (token == Py_None)
        replace(&token, NULL);
    PyErr_Clear();
    return token;
}

/* Remembers something of a value as long as it lives. 0 without it if that cannot be told. */
static int add_fact_weakly(PyObject *value, PyTypeObject *type, PyObject *token)
{
    Fact *known = facts_size == 0 ? NULL : place_of_fact(facts, facts_size, value);
    if (known != NULL && known->value != NULL && known->type != NULL) {
        /* Its token may have been another, which is gone. */
        PyObject *reference = token == NULL || known->token == NULL ? NULL : PyWeakref_NewRef(token, NULL);
        if (reference != NULL)
            replace(&known->token, reference);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (when_gone(value, let_go_of) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    return add_fact(value, type, token);
}

/* Values that are kept, and what stands for each in keys, so that they are known again by address. */
typedef struct {
    PyObject_HEAD
    PyObject *pairs;
} Held;

static int held_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Held *)self)->pairs);
    return 0;
}

/* There is no `tp_clear`: the values cannot change, so no cycle leads through them alone. */
static void held_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject *pairs = ((Held *)self)->pairs;
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(pairs); i += 2)
        let_go_of(PyTuple_GetItem(pairs, i));
    Py_DECREF(pairs);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot held_slots[] = {
    {Py_tp_dealloc, held_dealloc},
    {Py_tp_traverse, held_traverse},
    {Py_tp_doc, "Values that are kept, and known again by address meanwhile."},
    {0, NULL},
};
static PyType_Spec held_spec = {"sharedtree._native.Held", sizeof(Held), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, held_slots};
static PyTypeObject *held_type;

/* (value, token, value, token, ...) -> what keeps them. */
static PyObject *native_hold(PyObject *module, PyObject *pairs)
{
    (void)module;
    if (!PyTuple_CheckExact(pairs) || PyTuple_Size(pairs) % 2) {
        PyErr_SetString(PyExc_TypeError, "values and tokens, in turn");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(held_type, Py_tp_alloc);
    PyObject *kept = PyTuple_GetSlice(pairs, 0, 0);
    Held *held = kept == NULL ? NULL : (Held *)alloc(held_type, 0);
    if (held == NULL) {
        Py_XDECREF(kept);
        return NULL;
    }
    held->pairs = kept;
    /* As far as it gets: what is not held is asked for again. */
    Py_ssize_t done = 0;
    while (done < PyTuple_Size(pairs)) {
        PyObject *value = PyTuple_GetItem(pairs, done);
        if (add_fact(value, Py_TYPE(value), PyTuple_GetItem(pairs, done + 1)) < 0)
            break;
        done += 2;
    }
    kept = PyTuple_GetSlice(pairs, 0, done);
    if (kept == NULL) {
        while (done > 0)
            let_go_of(PyTuple_GetItem(pairs, done -= 2));
    } else {
        replace(&held->pairs, kept);
    }
    PyErr_Clear();
    return (PyObject *)held;
}

/* --- kinds: what is known of a class, as long as it lives -------------------------------------------------------- */

enum {
    /* Leaves: numbers that JAX traces and Equinox does not, what is static for both, arrays. */
    NUMBER, STATIC, NUMPY_ARRAY, NUMPY_NUMBER, JAX_ARRAY,
    /* Nodes. */
    NOTHING, TUPLE, LIST, DICT, ORDERED_DICT, DEFAULT_DICT, DEQUE, NAMEDTUPLE, ARGUMENTS, FIELDS, DATACLASS, SLOTS,
    NNX_OBJECT, NNX_VARIABLE, NNX_STATE, MODULE, OTHER
};

/* The names that objects of an NNX class have, in order, and what their flatten makes of each. See `libraries/_nnx_layouts.py`. */
typedef struct Layout {
    struct Layout *next;      /* with names of the same hash */
    uint32_t number;          /* of the form, which layouts share that differ in the order of the names */
    Py_ssize_t num_traced;
    PyObject *form;           /* the names of the children, of what is static, and the mapping's content */
    PyObject *names;
    int *places;              /* of each among the children and then the static ones; -1 for the mapping, which is in the form */
    PyObject *marked;         /* the names in the mapping, in order */
    PyObject *marks;          /* bytes, whether each of these is a child */
} Layout;

typedef struct {
    PyTypeObject *type;
    int shape;
    uint32_t number;
    int is_plain, is_mutable, is_known_to_jax, convention;
    int is_guess;             /* of a leaf whose class may yet be registered as a node's */
    Py_ssize_t epoch;         /* of a guess: when it was made */
    int is_rebuilt;           /* whether `build` may put instances together by itself */
    PyObject *node_type;      /* the NodeType; NULL for leaves */
    PyObject *take_apart;     /* OTHER: instance -> (children, aux) */
    PyObject *order;          /* FIELDS, DATACLASS, SLOTS: all names that fields declare, in order */
    PyObject *is_static;      /* bytes, one for each name in `order` */
    PyObject *places;         /* DATACLASS, SLOTS: bytes, where each name is in `traced` or `statics` */
    PyObject *traced, *statics; /* all names; of FIELDS also those that no field declares */
    int is_in_order;          /* whether `traced` is as in `order` */
    Layout **layouts;         /* NNX_OBJECT: by the names, in lists; NULL until there are some */
    uint32_t num_layouts;     /* that were asked for, found or not */
} Kind;

static Kind **kinds; /* open addressing by type, which each kind keeps alive but that of a namedtuple; kinds are never freed */
static size_t kinds_size, num_placed;
static uint32_t num_kinds;
static char nobody; /* its address is the type of a kind whose class is gone */

static Py_ssize_t epoch_of_nodes; /* how often a node type was registered with the package; JAX counts its own */
static PyObject *registry;        /* of JAX's node types */

/* Before which registration everything that is known now was found out. */
static Py_ssize_t epoch(void)
{
    return registry == NULL ? -1 : epoch_of_nodes + PyDict_Size(registry);
}

static PyObject *entries; /* key -> reference to its structure */
static PyObject *meet;  /* (object, convention) -> what its class is, or for a leaf 0 static, 1 traced, 2 with identity */
static PyObject *settle; /* static values -> for each what `settle_pin` says */
static PyObject *dtypes; /* those that JAX traces, of which there is one object each */
static PyObject *describe; /* NodeType -> what its class is */
static PyTypeObject *missing_type; /* of the marker for attributes that were never set, or NULL */
static PyObject *leaf_op;
static PyTypeObject *node_op, *static_op, *given_op, *update_op;
static PyObject *empty_tuple, *name_aux, *name_type, *name_value, *name_is_mutable, *name_thaw, *name_unflatten;
static PyObject *name_records, *name_root, *name_given, *name_is_noted, *name_program, *name_plans, *name_num_leaves, *name_dtype,
    *name_committed, *name_maxlen, *name_factory, *name_go_on;
static newfunc new_object;
static PyTypeObject *concrete_array; /* of JAX's arrays that are no tracers */

/* A small object of up to three parts, by position: the base of a class in Python, which says what they are. */
typedef struct {
    PyObject_HEAD
    PyObject *parts[3];
} Parts;

enum { STRUCTURE_OF, NUMBERS_OF, CALL_OF }; /* parts of a deal, see `transforms._hands` */
enum { LEAVES_OF, DEAL_OF };                /* of a hand, likewise */
enum { AUX_OF, ARGS_OF, KWARGS_OF };        /* of arguments, see `_arguments` */
enum { POLICY_OF, WAY_OF };                 /* of a wrapper, see `transforms._warm` */

static PyTypeObject *deal_base, *hand_base, *arguments_base, *caller_base;
static PyTypeObject *deal_type, *hand_type, *hands_type, *arguments_type; /* the classes in Python */
static PyObject *hands_parts;                                             /* a slot */
static PyObject *trace_holder, *name_trace; /* what has the trace that is active, and as which attribute */
static PyTypeObject *policy_type;
static PyObject *default_policy, *current_policy; /* where there is no `Context`; (what was given) -> that of this thread */
static Py_ssize_t num_contexts;                   /* that are entered, in all threads */

static PyObject **parts_of(PyObject *object)
{
    return ((Parts *)object)->parts;
}

static descrgetfunc get_slot; /* of the descriptors of slots */
static descrsetfunc set_slot;

/* Of NNX, once one of its classes was met. See `libraries/_nnx_layouts.py`. */
static PyObject *layout_of, *current_trace;
static PyTypeObject *mapping_type, *trace_type;
static PyObject *name_nodes, *name_mapping;
static PyObject *raw_value, *variable_trace, *metadata_of, *initializing, *is_setup, *state_trace, *jax_trace; /* slots */

/* Of `sharedtree.Module`s: the class of what says of which kinds attributes are, and slots. See `libraries/_module_kinds.py`. */
static PyTypeObject *attribute_kinds_type;
static PyObject *kinds_of_attributes, *names_in_kinds, *statics_in_kinds;

static Kind *kind_of(PyTypeObject *type)
{
    if (kinds_size == 0)
        return NULL;
    for (size_t i = mixed(type) & (kinds_size - 1);; i = (i + 1) & (kinds_size - 1)) {
        if (kinds[i] == NULL || kinds[i]->type == type)
            return kinds[i];
    }
}

static void place_kind(Kind **table, size_t size, Kind *kind)
{
    size_t i = mixed(kind->type) & (size - 1);
    while (table[i] != NULL)
        i = (i + 1) & (size - 1);
    table[i] = kind;
}

static int add_kind(Kind *kind)
{
    if (2 * (num_placed + 1) > kinds_size) {
        size_t size = kinds_size ? 2 * kinds_size : 64;
        Kind **table = PyMem_Calloc(size, sizeof *table);
        if (table == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        num_placed = 0;
        for (size_t i = 0; i < kinds_size; i++) {
            if (kinds[i] != NULL && (void *)kinds[i]->type != &nobody) {
                place_kind(table, size, kinds[i]);
                num_placed++;
            }
        }
        PyMem_Free(kinds);
        kinds = table;
        kinds_size = size;
    }
    kind->number = num_kinds++;
    place_kind(kinds, kinds_size, kind);
    num_placed++;
    return 0;
}

static int retire_kind(void *address)
{
    Kind *kind = kind_of(address);
    if (kind != NULL)
        kind->type = (PyTypeObject *)(void *)&nobody;
    return 0;
}

/* Makes a kind of what Python says of a class, unless another thread was first. */
static Kind *new_kind(PyObject *described)
{
    PyObject *type, *node_type, *take_apart, *order, *is_static, *places, *traced, *statics;
    Kind kind = {0};
    if (!PyTuple_Check(described)) {
        PyErr_SetString(PyExc_TypeError, "a class is described by a tuple");
        return NULL;
    }
    if (!PyArg_ParseTuple(described, "O!iiiiiiiOOO!SSO!O!", &PyType_Type, &type, &kind.shape, &kind.is_plain,
                          &kind.is_mutable, &kind.is_known_to_jax, &kind.convention, &kind.is_rebuilt, &kind.is_guess, &node_type,
                          &take_apart, &PyTuple_Type, &order, &is_static, &places, &PyTuple_Type, &traced,
                          &PyTuple_Type, &statics))
        return NULL;
    Kind *known = kind_of((PyTypeObject *)type);
    kind.epoch = epoch();
    if (known != NULL && known->is_guess && kind.is_guess) {
        known->epoch = kind.epoch;
        known->shape = kind.shape;
    }
    if (known != NULL && (!known->is_guess || kind.is_guess))
        return known;
    if (known != NULL) /* it has been registered meanwhile */
        retire_kind(type);
    Py_ssize_t num_placed = kind.shape == DATACLASS || kind.shape == SLOTS ? PyTuple_Size(order) : 0;
    if (PyTuple_Size(order) != PyBytes_Size(is_static) || num_placed != PyBytes_Size(places)) {
        PyErr_SetString(PyExc_ValueError, "one byte for each name");
        return NULL;
    }
    kind.is_in_order = 1;
    for (Py_ssize_t i = 0, last = -1; i < num_placed; i++) {
        Py_ssize_t place = (unsigned char)PyBytes_AsString(places)[i];
        if (PyBytes_AsString(is_static)[i])
            continue;
        kind.is_in_order &= place > last;
        last = place;
    }
    Kind *made = PyMem_Malloc(sizeof *made);
    if (made == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    kind.type = (PyTypeObject *)type;
    kind.node_type = node_type == Py_None ? NULL : node_type;
    kind.take_apart = take_apart;
    kind.order = order, kind.is_static = is_static, kind.places = places;
    kind.traced = traced, kind.statics = statics;
    *made = kind;
    /* Classes that nobody registers are kept by nobody else either. */
    int is_kept = kind.shape != NAMEDTUPLE && !kind.is_guess;
    if ((!is_kept && when_gone(type, retire_kind) < 0) || add_kind(made) < 0) {
        PyMem_Free(made);
        return NULL;
    }
    if (is_kept)
        Py_INCREF(type);
    Py_XINCREF(kind.node_type), Py_INCREF(take_apart);
    Py_INCREF(order), Py_INCREF(is_static), Py_INCREF(places), Py_INCREF(traced), Py_INCREF(statics);
    return made;
}

/* --- Tags: which objects were seen, and their numbers ------------------------------------------------------------ */

enum { OPEN = -1, NONE = -2 };

typedef struct {
    PyObject *object; /* alive in `objects`, or in the walk that has it open; NULL in a free slot */
    Py_ssize_t number;
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *objects;
    Slot *slots;
    size_t size, used;
} Tags;

static PyTypeObject *tags_type;

static Slot *slot_of(Slot *slots, size_t size, PyObject *object)
{
    size_t i = mixed(object) & (size - 1);
    while (slots[i].object != NULL && slots[i].object != object)
        i = (i + 1) & (size - 1);
    return &slots[i];
}

static Py_ssize_t number_of(Tags *tags, PyObject *object)
{
    if (tags->size == 0)
        return NONE;
    Slot *slot = slot_of(tags->slots, tags->size, object);
    return slot->object == NULL ? NONE : slot->number;
}

#define FIRST_SIZE 256

static Slot *spare_slots; /* FIRST_SIZE empty ones, or NULL: malloc takes longer for them than it takes to empty them */

static Slot *new_slots(size_t size)
{
    Slot *slots = spare_slots;
    if (slots == NULL || size != FIRST_SIZE)
        return PyMem_Calloc(size, sizeof *slots);
    spare_slots = NULL;
    return slots;
}

static void free_slots(Slot *slots, size_t size)
{
    if (spare_slots != NULL || size != FIRST_SIZE) {
        PyMem_Free(slots);
    } else {
        memset(slots, 0, size * sizeof *slots);
        spare_slots = slots;
    }
}

/* Makes the table anew, without those that have no number and are not open. Runs no Python. */
static int rehash(Tags *tags, size_t size)
{
    Slot *slots = new_slots(size);
    if (slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t used = 0;
    for (size_t i = 0; i < tags->size; i++) {
        Slot old = tags->slots[i];
        if (old.object != NULL && old.number != NONE) {
            *slot_of(slots, size, old.object) = old;
            used++;
        }
    }
    free_slots(tags->slots, tags->size);
    tags->slots = slots;
    tags->size = size;
    tags->used = used;
    return 0;
}

static int set_number(Tags *tags, PyObject *object, Py_ssize_t number)
{
    if (2 * (tags->used + 1) > tags->size && rehash(tags, tags->size ? 4 * tags->size : FIRST_SIZE) < 0)
        return -1;
    Slot *slot = slot_of(tags->slots, tags->size, object);
    if (slot->object == NULL) {
        slot->object = object;
        tags->used++;
    }
    slot->number = number;
    return 0;
}

static int forget(Tags *tags, Py_ssize_t start)
{
    /* In place, so that it cannot fail: numbers that are taken back stay as slots without a number. */
    for (size_t i = 0; i < tags->size; i++) {
        if (tags->slots[i].number < 0 || tags->slots[i].number >= start)
            tags->slots[i].number = NONE;
    }
    /* Last, for this runs finalisers. A list needs memory to let go of many at once, and hardly any to let go of one. */
    if (PyList_SetSlice(tags->objects, start, PY_SSIZE_T_MAX, NULL) == 0)
        return 0;
    PyErr_Clear();
    for (Py_ssize_t size = PyList_Size(tags->objects); size > start; size = PyList_Size(tags->objects)) {
        if (PyList_SetSlice(tags->objects, size - 1, size, NULL) < 0)
            return -1;
    }
    return 0;
}

static PyObject *tags_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    (void)args, (void)kwargs;
    /* First, so that the garbage collector never sees tags without it. */
    PyObject *objects = PyList_New(0);
    Tags *self = objects == NULL ? NULL : (Tags *)alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(objects);
        return NULL;
    }
    self->objects = objects;
    return (PyObject *)self;
}

/* There is no `tp_clear`: each cycle leads through the list, which has one. */
static int tags_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Tags *)self)->objects);
    return 0;
}

static void tags_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    free_slots(((Tags *)self)->slots, ((Tags *)self)->size);
    Py_XDECREF(((Tags *)self)->objects);
    release(self);
    Py_DECREF(type);
}

static PyObject *tags_number_of(PyObject *self, PyObject *object)
{
    Py_ssize_t number = number_of((Tags *)self, object);
    if (number < 0)
        return Py_NewRef(Py_None);
    return PyLong_FromSsize_t(number);
}

static PyObject *tags_add(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"obj", "tag", NULL};
    Tags *tags = (Tags *)self;
    PyObject *object;
    int tag;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$p", names, &object, &tag))
        return NULL;
    Py_ssize_t number = PyList_Size(tags->objects);
    if (PyList_Append(tags->objects, object) < 0 || (tag && set_number(tags, object, number) < 0))
        return NULL;
    return PyLong_FromSsize_t(number);
}

static PyObject *tags_forget(PyObject *self, PyObject *arg)
{
    Py_ssize_t start = PyLong_AsSsize_t(arg);
    if (start == -1 && PyErr_Occurred())
        return NULL;
    if (forget((Tags *)self, start) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

static PyObject *tags_objects(PyObject *self, void *closure)
{
    (void)closure;
    return Py_NewRef(((Tags *)self)->objects);
}

static PyMethodDef tags_methods[] = {
    {"number_of", tags_number_of, METH_O, "The number of an object that was tagged, or None."},
    {"add", (PyCFunction)(void (*)(void))tags_add, METH_VARARGS | METH_KEYWORDS,
     "Gives an object the next number, and remembers it if `tag`."},
    {"forget", tags_forget, METH_O, "Takes back every number from `start` on."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef tags_getset[] = {
    {"objects", tags_objects, NULL, "All objects, by number.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot tags_slots[] = {
    {Py_tp_new, tags_new},         {Py_tp_dealloc, tags_dealloc}, {Py_tp_traverse, tags_traverse},
    {Py_tp_methods, tags_methods}, {Py_tp_getset, tags_getset},
    {Py_tp_doc, "Which objects a crossing has seen, and their numbers. See `sharedtree.core._walk.Tags`."},
    {0, NULL},
};
static PyType_Spec tags_spec = {"sharedtree._native.Tags", sizeof(Tags), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                tags_slots};

/* --- walk -------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject **items; /* strong references */
    size_t size, room;
} Pins;

typedef struct {
    PyObject *object; /* alive among its parent's children */
    Kind *kind;
    size_t next, end; /* its children that were not visited yet, in `children` */
    size_t start;
    int convention;
    int is_open;       /* whether it has a slot in the tags */
    int is_object;     /* whether it gets a number there */
    Py_ssize_t before; /* that it had there, if it is none */
} Frame;

typedef struct {
    Tags *tags;
    int flags;
    Py_ssize_t expected; /* how many objects the tags must have, if nobody else used them meanwhile */
    PyObject *leaves;
    Pins children; /* of the frames, those of each side by side */
    Pins pins;
    PyObject *settled; /* values that are the same for ever, each followed by its token; NULL if there are none */
    size_t *places; /* of each pin, where its address is in the key */
    size_t places_room;
    Frame *frames;
    size_t depth, frames_room;
    PyObject **names; /* borrowed, of one dictionary; or values, as far as a function says */
    size_t names_room;
    char *key;
    size_t key_size, key_room;
    int is_outside; /* whether the node that is being opened is in no module */
    Py_ssize_t parts_left; /* that the static value being written may have, counted by paths */
} Walk;

#define MAX_SPARE 65536 /* bytes */

static Walk spare; /* the memory of a walk that has ended, for the next; a walk within a walk finds none */

static Walk new_walk(Tags *tags, int flags)
{
    Walk w = spare;
    spare = (Walk){0};
    w.tags = tags;
    w.flags = flags;
    return w;
}

static int grow(void **items, size_t *room, size_t needed, size_t item_size)
{
    if (needed <= *room)
        return 0;
    size_t more = *room ? *room : 512 / item_size + 1;
    while (more < needed)
        more *= 2;
    void *grown = more > SIZE_MAX / item_size ? NULL : PyMem_Realloc(*items, more * item_size);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *items = grown;
    *room = more;
    return 0;
}

static int push(Pins *pins, PyObject *object)
{
    if (pins->size == pins->room && grow((void **)&pins->items, &pins->room, pins->size + 1, sizeof(PyObject *)) < 0)
        return -1;
    pins->items[pins->size++] = Py_NewRef(object);
    return 0;
}

/* Each reference is taken off before it is given up, for finalisers run. */
static void pop_to(Pins *pins, size_t size)
{
    while (pins->size > size)
        Py_XDECREF(pins->items[--pins->size]);
}

static int emit(Walk *w, const void *bytes, size_t size)
{
    if (w->key_size + size > w->key_room && grow((void **)&w->key, &w->key_room, w->key_size + size, 1) < 0)
        return -1;
    memcpy(w->key + w->key_size, bytes, size);
    w->key_size += size;
    return 0;
}

static int emit_code(Walk *w, char code)
{
    return emit(w, &code, 1);
}

static int emit_count(Walk *w, char code, int64_t count)
{
    char bytes[1 + sizeof count];
    bytes[0] = code;
    memcpy(bytes + 1, &count, sizeof count);
    return emit(w, bytes, sizeof bytes);
}

static int emit_kind(Walk *w, char code, const Kind *kind, Py_ssize_t count)
{
    char bytes[1 + 2 * sizeof(uint32_t)];
    uint32_t numbers[2] = {kind->number, (uint32_t)count};
    if (count > UINT32_MAX)
        return -1;
    bytes[0] = code;
    memcpy(bytes + 1, numbers, sizeof numbers);
    return emit(w, bytes, sizeof bytes);
}

static int emit_address(Walk *w, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    char bytes[1 + 2 * sizeof(void *)] = {'P'};
    memcpy(bytes + 1, &value, sizeof value);
    memcpy(bytes + 1 + sizeof value, &type, sizeof type);
    if (grow((void **)&w->places, &w->places_room, w->pins.size + 1, sizeof *w->places) < 0)
        return -1;
    w->places[w->pins.size] = w->key_size;
    return push(&w->pins, value) < 0 ? -1 : emit(w, bytes, sizeof bytes);
}

/* Runs no Python unless it fails. For half of a surrogate pair it does: until Python 3.12 the mere making of an exception
   may collect garbage. So whoever calls this touches nothing borrowed when it has failed. */
static int emit_text(Walk *w, PyObject *text)
{
    Py_ssize_t size;
    if (PyUnicode_GetLength(text) > MAX_TEXT)
        return emit_address(w, text);
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes == NULL)
        return -1;
    return emit_count(w, 's', size) < 0 ? -1 : emit(w, bytes, (size_t)size);
}

/* Whether a container of so many parts is to be written out. One that holds another twice, and so on, has no end. */
static int has_room(Walk *w, Py_ssize_t size, int depth)
{
    if (depth == 0)
        w->parts_left = MAX_STATIC_PARTS;
    if (depth == MAX_STATIC_DEPTH || size >= w->parts_left)
        return 0;
    w->parts_left -= size + 1;
    return 1;
}

/* Writes a static value. Runs no Python, so what a container holds needs no pins meanwhile. */
static int emit_static(Walk *w, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (value == Py_None || value == Py_True || value == Py_False)
        return emit_code(w, value == Py_None ? 'N' : value == Py_True ? 'T' : 'F');
    if (type == &PyUnicode_Type)
        return emit_text(w, value);
    if (type == &PyLong_Type) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? emit_address(w, value) : emit_count(w, 'i', number);
    }
    if (type == &PyFloat_Type) {
        double number = PyFloat_AsDouble(value);
        return emit_code(w, 'd') < 0 ? -1 : emit(w, &number, sizeof number);
    }
    if (type == &PyTuple_Type || type == &PyList_Type) {
        int is_tuple = type == &PyTuple_Type;
        Py_ssize_t size = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
        if (!has_room(w, size, depth))
            return emit_address(w, value);
        if (emit_count(w, is_tuple ? '(' : '[', size) < 0)
            return -1;
        for (Py_ssize_t i = 0; i < size; i++) {
            if (emit_static(w, is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i), depth + 1) < 0)
                return -1;
        }
        return 0;
    }
    if (type == &PyDict_Type && has_room(w, PyDict_Size(value), depth)) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        if (emit_count(w, '{', PyDict_Size(value)) < 0)
            return -1;
        while (PyDict_Next(value, &at, &key, &item)) {
            if (emit_static(w, key, depth + 1) < 0 || emit_static(w, item, depth + 1) < 0)
                return -1;
        }
        return 0;
    }
    return emit_address(w, value);
}

static int record(Walk *w, PyObject *object, int tag)
{
    if (PyList_Size(w->tags->objects) != w->expected || PyList_Append(w->tags->objects, object) < 0)
        return -1;
    Py_ssize_t number = w->expected++;
    return tag ? set_number(w->tags, object, number) : 0;
}

static int record_leaf(Walk *w, PyObject *object, int tag)
{
    if (emit_code(w, 'L') < 0 || PyList_Append(w->leaves, object) < 0)
        return -1;
    return record(w, object, tag);
}

static int record_static(Walk *w, PyObject *object)
{
    if (emit_code(w, 'S') < 0 || emit_static(w, object, 0) < 0)
        return -1;
    return record(w, object, 0);
}

static int is_tuple_of(PyObject *object, Py_ssize_t size)
{
    return PyTuple_CheckExact(object) && PyTuple_Size(object) == size;
}

static int is_record(PyObject *object, Py_ssize_t size)
{
    return PyTuple_Check(object) && PyTuple_Size(object) == size;
}

static int is_text(PyObject *object, PyObject *text)
{
    return object == text || (Py_TYPE(object) == &PyUnicode_Type && PyUnicode_Compare(object, text) == 0);
}

static int push_items(Walk *w, PyObject *tuple)
{
    Py_ssize_t size = PyTuple_Size(tuple);
    for (Py_ssize_t i = 0; i < size; i++) {
        if (push(&w->children, PyTuple_GetItem(tuple, i)) < 0)
            return -1;
    }
    return 0;
}

static int open_sequence(Walk *w, Kind *kind, PyObject *object)
{
    int is_list = kind->shape == LIST;
    Py_ssize_t size = is_list ? PyList_Size(object) : PyTuple_Size(object);
    if (emit_kind(w, 'N', kind, size) < 0)
        return -1;
    if (!is_list)
        return push_items(w, object);
    for (Py_ssize_t i = 0; i < size; i++) {
        if (push(&w->children, PyList_GetItem(object, i)) < 0)
            return -1;
    }
    return 0;
}

/* Pushes the items of a dictionary in the order of its keys, as long as few have to be moved for that; then it gives DONE,
   and so it does for a key that is no text or of a subclass. Runs no Python, so that keys need no references. */
static int push_in_order(Walk *w, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, size = 0, moves = 16 * PyDict_Size(dict);
    size_t start = w->children.size;
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (Py_TYPE(key) != &PyUnicode_Type)
            return DONE;
        if (grow((void **)&w->names, &w->names_room, (size_t)size + 1, sizeof key) < 0 || push(&w->children, value) < 0)
            return -1;
        PyObject **names = w->names, **values = w->children.items + start;
        Py_ssize_t i = size++;
        for (; i > 0 && PyUnicode_Compare(names[i - 1], key) > 0; i--, moves--) {
            names[i] = names[i - 1];
            values[i] = values[i - 1];
        }
        names[i] = key;
        values[i] = value;
        if (moves < 0)
            return DONE;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        if (emit_text(w, w->names[i]) < 0)
            return -1;
    }
    return OPENED;
}

/* Whether comparing such keys runs no Python. */
static int is_simple_key(PyObject *key)
{
    PyTypeObject *type = Py_TYPE(key);
    if (type == &PyTuple_Type) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(key); i++) {
            PyObject *part = PyTuple_GetItem(key, i);
            if (Py_TYPE(part) == &PyTuple_Type || !is_simple_key(part))
                return 0;
        }
        return 1;
    }
    return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type ||
           key == Py_None;
}

/* The keys of a dictionary as the reference orders them: sorted, or as they are if they have no order, which outside modules
   JAX refuses. NULL without an error where only Python can tell. */
static PyObject *keys_in_order(PyObject *dict, int is_sorted, int is_outside)
{
    PyObject *keys = PyDict_Keys(dict), *sorted;
    Py_ssize_t size = keys == NULL ? 0 : PyList_Size(keys);
    for (Py_ssize_t i = 0; keys != NULL && i < size; i++) {
        if (!is_simple_key(PyList_GetItem(keys, i)))
            Py_CLEAR(keys);
    }
    if (keys == NULL || !is_sorted)
        return keys;
    sorted = PySequence_List(keys);
    if (sorted != NULL && PyList_Sort(sorted) < 0) {
        Py_CLEAR(sorted);
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            return is_outside ? (Py_DECREF(keys), NULL) : keys;
        }
    }
    Py_DECREF(keys);
    return sorted;
}

/* Whether a dictionary is one that JAX has in the order of its keys. */
static int is_sorted_dict(const Kind *kind)
{
    return kind->shape != ORDERED_DICT;
}

/* The items of a dictionary by its keys. DONE for keys of other classes. */
static int push_by_keys(Walk *w, const Kind *kind, PyObject *dict)
{
    PyObject *keys = kind->shape == ORDERED_DICT ? PyMapping_Keys(dict)
                                                 : keys_in_order(dict, is_sorted_dict(kind), w->is_outside);
    Py_ssize_t size = keys == NULL ? 0 : PyList_Size(keys);
    int outcome = keys == NULL ? (PyErr_Occurred() ? FAILED : DONE) : OPENED;
    for (Py_ssize_t i = 0; i < size && outcome == OPENED; i++) {
        PyObject *key = PyList_GetItem(keys, i), *value = is_simple_key(key) ? PyDict_GetItemWithError(dict, key) : NULL;
        if (!is_simple_key(key))
            outcome = DONE;
        else if (value == NULL || emit_static(w, key, 0) < 0 || push(&w->children, value) < 0)
            outcome = FAILED;
    }
    Py_XDECREF(keys);
    return outcome;
}

/* The items of a dictionary, and of one with a default what makes that. */
static int open_dict(Walk *w, Kind *kind, PyObject *object)
{
    size_t start = w->children.size, pins = w->pins.size;
    Py_ssize_t size = PyDict_Size(object);
    if (emit_kind(w, 'N', kind, size) < 0)
        return -1;
    if (kind->shape == DEFAULT_DICT) {
        PyObject *factory = PyObject_GetAttr(object, name_factory);
        int outcome = factory == NULL ? -1 : emit_static(w, factory, 0);
        Py_XDECREF(factory);
        if (outcome < 0)
            return -1;
        pins = w->pins.size;
    }
    size_t key_size = w->key_size;
    int outcome = kind->shape == ORDERED_DICT ? DONE : push_in_order(w, object);
    if (outcome != DONE)
        return outcome;
    pop_to(&w->children, start);
    pop_to(&w->pins, pins);
    w->key_size = key_size;
    outcome = push_by_keys(w, kind, object);
    /* Meanwhile garbage may have been collected, and a finaliser may have changed the dictionary. */
    return outcome == OPENED && w->children.size - start != (size_t)size ? FAILED : outcome;
}

static int open_deque(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *items = PySequence_Tuple(object), *most = items == NULL ? NULL : PyObject_GetAttr(object, name_maxlen);
    int outcome = most == NULL || emit_kind(w, 'N', kind, PyTuple_Size(items)) < 0 || emit_static(w, most, 0) < 0
                      ? -1
                      : push_items(w, items);
    Py_XDECREF(most);
    Py_XDECREF(items);
    return outcome < 0 ? -1 : OPENED;
}

/* The arguments of a call that are not static, by position and by keyword. */
static int open_arguments(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *aux = parts_of(object)[AUX_OF], *args = parts_of(object)[ARGS_OF], *kwargs = parts_of(object)[KWARGS_OF];
    if (aux == NULL || args == NULL || kwargs == NULL || !is_tuple_of(aux, 3) || !PyTuple_CheckExact(args) ||
        !PyDict_CheckExact(kwargs))
        return -1;
    PyObject *names = PyTuple_GetItem(aux, 0), *keywords = PyTuple_GetItem(aux, 1);
    Py_ssize_t given = PyTuple_Size(args), count = 0;
    if (PyTuple_Size(names) != given)
        return -1;
    for (Py_ssize_t i = 0; i < given; i++)
        count += PyTuple_GetItem(names, i) != Py_None;
    if (emit_kind(w, 'N', kind, count + PyTuple_Size(keywords)) < 0 || emit_static(w, aux, 0) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < given; i++) {
        if (PyTuple_GetItem(names, i) != Py_None && push(&w->children, PyTuple_GetItem(args, i)) < 0)
            return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(keywords); i++) {
        PyObject *value = PyDict_GetItemWithError(kwargs, PyTuple_GetItem(keywords, i));
        if (value == NULL || push(&w->children, value) < 0)
            return -1;
    }
    return OPENED;
}

/* The fields of an object whose attributes are exactly those that are declared, in this order. Runs no Python. */
static int open_all_fields(Walk *w, Kind *kind, PyObject *attributes)
{
    Py_ssize_t size = PyTuple_Size(kind->order), at = 0;
    const char *is_static = PyBytes_AsString(kind->is_static);
    PyObject *name, *value;
    if (PyDict_Size(attributes) != size)
        return DONE;
    if (emit_kind(w, 'F', kind, 0) < 0)
        return -1;
    for (Py_ssize_t i = 0; PyDict_Next(attributes, &at, &name, &value); i++) {
        if (i >= size || name != PyTuple_GetItem(kind->order, i) || Py_TYPE(value) == missing_type)
            return DONE;
        if ((is_static[i] ? emit_static(w, value, 0) : push(&w->children, value)) < 0)
            return -1;
    }
    return OPENED;
}

/* Begins an object of which any field may be absent. */
static int begin_fields(Walk *w, Kind *kind)
{
    size_t size = (size_t)(PyTuple_Size(kind->traced) + PyTuple_Size(kind->statics));
    return grow((void **)&w->names, &w->names_room, size, sizeof(PyObject *)) < 0 ? -1 : emit_kind(w, 'F', kind, 0);
}

/* Ends it, and says which fields are there if these are not all that are declared and no others. `w->names` has an entry
   for each of all names, NULL where a field is absent. What is said last begins with no code of a static value. */
static int end_fields(Walk *w, Kind *kind, size_t begin)
{
    Py_ssize_t declared = PyTuple_Size(kind->order), size = PyTuple_Size(kind->traced) + PyTuple_Size(kind->statics);
    int are_declared = 1;
    for (Py_ssize_t i = 0; i < size; i++)
        are_declared &= (w->names[i] != NULL) == (i < declared);
    if (are_declared)
        return OPENED;
    w->key[begin] = 'A';
    for (Py_ssize_t i = 0; i < size; i++) {
        if (emit_code(w, w->names[i] != NULL) < 0)
            return -1;
    }
    return OPENED;
}

/* The fields that are there, by name. A dictionary of attributes may have keys that answer for others. */
static int open_some_fields(Walk *w, Kind *kind, PyObject *attributes)
{
    PyObject *all[2] = {kind->traced, kind->statics};
    size_t begin = w->key_size, number = 0;
    if (begin_fields(w, kind) < 0)
        return -1;
    for (int is_static = 0; is_static < 2; is_static++) {
        Py_ssize_t size = PyTuple_Size(all[is_static]);
        for (Py_ssize_t i = 0; i < size; i++) {
            PyObject *value = PyDict_GetItemWithError(attributes, PyTuple_GetItem(all[is_static], i));
            if (value == NULL && PyErr_Occurred())
                return -1;
            if (value != NULL && Py_TYPE(value) == missing_type)
                value = NULL;
            w->names[number++] = value;
            if (value != NULL && (is_static ? emit_static(w, value, 0) : push(&w->children, value)) < 0)
                return -1;
        }
    }
    return end_fields(w, kind, begin);
}

/* The fields of a dataclass, by name. DONE if one is missing or has company: then Python's look-up decides. */
static int open_declared_fields(Walk *w, Kind *kind, PyObject *attributes)
{
    PyObject *all[2] = {kind->traced, kind->statics};
    if (PyDict_Size(attributes) != PyTuple_Size(kind->order))
        return DONE;
    if (emit_kind(w, 'F', kind, 0) < 0)
        return -1;
    for (int is_static = 0; is_static < 2; is_static++) {
        Py_ssize_t size = PyTuple_Size(all[is_static]);
        for (Py_ssize_t i = 0; i < size; i++) {
            PyObject *value = PyDict_GetItemWithError(attributes, PyTuple_GetItem(all[is_static], i));
            if (value == NULL)
                return PyErr_Occurred() ? -1 : DONE;
            if ((is_static ? emit_static(w, value, 0) : push(&w->children, value)) < 0)
                return -1;
        }
    }
    return OPENED;
}

/* The fields of a dataclass whose instances have slots. DONE if one is empty. */
static int open_slots(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *all[2] = {kind->traced, kind->statics};
    if (emit_kind(w, 'F', kind, 0) < 0)
        return -1;
    for (int is_static = 0; is_static < 2; is_static++) {
        Py_ssize_t size = PyTuple_Size(all[is_static]);
        for (Py_ssize_t i = 0; i < size; i++) {
            PyObject *value = PyObject_GenericGetAttr(object, PyTuple_GetItem(all[is_static], i));
            if (value == NULL) {
                if (!PyErr_ExceptionMatches(PyExc_AttributeError))
                    return -1;
                PyErr_Clear();
                return DONE;
            }
            int outcome = is_static ? emit_static(w, value, 0) : push(&w->children, value);
            Py_DECREF(value);
            if (outcome < 0)
                return -1;
        }
    }
    return OPENED;
}

static int open_fields(Walk *w, Kind *kind, PyObject *object)
{
    size_t start = w->children.size, pins = w->pins.size, key_start = w->key_size;
    PyObject *attributes = PyObject_GenericGetDict(object, NULL);
    if (attributes == NULL)
        return -1;
    int outcome = DONE;
    if (PyDict_CheckExact(attributes)) {
        if (kind->is_in_order)
            outcome = open_all_fields(w, kind, attributes);
        if (outcome == DONE) {
            pop_to(&w->children, start);
            pop_to(&w->pins, pins);
            w->key_size = key_start;
            outcome = kind->shape == FIELDS ? open_some_fields(w, kind, attributes)
                                            : open_declared_fields(w, kind, attributes);
        }
    }
    Py_DECREF(attributes);
    return outcome;
}

static int has_marks(const Layout *layout, PyObject *mapping)
{
    PyObject *name, *mark;
    Py_ssize_t at = 0, size = PyTuple_Size(layout->marked);
    const char *marks = PyBytes_AsString(layout->marks);
    if (PyDict_Size(mapping) != size)
        return 0;
    for (Py_ssize_t i = 0; i < size && PyDict_Next(mapping, &at, &name, &mark); i++) {
        if (mark != (marks[i] ? Py_True : Py_False) || !is_text(name, PyTuple_GetItem(layout->marked, i)))
            return 0;
    }
    return 1;
}

#define NUM_LISTS 256 /* of layouts */

/* Of the names of attributes, in order, if these are texts, whose hash runs no Python. */
static size_t hash_of_names(PyObject *attributes)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    size_t hash = 0;
    while (PyDict_Next(attributes, &at, &name, &value))
        hash = 31 * hash + (Py_TYPE(name) == &PyUnicode_Type ? (size_t)PyObject_Hash(name) : 1);
    return hash;
}

/* The attributes of an NNX object, if they are of this layout. Runs no Python. */
static int open_by_layout(Walk *w, Kind *kind, const Layout *layout, PyObject *attributes)
{
    Py_ssize_t at = 0, size = PyTuple_Size(layout->names), num_traced = layout->num_traced;
    size_t start = w->children.size;
    PyObject *name, *value;
    if (PyDict_Size(attributes) != size)
        return DONE;
    if (emit_kind(w, 'O', kind, layout->number) < 0 ||
        grow((void **)&w->names, &w->names_room, (size_t)size, sizeof(PyObject *)) < 0 ||
        grow((void **)&w->children.items, &w->children.room, start + (size_t)num_traced, sizeof(PyObject *)) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < size; i++)
        w->names[i] = NULL;
    for (Py_ssize_t i = 0; i < num_traced; i++)
        w->children.items[w->children.size++] = NULL;
    for (Py_ssize_t i = 0; PyDict_Next(attributes, &at, &name, &value); i++) {
        if (i >= size || !is_text(name, PyTuple_GetItem(layout->names, i)))
            return DONE;
        int place = layout->places[i];
        if (place >= num_traced)
            w->names[place] = value;
        else if (place >= 0)
            w->children.items[start + (size_t)place] = Py_NewRef(value);
    }
    for (Py_ssize_t i = num_traced; i < size; i++) {
        if (w->names[i] != NULL && emit_static(w, w->names[i], 0) < 0)
            return -1;
    }
    return OPENED;
}

/* Whether no two names have one place, each place is one of so many, and each child has one. */
static int are_places(const int *places, Py_ssize_t size, Py_ssize_t num_traced)
{
    Py_ssize_t num_placed = 0;
    for (Py_ssize_t i = 0; i < size; i++)
        num_placed += places[i] >= 0 && places[i] < num_traced;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (places[i] >= size || num_placed != num_traced)
            return 0;
        for (Py_ssize_t j = 0; places[i] >= 0 && j < i; j++) {
            if (places[i] == places[j])
                return 0;
        }
    }
    return 1;
}

/* A layout with this form. NULL if there is none, or with an error. */
static Layout *layout_with(const Kind *kind, PyObject *form)
{
    for (size_t i = 0; kind->layouts != NULL && i < NUM_LISTS; i++) {
        for (Layout *layout = kind->layouts[i]; layout != NULL; layout = layout->next) {
            int is_it = PyObject_RichCompareBool(layout->form, form, Py_EQ);
            if (is_it != 0)
                return is_it < 0 ? NULL : layout;
        }
    }
    return NULL;
}

/* Learns the layout of an object from Python. NULL without an error if it has none. */
static Layout *new_layout(Kind *kind, PyObject *object, size_t hash)
{
    if (kind->layouts == NULL && (kind->layouts = PyMem_Calloc(NUM_LISTS, sizeof *kind->layouts)) == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    PyObject *form, *names, *places, *marked, *marks, *found = PyObject_CallFunctionObjArgs(layout_of, object, NULL);
    Layout *layout = NULL, *alike = NULL;
    if (found == NULL || found == Py_None) {
        kind->num_layouts++;
        Py_XDECREF(found);
        return NULL;
    }
    if (!PyArg_ParseTuple(found, "O!O!O!O!S", &PyTuple_Type, &form, &PyTuple_Type, &names, &PyTuple_Type, &places,
                          &PyTuple_Type, &marked, &marks))
        goto failed;
    if (!is_tuple_of(form, 3) || !PyTuple_CheckExact(PyTuple_GetItem(form, 0))) {
        PyErr_SetString(PyExc_ValueError, "no form");
        goto failed;
    }
    alike = layout_with(kind, form);
    if (alike == NULL && PyErr_Occurred())
        goto failed;
    Py_ssize_t size = PyTuple_Size(names);
    if (PyTuple_Size(places) != size || PyBytes_Size(marks) != PyTuple_Size(marked)) {
        PyErr_SetString(PyExc_ValueError, "one place and one mark for each name");
        goto failed;
    }
    layout = PyMem_Calloc(1, sizeof *layout);
    int *placed = PyMem_Calloc((size_t)size + 1, sizeof *placed);
    if (layout == NULL || placed == NULL) {
        PyMem_Free(placed);
        PyErr_NoMemory();
        goto failed;
    }
    layout->num_traced = PyTuple_Size(PyTuple_GetItem(form, 0));
    for (Py_ssize_t i = 0; i < size; i++)
        placed[i] = (int)PyLong_AsLong(PyTuple_GetItem(places, i));
    if (PyErr_Occurred() || !are_places(placed, size, layout->num_traced)) {
        PyMem_Free(placed);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "one place for each child");
        goto failed;
    }
    layout->places = placed;
    layout->form = Py_NewRef(form), layout->names = Py_NewRef(names);
    layout->marked = Py_NewRef(marked), layout->marks = Py_NewRef(marks);
    layout->number = alike == NULL ? kind->num_layouts : alike->number;
    kind->num_layouts++;
    layout->next = kind->layouts[hash % NUM_LISTS];
    kind->layouts[hash % NUM_LISTS] = layout;
    Py_DECREF(found);
    return layout;
failed:
    PyMem_Free(layout);
    Py_DECREF(found);
    return NULL;
}

static int open_nnx_object(Walk *w, Kind *kind, PyObject *object)
{
    size_t start = w->children.size, pins = w->pins.size, key_start = w->key_size;
    PyObject *inner = NULL, *nodes = NULL, *attributes = PyObject_GenericGetDict(object, NULL);
    int outcome = DONE, is_new = 0;
    if (attributes == NULL)
        return -1;
    if (PyDict_CheckExact(attributes))
        nodes = PyDict_GetItemWithError(attributes, name_nodes);
    if (nodes != NULL && Py_TYPE(nodes) == mapping_type) {
        Py_INCREF(nodes);
        inner = PyObject_GenericGetAttr(nodes, name_mapping);
        Py_DECREF(nodes);
    }
    int is_read = inner != NULL && PyDict_CheckExact(inner);
    size_t hash = is_read ? hash_of_names(attributes) : 0;
    Layout *layout = kind->layouts == NULL ? NULL : kind->layouts[hash % NUM_LISTS];
    while (is_read && outcome == DONE) {
        if (layout == NULL) {
            if (is_new || kind->num_layouts >= MAX_LAYOUTS || (layout = new_layout(kind, object, hash)) == NULL)
                break;
            is_new = 1;
        }
        outcome = has_marks(layout, inner) ? open_by_layout(w, kind, layout, attributes) : DONE;
        if (outcome == DONE) {
            pop_to(&w->children, start);
            pop_to(&w->pins, pins);
            w->key_size = key_start;
        }
        layout = is_new ? NULL : layout->next;
    }
    if (outcome == DONE && PyErr_Occurred())
        outcome = -1;
    Py_XDECREF(inner);
    Py_DECREF(attributes);
    return outcome;
}

/* What an NNX object has as its state: two flags. */
static int open_nnx_state(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *slots[2] = {initializing, is_setup};
    int outcome = emit_kind(w, 'F', kind, 0);
    for (int i = 0; i < 2 && outcome == 0; i++) {
        PyObject *value = get_slot(slots[i], object, NULL);
        outcome = value == NULL ? -1 : emit_static(w, value, 0);
        Py_XDECREF(value);
    }
    return outcome < 0 ? -1 : OPENED;
}

/* Names, in order, of a dictionary all of whose keys are texts and no subclass of it: into `w->names`. DONE for others. */
static int sort_names(Walk *w, PyObject *dict)
{
    PyObject *name, *item;
    Py_ssize_t at = 0, size = 0;
    if (grow((void **)&w->names, &w->names_room, (size_t)PyDict_Size(dict), sizeof(PyObject *)) < 0)
        return -1;
    while (PyDict_Next(dict, &at, &name, &item)) {
        if (Py_TYPE(name) != &PyUnicode_Type || size == MAX_METADATA)
            return DONE;
        Py_ssize_t i = size++;
        for (; i > 0 && PyUnicode_Compare(w->names[i - 1], name) > 0; i--)
            w->names[i] = w->names[i - 1];
        w->names[i] = name;
    }
    return OPENED;
}

/* The value of an NNX variable; its metadata is static. No hook is run. */
static int open_nnx_variable(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *value = get_slot(raw_value, object, NULL);
    PyObject *metadata = value == NULL ? NULL : get_slot(metadata_of, object, NULL);
    int outcome = metadata == NULL ? -1 : PyDict_CheckExact(metadata) ? sort_names(w, metadata) : DONE;
    Py_ssize_t size = outcome == OPENED ? PyDict_Size(metadata) : 0;
    if (outcome == OPENED && emit_kind(w, 'F', kind, size) < 0)
        outcome = -1;
    for (Py_ssize_t i = 0; i < size && outcome == OPENED; i++) {
        PyObject *item = PyDict_GetItemWithError(metadata, w->names[i]);
        if (item == NULL || emit_text(w, w->names[i]) < 0 || emit_static(w, item, 0) < 0)
            outcome = -1;
    }
    if (outcome == OPENED && push(&w->children, value) < 0)
        outcome = -1;
    Py_XDECREF(metadata);
    Py_XDECREF(value);
    return outcome;
}

/* Whether a static attribute is no container, or one in which nobody could put anything: else Python looks for arrays. */
static int is_static_for_ever(PyObject *value)
{
    if (PyList_Check(value) || PyDict_Check(value))
        return 0;
    if (!PyTuple_Check(value)) {
        Kind *kind = kind_of(Py_TYPE(value));
        return kind == NULL || kind->shape <= NOTHING || !kind->is_plain;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(value); i++) {
        PyObject *part = PyTuple_GetItem(value, i);
        PyTypeObject *type = Py_TYPE(part);
        if (type != &PyLong_Type && type != &PyFloat_Type && type != &PyUnicode_Type && part != Py_None &&
            type != &PyBool_Type)
            return 0;
    }
    return PyTuple_CheckExact(value);
}

/* The names of which the kinds are noted, and for each a byte, whether it is static; new references. 0 if there are none. */
static int read_kinds(PyObject *noted, PyObject **names, PyObject **are_static)
{
    *names = *are_static = NULL;
    if (Py_TYPE(noted) != attribute_kinds_type)
        return 0;
    *names = get_slot(names_in_kinds, noted, NULL);
    *are_static = *names == NULL ? NULL : get_slot(statics_in_kinds, noted, NULL);
    if (*are_static != NULL && PyBytes_Check(*are_static) && is_tuple_of(*names, PyBytes_Size(*are_static)))
        return 1;
    PyErr_Clear();
    Py_CLEAR(*names);
    Py_CLEAR(*are_static);
    return 0;
}

/* The attributes of a module, if they are those of which the kinds are noted. Runs no Python. */
static int open_by_kinds(Walk *w, Kind *kind, PyObject *noted, PyObject *names, PyObject *statics, PyObject *attributes)
{
    Py_ssize_t at = 0, size = PyTuple_Size(names);
    const char *are_static = PyBytes_AsString(statics);
    PyObject *name, *value;
    if (PyDict_Size(attributes) != size)
        return DONE;
    if (emit_kind(w, 'M', kind, 0) < 0 || emit_address(w, noted) < 0)
        return -1;
    for (Py_ssize_t i = 0; PyDict_Next(attributes, &at, &name, &value); i++) {
        if (i >= size || !is_text(name, PyTuple_GetItem(names, i)) || (are_static[i] && !is_static_for_ever(value)))
            return DONE;
        if ((are_static[i] ? emit_static(w, value, 0) : push(&w->children, value)) < 0)
            return -1;
    }
    return OPENED;
}

static int open_module(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *names, *are_static, *noted = get_slot(kinds_of_attributes, object, NULL);
    int outcome = DONE;
    if (noted == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return DONE;
    }
    if (read_kinds(noted, &names, &are_static)) {
        PyObject *attributes = PyObject_GenericGetDict(object, NULL);
        if (attributes == NULL)
            outcome = -1;
        else if (PyDict_CheckExact(attributes))
            outcome = open_by_kinds(w, kind, noted, names, are_static, attributes);
        Py_XDECREF(attributes);
    }
    Py_XDECREF(are_static);
    Py_XDECREF(names);
    Py_DECREF(noted);
    return outcome;
}

/* Whether this is what the flatten of an NNX object with so many children gives as auxiliary data. */
static int is_nnx_aux(PyObject *aux, Py_ssize_t size)
{
    if (!is_tuple_of(aux, 3) || !is_tuple_of(PyTuple_GetItem(aux, 0), size) || !PyTuple_CheckExact(PyTuple_GetItem(aux, 1)))
        return 0;
    return is_tuple_of(PyTuple_GetItem(aux, 2), PyTuple_Size(PyTuple_GetItem(aux, 1)));
}

/* Whether this is what the flatten of a module with so many children gives as auxiliary data. */
static int is_module_aux(PyObject *aux, Py_ssize_t size)
{
    PyObject *names, *are_static;
    if (!is_tuple_of(aux, 2) || !PyTuple_CheckExact(PyTuple_GetItem(aux, 1)) ||
        !read_kinds(PyTuple_GetItem(aux, 0), &names, &are_static))
        return 0;
    Py_ssize_t num_static = 0;
    for (Py_ssize_t i = 0; i < PyBytes_Size(are_static); i++)
        num_static += PyBytes_AsString(are_static)[i] != 0;
    int is_one = PyTuple_Size(names) == size + num_static && PyTuple_Size(PyTuple_GetItem(aux, 1)) == num_static;
    Py_DECREF(names);
    Py_DECREF(are_static);
    return is_one;
}

static int emit_statics(Walk *w, PyObject *values)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++) {
        if (emit_static(w, PyTuple_GetItem(values, i), 0) < 0)
            return -1;
    }
    return OPENED;
}

/* What stands for a node in a key, from its auxiliary data: the same that the functions above write from the object. DONE
   if they would leave such an object to its registered functions. */
static int emit_fields(Walk *w, Kind *kind, PyObject *aux)
{
    size_t begin = w->key_size, number = 0;
    if (!is_tuple_of(aux, 2) || begin_fields(w, kind) < 0)
        return -1;
    PyObject *all[2] = {kind->traced, kind->statics}, *found[2] = {PyTuple_GetItem(aux, 0), PyTuple_GetItem(aux, 1)};
    for (int is_static = 0; is_static < 2; is_static++) {
        Py_ssize_t next = 0;
        for (Py_ssize_t i = 0; i < PyTuple_Size(all[is_static]); i++) {
            PyObject *each = next < PyTuple_Size(found[is_static]) ? PyTuple_GetItem(found[is_static], next) : NULL;
            PyObject *name = each != NULL && is_static ? PyTuple_GetItem(each, 0) : each;
            int is_there = name != NULL && is_text(name, PyTuple_GetItem(all[is_static], i));
            next += is_there;
            w->names[number++] = is_there ? each : NULL;
            if (is_there && is_static && emit_static(w, PyTuple_GetItem(each, 1), 0) < 0)
                return -1;
        }
    }
    return end_fields(w, kind, begin);
}

static int emit_dict(Walk *w, Kind *kind, PyObject *aux)
{
    PyObject *names = aux;
    if (kind->shape == DEFAULT_DICT)
        names = is_tuple_of(aux, 2) ? PyTuple_GetItem(aux, 1) : NULL;
    if (names == NULL || !PyTuple_CheckExact(names))
        return DONE;
    Py_ssize_t size = PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!is_simple_key(PyTuple_GetItem(names, i)))
            return DONE;
    }
    if (emit_kind(w, 'N', kind, size) < 0 ||
        (kind->shape == DEFAULT_DICT && emit_static(w, PyTuple_GetItem(aux, 0), 0) < 0))
        return -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (emit_static(w, PyTuple_GetItem(names, i), 0) < 0)
            return -1;
    }
    return OPENED;
}

static int emit_nnx_variable(Walk *w, Kind *kind, PyObject *aux)
{
    if (!PyTuple_CheckExact(aux) || PyTuple_Size(aux) > MAX_METADATA)
        return DONE;
    for (Py_ssize_t i = 0; i < PyTuple_Size(aux); i++) {
        PyObject *pair = PyTuple_GetItem(aux, i);
        if (!is_tuple_of(pair, 2) || Py_TYPE(PyTuple_GetItem(pair, 0)) != &PyUnicode_Type)
            return DONE;
    }
    if (emit_kind(w, 'F', kind, PyTuple_Size(aux)) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(aux); i++) {
        PyObject *pair = PyTuple_GetItem(aux, i);
        if (emit_text(w, PyTuple_GetItem(pair, 0)) < 0 || emit_static(w, PyTuple_GetItem(pair, 1), 0) < 0)
            return -1;
    }
    return OPENED;
}

static int emit_nnx_object(Walk *w, Kind *kind, PyObject *aux)
{
    PyObject *names = PyTuple_GetItem(aux, 1), *values = PyTuple_GetItem(aux, 2), *mapping = NULL;
    Py_ssize_t at = 0, size = PyTuple_Size(names);
    while (at < size && !is_text(PyTuple_GetItem(names, at), name_nodes))
        at++;
    if (at < size && Py_TYPE(PyTuple_GetItem(values, at)) == mapping_type)
        mapping = PyObject_GenericGetAttr(PyTuple_GetItem(values, at), name_mapping);
    PyObject *form = mapping == NULL ? NULL : PyTuple_Pack(3, PyTuple_GetItem(aux, 0), names, mapping);
    Layout *layout = form == NULL ? NULL : layout_with(kind, form);
    Py_XDECREF(form);
    Py_XDECREF(mapping);
    if (layout == NULL)
        return PyErr_Occurred() ? -1 : DONE;
    if (emit_kind(w, 'O', kind, layout->number) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (i != at && emit_static(w, PyTuple_GetItem(values, i), 0) < 0)
            return -1;
    }
    return OPENED;
}

static int emit_by_shape(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    switch (kind->shape) {
    case NOTHING:
    case TUPLE:
    case LIST:
    case NAMEDTUPLE:
        return emit_kind(w, 'N', kind, num_children) < 0 ? -1 : OPENED;
    case DICT:
    case ORDERED_DICT:
    case DEFAULT_DICT:
        return emit_dict(w, kind, aux);
    case DEQUE:
    case ARGUMENTS:
        return emit_kind(w, 'N', kind, num_children) < 0 || emit_static(w, aux, 0) < 0 ? -1 : OPENED;
    case FIELDS:
        return emit_fields(w, kind, aux);
    case DATACLASS:
    case SLOTS:
        if (num_children != PyTuple_Size(kind->traced) || !is_tuple_of(aux, PyTuple_Size(kind->statics)))
            return DONE;
        return emit_kind(w, 'F', kind, 0) < 0 ? -1 : emit_statics(w, aux);
    case NNX_STATE:
        if (num_children != 0 || !is_tuple_of(aux, 2))
            return DONE;
        return emit_kind(w, 'F', kind, 0) < 0 ? -1 : emit_statics(w, aux);
    case NNX_VARIABLE:
        return num_children == 1 ? emit_nnx_variable(w, kind, aux) : DONE;
    case NNX_OBJECT:
        return is_nnx_aux(aux, num_children) ? emit_nnx_object(w, kind, aux) : DONE;
    case MODULE:
        if (!is_module_aux(aux, num_children))
            return DONE;
        if (emit_kind(w, 'M', kind, 0) < 0 || emit_address(w, PyTuple_GetItem(aux, 0)) < 0)
            return -1;
        return emit_statics(w, PyTuple_GetItem(aux, 1));
    }
    return DONE;
}

static int emit_node(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    int outcome = emit_by_shape(w, kind, num_children, aux);
    if (outcome != DONE)
        return outcome < 0 ? -1 : 0;
    return emit_kind(w, 'G', kind, num_children) < 0 ? -1 : emit_static(w, aux, 0);
}

static int open_other(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *found = PyObject_CallFunctionObjArgs(kind->take_apart, object, NULL);
    if (found == NULL)
        return -1;
    int outcome = -1;
    PyObject *children = NULL;
    if (PyTuple_Check(found) && PyTuple_Size(found) == 2)
        children = PySequence_Tuple(PyTuple_GetItem(found, 0));
    if (children != NULL && emit_node(w, kind, PyTuple_Size(children), PyTuple_GetItem(found, 1)) == 0)
        outcome = push_items(w, children);
    /* What is neither a child nor pinned may go now: its address is in no key. */
    Py_XDECREF(children);
    Py_DECREF(found);
    return outcome;
}

static int open_by_shape(Walk *w, Kind *kind, PyObject *object)
{
    switch (kind->shape) {
    case NOTHING:
        return emit_kind(w, 'N', kind, 0) < 0 ? -1 : OPENED;
    case TUPLE:
    case LIST:
    case NAMEDTUPLE:
        return open_sequence(w, kind, object) < 0 ? -1 : OPENED;
    case DICT:
    case ORDERED_DICT:
    case DEFAULT_DICT:
        return open_dict(w, kind, object);
    case DEQUE:
        return open_deque(w, kind, object);
    case ARGUMENTS:
        return open_arguments(w, kind, object);
    case FIELDS:
    case DATACLASS:
        return open_fields(w, kind, object);
    case SLOTS:
        return open_slots(w, kind, object);
    case NNX_STATE:
        return open_nnx_state(w, kind, object);
    case NNX_OBJECT:
        return open_nnx_object(w, kind, object);
    case NNX_VARIABLE:
        return open_nnx_variable(w, kind, object);
    case MODULE:
        return open_module(w, kind, object);
    }
    return DONE;
}

static int open_node(Walk *w, PyObject *object, Kind *kind, int outer)
{
    int has_identity = kind->is_mutable || !kind->is_plain;
    Py_ssize_t before = has_identity ? number_of(w->tags, object) : NONE;
    if (w->depth >= MAX_DEPTH || before == OPEN)
        return -1;
    size_t start = w->children.size, pins = w->pins.size, key_start = w->key_size;
    w->is_outside = outer == OUTSIDE || outer == ANY;
    int outcome = open_by_shape(w, kind, object);
    if (outcome == DONE) {
        pop_to(&w->children, start);
        pop_to(&w->pins, pins);
        w->key_size = key_start;
        outcome = open_other(w, kind, object) < 0 ? -1 : OPENED;
    }
    if (outcome < 0)
        return -1;
    if (grow((void **)&w->frames, &w->frames_room, w->depth + 1, sizeof(Frame)) < 0)
        return -1;
    if (has_identity && set_number(w->tags, object, OPEN) < 0)
        return -1;
    int inner = kind->convention;
    if (inner == INHERITED) {
        inner = outer == IN_VARIABLE || ((outer == ANY || outer == OUTSIDE) && !kind->is_plain) ? JAX : outer;
        if (outer == OUTSIDE && kind->is_plain && kind->is_mutable && w->flags & CONTAINERS)
            inner = ANY;
    }
    int is_object = has_identity && (outer != OUTSIDE || inner != OUTSIDE);
    w->frames[w->depth++] = (Frame){object, kind, start, w->children.size, start, inner, has_identity, is_object, before};
    return OPENED;
}

/* Refers to an object that was met before, if it was. */
static int refer_back(Walk *w, PyObject *object)
{
    Py_ssize_t number = number_of(w->tags, object);
    if (number < 0)
        return number == OPEN ? FAILED : DONE;
    return emit_count(w, 'R', number) < 0 ? FAILED : OPENED;
}

/* Whether JAX traces what a NumPy array or number holds; -1 if only Python can tell. */
static int is_numeric(PyObject *object)
{
    PyObject *dtype = PyObject_GetAttr(object, name_dtype);
    int outcome = -1;
    for (Py_ssize_t i = 0; dtype != NULL && outcome < 0 && i < PyTuple_Size(dtypes); i++) {
        if (PyTuple_GetItem(dtypes, i) == dtype)
            outcome = 1;
    }
    Py_XDECREF(dtype);
    PyErr_Clear();
    return outcome;
}

static int visit_uncommon(Walk *w, PyObject *object, int convention);

static int visit_static(Walk *w, PyObject *object)
{
    int outcome = refer_back(w, object);
    return outcome == DONE ? record_static(w, object) : outcome == FAILED ? -1 : 0;
}

/* A leaf of a class that is known. What is in an NNX variable, or in no module, is a value, also if it was met as an object
   elsewhere. */
static int visit_leaf(Walk *w, PyObject *object, const Kind *kind, int convention)
{
    int is_array = kind->shape == NUMPY_ARRAY || kind->shape == NUMPY_NUMBER || kind->shape == JAX_ARRAY;
    int is_value = convention == OUTSIDE || convention == IN_VARIABLE;
    if (!is_array && w->flags & FILTERED)
        return visit_static(w, object);
    if (convention == OUTSIDE)
        return record_leaf(w, object, 0);
    if (convention == ANY || kind->shape == JAX_ARRAY || (is_array && convention == EQUINOX))
        is_array &= kind->shape != NUMPY_NUMBER;
    else if (is_array && is_numeric(object) < 0)
        return visit_uncommon(w, object, convention);
    else if (kind->shape == STATIC || (kind->shape == NUMBER && convention == EQUINOX))
        return visit_static(w, object);
    int has_identity = is_array && kind->shape != NUMPY_NUMBER;
    if (has_identity && !is_value) {
        int outcome = refer_back(w, object);
        if (outcome != DONE)
            return outcome == FAILED ? -1 : 0;
    }
    return record_leaf(w, object, has_identity && !is_value && w->flags & ARRAYS);
}

static int visit(Walk *w, PyObject *object, int convention)
{
    Kind *kind = kind_of(Py_TYPE(object));
    if (kind == NULL || (kind->is_guess && kind->epoch != epoch()))
        return visit_uncommon(w, object, convention);
    if (kind->shape < NOTHING)
        return visit_leaf(w, object, kind, convention);
    int is_outside = convention == OUTSIDE || convention == ANY;
    int is_leaf = is_outside && !kind->is_known_to_jax; /* a deque */
    if (is_leaf && convention == OUTSIDE && !(w->flags & FILTERED))
        return record_leaf(w, object, 0);
    if (is_leaf || convention != OUTSIDE || !kind->is_plain || (w->flags & CONTAINERS && kind->is_mutable)) {
        int outcome = refer_back(w, object);
        if (outcome != DONE)
            return outcome == FAILED ? -1 : 0;
    }
    if (is_leaf)
        return w->flags & FILTERED ? record_static(w, object) : record_leaf(w, object, 0);
    return open_node(w, object, kind, convention) < 0 ? -1 : 0;
}

/* What to do with an object whose class has no kind yet, or only Python can tell. */
static int visit_uncommon(Walk *w, PyObject *object, int convention)
{
    PyObject *number = PyLong_FromLong(convention | (w->flags & FILTERED) << 8);
    PyObject *found = number == NULL ? NULL : PyObject_CallFunctionObjArgs(meet, object, number, NULL);
    Py_XDECREF(number);
    if (found == NULL)
        return -1;
    if (PyLong_Check(found)) {
        long role = PyLong_AsLong(found);
        Py_DECREF(found);
        if (role == -1 && PyErr_Occurred())
            return -1;
        int outcome = role == 1 ? DONE : refer_back(w, object);
        if (outcome != DONE)
            return outcome == FAILED ? -1 : 0;
        return role == 0 ? record_static(w, object) : record_leaf(w, object, role == 2 && w->flags & ARRAYS);
    }
    Kind *kind = new_kind(found);
    Py_DECREF(found);
    /* Its class may be another by now. */
    if (kind == NULL || kind->type != Py_TYPE(object) || kind_of(kind->type) != kind ||
        (kind->is_guess && kind->epoch != epoch()))
        return -1;
    return visit(w, object, convention);
}

static int close_node(Walk *w)
{
    Frame frame = w->frames[--w->depth];
    if (frame.is_open && !frame.is_object && set_number(w->tags, frame.object, frame.before) < 0)
        return -1;
    if (record(w, frame.object, frame.is_object || w->flags & VALUES) < 0)
        return -1;
    pop_to(&w->children, frame.start);
    return 0;
}

/* The class that a pinned value had when it was written. Only to be compared: it may be gone. */
static PyTypeObject *type_of_pin(const Walk *w, size_t i)
{
    PyTypeObject *type;
    memcpy(&type, w->key + w->places[i] + 1 + sizeof(PyObject *), sizeof type);
    return type;
}

/* Puts in the place of a pin what stands for its value; takes a reference to that over. */
static void put_token(Walk *w, size_t i, PyObject *token)
{
    PyObject *value = w->pins.items[i], *none = NULL;
    w->key[w->places[i]] = 'V';
    memcpy(w->key + w->places[i] + 1, &token, sizeof token);
    memcpy(w->key + w->places[i] + 1 + sizeof token, &none, sizeof none);
    w->pins.items[i] = token;
    Py_DECREF(value);
}

/* What Python says of a pin: (its class,), of which all instances are the same for ever; a token; or (a token, None), of a
   value that is the same for ever itself. */
static int settle_pin(Walk *w, size_t i, PyObject *found)
{
    PyObject *value = w->pins.items[i], *first = PyTuple_CheckExact(found) ? PyTuple_GetItem(found, 0) : found;
    if (first == NULL)
        return -1;
    if (first != found && PyTuple_Size(found) == 1)
        return first != (PyObject *)type_of_pin(w, i) ? -1 : add_fact_weakly(first, &PyType_Type, NULL);
    Py_INCREF(first);
    if (first != found) {
        if (PyList_Append(w->settled, value) < 0 || PyList_Append(w->settled, first) < 0 ||
            add_fact_weakly(value, type_of_pin(w, i), first) < 0) {
            Py_DECREF(first);
            return -1;
        }
    }
    put_token(w, i, first);
    return 0;
}

/* Asks Python about all pins that need not be the same value for ever. After the walk, for this runs Python. */
static int settle_pins(Walk *w)
{
    size_t size = w->pins.size, count = 0;
    size_t *unsettled = NULL;
    PyObject *values = NULL, *found = NULL;
    int outcome = 0;
    for (size_t i = 0; i < size && outcome == 0; i++) {
        PyTypeObject *type = type_of_pin(w, i);
        if (is_settled(type))
            continue;
        PyObject *token = token_of(w->pins.items[i], type);
        if (token != NULL) {
            if (w->settled != NULL && (PyList_Append(w->settled, w->pins.items[i]) < 0 ||
                                       PyList_Append(w->settled, token) < 0))
                outcome = -1;
            if (outcome == 0)
                put_token(w, i, token);
            else
                Py_DECREF(token);
            continue;
        }
        if (values == NULL && ((values = PyList_New(0)) == NULL || (unsettled = PyMem_Malloc(size * sizeof *unsettled)) == NULL))
            outcome = -1;
        if (outcome == 0)
            outcome = PyList_Append(values, w->pins.items[i]);
        if (outcome == 0)
            unsettled[count++] = i;
    }
    if (outcome == 0 && count > 0) {
        if (w->settled == NULL)
            w->settled = PyList_New(0);
        found = w->settled == NULL ? NULL : PyObject_CallFunctionObjArgs(settle, values, NULL);
        outcome = found == NULL ? -1 : 0;
    }
    for (size_t i = 0; i < count && outcome == 0; i++) {
        PyObject *each = PyList_GetItem(found, (Py_ssize_t)i);
        outcome = each == NULL ? -1 : settle_pin(w, unsettled[i], each);
    }
    Py_XDECREF(found);
    Py_XDECREF(values);
    PyMem_Free(unsettled);
    return outcome;
}

static int begin_key(Walk *w, int convention, int64_t base)
{
    int32_t header = w->flags | convention << 8;
    return emit(w, &header, sizeof header) < 0 ? -1 : emit_count(w, 'B', base);
}

static int walk_all(Walk *w, PyObject *tree, int convention)
{
    if (begin_key(w, convention, w->expected) < 0 || visit(w, tree, convention) < 0)
        return -1;
    while (w->depth) {
        Frame *frame = &w->frames[w->depth - 1];
        int outcome = frame->next == frame->end ? close_node(w)
                                                : visit(w, w->children.items[frame->next++], frame->convention);
        if (outcome < 0)
            return -1;
    }
    if (settle_pins(w) < 0)
        return -1;
    return PyList_Size(w->tags->objects) == w->expected ? 0 : -1;
}

/* Reads `Rules`. 0 if they are not for the native walk, -1 on an error. */
static int read_rules(PyObject *rules, int *flags, int *convention)
{
    static const char *const conventions[] = {"jax", "equinox", "any", NULL, "variable", "outside"};
    PyObject *containers, *name, *arrays, *values, *given, *updated, *on_static, *is_leaf, *filtered;
    if (!PyArg_ParseTuple(rules, "OOOOOOOOO", &containers, &name, &arrays, &values, &given, &updated, &on_static, &is_leaf,
                          &filtered))
        return -1;
    if (on_static != Py_None || is_leaf != Py_None || !PyUnicode_Check(name))
        return 0;
    int truths[6], i = 0;
    for (PyObject *each[] = {filtered, containers, arrays, values, given, updated}; i < 6; i++) {
        truths[i] = PyObject_IsTrue(each[i]);
        if (truths[i] < 0)
            return -1;
    }
    *flags = (truths[0] ? FILTERED : 0) | (truths[1] ? CONTAINERS : 0) | (truths[2] ? ARRAYS : 0) | (truths[3] ? VALUES : 0);
    for (*convention = OUTSIDE; *convention > JAX; --*convention) {
        const char *each = conventions[*convention];
        if (each != NULL && PyUnicode_CompareWithASCIIString(name, each) == 0)
            break;
    }
    return !truths[4] && !truths[5];
}

static void free_memory(Walk *w)
{
    PyMem_Free(w->children.items);
    PyMem_Free(w->pins.items);
    PyMem_Free(w->places);
    PyMem_Free(w->frames);
    PyMem_Free(w->names);
    PyMem_Free(w->key);
}

static void end_walk(Walk *w)
{
    /* Each of these may run finalisers, of which none can reach what is here. */
    Py_CLEAR(w->leaves);
    Py_CLEAR(w->settled);
    pop_to(&w->children, 0);
    pop_to(&w->pins, 0);
    /* Each name has a child, and each pin has nine bytes in the key. */
    if (spare.key == NULL && w->key_room <= MAX_SPARE && w->children.room * sizeof(PyObject *) <= MAX_SPARE &&
        w->frames_room * sizeof(Frame) <= MAX_SPARE) {
        spare = (Walk){.children = w->children, .pins = w->pins, .places = w->places, .places_room = w->places_room,
                       .frames = w->frames, .frames_room = w->frames_room, .names = w->names,
                       .names_room = w->names_room, .key = w->key, .key_room = w->key_room};
        return;
    }
    free_memory(w);
}

/* Takes back what a walk did that came to nothing. An error of `Exception` is dropped, for Python then walks, and raises
   it with its paths. DONE, or FAILED with an error that goes on. */
static int take_back(Walk *w, Py_ssize_t base)
{
    PyObject *type, *value, *traceback;
    Tags *tags = w->tags;
    /* What is open as a value may have had a number as an object. */
    for (; w->depth > 0; w->depth--) {
        Frame *frame = &w->frames[w->depth - 1];
        if (frame->is_open)
            slot_of(tags->slots, tags->size, frame->object)->number = frame->before;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (type != NULL && !PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        forget(tags, base);
        PyErr_Restore(type, value, traceback);
        return FAILED;
    }
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    return forget(tags, base) < 0 ? FAILED : DONE;
}

/* The key that a form of calls had last, and a weak reference to the structure to which it led. */
typedef struct {
    PyObject_HEAD
    char *key;
    size_t size;
    unsigned long epoch;
    PyObject *entry;
} Latest;

static PyTypeObject *latest_type;
static unsigned long epoch_of_keys; /* goes on when what is in keys by address may be let go of while a structure lives */

static void latest_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyMem_Free(((Latest *)self)->key);
    Py_XDECREF(((Latest *)self)->entry);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot latest_slots[] = {
    {Py_tp_dealloc, latest_dealloc},
    {Py_tp_doc, "The key that a form of calls had last."},
    {0, NULL},
};
static PyType_Spec latest_spec = {"sharedtree._native.Latest", sizeof(Latest), 0, Py_TPFLAGS_DEFAULT, latest_slots};

/* The entry for the key of a walk, if the last one of this form had it. A new reference. */
static PyObject *entry_of_latest(const Latest *latest, const Walk *w)
{
    int is_same = latest != NULL && latest->entry != NULL && latest->epoch == epoch_of_keys &&
                  latest->size == w->key_size && memcmp(latest->key, w->key, w->key_size) == 0;
    return is_same ? Py_NewRef(latest->entry) : NULL;
}

static int remember_latest(Latest *latest, const Walk *w, PyObject *entry)
{
    char *key = PyMem_Realloc(latest->key, w->key_size);
    if (key == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(key, w->key, w->key_size);
    latest->key = key, latest->size = w->key_size, latest->epoch = epoch_of_keys;
    replace(&latest->entry, Py_NewRef(entry));
    return 0;
}

static PyObject *native_forget_keys(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    epoch_of_keys++;
    return Py_NewRef(Py_None);
}

/* The structure to which the key of a walk leads; NULL if none is known, or on an error. */
static PyObject *structure_of_key(const Walk *w, PyObject *known, Latest *latest)
{
    PyObject *entry = entry_of_latest(latest, w), *structure = entry == NULL ? NULL : PyObject_CallNoArgs(entry);
    Py_XDECREF(entry);
    if (structure != NULL && structure != Py_None)
        return structure;
    Py_XDECREF(structure);
    PyObject *key = PyBytes_FromStringAndSize(w->key, (Py_ssize_t)w->key_size);
    /* Held, for what follows may collect garbage, and with it what the entry is of. */
    entry = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(known, key));
    structure = entry == NULL ? NULL : PyObject_CallNoArgs(entry);
    if (structure == Py_None)
        Py_CLEAR(structure);
    if (structure != NULL && latest != NULL && remember_latest(latest, w, entry) < 0)
        Py_CLEAR(structure);
    Py_XDECREF(entry);
    Py_XDECREF(key);
    return structure;
}

/* Walks over a tree, and looks up the structure that its key leads to in `known`. OPENED if there is one; DONE if Python has to walk;
   FAILED with an error that is not Python's to explain. */
static int walk_tree(Walk *w, PyObject *tree, int convention, PyObject *known, Latest *latest, PyObject **structure)
{
    Py_ssize_t base = PyList_Size(w->tags->objects);
    w->expected = base;
    w->leaves = PyList_New(0);
    *structure = NULL;
    if (w->leaves != NULL && walk_all(w, tree, convention) == 0)
        *structure = structure_of_key(w, known, latest);
    return *structure != NULL ? OPENED : take_back(w, base);
}

static PyObject *native_walk(PyObject *module, PyObject *args)
{
    PyObject *tree, *rules, *known, *structure, *result = NULL;
    Tags *tags;
    int flags, convention;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!O!", &tree, tags_type, &tags, &PyTuple_Type, &rules, &PyDict_Type, &known))
        return NULL;
    int is_for_native = read_rules(rules, &flags, &convention);
    if (is_for_native < 0)
        return NULL;
    if (!is_for_native)
        return Py_NewRef(Py_None);
    Walk w = new_walk(tags, flags);
    int outcome = walk_tree(&w, tree, convention, known, NULL, &structure);
    if (outcome == OPENED)
        result = PyTuple_Pack(2, w.leaves, structure);
    else if (outcome == DONE)
        result = Py_NewRef(Py_None);
    Py_XDECREF(structure);
    end_walk(&w);
    return result;
}

/* --- keys of what Python has read -------------------------------------------------------------------------------- */

/* The kind of a NodeType, which Python is asked for if no instance was met. NULL on an error. */
static Kind *kind_described(PyObject *node_type)
{
    PyObject *cls = PyTuple_GetItem(node_type, 0);
    Kind *kind = cls == NULL ? NULL : kind_of((PyTypeObject *)cls);
    if (kind != NULL || cls == NULL)
        return kind;
    PyObject *described = PyObject_CallFunctionObjArgs(describe, node_type, NULL);
    kind = described == NULL ? NULL : new_kind(described);
    Py_XDECREF(described);
    return kind;
}

/* The value of a `Static`, which nobody else can change; a new reference. */
static PyObject *snapshot(PyObject *value)
{
    if (Py_TYPE(value) == static_op)
        return PyObject_GetAttr(value, name_value);
    PyErr_SetString(PyExc_TypeError, "not a static value");
    return NULL;
}

/* A node: its type, the number of its children, its auxiliary data. */
static int emit_visited_node(Walk *w, PyObject *visited)
{
    PyObject *node_type, *of_aux;
    Py_ssize_t num_children;
    if (!PyArg_ParseTuple(visited, "O!nO", &PyTuple_Type, &node_type, &num_children, &of_aux))
        return -1;
    PyObject *aux = snapshot(of_aux);
    Kind *kind = aux == NULL ? NULL : kind_described(node_type);
    int outcome = kind == NULL ? -1 : emit_node(w, kind, num_children, aux);
    Py_XDECREF(aux);
    return outcome;
}

static int emit_visited(Walk *w, PyObject *visited)
{
    if (visited == leaf_op)
        return emit_code(w, 'L');
    if (PyTuple_CheckExact(visited))
        return emit_visited_node(w, visited);
    if (PyLong_CheckExact(visited)) {
        int64_t number = PyLong_AsLongLong(visited);
        return number == -1 && PyErr_Occurred() ? -1 : emit_count(w, 'R', number);
    }
    PyObject *value = snapshot(visited);
    int outcome = value == NULL || emit_code(w, 'S') < 0 ? -1 : emit_static(w, value, 0);
    Py_XDECREF(value);
    return outcome;
}

/* What a key has by address, each followed by the class that it had when it was written. */
static PyObject *pins_of(const Walk *w)
{
    PyObject *pins = PyList_New(0);
    for (size_t i = 0; pins != NULL && i < w->pins.size; i++) {
        PyObject *value = w->pins.items[i], *type = (PyObject *)Py_TYPE(value);
        if (w->key[w->places[i]] == 'P' && (PyTypeObject *)type != type_of_pin(w, i))
            type = Py_None;
        if (PyList_Append(pins, value) < 0 || PyList_Append(pins, type) < 0)
            Py_CLEAR(pins);
    }
    return pins;
}

static PyObject *native_key_of(PyObject *module, PyObject *args)
{
    PyObject *visited, *rules, *key = NULL, *pins = NULL, *result = NULL;
    Py_ssize_t base;
    int flags, convention;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyList_Type, &visited, &PyTuple_Type, &rules, &base))
        return NULL;
    int is_for_native = read_rules(rules, &flags, &convention);
    if (is_for_native < 0)
        return NULL;
    if (!is_for_native)
        return Py_NewRef(Py_None);
    Walk w = new_walk(NULL, flags);
    w.settled = PyList_New(0);
    int outcome = w.settled == NULL ? -1 : begin_key(&w, convention, base);
    for (Py_ssize_t i = 0; outcome == 0 && i < PyList_Size(visited); i++) {
        PyObject *each = Py_NewRef(PyList_GetItem(visited, i));
        outcome = emit_visited(&w, each);
        Py_DECREF(each);
    }
    if (outcome == 0 && settle_pins(&w) == 0) {
        key = PyBytes_FromStringAndSize(w.key, (Py_ssize_t)w.key_size);
        pins = key == NULL ? NULL : pins_of(&w);
        result = pins == NULL ? NULL : PyTuple_Pack(3, key, pins, w.settled);
    }
    Py_XDECREF(pins);
    Py_XDECREF(key);
    end_walk(&w);
    if (result == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no key says this");
    return result;
}

/* --- build ------------------------------------------------------------------------------------------------------ */

/* The objects of a record's children: `number` of them from `table`, as a list or a tuple. */
static PyObject *children_of(PyObject *numbers, PyObject *table, int as_list)
{
    Py_ssize_t size = PyTuple_Size(numbers);
    PyObject *children = size < 0 ? NULL : as_list ? PyList_New(size) : PyTuple_New(size);
    for (Py_ssize_t i = 0; children != NULL && i < size; i++) {
        Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GetItem(numbers, i));
        PyObject *child = number == -1 && PyErr_Occurred() ? NULL : PyList_GetItem(table, number);
        if (child == NULL) {
            Py_CLEAR(children);
        } else if (as_list) {
            PyList_SetItem(children, i, Py_NewRef(child));
        } else {
            PyTuple_SetItem(children, i, Py_NewRef(child));
        }
    }
    return children;
}

/* Gives an NNX object a `_trace_state` of the trace in which it is built. All objects of one build have the same, since
   nothing ever writes to one. */
static int set_trace_state(PyObject *object, PyObject *slot, PyObject **state)
{
    if (*state == NULL) {
        PyObject *trace = PyObject_CallNoArgs(current_trace);
        *state = trace == NULL ? NULL : new_object(trace_type, empty_tuple, NULL);
        if (*state != NULL && set_slot(jax_trace, *state, trace) < 0)
            Py_CLEAR(*state);
        Py_XDECREF(trace);
    }
    return *state == NULL ? -1 : set_slot(slot, object, *state);
}

static int are_pairs(PyObject *aux)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(aux); i++) {
        if (!is_tuple_of(PyTuple_GetItem(aux, i), 2))
            return 0;
    }
    return 1;
}

static PyObject *call_with_children(PyObject *function, PyObject *aux, PyObject *numbers, PyObject *table)
{
    PyObject *children = children_of(numbers, table, aux != NULL); /* what is registered with JAX gets a tuple from it, too */
    PyObject *made = children == NULL ? NULL
                     : aux == NULL    ? PyObject_CallFunctionObjArgs(function, children, NULL)
                                      : PyObject_CallFunctionObjArgs(function, aux, children, NULL);
    Py_XDECREF(children);
    return made;
}

/* Puts a node together by what is registered for its class. */
static PyObject *build_registered(PyObject *node, PyObject *numbers, PyObject *table)
{
    PyObject *unflatten = PyObject_GetAttr(node, name_unflatten);
    PyObject *made = unflatten == NULL ? NULL : call_with_children(unflatten, NULL, numbers, table);
    Py_XDECREF(unflatten);
    return made;
}

/* Puts a node together as Python does: with auxiliary data that may be a copy, by any function. */
static PyObject *build_in_python(PyObject *node, PyObject *numbers, PyObject *table)
{
    PyObject *node_type = PyObject_GetAttr(node, name_type);
    PyObject *put_together = node_type == NULL ? NULL : PyObject_GetAttrString(node_type, "put_together");
    PyObject *aux = put_together == NULL ? NULL : PyObject_GetAttr(node, name_aux);
    PyObject *thawed = aux == NULL ? NULL : PyObject_CallMethodObjArgs(aux, name_thaw, NULL);
    PyObject *made = thawed == NULL ? NULL : call_with_children(put_together, thawed, numbers, table);
    Py_XDECREF(thawed);
    Py_XDECREF(aux);
    Py_XDECREF(put_together);
    Py_XDECREF(node_type);
    return made;
}

/* Whether a static value can be mutated, so that each tree gets a copy of its own; -1 on an error. */
static int is_mutable(PyObject *value)
{
    PyObject *found = PyObject_GetAttr(value, name_is_mutable);
    int outcome = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return outcome;
}

/* The object of the other side with this number: of a list, or what a function says. */
static PyObject *taken(PyObject *number, PyObject *given)
{
    if (!PyList_CheckExact(given))
        return PyObject_CallFunctionObjArgs(given, number, NULL);
    Py_ssize_t place = PyLong_AsSsize_t(number);
    return place == -1 && PyErr_Occurred() ? NULL : Py_XNewRef(PyList_GetItem(given, place));
}

/* The object of the other side that gets this content: at once, or when everything has been built. */
static PyObject *updated(PyObject *number, PyObject *content, PyObject *given, PyObject *update)
{
    if (!PyList_CheckExact(update))
        return PyObject_CallFunctionObjArgs(update, number, content, NULL);
    PyObject *target = taken(number, given);
    if (target != NULL && (PyList_Append(update, target) < 0 || PyList_Append(update, content) < 0))
        Py_CLEAR(target);
    return target;
}

/* --- programs: records, with all looked up that takes no part in how often they are built -------------------------- */

enum { TRACED = -5, CONSTANT, COPIED, TAKEN, IN_PYTHON }; /* or else the shape of a node */

typedef struct {
    int shape;
    Kind *kind;               /* of a node; its shape may become another, and what is registered is called instead */
    PyObject *op, *numbers;   /* the record; borrowed from the records */
    PyObject *node, *target;  /* the operation that makes the object; and the number of the other side's object that it gives,
                                 or that gets it as content */
    PyObject *names;          /* of attributes, in order; or of a dictionary's items */
    PyObject *values;         /* those of them that are static; or else what is called, or the value itself */
    Py_ssize_t start;         /* in `places`: which object each is, or -1 if it is static */
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *records;
    Step *steps;
    Py_ssize_t num_steps, root;
    int is_noted, updates;    /* as of the structure */
    PyObject *given;          /* likewise; NULL if it has nothing of the other side's */
    Py_ssize_t *places;
    size_t num_places, places_room;
} Program;

static PyTypeObject *program_type;

static int program_traverse(PyObject *self, visitproc visit, void *arg)
{
    Program *program = (Program *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(program->records);
    Py_VISIT(program->given);
    for (Py_ssize_t i = 0; i < program->num_steps; i++) {
        Py_VISIT(program->steps[i].names);
        Py_VISIT(program->steps[i].values);
    }
    return 0;
}

/* There is no `tp_clear`: what a program holds is in its records, too, and these are in a Structure. */
static void program_dealloc(PyObject *self)
{
    Program *program = (Program *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; i < program->num_steps; i++) {
        Py_XDECREF(program->steps[i].names);
        Py_XDECREF(program->steps[i].values);
    }
    PyMem_Free(program->steps);
    PyMem_Free(program->places);
    Py_XDECREF(program->records);
    Py_XDECREF(program->given);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot program_slots[] = {
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_traverse, program_traverse},
    {Py_tp_doc, "The records of a structure, as `build` runs them."},
    {0, NULL},
};
static PyType_Spec program_spec = {"sharedtree._native.Program", sizeof(Program), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                   program_slots};

static int add_place(Program *program, PyObject *number)
{
    Py_ssize_t place = number == NULL ? -1 : PyLong_AsSsize_t(number);
    if (number != NULL && place < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "no such record");
        return -1;
    }
    if (grow((void **)&program->places, &program->places_room, program->num_places + 1, sizeof place) < 0)
        return -1;
    program->places[program->num_places++] = place;
    return 0;
}

/* Adds an attribute, which is a child if it has a number, and otherwise has this value. */
static int add_attribute(Program *program, PyObject *names, PyObject *values, PyObject *name, PyObject *number,
                         PyObject *value)
{
    if (name == NULL || value == NULL || PyList_Append(names, name) < 0 || PyList_Append(values, value) < 0)
        return -1;
    return add_place(program, number);
}

/* The attributes of a module, in order; and last, beyond the names, what is put into its slot. */
static int add_module_attributes(Program *program, PyObject *aux, PyObject *numbers, PyObject *names, PyObject *values)
{
    PyObject *all, *are_static, *noted = PyTuple_GetItem(aux, 0), *statics = PyTuple_GetItem(aux, 1);
    Py_ssize_t num_static = 0;
    if (!read_kinds(noted, &all, &are_static)) {
        PyErr_SetString(PyExc_TypeError, "not the kinds of attributes");
        return -1;
    }
    int outcome = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(all) && outcome == 0; i++) {
        int is_static = PyBytes_AsString(are_static)[i];
        PyObject *number = is_static ? NULL : PyTuple_GetItem(numbers, i - num_static);
        PyObject *value = is_static ? PyTuple_GetItem(statics, num_static++) : Py_None;
        outcome = add_attribute(program, names, values, PyTuple_GetItem(all, i), number, value);
    }
    Py_DECREF(all);
    Py_DECREF(are_static);
    return outcome < 0 ? -1 : PyList_Append(values, noted);
}

/* The attributes of a node that has a dictionary of them, in the order in which they are set. */
static int add_attributes(Program *program, Kind *kind, PyObject *aux, PyObject *numbers, PyObject *names,
                          PyObject *values)
{
    int outcome = 0;
    if (kind->shape == DATACLASS || kind->shape == SLOTS) {
        const char *is_static = PyBytes_AsString(kind->is_static), *places = PyBytes_AsString(kind->places);
        for (Py_ssize_t i = 0; i < PyTuple_Size(kind->order) && outcome == 0; i++) {
            Py_ssize_t place = (unsigned char)places[i];
            outcome = add_attribute(program, names, values, PyTuple_GetItem(kind->order, i),
                                    is_static[i] ? NULL : PyTuple_GetItem(numbers, place),
                                    is_static[i] ? PyTuple_GetItem(aux, place) : Py_None);
        }
        return outcome;
    }
    if (kind->shape == MODULE)
        return add_module_attributes(program, aux, numbers, names, values);
    PyObject *traced = PyTuple_GetItem(aux, 0), *statics = PyTuple_GetItem(aux, 1);
    for (Py_ssize_t i = 0; i < PyTuple_Size(numbers) && outcome == 0; i++) {
        PyObject *name = PyTuple_GetItem(traced, i);
        name = PyUnicode_CheckExact(name) ? Py_NewRef(name) : PyObject_Str(name);
        outcome = add_attribute(program, names, values, name, PyTuple_GetItem(numbers, i), Py_None);
        Py_XDECREF(name);
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(statics) && outcome == 0; i++) {
        PyObject *name = PyTuple_GetItem(statics, i), *value = kind->shape == FIELDS ? NULL : PyTuple_GetItem(aux, 2);
        value = value == NULL ? PyTuple_GetItem(name, 1) : PyTuple_GetItem(value, i);
        name = kind->shape == FIELDS ? PyTuple_GetItem(name, 0) : name;
        name = name == NULL ? NULL : PyUnicode_CheckExact(name) ? Py_NewRef(name) : PyObject_Str(name);
        outcome = add_attribute(program, names, values, name, NULL, value);
        Py_XDECREF(name);
    }
    return outcome;
}

/* Whether the auxiliary data of a node is as its kind says, so that it can be built without Python. */
static int is_as_described(Kind *kind, PyObject *aux, Py_ssize_t size)
{
    switch (kind->shape) {
    case FIELDS:
        return is_tuple_of(aux, 2) && is_tuple_of(PyTuple_GetItem(aux, 0), size) &&
               PyTuple_CheckExact(PyTuple_GetItem(aux, 1)) && are_pairs(PyTuple_GetItem(aux, 1));
    case DATACLASS:
    case SLOTS:
        return is_tuple_of(aux, PyTuple_Size(kind->statics)) && size == PyTuple_Size(kind->traced);
    case NNX_OBJECT:
        return is_nnx_aux(aux, size);
    case NNX_STATE:
        return is_tuple_of(aux, 2) && size == 0;
    case NNX_VARIABLE:
        return PyTuple_CheckExact(aux) && size == 1 && are_pairs(aux);
    case MODULE:
        return is_module_aux(aux, size);
    case DICT:
    case ORDERED_DICT:
        return is_tuple_of(aux, size);
    case NAMEDTUPLE:
        return aux == Py_None;
    case DEFAULT_DICT:
        return is_tuple_of(aux, 2) && is_tuple_of(PyTuple_GetItem(aux, 1), size);
    }
    return kind->shape == DEQUE || kind->shape == NOTHING || kind->shape == TUPLE || kind->shape == LIST || kind->shape == OTHER;
}

/* How a node is put together without Python. Leaves the step as it is if its auxiliary data is not as its kind says. */
static int compile_node(Program *program, Step *step, PyObject *aux)
{
    Kind *kind = step->kind;
    PyObject *names = NULL, *values = NULL;
    int outcome = 0;
    Py_ssize_t size = PyTuple_Size(step->numbers);
    if (!is_as_described(kind, aux, size))
        return 0;
    step->start = (Py_ssize_t)program->num_places;
    switch (kind->shape) {
    case FIELDS:
    case DATACLASS:
    case SLOTS:
    case NNX_OBJECT:
    case MODULE:
        names = PyList_New(0), values = PyList_New(0);
        outcome = names == NULL || values == NULL
                      ? -1
                      : add_attributes(program, kind, aux, step->numbers, names, values);
        step->names = outcome < 0 ? NULL : PyList_AsTuple(names);
        step->values = outcome < 0 ? NULL : PyList_AsTuple(values);
        Py_XDECREF(names);
        Py_XDECREF(values);
        outcome = step->names == NULL ? -1 : 0;
        break;
    case DICT:
    case ORDERED_DICT:
    case DEFAULT_DICT:
        step->names = Py_NewRef(kind->shape == DEFAULT_DICT ? PyTuple_GetItem(aux, 1) : aux);
        step->values = Py_NewRef(kind->shape == DEFAULT_DICT ? PyTuple_GetItem(aux, 0) : Py_None);
        for (Py_ssize_t i = 0; i < size && outcome == 0; i++)
            outcome = add_place(program, PyTuple_GetItem(step->numbers, i));
        break;
    case NNX_VARIABLE:
        outcome = add_place(program, PyTuple_GetItem(step->numbers, 0));
        step->values = PyDict_New();
        for (Py_ssize_t i = 0; step->values != NULL && i < PyTuple_Size(aux) && outcome == 0; i++) {
            PyObject *pair = PyTuple_GetItem(aux, i);
            outcome = PyDict_SetItem(step->values, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
        }
        break;
    case NAMEDTUPLE:
    case OTHER:
        step->values = PyObject_GetAttr(step->node, name_unflatten);
        break;
    default:
        step->values = Py_NewRef(aux);
    }
    step->shape = kind->shape;
    return outcome < 0 || step->values == NULL ? -1 : 0;
}

static int compile_static(Step *step)
{
    int mutable = is_mutable(step->op);
    step->shape = mutable > 0 ? COPIED : CONSTANT;
    step->values = mutable == 0 ? PyObject_GetAttr(step->op, name_value) : NULL;
    return mutable < 0 || (mutable == 0 && step->values == NULL) ? -1 : 0;
}

static int compile_step(Program *program, Step *step)
{
    PyTypeObject *type = Py_TYPE(step->op);
    if (step->op == leaf_op) {
        step->shape = TRACED;
        return 0;
    }
    if (type == static_op)
        return compile_static(step);
    program->updates |= type == update_op;
    if (type == given_op || type == update_op)
        step->target = PyTuple_GetItem(step->op, 0);
    if (type == given_op) {
        step->shape = TAKEN;
        return 0;
    }
    if (type != node_op && type != update_op) {
        PyErr_SetString(PyExc_TypeError, "not an operation");
        return -1;
    }
    step->node = type == update_op ? PyTuple_GetItem(step->op, 1) : step->op;
    step->shape = IN_PYTHON;
    PyObject *node_type = PyObject_GetAttr(step->node, name_type), *value = NULL;
    PyObject *aux = node_type == NULL ? NULL : PyObject_GetAttr(step->node, name_aux);
    step->kind = aux == NULL ? NULL : kind_described(node_type);
    int mutable = step->kind == NULL ? -1 : is_mutable(aux), outcome = mutable < 0 ? -1 : 0;
    /* A kind of namedtuples holds no node type, which would keep the class alive. */
    if (mutable == 0 && step->kind->is_rebuilt && (step->kind->shape == NAMEDTUPLE || step->kind->node_type == node_type)) {
        value = PyObject_GetAttr(aux, name_value);
        outcome = value == NULL ? -1 : compile_node(program, step, value);
    }
    Py_XDECREF(value);
    Py_XDECREF(aux);
    Py_XDECREF(node_type);
    return outcome;
}

static PyObject *native_compile(PyObject *module, PyObject *records)
{
    (void)module;
    if (!PyTuple_CheckExact(records)) {
        PyErr_SetString(PyExc_TypeError, "records are a tuple");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(program_type, Py_tp_alloc);
    Program *program = (Program *)alloc(program_type, 0);
    if (program == NULL)
        return NULL;
    Py_ssize_t size = PyTuple_Size(records);
    program->records = Py_NewRef(records);
    program->steps = PyMem_Calloc((size_t)size + 1, sizeof(Step));
    int outcome = program->steps == NULL ? -1 : 0;
    if (outcome < 0)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < size && outcome == 0; i++) {
        PyObject *each = PyTuple_GetItem(records, i);
        if (!is_tuple_of(each, 2) || !PyTuple_CheckExact(PyTuple_GetItem(each, 1))) {
            PyErr_SetString(PyExc_TypeError, "not a record");
            outcome = -1;
        } else {
            Step *step = &program->steps[program->num_steps++];
            step->op = PyTuple_GetItem(each, 0), step->numbers = PyTuple_GetItem(each, 1);
            outcome = compile_step(program, step);
        }
    }
    if (outcome < 0)
        Py_CLEAR(program);
    return (PyObject *)program;
}

static PyObject *run_attributes(const Program *program, const Step *step, PyObject *table)
{
    PyObject *object = new_object(step->kind->type, empty_tuple, NULL), *attributes = NULL;
    /* NNX asks a class's own descriptors. */
    int is_dict = step->shape == FIELDS || step->shape == DATACLASS || step->shape == MODULE;
    if (object != NULL && is_dict && (attributes = PyObject_GenericGetDict(object, NULL)) == NULL)
        Py_CLEAR(object);
    Py_ssize_t size = object == NULL ? 0 : PyTuple_Size(step->names);
    for (Py_ssize_t i = 0; i < size && object != NULL; i++) {
        Py_ssize_t place = program->places[step->start + i];
        PyObject *value = place >= 0 ? PyList_GetItem(table, place) : PyTuple_GetItem(step->values, i);
        PyObject *name = PyTuple_GetItem(step->names, i);
        Py_XINCREF(value);
        int outcome = value == NULL ? -1
                      : is_dict     ? PyDict_SetItem(attributes, name, value)
                                    : PyObject_GenericSetAttr(object, name, value);
        Py_XDECREF(value);
        if (outcome < 0)
            Py_CLEAR(object);
    }
    Py_XDECREF(attributes);
    if (object != NULL && step->shape == MODULE &&
        set_slot(kinds_of_attributes, object, PyTuple_GetItem(step->values, size)) < 0)
        Py_CLEAR(object);
    return object;
}

static PyObject *run_dict(const Program *program, const Step *step, PyObject *table)
{
    PyObject *dict = PyDict_New();
    Py_ssize_t size = PyTuple_Size(step->names);
    for (Py_ssize_t i = 0; dict != NULL && i < size; i++) {
        PyObject *child = PyList_GetItem(table, program->places[step->start + i]);
        /* Setting it may run a key's own code. */
        Py_XINCREF(child);
        if (child == NULL || PyDict_SetItem(dict, PyTuple_GetItem(step->names, i), child) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(child);
    }
    if (dict == NULL || step->shape == DICT)
        return dict;
    PyObject *made = step->shape == DEFAULT_DICT
                         ? PyObject_CallFunctionObjArgs((PyObject *)step->kind->type, step->values, dict, NULL)
                         : PyObject_CallFunctionObjArgs((PyObject *)step->kind->type, dict, NULL);
    Py_DECREF(dict);
    return made;
}

static PyObject *run_deque(const Step *step, PyObject *table)
{
    PyObject *items = children_of(step->numbers, table, 1);
    PyObject *made = items == NULL ? NULL
                                   : PyObject_CallFunctionObjArgs((PyObject *)step->kind->type, items, step->values, NULL);
    Py_XDECREF(items);
    return made;
}

static PyObject *run_nnx_variable(const Program *program, const Step *step, PyObject *table, PyObject **trace_state)
{
    PyObject *object = new_object(step->kind->type, empty_tuple, NULL);
    PyObject *metadata = object == NULL ? NULL : PyDict_Copy(step->values);
    PyObject *value = metadata == NULL ? NULL : PyList_GetItem(table, program->places[step->start]);
    Py_XINCREF(value);
    if (object != NULL && (value == NULL || set_trace_state(object, variable_trace, trace_state) < 0 ||
                           set_slot(raw_value, object, value) < 0 || set_slot(metadata_of, object, metadata) < 0))
        Py_CLEAR(object);
    Py_XDECREF(value);
    Py_XDECREF(metadata);
    return object;
}

static PyObject *run_nnx_state(const Step *step, PyObject **trace_state)
{
    PyObject *object = new_object(step->kind->type, empty_tuple, NULL);
    if (object != NULL && (set_slot(initializing, object, PyTuple_GetItem(step->values, 0)) < 0 ||
                           set_slot(is_setup, object, PyTuple_GetItem(step->values, 1)) < 0 ||
                           set_trace_state(object, state_trace, trace_state) < 0))
        Py_CLEAR(object);
    return object;
}

static PyObject *run_node(const Program *program, const Step *step, PyObject *table, PyObject **trace_state)
{
    if (step->shape == IN_PYTHON)
        return build_in_python(step->node, step->numbers, table);
    if (step->shape != step->kind->shape)
        return build_registered(step->node, step->numbers, table);
    switch (step->shape) {
    case TUPLE:
    case LIST:
        return children_of(step->numbers, table, step->shape == LIST);
    case DICT:
    case ORDERED_DICT:
    case DEFAULT_DICT:
        return run_dict(program, step, table);
    case DEQUE:
        return run_deque(step, table);
    case FIELDS:
    case DATACLASS:
    case SLOTS:
    case NNX_OBJECT:
    case MODULE:
        return run_attributes(program, step, table);
    case NNX_VARIABLE:
        return run_nnx_variable(program, step, table, trace_state);
    case NNX_STATE:
        return run_nnx_state(step, trace_state);
    case NAMEDTUPLE:
    case OTHER:
        return call_with_children(step->values, NULL, step->numbers, table);
    }
    return Py_NewRef(Py_None);
}

static PyObject *run_step(const Program *program, const Step *step, PyObject *table, PyObject *given, PyObject *update,
                          PyObject **trace_state)
{
    switch (step->shape) {
    case CONSTANT:
        return Py_NewRef(step->values);
    case COPIED:
        return PyObject_CallMethodObjArgs(step->op, name_thaw, NULL);
    case TAKEN:
        return taken(step->target, given);
    }
    PyObject *made = run_node(program, step, table, trace_state);
    if (made == NULL || step->target == NULL)
        return made;
    PyObject *target = updated(step->target, made, given, update);
    Py_DECREF(made);
    return target;
}

static int run_program(Program *program, PyObject *leaves, PyObject *table, PyObject *given, PyObject *update)
{
    PyObject *trace_state = NULL;
    Py_ssize_t next = 0, num_leaves = PyTuple_Size(leaves);
    int outcome = 0;
    for (Py_ssize_t i = 0; i < program->num_steps && outcome == 0; i++) {
        const Step *step = &program->steps[i];
        if (step->shape == TRACED) {
            if (next == num_leaves) {
                PyErr_SetNone(PyExc_StopIteration);
                outcome = -1;
            } else {
                outcome = PyList_Append(table, PyTuple_GetItem(leaves, next++));
            }
            continue;
        }
        PyObject *made = run_step(program, step, table, given, update, &trace_state);
        outcome = made == NULL ? -1 : PyList_Append(table, made);
        Py_XDECREF(made);
    }
    Py_XDECREF(trace_state);
    return outcome;
}

/* What a program has to know of its structure beside the records; -1 on an error. */
static int learn_structure(Program *program, PyObject *structure)
{
    PyObject *root = PyObject_GetAttr(structure, name_root);
    PyObject *is_noted = root == NULL ? NULL : PyObject_GetAttr(structure, name_is_noted);
    PyObject *given = is_noted == NULL ? NULL : PyObject_GetAttr(structure, name_given);
    program->root = root == NULL ? -1 : PyLong_AsSsize_t(root);
    program->is_noted = is_noted == NULL ? -1 : PyObject_IsTrue(is_noted);
    int takes = given == NULL ? -1 : PyObject_IsTrue(given);
    if (takes > 0)
        program->given = Py_NewRef(given);
    Py_XDECREF(root);
    Py_XDECREF(is_noted);
    Py_XDECREF(given);
    return takes < 0 || program->is_noted < 0 || PyErr_Occurred() ? -1 : 0;
}

/* The program of a structure, made when it is first asked for. */
static PyObject *program_of(PyObject *structure)
{
    PyObject *program = PyObject_GetAttr(structure, name_program);
    if (program == NULL || Py_TYPE(program) == program_type)
        return program;
    Py_DECREF(program);
    PyObject *records = PyObject_GetAttr(structure, name_records);
    program = records == NULL ? NULL : native_compile(NULL, records);
    if (program != NULL && (learn_structure((Program *)program, structure) < 0 ||
                            PyObject_SetAttr(structure, name_program, program) < 0))
        Py_CLEAR(program);
    Py_XDECREF(records);
    return program;
}

/* Appends one object for each record to `table`. The caller holds the program, which its structure may lose meanwhile. */
static int build_onto(PyObject *table, PyObject *program, PyObject *given_leaves, PyObject *given, PyObject *update)
{
    PyObject *leaves = PySequence_Tuple(given_leaves);
    int outcome = leaves == NULL ? -1 : run_program((Program *)program, leaves, table, given, update);
    Py_XDECREF(leaves);
    return outcome;
}

static PyObject *compiled_sequence(PyObject *sequence)
{
    PyObject *records = PySequence_Tuple(sequence), *program = records == NULL ? NULL : native_compile(NULL, records);
    Py_XDECREF(records);
    return program;
}

static PyObject *native_build(PyObject *module, PyObject *args)
{
    PyObject *what, *leaves, *table, *given, *update;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO!OO", &what, &leaves, &PyList_Type, &table, &given, &update))
        return NULL;
    PyObject *program = Py_TYPE(what) == program_type                  ? Py_NewRef(what)
                        : PyTuple_Check(what) || PyList_Check(what) ? compiled_sequence(what)
                                                                       : program_of(what);
    int outcome = program == NULL ? -1 : build_onto(table, program, leaves, given, update);
    Py_XDECREF(program);
    return outcome < 0 ? NULL : Py_NewRef(Py_None);
}

/* --- writing back ----------------------------------------------------------------------------------------------- */

#define MOST_SLOTS 64

/* The slots of a kind that has no other attributes; their number. */
static int slots_of(const Kind *kind, PyObject *slots[3])
{
    if (kind->shape != NNX_VARIABLE && kind->shape != NNX_STATE)
        return 0;
    slots[0] = kind->shape == NNX_VARIABLE ? raw_value : initializing;
    slots[1] = kind->shape == NNX_VARIABLE ? metadata_of : is_setup;
    slots[2] = kind->shape == NNX_VARIABLE ? variable_trace : state_trace;
    return 3;
}

/* The value of a slot of an object, for its content; NULL, without an error if it has none. */
static PyObject *value_in_slot(PyObject *object, const Kind *kind, int i)
{
    PyObject *slots[3], *value;
    if (kind->shape == SLOTS)
        value = PyObject_GenericGetAttr(object, PyTuple_GetItem(kind->order, i));
    else
        value = slots_of(kind, slots) ? get_slot(slots[i], object, NULL) : NULL;
    if (value == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Clear();
    return value;
}

/* What an object holds, to be written into another: a list, a dictionary, that of its attributes, or the values of its
   slots; of a module the attributes and their kinds. NULL without an error if only Python can tell. */
static PyObject *content_of(PyObject *object, const Kind *kind)
{
    PyObject *slots[3], *content = NULL, *noted;
    Py_ssize_t num_slots = kind->shape == SLOTS ? PyTuple_Size(kind->order) : slots_of(kind, slots);
    switch (kind->shape) {
    case LIST:
    case DICT:
    case ORDERED_DICT:
    case DEFAULT_DICT:
    case DEQUE:
        return Py_NewRef(object);
    case FIELDS:
    case DATACLASS:
    case NNX_OBJECT:
    case MODULE:
        content = PyObject_GenericGetDict(object, NULL);
        if (content != NULL && !PyDict_CheckExact(content))
            Py_CLEAR(content);
        if (content == NULL || kind->shape != MODULE)
            return content;
        noted = get_slot(kinds_of_attributes, object, NULL);
        replace(&content, noted == NULL ? NULL : PyTuple_Pack(2, content, noted));
        Py_XDECREF(noted);
        if (content == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        return content;
    }
    if (num_slots == 0 || num_slots > MOST_SLOTS)
        return NULL;
    content = PyTuple_New(num_slots);
    for (int i = 0; content != NULL && i < num_slots; i++) {
        PyObject *value = value_in_slot(object, kind, i);
        if (value != NULL)
            PyTuple_SetItem(content, i, value);
        else
            Py_CLEAR(content);
    }
    return content;
}

static int remove_names(PyObject *dict, PyObject *names, PyObject *unless)
{
    Py_ssize_t size = PySequence_Size(names);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *name = PySequence_GetItem(names, i);
        int stays = name == NULL ? -1 : PyDict_Contains(unless, name);
        int is_there = stays != 0 ? stays : PyDict_Contains(dict, name);
        int outcome = is_there < 0 ? -1 : !stays && is_there ? PyObject_DelItem(dict, name) : 0;
        Py_XDECREF(name);
        if (outcome < 0)
            return -1;
    }
    return size < 0 ? -1 : 0;
}

/* What an object holds is in this: itself, or the dictionary of its attributes. As `content_of` otherwise. */
static PyObject *holder_of(PyObject *object, const Kind *kind)
{
    int is_dict = kind->shape == FIELDS || kind->shape == DATACLASS || kind->shape == NNX_OBJECT;
    return is_dict ? content_of(object, kind) : Py_NewRef(object);
}

/* Puts items into a dictionary; what stays keeps its place. One that has an order of its own is asked. */
static int update_dict(PyObject *dict, PyObject *items, int shape)
{
    if (shape != ORDERED_DICT)
        return PyDict_Update(dict, items);
    PyObject *keys = PyMapping_Keys(items);
    int outcome = keys == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; outcome == 0 && i < PyList_Size(keys); i++) {
        PyObject *key = PyList_GetItem(keys, i), *value = Py_XNewRef(PyDict_GetItemWithError(items, key));
        outcome = value == NULL ? -1 : PyObject_SetItem(dict, key, value);
        Py_XDECREF(value);
    }
    Py_XDECREF(keys);
    return outcome;
}

static int write_deque(PyObject *deque, PyObject *items)
{
    PyObject *cleared = PyObject_CallMethod(deque, "clear", NULL);
    PyObject *extended = cleared == NULL ? NULL : PyObject_CallMethod(deque, "extend", "O", items);
    Py_XDECREF(cleared);
    Py_XDECREF(extended);
    return extended == NULL ? -1 : 0;
}

/* Writes a content into a holder of the same kind, or back into its own: attributes that no field declares stay. */
static int write_content(PyObject *holder, const Kind *kind, int shape, PyObject *content, int is_own)
{
    PyObject *slots[3], *names = NULL, *attributes = NULL;
    int outcome = 0;
    if (shape == NNX_VARIABLE || shape == NNX_STATE || shape == SLOTS) {
        slots_of(kind, slots);
        for (Py_ssize_t i = 0; i < PyTuple_Size(content) && outcome == 0; i++) {
            PyObject *value = PyTuple_GetItem(content, i);
            outcome = shape == SLOTS ? PyObject_GenericSetAttr(holder, PyTuple_GetItem(kind->order, i), value)
                                     : set_slot(slots[i], holder, value);
        }
        return outcome;
    }
    if (shape == LIST)
        return PyList_SetSlice(holder, 0, PY_SSIZE_T_MAX, content);
    if (shape == DEQUE)
        return write_deque(holder, content);
    if (shape == MODULE) {
        attributes = PyObject_GenericGetDict(holder, NULL);
        if (attributes == NULL || set_slot(kinds_of_attributes, holder, PyTuple_GetItem(content, 1)) < 0) {
            Py_XDECREF(attributes);
            return -1;
        }
        holder = attributes, content = PyTuple_GetItem(content, 0);
    }
    if (!is_own && (shape == FIELDS || shape == DATACLASS)) {
        outcome = remove_names(holder, kind->traced, content);
        if (outcome == 0)
            outcome = remove_names(holder, kind->statics, content);
    } else {
        names = PyDict_Keys(holder);
        outcome = names == NULL ? -1 : remove_names(holder, names, content);
    }
    if (outcome == 0)
        outcome = update_dict(holder, content, shape);
    Py_XDECREF(names);
    Py_XDECREF(attributes);
    return outcome;
}

/* A content that stays as it is when its object is written to. */
static PyObject *copy_of(PyObject *content, int shape)
{
    switch (shape) {
    case LIST:
        return PyList_GetSlice(content, 0, PY_SSIZE_T_MAX);
    case DEQUE:
        return PySequence_List(content);
    case ORDERED_DICT:
        return PyObject_CallMethod(content, "copy", NULL);
    }
    if (shape == MODULE) {
        PyObject *attributes = PyDict_Copy(PyTuple_GetItem(content, 0));
        PyObject *copy = attributes == NULL ? NULL : PyTuple_Pack(2, attributes, PyTuple_GetItem(content, 1));
        Py_XDECREF(attributes);
        return copy;
    }
    return PyDict_Check(content) ? PyDict_Copy(content) : Py_NewRef(content);
}

/* Something that is to be written. */
typedef struct {
    const Kind *kind;
    int shape; /* of the kind, which may become another */
} Writing;

/* For each target what holds its content, what is to be written there, and what it holds now, in turn. NULL without an
   error as `content_of`. */
static PyObject *contents_of(PyObject *pairs, Writing *writings)
{
    Py_ssize_t size = PyList_Size(pairs);
    PyObject *contents = PyList_New(0);
    for (Py_ssize_t i = 0; contents != NULL && i + 1 < size; i += 2) {
        PyObject *target = PyList_GetItem(pairs, i), *source = PyList_GetItem(pairs, i + 1);
        Kind *kind = Py_TYPE(target) == Py_TYPE(source) ? kind_of(Py_TYPE(target)) : NULL;
        PyObject *now = kind == NULL ? NULL : content_of(target, kind);
        PyObject *then = now == NULL ? NULL : content_of(source, kind), *before = then == NULL ? NULL : copy_of(now, kind->shape);
        PyObject *holder = before == NULL ? NULL : holder_of(target, kind);
        writings[i / 2] = (Writing){kind, kind == NULL ? 0 : kind->shape};
        if (holder == NULL || PyList_Append(contents, holder) < 0 || PyList_Append(contents, then) < 0 ||
            PyList_Append(contents, before) < 0)
            Py_CLEAR(contents);
        Py_XDECREF(holder);
        Py_XDECREF(before);
        Py_XDECREF(then);
        Py_XDECREF(now);
    }
    return contents;
}

/* Writes the contents one after the other; all back if one cannot be written. */
static int write_all(PyObject *contents, const Writing *writings)
{
    Py_ssize_t size = PyList_Size(contents) / 3, written = 0;
    int outcome = 0;
    for (; outcome == 0 && written < size; written++) {
        Writing w = writings[written];
        outcome = write_content(PyList_GetItem(contents, 3 * written), w.kind, w.shape,
                                PyList_GetItem(contents, 3 * written + 1), 0);
    }
    if (outcome == 0)
        return 0;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    while (written-- > 0) {
        Writing w = writings[written];
        if (write_content(PyList_GetItem(contents, 3 * written), w.kind, w.shape,
                          PyList_GetItem(contents, 3 * written + 2), 1) < 0)
            PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    return -1;
}

/* Writes what is pending: 1, 0 if that is left to Python, -1 on an error. */
static int write_back(PyObject *pairs)
{
    Writing *writings = PyMem_Calloc((size_t)PyList_Size(pairs) / 2 + 1, sizeof *writings);
    if (writings == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    /* What was in the targets is held until everything is written, so that no finaliser runs in between. */
    PyObject *contents = contents_of(pairs, writings);
    int outcome = contents == NULL ? -1 : write_all(contents, writings);
    PyMem_Free(writings);
    if (contents == NULL && !PyErr_Occurred())
        return 0;
    Py_XDECREF(contents);
    return outcome < 0 ? -1 : 1;
}

static PyObject *native_write_back(PyObject *module, PyObject *pairs)
{
    (void)module;
    if (!PyList_CheckExact(pairs)) {
        PyErr_SetString(PyExc_TypeError, "not a list");
        return NULL;
    }
    int outcome = write_back(pairs);
    return outcome < 0 ? NULL : Py_NewRef(outcome ? Py_True : Py_False);
}

/* --- what calls are made of -------------------------------------------------------------------------------------- */

static PyObject *new_parts(PyTypeObject *type, PyObject *one, PyObject *two, PyObject *three)
{
    PyObject *made = PyType_GenericAlloc(type, 0), *given[3] = {one, two, three};
    for (int i = 0; made != NULL && i < 3; i++)
        parts_of(made)[i] = Py_XNewRef(given[i]);
    return made;
}

/* Its parts are set by `__init__`. */
static PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    return new_parts(type, NULL, NULL, NULL);
}

static int parts_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < 3; i++)
        Py_VISIT(parts_of(self)[i]);
    return 0;
}

static int parts_clear(PyObject *self)
{
    for (int i = 0; i < 3; i++)
        Py_CLEAR(parts_of(self)[i]);
    return 0;
}

static void parts_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    parts_clear(self);
    release(self);
    Py_DECREF(type);
}

static PyObject *parts_get(PyObject *self, void *which)
{
    PyObject *part = parts_of(self)[(intptr_t)which];
    if (part == NULL)
        PyErr_SetString(PyExc_AttributeError, "this part was not set");
    return Py_XNewRef(part);
}

static int parts_set(PyObject *self, PyObject *part, void *which)
{
    replace(&parts_of(self)[(intptr_t)which], Py_XNewRef(part));
    return 0;
}

#define PARTS {Py_tp_dealloc, parts_dealloc}, {Py_tp_traverse, parts_traverse}, {Py_tp_clear, parts_clear}
#define PARTS_SPEC(name, slots)                                                                                             \
    {"sharedtree._native." name, sizeof(Parts), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots}

/* Which leaves of a structure a hand has: the aux data that JAX compares. */
static PyObject *deal_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"structure", "numbers", "call", NULL};
    PyObject *structure, *numbers = Py_None, *call = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO", names, &structure, &numbers, &call))
        return NULL;
    return new_parts(type, structure, numbers, call);
}

static Py_hash_t deal_hash(PyObject *self)
{
    PyObject **own = parts_of(self);
    size_t hash = mixed(own[STRUCTURE_OF]);
    if (own[NUMBERS_OF] != NULL && own[NUMBERS_OF] != Py_None)
        hash ^= (size_t)PyObject_Size(own[NUMBERS_OF]) + 1;
    PyErr_Clear();
    return (Py_hash_t)hash == -1 ? -2 : (Py_hash_t)hash;
}

static PyObject *deal_compare(PyObject *self, PyObject *other, int op)
{
    if ((op != Py_EQ && op != Py_NE) || Py_TYPE(self) != Py_TYPE(other))
        return Py_NewRef(Py_NotImplemented);
    PyObject **one = parts_of(self), **two = parts_of(other);
    int are_equal = one[STRUCTURE_OF] == two[STRUCTURE_OF];
    if (are_equal && one[NUMBERS_OF] != two[NUMBERS_OF])
        are_equal = one[NUMBERS_OF] != NULL && two[NUMBERS_OF] != NULL
                        ? PyObject_RichCompareBool(one[NUMBERS_OF], two[NUMBERS_OF], Py_EQ)
                        : 0;
    return are_equal < 0 ? NULL : Py_NewRef(are_equal == (op == Py_EQ) ? Py_True : Py_False);
}

static PyGetSetDef deal_getset[] = {
    {"structure", parts_get, NULL, "Of the whole tree.", (void *)STRUCTURE_OF},
    {"numbers", parts_get, NULL, "Which of its leaves; None for all.", (void *)NUMBERS_OF},
    {"call", parts_get, parts_set, "The caller's side of the call that is under way. Not compared.", (void *)CALL_OF},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot deal_slots[] = {
    {Py_tp_new, deal_new}, PARTS, {Py_tp_hash, deal_hash}, {Py_tp_richcompare, deal_compare},
    {Py_tp_getset, deal_getset}, {Py_tp_doc, "Which leaves of a structure a hand has."}, {0, NULL},
};
static PyType_Spec deal_spec = PARTS_SPEC("Deal", deal_slots);

static PyGetSetDef hand_getset[] = {
    {"leaves", parts_get, parts_set, "In order.", (void *)LEAVES_OF},
    {"deal", parts_get, parts_set, "Which they are.", (void *)DEAL_OF},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot hand_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_getset, hand_getset}, {Py_tp_doc, "The leaves that are dealt together."}, {0, NULL},
};
static PyType_Spec hand_spec = PARTS_SPEC("Hand", hand_slots);

static PyGetSetDef arguments_getset[] = {
    {"aux", parts_get, parts_set, "What all of them are called.", (void *)AUX_OF},
    {"args", parts_get, parts_set, "By position.", (void *)ARGS_OF},
    {"kwargs", parts_get, parts_set, "By keyword.", (void *)KWARGS_OF},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot arguments_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_getset, arguments_getset}, {Py_tp_doc, "The arguments of a call."}, {0, NULL},
};
static PyType_Spec arguments_spec = PARTS_SPEC("Arguments", arguments_slots);

/* How JAX takes a hand apart. */
static PyObject *native_hand_parts(PyObject *module, PyObject *hand)
{
    (void)module;
    int is_hand = PyObject_TypeCheck(hand, hand_base);
    PyObject *leaves = is_hand ? parts_of(hand)[LEAVES_OF] : NULL, *deal = is_hand ? parts_of(hand)[DEAL_OF] : NULL;
    if (leaves == NULL || deal == NULL) {
        PyErr_SetString(is_hand ? PyExc_AttributeError : PyExc_TypeError, "not a whole hand");
        return NULL;
    }
    return PyTuple_Pack(2, leaves, deal);
}

/* How JAX puts it together. */
static PyObject *native_hand_of(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || hand_type == NULL) {
        PyErr_SetString(PyExc_TypeError, "a deal and leaves");
        return NULL;
    }
    PyObject *leaves = PySequence_Tuple(given[1]), *hand = leaves == NULL ? NULL : new_parts(hand_type, leaves, given[0], NULL);
    Py_XDECREF(leaves);
    return hand;
}

/* Takes over what calls are made of. For ever, as what `start` takes over. */
static PyObject *native_learn_calls(PyObject *module, PyObject *args)
{
    PyTypeObject **types[] = {&concrete_array, &hand_type, &deal_type, &arguments_type, &hands_type}, *found[5];
    PyObject *slot, *holder, *name, *policy, *usual, *current;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!OUO!OO", &PyType_Type, &found[0], &PyType_Type, &found[1], &PyType_Type, &found[2],
                          &PyType_Type, &found[3], &PyType_Type, &found[4], &PyMemberDescr_Type, &slot, &holder, &name,
                          &PyType_Type, &policy, &usual, &current))
        return NULL;
    if (!PyType_IsSubtype(found[1], hand_base) || !PyType_IsSubtype(found[2], deal_base) ||
        !PyType_IsSubtype(found[3], arguments_base)) {
        PyErr_SetString(PyExc_TypeError, "not the classes that calls are made of");
        return NULL;
    }
    for (int i = 0; i < 5; i++)
        *types[i] = (PyTypeObject *)Py_NewRef((PyObject *)found[i]);
    hands_parts = Py_NewRef(slot), trace_holder = Py_NewRef(holder), name_trace = Py_NewRef(name);
    policy_type = (PyTypeObject *)Py_NewRef(policy), default_policy = Py_NewRef(usual), current_policy = Py_NewRef(current);
    return Py_NewRef(Py_None);
}

/* --- the whole call ---------------------------------------------------------------------------------------------- */

static PyTypeObject *deferred_type; /* a tuple that nobody else can return: empty, or the result and the call to be finished */
static PyObject *deferred;          /* the empty one */
static PyType_Slot deferred_slots[] = {
    {Py_tp_doc, "What Python has to do: a whole call, or to finish one, of which this has the result."},
    {0, NULL},
};
static PyType_Spec deferred_spec = {"sharedtree._native.Deferred", 0, 0, Py_TPFLAGS_DEFAULT, deferred_slots};

static PyObject *native_flags_of(PyObject *module, PyObject *rules)
{
    int flags, convention, is_for_native = PyTuple_Check(rules) ? read_rules(rules, &flags, &convention) : 0;
    (void)module;
    if (is_for_native == 0)
        PyErr_SetString(PyExc_ValueError, "not rules of a policy");
    return is_for_native <= 0 ? NULL : PyLong_FromLong(flags | convention << 8);
}

/* What a call needs to know of the wrapper, and of how it is called. Borrowed. See `transforms._warm`. */
typedef struct {
    int flags, convention, in_place, finishes;
    PyObject *forms, *write;
    PyObject *aux, *bound, *key, *asks, *made; /* of the form */
    int donates;
    Latest *latest;
} Way;

/* The number of positional arguments and the names of the others. */
static PyObject *form_key(PyObject *args, PyObject *kwargs)
{
    PyObject *count = PyLong_FromSsize_t(PyTuple_Size(args)), *name, *value, *names, *key;
    Py_ssize_t at = 0, i = 0;
    if (count == NULL || PyDict_Size(kwargs) == 0)
        return count;
    names = PyTuple_New(PyDict_Size(kwargs));
    while (names != NULL && PyDict_Next(kwargs, &at, &name, &value))
        PyTuple_SetItem(names, i++, Py_NewRef(name));
    key = names == NULL ? NULL : PyTuple_Pack(2, count, names);
    Py_XDECREF(names);
    Py_DECREF(count);
    return key;
}

/* OPENED, DONE if Python has to see to such a call first, FAILED. The form lives as long as the tuple that it is in. */
static int read_way(PyObject *tuple, PyObject *args, PyObject *kwargs, Way *way, PyObject **form)
{
    *form = NULL;
    if (!is_record(tuple, 6)) {
        PyErr_SetString(PyExc_TypeError, "not what a call needs to know");
        return FAILED;
    }
    long flags = PyLong_AsLong(PyTuple_GetItem(tuple, 1));
    if (flags == -1 && PyErr_Occurred())
        return FAILED;
    way->flags = (int)(flags & 0xff), way->convention = (int)(flags >> 8);
    way->forms = PyTuple_GetItem(tuple, 2), way->in_place = PyTuple_GetItem(tuple, 3) == Py_True;
    way->finishes = PyTuple_GetItem(tuple, 4) == Py_True, way->write = PyTuple_GetItem(tuple, 5);
    if (!PyDict_CheckExact(way->forms))
        return DONE;
    PyObject *key = form_key(args, kwargs);
    *form = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(way->forms, key));
    Py_XDECREF(key);
    if (*form == NULL || *form == Py_None || PyErr_Occurred())
        return PyErr_Occurred() ? FAILED : DONE;
    if (!is_record(*form, 7) || !is_tuple_of(PyTuple_GetItem(*form, 0), 3) ||
        Py_TYPE(PyTuple_GetItem(*form, 5)) != latest_type || !PyDict_CheckExact(PyTuple_GetItem(*form, 6))) {
        PyErr_SetString(PyExc_TypeError, "not a form");
        return FAILED;
    }
    way->aux = PyTuple_GetItem(*form, 0), way->bound = PyTuple_GetItem(*form, 1);
    way->key = PyTuple_GetItem(*form, 2), way->asks = PyTuple_GetItem(*form, 3);
    way->donates = PyTuple_GetItem(*form, 4) == Py_True, way->latest = (Latest *)PyTuple_GetItem(*form, 5);
    way->made = PyTuple_GetItem(*form, 6);
    return OPENED;
}

static int append_item(PyObject *list, PyObject *item)
{
    return item == NULL ? -1 : PyList_Append(list, item);
}

/* Arguments as a signature binds them: what comes before the positional ones, which come by keyword, and which stay so. */
static int bind(PyObject *bound, PyObject *args, PyObject *kwargs, PyObject **own_args, PyObject **own_kwargs)
{
    PyObject *all = PySequence_List(PyTuple_GetItem(bound, 0)), *by_keyword = PyTuple_GetItem(bound, 1);
    PyObject *rest = PyTuple_GetItem(bound, 2);
    int outcome = all == NULL ? -1 : 0;
    *own_args = *own_kwargs = NULL;
    for (Py_ssize_t i = 0; outcome == 0 && i < PyTuple_Size(args); i++)
        outcome = PyList_Append(all, PyTuple_GetItem(args, i));
    for (Py_ssize_t i = 0; outcome == 0 && i < PyTuple_Size(by_keyword); i++)
        outcome = append_item(all, PyDict_GetItemWithError(kwargs, PyTuple_GetItem(by_keyword, i)));
    *own_args = outcome < 0 ? NULL : PyList_AsTuple(all);
    *own_kwargs = *own_args == NULL ? NULL : PyDict_New();
    for (Py_ssize_t i = 0; *own_kwargs != NULL && i < PyTuple_Size(rest); i++) {
        PyObject *name = PyTuple_GetItem(rest, i), *value = PyDict_GetItemWithError(kwargs, name);
        if (value == NULL || PyDict_SetItem(*own_kwargs, name, value) < 0)
            Py_CLEAR(*own_kwargs);
    }
    Py_XDECREF(all);
    return *own_kwargs == NULL ? -1 : 0;
}

static PyObject *new_arguments(const Way *way, PyObject *args, PyObject *kwargs)
{
    if (way->bound == Py_None)
        return new_parts(arguments_type, way->aux, args, kwargs);
    PyObject *own_args, *own_kwargs, *made = NULL;
    if (bind(way->bound, args, kwargs, &own_args, &own_kwargs) == 0)
        made = new_parts(arguments_type, way->aux, own_args, own_kwargs);
    Py_XDECREF(own_args);
    Py_XDECREF(own_kwargs);
    return made;
}

/* How the leaves of a structure are dealt in such a call; DONE without it if that is not known. */
static int plan_of(const Way *way, PyObject *structure, PyObject *leaves, PyObject **plan)
{
    PyObject *plans = PyObject_GetAttr(structure, name_plans), *key = Py_NewRef(way->key);
    *plan = NULL;
    if (plans != NULL && way->asks != Py_None) {
        PyObject *answers = PyObject_CallFunctionObjArgs(way->asks, leaves, NULL);
        replace(&key, answers == NULL ? NULL : answers == Py_None ? Py_NewRef(Py_None) : PyTuple_Pack(2, key, answers));
        Py_XDECREF(answers);
    }
    if (plans != NULL && key != NULL && key != Py_None)
        *plan = Py_XNewRef(PyDict_GetItemWithError(plans, key));
    Py_XDECREF(key);
    Py_XDECREF(plans);
    return *plan != NULL ? OPENED : PyErr_Occurred() ? FAILED : DONE;
}

static PyObject *chosen_items(PyObject *list, PyObject *places)
{
    Py_ssize_t size = PyTuple_Size(places);
    PyObject *chosen = PyList_New(size);
    for (Py_ssize_t i = 0; chosen != NULL && i < size; i++) {
        PyObject *item = PyList_GetItem(list, PyLong_AsSsize_t(PyTuple_GetItem(places, i)));
        if (item == NULL)
            Py_CLEAR(chosen);
        else
            PyList_SetItem(chosen, i, Py_NewRef(item));
    }
    return chosen;
}

/* Whether no object is in a list or a tuple twice, or no array; -1 on an error. */
static int all_different(PyObject *items, int only_arrays)
{
    size_t size = 16;
    int is_tuple = PyTuple_CheckExact(items);
    Py_ssize_t length = is_tuple ? PyTuple_Size(items) : PyList_Size(items);
    while (size < 2 * (size_t)length)
        size *= 2;
    Slot few[128], *slots = length < 0 ? NULL : size <= 128 ? memset(few, 0, size * sizeof *few) : new_slots(size);
    if (slots == NULL) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        return -1;
    }
    int outcome = 1;
    for (Py_ssize_t i = 0; i < length && outcome == 1; i++) {
        PyObject *object = is_tuple ? PyTuple_GetItem(items, i) : PyList_GetItem(items, i);
        if (only_arrays && Py_TYPE(object) != concrete_array)
            continue;
        Slot *slot = slot_of(slots, size, object);
        outcome = slot->object == NULL;
        slot->object = object;
    }
    if (slots != few)
        free_slots(slots, size);
    return outcome;
}

/* What is transformed is called with: the hands by this plan, and then what is static. The first hand's deal knows the call. */
static PyObject *dealt(const Way *way, PyObject *plan, PyObject *arguments, PyObject *leaves, PyObject *call, PyObject **first)
{
    PyObject *deals = PyTuple_GetItem(plan, 3), *sources = PyTuple_GetItem(plan, 4);
    PyObject *names = PyTuple_GetItem(way->aux, 0), *static_names = PyTuple_GetItem(way->aux, 2);
    Py_ssize_t num_hands = PyTuple_Size(deals), size = num_hands + PyTuple_Size(static_names);
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++)
        size += PyTuple_GetItem(names, i) == Py_None;
    PyObject *given = PyTuple_New(size);
    *first = NULL;
    for (Py_ssize_t i = 0; given != NULL && i < num_hands; i++) {
        PyObject *source = PyTuple_GetItem(sources, i), *deal = Py_NewRef(PyTuple_GetItem(deals, i)), *hand = NULL;
        PyObject *own = source == Py_None ? Py_NewRef(leaves) : chosen_items(leaves, source);
        if (i == 0 && Py_TYPE(deal) == deal_type) {
            replace(&deal, new_parts(deal_type, parts_of(deal)[STRUCTURE_OF], parts_of(deal)[NUMBERS_OF], call));
            *first = Py_XNewRef(deal);
        }
        if (own != NULL && deal != NULL)
            hand = new_parts(hand_type, own, deal, NULL);
        if (hand == NULL)
            Py_CLEAR(given);
        else
            PyTuple_SetItem(given, i, hand);
        Py_XDECREF(deal);
        Py_XDECREF(own);
    }
    for (Py_ssize_t i = 0, at = num_hands; given != NULL && at < size; i++) {
        PyObject *value = NULL;
        if (i >= PyTuple_Size(names))
            value = PyDict_GetItemWithError(parts_of(arguments)[KWARGS_OF], PyTuple_GetItem(static_names, i - PyTuple_Size(names)));
        else if (PyTuple_GetItem(names, i) == Py_None)
            value = PyTuple_GetItem(parts_of(arguments)[ARGS_OF], i);
        else
            continue;
        if (value == NULL)
            Py_CLEAR(given);
        else
            PyTuple_SetItem(given, at++, Py_NewRef(value));
    }
    if (given == NULL)
        Py_CLEAR(*first);
    return given;
}

/* The leaves and the deal of a hand, borrowed. 0 if it is none. */
static int read_hand(PyObject *hand, PyObject **leaves, PyObject ***deal)
{
    if (Py_TYPE(hand) != hand_type || parts_of(hand)[LEAVES_OF] == NULL || parts_of(hand)[DEAL_OF] == NULL ||
        Py_TYPE(parts_of(hand)[DEAL_OF]) != deal_type)
        return 0;
    *leaves = parts_of(hand)[LEAVES_OF], *deal = parts_of(parts_of(hand)[DEAL_OF]);
    return 1;
}

/* Puts the leaves of a hand among those of the whole tree. */
static int put_leaves(PyObject *all, PyObject *leaves, PyObject *numbers)
{
    PyObject *own = PySequence_Tuple(leaves);
    Py_ssize_t size = own == NULL ? -1 : PyTuple_Size(own);
    int outcome = size >= 0 && size == PyTuple_Size(numbers) ? 0 : -1;
    for (Py_ssize_t i = 0; outcome == 0 && i < size; i++)
        outcome = PyList_SetItem(all, PyLong_AsSsize_t(PyTuple_GetItem(numbers, i)), Py_NewRef(PyTuple_GetItem(own, i)));
    Py_XDECREF(own);
    return outcome;
}

static PyObject *list_of_none(PyObject *structure)
{
    PyObject *count = PyObject_GetAttr(structure, name_num_leaves);
    PyObject *list = count == NULL ? NULL : PyList_New(PyLong_AsSsize_t(count));
    for (Py_ssize_t i = 0; list != NULL && i < PyList_Size(list); i++)
        PyList_SetItem(list, i, Py_NewRef(Py_None));
    Py_XDECREF(count);
    return list;
}

/* The leaves of a result from its hands, and its structure. NULL without an error if it is none. */
static PyObject *gathered(PyObject *result, PyObject **structure)
{
    PyObject *own, **deal, *hands = NULL, *leaves = NULL;
    *structure = NULL;
    if (read_hand(result, &own, &deal)) {
        if (deal[NUMBERS_OF] == Py_None)
            leaves = PyTuple_CheckExact(own) ? Py_NewRef(own) : PySequence_List(own);
        *structure = leaves == NULL ? NULL : Py_NewRef(deal[STRUCTURE_OF]);
        return leaves;
    }
    if (Py_TYPE(result) == hands_type && (hands = get_slot(hands_parts, result, NULL)) != NULL)
        replace(&hands, PySequence_Tuple(hands));
    int outcome = hands == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; outcome == 0 && i < PyTuple_Size(hands); i++) {
        outcome = read_hand(PyTuple_GetItem(hands, i), &own, &deal) && deal[NUMBERS_OF] != Py_None ? 0 : -1;
        if (outcome == 0 && i == 0) {
            *structure = Py_NewRef(deal[STRUCTURE_OF]);
            leaves = list_of_none(*structure);
        }
        if (outcome == 0)
            outcome = leaves == NULL ? -1 : put_leaves(leaves, own, deal[NUMBERS_OF]);
    }
    if (outcome < 0) {
        Py_CLEAR(leaves);
        Py_CLEAR(*structure);
    }
    Py_XDECREF(hands);
    return leaves;
}

/* Whether what is passed through is what vanilla would return: arrays of JAX's, and no difference in commitment. A list says
   which leaves these are. -1 on an error, 0 also where only Python can tell. */
static int passes_through(PyObject *structure, PyObject *given, PyObject *leaves)
{
    PyObject *plans = PyObject_GetAttr(structure, name_plans);
    PyObject *places = plans == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(plans, given));
    Py_XDECREF(plans);
    if (places == NULL)
        return PyErr_Occurred() ? -1 : 0;
    int outcome = 1, is_any_committed = 0, are_committed = 1;
    for (Py_ssize_t i = 0; outcome == 1 && i < PyTuple_Size(places); i++) {
        PyObject *leaf = PyList_GetItem(leaves, PyLong_AsSsize_t(PyTuple_GetItem(places, i)));
        PyObject *committed = NULL;
        if (leaf == NULL || Py_TYPE(leaf) != concrete_array)
            outcome = leaf == NULL ? -1 : 0;
        else
            committed = PyObject_GetAttr(leaf, name_committed);
        if (outcome == 1 && committed == NULL)
            outcome = -1;
        are_committed &= committed == Py_True;
        Py_XDECREF(committed);
    }
    Py_DECREF(places);
    for (Py_ssize_t i = 0; outcome == 1 && !are_committed && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        Kind *kind = kind_of(Py_TYPE(leaf));
        if (Py_TYPE(leaf) != concrete_array) {
            outcome = kind != NULL && (kind->shape == NUMBER || kind->shape == NUMPY_ARRAY || kind->shape == NUMPY_NUMBER);
            continue;
        }
        PyObject *committed = PyObject_GetAttr(leaf, name_committed);
        is_any_committed |= committed == Py_True;
        if (committed == NULL || is_any_committed)
            outcome = committed == NULL ? -1 : 0;
        Py_XDECREF(committed);
    }
    return outcome;
}

/* What a call returns, built of its hands and written where that is in place. `deferred` where Python has to. */
static PyObject *finished(const Way *way, Tags *tags, PyObject *own, PyObject *own_leaves, PyObject *result)
{
    PyObject *structure, *leaves = gathered(result, &structure), *made = NULL, *table = NULL, *pending = NULL;
    PyObject *program = structure == NULL ? NULL : program_of(structure);
    Program *known = (Program *)program;
    if (program == NULL)
        goto done;
    int is_simple = known->is_noted || (known->updates && !way->in_place) ? 0 : all_different(leaves, 0);
    if (is_simple == 1 && known->given != NULL && !way->in_place)
        is_simple = passes_through(own, known->given, own_leaves);
    if (is_simple == 1) {
        table = PyList_New(0), pending = table == NULL ? NULL : PyList_New(0);
        if (pending != NULL && build_onto(table, program, leaves, tags->objects, pending) == 0)
            made = Py_XNewRef(PyList_GetItem(table, known->root));
        if (made != NULL && way->in_place) {
            /* Whatever C cannot write, Python writes. */
            int outcome = write_back(pending);
            PyObject *written = outcome == 0 ? PyObject_CallFunctionObjArgs(way->write, pending, NULL) : NULL;
            if (outcome < 0 || (outcome == 0 && written == NULL))
                Py_CLEAR(made);
            else
                replace(&made, Py_XNewRef(PyTuple_GetItem(made, PyTuple_Size(made) - 1)));
            Py_XDECREF(written);
        }
    }
    if (is_simple == 0)
        made = Py_NewRef(deferred);
done:
    if (made == NULL && !PyErr_Occurred())
        made = Py_NewRef(deferred);
    Py_XDECREF(pending);
    Py_XDECREF(table);
    Py_XDECREF(program);
    Py_XDECREF(structure);
    Py_XDECREF(leaves);
    return made;
}

/* Calls what is transformed, and finishes what it returns. */
static PyObject *call_dealt(const Way *way, Tags *tags, PyObject *arguments, PyObject *structure, PyObject *leaves, PyObject *plan,
                            PyObject *transformed)
{
    PyObject *first = NULL, *made = NULL, *result = NULL, *trace = PyObject_GetAttr(trace_holder, name_trace);
    PyObject *call = trace == NULL ? NULL : PyTuple_Pack(5, arguments, plan, leaves, tags->objects, trace);
    PyObject *given = call == NULL ? NULL : dealt(way, plan, arguments, leaves, call, &first);
    if (given != NULL)
        result = PyObject_Call(transformed, given, NULL);
    if (result != NULL)
        made = way->finishes ? finished(way, tags, structure, leaves, result) : Py_NewRef(deferred);
    if (made == deferred) {
        /* The trace may have made something of the call. */
        PyObject *now = first == NULL ? Py_NewRef(call) : Py_NewRef(parts_of(first)[CALL_OF]);
        PyObject *both = PyTuple_Pack(2, result, now);
        replace(&made, both == NULL ? NULL : PyObject_CallFunctionObjArgs((PyObject *)deferred_type, both, NULL));
        Py_XDECREF(both);
        Py_DECREF(now);
    }
    if (first != NULL) { /* what JAX keeps of the hands must keep none of the arguments alive */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        replace(&parts_of(first)[CALL_OF], Py_NewRef(Py_None));
        PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(first);
    Py_XDECREF(given);
    Py_XDECREF(call);
    Py_XDECREF(trace);
    Py_XDECREF(result);
    return made;
}

/* What a wrapper returns; `deferred` if Python has to do the call, of which nothing was called then; or, if it has to finish it,
   a `Deferred` of the result and the call. */
static PyObject *call_by(PyObject *known, PyObject *args, PyObject *kwargs)
{
    PyObject *form, *plan = NULL, *structure = NULL, *transformed = NULL, *made = NULL;
    Way way;
    int outcome = read_way(known, args, kwargs, &way, &form);
    if (outcome != OPENED) {
        Py_XDECREF(form);
        return outcome == DONE ? Py_NewRef(deferred) : NULL;
    }
    Tags *tags = (Tags *)tags_new(tags_type, NULL, NULL);
    PyObject *arguments = tags == NULL ? NULL : new_arguments(&way, args, kwargs);
    if (arguments == NULL) {
        Py_XDECREF((PyObject *)tags);
        Py_DECREF(form);
        return NULL;
    }
    Walk w = new_walk(tags, way.flags);
    outcome = walk_tree(&w, arguments, way.convention, entries, way.latest, &structure);
    if (outcome == OPENED)
        outcome = plan_of(&way, structure, w.leaves, &plan);
    if (outcome == OPENED && (!is_record(plan, 6) || PyTuple_GetItem(plan, 1) != Py_None ||
                              PyObject_Size(PyTuple_GetItem(plan, 5)) != 0))
        outcome = DONE; /* ties were cut */
    if (outcome == OPENED) {
        transformed = Py_XNewRef(PyDict_GetItemWithError(way.made, PyTuple_GetItem(plan, 2)));
        outcome = transformed != NULL ? OPENED : PyErr_Occurred() ? FAILED : DONE;
    }
    if (outcome == OPENED && way.donates) {
        int is_separate = all_different(w.leaves, 1);
        outcome = is_separate < 0 ? FAILED : is_separate ? OPENED : DONE;
    }
    if (outcome == OPENED)
        made = call_dealt(&way, tags, arguments, structure, w.leaves, plan, transformed);
    else if (outcome == DONE)
        made = Py_NewRef(deferred);
    end_walk(&w);
    Py_XDECREF(transformed);
    Py_XDECREF(plan);
    Py_XDECREF(structure);
    Py_DECREF(arguments);
    Py_DECREF(tags);
    Py_DECREF(form);
    return made;
}

static PyObject *native_call(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    if (count != 3 || !PyTuple_CheckExact(given[1]) || !PyDict_CheckExact(given[2]) || arguments_type == NULL) {
        PyErr_SetString(PyExc_TypeError, "not a call");
        return NULL;
    }
    return call_by(given[0], given[1], given[2]);
}

static PyObject *native_count_contexts(PyObject *module, PyObject *change)
{
    (void)module;
    Py_ssize_t more = PyLong_AsSsize_t(change);
    if (more == -1 && PyErr_Occurred())
        return NULL;
    num_contexts += more;
    return Py_NewRef(Py_None);
}

/* The policy of a call, and how its wrapper is called under that; NULL if that is not known yet. Both are new references. */
static int read_caller(PyObject *self, PyObject **policy, PyObject **known)
{
    PyObject *given = Py_XNewRef(parts_of(self)[POLICY_OF]);
    *known = NULL;
    if (given == Py_None && num_contexts == 0)
        replace(&given, Py_NewRef(default_policy));
    *policy = given != NULL && Py_TYPE(given) == policy_type ? Py_NewRef(given)
                                                             : PyObject_CallFunctionObjArgs(current_policy, given, NULL);
    Py_XDECREF(given);
    PyObject *way = parts_of(self)[WAY_OF]; /* after the call into Python, which may set another one */
    if (way != NULL && is_record(way, 6) && PyTuple_GetItem(way, 0) == *policy)
        *known = Py_NewRef(way);
    return *policy == NULL ? -1 : 0;
}

/* A wrapper is called. What C leaves to Python, and each error, its own method goes on with. */
static PyObject *caller_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *policy, *known, *made, *error = NULL, *own = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    if (own == NULL || read_caller(self, &policy, &known) < 0) {
        Py_XDECREF(own);
        return NULL;
    }
    made = known == NULL ? Py_NewRef(deferred) : call_by(known, args, own);
    if (made == NULL) {
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL)
            PyException_SetTraceback(error, traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
    }
    if (made == NULL || Py_TYPE(made) == deferred_type) {
        PyObject *left = made == NULL ? error : made;
        replace(&made, PyObject_CallMethodObjArgs(self, name_go_on, left, policy, args, own, NULL));
    }
    Py_XDECREF(error);
    Py_XDECREF(known);
    Py_DECREF(policy);
    Py_DECREF(own);
    return made;
}

static PyGetSetDef caller_getset[] = {
    {"policy", parts_get, parts_set, "What counts as sharing, as it was given.", (void *)POLICY_OF},
    {"way", parts_get, parts_set, "How it is called under a policy.", (void *)WAY_OF},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot caller_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_call, caller_call}, {Py_tp_getset, caller_getset},
    {Py_tp_doc, "A function under a transform. Its `go_on` has (what is left, policy, args, kwargs)."}, {0, NULL},
};
static PyType_Spec caller_spec = PARTS_SPEC("Caller", caller_slots);

/* --- the module ------------------------------------------------------------------------------------------------- */

static PyObject *native_learn(PyObject *module, PyObject *described)
{
    (void)module;
    if (new_kind(described) == NULL)
        return NULL;
    return Py_NewRef(Py_None);
}

/* Leaves a class that was read field by field to its registered functions. */
static PyObject *native_unlearn(PyObject *module, PyObject *cls)
{
    (void)module;
    Kind *kind = kind_of((PyTypeObject *)cls);
    if (kind != NULL && kind->shape >= DATACLASS)
        kind->shape = OTHER;
    return Py_NewRef(Py_None);
}

/* Takes over what Python says of NNX, once. */
static PyObject *native_learn_nnx(PyObject *module, PyObject *args)
{
    PyObject *found[13], **slots[] = {&raw_value,    &variable_trace, &metadata_of, &initializing,
                                      &is_setup, &state_trace,    &jax_trace};
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!OUUO!O!O!O!O!O!O!", &found[0], &PyType_Type, &found[1], &PyType_Type, &found[2],
                          &found[3], &found[4], &found[5], &PyMemberDescr_Type, &found[6], &PyMemberDescr_Type, &found[7],
                          &PyMemberDescr_Type, &found[8], &PyMemberDescr_Type, &found[9], &PyMemberDescr_Type, &found[10],
                          &PyMemberDescr_Type, &found[11], &PyMemberDescr_Type, &found[12]))
        return NULL;
    if (layout_of == NULL) {
        for (int i = 0; i < 13; i++)
            Py_INCREF(found[i]);
        layout_of = found[0], mapping_type = (PyTypeObject *)found[1], trace_type = (PyTypeObject *)found[2];
        current_trace = found[3], name_nodes = found[4], name_mapping = found[5];
        for (int i = 0; i < 7; i++)
            *slots[i] = found[6 + i];
    }
    return Py_NewRef(Py_None);
}

/* Takes over what Python says of `sharedtree.Module`s. For ever, as what `start` takes over. */
static PyObject *native_learn_modules(PyObject *module, PyObject *args)
{
    PyObject *type, *slot, *names, *statics;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyType_Type, &type, &PyMemberDescr_Type, &slot, &PyMemberDescr_Type, &names,
                          &PyMemberDescr_Type, &statics))
        return NULL;
    attribute_kinds_type = (PyTypeObject *)Py_NewRef(type);
    kinds_of_attributes = Py_NewRef(slot), names_in_kinds = Py_NewRef(names), statics_in_kinds = Py_NewRef(statics);
    return Py_NewRef(Py_None);
}

/* A class was registered as a node's, but not with JAX. */
static PyObject *native_look_again(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    epoch_of_nodes++;
    return Py_NewRef(Py_None);
}

static PyObject *native_drop_spares(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    Walk w = spare;
    Slot *slots = spare_slots;
    spare = (Walk){0};
    spare_slots = NULL;
    free_memory(&w);
    PyMem_Free(slots);
    return Py_NewRef(Py_None);
}

/* Takes over what Python says. Only once: a second import of the package has other classes of the same names. */
static PyObject *native_start(PyObject *module, PyObject *args)
{
    PyObject *marker, *of_jax, *ops[4];
    (void)module;
    if (meet != NULL)
        return Py_NewRef(Py_False);
    if (!PyArg_ParseTuple(args, "O!OOOOOO!O!O!O!O!O", &PyDict_Type, &entries, &meet, &describe, &settle, &marker, &leaf_op,
                          &PyType_Type, &ops[0], &PyType_Type, &ops[1], &PyType_Type, &ops[2], &PyType_Type, &ops[3],
                          &PyTuple_Type, &dtypes, &of_jax)) {
        meet = NULL;
        return NULL;
    }
    registry = PyDict_Check(of_jax) ? Py_NewRef(of_jax) : NULL;
    Py_INCREF(dtypes);
    missing_type = marker == Py_None ? NULL : (PyTypeObject *)marker;
    node_op = (PyTypeObject *)ops[0], static_op = (PyTypeObject *)ops[1];
    given_op = (PyTypeObject *)ops[2], update_op = (PyTypeObject *)ops[3];
    Py_INCREF(entries), Py_INCREF(meet), Py_INCREF(describe), Py_INCREF(settle), Py_INCREF(marker), Py_INCREF(leaf_op);
    for (int i = 0; i < 4; i++)
        Py_INCREF(ops[i]);
    return Py_NewRef(Py_True);
}

static PyMethodDef methods[] = {
    {"start", native_start, METH_VARARGS, "Takes over what Python says of classes and operations."},
    {"learn", native_learn, METH_O, "Learns what a class is."},
    {"learn_nnx", native_learn_nnx, METH_VARARGS, "Learns how NNX's objects hold what they have."},
    {"learn_modules", native_learn_modules, METH_VARARGS, "Learns how modules hold the kinds of their attributes."},
    {"unlearn", native_unlearn, METH_O, "Leaves a class that was read field by field to its registered functions."},
    {"drop_spares", native_drop_spares, METH_NOARGS, "Gives back the memory that is kept for the next walk."},
    {"walk", native_walk, METH_VARARGS,
     "(tree, tags, rules, known) -> (leaves, known[key]()), or None if there is none or it cannot."},
    {"key_of", native_key_of, METH_VARARGS,
     "(what Python visited, rules, number of the first object) -> (key, what it has by address), or None if it cannot."},
    {"compile", native_compile, METH_O, "Records -> what `build` takes in their place, and runs faster."},
    {"build", native_build, METH_VARARGS, "(structure or records or program, leaves, table, given, update): see `sharedtree.core._walk.build`."},
    {"hold", native_hold, METH_O, "(value, token, ...) -> what keeps these values, which are known by address meanwhile."},
    {"forget_keys", native_forget_keys, METH_NOARGS, "What is in keys by address may be let go of."},
    {"look_again", native_look_again, METH_NOARGS, "Asks again of classes of which no instance was a node."},
    {"learn_calls", native_learn_calls, METH_VARARGS, "Takes over what calls are made of."},
    {"hand_parts", native_hand_parts, METH_O, "A hand -> (its leaves, its deal)."},
    {"hand_of", (PyCFunction)(void (*)(void))native_hand_of, METH_FASTCALL, "(deal, leaves) -> a hand."},
    {"count_contexts", native_count_contexts, METH_O, "So many `Context`s more are entered."},
    {"flags_of", native_flags_of, METH_O, "Rules of a policy as `call` has them."},
    {"call", (PyCFunction)(void (*)(void))native_call, METH_FASTCALL,
     "(what it needs to know, args, kwargs) -> what the wrapper returns, or `DEFERRED`, or what is to be finished."},
    {"write_back", native_write_back, METH_O, "Writes contents into objects, in turn, all or nothing; False if it cannot."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "The walk and the way back, in C.", -1,
                                        methods, NULL, NULL, NULL, NULL};

static const struct {
    const char *name;
    int value;
} constants[] = {
    {"JAX", JAX}, {"EQUINOX", EQUINOX}, {"ANY", ANY}, {"INHERITED", INHERITED}, {"IN_VARIABLE", IN_VARIABLE},
    {"OUTSIDE", OUTSIDE}, {"NUMBER", NUMBER}, {"STATIC", STATIC}, {"NUMPY_ARRAY", NUMPY_ARRAY},
    {"NUMPY_NUMBER", NUMPY_NUMBER}, {"JAX_ARRAY", JAX_ARRAY}, {"NOTHING", NOTHING}, {"TUPLE", TUPLE}, {"LIST", LIST},
    {"DICT", DICT}, {"ORDERED_DICT", ORDERED_DICT}, {"DEFAULT_DICT", DEFAULT_DICT}, {"DEQUE", DEQUE},
    {"NAMEDTUPLE", NAMEDTUPLE}, {"ARGUMENTS", ARGUMENTS}, {"FIELDS", FIELDS}, {"DATACLASS", DATACLASS}, {"SLOTS", SLOTS},
    {"NNX_OBJECT", NNX_OBJECT}, {"NNX_VARIABLE", NNX_VARIABLE}, {"NNX_STATE", NNX_STATE}, {"MODULE", MODULE},
    {"OTHER", OTHER},
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&name_aux, "aux"}, {&name_type, "type"}, {&name_value, "_value"}, {&name_is_mutable, "_is_mutable"},
        {&name_thaw, "thaw"}, {&name_unflatten, "unflatten"}, {&name_records, "records"}, {&name_root, "root"},
        {&name_given, "given"}, {&name_program, "program"}, {&name_is_noted, "is_noted"}, {&name_plans, "plans"},
        {&name_num_leaves, "num_leaves"}, {&name_dtype, "dtype"}, {&name_committed, "committed"},
        {&name_maxlen, "maxlen"}, {&name_factory, "default_factory"},
        {&name_go_on, "go_on"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            goto failed;
    }
    static const struct {
        PyTypeObject **type;
        PyType_Spec *spec;
        const char *name; /* as which the module has it, if it does */
    } types[] = {{&tags_type, &tags_spec, "Tags"}, {&deal_base, &deal_spec, "Deal"}, {&hand_base, &hand_spec, "Hand"},
                 {&arguments_base, &arguments_spec, "Arguments"}, {&caller_base, &caller_spec, "Caller"}, {&held_type, &held_spec, NULL},
                 {&program_type, &program_spec, NULL}, {&latest_type, &latest_spec, "Latest"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        PyObject *type = PyType_FromSpec(types[i].spec);
        *types[i].type = (PyTypeObject *)type;
        if (type == NULL || (types[i].name != NULL && PyModule_AddObjectRef(module, types[i].name, type) < 0))
            goto failed;
    }
    references = PyDict_New();
    empty_tuple = PyTuple_New(0);
    PyObject *bases = empty_tuple == NULL ? NULL : PyTuple_Pack(1, &PyTuple_Type);
    deferred_type = bases == NULL ? NULL : (PyTypeObject *)PyType_FromSpecWithBases(&deferred_spec, bases);
    Py_XDECREF(bases);
    deferred = deferred_type == NULL ? NULL : PyObject_CallNoArgs((PyObject *)deferred_type);
    new_object = (newfunc)PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);
    get_slot = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    set_slot = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);
    if (references == NULL || empty_tuple == NULL || deferred == NULL ||
        PyModule_AddObjectRef(module, "Deferred", (PyObject *)deferred_type) < 0 ||
        PyModule_AddStringConstant(module, "built_from", SHAREDTREE_BUILT_FROM) < 0)
        goto failed;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            goto failed;
    }
    return module;
failed:
    Py_DECREF(module);
    return NULL;
}
