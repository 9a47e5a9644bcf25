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
in the tags, and what a function has made or holds for itself in an `OWNED` variable, which gives it up on each way out.
No borrowed reference is used after such a call. All that is uncommon, and each error, ends the walk, and the caller asks
the reference: `TRY` and `NEED` end a function with that of its parts.

What C knows of a class is a `Kind`, by the address of the class. How its instances are opened, written from auxiliary data,
built, and written back follows from the shape of the kind: one row of `SHAPES`, with one function for each of these.

Only the limited API is used, and no `Py_RETURN_NONE` and the like: those of Python 3.12 and 3.13 count no reference, and
what was compiled with them is loaded by 3.11, too, where None is counted. The interpreter's lock is needed: free-threaded
Python does not load this. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define MAX_DEPTH 100000
#define MAX_STATIC_DEPTH 16
#define MAX_STATIC_PARTS 100000
#define MAX_TEXT 4096
#define MAX_LAYOUTS 4096 /* that are asked for of a class; of a list each length is one */

enum { CONTAINERS = 1, ARRAYS = 2, VALUES = 4, FILTERED = 8, EXACT = 16 };
enum { JAX, EQUINOX, ANY, INHERITED, IN_VARIABLE, OUTSIDE };

/* How a function ends that gives a number. What is LEFT is not for this function, and whoever called it takes back what it
   did. */
enum { FAILED = -1, DONE = 0, LEFT = 1 };

/* --- references, errors, memory ---------------------------------------------------------------------------------- */

static void give_up(PyObject **place)
{
    Py_XDECREF(*place);
}

/* A strong reference that is given up where its scope ends, on each way out, the last one first. GCC and Clang have this. */
#define OWNED __attribute__((cleanup(give_up))) PyObject

/* Ends a function if a part of it fails, or is left to others. */
#define TRY(part)              \
    do {                       \
        int outcome_ = (part); \
        if (outcome_ != DONE)  \
            return outcome_;   \
    } while (0)

/* Ends a function where an object is missing: after an error it has failed, otherwise it is left to others. */
#define NEED(object)                                 \
    do {                                             \
        if ((object) == NULL)                        \
            return PyErr_Occurred() ? FAILED : LEFT; \
    } while (0)

/* Puts another reference, or NULL, in the place of one, which may run finalisers. */
static void replace(PyObject **place, PyObject *object)
{
    PyObject *before = *place;
    *place = object;
    Py_XDECREF(before);
}

static void *refuse(PyObject *error, const char *why)
{
    PyErr_SetString(error, why);
    return NULL;
}

static int refused(PyObject *error, const char *why)
{
    PyErr_SetString(error, why);
    return FAILED;
}

static int no_memory(void)
{
    PyErr_NoMemory();
    return FAILED;
}

/* Drops an error of this class; 0 if there is another. */
static int is_dropped(PyObject *error)
{
    if (PyErr_Occurred() == NULL || !PyErr_ExceptionMatches(error))
        return PyErr_Occurred() == NULL;
    PyErr_Clear();
    return 1;
}

/* What a weak reference refers to; NULL if that is gone, or on an error. */
static PyObject *referent(PyObject *reference)
{
    PyObject *found = reference == NULL ? NULL : PyObject_CallNoArgs(reference);
    if (found == Py_None)
        replace(&found, NULL);
    return found;
}

static PyObject *none(void)
{
    return Py_NewRef(Py_None);
}

/* Appends a reference that is taken over. */
static int append_new(PyObject *list, PyObject *item)
{
    int outcome = item == NULL ? FAILED : PyList_Append(list, item);
    Py_XDECREF(item);
    return outcome;
}

static int grow(void *items, size_t *room, size_t needed, size_t item_size)
{
    if (needed <= *room)
        return 0;
    size_t more = *room ? *room : 512 / item_size + 1;
    while (more < needed)
        more *= 2;
    void *grown = more > SIZE_MAX / item_size ? NULL : PyMem_Realloc(*(void **)items, more * item_size);
    if (grown == NULL)
        return no_memory();
    *(void **)items = grown;
    *room = more;
    return 0;
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

/* --- tables by address ------------------------------------------------------------------------------------------- */

enum { OPEN = -1, NONE = -2 };

typedef struct {
    const void *key; /* NULL in a free slot; else alive as long as there is a value, of which others take care */
    intptr_t value;  /* a number, or a pointer; NONE if there is none any more */
} Slot;

/* Open addressing. Runs no Python. */
typedef struct {
    Slot *slots;
    size_t size, used;
} Table;

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

static size_t mixed(const void *pointer)
{
    uint64_t x = (uint64_t)(uintptr_t)pointer;
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    return (size_t)(x ^ (x >> 29));
}

static Slot *slot_of(Slot *slots, size_t size, const void *key)
{
    size_t i = mixed(key) & (size - 1);
    while (slots[i].key != NULL && slots[i].key != key)
        i = (i + 1) & (size - 1);
    return &slots[i];
}

static intptr_t value_of(const Table *table, const void *key)
{
    const Slot *slot = table->size == 0 ? NULL : slot_of(table->slots, table->size, key);
    return slot == NULL || slot->key == NULL ? NONE : slot->value;
}

/* Where the values are pointers. */
static void *pointer_at(const Table *table, const void *key)
{
    intptr_t value = value_of(table, key);
    return value == NONE ? NULL : (void *)value;
}

/* Makes the table anew, without those that have no value. */
static int rehash(Table *table, size_t size)
{
    Slot *slots = new_slots(size);
    if (slots == NULL)
        return no_memory();
    size_t used = 0;
    for (size_t i = 0; i < table->size; i++) {
        Slot old = table->slots[i];
        if (old.key != NULL && old.value != NONE) {
            *slot_of(slots, size, old.key) = old;
            used++;
        }
    }
    free_slots(table->slots, table->size);
    *table = (Table){slots, size, used};
    return 0;
}

static int set_value(Table *table, const void *key, intptr_t value)
{
    if (2 * (table->used + 1) > table->size)
        TRY(rehash(table, table->size ? 4 * table->size : FIRST_SIZE));
    Slot *slot = slot_of(table->slots, table->size, key);
    table->used += slot->key == NULL;
    *slot = (Slot){key, value};
    return 0;
}

/* Of a key that has a slot, so that it cannot fail. */
static void reset_value(Table *table, const void *key, intptr_t value)
{
    slot_of(table->slots, table->size, key)->value = value;
}

/* --- objects of this file ---------------------------------------------------------------------------------------- */

/* What each of them begins with: up to three references, all that the garbage collector has to see of it. The bases of
   classes in Python are no more than that. These have a `tp_clear`; the others need none, see there. */
typedef struct {
    PyObject_HEAD
    PyObject *parts[3];
} Parts;

static PyObject **parts_of(PyObject *object)
{
    return ((Parts *)object)->parts;
}

static PyObject *new_parts(PyTypeObject *type, PyObject *one, PyObject *two, PyObject *three)
{
    PyObject *made = PyType_GenericAlloc(type, 0), *given[3] = {one, two, three};
    for (int i = 0; made != NULL && i < 3; i++)
        parts_of(made)[i] = Py_XNewRef(given[i]);
    return made;
}

/* Its parts are set by `__init__`. */
static PyObject *parts_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
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

/* Whoever has more than the parts untracks the object, frees that, and goes on here. */
static void parts_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    parts_clear(self);
    release(self);
    Py_DECREF(type);
}

/* By its place; the second has to be there, and stays. */
#define PART(name, which, doc) {name, T_OBJECT_EX, (Py_ssize_t)offsetof(Parts, parts[which]), 0, doc}
#define FIXED_PART(name, which, doc) {name, T_OBJECT_EX, (Py_ssize_t)offsetof(Parts, parts[which]), READONLY, doc}

#define MEMBERS(...) {Py_tp_members, (PyMemberDef[]){__VA_ARGS__, {NULL, 0, 0, 0, NULL}}}

#define PARTS {Py_tp_dealloc, parts_dealloc}, {Py_tp_traverse, parts_traverse}, {Py_tp_clear, parts_clear}

/* The names that C asks for: `name_aux` is "aux". */
#define NAMES(X)                                                                                                          \
    X(unflatten) X(program) X(plans) X(num_leaves) X(dtype) X(committed) X(maxlen) X(default_factory) X(go_on) X(clear)   \
    X(extend) X(copy) X(is_interchangeable)
#define DECLARED(name) static PyObject *name_##name;
NAMES(DECLARED)

/* --- values that are known by address, and are not kept alive ----------------------------------------------------- */

/* What is known of a value, or of all instances of a class, as long as that lives. */
typedef struct {
    PyTypeObject *type; /* that it had */
    PyObject *token;    /* a weak reference to what stands for it in keys, which may lead back to it; NULL for a class whose
                           instances are the same for ever */
    int is_interchangeable; /* whether any equal value is as good, so that the token serves exact walks, too */
    Py_ssize_t holders; /* a weak reference, and each `Held` */
} Fact;

static Table facts; /* by value */

/* What is known of an object, if it is still of the class that it was of. */
static Fact *fact_of(PyObject *value, PyTypeObject *type)
{
    Fact *fact = pointer_at(&facts, value);
    return fact == NULL || fact->type != type ? NULL : fact;
}

/* One who keeps a value, or is told when it goes, is no more. Runs finalisers of tokens last. */
static void let_go_of(void *value)
{
    Fact *fact = pointer_at(&facts, value);
    if (fact == NULL || --fact->holders > 0)
        return;
    PyObject *token = fact->token;
    reset_value(&facts, value, NONE);
    PyMem_Free(fact);
    Py_XDECREF(token);
}

static PyObject *references; /* address -> a weak reference with `gone` */

static void retire_kind(void *type);

/* What has this address goes. */
static PyObject *gone(PyObject *address, PyObject *reference)
{
    retire_kind(PyLong_AsVoidPtr(address));
    let_go_of(PyLong_AsVoidPtr(address));
    if (PyDict_GetItemWithError(references, address) == reference && PyDict_DelItem(references, address) < 0)
        return NULL;
    return none();
}

static PyMethodDef gone_method = {"gone", gone, METH_O, "What was known of an object is forgotten."};

/* Forgets what is known of a class or a value when it goes. It runs no Python then. */
static int watch(PyObject *object)
{
    OWNED *address = PyLong_FromVoidPtr(object), *callback = NULL, *reference = NULL;
    NEED(address);
    callback = PyCFunction_New(&gone_method, address);
    NEED(callback);
    reference = PyWeakref_NewRef(object, callback);
    NEED(reference);
    return PyDict_SetItem(references, address, reference);
}

/* Remembers something of a value, of whose end the caller takes care. */
static int add_fact(PyObject *value, PyTypeObject *type, PyObject *of_token)
{
    PyObject *token = of_token == NULL ? NULL : PyWeakref_NewRef(of_token, NULL);
    OWNED *answer = token == NULL ? NULL : PyObject_GetAttr(of_token, name_is_interchangeable);
    Fact *fact = pointer_at(&facts, value);
    if (of_token != NULL && answer == NULL) {
        Py_XDECREF(token);
        return FAILED;
    }
    if (fact == NULL) {
        fact = PyMem_Calloc(1, sizeof *fact);
        if (fact == NULL || set_value(&facts, value, (intptr_t)fact) < 0) {
            PyMem_Free(fact);
            Py_XDECREF(token);
            return no_memory();
        }
        fact->type = type;
    }
    fact->holders++;
    fact->is_interchangeable = answer == Py_True;
    replace(&fact->token, token); /* which may be another, if the first one is gone */
    return 0;
}

/* Remembers something of a value as long as it lives. 0 without it if that cannot be told. */
static int add_fact_weakly(PyObject *value, PyTypeObject *type, PyObject *token)
{
    if (pointer_at(&facts, value) == NULL) {
        if (watch(value) < 0)
            return is_dropped(PyExc_TypeError) ? 0 : FAILED;
        return add_fact(value, type, token);
    }
    /* Its token may have been another, which is gone. */
    PyObject *reference = token == NULL ? NULL : PyWeakref_NewRef(token, NULL);
    Fact *known = pointer_at(&facts, value);
    if (reference != NULL && known != NULL && known->token != NULL)
        replace(&known->token, reference);
    else
        Py_XDECREF(reference);
    return PyErr_Occurred() ? FAILED : 0;
}

static PyTypeObject *held_type;

/* Values that are kept, and what stands for each in keys, so that they are known again by address. There is no `tp_clear`:
   the values cannot change, so no cycle leads through them alone. */
static void held_dealloc(PyObject *self)
{
    PyObject *pairs = parts_of(self)[0];
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(pairs); i += 2)
        let_go_of(PyTuple_GetItem(pairs, i));
    parts_dealloc(self);
}

static PyType_Slot held_slots[] = {
    {Py_tp_dealloc, held_dealloc},
    {Py_tp_traverse, parts_traverse},
    {Py_tp_doc, "Values that are kept, and known again by address meanwhile."},
    {0, NULL},
};

/* (value, token, value, token, ...) -> what keeps them. */
static PyObject *native_hold(PyObject *Py_UNUSED(module), PyObject *pairs)
{
    Py_ssize_t done = 0;
    if (!PyTuple_CheckExact(pairs) || PyTuple_Size(pairs) % 2)
        return refuse(PyExc_TypeError, "values and tokens, in turn");
    OWNED *nothing = PyTuple_GetSlice(pairs, 0, 0);
    PyObject *held = nothing == NULL ? NULL : new_parts(held_type, nothing, NULL, NULL);
    if (held == NULL)
        return NULL;
    /* As far as it gets: what is not held is asked for again. */
    for (; done < PyTuple_Size(pairs); done += 2) {
        PyObject *value = PyTuple_GetItem(pairs, done);
        if (add_fact(value, Py_TYPE(value), PyTuple_GetItem(pairs, done + 1)) < 0)
            break;
    }
    PyObject *kept = PyTuple_GetSlice(pairs, 0, done);
    while (kept == NULL && done > 0)
        let_go_of(PyTuple_GetItem(pairs, done -= 2));
    if (kept != NULL)
        replace(&parts_of(held)[0], kept);
    PyErr_Clear();
    return held;
}

/* --- kinds: what is known of a class, as long as it lives -------------------------------------------------------- */

/* The names of what can be met; what C knows of each is a row of `SHAPES`, below. */
enum {
    /* Leaves: numbers that JAX traces and Equinox does not, what is static for both, arrays. */
    NUMBER, STATIC, NUMPY_ARRAY, NUMPY_NUMBER, JAX_ARRAY,
    /* Nodes. */
    NOTHING, TUPLE, LIST, DICT, ORDERED_DICT, DEFAULT_DICT, DEQUE, NAMEDTUPLE, ARGUMENTS, FIELDS, DATACLASS, SLOTS,
    NNX_OBJECT, NNX_VARIABLE, NNX_STATE, MODULE, OTHER,
    /* What no object is, but a program says: the next leaf, an object of the other side. */
    LEAF, GIVEN, NUM_SHAPES
};

/* The names that objects of an NNX class have, in order, and what their flatten makes of each. See `libraries/_nnx_layouts.py`. */
typedef struct Layout {
    struct Layout *next;      /* with names of the same hash */
    uint32_t number;          /* of the form, which layouts share that differ in the order of the names */
    Py_ssize_t num_traced;
    PyObject *form;           /* the names of the children, of what is static, and the mapping's content */
    PyObject *names;
    PyObject *marked;         /* the names in the mapping, in order */
    PyObject *marks;          /* bytes, whether each of these is a child */
    int places[];             /* of each name among the children and then the static ones; -1 for the mapping, which is in the
                                 form */
} Layout;

typedef struct {
    PyTypeObject *type;
    int shape;
    uint32_t number;
    int is_plain, is_mutable, is_known_to_jax, convention;
    int is_guess;             /* of a leaf whose class may yet be registered as a node's */
    Py_ssize_t epoch;         /* of a guess: when it was made */
    PyObject *node_type;      /* the NodeType; NULL for leaves */
    PyObject *take_apart;     /* OTHER: instance -> (children, aux) */
    PyObject *order;          /* what is read by name: all names that are declared, in order */
    PyObject *is_static;      /* bytes, one for each name in `order` */
    PyObject *places;         /* bytes, where each name is among the children or the static ones; none for FIELDS */
    PyObject *names;          /* of the children, then of what is static; of FIELDS also those that no field declares */
    Py_ssize_t num_traced;    /* of these */
    int is_in_order;          /* whether the children, and what is static, are as in `order` */
    PyObject *slots;          /* that are written to */
    Table layouts;            /* NNX_OBJECT: lists, by the hash of the names */
    uint32_t num_layouts;     /* that were asked for, found or not */
} Kind;

/* By type, which each kind keeps alive but that of a namedtuple or of a guess. They are never freed. */
static Table kinds;
static uint32_t num_kinds;

static Py_ssize_t epoch_of_nodes; /* how often a node type was registered with the package; JAX counts its own */

/* What is taken over of the walk. */
static PyObject *entries;  /* key -> reference to its structure */
static PyObject *meet;     /* (object, convention) -> what its class is, or for a leaf 0 static, 1 traced, 2 with identity */
static PyObject *describe; /* NodeType -> what its class is */
static PyObject *settle;   /* static values -> for each what `settle_pin` says */
static PyObject *compile;  /* structure -> its program */
static PyObject *missing_type; /* of the marker for attributes that were never set, or None */
static PyObject *dtypes;   /* those that JAX traces, of which there is one object each */
static PyObject *registry; /* of JAX's node types, or an empty one in its place; NULL before */

/* What calls are made of: parts by position, see `transforms._hands`, `_call_arguments` and `transforms._repeated_calls`. */
enum { STRUCTURE_OF, NUMBERS_OF, CALL_OF }; /* a deal */
enum { LEAVES_OF, DEAL_OF };                /* a hand */
enum { AUX_OF, ARGS_OF, KWARGS_OF };        /* arguments */
enum { POLICY_OF, WAY_OF };                 /* a wrapper */
enum { OWN_POLICY, FLAGS, FORMS, IN_PLACE, FINISHES, WRITE, NUM_OF_WAY };     /* how it is called */
enum { NAMES_OF, BOUND, PLAN_KEY, ASKS, DONATES, LATEST, MADE, NUM_OF_FORM }; /* by a number of arguments and these keywords */
enum { STRUCTURE_IN, ORIGINS, LABELS, DEALS, SOURCES, CUTS, NUM_OF_PLAN };    /* how its leaves are dealt */

static PyTypeObject *tags_type, *program_type, *latest_type, *deal_base, *hand_base, *arguments_base, *caller_base;

/* Of calls. */
static PyObject *concrete_array;                                      /* the class of JAX's arrays that are no tracers */
static PyObject *hand_type, *deal_type, *arguments_type, *hands_type; /* the classes in Python */
static PyObject *hands_parts;                                         /* a slot */
static PyObject *trace_holder, *name_trace; /* what has the trace that is active, and as which attribute */
static PyObject *policy_type, *default_policy; /* the second where there is no `Context` */
static PyObject *current_policy;               /* (what was given) -> that of this thread */

/* Of NNX, once one of its classes was met. See `libraries/_nnx_layouts.py`. */
static PyObject *layout_of, *mapping_type, *trace_type, *current_trace, *name_nodes, *name_mapping;
static PyObject *raw_value, *variable_trace, *metadata_of, *state_trace, *jax_trace; /* slots */

/* Of modules: the class of what says of which kinds attributes are, and slots. See `libraries/_sharedtree_module.py`. */
static PyObject *attribute_kinds_type, *kinds_of_attributes, *names_in_kinds, *statics_in_kinds;

static PyObject *empty_tuple;
static newfunc new_object;
static descrgetfunc get_slot; /* of the descriptors of slots */
static descrsetfunc set_slot;

static int is_a(PyObject *object, PyObject *type)
{
    return (PyObject *)Py_TYPE(object) == type;
}

/* By its name, which a class looks up, or by the descriptor of a slot. No hook is run. */
static PyObject *get_attribute(PyObject *object, PyObject *name)
{
    return Py_TYPE(name) == &PyMemberDescr_Type ? get_slot(name, object, NULL) : PyObject_GenericGetAttr(object, name);
}

static int set_attribute(PyObject *object, PyObject *name, PyObject *value)
{
    return Py_TYPE(name) == &PyMemberDescr_Type ? set_slot(name, object, value) : PyObject_GenericSetAttr(object, name, value);
}

/* Before which registration everything that is known now was found out. */
static Py_ssize_t epoch(void)
{
    return registry == NULL ? -1 : epoch_of_nodes + PyDict_Size(registry);
}

static Kind *kind_of(PyTypeObject *type)
{
    return pointer_at(&kinds, type);
}

static void retire_kind(void *type)
{
    if (kind_of(type) != NULL)
        reset_value(&kinds, type, NONE);
}

/* Makes a kind of what Python says of a class, unless another thread was first. */
static Kind *new_kind(PyObject *described)
{
    PyObject *node_type;
    Kind kind = {.epoch = epoch()}, *made;
    if (!PyTuple_Check(described))
        return refuse(PyExc_TypeError, "a class is described by a tuple");
    if (!PyArg_ParseTuple(described, "O!iiiiiiOOO!SSO!niO!", &PyType_Type, &kind.type, &kind.shape, &kind.is_plain,
                          &kind.is_mutable, &kind.is_known_to_jax, &kind.convention, &kind.is_guess, &node_type,
                          &kind.take_apart, &PyTuple_Type, &kind.order, &kind.is_static, &kind.places, &PyTuple_Type,
                          &kind.names, &kind.num_traced, &kind.is_in_order, &PyTuple_Type, &kind.slots))
        return NULL;
    PyTypeObject *type = kind.type;
    Kind *known = kind_of(type);
    if (kind.shape < 0 || kind.shape >= NUM_SHAPES)
        return refuse(PyExc_ValueError, "no such shape");
    if (known != NULL && known->is_guess && kind.is_guess) {
        known->epoch = kind.epoch;
        known->shape = kind.shape;
    }
    if (known != NULL && (!known->is_guess || kind.is_guess))
        return known;
    retire_kind(type); /* it has been registered meanwhile */
    if (PyTuple_Size(kind.order) != PyBytes_Size(kind.is_static))
        return refuse(PyExc_ValueError, "one byte for each name");
    kind.node_type = node_type == Py_None ? NULL : node_type;
    kind.number = num_kinds;
    made = PyMem_Malloc(sizeof *made);
    if (made == NULL)
        return (void *)PyErr_NoMemory();
    *made = kind;
    /* Classes that nobody registers are kept by nobody else either. */
    int is_kept = kind.shape != NAMEDTUPLE && !kind.is_guess;
    if ((!is_kept && watch((PyObject *)type) < 0) || set_value(&kinds, type, (intptr_t)made) < 0) {
        PyMem_Free(made);
        return NULL;
    }
    num_kinds++;
    PyObject *held[] = {is_kept ? (PyObject *)type : NULL, kind.node_type, kind.take_apart, kind.order, kind.is_static,
                        kind.places, kind.names, kind.slots};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        Py_XINCREF(held[i]);
    return made;
}

/* --- Tags: which objects were seen, and their numbers ------------------------------------------------------------ */

/* What has a number is alive in `objects`; what is OPEN in the walk that has it open. There is no `tp_clear`: each cycle
   leads through the list, which has one. */
typedef struct {
    PyObject_HEAD
    PyObject *objects, *beside[2];
    Table numbers;
} Tags;

static int forget(Tags *tags, Py_ssize_t start)
{
    /* In place, so that it cannot fail: numbers that are taken back stay as slots without a number. */
    for (size_t i = 0; i < tags->numbers.size; i++) {
        Slot *slot = &tags->numbers.slots[i];
        if (slot->value < 0 || slot->value >= start)
            slot->value = NONE;
    }
    /* Last, for this runs finalisers. A list needs memory to let go of many at once, and hardly any to let go of one. */
    if (PyList_SetSlice(tags->objects, start, PY_SSIZE_T_MAX, NULL) == 0)
        return 0;
    PyErr_Clear();
    for (Py_ssize_t size = PyList_Size(tags->objects); size > start; size = PyList_Size(tags->objects))
        TRY(PyList_SetSlice(tags->objects, size - 1, size, NULL));
    return 0;
}

static PyObject *tags_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    OWNED *objects = PyList_New(0);
    return objects == NULL ? NULL : new_parts(type, objects, NULL, NULL);
}

static void tags_dealloc(PyObject *self)
{
    Table *numbers = &((Tags *)self)->numbers;
    PyObject_GC_UnTrack(self);
    free_slots(numbers->slots, numbers->size);
    parts_dealloc(self);
}

static PyObject *tags_number_of(PyObject *self, PyObject *object)
{
    Py_ssize_t number = value_of(&((Tags *)self)->numbers, object);
    return number < 0 ? none() : PyLong_FromSsize_t(number);
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
    if (PyList_Append(tags->objects, object) < 0 || (tag && set_value(&tags->numbers, object, number) < 0))
        return NULL;
    return PyLong_FromSsize_t(number);
}

static PyObject *tags_forget(PyObject *self, PyObject *arg)
{
    Py_ssize_t start = PyLong_AsSsize_t(arg);
    if ((start == -1 && PyErr_Occurred()) || forget((Tags *)self, start) < 0)
        return NULL;
    return none();
}

static PyMethodDef tags_methods[] = {
    {"number_of", tags_number_of, METH_O, "The number of an object that was tagged, or None."},
    {"add", (PyCFunction)(void (*)(void))tags_add, METH_VARARGS | METH_KEYWORDS,
     "Gives an object the next number, and remembers it if `tag`."},
    {"forget", tags_forget, METH_O, "Takes back every number from `start` on."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot tags_slots[] = {
    {Py_tp_new, tags_new}, {Py_tp_dealloc, tags_dealloc}, {Py_tp_traverse, parts_traverse}, {Py_tp_methods, tags_methods},
    MEMBERS(FIXED_PART("objects", 0, "All objects, by number.")),
    {Py_tp_doc, "Which objects a crossing has seen, and their numbers. See `sharedtree.core._walk.Tags`."},
    {0, NULL},
};

/* --- keys: what a walk writes ------------------------------------------------------------------------------------ */

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
    int flags, convention;
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

/* The rules are the flags, and beyond eight bits the convention around the root: see `flags_of` in `_native_walk.py`. */
static Walk new_walk(Tags *tags, long rules)
{
    Walk w = spare;
    spare = (Walk){0};
    w.tags = tags;
    w.flags = (int)(rules & 0xff), w.convention = (int)(rules >> 8);
    return w;
}

static int push(Pins *pins, PyObject *object)
{
    if (pins->size == pins->room)
        TRY(grow(&pins->items, &pins->room, pins->size + 1, sizeof object));
    pins->items[pins->size++] = Py_NewRef(object);
    return DONE;
}

/* Each reference is taken off before it is given up, for finalisers run. */
static void pop_to(Pins *pins, size_t size)
{
    while (pins->size > size)
        Py_XDECREF(pins->items[--pins->size]);
}

/* Room for so many names. */
static int make_room(Walk *w, Py_ssize_t size)
{
    return grow(&w->names, &w->names_room, (size_t)size, sizeof *w->names);
}

/* Where a walk is, to go back there from what comes to nothing. */
typedef struct {
    size_t children, pins, key_size;
} Mark;

static Mark mark_of(const Walk *w)
{
    return (Mark){w->children.size, w->pins.size, w->key_size};
}

static void go_back(Walk *w, Mark mark)
{
    pop_to(&w->children, mark.children);
    pop_to(&w->pins, mark.pins);
    w->key_size = mark.key_size;
}

/* A code and what belongs to it. */
static int emit(Walk *w, char code, const void *bytes, size_t size)
{
    if (w->key_size + size >= w->key_room)
        TRY(grow(&w->key, &w->key_room, w->key_size + size + 1, 1));
    w->key[w->key_size++] = code;
    if (size > 0)
        memcpy(w->key + w->key_size, bytes, size);
    w->key_size += size;
    return DONE;
}

static int emit_code(Walk *w, char code)
{
    return emit(w, code, NULL, 0);
}

static int emit_count(Walk *w, char code, int64_t count)
{
    return emit(w, code, &count, sizeof count);
}

static int emit_kind(Walk *w, char code, const Kind *kind, Py_ssize_t count)
{
    uint32_t numbers[2] = {kind->number, (uint32_t)count};
    return count > UINT32_MAX ? FAILED : emit(w, code, numbers, sizeof numbers);
}

static int emit_address(Walk *w, PyObject *value)
{
    const void *addresses[2] = {value, Py_TYPE(value)};
    TRY(grow(&w->places, &w->places_room, w->pins.size + 1, sizeof *w->places));
    w->places[w->pins.size] = w->key_size;
    TRY(push(&w->pins, value));
    return emit(w, 'P', addresses, sizeof addresses);
}

/* Runs no Python unless it fails. For half of a surrogate pair it does: until Python 3.12 the mere making of an exception
   may collect garbage. So whoever calls this touches nothing borrowed when it has failed. */
static int emit_text(Walk *w, PyObject *text)
{
    Py_ssize_t size;
    if (PyUnicode_GetLength(text) > MAX_TEXT)
        return emit_address(w, text);
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    NEED(bytes);
    TRY(emit_count(w, 's', size));
    TRY(grow(&w->key, &w->key_room, w->key_size + (size_t)size, 1));
    memcpy(w->key + w->key_size, bytes, (size_t)size);
    w->key_size += (size_t)size;
    return DONE;
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

/* Of a list, or of a tuple of whichever class. */
static Py_ssize_t length_of(PyObject *sequence)
{
    return PyList_CheckExact(sequence) ? PyList_Size(sequence) : PyTuple_Size(sequence);
}

static PyObject *item_at(PyObject *sequence, Py_ssize_t i)
{
    return PyList_CheckExact(sequence) ? PyList_GetItem(sequence, i) : PyTuple_GetItem(sequence, i);
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
        return emit(w, 'd', &number, sizeof number);
    }
    /* A list or a dictionary is one of the user's own, and an exact walk tells it from another with the same content. */
    int is_own = w->flags & EXACT && (type == &PyList_Type || type == &PyDict_Type);
    if (!is_own && (type == &PyTuple_Type || type == &PyList_Type) && has_room(w, length_of(value), depth)) {
        Py_ssize_t size = length_of(value);
        TRY(emit_count(w, type == &PyTuple_Type ? '(' : '[', size));
        for (Py_ssize_t i = 0; i < size; i++)
            TRY(emit_static(w, item_at(value, i), depth + 1));
        return DONE;
    }
    if (!is_own && type == &PyDict_Type && has_room(w, PyDict_Size(value), depth)) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        TRY(emit_count(w, '{', PyDict_Size(value)));
        while (PyDict_Next(value, &at, &key, &item)) {
            TRY(emit_static(w, key, depth + 1));
            TRY(emit_static(w, item, depth + 1));
        }
        return DONE;
    }
    return emit_address(w, value);
}

/* The static values in a tuple, from one on. */
static int emit_statics(Walk *w, PyObject *values)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++)
        TRY(emit_static(w, PyTuple_GetItem(values, i), 0));
    return DONE;
}

/* --- shapes: how a node is read, and how the same is written from its auxiliary data ------------------------------ */

/* Each `open_` function writes what stands for an object, and pushes its children. Each `emit_` function writes the same from
   the auxiliary data that the flatten of such an object gives. What is LEFT is taken apart by what is registered for its
   class, and stands in keys with all its auxiliary data. Each `fits_` function says whether auxiliary data is as the kind
   says; what does not fit is neither written nor built in C. */

static int emit_items(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *Py_UNUSED(aux))
{
    return emit_kind(w, 'N', kind, num_children);
}

static int emit_items_and_aux(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    TRY(emit_kind(w, 'N', kind, num_children));
    return emit_static(w, aux, 0);
}

static int fits_none(const Kind *Py_UNUSED(kind), PyObject *aux, Py_ssize_t Py_UNUSED(size))
{
    return aux == Py_None;
}

static int push_items(Walk *w, PyObject *sequence)
{
    Py_ssize_t size = length_of(sequence);
    for (Py_ssize_t i = 0; i < size; i++)
        TRY(push(&w->children, item_at(sequence, i)));
    return DONE;
}

static int open_nothing(Walk *w, Kind *kind, PyObject *Py_UNUSED(object))
{
    return emit_kind(w, 'N', kind, 0);
}

static int open_sequence(Walk *w, Kind *kind, PyObject *object)
{
    TRY(emit_kind(w, 'N', kind, length_of(object)));
    return push_items(w, object);
}

static int open_deque(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *items = PySequence_Tuple(object), *most = items == NULL ? NULL : PyObject_GetAttr(object, name_maxlen);
    NEED(most);
    TRY(emit_items_and_aux(w, kind, PyTuple_Size(items), most));
    return push_items(w, items);
}

/* The arguments of a call that are not static, by position and by keyword. */
static int open_arguments(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *aux = parts_of(object)[AUX_OF], *args = parts_of(object)[ARGS_OF], *kwargs = parts_of(object)[KWARGS_OF];
    if (aux == NULL || args == NULL || kwargs == NULL || !is_tuple_of(aux, 3) || !PyTuple_CheckExact(args) ||
        !PyDict_CheckExact(kwargs))
        return FAILED;
    PyObject *names = PyTuple_GetItem(aux, 0), *keywords = PyTuple_GetItem(aux, 1);
    Py_ssize_t given = PyTuple_Size(args), count = 0;
    if (PyTuple_Size(names) != given)
        return FAILED;
    for (Py_ssize_t i = 0; i < given; i++)
        count += PyTuple_GetItem(names, i) != Py_None;
    TRY(emit_items_and_aux(w, kind, count + PyTuple_Size(keywords), aux));
    for (Py_ssize_t i = 0; i < given; i++) {
        if (PyTuple_GetItem(names, i) != Py_None)
            TRY(push(&w->children, PyTuple_GetItem(args, i)));
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(keywords); i++) {
        PyObject *value = PyDict_GetItemWithError(kwargs, PyTuple_GetItem(keywords, i));
        NEED(value);
        TRY(push(&w->children, value));
    }
    return DONE;
}

/* Pushes the items of a dictionary in the order of its keys, which are in `w->names` then, as long as few have to be moved
   for that; else they are LEFT, and so they are for a key that is no text or of a subclass. Runs no Python, so that keys need
   no references. */
static int push_in_order(Walk *w, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, size = 0, moves = 16 * PyDict_Size(dict);
    size_t start = w->children.size;
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (Py_TYPE(key) != &PyUnicode_Type || moves < 0)
            return LEFT;
        TRY(make_room(w, size + 1));
        TRY(push(&w->children, value));
        PyObject **names = w->names, **values = w->children.items + start;
        Py_ssize_t i = size++;
        for (; i > 0 && PyUnicode_Compare(names[i - 1], key) > 0; i--, moves--) {
            names[i] = names[i - 1];
            values[i] = values[i - 1];
        }
        names[i] = key;
        values[i] = value;
    }
    return DONE;
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

static int are_simple_keys(PyObject *keys)
{
    Py_ssize_t size = length_of(keys);
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!is_simple_key(item_at(keys, i)))
            return 0;
    }
    return 1;
}

/* The items of a dictionary as the reference orders them: sorted, or as they are if they have no order, which outside modules
   JAX refuses. LEFT where only Python can tell. */
static int push_by_keys(Walk *w, const Kind *kind, PyObject *dict)
{
    OWNED *keys = kind->shape == ORDERED_DICT ? PyMapping_Keys(dict) : PyDict_Keys(dict), *sorted = NULL;
    NEED(keys);
    if (!are_simple_keys(keys))
        return LEFT;
    if (kind->shape != ORDERED_DICT) {
        sorted = PySequence_List(keys);
        NEED(sorted);
        if (PyList_Sort(sorted) < 0) {
            if (!is_dropped(PyExc_TypeError))
                return FAILED;
            if (w->is_outside)
                return LEFT;
            replace(&sorted, NULL);
        }
    }
    PyObject *order = sorted == NULL ? keys : sorted;
    for (Py_ssize_t i = 0; i < PyList_Size(order); i++) {
        PyObject *key = PyList_GetItem(order, i), *value = PyDict_GetItemWithError(dict, key);
        NEED(value);
        TRY(emit_static(w, key, 0));
        TRY(push(&w->children, value));
    }
    return DONE;
}

/* The items of a dictionary, and of one with a default what makes that. */
static int open_dict(Walk *w, Kind *kind, PyObject *object)
{
    Py_ssize_t size = PyDict_Size(object);
    TRY(emit_kind(w, 'N', kind, size));
    if (kind->shape == DEFAULT_DICT) {
        OWNED *factory = PyObject_GetAttr(object, name_default_factory);
        NEED(factory);
        TRY(emit_static(w, factory, 0));
    }
    Mark mark = mark_of(w);
    int outcome = kind->shape == ORDERED_DICT ? LEFT : push_in_order(w, object);
    for (Py_ssize_t i = 0; outcome == DONE && i < size; i++)
        outcome = emit_text(w, w->names[i]);
    if (outcome != LEFT)
        return outcome;
    go_back(w, mark);
    TRY(push_by_keys(w, kind, object));
    /* Meanwhile garbage may have been collected, and a finaliser may have changed the dictionary. */
    return w->children.size - mark.children == (size_t)size ? DONE : FAILED;
}

static PyObject *keys_in(const Kind *kind, PyObject *aux)
{
    return kind->shape == DEFAULT_DICT ? PyTuple_GetItem(aux, 1) : aux;
}

static int fits_dict(const Kind *kind, PyObject *aux, Py_ssize_t size)
{
    return (kind->shape != DEFAULT_DICT || is_tuple_of(aux, 2)) && is_tuple_of(keys_in(kind, aux), size);
}

static int emit_dict(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    if (!are_simple_keys(keys_in(kind, aux)))
        return LEFT;
    TRY(emit_kind(w, 'N', kind, num_children));
    if (kind->shape == DEFAULT_DICT)
        TRY(emit_static(w, PyTuple_GetItem(aux, 0), 0));
    return emit_statics(w, keys_in(kind, aux));
}

/* Says of an object that was read by name which fields are there, if these are not all that are declared and no others.
   `w->names` has an entry for each of all names, NULL where a field is absent. What is said last begins with no code of a
   static value. */
static int end_fields(Walk *w, Kind *kind, size_t begin)
{
    Py_ssize_t declared = PyTuple_Size(kind->order), size = PyTuple_Size(kind->names);
    int are_declared = 1;
    for (Py_ssize_t i = 0; i < size; i++)
        are_declared &= (w->names[i] != NULL) == (i < declared);
    if (are_declared)
        return DONE;
    w->key[begin] = 'A';
    for (Py_ssize_t i = 0; i < size; i++)
        TRY(emit_code(w, w->names[i] != NULL));
    return DONE;
}

/* The value of a field; a new reference. NULL, without an error if it is absent. A dictionary of attributes may have keys
   that answer for others. */
static PyObject *field_of(const Kind *kind, PyObject *holder, PyObject *name)
{
    if (kind->shape == DATACLASS || kind->shape == FIELDS) {
        PyObject *value = PyDict_GetItemWithError(holder, name);
        return value == NULL || (kind->shape == FIELDS && is_a(value, missing_type)) ? NULL : Py_NewRef(value);
    }
    PyObject *value = get_attribute(holder, name);
    if (value == NULL)
        is_dropped(PyExc_AttributeError);
    return value;
}

/* The fields of an object, by name, from the dictionary of its attributes or from its slots. Only FIELDS may be absent: else
   Python's look-up decides. */
static int open_by_name(Walk *w, Kind *kind, PyObject *holder)
{
    size_t begin = w->key_size;
    TRY(make_room(w, PyTuple_Size(kind->names)));
    TRY(emit_kind(w, 'F', kind, 0));
    for (Py_ssize_t i = 0; i < PyTuple_Size(kind->names); i++) {
        OWNED *value = field_of(kind, holder, PyTuple_GetItem(kind->names, i));
        if (value == NULL && (kind->shape != FIELDS || PyErr_Occurred()))
            return PyErr_Occurred() ? FAILED : LEFT;
        w->names[i] = value == NULL ? NULL : Py_None;
        if (value != NULL)
            TRY(i < kind->num_traced ? push(&w->children, value) : emit_static(w, value, 0));
    }
    return end_fields(w, kind, begin);
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
        if (Py_TYPE(part) == &PyTuple_Type || !is_simple_key(part))
            return 0;
    }
    return PyTuple_CheckExact(value);
}

/* The attributes of an object, if they are exactly these, in this order. Runs no Python. */
static int open_in_order(Walk *w, Kind *kind, PyObject *attributes, PyObject *names, PyObject *are_static)
{
    Py_ssize_t size = PyTuple_Size(names), at = 0, i = 0;
    const char *is_static = PyBytes_AsString(are_static);
    PyObject *name, *value;
    if (PyDict_Size(attributes) != size)
        return LEFT;
    for (; PyDict_Next(attributes, &at, &name, &value); i++) {
        if (i >= size || !is_text(name, PyTuple_GetItem(names, i)) || is_a(value, missing_type))
            return LEFT;
        if (is_static[i] && kind->shape == MODULE && !is_static_for_ever(value))
            return LEFT;
        TRY(is_static[i] ? emit_static(w, value, 0) : push(&w->children, value));
    }
    return DONE;
}

/* The attributes of an object, as it has them; a new reference. NULL without an error if that is no mere dictionary. */
static PyObject *attributes_of(PyObject *object)
{
    PyObject *attributes = PyObject_GenericGetDict(object, NULL);
    if (attributes != NULL && !PyDict_CheckExact(attributes))
        replace(&attributes, NULL);
    return attributes;
}

static int open_fields(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *attributes = attributes_of(object);
    Mark mark = mark_of(w);
    NEED(attributes);
    if (kind->is_in_order) {
        TRY(emit_kind(w, 'F', kind, 0));
        int outcome = open_in_order(w, kind, attributes, kind->order, kind->is_static);
        if (outcome != LEFT)
            return outcome;
        go_back(w, mark);
    }
    if (kind->shape == DATACLASS && PyDict_Size(attributes) != PyTuple_Size(kind->order))
        return LEFT; /* it has company */
    return open_by_name(w, kind, attributes);
}

static int are_pairs(PyObject *aux)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(aux); i++) {
        if (!is_tuple_of(PyTuple_GetItem(aux, i), 2))
            return 0;
    }
    return 1;
}

static int fits_fields(const Kind *Py_UNUSED(kind), PyObject *aux, Py_ssize_t size)
{
    return is_tuple_of(aux, 2) && is_tuple_of(PyTuple_GetItem(aux, 0), size) && PyTuple_CheckExact(PyTuple_GetItem(aux, 1)) &&
           are_pairs(PyTuple_GetItem(aux, 1));
}

static int emit_fields(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    OWNED *attributes = PyDict_New();
    size_t start = w->children.size;
    NEED(attributes);
    for (Py_ssize_t i = 0; i < num_children; i++)
        TRY(PyDict_SetItem(attributes, PyTuple_GetItem(PyTuple_GetItem(aux, 0), i), Py_None));
    TRY(PyDict_MergeFromSeq2(attributes, PyTuple_GetItem(aux, 1), 1));
    TRY(open_by_name(w, kind, attributes));
    pop_to(&w->children, start);
    return DONE;
}

/* What is read by name, none of it absent, has the static values as its auxiliary data. */
static int fits_by_name(const Kind *kind, PyObject *aux, Py_ssize_t size)
{
    return size == kind->num_traced && is_tuple_of(aux, PyTuple_Size(kind->names) - size);
}

static int emit_by_name(Walk *w, Kind *kind, Py_ssize_t Py_UNUSED(num_children), PyObject *aux)
{
    TRY(emit_kind(w, 'F', kind, 0));
    return emit_statics(w, aux);
}

/* The names of which the kinds are noted, and for each a byte, whether it is static; new references. 0 if there are none. */
static int read_kinds(PyObject *noted, PyObject **names, PyObject **are_static)
{
    *names = *are_static = NULL;
    if (!is_a(noted, attribute_kinds_type))
        return 0;
    *names = get_slot(names_in_kinds, noted, NULL);
    *are_static = *names == NULL ? NULL : get_slot(statics_in_kinds, noted, NULL);
    PyErr_Clear();
    return *are_static != NULL && PyBytes_Check(*are_static) && is_tuple_of(*names, PyBytes_Size(*are_static));
}

static int open_module(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *noted = get_slot(kinds_of_attributes, object, NULL), *names = NULL, *are_static = NULL, *attributes = NULL;
    if (noted == NULL)
        return is_dropped(PyExc_AttributeError) ? LEFT : FAILED;
    if (!read_kinds(noted, &names, &are_static))
        return LEFT;
    attributes = attributes_of(object);
    NEED(attributes);
    TRY(emit_kind(w, 'M', kind, 0));
    TRY(emit_address(w, noted));
    return open_in_order(w, kind, attributes, names, are_static);
}

static int fits_module(const Kind *Py_UNUSED(kind), PyObject *aux, Py_ssize_t size)
{
    OWNED *names = NULL, *are_static = NULL;
    if (!is_tuple_of(aux, 2) || !read_kinds(PyTuple_GetItem(aux, 0), &names, &are_static))
        return 0;
    Py_ssize_t num_static = 0;
    for (Py_ssize_t i = 0; i < PyBytes_Size(are_static); i++)
        num_static += PyBytes_AsString(are_static)[i] != 0;
    return PyTuple_Size(names) == size + num_static && is_tuple_of(PyTuple_GetItem(aux, 1), num_static);
}

static int emit_module(Walk *w, Kind *kind, Py_ssize_t Py_UNUSED(num_children), PyObject *aux)
{
    TRY(emit_kind(w, 'M', kind, 0));
    TRY(emit_address(w, PyTuple_GetItem(aux, 0)));
    return emit_statics(w, PyTuple_GetItem(aux, 1));
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

/* Of the names of attributes, in order, if these are texts, whose hash runs no Python. Never 0. */
static size_t hash_of_names(PyObject *attributes)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    size_t hash = 0;
    while (PyDict_Next(attributes, &at, &name, &value))
        hash = 31 * hash + (Py_TYPE(name) == &PyUnicode_Type ? (size_t)PyObject_Hash(name) : 1);
    return hash | 1;
}

/* The attributes of an NNX object, if they are of this layout. Runs no Python. */
static int open_by_layout(Walk *w, Kind *kind, const Layout *layout, PyObject *attributes, PyObject *mapping)
{
    Py_ssize_t at = 0, size = PyTuple_Size(layout->names), num_traced = layout->num_traced;
    size_t start = w->children.size;
    PyObject *name, *value;
    if (PyDict_Size(attributes) != size || !has_marks(layout, mapping))
        return LEFT;
    TRY(emit_kind(w, 'O', kind, layout->number));
    TRY(make_room(w, size));
    TRY(grow(&w->children.items, &w->children.room, start + (size_t)num_traced, sizeof value));
    for (Py_ssize_t i = 0; i < size; i++)
        w->names[i] = NULL;
    for (Py_ssize_t i = 0; i < num_traced; i++)
        w->children.items[w->children.size++] = NULL;
    for (Py_ssize_t i = 0; PyDict_Next(attributes, &at, &name, &value); i++) {
        if (i >= size || !is_text(name, PyTuple_GetItem(layout->names, i)))
            return LEFT;
        int place = layout->places[i];
        if (place >= num_traced)
            w->names[place] = value;
        else if (place >= 0)
            w->children.items[start + (size_t)place] = Py_NewRef(value);
    }
    for (Py_ssize_t i = num_traced; i < size; i++) {
        if (w->names[i] != NULL)
            TRY(emit_static(w, w->names[i], 0));
    }
    return DONE;
}

/* A layout with this form. NULL if there is none, or with an error. */
static Layout *layout_with(const Kind *kind, PyObject *form)
{
    for (size_t i = 0; i < kind->layouts.size; i++) {
        Layout *layout = kind->layouts.slots[i].key == NULL ? NULL : (Layout *)kind->layouts.slots[i].value;
        for (; layout != NULL; layout = layout->next) {
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
    OWNED *found = PyObject_CallFunctionObjArgs(layout_of, object, NULL);
    PyObject *form, *names, *places, *marked, *marks;
    if (found == NULL || found == Py_None) {
        kind->num_layouts++;
        return NULL;
    }
    if (!PyArg_ParseTuple(found, "O!O!O!O!S", &PyTuple_Type, &form, &PyTuple_Type, &names, &PyTuple_Type, &places,
                          &PyTuple_Type, &marked, &marks))
        return NULL;
    Py_ssize_t size = PyTuple_Size(names);
    if (!is_tuple_of(form, 3) || !PyTuple_CheckExact(PyTuple_GetItem(form, 0)) || !is_tuple_of(places, size) ||
        PyBytes_Size(marks) != PyTuple_Size(marked))
        return refuse(PyExc_ValueError, "no layout");
    Layout *alike = layout_with(kind, form);
    if (alike == NULL && PyErr_Occurred())
        return NULL;
    Layout *layout = PyMem_Calloc(1, sizeof *layout + 2 * (size_t)size * sizeof *layout->places);
    if (layout == NULL)
        return (void *)PyErr_NoMemory();
    layout->num_traced = PyTuple_Size(PyTuple_GetItem(form, 0));
    layout->next = pointer_at(&kind->layouts, (void *)hash);
    int *is_taken = layout->places + size;
    Py_ssize_t num_placed = 0;
    for (Py_ssize_t i = 0; i < size && !PyErr_Occurred(); i++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(places, i));
        if (place >= size || (place >= 0 && is_taken[place]++))
            refuse(PyExc_ValueError, "no two names have one place, which is one of so many");
        layout->places[i] = (int)place;
        num_placed += place >= 0 && place < layout->num_traced;
    }
    if (!PyErr_Occurred() && num_placed != layout->num_traced)
        refuse(PyExc_ValueError, "one place for each child");
    if (PyErr_Occurred() || set_value(&kind->layouts, (void *)hash, (intptr_t)layout) < 0) {
        PyMem_Free(layout);
        return NULL;
    }
    layout->form = Py_NewRef(form), layout->names = Py_NewRef(names);
    layout->marked = Py_NewRef(marked), layout->marks = Py_NewRef(marks);
    layout->number = alike == NULL ? kind->num_layouts : alike->number;
    kind->num_layouts++;
    return layout;
}

static int open_nnx_object(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *attributes = attributes_of(object), *nodes = NULL, *mapping = NULL;
    if (attributes != NULL)
        nodes = Py_XNewRef(PyDict_GetItemWithError(attributes, name_nodes));
    if (nodes != NULL && is_a(nodes, mapping_type))
        mapping = PyObject_GenericGetAttr(nodes, name_mapping);
    if (mapping == NULL || !PyDict_CheckExact(mapping))
        return PyErr_Occurred() ? FAILED : LEFT;
    size_t hash = hash_of_names(attributes);
    Mark mark = mark_of(w);
    Layout *layout = pointer_at(&kind->layouts, (void *)hash);
    for (; layout != NULL; layout = layout->next) {
        int outcome = open_by_layout(w, kind, layout, attributes, mapping);
        if (outcome != LEFT)
            return outcome;
        go_back(w, mark);
    }
    if (kind->num_layouts < MAX_LAYOUTS)
        layout = new_layout(kind, object, hash);
    NEED(layout);
    return open_by_layout(w, kind, layout, attributes, mapping);
}

static int fits_nnx_object(const Kind *Py_UNUSED(kind), PyObject *aux, Py_ssize_t size)
{
    return is_tuple_of(aux, 3) && is_tuple_of(PyTuple_GetItem(aux, 0), size) && PyTuple_CheckExact(PyTuple_GetItem(aux, 1)) &&
           is_tuple_of(PyTuple_GetItem(aux, 2), PyTuple_Size(PyTuple_GetItem(aux, 1)));
}

static int emit_nnx_object(Walk *w, Kind *kind, Py_ssize_t Py_UNUSED(num_children), PyObject *aux)
{
    PyObject *names = PyTuple_GetItem(aux, 1), *values = PyTuple_GetItem(aux, 2);
    Py_ssize_t at = 0, size = PyTuple_Size(names);
    while (at < size && !is_text(PyTuple_GetItem(names, at), name_nodes))
        at++;
    if (at == size || !is_a(PyTuple_GetItem(values, at), mapping_type))
        return LEFT;
    OWNED *mapping = PyObject_GenericGetAttr(PyTuple_GetItem(values, at), name_mapping);
    OWNED *form = mapping == NULL ? NULL : PyTuple_Pack(3, PyTuple_GetItem(aux, 0), names, mapping);
    Layout *layout = form == NULL ? NULL : layout_with(kind, form);
    NEED(layout);
    TRY(emit_kind(w, 'O', kind, layout->number));
    for (Py_ssize_t i = 0; i < size; i++) {
        if (i != at)
            TRY(emit_static(w, PyTuple_GetItem(values, i), 0));
    }
    return DONE;
}

/* The value of an NNX variable; its metadata is static. No hook is run. */
static int emit_metadata(Walk *w, Kind *kind, PyObject *metadata)
{
    size_t start = w->children.size;
    TRY(push_in_order(w, metadata));
    TRY(emit_kind(w, 'F', kind, PyDict_Size(metadata)));
    for (size_t i = start; i < w->children.size; i++) {
        TRY(emit_text(w, w->names[i - start]));
        TRY(emit_static(w, w->children.items[i], 0));
    }
    pop_to(&w->children, start);
    return DONE;
}

static int open_nnx_variable(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *value = get_slot(raw_value, object, NULL), *metadata = value == NULL ? NULL : get_slot(metadata_of, object, NULL);
    NEED(metadata);
    if (!PyDict_CheckExact(metadata))
        return LEFT;
    TRY(emit_metadata(w, kind, metadata));
    return push(&w->children, value);
}

static int fits_nnx_variable(const Kind *Py_UNUSED(kind), PyObject *aux, Py_ssize_t size)
{
    return size == 1 && PyTuple_CheckExact(aux) && are_pairs(aux);
}

static int emit_nnx_variable(Walk *w, Kind *kind, Py_ssize_t Py_UNUSED(num_children), PyObject *aux)
{
    OWNED *metadata = PyDict_New();
    NEED(metadata);
    TRY(PyDict_MergeFromSeq2(metadata, aux, 1));
    return emit_metadata(w, kind, metadata);
}

/* --- the walk ---------------------------------------------------------------------------------------------------- */

typedef struct Step Step;
typedef struct Run Run;
typedef struct Writing Writing;

/* What C knows of a shape. NULL where it leaves that to Python, and to what is registered for the class. */
typedef struct {
    const char *name;
    int (*open)(Walk *w, Kind *kind, PyObject *object);
    int (*fits)(const Kind *kind, PyObject *aux, Py_ssize_t num_children); /* NULL where all auxiliary data does */
    int (*emit)(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux);
    PyObject *(*build)(Run *run, const Step *step);
    PyObject *(*holder)(PyObject *object); /* what has the items that are written back; NULL where these are slots alone */
    PyObject *(*copy)(PyObject *items);
    int (*write)(const Writing *writing, PyObject *items, int is_own);
} Shape;

static const Shape SHAPES[NUM_SHAPES];

enum { TARGET, HOLDER, NEW_ITEMS, NEW_VALUES, OLD_ITEMS, OLD_VALUES, NUM_HELD };

/* Something that is to be written. */
struct Writing {
    const Kind *kind;
    const Shape *shape;       /* of the kind, which may become another */
    PyObject *slots;
    PyObject *held[NUM_HELD]; /* strong references */
};

static const Shape *shape_of(const Kind *kind)
{
    return &SHAPES[kind->shape];
}

/* What stands for a node, with one word more for what is LEFT. */
static int emit_node(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    const Shape *shape = shape_of(kind);
    Mark mark = mark_of(w);
    int is_fit = shape->emit != NULL && (shape->fits == NULL || shape->fits(kind, aux, num_children));
    int outcome = is_fit ? shape->emit(w, kind, num_children, aux) : LEFT;
    if (outcome != LEFT)
        return outcome;
    if (kind->shape == FIELDS)
        return FAILED; /* nobody else takes those apart */
    go_back(w, mark);
    TRY(emit_kind(w, 'G', kind, num_children));
    return emit_static(w, aux, 0);
}

static int open_other(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *found = PyObject_CallFunctionObjArgs(kind->take_apart, object, NULL), *children = NULL;
    if (found == NULL || !is_record(found, 2))
        return FAILED;
    children = PySequence_Tuple(PyTuple_GetItem(found, 0));
    NEED(children);
    TRY(emit_node(w, kind, PyTuple_Size(children), PyTuple_GetItem(found, 1)));
    /* What is neither a child nor pinned may go afterwards: its address is in no key. */
    return push_items(w, children);
}

static int open_node(Walk *w, PyObject *object, Kind *kind, int outer)
{
    int has_identity = kind->is_mutable || !kind->is_plain;
    Py_ssize_t before = has_identity ? value_of(&w->tags->numbers, object) : NONE;
    if (w->depth >= MAX_DEPTH || before == OPEN)
        return FAILED;
    Mark mark = mark_of(w);
    w->is_outside = outer == OUTSIDE || outer == ANY;
    int outcome = shape_of(kind)->open == NULL ? LEFT : shape_of(kind)->open(w, kind, object);
    if (outcome == LEFT) {
        go_back(w, mark);
        outcome = open_other(w, kind, object);
    }
    TRY(outcome);
    TRY(grow(&w->frames, &w->frames_room, w->depth + 1, sizeof *w->frames));
    if (has_identity)
        TRY(set_value(&w->tags->numbers, object, OPEN));
    int inner = kind->convention;
    if (inner == INHERITED) {
        inner = outer == IN_VARIABLE || ((outer == ANY || outer == OUTSIDE) && !kind->is_plain) ? JAX : outer;
        if (outer == OUTSIDE && kind->is_plain && kind->is_mutable && w->flags & CONTAINERS)
            inner = ANY;
    }
    int is_object = has_identity && (outer != OUTSIDE || inner != OUTSIDE);
    w->frames[w->depth++] = (Frame){.object = object, .kind = kind, .start = mark.children, .next = mark.children,
                                    .end = w->children.size, .convention = inner, .is_open = has_identity,
                                    .is_object = is_object, .before = before};
    return DONE;
}

static int record(Walk *w, PyObject *object, int tag)
{
    if (PyList_Size(w->tags->objects) != w->expected)
        return FAILED;
    TRY(PyList_Append(w->tags->objects, object));
    Py_ssize_t number = w->expected++;
    return tag ? set_value(&w->tags->numbers, object, number) : DONE;
}

static int record_leaf(Walk *w, PyObject *object, int tag)
{
    TRY(emit_code(w, 'L'));
    TRY(PyList_Append(w->leaves, object));
    return record(w, object, tag);
}

static int record_static(Walk *w, PyObject *object)
{
    TRY(emit_code(w, 'S'));
    TRY(emit_static(w, object, 0));
    return record(w, object, 0);
}

/* Refers to an object that was met before; LEFT if it was not. */
static int refer_back(Walk *w, PyObject *object)
{
    Py_ssize_t number = value_of(&w->tags->numbers, object);
    if (number < 0)
        return number == OPEN ? FAILED : LEFT;
    return emit_count(w, 'R', number);
}

/* Whether JAX traces what a NumPy array or number holds; 0 if only Python can tell. */
static int is_numeric(PyObject *object)
{
    OWNED *dtype = PyObject_GetAttr(object, name_dtype);
    PyErr_Clear();
    for (Py_ssize_t i = 0; dtype != NULL && i < PyTuple_Size(dtypes); i++) {
        if (PyTuple_GetItem(dtypes, i) == dtype)
            return 1;
    }
    return 0;
}

static int visit_uncommon(Walk *w, PyObject *object, int convention);

static int visit_static(Walk *w, PyObject *object)
{
    int outcome = refer_back(w, object);
    return outcome == LEFT ? record_static(w, object) : outcome;
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
    else if (is_array && !is_numeric(object))
        return visit_uncommon(w, object, convention);
    else if (kind->shape == STATIC || (kind->shape == NUMBER && convention == EQUINOX))
        return visit_static(w, object);
    int has_identity = is_array && kind->shape != NUMPY_NUMBER && !is_value;
    int outcome = has_identity ? refer_back(w, object) : LEFT;
    return outcome == LEFT ? record_leaf(w, object, has_identity && w->flags & ARRAYS) : outcome;
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
        if (outcome != LEFT)
            return outcome;
    }
    if (is_leaf)
        return w->flags & FILTERED ? record_static(w, object) : record_leaf(w, object, 0);
    return open_node(w, object, kind, convention);
}

/* What to do with an object whose class has no kind yet, or only Python can tell. */
static int visit_uncommon(Walk *w, PyObject *object, int convention)
{
    OWNED *number = PyLong_FromLong(convention | ((w->flags & FILTERED) != 0) << 8);
    OWNED *found = number == NULL ? NULL : PyObject_CallFunctionObjArgs(meet, object, number, NULL);
    NEED(found);
    if (PyLong_Check(found)) {
        long role = PyLong_AsLong(found);
        if (role == -1 && PyErr_Occurred())
            return FAILED;
        int outcome = role == 1 ? LEFT : refer_back(w, object);
        if (outcome != LEFT)
            return outcome;
        return role == 0 ? record_static(w, object) : record_leaf(w, object, role == 2 && w->flags & ARRAYS);
    }
    Kind *kind = new_kind(found);
    /* Its class may be another by now. */
    if (kind == NULL || kind->type != Py_TYPE(object) || kind_of(kind->type) != kind ||
        (kind->is_guess && kind->epoch != epoch()))
        return FAILED;
    return visit(w, object, convention);
}

static int close_node(Walk *w)
{
    Frame frame = w->frames[--w->depth];
    if (frame.is_open && !frame.is_object)
        TRY(set_value(&w->tags->numbers, frame.object, frame.before));
    TRY(record(w, frame.object, frame.is_object || w->flags & VALUES));
    pop_to(&w->children, frame.start);
    return DONE;
}

/* The class that a pinned value had when it was written. Only to be compared: it may be gone. */
static PyTypeObject *type_of_pin(const Walk *w, size_t i)
{
    PyTypeObject *type;
    memcpy(&type, w->key + w->places[i] + 1 + sizeof(PyObject *), sizeof type);
    return type;
}

/* Puts in the place of a pin what stands for its value. */
static void put_token(Walk *w, size_t i, PyObject *token)
{
    const void *addresses[2] = {token, NULL};
    w->key[w->places[i]] = 'V';
    memcpy(w->key + w->places[i] + 1, addresses, sizeof addresses);
    replace(&w->pins.items[i], Py_NewRef(token));
}

/* What Python says of a pin: (its class,), of which all instances are the same for ever; a token; or (a token, None), of a
   value that is the same for ever itself. Of such a value, an exact walk writes the token if an equal value is as good, and
   otherwise leaves the address. */
static int settle_pin(Walk *w, size_t i, PyObject *found)
{
    PyObject *value = w->pins.items[i], *first = PyTuple_CheckExact(found) ? PyTuple_GetItem(found, 0) : found;
    NEED(first);
    if (first != found && PyTuple_Size(found) == 1)
        return first != (PyObject *)type_of_pin(w, i) ? FAILED : add_fact_weakly(first, &PyType_Type, NULL);
    if (first != found) {
        TRY(PyList_Append(w->settled, value));
        TRY(PyList_Append(w->settled, first));
        TRY(add_fact_weakly(value, type_of_pin(w, i), first));
        OWNED *answer = w->flags & EXACT ? PyObject_GetAttr(first, name_is_interchangeable) : Py_NewRef(Py_True);
        NEED(answer);
        if (answer != Py_True)
            return DONE;
    }
    put_token(w, i, first);
    return DONE;
}

/* What is already known of a pin. LEFT if Python has to be asked. */
static int settle_known_pin(Walk *w, size_t i)
{
    PyTypeObject *type = type_of_pin(w, i);
    const Fact *fact = fact_of((PyObject *)type, &PyType_Type);
    if (fact != NULL && fact->token == NULL)
        return DONE;
    fact = fact_of(w->pins.items[i], type);
    int is_interchangeable = fact != NULL && fact->is_interchangeable; /* read before Python runs */
    OWNED *token = referent(fact == NULL ? NULL : fact->token);
    PyErr_Clear();
    NEED(token);
    if (w->settled != NULL) {
        TRY(PyList_Append(w->settled, w->pins.items[i]));
        TRY(PyList_Append(w->settled, token));
    }
    if (!(w->flags & EXACT) || is_interchangeable)
        put_token(w, i, token);
    return DONE;
}

/* Asks Python about all pins that need not be the same value for ever. After the walk, for this runs Python. */
static int settle_pins(Walk *w)
{
    OWNED *values = NULL, *numbers = NULL, *found = NULL;
    for (size_t i = 0; i < w->pins.size; i++) {
        int outcome = settle_known_pin(w, i);
        if (outcome != LEFT) {
            TRY(outcome);
            continue;
        }
        if (values == NULL && ((values = PyList_New(0)) == NULL || (numbers = PyList_New(0)) == NULL))
            return FAILED;
        TRY(PyList_Append(values, w->pins.items[i]));
        TRY(append_new(numbers, PyLong_FromSize_t(i)));
    }
    if (values == NULL)
        return DONE;
    if (w->settled == NULL && (w->settled = PyList_New(0)) == NULL)
        return FAILED;
    found = PyObject_CallFunctionObjArgs(settle, values, w->flags & EXACT ? Py_True : Py_False, NULL);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_Size(numbers); i++) {
        PyObject *each = PyList_GetItem(found, i);
        NEED(each);
        TRY(settle_pin(w, PyLong_AsSize_t(PyList_GetItem(numbers, i)), each));
    }
    return found == NULL ? FAILED : DONE;
}

static int emit_header(Walk *w, int64_t base)
{
    int64_t header[2] = {w->flags | w->convention << 8, base};
    return emit(w, 'B', header, sizeof header);
}

static int walk_all(Walk *w, PyObject *tree)
{
    TRY(emit_header(w, w->expected));
    TRY(visit(w, tree, w->convention));
    while (w->depth) {
        Frame *frame = &w->frames[w->depth - 1];
        TRY(frame->next == frame->end ? close_node(w) : visit(w, w->children.items[frame->next++], frame->convention));
    }
    TRY(settle_pins(w));
    return PyList_Size(w->tags->objects) == w->expected ? DONE : FAILED;
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
        spare = *w;
        spare.tags = NULL, spare.depth = 0, spare.key_size = 0;
        return;
    }
    free_memory(w);
}

/* Takes back what a walk did that came to nothing. An error of `Exception` is dropped, for Python then walks, and raises
   it with its paths: LEFT. Any other error goes on. */
static int take_back(Walk *w, Py_ssize_t base)
{
    PyObject *type, *value, *traceback;
    Tags *tags = w->tags;
    /* What is open as a value may have had a number as an object. */
    for (; w->depth > 0; w->depth--) {
        Frame *frame = &w->frames[w->depth - 1];
        if (frame->is_open)
            reset_value(&tags->numbers, frame->object, frame->before);
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (type != NULL && !PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        forget(tags, base);
        PyErr_Restore(type, value, traceback);
        return FAILED;
    }
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    return forget(tags, base) < 0 ? FAILED : LEFT;
}

/* Of a form of calls: the key that it had last, the entry to which it led, and what `epoch_of_keys` was then. */
enum { KEY_OF, ENTRY_OF, EPOCH_OF };

static PyObject *epoch_of_keys; /* another object when what is in keys by address may be let go of while a structure lives */

static PyType_Slot latest_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_doc, "The key that a form of calls had last."}, {0, NULL},
};

/* The entry for the key of a walk, if the last one of this form had it. A new reference. */
static PyObject *entry_of_latest(PyObject *latest, const Walk *w)
{
    PyObject **parts = latest == NULL ? NULL : parts_of(latest);
    int is_same = parts != NULL && parts[EPOCH_OF] == epoch_of_keys && (size_t)PyBytes_Size(parts[KEY_OF]) == w->key_size &&
                  memcmp(PyBytes_AsString(parts[KEY_OF]), w->key, w->key_size) == 0;
    return is_same ? Py_NewRef(parts[ENTRY_OF]) : NULL;
}

static PyObject *native_forget_keys(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *another = PyList_New(0);
    if (another == NULL)
        return NULL;
    replace(&epoch_of_keys, another);
    return none();
}

/* The structure to which the key of a walk leads; NULL if none is known, or on an error. */
static PyObject *structure_of_key(const Walk *w, PyObject *known, PyObject *latest)
{
    OWNED *before = entry_of_latest(latest, w), *key = NULL, *entry = NULL;
    PyObject *structure = referent(before);
    if (structure != NULL)
        return structure;
    key = PyBytes_FromStringAndSize(w->key, (Py_ssize_t)w->key_size);
    /* Held, for what follows may collect garbage, and with it what the entry is of. */
    entry = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(known, key));
    structure = referent(entry);
    PyObject *parts[3] = {key, entry, epoch_of_keys};
    for (int i = 0; structure != NULL && latest != NULL && i < 3; i++)
        replace(&parts_of(latest)[i], Py_NewRef(parts[i]));
    return structure;
}

/* Walks over a tree, and looks up the structure that its key leads to in `known`. LEFT if Python has to walk; FAILED with an
   error that is not Python's to explain. */
static int walk_tree(Walk *w, PyObject *tree, PyObject *known, PyObject *latest, PyObject **structure)
{
    Py_ssize_t base = PyList_Size(w->tags->objects);
    w->expected = base;
    w->leaves = PyList_New(0);
    *structure = NULL;
    if (w->leaves != NULL && walk_all(w, tree) == DONE)
        *structure = structure_of_key(w, known, latest);
    return *structure != NULL ? DONE : take_back(w, base);
}

static PyObject *native_walk(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tree, *known, *result = NULL;
    OWNED *structure = NULL;
    Tags *tags;
    long rules;
    if (!PyArg_ParseTuple(args, "OO!lO!", &tree, tags_type, &tags, &rules, &PyDict_Type, &known))
        return NULL;
    Walk w = new_walk(tags, rules);
    int outcome = walk_tree(&w, tree, known, NULL, &structure);
    if (outcome != FAILED)
        result = outcome == LEFT ? none() : PyTuple_Pack(2, w.leaves, structure);
    end_walk(&w);
    return result;
}

/* --- keys of what Python has read -------------------------------------------------------------------------------- */

/* The kind of a NodeType, which Python is asked for if no instance was met. NULL on an error. */
static Kind *kind_described(PyObject *node_type)
{
    PyObject *cls = PyTuple_Check(node_type) ? PyTuple_GetItem(node_type, 0) : refuse(PyExc_TypeError, "not a NodeType");
    Kind *kind = cls == NULL ? NULL : kind_of((PyTypeObject *)cls);
    if (kind != NULL || cls == NULL)
        return kind;
    OWNED *described = PyObject_CallFunctionObjArgs(describe, node_type, NULL);
    return described == NULL ? NULL : new_kind(described);
}

/* None for a leaf; the number of an object; or the type of a node, the number of its children, and its auxiliary data, without a
   type the value of a static leaf. */
static int emit_visited(Walk *w, PyObject *visited)
{
    PyObject *node_type, *value;
    Py_ssize_t count;
    if (visited == Py_None)
        return emit_code(w, 'L');
    if (PyLong_CheckExact(visited)) {
        int64_t number = PyLong_AsLongLong(visited);
        return number == -1 && PyErr_Occurred() ? FAILED : emit_count(w, 'R', number);
    }
    if (!PyTuple_CheckExact(visited))
        return refused(PyExc_TypeError, "nothing that is visited");
    if (!PyArg_ParseTuple(visited, "OnO", &node_type, &count, &value))
        return FAILED;
    if (node_type == Py_None) {
        TRY(emit_code(w, 'S'));
        return emit_static(w, value, 0);
    }
    Kind *kind = kind_described(node_type);
    return kind == NULL ? FAILED : emit_node(w, kind, count, value);
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
            replace(&pins, NULL);
    }
    return pins;
}

static int write_key(Walk *w, PyObject *visited, Py_ssize_t base)
{
    w->settled = PyList_New(0);
    NEED(w->settled);
    TRY(emit_header(w, base));
    for (Py_ssize_t i = 0; i < PyList_Size(visited); i++) {
        OWNED *each = Py_NewRef(PyList_GetItem(visited, i));
        TRY(emit_visited(w, each));
    }
    return settle_pins(w);
}

static PyObject *native_key_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *visited, *result = NULL;
    Py_ssize_t base;
    long rules;
    if (!PyArg_ParseTuple(args, "O!ln", &PyList_Type, &visited, &rules, &base))
        return NULL;
    Walk w = new_walk(NULL, rules);
    if (write_key(&w, visited, base) == DONE) {
        OWNED *key = PyBytes_FromStringAndSize(w.key, (Py_ssize_t)w.key_size), *pins = key == NULL ? NULL : pins_of(&w);
        result = pins == NULL ? NULL : PyTuple_Pack(3, key, pins, w.settled);
    }
    end_walk(&w);
    if (result == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no key says this");
    return result;
}

/* --- programs: structures, with all looked up that takes no part in how often they are built ------------------------ */

/* Each is one of the tuples that `_classes_in_native_walk.py` makes, to which all its references belong. */
struct Step {
    int shape;                /* of what is built */
    Kind *kind;               /* of a node; its shape may become another, and what is registered is called instead */
    PyObject *record;         /* of a node: the operation, and the numbers of the children */
    Py_ssize_t *numbers;      /* of the children; of attributes, NONE for one that is static */
    Py_ssize_t size;          /* how many */
    PyObject *names;          /* of attributes, in order; or of a dictionary's items */
    PyObject *values;         /* those of them that are static; or what is called, or the value itself */
    PyObject *target;         /* the number of the other side's object that gets what is built as content; or None */
};

/* There is no `tp_clear`: each cycle leads through the Structure that has it, which has one. */
typedef struct {
    PyObject_HEAD
    PyObject *content;        /* the tuples */
    PyObject *given;          /* as of the structure; None if it has nothing of the other side's */
    PyObject *beside;
    Step *steps;
    Py_ssize_t num_steps, root;
    int is_for_python;        /* whether only Python can finish a call whose result this is */
    int updates;              /* as of the structure */
} Program;

/* One build. */
struct Run {
    const Program *program;
    PyObject *leaves, *table, *given, *update;
    PyObject *trace_state;    /* that all its NNX objects get, once there is one */
    Py_ssize_t next, num_leaves;
};

static int read_numbers(Step *step, PyObject *numbers)
{
    step->size = PyTuple_Size(numbers);
    step->numbers = step->size < 0 ? NULL : PyMem_Calloc((size_t)step->size + 1, sizeof *step->numbers);
    if (step->numbers == NULL)
        return step->size < 0 ? FAILED : no_memory();
    for (Py_ssize_t i = 0; i < step->size && !PyErr_Occurred(); i++) {
        PyObject *number = PyTuple_GetItem(numbers, i);
        step->numbers[i] = number == Py_None ? NONE : PyLong_AsSsize_t(number);
    }
    return PyErr_Occurred() ? FAILED : DONE;
}

static int read_step(Step *step, PyObject *each)
{
    PyObject *type, *numbers;
    if (!PyTuple_CheckExact(each))
        return refused(PyExc_TypeError, "not a step");
    if (!PyArg_ParseTuple(each, "iOOO!O!OO", &step->shape, &type, &step->record, &PyTuple_Type, &numbers, &PyTuple_Type,
                          &step->names, &step->values, &step->target))
        return FAILED;
    TRY(read_numbers(step, numbers));
    step->kind = kind_of((PyTypeObject *)type);
    const Shape *shape = step->shape < 0 || step->shape >= NUM_SHAPES ? NULL : &SHAPES[step->shape];
    if (shape == NULL || shape->build == NULL || (shape->open != NULL && step->kind == NULL))
        return refused(PyExc_ValueError, "nothing that can be built");
    return DONE;
}

/* What a program has to know of its structure: (steps, given, root, is_for_python, updates). */
static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *content, *given;
    Py_ssize_t root;
    int is_for_python, updates;
    if (!PyArg_ParseTuple(args, "O!Onpp", &PyTuple_Type, &content, &given, &root, &is_for_python, &updates))
        return NULL;
    PyObject *made = new_parts(type, content, given, NULL);
    Program *program = (Program *)made;
    if (made == NULL)
        return NULL;
    program->root = root, program->is_for_python = is_for_python, program->updates = updates;
    program->steps = PyMem_Calloc((size_t)PyTuple_Size(content) + 1, sizeof *program->steps);
    int outcome = program->steps == NULL ? no_memory() : DONE;
    for (Py_ssize_t i = 0; outcome == DONE && i < PyTuple_Size(content); i++)
        outcome = read_step(&program->steps[program->num_steps++], PyTuple_GetItem(content, i));
    if (outcome != DONE)
        replace(&made, NULL);
    return made;
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
    {Py_tp_doc, "(steps, given, root, is_for_python, updates): a structure, as `build` runs it."}, {0, NULL},
};

/* How such a node is put together here: (shape, and of what is read by name the names, which are static, and their places). None
   if it is not, also for auxiliary data that is not as its kind says. */
static PyObject *native_recipe(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *node_type, *aux;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "OOn", &node_type, &aux, &size))
        return NULL;
    const Kind *kind = kind_described(node_type);
    if (kind == NULL)
        return NULL;
    const Shape *shape = shape_of(kind);
    /* A kind of namedtuples holds no node type, which would keep the class alive. */
    int is_known = kind->shape == NAMEDTUPLE || kind->node_type == node_type;
    if (!is_known || shape->build == NULL || (shape->fits != NULL && !shape->fits(kind, aux, size)))
        return none();
    return Py_BuildValue("iOOO", kind->shape, kind->order, kind->is_static, kind->places);
}

/* The item of a list with this number; a new reference. */
static PyObject *numbered(PyObject *list, PyObject *number)
{
    Py_ssize_t i = PyLong_AsSsize_t(number);
    return i == -1 && PyErr_Occurred() ? NULL : Py_XNewRef(PyList_GetItem(list, i));
}

/* Those items of a list that have the numbers in a tuple, or without one those of a step, as a list or a tuple. */
static PyObject *items_at(PyObject *list, PyObject *numbers, const Step *step, int as_list)
{
    Py_ssize_t size = numbers == NULL ? step->size : PyTuple_Size(numbers);
    PyObject *items = as_list ? PyList_New(size) : PyTuple_New(size);
    for (Py_ssize_t i = 0; items != NULL && i < size; i++) {
        PyObject *item = numbers == NULL ? Py_XNewRef(PyList_GetItem(list, step->numbers[i]))
                                         : numbered(list, PyTuple_GetItem(numbers, i));
        if (item == NULL)
            replace(&items, NULL);
        else if (as_list)
            PyList_SetItem(items, i, item);
        else
            PyTuple_SetItem(items, i, item);
    }
    return items;
}

/* The object that a step has at a place, among those that were built or of its static values; a new reference. */
static PyObject *object_at(const Run *run, const Step *step, Py_ssize_t i)
{
    Py_ssize_t number = i < step->size ? step->numbers[i] : OPEN; /* which is none of the table */
    return Py_XNewRef(number == NONE ? PyTuple_GetItem(step->values, i) : PyList_GetItem(run->table, number));
}

/* The next leaf; borrowed, for `run_program` knows it. */
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

/* The object of the other side with a number: of a list, or what a function says. */
static PyObject *taken(const Run *run, PyObject *number)
{
    return PyList_CheckExact(run->given) ? numbered(run->given, number) : PyObject_CallFunctionObjArgs(run->given, number, NULL);
}

static PyObject *build_given(Run *run, const Step *step)
{
    return taken(run, step->values);
}

/* The object of the other side that gets this content: at once, or when everything has been built. */
static PyObject *updated(Run *run, const Step *step, PyObject *content)
{
    if (!PyList_CheckExact(run->update))
        return PyObject_CallFunctionObjArgs(run->update, step->target, content, NULL);
    PyObject *target = taken(run, step->target);
    if (target != NULL && (PyList_Append(run->update, target) < 0 || PyList_Append(run->update, content) < 0))
        replace(&target, NULL);
    return target;
}

/* Puts a node together by what is registered for its class, which gets a tuple from JAX, too. */
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

static PyObject *build_dict(Run *run, const Step *step)
{
    OWNED *dict = PyDict_New();
    PyObject *type = (PyObject *)step->kind->type;
    Py_ssize_t size = PyTuple_Size(step->names);
    for (Py_ssize_t i = 0; dict != NULL && i < size; i++) {
        /* Held, for setting it may run a key's own code. */
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

/* Gives an NNX object a `_trace_state` of the trace in which it is built. All objects of one build have the same, since
   nothing ever writes to one. */
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

static int set_attributes(Run *run, const Step *step, PyObject *object)
{
    /* NNX asks a class's own descriptors. */
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
    if (step->shape == MODULE) { /* beyond the names is what is put into the slot */
        PyObject *noted = PyTuple_GetItem(step->values, size);
        return noted == NULL ? FAILED : set_slot(kinds_of_attributes, object, noted);
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

static int run_program(Run *run)
{
    for (Py_ssize_t i = 0; i < run->program->num_steps; i++) {
        const Step *step = &run->program->steps[i];
        int is_as_known = step->kind == NULL || step->kind->shape == step->shape;
        PyObject *made = is_as_known ? SHAPES[step->shape].build(run, step) : build_registered(run, step);
        if (made != NULL && step->shape == LEAF) {
            TRY(PyList_Append(run->table, made));
            continue;
        }
        if (made != NULL && step->target != Py_None)
            replace(&made, updated(run, step, made));
        TRY(append_new(run->table, made));
    }
    return DONE;
}

/* The program of a structure, made when it is first asked for. */
static PyObject *program_of(PyObject *structure)
{
    PyObject *program = PyObject_GetAttr(structure, name_program);
    if (program == Py_None)
        replace(&program, PyObject_CallFunctionObjArgs(compile, structure, NULL));
    if (program == NULL || Py_TYPE(program) == program_type)
        return program;
    Py_DECREF(program);
    return refuse(PyExc_TypeError, "not a structure");
}

/* Appends one object for each record to `table`. The caller holds the program, which its structure may lose meanwhile. */
static int build_onto(PyObject *table, PyObject *program, PyObject *given_leaves, PyObject *given, PyObject *update)
{
    OWNED *leaves = PySequence_Tuple(given_leaves);
    Run run = {.program = (Program *)program, .leaves = leaves, .table = table, .given = given, .update = update};
    run.num_leaves = leaves == NULL ? 0 : PyTuple_Size(leaves);
    int outcome = leaves == NULL ? FAILED : run_program(&run);
    Py_XDECREF(run.trace_state);
    return outcome;
}

static PyObject *native_build(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *structure, *leaves, *table, *given, *update;
    if (!PyArg_ParseTuple(args, "OOO!OO", &structure, &leaves, &PyList_Type, &table, &given, &update))
        return NULL;
    OWNED *program = program_of(structure);
    return program == NULL || build_onto(table, program, leaves, given, update) != DONE ? NULL : none();
}

/* --- writing back ----------------------------------------------------------------------------------------------- */

static PyObject *copy_ordered(PyObject *dict)
{
    return PyObject_CallMethodObjArgs(dict, name_copy, NULL);
}

static int write_list(const Writing *writing, PyObject *items, int Py_UNUSED(is_own))
{
    return PyList_SetSlice(writing->held[HOLDER], 0, PY_SSIZE_T_MAX, items);
}

static int write_deque(const Writing *writing, PyObject *items, int Py_UNUSED(is_own))
{
    OWNED *cleared = PyObject_CallMethodObjArgs(writing->held[HOLDER], name_clear, NULL), *extended = NULL;
    NEED(cleared);
    extended = PyObject_CallMethodObjArgs(writing->held[HOLDER], name_extend, items, NULL);
    return extended == NULL ? FAILED : DONE;
}

static int remove_names(PyObject *dict, PyObject *names, PyObject *unless)
{
    for (Py_ssize_t i = 0; i < length_of(names); i++) {
        OWNED *name = Py_NewRef(item_at(names, i));
        int stays = PyDict_Contains(unless, name), is_there = stays ? stays : PyDict_Contains(dict, name);
        if (is_there < 0)
            return FAILED;
        if (!stays && is_there)
            TRY(PyObject_DelItem(dict, name));
    }
    return DONE;
}

/* What stays keeps its place, and of attributes also those that no field declares. A dictionary that has an order of its own
   is asked. */
static int write_dict(const Writing *writing, PyObject *items, int is_own)
{
    PyObject *dict = writing->held[HOLDER];
    int are_fields = writing->shape == &SHAPES[FIELDS] || writing->shape == &SHAPES[DATACLASS];
    OWNED *names = are_fields && !is_own ? Py_NewRef(writing->kind->names) : PyDict_Keys(dict), *keys = NULL;
    NEED(names);
    TRY(remove_names(dict, names, items));
    if (writing->shape != &SHAPES[ORDERED_DICT])
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

/* What an object holds, to be written into another: what has its items, and the values of its slots. LEFT if only Python can
   tell. */
static int read_content(PyObject *object, const Shape *shape, PyObject *slots, PyObject **items, PyObject **values)
{
    Py_ssize_t size = PyTuple_Size(slots);
    if (shape->holder == NULL && size == 0)
        return LEFT;
    *items = shape->holder == NULL ? NULL : shape->holder(object);
    if (*items == NULL && shape->holder != NULL)
        return PyErr_Occurred() ? FAILED : LEFT;
    *values = PyTuple_New(size);
    for (Py_ssize_t i = 0; *values != NULL && i < size; i++) {
        PyObject *value = get_attribute(object, PyTuple_GetItem(slots, i));
        if (value == NULL)
            return is_dropped(PyExc_AttributeError) ? LEFT : FAILED;
        PyTuple_SetItem(*values, i, value);
    }
    return *values == NULL ? FAILED : DONE;
}

static PyObject *kept; /* stands in new content for a static value that did not change: the object keeps its own */

/* Puts what an object has in the place of each `kept` in its new content. LEFT if it has nothing of that name, for another
   thread may have taken that away meanwhile. */
static int keep_values(PyObject **held)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(held[NEW_VALUES]); i++) {
        if (PyTuple_GetItem(held[NEW_VALUES], i) == kept)
            PyTuple_SetItem(held[NEW_VALUES], i, Py_NewRef(PyTuple_GetItem(held[OLD_VALUES], i)));
    }
    while (held[NEW_ITEMS] != NULL && PyDict_Check(held[NEW_ITEMS]) && PyDict_Next(held[NEW_ITEMS], &at, &name, &value)) {
        if (value != kept)
            continue;
        PyObject *own = PyDict_GetItemWithError(held[OLD_ITEMS], name);
        NEED(own);
        /* The new content has the name already, so its dictionary keeps its size while it is iterated over. */
        TRY(PyDict_SetItem(held[NEW_ITEMS], name, own));
    }
    return DONE;
}

static int prepare(Writing *writing, PyObject *target, PyObject *source)
{
    PyObject **held = writing->held;
    NEED(target);
    NEED(source);
    writing->kind = Py_TYPE(target) == Py_TYPE(source) ? kind_of(Py_TYPE(target)) : NULL;
    if (writing->kind == NULL)
        return LEFT;
    writing->shape = shape_of(writing->kind);
    writing->slots = writing->kind->shape == OTHER ? empty_tuple : writing->kind->slots;
    held[TARGET] = Py_NewRef(target);
    TRY(read_content(target, writing->shape, writing->slots, &held[HOLDER], &held[OLD_VALUES]));
    TRY(read_content(source, writing->shape, writing->slots, &held[NEW_ITEMS], &held[NEW_VALUES]));
    /* It stays as it is when its object is written to. */
    if (held[HOLDER] != NULL && (held[OLD_ITEMS] = writing->shape->copy(held[HOLDER])) == NULL)
        return FAILED;
    return keep_values(held);
}

/* Writes what an object is to hold, or what it held. */
static int write_content(const Writing *writing, PyObject *items, PyObject *values, int is_own)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++) {
        PyObject *slot = PyTuple_GetItem(writing->slots, i);
        TRY(set_attribute(writing->held[TARGET], slot, PyTuple_GetItem(values, i)));
    }
    return writing->shape->write == NULL ? DONE : writing->shape->write(writing, items, is_own);
}

/* Writes one after the other; all back if one cannot be written. */
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
        const Writing *each = &writings[written];
        if (write_content(each, each->held[OLD_ITEMS], each->held[OLD_VALUES], 1) != DONE)
            PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    return outcome;
}

/* Writes what is pending: targets and sources, in turn. LEFT if that is for Python. */
static int write_back(PyObject *pairs)
{
    Py_ssize_t size = PyList_Size(pairs) / 2;
    Writing *writings = PyMem_Calloc((size_t)size + 1, sizeof *writings);
    int outcome = writings == NULL ? no_memory() : DONE;
    for (Py_ssize_t i = 0; outcome == DONE && i < size; i++)
        outcome = prepare(&writings[i], PyList_GetItem(pairs, 2 * i), PyList_GetItem(pairs, 2 * i + 1));
    if (outcome == DONE)
        outcome = write_all(writings, size);
    /* What was in the targets is held until everything is written, so that no finaliser runs in between. */
    for (Py_ssize_t i = 0; writings != NULL && i < size * NUM_HELD; i++)
        Py_XDECREF(writings[i / NUM_HELD].held[i % NUM_HELD]);
    PyMem_Free(writings);
    return outcome;
}

static PyObject *native_write_back(PyObject *Py_UNUSED(module), PyObject *pairs)
{
    if (!PyList_CheckExact(pairs))
        return refuse(PyExc_TypeError, "not a list");
    int outcome = write_back(pairs);
    return outcome == FAILED ? NULL : Py_NewRef(outcome == DONE ? Py_True : Py_False);
}

/* --- the row of each shape --------------------------------------------------------------------------------------- */

#define ROW(shape, ...) [shape] = {#shape, __VA_ARGS__}
#define ITSELF Py_NewRef /* a list or a dictionary has its items itself */

static const Shape SHAPES[NUM_SHAPES] = {
    ROW(NUMBER, NULL), ROW(STATIC, .build = build_constant), ROW(NUMPY_ARRAY, NULL), ROW(NUMPY_NUMBER, NULL), ROW(JAX_ARRAY, NULL),
    ROW(NOTHING, open_nothing, fits_none, emit_items, build_constant),
    ROW(TUPLE, open_sequence, NULL, emit_items, build_sequence),
    ROW(LIST, open_sequence, NULL, emit_items, build_sequence, ITSELF, PySequence_List, write_list),
    ROW(DICT, open_dict, fits_dict, emit_dict, build_dict, ITSELF, PyDict_Copy, write_dict),
    ROW(ORDERED_DICT, open_dict, fits_dict, emit_dict, build_dict, ITSELF, copy_ordered, write_dict),
    ROW(DEFAULT_DICT, open_dict, fits_dict, emit_dict, build_dict, ITSELF, PyDict_Copy, write_dict),
    ROW(DEQUE, open_deque, NULL, emit_items_and_aux, build_deque, ITSELF, PySequence_List, write_deque),
    ROW(NAMEDTUPLE, open_sequence, fits_none, emit_items, build_by_call),
    ROW(ARGUMENTS, open_arguments, NULL, emit_items_and_aux),
    ROW(FIELDS, open_fields, fits_fields, emit_fields, build_object, attributes_of, PyDict_Copy, write_dict),
    ROW(DATACLASS, open_fields, fits_by_name, emit_by_name, build_object, attributes_of, PyDict_Copy, write_dict),
    ROW(SLOTS, open_by_name, fits_by_name, emit_by_name, build_object),
    ROW(NNX_OBJECT, open_nnx_object, fits_nnx_object, emit_nnx_object, build_object, attributes_of, PyDict_Copy,
        write_dict),
    ROW(NNX_VARIABLE, open_nnx_variable, fits_nnx_variable, emit_nnx_variable, build_object),
    ROW(NNX_STATE, open_by_name, fits_by_name, emit_by_name, build_object),
    ROW(MODULE, open_module, fits_module, emit_module, build_object, attributes_of, PyDict_Copy, write_dict),
    ROW(OTHER, NULL, NULL, NULL, build_by_call),
    ROW(LEAF, .build = build_leaf),
    ROW(GIVEN, .build = build_given),
};

/* --- what calls are made of -------------------------------------------------------------------------------------- */

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

static PyType_Slot deal_slots[] = {
    {Py_tp_new, deal_new}, PARTS, {Py_tp_hash, deal_hash}, {Py_tp_richcompare, deal_compare},
    {Py_tp_doc, "Which leaves of a structure a hand has."},
    MEMBERS(FIXED_PART("structure", STRUCTURE_OF, "Of the whole tree."),
            FIXED_PART("numbers", NUMBERS_OF, "Which of its leaves; None for all."),
            PART("call", CALL_OF, "The caller's side of the call that is under way. Not compared.")),
    {0, NULL},
};

static PyType_Slot hand_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_doc, "The leaves that are dealt together."},
    MEMBERS(PART("leaves", LEAVES_OF, "In order."), PART("selection", DEAL_OF, "Which they are.")), {0, NULL},
};

static PyType_Slot arguments_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_doc, "The arguments of a call."},
    MEMBERS(PART("aux", AUX_OF, "What all of them are called."), PART("args", ARGS_OF, "By position."),
            PART("kwargs", KWARGS_OF, "By keyword.")), {0, NULL},
};

/* How JAX takes a hand apart. */
static PyObject *native_hand_parts(PyObject *Py_UNUSED(module), PyObject *hand)
{
    int is_hand = PyObject_TypeCheck(hand, hand_base);
    PyObject *leaves = is_hand ? parts_of(hand)[LEAVES_OF] : NULL, *deal = is_hand ? parts_of(hand)[DEAL_OF] : NULL;
    if (leaves == NULL || deal == NULL)
        return refuse(is_hand ? PyExc_AttributeError : PyExc_TypeError, "not a whole hand");
    return PyTuple_Pack(2, leaves, deal);
}

/* How JAX puts it together. */
static PyObject *native_hand_of(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count)
{
    if (count != 2 || hand_type == NULL)
        return refuse(PyExc_TypeError, "a deal and leaves");
    OWNED *leaves = PySequence_Tuple(given[1]);
    return leaves == NULL ? NULL : new_parts((PyTypeObject *)hand_type, leaves, given[0], NULL);
}

/* --- the whole call ---------------------------------------------------------------------------------------------- */

static PyTypeObject *deferred_type; /* a tuple that nobody else can return: empty, or the result and the call to be finished */
static PyObject *deferred;          /* the empty one */
static PyType_Slot deferred_slots[] = {
    {Py_tp_doc, "What Python has to do: a whole call, or to finish one, of which this has the result."},
    {0, NULL},
};
static PyType_Spec deferred_spec = {"sharedtree._native.Deferred", 0, 0, Py_TPFLAGS_DEFAULT, deferred_slots};

/* A call: how it is done, and what was found out meanwhile. Borrowed. */
typedef struct {
    PyObject *way, *form;
    Tags *tags;
    PyObject *arguments, *structure, *leaves, *plan;
} Call;

static int is_set(PyObject *record, Py_ssize_t i)
{
    return PyTuple_GetItem(record, i) == Py_True;
}

/* The number of positional arguments and the names of the others. */
static PyObject *form_key(PyObject *args, PyObject *kwargs)
{
    OWNED *count = PyLong_FromSsize_t(PyTuple_Size(args)), *names = NULL;
    PyObject *name, *value;
    Py_ssize_t at = 0, i = 0;
    if (count == NULL || PyDict_Size(kwargs) == 0)
        return Py_XNewRef(count);
    names = PyTuple_New(PyDict_Size(kwargs));
    while (names != NULL && PyDict_Next(kwargs, &at, &name, &value))
        PyTuple_SetItem(names, i++, Py_NewRef(name));
    return names == NULL ? NULL : PyTuple_Pack(2, count, names);
}

/* A new reference to what a dictionary has for a key; NULL, without an error if it has nothing. */
static PyObject *found_in(PyObject *dict, PyObject *key)
{
    return dict == NULL || key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(dict, key));
}

/* The form of a call. LEFT if Python has to see to such a call first. */
static int read_form(PyObject *way, PyObject *args, PyObject *kwargs, PyObject **form)
{
    if (!is_record(way, NUM_OF_WAY) || !PyLong_Check(PyTuple_GetItem(way, FLAGS)))
        return refused(PyExc_TypeError, "not what a call needs to know");
    if (!PyDict_CheckExact(PyTuple_GetItem(way, FORMS)))
        return LEFT;
    OWNED *key = form_key(args, kwargs);
    *form = found_in(PyTuple_GetItem(way, FORMS), key);
    NEED(*form);
    if (*form == Py_None)
        return LEFT;
    if (!is_record(*form, NUM_OF_FORM) || !is_tuple_of(PyTuple_GetItem(*form, NAMES_OF), 3) ||
        Py_TYPE(PyTuple_GetItem(*form, LATEST)) != latest_type || !PyDict_CheckExact(PyTuple_GetItem(*form, MADE)))
        return refused(PyExc_TypeError, "not a form");
    return DONE;
}

/* Arguments as a signature binds them: what comes before the positional ones, which come by keyword, and which stay so. */
static int bind(PyObject *bound, PyObject *args, PyObject *kwargs, PyObject *all, PyObject *own_kwargs)
{
    PyObject *by_keyword = PyTuple_GetItem(bound, 1), *rest = PyTuple_GetItem(bound, 2);
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
        TRY(PyList_Append(all, PyTuple_GetItem(args, i)));
    for (Py_ssize_t i = 0; i < PyTuple_Size(by_keyword); i++)
        TRY(append_new(all, found_in(kwargs, PyTuple_GetItem(by_keyword, i))));
    for (Py_ssize_t i = 0; i < PyTuple_Size(rest); i++) {
        PyObject *name = PyTuple_GetItem(rest, i), *value = PyDict_GetItemWithError(kwargs, name);
        NEED(value);
        TRY(PyDict_SetItem(own_kwargs, name, value));
    }
    return DONE;
}

static PyObject *new_arguments(PyObject *form, PyObject *args, PyObject *kwargs)
{
    PyTypeObject *type = (PyTypeObject *)arguments_type;
    PyObject *names = PyTuple_GetItem(form, NAMES_OF), *bound = PyTuple_GetItem(form, BOUND);
    if (bound == Py_None)
        return new_parts(type, names, args, kwargs);
    OWNED *all = PySequence_List(PyTuple_GetItem(bound, 0)), *own_kwargs = all == NULL ? NULL : PyDict_New();
    if (own_kwargs == NULL || bind(bound, args, kwargs, all, own_kwargs) != DONE)
        return NULL;
    OWNED *own_args = PyList_AsTuple(all);
    return own_args == NULL ? NULL : new_parts(type, names, own_args, own_kwargs);
}

/* How the leaves of a structure are dealt in such a call; LEFT without it if that is not known. */
static int plan_of(PyObject *form, PyObject *structure, PyObject *leaves, PyObject **plan)
{
    PyObject *asks = PyTuple_GetItem(form, ASKS);
    OWNED *plans = PyObject_GetAttr(structure, name_plans), *key = Py_NewRef(PyTuple_GetItem(form, PLAN_KEY)), *answers = NULL;
    NEED(plans);
    if (asks != Py_None) {
        answers = PyObject_CallFunctionObjArgs(asks, leaves, NULL);
        NEED(answers);
        if (answers == Py_None)
            return LEFT;
        replace(&key, PyTuple_Pack(2, key, answers));
    }
    *plan = found_in(plans, key);
    NEED(*plan);
    return DONE;
}

/* Whether no object is in a list or a tuple twice, or no array; -1 on an error. */
static int all_different(PyObject *items, int only_arrays)
{
    Table seen = {0};
    int are_different = 1;
    for (Py_ssize_t i = 0; i < length_of(items) && are_different == 1; i++) {
        PyObject *object = item_at(items, i);
        if (only_arrays && !is_a(object, concrete_array))
            continue;
        are_different = value_of(&seen, object) == NONE;
        if (set_value(&seen, object, 0) < 0)
            are_different = -1;
    }
    free_slots(seen.slots, seen.size);
    return are_different;
}

/* The hand with these leaves of a call. The deal of the first one is new, and knows the call. */
static PyObject *new_hand(const Call *c, Py_ssize_t i, PyObject *call, PyObject **first)
{
    PyObject *source = PyTuple_GetItem(PyTuple_GetItem(c->plan, SOURCES), i);
    OWNED *deal = Py_XNewRef(PyTuple_GetItem(PyTuple_GetItem(c->plan, DEALS), i));
    OWNED *own = source == Py_None ? Py_NewRef(c->leaves) : items_at(c->leaves, source, NULL, 1);
    if (i == 0 && is_a(deal, deal_type)) {
        PyObject **parts = parts_of(deal);
        replace(&deal, new_parts((PyTypeObject *)deal_type, parts[STRUCTURE_OF], parts[NUMBERS_OF], call));
        *first = Py_XNewRef(deal);
    }
    return own == NULL || deal == NULL ? NULL : new_parts((PyTypeObject *)hand_type, own, deal, NULL);
}

/* What is transformed is called with: the hands by the plan, and then what is static. */
static int deal(const Call *c, PyObject *call, PyObject *given, PyObject **first)
{
    PyObject *args = parts_of(c->arguments)[ARGS_OF], *kwargs = parts_of(c->arguments)[KWARGS_OF];
    PyObject *aux = PyTuple_GetItem(c->form, NAMES_OF), *names = PyTuple_GetItem(aux, 0), *static_names = PyTuple_GetItem(aux, 2);
    for (Py_ssize_t i = 0; i < PyTuple_Size(PyTuple_GetItem(c->plan, DEALS)); i++)
        TRY(append_new(given, new_hand(c, i, call, first)));
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
        if (PyTuple_GetItem(names, i) == Py_None)
            TRY(append_new(given, Py_XNewRef(PyTuple_GetItem(args, i))));
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(static_names); i++)
        TRY(append_new(given, found_in(kwargs, PyTuple_GetItem(static_names, i))));
    return DONE;
}

/* The leaves and the deal of a hand, borrowed. 0 if it is none. */
static int read_hand(PyObject *hand, PyObject **leaves, PyObject ***deal)
{
    if (!is_a(hand, hand_type) || parts_of(hand)[LEAVES_OF] == NULL || parts_of(hand)[DEAL_OF] == NULL ||
        !is_a(parts_of(hand)[DEAL_OF], deal_type))
        return 0;
    *leaves = parts_of(hand)[LEAVES_OF], *deal = parts_of(parts_of(hand)[DEAL_OF]);
    return 1;
}

/* Puts the leaves of a hand among those of the whole tree. */
static int put_leaves(PyObject *all, PyObject *leaves, PyObject *numbers)
{
    OWNED *own = PySequence_Tuple(leaves);
    Py_ssize_t size = own == NULL ? -1 : PyTuple_Size(own);
    if (size < 0 || size != PyTuple_Size(numbers))
        return FAILED;
    for (Py_ssize_t i = 0; i < size; i++)
        TRY(PyList_SetItem(all, PyLong_AsSsize_t(PyTuple_GetItem(numbers, i)), Py_NewRef(PyTuple_GetItem(own, i))));
    return DONE;
}

/* The leaves of a result from its hands, and its structure. FAILED, also without an error, if it is none. */
static int gather(PyObject *result, PyObject **structure, PyObject **leaves)
{
    OWNED *hands = NULL;
    PyObject *own, **deal;
    if (read_hand(result, &own, &deal)) {
        *structure = Py_NewRef(deal[STRUCTURE_OF]);
        if (deal[NUMBERS_OF] == Py_None)
            *leaves = PyTuple_CheckExact(own) ? Py_NewRef(own) : PySequence_List(own);
        return *leaves == NULL ? FAILED : DONE;
    }
    if (is_a(result, hands_type) && (hands = get_slot(hands_parts, result, NULL)) != NULL)
        replace(&hands, PySequence_Tuple(hands));
    for (Py_ssize_t i = 0; hands != NULL && i < PyTuple_Size(hands); i++) {
        if (!read_hand(PyTuple_GetItem(hands, i), &own, &deal) || deal[NUMBERS_OF] == Py_None)
            return FAILED;
        if (i == 0) {
            *structure = Py_NewRef(deal[STRUCTURE_OF]);
            OWNED *count = PyObject_GetAttr(*structure, name_num_leaves), *nothing = Py_BuildValue("[O]", Py_None);
            *leaves = count == NULL || nothing == NULL ? NULL : PySequence_Repeat(nothing, PyLong_AsSsize_t(count));
        }
        NEED(*leaves);
        TRY(put_leaves(*leaves, own, deal[NUMBERS_OF]));
    }
    return *leaves == NULL ? FAILED : DONE;
}

/* Whether an array of JAX's is committed to a device; -1 on an error. */
static int is_committed(PyObject *array)
{
    OWNED *committed = PyObject_GetAttr(array, name_committed);
    return committed == NULL ? -1 : committed == Py_True;
}

/* Whether what is passed through is what vanilla would return: arrays of JAX's, and no difference in commitment. A list says
   which leaves these are. -1 on an error, 0 also where only Python can tell. */
static int passes_through(PyObject *structure, PyObject *given, PyObject *leaves)
{
    OWNED *plans = PyObject_GetAttr(structure, name_plans), *places = found_in(plans, given);
    int are_committed = 1;
    if (places == NULL)
        return PyErr_Occurred() ? -1 : 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(places); i++) {
        PyObject *leaf = PyList_GetItem(leaves, PyLong_AsSsize_t(PyTuple_GetItem(places, i)));
        if (leaf == NULL || !is_a(leaf, concrete_array))
            return leaf == NULL ? -1 : 0;
        int committed = is_committed(leaf);
        if (committed < 0)
            return -1;
        are_committed &= committed;
    }
    for (Py_ssize_t i = 0; !are_committed && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        Kind *kind = kind_of(Py_TYPE(leaf));
        int is_array = is_a(leaf, concrete_array), committed = is_array ? is_committed(leaf) : 0;
        int is_number = kind != NULL && (kind->shape == NUMBER || kind->shape == NUMPY_ARRAY || kind->shape == NUMPY_NUMBER);
        if (committed || !(is_array || is_number))
            return committed < 0 ? -1 : 0;
    }
    return 1;
}

/* Whether C can finish a call with such a result; -1 on an error. */
static int is_simple(const Call *c, const Program *program, PyObject *leaves)
{
    int in_place = is_set(c->way, IN_PLACE);
    if (program->is_for_python || (program->updates && !in_place))
        return 0;
    int are_different = all_different(leaves, 0);
    if (are_different != 1 || program->given == Py_None || in_place)
        return are_different;
    return passes_through(c->structure, program->given, c->leaves);
}

/* What a call returns, built of its hands and written where that is in place. `deferred` where Python has to; NULL without an
   error likewise. */
static PyObject *finished(const Call *c, PyObject *result)
{
    OWNED *structure = NULL, *leaves = NULL, *program = NULL, *table = NULL, *pending = NULL, *made = NULL;
    if (gather(result, &structure, &leaves) != DONE || (program = program_of(structure)) == NULL)
        return NULL;
    int simple = is_simple(c, (Program *)program, leaves);
    if (simple != 1)
        return simple < 0 ? NULL : Py_NewRef(deferred);
    table = PyList_New(0), pending = PyList_New(0);
    if (table == NULL || pending == NULL || build_onto(table, program, leaves, c->tags->objects, pending) != DONE)
        return NULL;
    made = Py_XNewRef(PyList_GetItem(table, ((Program *)program)->root));
    if (made == NULL || !is_set(c->way, IN_PLACE))
        return Py_XNewRef(made);
    /* Whatever C cannot write, Python writes. */
    int outcome = write_back(pending);
    OWNED *written = outcome == LEFT ? PyObject_CallFunctionObjArgs(PyTuple_GetItem(c->way, WRITE), pending, NULL) : NULL;
    if (outcome != DONE && written == NULL)
        return NULL;
    return Py_XNewRef(PyTuple_GetItem(made, PyTuple_Size(made) - 1));
}

/* Calls what is transformed, and finishes what it returns. */
static PyObject *call_dealt(const Call *c, PyObject *transformed)
{
    OWNED *trace = PyObject_GetAttr(trace_holder, name_trace), *first = NULL, *result = NULL;
    OWNED *call = trace == NULL ? NULL : PyTuple_Pack(5, c->arguments, c->plan, c->leaves, c->tags->objects, trace);
    OWNED *given = call == NULL ? NULL : PyList_New(0);
    PyObject *made = NULL, *type, *value, *traceback;
    if (given != NULL && deal(c, call, given, &first) == DONE) {
        OWNED *all = PyList_AsTuple(given);
        result = all == NULL ? NULL : PyObject_Call(transformed, all, NULL);
    }
    if (result != NULL)
        made = is_set(c->way, FINISHES) ? finished(c, result) : Py_NewRef(deferred);
    if (made == deferred || (made == NULL && result != NULL && !PyErr_Occurred())) {
        /* The trace may have made something of the call. */
        OWNED *now = Py_XNewRef(first == NULL ? call : parts_of(first)[CALL_OF]), *both = PyTuple_Pack(2, result, now);
        replace(&made, both == NULL ? NULL : PyObject_CallFunctionObjArgs((PyObject *)deferred_type, both, NULL));
    }
    if (first != NULL) { /* what JAX keeps of the hands must keep none of the arguments alive */
        PyErr_Fetch(&type, &value, &traceback);
        replace(&parts_of(first)[CALL_OF], none());
        PyErr_Restore(type, value, traceback);
    }
    return made;
}

/* Walks over the arguments, and finds how they are dealt and what is called. LEFT if Python has to do the call. */
static int read_call(Call *c, Walk *w, PyObject **structure, PyObject **plan, PyObject **transformed)
{
    TRY(walk_tree(w, c->arguments, entries, PyTuple_GetItem(c->form, LATEST), structure));
    TRY(plan_of(c->form, *structure, w->leaves, plan));
    if (!is_record(*plan, NUM_OF_PLAN) || PyTuple_GetItem(*plan, ORIGINS) != Py_None ||
        PyObject_Size(PyTuple_GetItem(*plan, CUTS)) != 0)
        return LEFT; /* ties were cut */
    c->structure = *structure, c->leaves = w->leaves, c->plan = *plan;
    *transformed = found_in(PyTuple_GetItem(c->form, MADE), PyTuple_GetItem(*plan, LABELS));
    NEED(*transformed);
    int is_separate = is_set(c->form, DONATES) ? all_different(w->leaves, 1) : 1;
    return is_separate < 0 ? FAILED : is_separate ? DONE : LEFT;
}

/* What a wrapper returns; `deferred` if Python has to do the call, of which nothing was called then; or, if it has to finish it,
   a `Deferred` of the result and the call. */
static PyObject *call_by(PyObject *way, PyObject *args, PyObject *kwargs)
{
    OWNED *form = NULL, *tags = NULL, *arguments = NULL, *structure = NULL, *plan = NULL, *transformed = NULL;
    PyObject *made = NULL;
    int outcome = read_form(way, args, kwargs, &form);
    if (outcome != DONE)
        return outcome == LEFT ? Py_NewRef(deferred) : NULL;
    tags = tags_new(tags_type, NULL, NULL);
    arguments = tags == NULL ? NULL : new_arguments(form, args, kwargs);
    long flags = PyLong_AsLong(PyTuple_GetItem(way, FLAGS));
    if (arguments == NULL || PyErr_Occurred())
        return NULL;
    Call c = {.way = way, .form = form, .tags = (Tags *)tags, .arguments = arguments};
    Walk w = new_walk(c.tags, flags);
    outcome = read_call(&c, &w, &structure, &plan, &transformed);
    if (outcome != FAILED)
        made = outcome == LEFT ? Py_NewRef(deferred) : call_dealt(&c, transformed);
    end_walk(&w);
    return made;
}

static PyObject *native_call(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_CheckExact(given[1]) || !PyDict_CheckExact(given[2]) || arguments_type == NULL)
        return refuse(PyExc_TypeError, "not a call");
    return call_by(given[0], given[1], given[2]);
}

static Py_ssize_t num_contexts; /* that are entered, in all threads */

static PyObject *native_count_contexts(PyObject *Py_UNUSED(module), PyObject *change)
{
    Py_ssize_t more = PyLong_AsSsize_t(change);
    if (more == -1 && PyErr_Occurred())
        return NULL;
    num_contexts += more;
    return PyLong_FromSsize_t(num_contexts);
}

/* The policy of a call, and how its wrapper is called under that; NULL if that is not known yet. Both are new references. */
static int read_caller(PyObject *self, PyObject **policy, PyObject **known)
{
    OWNED *given = Py_XNewRef(parts_of(self)[POLICY_OF]);
    if (given == Py_None && num_contexts == 0)
        replace(&given, Py_NewRef(default_policy));
    *policy = given != NULL && is_a(given, policy_type) ? Py_NewRef(given)
                                                        : PyObject_CallFunctionObjArgs(current_policy, given, NULL);
    PyObject *way = parts_of(self)[WAY_OF]; /* after the call into Python, which may set another one */
    if (way != NULL && is_record(way, NUM_OF_WAY) && PyTuple_GetItem(way, OWN_POLICY) == *policy)
        *known = Py_NewRef(way);
    return *policy == NULL ? FAILED : DONE;
}

/* A wrapper is called. What C leaves to Python, and each error, its own method goes on with. */
static PyObject *caller_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    OWNED *policy = NULL, *known = NULL, *error = NULL, *own = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    if (own == NULL || read_caller(self, &policy, &known) != DONE)
        return NULL;
    PyObject *made = known == NULL ? Py_NewRef(deferred) : call_by(known, args, own);
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
    return made;
}

static PyType_Slot caller_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_call, caller_call},
    MEMBERS(PART("policy", POLICY_OF, "What counts as sharing, as it was given."),
            PART("way", WAY_OF, "How it is called under a policy.")),
    {Py_tp_doc, "A function under a transform. Its `go_on` has (what is left, policy, args, kwargs)."}, {0, NULL},
};

/* --- the module ------------------------------------------------------------------------------------------------- */

/* What Python says for ever, each as its letter says: a Type, that of a Hand, a Deal or Arguments as one below C's own, a Slot, a
   Mapping, a tUple, an interned Name, or any Object. */
static const struct {
    const char *subject, *letters;
    PyObject **places[11];
} takings[] = {
    {"walk", "MOOOOOUM", {&entries, &meet, &describe, &settle, &compile, &missing_type, &dtypes, &registry}},
    {"nnx", "OTTONNSSSSS",
     {&layout_of, &mapping_type, &trace_type, &current_trace, &name_nodes, &name_mapping, &raw_value, &variable_trace,
      &metadata_of, &state_trace, &jax_trace}},
    {"modules", "TSSS", {&attribute_kinds_type, &kinds_of_attributes, &names_in_kinds, &statics_in_kinds}},
    {"calls", "THDATSONTOO",
     {&concrete_array, &hand_type, &deal_type, &arguments_type, &hands_type, &hands_parts, &trace_holder, &name_trace,
      &policy_type, &default_policy, &current_policy}},
};

static int is_below(PyObject *object, PyTypeObject *base)
{
    return PyType_Check(object) && PyType_IsSubtype((PyTypeObject *)object, base);
}

static int fits_letter(PyObject *object, char letter)
{
    switch (letter) {
    case 'T': return PyType_Check(object);
    case 'H': return is_below(object, hand_base);
    case 'D': return is_below(object, deal_base);
    case 'A': return is_below(object, arguments_base);
    case 'S': return Py_TYPE(object) == &PyMemberDescr_Type;
    case 'M': return PyDict_Check(object);
    case 'U': return PyTuple_Check(object);
    case 'N': return PyUnicode_Check(object);
    }
    return 1;
}

/* (subject, what is said of it). All or nothing, and only once: a second import of the package has other classes of the same
   names. */
static PyObject *native_take_over(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *subject = PyTuple_Size(args) == 0 ? NULL : PyTuple_GetItem(args, 0);
    size_t which = 0, size = sizeof takings / sizeof *takings;
    if (subject == NULL || !PyUnicode_Check(subject))
        return refuse(PyExc_TypeError, "of what?");
    while (which < size && PyUnicode_CompareWithASCIIString(subject, takings[which].subject) != 0)
        which++;
    const char *letters = which == size ? "" : takings[which].letters;
    Py_ssize_t count = (Py_ssize_t)strlen(letters);
    if (count == 0 || PyTuple_Size(args) != count + 1)
        return refuse(PyExc_TypeError, "another number of arguments");
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!fits_letter(PyTuple_GetItem(args, i + 1), letters[i]))
            return refuse(PyExc_TypeError, "an argument of another type");
    }
    PyObject **const *places = takings[which].places;
    int is_first = *places[0] == NULL;
    for (Py_ssize_t i = 0; is_first && i < count; i++)
        *places[i] = Py_NewRef(PyTuple_GetItem(args, i + 1));
    return Py_NewRef(is_first ? Py_True : Py_False);
}

static PyObject *native_learn(PyObject *Py_UNUSED(module), PyObject *described)
{
    return new_kind(described) == NULL ? NULL : none();
}

/* Leaves a class that was read field by field to its registered functions. */
static PyObject *native_unlearn(PyObject *Py_UNUSED(module), PyObject *cls)
{
    Kind *kind = kind_of((PyTypeObject *)cls);
    if (kind != NULL && kind->shape >= DATACLASS)
        kind->shape = OTHER;
    return none();
}

/* A class was registered as a node's, but not with JAX. */
static PyObject *native_look_again(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    epoch_of_nodes++;
    return none();
}

static PyObject *native_drop_spares(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    Walk w = new_walk(NULL, 0);
    free_memory(&w);
    PyMem_Free(spare_slots);
    spare_slots = NULL;
    return none();
}

static PyMethodDef methods[] = {
    {"take_over", native_take_over, METH_VARARGS, "(subject, what Python says of it) -> whether it was told nothing before."},
    {"learn", native_learn, METH_O, "Learns what a class is."},
    {"unlearn", native_unlearn, METH_O, "Leaves a class that was read field by field to its registered functions."},
    {"drop_spares", native_drop_spares, METH_NOARGS, "Gives back the memory that is kept for the next walk."},
    {"walk", native_walk, METH_VARARGS,
     "(tree, tags, rules as a number, known) -> (leaves, known[key]()), or None if there is none or it cannot."},
    {"key_of", native_key_of, METH_VARARGS,
     "(what Python visited, rules as a number, number of the first object) -> (key, what it has by address, tokens)."},
    {"recipe", native_recipe, METH_VARARGS, "(NodeType, auxiliary data, number of children) -> how `build` does it, or None."},
    {"build", native_build, METH_VARARGS, "(structure, leaves, table, given, update): see `sharedtree.core._walk.build`."},
    {"hold", native_hold, METH_O, "(value, token, ...) -> what keeps these values, which are known by address meanwhile."},
    {"forget_keys", native_forget_keys, METH_NOARGS, "What is in keys by address may be let go of."},
    {"look_again", native_look_again, METH_NOARGS, "Asks again of classes of which no instance was a node."},
    {"hand_parts", native_hand_parts, METH_O, "A hand -> (its leaves, its deal)."},
    {"hand_of", (PyCFunction)(void (*)(void))native_hand_of, METH_FASTCALL, "(deal, leaves) -> a hand."},
    {"count_contexts", native_count_contexts, METH_O, "So many `Context`s more are entered. Returns how many are, in all threads."},
    {"call", (PyCFunction)(void (*)(void))native_call, METH_FASTCALL,
     "(what it needs to know, args, kwargs) -> what the wrapper returns, or `DEFERRED`, or what is to be finished."},
    {"write_back", native_write_back, METH_O, "Writes contents into objects, in turn, all or nothing; False if it cannot."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "The walk and the way back, in C.", -1,
                                        methods, NULL, NULL, NULL, NULL};

#define OBJECT (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)
#define INNER (OBJECT | Py_TPFLAGS_DISALLOW_INSTANTIATION)
#define BASE (OBJECT | Py_TPFLAGS_BASETYPE)

static struct {
    PyTypeObject **type;
    const char *name; /* as which the module has it, if it does */
    PyType_Spec spec;
} types[] = {
    {&tags_type, "Tags", {"sharedtree._native.Tags", sizeof(Tags), 0, OBJECT, tags_slots}},
    {&latest_type, "Latest", {"sharedtree._native.Latest", sizeof(Parts), 0, OBJECT, latest_slots}},
    {&held_type, NULL, {"sharedtree._native.Held", sizeof(Parts), 0, INNER, held_slots}},
    {&program_type, "Program", {"sharedtree._native.Program", sizeof(Program), 0, OBJECT, program_slots}},
    {&deal_base, "LeafSelection", {"sharedtree._native.LeafSelection", sizeof(Parts), 0, BASE, deal_slots}},
    {&hand_base, "LeafGroup", {"sharedtree._native.LeafGroup", sizeof(Parts), 0, BASE, hand_slots}},
    {&arguments_base, "Arguments", {"sharedtree._native.Arguments", sizeof(Parts), 0, BASE, arguments_slots}},
    {&caller_base, "Caller", {"sharedtree._native.Caller", sizeof(Parts), 0, BASE, caller_slots}},
};

static int set_up(PyObject *module)
{
#define INTERNED(name)                                         \
    if ((name_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return FAILED;
    NAMES(INTERNED)
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        PyObject *type = PyType_FromSpec(&types[i].spec);
        *types[i].type = (PyTypeObject *)type;
        NEED(type);
        if (types[i].name != NULL)
            TRY(PyModule_AddObjectRef(module, types[i].name, type));
    }
    references = PyDict_New();
    kept = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    NEED(kept);
    TRY(PyModule_AddObjectRef(module, "KEPT", kept));
    epoch_of_keys = PyList_New(0);
    empty_tuple = PyTuple_New(0);
    OWNED *bases = empty_tuple == NULL ? NULL : PyTuple_Pack(1, &PyTuple_Type);
    deferred_type = bases == NULL ? NULL : (PyTypeObject *)PyType_FromSpecWithBases(&deferred_spec, bases);
    deferred = deferred_type == NULL ? NULL : PyObject_CallNoArgs((PyObject *)deferred_type);
    new_object = (newfunc)PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);
    get_slot = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    set_slot = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);
    NEED(references);
    NEED(epoch_of_keys);
    NEED(deferred);
    TRY(PyModule_AddObjectRef(module, "Deferred", (PyObject *)deferred_type));
    TRY(PyModule_AddStringConstant(module, "built_from", SHAREDTREE_BUILT_FROM));
    static const char *const conventions[] = {"JAX", "EQUINOX", "ANY", "INHERITED", "IN_VARIABLE", "OUTSIDE"};
    for (int i = JAX; i <= OUTSIDE; i++)
        TRY(PyModule_AddIntConstant(module, conventions[i], i));
    for (int i = 0; i < NUM_SHAPES; i++)
        TRY(PyModule_AddIntConstant(module, SHAPES[i].name, i));
    return DONE;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && set_up(module) != DONE)
        replace(&module, NULL);
    return module;
}
