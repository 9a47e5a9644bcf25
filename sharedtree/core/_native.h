/* The declarations that the files of the native part share.

    _native_walk.c     tree -> leaves and key:  what is known of classes, the walk, the writing of keys
    _native_build.c    structure and leaves -> tree:  programs, and writing content back into objects of the caller
    _native_call.c     the whole call of a wrapped function, which uses both
    _native.c          the module: what Python passes in

What C knows of a class is a `Kind`, found by the address of the class. A kind has a shape. For each shape, `OPENERS` in
`_native_walk.c` has the functions that open an instance and write its bytes, and `BUILDERS` in `_native_build.c` those that build
one and write content into one.

RULES OF THESE FILES.
- Nothing recurses, except over static values, to a fixed depth.
- Any call into Python may free objects. So whatever is used after such a call is held by a strong reference: children on
  a stack of the walk, visited objects in the tags, and a function's new objects in an `OWNED` variable, which is released at
  each `return`. A borrowed reference is never used after such a call.
- Uncommon cases and errors end the walk, and the caller runs the reference, which then succeeds or raises the error with
  its paths. `TRY` and `NEED` return from a function when a part of it fails.
- Only the limited API is used, and no `Py_RETURN_NONE` or the like: the macros of Python 3.12 and 3.13 do not count a
  reference to None, but code compiled with them is also loaded by 3.11, where None is counted.
- The interpreter's lock is required: free-threaded Python does not load this module. */

#ifndef SHAREDTREE_NATIVE_H
#define SHAREDTREE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

/* The linker binds these names inside of the shared object, so that a call or a variable costs no indirection. On the command
   line, `-fvisibility=hidden` does this for definitions only. */
#pragma GCC visibility push(hidden)

/* The outcome of a function. FAILED: an error, or a case for the reference. UNHANDLED: this function does not handle the
   case, but another one may; the caller undoes what the function has written so far. */
enum { FAILED = -1, DONE = 0, UNHANDLED = 1 };

/* --- references, errors, memory ---------------------------------------------------------------------------------- */

static inline void release_reference(PyObject **place)
{
    Py_XDECREF(*place);
}

/* A strong reference that is released at the end of its scope, also by a `return`, in reverse order of declaration. An extension
   of GCC and Clang. */
#define OWNED __attribute__((cleanup(release_reference))) PyObject

/* Returns from a function if a part of it does not end with DONE. */
#define TRY(part)              \
    do {                       \
        int outcome_ = (part); \
        if (outcome_ != DONE)  \
            return outcome_;   \
    } while (0)

/* Returns from a function if an object is NULL: with FAILED after an error, otherwise with UNHANDLED. */
#define NEED(object)                                 \
    do {                                             \
        if ((object) == NULL)                        \
            return PyErr_Occurred() ? FAILED : UNHANDLED; \
    } while (0)

/* Replaces a reference by another one, which it takes over, or by NULL. The old one is released last, since this may run
   finalisers. */
static inline void replace(PyObject **place, PyObject *object)
{
    PyObject *old = *place;
    *place = object;
    Py_XDECREF(old);
}

static inline void *raise_null(PyObject *error, const char *why)
{
    PyErr_SetString(error, why);
    return NULL;
}

static inline int raise_failed(PyObject *error, const char *why)
{
    PyErr_SetString(error, why);
    return FAILED;
}

static inline int no_memory(void)
{
    PyErr_NoMemory();
    return FAILED;
}

/* Clears an error of this class. Returns 0 if an error of another class remains. */
static inline int drop_error(PyObject *error)
{
    if (PyErr_Occurred() == NULL || !PyErr_ExceptionMatches(error))
        return PyErr_Occurred() == NULL;
    PyErr_Clear();
    return 1;
}

static inline PyObject *none(void)
{
    return Py_NewRef(Py_None);
}

/* Appends an object and takes over the reference to it. */
static inline int append_new(PyObject *list, PyObject *item)
{
    int outcome = item == NULL ? FAILED : PyList_Append(list, item);
    Py_XDECREF(item);
    return outcome;
}

static inline int is_tuple_of(PyObject *object, Py_ssize_t size)
{
    return PyTuple_CheckExact(object) && PyTuple_Size(object) == size;
}

static inline int is_record(PyObject *object, Py_ssize_t size)
{
    return PyTuple_Check(object) && PyTuple_Size(object) == size;
}

/* The length of a list, or of a tuple of any class. */
static inline Py_ssize_t length_of(PyObject *sequence)
{
    return PyList_CheckExact(sequence) ? PyList_Size(sequence) : PyTuple_Size(sequence);
}

static inline PyObject *item_at(PyObject *sequence, Py_ssize_t i)
{
    return PyList_CheckExact(sequence) ? PyList_GetItem(sequence, i) : PyTuple_GetItem(sequence, i);
}

/* --- tables by address ------------------------------------------------------------------------------------------- */

/* A hash table from addresses to numbers or pointers, with open addressing. No function of it runs Python.

       value = get_value(&table, object)        →  3, OPEN or NO_VALUE

   A slot is never freed: a removed key keeps its slot, with NO_VALUE, until the table is rebuilt. So removal cannot fail. */

enum { OPEN = -1, NO_VALUE = -2 };

typedef struct {
    const void *key; /* NULL in a free slot. The code that sets a value keeps the object alive as long as the value is there. */
    intptr_t value;  /* a number or a pointer; NO_VALUE for a removed key */
} Slot;

typedef struct {
    Slot *slots;
    size_t size, used;
} Table;

intptr_t get_value(const Table *table, const void *key);
int set_value(Table *table, const void *key, intptr_t value);
void free_table(Table *table);
size_t hash_address(const void *pointer);

/* --- objects of the module ----------------------------------------------------------------------------------------- */

/* The beginning of every object that is defined in these files: three references, the only ones that the garbage collector
   visits. An example is `Arguments`, with `parts[AUX_OF]`, `parts[ARGS_OF]` and `parts[KWARGS_OF]`. Base classes of Python
   classes are no more than that, and have a `tp_clear`. The others need none; a comment at each says why. */
typedef struct {
    PyObject_HEAD
    PyObject *parts[3];
} Parts;

static inline PyObject **parts_of(PyObject *object)
{
    return ((Parts *)object)->parts;
}

PyObject *new_parts(PyTypeObject *type, PyObject *first, PyObject *second, PyObject *third);
PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
int parts_traverse(PyObject *self, visitproc visit, void *arg);
int parts_clear(PyObject *self);
void parts_dealloc(PyObject *self);

/* A part as an attribute in Python, by its index. A FIXED_PART is read-only. */
#define PART(name, index, doc) {name, T_OBJECT_EX, (Py_ssize_t)offsetof(Parts, parts[index]), 0, doc}
#define FIXED_PART(name, index, doc) {name, T_OBJECT_EX, (Py_ssize_t)offsetof(Parts, parts[index]), READONLY, doc}

#define MEMBERS(...) {Py_tp_members, (PyMemberDef[]){__VA_ARGS__, {NULL, 0, 0, 0, NULL}}}

#define PARTS {Py_tp_dealloc, parts_dealloc}, {Py_tp_traverse, parts_traverse}, {Py_tp_clear, parts_clear}

/* A class of the module. */
typedef struct {
    PyTypeObject **type;
    const char *name; /* the name in the module; NULL if it is not public */
    PyType_Spec spec;
} NewType;

#define OBJECT (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)
#define INNER (OBJECT | Py_TPFLAGS_DISALLOW_INSTANTIATION)
#define BASE (OBJECT | Py_TPFLAGS_BASETYPE)

int add_types(PyObject *module, NewType *types, size_t count);

/* Each adds the functions, classes and constants of one file to the module. */
int set_up_walk(PyObject *module);
int set_up_build(PyObject *module);
int set_up_call(PyObject *module);

/* --- what Python passes in, see `native_take_over` ----------------------------------------------------------------- */

/* Interned names of attributes and methods: `name_clear` is "clear". */
#define NAMES(X)                                                                                                          \
    X(unflatten) X(program) X(plans) X(num_leaves) X(dtype) X(committed) X(maxlen) X(default_factory) X(go_on) X(clear)   \
    X(extend) X(copy) X(is_interchangeable) X(contents) X(nbytes) X(tobytes)
#define DECLARED(name) extern PyObject *name_##name;
NAMES(DECLARED)

/* Functions and tables of Python, see `native_take_over`. */
extern PyObject *entries;      /* key -> weak reference to its structure */
extern PyObject *classify;     /* (object, convention) -> description of its class; 0 for a static leaf, 1 for a traced one, 2 for
                                  a traced one with identity */
extern PyObject *describe;     /* NodeType -> description of its class */
extern PyObject *settle;       /* static values -> for each an answer that `settle_pin` explains */
extern PyObject *contents;     /* content of a static value -> weak reference to its token, see `Reading` */
extern PyObject *remember;     /* (token, content, is_settled, values compared by `==`, pins) enters it there */
extern PyObject *compile;      /* structure -> Program */
extern PyObject *missing_type; /* the class of the marker for attributes that were never set, or None */
extern PyObject *dtypes;       /* the NumPy dtypes that JAX traces, each the only object of its dtype */
extern PyObject *registry;     /* JAX's table of registered classes, or an empty dict; NULL until `take_over` */

/* For calls. */
extern PyObject *concrete_array;                                      /* the class of JAX's arrays other than tracers */
extern PyObject *group_type, *selection_type, *arguments_type, *groups_type; /* the classes in Python */
extern PyObject *groups_parts;                                         /* a slot */
extern PyObject *trace_holder, *name_trace;    /* the object with the active trace, and the attribute's name */
extern PyObject *policy_type, *default_policy; /* the default holds outside of any `Context` */
extern PyObject *current_policy;               /* (policy of the wrapper) -> policy in force in this thread */

/* For NNX, set when one of its classes first comes. See `libraries/_nnx_layouts.py`. */
extern PyObject *layout_of, *mapping_type, *trace_type, *current_trace, *name_nodes, *name_mapping;
extern PyObject *raw_value, *variable_trace, *metadata_of, *state_trace, *jax_trace; /* slots */

/* For `sharedtree.Module`: the class of the object that lists the kinds of an instance's attributes, and slots. See
   `libraries/_sharedtree_module.py`. */
extern PyObject *attribute_kinds_type, *kinds_of_attributes, *names_in_kinds, *statics_in_kinds;

extern descrgetfunc get_slot; /* reads a slot by its descriptor */

static inline int is_instance(PyObject *object, PyObject *type)
{
    return (PyObject *)Py_TYPE(object) == type;
}

/* Reads an attribute by name or by the descriptor of a slot, past any `__getattr__` and `__getattribute__`. */
static inline PyObject *get_attribute(PyObject *object, PyObject *name)
{
    return Py_TYPE(name) == &PyMemberDescr_Type ? get_slot(name, object, NULL) : PyObject_GenericGetAttr(object, name);
}

/* --- kinds: how instances of a class are read and built ----------------------------------------------------------- */

/* The shapes of objects: what C does with each is in `OPENERS` and `BUILDERS`. */
enum {
    /* Leaves: numbers that JAX traces and Equinox does not, leaves that are static for both, arrays. */
    NUMBER, STATIC, NUMPY_ARRAY, NUMPY_NUMBER, JAX_ARRAY,
    /* Nodes. */
    NOTHING, TUPLE, LIST, DICT, ORDERED_DICT, DEFAULT_DICT, DEQUE, NAMEDTUPLE, ARGUMENTS, FIELDS, DATACLASS, SLOTS,
    NNX_OBJECT, NNX_VARIABLE, NNX_STATE, MODULE, OTHER,
    /* Steps of a program that are no shapes of objects: the next leaf, an object of the caller. */
    LEAF, CALLER_OBJECT, NUM_SHAPES
};

/* What C knows of one class, see `_native_walk.c`. */
typedef struct {
    PyTypeObject *type;
    int shape;
    uint32_t number;
    int is_plain, is_mutable, is_known_to_jax, convention;
    int is_guess;             /* whether this is a leaf only because its class is not registered, which may still happen */
    Py_ssize_t epoch;         /* the time of a guess, see `epoch` */
    PyObject *node_type;      /* the NodeType; NULL for leaves */
    PyObject *take_apart;     /* OTHER: instance -> (children, aux) */
    PyObject *order;          /* the declared names, in order */
    PyObject *is_static;      /* bytes: for each name in `order`, whether it is static */
    PyObject *places;         /* bytes: for each name in `order`, its index among the children or the static names; not FIELDS */
    PyObject *names;          /* the names of the children, then the static ones. FIELDS: also those that no field declares. */
    Py_ssize_t num_traced;    /* the number of children in `names` */
    int is_in_order;          /* whether `order` has the children, and the static names, in the order of `names` */
    PyObject *slots;          /* the slots that are written */
    Table layouts;            /* NNX_OBJECT: hash of the names -> a chain of layouts */
    uint32_t num_layouts;     /* the number of questions to Python about layouts, answered or not */
} Kind;

Kind *kind_of(PyTypeObject *type);             /* NULL if there is none yet */
Kind *kind_described(PyObject *node_type);     /* asks Python if there is none yet; NULL on an error */
PyObject *attributes_of(PyObject *object);     /* the `__dict__`, a new reference */

/* Returns 1 if auxiliary data is as the functions of the kind's shape expect it. */
int fits_kind(const Kind *kind, PyObject *aux, Py_ssize_t num_children);

/* --- the walk ------------------------------------------------------------------------------------------------------ */

/* Objects get numbers in the order in which their visits end, and only those with identity can be looked up. For the tree
   [w, w] inside a module:

       objects = [w, list]        numbers = {w: 0, list: 1}

   While the list is being visited its value is OPEN, by which a cycle is noticed. An object with a number is alive in
   `objects`; the walk keeps one that is OPEN alive. There is no `tp_clear`: each cycle leads through the list, which has one. */
typedef struct {
    PyObject_HEAD
    PyObject *objects, *unused[2];
    Table numbers;
} Tags;

extern PyTypeObject *tags_type, *latest_type;

/* A stack of strong references. */
typedef struct {
    PyObject **items;
    size_t size, room;
} Pins;

typedef struct Frame Frame;

/* The state of one walk, see `_native_walk.c`. */
typedef struct {
    Tags *tags;
    int flags, convention;
    Py_ssize_t expected; /* the number of objects in the tags, unless somebody else has used them meanwhile */
    PyObject *leaves;  /* a list, once the walk has ended */
    Pins leaves_so_far;
    Pins children;     /* the children of all open nodes, those of one node side by side */
    Pins pins;         /* the values that are in the key by address */
    PyObject *settled; /* values that never change, each followed by its token; NULL if there are none */
    size_t *places;    /* for each pin, the place of its code in the key */
    size_t places_room;
    Frame *frames;
    size_t depth, frames_room;
    PyObject **names; /* working memory for opening one node: borrowed names or values, see each function */
    size_t names_room;
    char *key;
    size_t key_size, key_room;
    int is_outside;        /* whether the node being opened is outside of all modules */
    int is_content;        /* whether the content of a static value is being written, see `Reading` */
    int mappings;          /* the number of mappings around the place in this content */
    Py_ssize_t parts_left; /* how many more parts, counted by paths, the static value being written may have */
} Walk;

PyObject *tags_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);

/* A walk is used in this order. `end_walk` is called in any case, and releases the leaves. */
Walk new_walk(Tags *tags, long rules);
int walk_tree(Walk *w, PyObject *tree, PyObject *structures, PyObject *latest, PyObject **structure);
void end_walk(Walk *w);

/* --- building and writing back --------------------------------------------------------------------------------------- */

typedef struct Step Step;

/* There is no `tp_clear`: each cycle leads through the structure that has the program, which has one. */
typedef struct {
    PyObject_HEAD
    PyObject *content;        /* the tuples */
    PyObject *caller_numbers; /* of the objects of the caller that the structure contains; None if there are none */
    PyObject *unused;
    Step *steps;
    Py_ssize_t num_steps, root;
    int is_for_python;        /* whether only Python can finish a call with such a result */
    int updates;              /* the structure's attribute */
} Program;

/* The steps from a structure to a tree, see `_native_build.c`. */
PyObject *program_of(PyObject *structure);
int build_onto(PyObject *table, PyObject *program, PyObject *leaf_sequence, PyObject *caller_objects, PyObject *update);
PyObject *items_at(PyObject *list, PyObject *numbers, const Step *step, int as_list);
int write_back(PyObject *pairs);

/* --- calls --------------------------------------------------------------------------------------------------------- */

enum { AUX_OF, ARGS_OF, KWARGS_OF };        /* of an Arguments */

extern PyTypeObject *selection_base, *group_base, *arguments_base;

#pragma GCC visibility pop

#endif
