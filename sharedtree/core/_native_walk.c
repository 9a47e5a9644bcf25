/* The walk over a DAG, and the keys that it writes. `_walk.py` is the reference: for each tree, this gives the same result or
none.

THE KEY. `walk` takes a tree apart and describes it by a string of bytes, the *key*. Trees with equal keys have the same
structure, so a dictionary from keys to structures replaces the making of records. An example, with an Equinox module
`Pair` under Equinox's convention, and an array `w` that is tied:

    tree       Pair(w, [w, 3])
    leaves     [w]
    key        header   F <Pair> 0   L   N <list> 2   R <number of w>   S i 3

    F kind statics              a node that is read field by field
    A kind presence statics     the same, with some fields absent
    N kind n                    a plain container. The keys of a dict follow, and the auxiliary data of a deque and others
    O kind signature statics    an NNX object
    M kind kinds statics        a `sharedtree.Module`
    G kind n aux                any other node
    L                           a traced leaf
    S value                     a static leaf
    R number                    an object that was visited before

The children of a node follow it. Static values of built-in classes are written out: N T F i d s for None, True, False, int,
float, str, and ( [ { for containers. Any other value is written as its address and that of its class (P), and is pinned:
whoever keeps the key must keep the pins alive. A value that may change has a token in its place (V). Python makes the
tokens, equal ones for equal values.

The bytes of a node depend only on its children and its auxiliary data, not on how it was read. So when no structure is
known for a tree, the reference reads it, and `key_of` writes the same key from the reference's log. No object is read
twice.

THE DATA, from the top of this file to its end:

    Table     address -> number or pointer: the kinds by class, the facts by value, the numbers of objects in one walk
    Fact      a static value that never changes, and its token
    Reading   a class of static values, and how the content of an instance is written
    Kind      a class: how its instances are read, and the number that stands for it in keys
    Layout    the attributes of NNX objects, which differ within one class
    Tags      the objects that were visited, each with its number: an object that comes again becomes a reference R
    Walk      the state of one walk: a stack of `Frame`s, one per open node, and the key so far
    Opener    a row of `OPENERS`: the functions that read one shape of objects
    Latest    the key and the structure of the last call of one pattern, see `_native_call.c` */

#include "_native.h"

/* Beyond these limits the reference does the work. */
#define MAX_DEPTH 100000
#define MAX_STATIC_DEPTH 16
#define MAX_STATIC_PARTS 100000
#define MAX_CONTENT_PARTS 20000 /* A content is written in each call, and in vain if the value has more parts. */
#define MAX_TEXT 4096
#define MAX_BYTES 65536
#define MAX_LAYOUTS 4096 /* the layouts of one class; for an `nnx.List` each length is one */

/* The rules of a walk, see `flags_of` in `_pack_and_unpack.py`. */
enum { CONTAINERS = 1, ARRAYS = 2, VALUES = 4, FILTERED = 8, EXACT = 16 };

/* The conventions, which decide the leaves to trace, see `_node_types.py`. */
enum { JAX, EQUINOX, ANY, INHERITED, IN_VARIABLE, OUTSIDE };

/* Returns the object of a weak reference; NULL if it is dead, or on an error. */
static PyObject *referent(PyObject *reference)
{
    PyObject *object = reference == NULL ? NULL : PyObject_CallNoArgs(reference);
    if (object == Py_None)
        replace(&object, NULL);
    return object;
}

/* Gives an array room for at least `needed` items, by doubling it. */
static int grow(void *items, size_t *room, size_t needed, size_t item_size)
{
    if (needed <= *room)
        return 0;
    size_t new_room = *room ? *room : 512 / item_size + 1;
    while (new_room < needed)
        new_room *= 2;
    void *new_items = new_room > SIZE_MAX / item_size ? NULL : PyMem_Realloc(*(void **)items, new_room * item_size);
    if (new_items == NULL)
        return no_memory();
    *(void **)items = new_items;
    *room = new_room;
    return 0;
}

static int is_text(PyObject *object, PyObject *text)
{
    return object == text || (Py_TYPE(object) == &PyUnicode_Type && PyUnicode_Compare(object, text) == 0);
}

/* --- tables by address ------------------------------------------------------------------------------------------- */

#define FIRST_SIZE 256
#define MAX_SPARE_SIZE 4096

/* Empty slots for the next table, or NULL. Allocating them takes longer than clearing them, and so does growing a table. So there
   are as many as the last table had, unless it was nearly empty. */
static Slot *spare_slots;
static size_t spare_size;

static Slot *new_slots(size_t size)
{
    return PyMem_Calloc(size, sizeof(Slot));
}

static void free_slots(Slot *slots, size_t size)
{
    if (size <= spare_size || size > MAX_SPARE_SIZE) {
        PyMem_Free(slots);
        return;
    }
    memset(slots, 0, size * sizeof *slots);
    PyMem_Free(spare_slots);
    spare_slots = slots, spare_size = size;
}

/* Frees the slots of a table. */
void free_table(Table *table)
{
    /* Clearing many slots is a waste if few were used. */
    if (table->size > FIRST_SIZE && 16 * table->used < table->size)
        PyMem_Free(table->slots);
    else
        free_slots(table->slots, table->size);
    *table = (Table){0};
}

/* Spreads the bits of an address, whose lowest ones are always 0, as MurmurHash3 does in its last step. */
size_t hash_address(const void *pointer)
{
    uint64_t x = (uint64_t)(uintptr_t)pointer;
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    return (size_t)(x ^ (x >> 29));
}

/* Returns the slot of a key, or the free one where it would be entered. */
static Slot *find_slot(Slot *slots, size_t size, const void *key)
{
    size_t i = hash_address(key) & (size - 1);
    while (slots[i].key != NULL && slots[i].key != key)
        i = (i + 1) & (size - 1);
    return &slots[i];
}

intptr_t get_value(const Table *table, const void *key)
{
    const Slot *slot = table->size == 0 ? NULL : find_slot(table->slots, table->size, key);
    return slot == NULL || slot->key == NULL ? NO_VALUE : slot->value;
}

/* Returns the value of a key in a table of pointers; NULL if there is none. */
static void *get_pointer(const Table *table, const void *key)
{
    intptr_t value = get_value(table, key);
    return value == NO_VALUE ? NULL : (void *)value;
}

/* Moves the keys that have a value into a new array of slots. */
static int rehash(Table *table, size_t size)
{
    if (table->size == 0 && spare_slots != NULL) {
        *table = (Table){spare_slots, spare_size, 0};
        spare_slots = NULL, spare_size = 0;
        return 0;
    }
    Slot *slots = new_slots(size);
    if (slots == NULL)
        return no_memory();
    size_t used = 0;
    for (size_t i = 0; i < table->size; i++) {
        Slot old = table->slots[i];
        if (old.key != NULL && old.value != NO_VALUE) {
            *find_slot(slots, size, old.key) = old;
            used++;
        }
    }
    free_slots(table->slots, table->size);
    *table = (Table){slots, size, used};
    return 0;
}

/* Returns the slot of a key, in which a value may be set; NULL without memory. A new slot has NO_VALUE. */
static Slot *slot_for(Table *table, const void *key)
{
    /* At most half full, so that searches are short. */
    if (2 * (table->used + 1) > table->size && rehash(table, table->size ? 4 * table->size : FIRST_SIZE) < 0)
        return NULL;
    Slot *slot = find_slot(table->slots, table->size, key);
    if (slot->key == NULL) {
        table->used++;
        *slot = (Slot){key, NO_VALUE};
    }
    return slot;
}

int set_value(Table *table, const void *key, intptr_t value)
{
    Slot *slot = slot_for(table, key);
    if (slot == NULL)
        return FAILED;
    slot->value = value;
    return 0;
}

/* Sets the value of a key that has a slot already. So this cannot fail. */
static void reset_value(Table *table, const void *key, intptr_t value)
{
    find_slot(table->slots, table->size, key)->value = value;
}

/* --- facts: values that are recognised by their address ------------------------------------------------------------ */

/* A static value of a user's class is replaced in keys by a token that Python makes. For a value that never changes, the token
   is remembered here by the value's address, so Python is asked once:

       config = Config(3)   →   facts[config] = {type: Config, token: weak reference to the token of `Config(3)`}
       jax.nn.relu          →   facts[type(relu)] = {type: type, token: NULL}: no instance of this class ever changes

   A fact does not keep its value alive. It is forgotten when the value dies, or with the last `Held` that keeps the value. */

typedef struct {
    PyTypeObject *type;     /* the value's class when the fact was entered */
    PyObject *token;        /* a weak reference, since the token may refer to the value; NULL for a class as in the example */
    int is_interchangeable; /* whether any equal value is as good, so that the token serves exact walks, too */
    Py_ssize_t holders;     /* the number of reasons for it: the weak reference of `watch`, and each `Held` */
} Fact;

static Table facts; /* value -> Fact */

/* Returns the fact of an object, unless its class has changed. */
static Fact *fact_of(PyObject *value, PyTypeObject *type)
{
    Fact *fact = get_pointer(&facts, value);
    return fact == NULL || fact->type != type ? NULL : fact;
}

/* Removes one holder of a fact, and the fact with the last one. Finalisers of tokens run last. */
static void drop_holder(void *value)
{
    Fact *fact = get_pointer(&facts, value);
    if (fact == NULL || --fact->holders > 0)
        return;
    PyObject *token = fact->token;
    reset_value(&facts, value, NO_VALUE);
    PyMem_Free(fact);
    Py_XDECREF(token);
}

static PyObject *references; /* address -> a weak reference that calls `forget_dead` */

static void retire_kind(void *type);
static void retire_reading(void *type);

/* Forgets the kind, the reading and the fact of a dead object. Weak references call it. */
static PyObject *forget_dead(PyObject *address, PyObject *reference)
{
    retire_kind(PyLong_AsVoidPtr(address));
    retire_reading(PyLong_AsVoidPtr(address));
    drop_holder(PyLong_AsVoidPtr(address));
    if (PyDict_GetItemWithError(references, address) == reference && PyDict_DelItem(references, address) < 0)
        return NULL;
    return none();
}

static PyMethodDef forget_dead_method = {"forget_dead", forget_dead, METH_O, "Forgets the kind and the fact of a dead object."};

/* Registers an object for `forget_dead`. When the object dies, no Python runs. */
static int watch(PyObject *object)
{
    OWNED *address = PyLong_FromVoidPtr(object), *callback = NULL, *reference = NULL;
    NEED(address);
    callback = PyCFunction_New(&forget_dead_method, address);
    NEED(callback);
    reference = PyWeakref_NewRef(object, callback);
    NEED(reference);
    return PyDict_SetItem(references, address, reference);
}

/* Enters a fact, or adds a holder to it. The caller sees to it that the holder is removed when the value may die. */
static int add_fact(PyObject *value, PyTypeObject *type, PyObject *of_token)
{
    PyObject *token = of_token == NULL ? NULL : PyWeakref_NewRef(of_token, NULL);
    OWNED *answer = token == NULL ? NULL : PyObject_GetAttr(of_token, name_is_interchangeable);
    Fact *fact = get_pointer(&facts, value);
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
    replace(&fact->token, token); /* a new one, if the first token has died */
    return 0;
}

/* Enters a fact for as long as the value lives. Does nothing if the value cannot be referred to weakly. */
static int add_fact_weakly(PyObject *value, PyTypeObject *type, PyObject *token)
{
    if (get_pointer(&facts, value) == NULL) {
        if (watch(value) < 0)
            return drop_error(PyExc_TypeError) ? 0 : FAILED;
        return add_fact(value, type, token);
    }
    /* The fact is there already, but its token may have died. */
    PyObject *reference = token == NULL ? NULL : PyWeakref_NewRef(token, NULL);
    Fact *fact = get_pointer(&facts, value);
    if (reference != NULL && fact != NULL && fact->token != NULL)
        replace(&fact->token, reference);
    else
        Py_XDECREF(reference);
    return PyErr_Occurred() ? FAILED : 0;
}

static PyTypeObject *held_type;

/* A `Held` keeps values and their tokens alive, so that the values are recognised by address meanwhile. It has no `tp_clear`:
   the values cannot change, so no cycle leads through them alone. */
static void held_dealloc(PyObject *self)
{
    PyObject *pairs = parts_of(self)[0];
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(pairs); i += 2)
        drop_holder(PyTuple_GetItem(pairs, i));
    parts_dealloc(self);
}

static PyType_Slot held_slots[] = {
    {Py_tp_dealloc, held_dealloc},
    {Py_tp_traverse, parts_traverse},
    {Py_tp_doc, "Keeps values alive, so that their facts stay."},
    {0, NULL},
};

/* Makes a `Held`: (value, token, value, token, ...) -> `Held`. */
static PyObject *native_hold(PyObject *Py_UNUSED(module), PyObject *pairs)
{
    Py_ssize_t num_held = 0;
    if (!PyTuple_CheckExact(pairs) || PyTuple_Size(pairs) % 2)
        return raise_null(PyExc_TypeError, "values and tokens, in turn");
    OWNED *empty = PyTuple_GetSlice(pairs, 0, 0);
    PyObject *held = empty == NULL ? NULL : new_parts(held_type, empty, NULL, NULL);
    if (held == NULL)
        return NULL;
    /* If memory runs out, the rest is not held, and Python is asked for those tokens again. */
    for (; num_held < PyTuple_Size(pairs); num_held += 2) {
        PyObject *value = PyTuple_GetItem(pairs, num_held);
        if (add_fact(value, Py_TYPE(value), PyTuple_GetItem(pairs, num_held + 1)) < 0)
            break;
    }
    PyObject *held_pairs = PyTuple_GetSlice(pairs, 0, num_held);
    while (held_pairs == NULL && num_held > 0)
        drop_holder(PyTuple_GetItem(pairs, num_held -= 2));
    if (held_pairs != NULL)
        replace(&parts_of(held)[0], held_pairs);
    PyErr_Clear();
    return held;
}

/* --- readings: static values that are recognised by their content --------------------------------------------------- */

/* Some static values are made anew for each call, such as the `GraphDef` of `nnx.split(model)`, and others may change, such as a
   config. No address helps there. If C can read all parts of such a value, it writes its *content*, and looks this up in
   `contents`:

       GraphDef([NodeDef(Net, 0)], ...)   →   b"C <GraphDef> [ 1 C <NodeDef> P <Net> i 0 ..."   →   the token of this GraphDef

   Two contents are equal only if the values are equal for Python: the content has the class and the sign of each part. The reverse
   does not hold. A value with an unknown content has a token as well, since Python is asked for it.

   A reading says how C reads the instances of one class:

       READ_FIELDS     a dataclass; its content is that of the fields in `names`
       READ_ITEMS      a namedtuple; its content is that of its items
       READ_MAPPING    a mapping that is compared by its own `==`; its dictionary is the attribute `names[0]`
       READ_BYTES      a NumPy array or number; its content is that of the attributes in `names`, its dtype among them, and its bytes
       READ_EQUAL      a class whose `==` decides; in the content is the hash, and a value found by it must be equal
       READ_NONE       another class with instances that may change: what holds one has no content */
enum { READ_FIELDS, READ_ITEMS, READ_MAPPING, READ_BYTES, READ_EQUAL, READ_NONE, NUM_READINGS };

typedef struct {
    int shape;
    int is_watched;   /* whether there can be weak references to instances, so that facts about them can be entered */
    int64_t number;   /* stands for the class in contents. Never used again, as the address of a dead class may be. */
    PyObject *names;  /* a tuple of texts; NULL once the class is dead */
} Reading;

/* Class -> Reading. Readings are never freed, but those of dead classes are not found. */
static Table readings;
static int64_t num_readings;

static Reading *reading_of(PyTypeObject *type)
{
    return get_pointer(&readings, type);
}

static void retire_reading(void *type)
{
    Reading *reading = reading_of(type);
    if (reading == NULL)
        return;
    reset_value(&readings, type, NO_VALUE);
    replace(&reading->names, NULL);
}

/* Enters a reading, unless the class has one. */
static int enter_reading(PyObject *type, int shape, PyObject *names, int is_watched)
{
    /* Making a weak reference may collect garbage, and so run Python. So the class is looked up afterwards. */
    if (reading_of((PyTypeObject *)type) == NULL)
        TRY(watch(type));
    if (reading_of((PyTypeObject *)type) != NULL)
        return DONE;
    Reading *reading = PyMem_Calloc(1, sizeof *reading);
    if (reading == NULL || set_value(&readings, type, (intptr_t)reading) < 0) {
        PyMem_Free(reading);
        return no_memory();
    }
    *reading = (Reading){shape, is_watched, num_readings++, Py_NewRef(names)};
    return DONE;
}

/* Enters a reading for Python: (class, shape, names, is_watched). */
static PyObject *native_learn_reading(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *type, *names;
    int shape, is_watched;
    if (!PyArg_ParseTuple(args, "O!iO!p", &PyType_Type, &type, &shape, &PyTuple_Type, &names, &is_watched))
        return NULL;
    if (shape < 0 || shape >= NUM_READINGS || (shape == READ_MAPPING && PyTuple_Size(names) != 1))
        return raise_null(PyExc_ValueError, "no such reading");
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
        if (!PyUnicode_CheckExact(PyTuple_GetItem(names, i)))
            return raise_null(PyExc_TypeError, "a name is a text");
    }
    return enter_reading(type, shape, names, is_watched) == DONE ? none() : NULL;
}

/* --- kinds: how instances of a class are read and built ----------------------------------------------------------- */

/* A kind describes a class. It is made from a `Description` of `_classes_in_native_walk.py`. For

       class Pair(eqx.Module):                     shape = FIELDS, order = ("a", "b", "name"), is_static = 0 0 1,
           a: jax.Array                            names = ("a", "b", "name"), num_traced = 2
           b: list
           name: str = eqx.field(static=True)

   An instance is opened by reading these names from its `__dict__`: `a` and `b` are pushed as children, `name` is written into
   the key. */

/* The attributes of an NNX object, in the order of its `__dict__`, and the place of each in the result of its flatten. Objects of
   one NNX class may have different attributes, so a class has several layouts. An NNX object has a mapping from names to flags
   (True: a child) in one of its attributes. See `libraries/_nnx_layouts.py`. */
typedef struct Layout {
    struct Layout *next;      /* the next layout with the same hash of names */
    uint32_t number;          /* the number of the signature in keys. Layouts that differ only in the order of names share it. */
    Py_ssize_t num_traced;
    PyObject *signature;      /* (names of the children, names of the static attributes, content of the mapping) */
    PyObject *names;          /* all names */
    PyObject *marked;         /* the names in the mapping, in order */
    PyObject *marks;          /* bytes: for each of these, whether it is a child */
    int places[];             /* for each name, its index among the children followed by the static attributes; -1 for the
                                 mapping, which is part of the signature */
} Layout;

/* Class -> Kind. A kind keeps its class alive, except for namedtuples and guesses. Kinds are never freed. */
static Table kinds;
static uint32_t num_kinds;

static Py_ssize_t epoch_of_nodes; /* the number of registrations with this package */

/* Counts registrations, with JAX and with this package. A guess is valid as long as this number stays the same. */
static Py_ssize_t epoch(void)
{
    return registry == NULL ? -1 : epoch_of_nodes + PyDict_Size(registry);
}

Kind *kind_of(PyTypeObject *type)
{
    return get_pointer(&kinds, type);
}

/* Removes the kind of a class from the table. Its memory stays, since open nodes may refer to it. */
static void retire_kind(void *type)
{
    if (kind_of(type) != NULL)
        reset_value(&kinds, type, NO_VALUE);
}

/* Makes a kind from Python's description of a class, or returns the one that another thread has made meanwhile. A guess is
   renewed, and replaced once its class is registered. */
Kind *new_kind(PyObject *description)
{
    PyObject *node_type;
    Kind kind = {.epoch = epoch()}, *new;
    if (!PyTuple_Check(description))
        return raise_null(PyExc_TypeError, "a class is described by a tuple");
    if (!PyArg_ParseTuple(description, "O!iiiiiiOOO!SSO!niO!", &PyType_Type, &kind.type, &kind.shape, &kind.is_plain,
                          &kind.is_mutable, &kind.is_known_to_jax, &kind.convention, &kind.is_guess, &node_type,
                          &kind.take_apart, &PyTuple_Type, &kind.order, &kind.is_static, &kind.places, &PyTuple_Type,
                          &kind.names, &kind.num_traced, &kind.is_in_order, &PyTuple_Type, &kind.slots))
        return NULL;
    PyTypeObject *type = kind.type;
    Kind *existing = kind_of(type);
    if (kind.shape < 0 || kind.shape >= NUM_SHAPES)
        return raise_null(PyExc_ValueError, "no such shape");
    if (existing != NULL && existing->is_guess && kind.is_guess) {
        existing->epoch = kind.epoch;
        existing->shape = kind.shape;
    }
    if (existing != NULL && (!existing->is_guess || kind.is_guess))
        return existing;
    retire_kind(type); /* the class has been registered since the guess */
    if (PyTuple_Size(kind.order) != PyBytes_Size(kind.is_static))
        return raise_null(PyExc_ValueError, "one byte for each name");
    kind.node_type = node_type == Py_None ? NULL : node_type;
    kind.number = num_kinds;
    new = PyMem_Malloc(sizeof *new);
    if (new == NULL)
        return (void *)PyErr_NoMemory();
    *new = kind;
    /* A registry keeps registered classes alive in any case. Others must be free to die. */
    int is_kept = kind.shape != NAMEDTUPLE && !kind.is_guess;
    if ((!is_kept && watch((PyObject *)type) < 0) || set_value(&kinds, type, (intptr_t)new) < 0) {
        PyMem_Free(new);
        return NULL;
    }
    /* Nothing can fail any more, so the kind takes its references. */
    num_kinds++;
    PyObject *references_held[] = {is_kept ? (PyObject *)type : NULL, kind.node_type, kind.take_apart, kind.order,
                                   kind.is_static, kind.places, kind.names, kind.slots};
    for (size_t i = 0; i < sizeof references_held / sizeof *references_held; i++)
        Py_XINCREF(references_held[i]);
    return new;
}

/* --- tags: the objects visited so far, and their numbers ----------------------------------------------------------- */

PyTypeObject *tags_type, *latest_type;

/* Removes every number from `start` on. */
static int forget(Tags *tags, Py_ssize_t start)
{
    /* In place, which cannot fail: the slots stay, without a number. */
    for (size_t i = 0; i < tags->numbers.size; i++) {
        Slot *slot = &tags->numbers.slots[i];
        if (slot->value < 0 || slot->value >= start)
            slot->value = NO_VALUE;
    }
    /* Last, since this runs finalisers. Removing many items at once needs memory. If there is none, they go one by one. */
    if (PyList_SetSlice(tags->objects, start, PY_SSIZE_T_MAX, NULL) == 0)
        return 0;
    PyErr_Clear();
    for (Py_ssize_t size = PyList_Size(tags->objects); size > start; size = PyList_Size(tags->objects))
        TRY(PyList_SetSlice(tags->objects, size - 1, size, NULL));
    return 0;
}

PyObject *tags_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    OWNED *objects = PyList_New(0);
    return objects == NULL ? NULL : new_parts(type, objects, NULL, NULL);
}

static void tags_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    free_table(&((Tags *)self)->numbers);
    parts_dealloc(self);
}

static PyObject *tags_number_of(PyObject *self, PyObject *object)
{
    Py_ssize_t number = get_value(&((Tags *)self)->numbers, object);
    return number < 0 ? none() : PyLong_FromSsize_t(number);
}

/* Appends an object to the visited ones and returns its number. With `tag`, the object can be looked up. */
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
     "Gives an object the next number. With `tag`, the object can be looked up."},
    {"forget", tags_forget, METH_O, "Removes every number from `start` on."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot tags_slots[] = {
    {Py_tp_new, tags_new}, {Py_tp_dealloc, tags_dealloc}, {Py_tp_traverse, parts_traverse}, {Py_tp_methods, tags_methods},
    MEMBERS(FIXED_PART("objects", 0, "All objects, by number.")),
    {Py_tp_doc, "The objects visited so far, and their numbers. See `sharedtree.core._walk.Tags`."},
    {0, NULL},
};

/* --- the state of a walk, and the writing of keys ------------------------------------------------------------------ */

/* A walk is a loop with a stack of frames, one per open node. While Pair(w, [w, 3]) is walked and `w` in the list comes next:

       frames    Pair    list             children    w  list | w  3
                                                              ^ next of the list's frame
       key       header  F <Pair> 0  L  N <list> 2

   The codes of the key are listed at the top of this file. Each code is one byte, followed by numbers of fixed width and texts
   with their length, so that different descriptions never have the same bytes. */

struct Frame {
    PyObject *object; /* alive among its parent's children */
    Kind *kind;
    size_t next, end; /* the range in `children` of its children to be visited */
    size_t start;     /* the size of `children` before it was opened */
    int convention;   /* for its children */
    int is_open;      /* whether its value in the tags is OPEN */
    int is_object;    /* whether it gets a number at the end */
    Py_ssize_t old_number; /* its value in the tags before, for an object without a number */
};

#define MAX_SPARE 65536 /* bytes */

/* The memory of the last walk, for the next one. A walk inside a walk finds none and allocates its memory. */
static Walk spare;

/* `rules` has the flags in its low eight bits, and above them the convention around the root. */
Walk new_walk(Tags *tags, long rules)
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

/* Each reference leaves the stack before it is released, since a finaliser may run. */
static void pop_to(Pins *pins, size_t size)
{
    while (pins->size > size)
        Py_XDECREF(pins->items[--pins->size]);
}

/* Makes room for `size` names. */
static int make_room(Walk *w, Py_ssize_t size)
{
    return grow(&w->names, &w->names_room, (size_t)size, sizeof *w->names);
}

/* The sizes of a walk's stacks, to return to after an attempt that ends with UNHANDLED. */
typedef struct {
    size_t children, pins, key_size;
} Position;

static Position position_of(const Walk *w)
{
    return (Position){w->children.size, w->pins.size, w->key_size};
}

static void rewind(Walk *w, Position position)
{
    pop_to(&w->children, position.children);
    pop_to(&w->pins, position.pins);
    w->key_size = position.key_size;
}

/* Writes a code and its bytes. */
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

/* Writes a value as its address and its class's, and pins it. `settle_pins` may put a token in the place of the address. */
static int emit_address(Walk *w, PyObject *value)
{
    const void *addresses[2] = {value, Py_TYPE(value)};
    TRY(grow(&w->places, &w->places_room, w->pins.size + 1, sizeof *w->places));
    w->places[w->pins.size] = w->key_size;
    TRY(push(&w->pins, value));
    return emit(w, 'P', addresses, sizeof addresses);
}

/* Writes a text as UTF-8. Runs no Python, unless it fails, as for half of a surrogate pair: until Python 3.12, making an
   exception may collect garbage. So after a failure callers must not use borrowed references. */
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

/* Returns 1 if a container of `size` parts may be written out. `depth` is the number of containers around it in the same static
   value. Without a limit on the parts, a list that holds one list twice, and so on 60 levels deep, would take 2^60 bytes. */
static int has_room(Walk *w, Py_ssize_t size, int depth)
{
    if (depth == 0)
        w->parts_left = w->is_content ? MAX_CONTENT_PARTS : MAX_STATIC_PARTS;
    if (depth == MAX_STATIC_DEPTH || size >= w->parts_left)
        return 0;
    w->parts_left -= size + 1;
    return 1;
}

static int emit_static(Walk *w, PyObject *value, int depth);

/* Writes the keys and values of a dictionary. */
static int emit_dict_items(Walk *w, PyObject *dict, int depth)
{
    PyObject *borrowed_key, *borrowed_item;
    Py_ssize_t cursor = 0;
    TRY(emit_count(w, '{', PyDict_Size(dict)));
    while (PyDict_Next(dict, &cursor, &borrowed_key, &borrowed_item)) {
        OWNED *key = Py_NewRef(borrowed_key), *item = Py_NewRef(borrowed_item);
        TRY(emit_static(w, key, depth + 1));
        TRY(emit_static(w, item, depth + 1));
    }
    return DONE;
}

/* Writes the dictionary of a mapping. The mapping itself is pinned: `remember` in Python asks whether its hash is the one that it
   once gave. */
static int emit_mapping(Walk *w, PyObject *mapping, PyObject *name, int depth)
{
    OWNED *dict = PyObject_GenericGetAttr(mapping, name);
    if (dict == NULL)
        return drop_error(PyExc_AttributeError) ? UNHANDLED : FAILED;
    if (!PyDict_CheckExact(dict) || !has_room(w, PyDict_Size(dict), depth + 1))
        return UNHANDLED;
    TRY(grow(&w->places, &w->places_room, w->pins.size + 1, sizeof *w->places));
    w->places[w->pins.size] = w->key_size;
    TRY(push(&w->pins, mapping));
    w->mappings++;
    int outcome = emit_dict_items(w, dict, depth + 1);
    w->mappings--;
    return outcome;
}

static int emit_reading(Walk *w, const Reading *reading, PyObject *value, int depth);

/* Writes a static value: built-in ones by content, others by address, or in a content by the reading of their class. Runs no Python, except in
   a content, where reading an attribute may. So there the parts of a container are held. */
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
        /* For the `==` of a mapping, `nan` differs from every other `nan`. */
        return w->mappings && number != number ? UNHANDLED : emit(w, 'd', &number, sizeof number);
    }
    /* An exact walk tells a list or a dictionary of the user from another one with the same content. */
    int is_users_object = w->flags & EXACT && (type == &PyList_Type || type == &PyDict_Type);
    if (!is_users_object && (type == &PyTuple_Type || type == &PyList_Type) && has_room(w, length_of(value), depth)) {
        Py_ssize_t size = length_of(value);
        TRY(emit_count(w, type == &PyTuple_Type ? '(' : '[', size));
        for (Py_ssize_t i = 0; i < size; i++) {
            OWNED *item = Py_XNewRef(item_at(value, i));
            NEED(item);
            TRY(emit_static(w, item, depth + 1));
        }
        return DONE;
    }
    if (!is_users_object && type == &PyDict_Type && has_room(w, PyDict_Size(value), depth))
        return emit_dict_items(w, value, depth);
    const Reading *reading = w->is_content ? reading_of(type) : NULL;
    return reading == NULL ? emit_address(w, value) : emit_reading(w, reading, value, depth);
}

static int is_traced_dtype(PyObject *object);

/* Writes the bytes of a NumPy array or number. UNHANDLED for other dtypes than those of numbers, since the bytes of objects are
   addresses, and for a large array. In a mapping, where `==` decides, -0.0 equals 0.0. */
static int emit_bytes(Walk *w, PyObject *value)
{
    if (w->mappings || !is_traced_dtype(value))
        return UNHANDLED;
    OWNED *size = PyObject_GetAttr(value, name_nbytes), *bytes = NULL;
    NEED(size);
    if (PyLong_AsSsize_t(size) > MAX_BYTES)
        return UNHANDLED;
    bytes = PyObject_CallMethodObjArgs(value, name_tobytes, NULL);
    NEED(bytes);
    if (!PyBytes_CheckExact(bytes))
        return FAILED;
    Py_ssize_t count = PyBytes_Size(bytes);
    TRY(emit_count(w, 'b', count));
    TRY(grow(&w->key, &w->key_room, w->key_size + (size_t)count, 1));
    memcpy(w->key + w->key_size, PyBytes_AsString(bytes), (size_t)count);
    w->key_size += (size_t)count;
    return DONE;
}

/* Writes the content of a static value by the reading of its class. UNHANDLED if it cannot be read in this way. */
static int emit_reading(Walk *w, const Reading *reading, PyObject *value, int depth)
{
    int shape = reading->shape;
    OWNED *names = Py_XNewRef(reading->names);
    if (shape >= READ_EQUAL || names == NULL)
        return shape == READ_EQUAL ? emit_address(w, value) : UNHANDLED;
    Py_ssize_t size = shape == READ_ITEMS ? PyTuple_Size(value) : PyTuple_Size(names);
    if (size < 0 || !has_room(w, size, depth))
        return size < 0 ? FAILED : UNHANDLED;
    TRY(emit_count(w, 'C', reading->number));
    /* The number of items is the class's, unless somebody calls `tuple.__new__`. */
    if (shape == READ_ITEMS)
        TRY(emit_count(w, '(', size));
    if (shape == READ_MAPPING)
        return emit_mapping(w, value, PyTuple_GetItem(names, 0), depth);
    for (Py_ssize_t i = 0; i < size; i++) {
        OWNED *part = shape == READ_ITEMS ? Py_XNewRef(PyTuple_GetItem(value, i))
                                          : PyObject_GenericGetAttr(value, PyTuple_GetItem(names, i));
        if (part == NULL)
            return drop_error(PyExc_AttributeError) ? UNHANDLED : FAILED;
        TRY(emit_static(w, part, depth + 1));
    }
    return shape == READ_BYTES ? emit_bytes(w, value) : DONE;
}

/* Writes each static value in a tuple. */
static int emit_statics(Walk *w, PyObject *values)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++)
        TRY(emit_static(w, PyTuple_GetItem(values, i), 0));
    return DONE;
}

/* --- shapes: opening a node, and writing the same bytes from its auxiliary data ------------------------------------- */

/* `open_` functions write the bytes of a node and push its children. `emit_` functions write the same bytes from the
   auxiliary data that the registered flatten function returns. For a dict outside of exact walks:

       open_dict(w, kind, {"b": x, "a": y})             writes   N <dict> 2  s "a"  s "b"     and pushes y, x
       emit_dict(w, kind, 2, ("a", "b"))                writes   N <dict> 2  s "a"  s "b"

   A node that they leave UNHANDLED is flattened by its registered function, and its key has all of its auxiliary data (code G).
   `fits_` functions check that auxiliary data is what the kind promises. If not, the node is neither written nor
   built by the functions of its shape. */

static int emit_items(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *Py_UNUSED(aux))
{
    return emit_kind(w, 'N', kind, num_children);
}

static int emit_items_and_aux(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    TRY(emit_kind(w, 'N', kind, num_children));
    return emit_static(w, aux, 0);
}

static int is_aux_none(const Kind *Py_UNUSED(kind), PyObject *aux, Py_ssize_t Py_UNUSED(size))
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
    OWNED *items = PySequence_Tuple(object), *maxlen = items == NULL ? NULL : PyObject_GetAttr(object, name_maxlen);
    NEED(maxlen);
    TRY(emit_items_and_aux(w, kind, PyTuple_Size(items), maxlen));
    return push_items(w, items);
}

/* Pushes the arguments that are not static, first the positional ones. See `_call_arguments.py`. */
static int open_arguments(Walk *w, Kind *kind, PyObject *object)
{
    PyObject *aux = parts_of(object)[AUX_OF], *args = parts_of(object)[ARGS_OF], *kwargs = parts_of(object)[KWARGS_OF];
    if (aux == NULL || args == NULL || kwargs == NULL || !is_tuple_of(aux, 3) || !PyTuple_CheckExact(args) ||
        !PyDict_CheckExact(kwargs))
        return FAILED;
    PyObject *names = PyTuple_GetItem(aux, 0), *keywords = PyTuple_GetItem(aux, 1);
    Py_ssize_t num_args = PyTuple_Size(args), num_traced = 0;
    if (PyTuple_Size(names) != num_args)
        return FAILED;
    for (Py_ssize_t i = 0; i < num_args; i++)
        num_traced += PyTuple_GetItem(names, i) != Py_None;
    TRY(emit_items_and_aux(w, kind, num_traced + PyTuple_Size(keywords), aux));
    for (Py_ssize_t i = 0; i < num_args; i++) {
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

/* Pushes the values of a dictionary in the order of its sorted keys, and leaves these in `w->names`. An insertion sort, which is
   fast for small and for nearly sorted dictionaries. UNHANDLED if too many moves are needed, or if a key is not exactly a `str`.
   Runs no Python, so the keys need no references. */
static int push_in_order(Walk *w, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t cursor = 0, size = 0, moves = 16 * PyDict_Size(dict);
    size_t start = w->children.size;
    while (PyDict_Next(dict, &cursor, &key, &value)) {
        if (Py_TYPE(key) != &PyUnicode_Type || moves < 0)
            return UNHANDLED;
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

/* Returns 1 if comparing such keys runs no Python. */
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

/* Writes the keys of a dictionary and pushes its values, in the order of the reference: sorted, except for an `OrderedDict`. Keys
   that cannot be sorted stay in their own order. Outside of modules they are an error of JAX, so UNHANDLED here. UNHANDLED also
   for keys whose comparison would run Python. */
static int push_by_keys(Walk *w, const Kind *kind, PyObject *dict)
{
    OWNED *keys = kind->shape == ORDERED_DICT ? PyMapping_Keys(dict) : PyDict_Keys(dict), *sorted = NULL;
    NEED(keys);
    if (!are_simple_keys(keys))
        return UNHANDLED;
    if (kind->shape != ORDERED_DICT) {
        sorted = PySequence_List(keys);
        NEED(sorted);
        if (PyList_Sort(sorted) < 0) {
            if (!drop_error(PyExc_TypeError))
                return FAILED;
            if (w->is_outside)
                return UNHANDLED;
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

/* Opens a dictionary of any kind. A `defaultdict` also has its factory in the key. */
static int open_dict(Walk *w, Kind *kind, PyObject *object)
{
    Py_ssize_t size = PyDict_Size(object);
    TRY(emit_kind(w, 'N', kind, size));
    if (kind->shape == DEFAULT_DICT) {
        OWNED *factory = PyObject_GetAttr(object, name_default_factory);
        NEED(factory);
        TRY(emit_static(w, factory, 0));
    }
    Position position = position_of(w);
    int outcome = kind->shape == ORDERED_DICT ? UNHANDLED : push_in_order(w, object);
    for (Py_ssize_t i = 0; outcome == DONE && i < size; i++)
        outcome = emit_text(w, w->names[i]);
    if (outcome != UNHANDLED)
        return outcome;
    rewind(w, position);
    TRY(push_by_keys(w, kind, object));
    /* Sorting may have collected garbage, and a finaliser may have changed the dictionary. */
    return w->children.size - position.children == (size_t)size ? DONE : FAILED;
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
        return UNHANDLED;
    TRY(emit_kind(w, 'N', kind, num_children));
    if (kind->shape == DEFAULT_DICT)
        TRY(emit_static(w, PyTuple_GetItem(aux, 0), 0));
    return emit_statics(w, keys_in(kind, aux));
}

/* Completes the bytes of a node whose fields were read by name. Does nothing if exactly the declared fields are present. Otherwise
   turns the code F into A and appends a byte for each name, 1 if it is present. `w->names` has an entry for each name of the kind,
   NULL for an absent field. The bytes come after the static values. As 0 and 1 are no codes of static values, the end of these is
   clear. */
static int emit_presence(Walk *w, Kind *kind, size_t start)
{
    Py_ssize_t num_declared = PyTuple_Size(kind->order), size = PyTuple_Size(kind->names);
    int are_declared = 1;
    for (Py_ssize_t i = 0; i < size; i++)
        are_declared &= (w->names[i] != NULL) == (i < num_declared);
    if (are_declared)
        return DONE;
    w->key[start] = 'A';
    for (Py_ssize_t i = 0; i < size; i++)
        TRY(emit_code(w, w->names[i] != NULL));
    return DONE;
}

/* Returns the value of a field, a new reference; NULL without an error if it is absent. The lookup may fail with an error, since
   a key in the dictionary of attributes may have an `__eq__` of a user. */
static PyObject *field_of(const Kind *kind, PyObject *holder, PyObject *name)
{
    if (kind->shape == DATACLASS || kind->shape == FIELDS) {
        PyObject *value = PyDict_GetItemWithError(holder, name);
        return value == NULL || (kind->shape == FIELDS && is_instance(value, missing_type)) ? NULL : Py_NewRef(value);
    }
    PyObject *value = get_attribute(holder, name);
    if (value == NULL)
        drop_error(PyExc_AttributeError);
    return value;
}

/* Reads the fields of an object by name, from its dictionary or its slots. Only FIELDS may have absent ones. For other shapes
   Python's attribute lookup must decide: UNHANDLED. */
static int open_by_name(Walk *w, Kind *kind, PyObject *holder)
{
    size_t start = w->key_size;
    TRY(make_room(w, PyTuple_Size(kind->names)));
    TRY(emit_kind(w, 'F', kind, 0));
    for (Py_ssize_t i = 0; i < PyTuple_Size(kind->names); i++) {
        OWNED *value = field_of(kind, holder, PyTuple_GetItem(kind->names, i));
        if (value == NULL && (kind->shape != FIELDS || PyErr_Occurred()))
            return PyErr_Occurred() ? FAILED : UNHANDLED;
        w->names[i] = value == NULL ? NULL : Py_None;
        if (value != NULL)
            TRY(i < kind->num_traced ? push(&w->children, value) : emit_static(w, value, 0));
    }
    return emit_presence(w, kind, start);
}

/* Returns 1 if no array can ever get into the value of a static attribute of a `sharedtree.Module`: it is no container, or a tuple
   of simple values. If not, Python searches the value for arrays at each call. */
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

/* Opens an object whose `__dict__` has exactly these names, in this order; otherwise UNHANDLED. This is the fast path: no lookup
   by name. Runs no Python. */
static int open_in_order(Walk *w, Kind *kind, PyObject *attributes, PyObject *names, PyObject *are_static)
{
    Py_ssize_t size = PyTuple_Size(names), cursor = 0, i = 0;
    const char *is_static = PyBytes_AsString(are_static);
    PyObject *name, *value;
    if (PyDict_Size(attributes) != size)
        return UNHANDLED;
    for (; PyDict_Next(attributes, &cursor, &name, &value); i++) {
        if (i >= size || !is_text(name, PyTuple_GetItem(names, i)) || is_instance(value, missing_type))
            return UNHANDLED;
        if (is_static[i] && kind->shape == MODULE && !is_static_for_ever(value))
            return UNHANDLED;
        TRY(is_static[i] ? emit_static(w, value, 0) : push(&w->children, value));
    }
    return DONE;
}

/* Returns the `__dict__` of an object, a new reference; NULL without an error if it is of a subclass of `dict`. */
PyObject *attributes_of(PyObject *object)
{
    PyObject *attributes = PyObject_GenericGetDict(object, NULL);
    if (attributes != NULL && !PyDict_CheckExact(attributes))
        replace(&attributes, NULL);
    return attributes;
}

/* Opens an object with a `__dict__`: in the order of the dictionary if this is as expected, else name by name. */
static int open_fields(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *attributes = attributes_of(object);
    Position position = position_of(w);
    NEED(attributes);
    if (kind->is_in_order) {
        TRY(emit_kind(w, 'F', kind, 0));
        int outcome = open_in_order(w, kind, attributes, kind->order, kind->is_static);
        if (outcome != UNHANDLED)
            return outcome;
        rewind(w, position);
    }
    if (kind->shape == DATACLASS && PyDict_Size(attributes) != PyTuple_Size(kind->order))
        return UNHANDLED; /* it has attributes that are no fields */
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

/* Writes a node of FIELDS. Its auxiliary data is (names of the children, (name, value) pairs of the static fields). */
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

/* For DATACLASS, SLOTS and NNX_STATE, whose auxiliary data is the tuple of static values. */
static int fits_by_name(const Kind *kind, PyObject *aux, Py_ssize_t size)
{
    return size == kind->num_traced && is_tuple_of(aux, PyTuple_Size(kind->names) - size);
}

static int emit_by_name(Walk *w, Kind *kind, Py_ssize_t Py_UNUSED(num_children), PyObject *aux)
{
    TRY(emit_kind(w, 'F', kind, 0));
    return emit_statics(w, aux);
}

/* Reads the names of a module's attributes, and for each a byte, 1 if it is static; new references. Returns 0 if the object is
   not the one that lists them. */
static int read_attribute_kinds(PyObject *kinds_object, PyObject **names, PyObject **are_static)
{
    *names = *are_static = NULL;
    if (!is_instance(kinds_object, attribute_kinds_type))
        return 0;
    *names = get_slot(names_in_kinds, kinds_object, NULL);
    *are_static = *names == NULL ? NULL : get_slot(statics_in_kinds, kinds_object, NULL);
    PyErr_Clear();
    return *are_static != NULL && PyBytes_Check(*are_static) && is_tuple_of(*names, PyBytes_Size(*are_static));
}

/* Opens a `sharedtree.Module`. Its slot lists the names and kinds of its attributes; Python replaces it if these change. */
static int open_module(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *kinds_object = get_slot(kinds_of_attributes, object, NULL), *names = NULL, *are_static = NULL, *attributes = NULL;
    if (kinds_object == NULL)
        return drop_error(PyExc_AttributeError) ? UNHANDLED : FAILED;
    if (!read_attribute_kinds(kinds_object, &names, &are_static))
        return UNHANDLED;
    attributes = attributes_of(object);
    NEED(attributes);
    TRY(emit_kind(w, 'M', kind, 0));
    TRY(emit_address(w, kinds_object));
    return open_in_order(w, kind, attributes, names, are_static);
}

static int fits_module(const Kind *Py_UNUSED(kind), PyObject *aux, Py_ssize_t size)
{
    OWNED *names = NULL, *are_static = NULL;
    if (!is_tuple_of(aux, 2) || !read_attribute_kinds(PyTuple_GetItem(aux, 0), &names, &are_static))
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

/* Returns 1 if an NNX object's mapping from names to flags is the layout's. */
static int has_marks(const Layout *layout, PyObject *mapping)
{
    PyObject *name, *mark;
    Py_ssize_t cursor = 0, size = PyTuple_Size(layout->marked);
    const char *marks = PyBytes_AsString(layout->marks);
    if (PyDict_Size(mapping) != size)
        return 0;
    for (Py_ssize_t i = 0; i < size && PyDict_Next(mapping, &cursor, &name, &mark); i++) {
        if (mark != (marks[i] ? Py_True : Py_False) || !is_text(name, PyTuple_GetItem(layout->marked, i)))
            return 0;
    }
    return 1;
}

/* Hashes the names of attributes in order. A name that is no exact `str` counts as 1, since its hash may run Python. The result
   is never 0, which is no key of a table. */
static size_t hash_of_names(PyObject *attributes)
{
    PyObject *name, *value;
    Py_ssize_t cursor = 0;
    size_t hash = 0;
    while (PyDict_Next(attributes, &cursor, &name, &value))
        hash = 31 * hash + (Py_TYPE(name) == &PyUnicode_Type ? (size_t)PyObject_Hash(name) : 1);
    return hash | 1;
}

/* Opens an NNX object if it has this layout; otherwise UNHANDLED. The layout's places put each attribute where the flatten would,
   though the `__dict__` has another order. Runs no Python. */
static int open_by_layout(Walk *w, Kind *kind, const Layout *layout, PyObject *attributes, PyObject *mapping)
{
    Py_ssize_t cursor = 0, size = PyTuple_Size(layout->names), num_traced = layout->num_traced;
    size_t start = w->children.size;
    PyObject *name, *value;
    if (PyDict_Size(attributes) != size || !has_marks(layout, mapping))
        return UNHANDLED;
    TRY(emit_kind(w, 'O', kind, layout->number));
    TRY(make_room(w, size));
    TRY(grow(&w->children.items, &w->children.room, start + (size_t)num_traced, sizeof value));
    for (Py_ssize_t i = 0; i < size; i++)
        w->names[i] = NULL;
    /* The children get their places first, since the attributes come in another order. A NULL is released like an object. */
    for (Py_ssize_t i = 0; i < num_traced; i++)
        w->children.items[w->children.size++] = NULL;
    for (Py_ssize_t i = 0; PyDict_Next(attributes, &cursor, &name, &value); i++) {
        if (i >= size || !is_text(name, PyTuple_GetItem(layout->names, i)))
            return UNHANDLED;
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

/* Returns a layout with this signature; NULL if there is none, or on an error. */
static Layout *layout_with(const Kind *kind, PyObject *signature)
{
    for (size_t i = 0; i < kind->layouts.size; i++) {
        Layout *layout = kind->layouts.slots[i].key == NULL ? NULL : (Layout *)kind->layouts.slots[i].value;
        for (; layout != NULL; layout = layout->next) {
            int is_equal = PyObject_RichCompareBool(layout->signature, signature, Py_EQ);
            if (is_equal != 0)
                return is_equal < 0 ? NULL : layout;
        }
    }
    return NULL;
}

/* Asks Python for the layout of an object, and enters it. NULL without an error if there is none. */
static Layout *new_layout(Kind *kind, PyObject *object, size_t hash)
{
    OWNED *description = PyObject_CallFunctionObjArgs(layout_of, object, NULL);
    PyObject *signature, *names, *places, *marked, *marks;
    if (description == NULL || description == Py_None) {
        kind->num_layouts++;
        return NULL;
    }
    if (!PyArg_ParseTuple(description, "O!O!O!O!S", &PyTuple_Type, &signature, &PyTuple_Type, &names, &PyTuple_Type, &places,
                          &PyTuple_Type, &marked, &marks))
        return NULL;
    Py_ssize_t size = PyTuple_Size(names);
    if (!is_tuple_of(signature, 3) || !PyTuple_CheckExact(PyTuple_GetItem(signature, 0)) || !is_tuple_of(places, size) ||
        PyBytes_Size(marks) != PyTuple_Size(marked))
        return raise_null(PyExc_ValueError, "no layout");
    Layout *same_signature = layout_with(kind, signature);
    if (same_signature == NULL && PyErr_Occurred())
        return NULL;
    Layout *layout = PyMem_Calloc(1, sizeof *layout + 2 * (size_t)size * sizeof *layout->places);
    if (layout == NULL)
        return (void *)PyErr_NoMemory();
    layout->num_traced = PyTuple_Size(PyTuple_GetItem(signature, 0));
    layout->next = get_pointer(&kind->layouts, (void *)hash);
    int *num_names_at = layout->places + size;
    Py_ssize_t num_placed = 0;
    for (Py_ssize_t i = 0; i < size && !PyErr_Occurred(); i++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(places, i));
        if (place >= size || (place >= 0 && num_names_at[place]++))
            raise_null(PyExc_ValueError, "no two names have one place, which is one of so many");
        layout->places[i] = (int)place;
        num_placed += place >= 0 && place < layout->num_traced;
    }
    if (!PyErr_Occurred() && num_placed != layout->num_traced)
        raise_null(PyExc_ValueError, "one place for each child");
    if (PyErr_Occurred() || set_value(&kind->layouts, (void *)hash, (intptr_t)layout) < 0) {
        PyMem_Free(layout);
        return NULL;
    }
    layout->signature = Py_NewRef(signature), layout->names = Py_NewRef(names);
    layout->marked = Py_NewRef(marked), layout->marks = Py_NewRef(marks);
    layout->number = same_signature == NULL ? kind->num_layouts : same_signature->number;
    kind->num_layouts++;
    return layout;
}

/* Opens an NNX object by the first layout of its class that fits. If none does, Python is asked for a new one. */
static int open_nnx_object(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *attributes = attributes_of(object), *nodes = NULL, *mapping = NULL;
    if (attributes != NULL)
        nodes = Py_XNewRef(PyDict_GetItemWithError(attributes, name_nodes));
    if (nodes != NULL && is_instance(nodes, mapping_type))
        mapping = PyObject_GenericGetAttr(nodes, name_mapping);
    if (mapping == NULL || !PyDict_CheckExact(mapping))
        return PyErr_Occurred() ? FAILED : UNHANDLED;
    size_t hash = hash_of_names(attributes);
    Position position = position_of(w);
    Layout *layout = get_pointer(&kind->layouts, (void *)hash);
    for (; layout != NULL; layout = layout->next) {
        int outcome = open_by_layout(w, kind, layout, attributes, mapping);
        if (outcome != UNHANDLED)
            return outcome;
        rewind(w, position);
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

/* Writes an NNX object. Its auxiliary data is (names of the children, names of the static attributes, their values). */
static int emit_nnx_object(Walk *w, Kind *kind, Py_ssize_t Py_UNUSED(num_children), PyObject *aux)
{
    PyObject *names = PyTuple_GetItem(aux, 1), *values = PyTuple_GetItem(aux, 2);
    Py_ssize_t mapping_index = 0, size = PyTuple_Size(names);
    /* The mapping is part of the signature, so it is not written like the other static attributes. */
    while (mapping_index < size && !is_text(PyTuple_GetItem(names, mapping_index), name_nodes))
        mapping_index++;
    if (mapping_index == size || !is_instance(PyTuple_GetItem(values, mapping_index), mapping_type))
        return UNHANDLED;
    OWNED *mapping = PyObject_GenericGetAttr(PyTuple_GetItem(values, mapping_index), name_mapping);
    OWNED *signature = mapping == NULL ? NULL : PyTuple_Pack(3, PyTuple_GetItem(aux, 0), names, mapping);
    Layout *layout = signature == NULL ? NULL : layout_with(kind, signature);
    NEED(layout);
    TRY(emit_kind(w, 'O', kind, layout->number));
    for (Py_ssize_t i = 0; i < size; i++) {
        if (i != mapping_index)
            TRY(emit_static(w, PyTuple_GetItem(values, i), 0));
    }
    return DONE;
}

/* Writes the metadata of an NNX variable, which is static, sorted by name. */
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
        return UNHANDLED;
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

/* --- the row of each shape ------------------------------------------------------------------------------------------ */

/* One row of `OPENERS`. A NULL leaves the work to the functions that are registered for the class. */
typedef struct {
    const char *name;
    int (*open)(Walk *w, Kind *kind, PyObject *object);
    int (*fits)(const Kind *kind, PyObject *aux, Py_ssize_t num_children); /* NULL: any auxiliary data fits */
    int (*emit)(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux);
} Opener;

/* A row that ends early leaves the rest to Python. */
#define ROW(shape, ...) [shape] = {#shape, __VA_ARGS__}

static const Opener OPENERS[NUM_SHAPES] = {
    ROW(NUMBER, NULL), ROW(STATIC, NULL), ROW(NUMPY_ARRAY, NULL), ROW(NUMPY_NUMBER, NULL), ROW(JAX_ARRAY, NULL),
    ROW(NOTHING, open_nothing, is_aux_none, emit_items),
    ROW(TUPLE, open_sequence, NULL, emit_items),
    ROW(LIST, open_sequence, NULL, emit_items),
    ROW(DICT, open_dict, fits_dict, emit_dict),
    ROW(ORDERED_DICT, open_dict, fits_dict, emit_dict),
    ROW(DEFAULT_DICT, open_dict, fits_dict, emit_dict),
    ROW(DEQUE, open_deque, NULL, emit_items_and_aux),
    ROW(NAMEDTUPLE, open_sequence, is_aux_none, emit_items),
    ROW(ARGUMENTS, open_arguments, NULL, emit_items_and_aux),
    ROW(FIELDS, open_fields, fits_fields, emit_fields),
    ROW(DATACLASS, open_fields, fits_by_name, emit_by_name),
    ROW(SLOTS, open_by_name, fits_by_name, emit_by_name),
    ROW(NNX_OBJECT, open_nnx_object, fits_nnx_object, emit_nnx_object),
    ROW(NNX_VARIABLE, open_nnx_variable, fits_nnx_variable, emit_nnx_variable),
    ROW(NNX_STATE, open_by_name, fits_by_name, emit_by_name),
    ROW(MODULE, open_module, fits_module, emit_module),
    ROW(OTHER, NULL), ROW(LEAF, NULL),
    [CALLER_OBJECT] = {"GIVEN"}, /* the name in Python */
};

static const Opener *opener_of(const Kind *kind)
{
    return &OPENERS[kind->shape];
}

/* Returns 1 if auxiliary data is as the functions of the kind's shape expect it. */
int fits_kind(const Kind *kind, PyObject *aux, Py_ssize_t num_children)
{
    const Opener *opener = opener_of(kind);
    return opener->fits == NULL || opener->fits(kind, aux, num_children);
}

/* --- the walk ---------------------------------------------------------------------------------------------------- */

/* `walk_all` is the loop: it visits the next child of the innermost open node, or closes this node if there is none. `visit`
   looks at one object, its kind, and the convention at its place:

       it has a number                    →  R number
       a leaf, traced                     →  L, and it joins the leaves
       a leaf, static                     →  S value
       a node                             →  its shape's `open`; then its children are visited, and `close_node` numbers it

   After the loop, `settle_pins` replaces addresses of values that may change by tokens. Only then is the key complete. */

/* Writes the bytes of a node from its auxiliary data: by its shape, or as a node of code G. */
static int emit_node(Walk *w, Kind *kind, Py_ssize_t num_children, PyObject *aux)
{
    const Opener *opener = opener_of(kind);
    Position position = position_of(w);
    int is_fit = opener->emit != NULL && fits_kind(kind, aux, num_children);
    int outcome = is_fit ? opener->emit(w, kind, num_children, aux) : UNHANDLED;
    if (outcome != UNHANDLED)
        return outcome;
    if (kind->shape == FIELDS)
        return FAILED; /* no registered function takes instances of such a class apart */
    rewind(w, position);
    TRY(emit_kind(w, 'G', kind, num_children));
    return emit_static(w, aux, 0);
}

/* Opens a node by its registered flatten function. */
static int open_other(Walk *w, Kind *kind, PyObject *object)
{
    OWNED *flattened = PyObject_CallFunctionObjArgs(kind->take_apart, object, NULL), *children = NULL;
    if (flattened == NULL || !is_record(flattened, 2))
        return FAILED;
    children = PySequence_Tuple(PyTuple_GetItem(flattened, 0));
    NEED(children);
    TRY(emit_node(w, kind, PyTuple_Size(children), PyTuple_GetItem(flattened, 1)));
    /* The other objects of the result may die now: their addresses are in no key. */
    return push_items(w, children);
}

/* Opens a node and pushes its frame. FAILED for a cycle. `outer` is the convention at the place of the node. */
static int open_node(Walk *w, PyObject *object, Kind *kind, int outer)
{
    int has_identity = kind->is_mutable || !kind->is_plain;
    Py_ssize_t old_number = has_identity ? get_value(&w->tags->numbers, object) : NO_VALUE;
    if (w->depth >= MAX_DEPTH || old_number == OPEN)
        return FAILED;
    Position position = position_of(w);
    w->is_outside = outer == OUTSIDE || outer == ANY;
    int outcome = opener_of(kind)->open == NULL ? UNHANDLED : opener_of(kind)->open(w, kind, object);
    if (outcome == UNHANDLED) {
        rewind(w, position);
        outcome = open_other(w, kind, object);
    }
    TRY(outcome);
    TRY(grow(&w->frames, &w->frames_room, w->depth + 1, sizeof *w->frames));
    if (has_identity)
        TRY(set_value(&w->tags->numbers, object, OPEN));
    /* The convention for the children. Most classes have one. Plain containers and `Partial` inherit it. */
    int inner = kind->convention;
    if (inner == INHERITED) {
        inner = outer == IN_VARIABLE || ((outer == ANY || outer == OUTSIDE) && !kind->is_plain) ? JAX : outer;
        if (outer == OUTSIDE && kind->is_plain && kind->is_mutable && w->flags & CONTAINERS)
            inner = ANY;
    }
    /* Outside of modules, a plain container gets a number only if the policy counts containers. */
    int is_object = has_identity && (outer != OUTSIDE || inner != OUTSIDE);
    w->frames[w->depth++] = (Frame){.object = object, .kind = kind, .start = position.children, .next = position.children,
                                    .end = w->children.size, .convention = inner, .is_open = has_identity,
                                    .is_object = is_object, .old_number = old_number};
    return DONE;
}

/* Gives an object the next number. FAILED if Python code has used the tags meanwhile. */
static int next_number(Walk *w, PyObject *object, Py_ssize_t *number)
{
    if (PyList_Size(w->tags->objects) != w->expected)
        return FAILED;
    TRY(PyList_Append(w->tags->objects, object));
    *number = w->expected++;
    return DONE;
}

/* Gives an object the next number; it can be looked up if `is_tagged`. */
static int record(Walk *w, PyObject *object, int is_tagged)
{
    Py_ssize_t number;
    TRY(next_number(w, object, &number));
    return is_tagged ? set_value(&w->tags->numbers, object, number) : DONE;
}

static int record_leaf(Walk *w, PyObject *object)
{
    Py_ssize_t number;
    TRY(emit_code(w, 'L'));
    TRY(push(&w->leaves_so_far, object));
    return next_number(w, object, &number);
}

/* Visits a leaf with identity that can be looked up: writes a reference if it has a number, else records it. */
static int visit_tagged_leaf(Walk *w, PyObject *object)
{
    Slot *slot = slot_for(&w->tags->numbers, object);
    if (slot == NULL || slot->value == OPEN)
        return FAILED;
    /* None of the following runs Python, so the slot stays where it is. */
    if (slot->value >= 0)
        return emit_count(w, 'R', slot->value);
    TRY(record_leaf(w, object));
    slot->value = w->expected - 1;
    return DONE;
}

static int record_static(Walk *w, PyObject *object)
{
    TRY(emit_code(w, 'S'));
    TRY(emit_static(w, object, 0));
    return record(w, object, 0);
}

/* Writes a reference to an object with a number; UNHANDLED if it has none. FAILED for a cycle. */
static int refer_back(Walk *w, PyObject *object)
{
    Py_ssize_t number = get_value(&w->tags->numbers, object);
    if (number < 0)
        return number == OPEN ? FAILED : UNHANDLED;
    return emit_count(w, 'R', number);
}

/* Returns 1 if JAX traces a NumPy array or number, by its dtype; 0 if not or if only Python knows. */
static int is_traced_dtype(PyObject *object)
{
    /* The place of the last dtype. Most arrays of a program have the same one. */
    static Py_ssize_t last;
    OWNED *dtype = PyObject_GetAttr(object, name_dtype);
    PyErr_Clear();
    if (dtype != NULL && last < PyTuple_Size(dtypes) && PyTuple_GetItem(dtypes, last) == dtype)
        return 1;
    for (Py_ssize_t i = 0; dtype != NULL && i < PyTuple_Size(dtypes); i++) {
        if (PyTuple_GetItem(dtypes, i) == dtype) {
            last = i;
            return 1;
        }
    }
    return 0;
}

static int visit_unknown(Walk *w, PyObject *object, int convention);

static int visit_static(Walk *w, PyObject *object)
{
    int outcome = refer_back(w, object);
    return outcome == UNHANDLED ? record_static(w, object) : outcome;
}

/* Visits a leaf of a known class, which is traced or static by its shape and the rules:

       FILTERED, with any convention    arrays and NumPy numbers are traced
       OUTSIDE, ANY                     every leaf is traced
       EQUINOX                          arrays and NumPy numbers are traced
       JAX, IN_VARIABLE                 arrays and NumPy numbers are traced if JAX traces their dtype, and so are numbers

   A traced array has identity: if it comes again, a reference is written. Directly in an NNX variable and outside of modules it
   is a value, and is recorded each time. */
static int visit_leaf(Walk *w, PyObject *object, const Kind *kind, int convention)
{
    int is_array = kind->shape == NUMPY_ARRAY || kind->shape == NUMPY_NUMBER || kind->shape == JAX_ARRAY;
    int is_value = convention == OUTSIDE || convention == IN_VARIABLE;
    if (!is_array && w->flags & FILTERED)
        return visit_static(w, object);
    if (convention == OUTSIDE)
        return record_leaf(w, object);
    if (convention == ANY || kind->shape == JAX_ARRAY || (is_array && convention == EQUINOX))
        is_array &= kind->shape != NUMPY_NUMBER;
    /* A class of numbers that has a kind has one of the dtypes that are traced. */
    else if (kind->shape == NUMPY_ARRAY && !is_traced_dtype(object))
        return visit_unknown(w, object, convention);
    else if (kind->shape == STATIC || (kind->shape == NUMBER && convention == EQUINOX))
        return visit_static(w, object);
    if (!is_array || kind->shape == NUMPY_NUMBER || is_value)
        return record_leaf(w, object);
    if (w->flags & ARRAYS)
        return visit_tagged_leaf(w, object);
    /* Only an earlier tree of the same `Context` may have given it a number. */
    int outcome = refer_back(w, object);
    return outcome == UNHANDLED ? record_leaf(w, object) : outcome;
}

/* Visits one object: writes a reference if it has a number, else records it as a leaf or opens it. */
static int visit(Walk *w, PyObject *object, int convention)
{
    Kind *kind = kind_of(Py_TYPE(object));
    if (kind == NULL || (kind->is_guess && kind->epoch != epoch()))
        return visit_unknown(w, object, convention);
    if (kind->shape < NOTHING)
        return visit_leaf(w, object, kind, convention);
    int is_outside = convention == OUTSIDE || convention == ANY;
    int is_leaf = is_outside && !kind->is_known_to_jax; /* a deque, which is a node only inside modules */
    if (is_leaf && convention == OUTSIDE && !(w->flags & FILTERED))
        return record_leaf(w, object);
    if (is_leaf || convention != OUTSIDE || !kind->is_plain || (w->flags & CONTAINERS && kind->is_mutable)) {
        int outcome = refer_back(w, object);
        if (outcome != UNHANDLED)
            return outcome;
    }
    if (is_leaf)
        return w->flags & FILTERED ? record_static(w, object) : record_leaf(w, object);
    return open_node(w, object, kind, convention);
}

/* Visits an object of a class without a kind, or with a dtype that only Python knows: asks Python first. */
static int visit_unknown(Walk *w, PyObject *object, int convention)
{
    OWNED *number = PyLong_FromLong(convention | ((w->flags & FILTERED) != 0) << 8);
    OWNED *answer = number == NULL ? NULL : PyObject_CallFunctionObjArgs(classify, object, number, NULL);
    NEED(answer);
    if (PyLong_Check(answer)) {
        long role = PyLong_AsLong(answer);
        if (role == -1 && PyErr_Occurred())
            return FAILED;
        int outcome = role == 1 ? UNHANDLED : refer_back(w, object);
        if (outcome != UNHANDLED)
            return outcome;
        if (role == 2 && w->flags & ARRAYS)
            return visit_tagged_leaf(w, object);
        return role == 0 ? record_static(w, object) : record_leaf(w, object);
    }
    Kind *kind = new_kind(answer);
    /* The call may have changed the object's class, or registered it. */
    if (kind == NULL || kind->type != Py_TYPE(object) || kind_of(kind->type) != kind ||
        (kind->is_guess && kind->epoch != epoch()))
        return FAILED;
    return visit(w, object, convention);
}

/* Ends the visit of the innermost open node, and gives the node its number. A list that is a value at this place may have had a
   number before, as an object inside a module. Then it has that number again from now on. */
static int close_node(Walk *w)
{
    Frame frame = w->frames[--w->depth];
    if (frame.is_open && !frame.is_object)
        TRY(set_value(&w->tags->numbers, frame.object, frame.old_number));
    TRY(record(w, frame.object, frame.is_object || w->flags & VALUES));
    pop_to(&w->children, frame.start);
    return DONE;
}

/* Returns the class that a pinned value had when it was written. Only for comparison: the class may be dead. */
static PyTypeObject *type_of_pin(const Walk *w, size_t i)
{
    PyTypeObject *type;
    memcpy(&type, w->key + w->places[i] + 1 + sizeof(PyObject *), sizeof type);
    return type;
}

/* Replaces the address of a pinned value in the key by that of its token, and pins this instead. */
static void put_token(Walk *w, size_t i, PyObject *token)
{
    const void *addresses[2] = {token, NULL};
    w->key[w->places[i]] = 'V';
    memcpy(w->key + w->places[i] + 1, addresses, sizeof addresses);
    replace(&w->pins.items[i], Py_NewRef(token));
}

/* Applies Python's answer about a pinned value:

       (class,)         no instance of the class ever changes: the address stays, and a fact about the class is entered
       (token, None)    this value never changes: the token replaces the address, and a fact about the value is entered
       token            the value may change: the token, which is for its present content, replaces the address

   In the second case an exact walk keeps the address, unless any equal value is as good. */
static int settle_pin(Walk *w, size_t i, PyObject *verdict)
{
    PyObject *value = w->pins.items[i], *first = PyTuple_CheckExact(verdict) ? PyTuple_GetItem(verdict, 0) : verdict;
    NEED(first);
    if (first != verdict && PyTuple_Size(verdict) == 1)
        return first != (PyObject *)type_of_pin(w, i) ? FAILED : add_fact_weakly(first, &PyType_Type, NULL);
    if (first != verdict) {
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

/* Settles a pinned value by the facts; UNHANDLED if Python has to be asked. */
static int settle_pin_by_facts(Walk *w, size_t i)
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

/* The parts of `Token.contents[content]`: whether values of this content never change, the values to be compared, and the pins. */
enum { IS_SETTLED, EQUAL_VALUES, PINS_OF_CONTENT, NUM_OF_CONTENT };

/* Puts the hash of a value of READ_EQUAL into a content, and appends the value to `equal_values`. UNHANDLED for other values. */
static int settle_part_by_hash(Walk *w, size_t i, PyObject *equal_values)
{
    OWNED *value = Py_NewRef(w->pins.items[i]);
    const Reading *reading = reading_of(type_of_pin(w, i));
    if (reading == NULL || reading->shape != READ_EQUAL)
        return UNHANDLED;
    int64_t numbers[2] = {PyObject_Hash(value), reading->number};
    if (PyErr_Occurred())
        return drop_error(PyExc_TypeError) ? UNHANDLED : FAILED;
    w->key[w->places[i]] = 'H';
    memcpy(w->key + w->places[i] + 1, numbers, sizeof numbers);
    return PyList_Append(equal_values, value);
}

static int ask_about_pins(Walk *w, PyObject *values, PyObject *numbers, int must_be_settled);

/* Writes the content of a value to the end of the key, and settles the parts in it. UNHANDLED if it cannot be written, or if Python
   would have to be asked without `may_ask`. The caller rewinds the walk. */
static int write_content(Walk *w, PyObject *value, const Reading *reading, int may_ask, PyObject *equal_values)
{
    size_t first = w->pins.size;
    OWNED *values = may_ask ? PyList_New(0) : NULL, *numbers = may_ask ? PyList_New(0) : NULL;
    if (may_ask && (values == NULL || numbers == NULL))
        return FAILED;
    w->is_content = 1;
    int outcome = emit_reading(w, reading, value, 0);
    w->is_content = 0, w->mappings = 0;
    TRY(outcome);
    for (size_t i = first; i < w->pins.size; i++) {
        if (w->key[w->places[i]] != 'P')
            continue; /* a mapping, which is written out */
        outcome = settle_pin_by_facts(w, i);
        if (outcome == UNHANDLED)
            outcome = settle_part_by_hash(w, i, equal_values);
        if (outcome == UNHANDLED && may_ask) {
            TRY(PyList_Append(values, w->pins.items[i]));
            outcome = append_new(numbers, PyLong_FromSize_t(i));
        }
        TRY(outcome);
    }
    return may_ask && PyList_Size(values) > 0 ? ask_about_pins(w, values, numbers, 1) : DONE;
}

/* Returns the content of a value as bytes, and the pins of it; both NULL if it has none. */
static int content_of(Walk *w, PyObject *value, const Reading *reading, int may_ask, PyObject *equal_values, PyObject **content,
                      PyObject **pins)
{
    Position position = position_of(w);
    int outcome = write_content(w, value, reading, may_ask, equal_values);
    if (outcome == DONE) {
        size_t size = w->key_size - position.key_size;
        *content = PyBytes_FromStringAndSize(w->key + position.key_size, (Py_ssize_t)size);
        *pins = *content == NULL || !may_ask ? NULL : PyTuple_New((Py_ssize_t)(w->pins.size - position.pins));
        for (size_t i = position.pins; *pins != NULL && i < w->pins.size; i++)
            PyTuple_SetItem(*pins, (Py_ssize_t)(i - position.pins), Py_NewRef(w->pins.items[i]));
        if (*content == NULL || (may_ask && *pins == NULL))
            outcome = FAILED;
    }
    rewind(w, position);
    return outcome;
}

/* Returns 1 if two sequences have as many values, equal ones of the same classes; -1 on an error. */
static int are_equal(PyObject *known_values, PyObject *values)
{
    if (!PyTuple_CheckExact(known_values) || PyTuple_Size(known_values) != PyList_Size(values))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_Size(values); i++) {
        OWNED *known = Py_NewRef(PyTuple_GetItem(known_values, i)), *value = Py_NewRef(PyList_GetItem(values, i));
        int is_equal = Py_TYPE(known) == Py_TYPE(value) ? PyObject_RichCompareBool(known, value, Py_EQ) : 0;
        if (is_equal != 1)
            return is_equal;
    }
    return 1;
}

/* Settles a pinned value by its content; UNHANDLED if Python has to be asked. */
static int settle_pin_by_content(Walk *w, size_t i)
{
    PyTypeObject *type = type_of_pin(w, i);
    const Reading *reading = w->flags & EXACT ? NULL : reading_of(type);
    OWNED *value = Py_NewRef(w->pins.items[i]);
    OWNED *equal_values = NULL, *content = NULL, *pins = NULL, *entry = NULL, *token = NULL, *known = NULL, *found = NULL;
    if (reading == NULL || Py_TYPE(value) != type || reading->shape >= READ_EQUAL)
        return UNHANDLED;
    equal_values = PyList_New(0);
    NEED(equal_values);
    TRY(content_of(w, value, reading, 0, equal_values, &content, &pins));
    entry = Py_XNewRef(PyDict_GetItemWithError(contents, content));
    NEED(entry);
    token = referent(entry);
    NEED(token);
    known = PyObject_GetAttr(token, name_contents);
    NEED(known);
    found = PyDict_CheckExact(known) ? Py_XNewRef(PyDict_GetItemWithError(known, content)) : NULL;
    NEED(found);
    if (!is_record(found, NUM_OF_CONTENT))
        return UNHANDLED;
    int is_equal = are_equal(PyTuple_GetItem(found, EQUAL_VALUES), equal_values);
    if (is_equal != 1)
        return is_equal < 0 ? FAILED : UNHANDLED;
    /* From here on as if Python had answered. */
    if (PyTuple_GetItem(found, IS_SETTLED) == Py_True) {
        if (w->settled != NULL) {
            TRY(PyList_Append(w->settled, value));
            TRY(PyList_Append(w->settled, token));
        }
        if (reading->is_watched)
            TRY(add_fact_weakly(value, type, token));
    }
    put_token(w, i, token);
    return DONE;
}

/* Lets Python remember the content for which it gave a token, unless the value has changed since the content was written. */
static int remember_content(Walk *w, PyObject *value, PyObject *answer, PyObject *content_before)
{
    const Reading *reading = reading_of(Py_TYPE(value));
    OWNED *equal_values = NULL, *content = NULL, *pins = NULL, *done = NULL;
    PyObject *token = PyTuple_CheckExact(answer) ? PyTuple_GetItem(answer, 0) : answer;
    if (reading == NULL || token == NULL || content_before == Py_None || (token != answer && PyTuple_Size(answer) == 1))
        return PyErr_Occurred() ? FAILED : DONE;
    equal_values = PyList_New(0);
    NEED(equal_values);
    int outcome = content_of(w, value, reading, 1, equal_values, &content, &pins);
    if (outcome != DONE)
        return outcome == UNHANDLED ? DONE : outcome;
    int is_same = PyObject_RichCompareBool(content, content_before, Py_EQ);
    if (is_same != 1)
        return is_same < 0 ? FAILED : DONE;
    done = PyObject_CallFunctionObjArgs(remember, token, content, answer == token ? Py_False : Py_True, equal_values, pins, NULL);
    return done == NULL ? FAILED : DONE;
}

/* Appends the contents of values as far as they have any, and None for the others. The pins of each content follow it, since
   the addresses in it must stay those of the same objects. */
static int contents_of(Walk *w, PyObject *values, PyObject *value_contents)
{
    for (Py_ssize_t i = 0; i < PyList_Size(values); i++) {
        OWNED *value = Py_NewRef(PyList_GetItem(values, i));
        const Reading *reading = w->flags & EXACT ? NULL : reading_of(Py_TYPE(value));
        OWNED *equal_values = PyList_New(0), *content = NULL, *pins = NULL;
        NEED(equal_values);
        int is_written = reading != NULL && reading->shape < READ_EQUAL;
        int outcome = is_written ? content_of(w, value, reading, 1, equal_values, &content, &pins) : UNHANDLED;
        if (outcome == FAILED)
            return FAILED;
        TRY(PyList_Append(value_contents, outcome == DONE ? content : Py_None));
        TRY(PyList_Append(value_contents, outcome == DONE ? pins : Py_None));
    }
    return DONE;
}

/* Asks Python about the pins with these numbers, and applies the answers. With `must_be_settled`, UNHANDLED if a value may
   change. */
static int ask_about_pins(Walk *w, PyObject *values, PyObject *numbers, int must_be_settled)
{
    OWNED *answers = NULL, *value_contents = must_be_settled ? NULL : PyList_New(0);
    if (w->settled == NULL && (w->settled = PyList_New(0)) == NULL)
        return FAILED;
    if (!must_be_settled) {
        NEED(value_contents);
        TRY(contents_of(w, values, value_contents));
    }
    answers = PyObject_CallFunctionObjArgs(settle, values, w->flags & EXACT ? Py_True : Py_False, NULL);
    for (Py_ssize_t i = 0; answers != NULL && i < PyList_Size(numbers); i++) {
        OWNED *answer = Py_XNewRef(PyList_GetItem(answers, i)), *value = Py_NewRef(PyList_GetItem(values, i));
        NEED(answer);
        if (must_be_settled && !PyTuple_CheckExact(answer)) {
            /* Without this, Python would be asked about the part and the whole at each walk. */
            OWNED *no_names = PyTuple_New(0);
            NEED(no_names);
            TRY(enter_reading((PyObject *)Py_TYPE(value), READ_NONE, no_names, 0));
            return UNHANDLED;
        }
        TRY(settle_pin(w, PyLong_AsSize_t(PyList_GetItem(numbers, i)), answer));
        if (!must_be_settled)
            TRY(remember_content(w, value, answer, PyList_GetItem(value_contents, 2 * i)));
    }
    return answers == NULL ? FAILED : DONE;
}

/* Replaces addresses in the key by tokens where necessary. Python is asked once, about all pins without facts, and only after the
   walk, since it may run code of users. */
static int settle_pins(Walk *w)
{
    OWNED *values = NULL, *numbers = NULL;
    for (size_t i = 0; i < w->pins.size; i++) {
        int outcome = settle_pin_by_facts(w, i);
        if (outcome == UNHANDLED)
            outcome = settle_pin_by_content(w, i);
        if (outcome != UNHANDLED) {
            TRY(outcome);
            continue;
        }
        if (values == NULL && ((values = PyList_New(0)) == NULL || (numbers = PyList_New(0)) == NULL))
            return FAILED;
        TRY(PyList_Append(values, w->pins.items[i]));
        TRY(append_new(numbers, PyLong_FromSize_t(i)));
    }
    return values == NULL ? DONE : ask_about_pins(w, values, numbers, 0);
}

static int emit_header(Walk *w, int64_t base)
{
    int64_t header[2] = {w->flags | w->convention << 8, base};
    return emit(w, 'B', header, sizeof header);
}

/* Walks a whole tree and completes its key. */
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
    PyMem_Free(w->leaves_so_far.items);
    PyMem_Free(w->children.items);
    PyMem_Free(w->pins.items);
    PyMem_Free(w->places);
    PyMem_Free(w->frames);
    PyMem_Free(w->names);
    PyMem_Free(w->key);
}

/* Releases what a walk holds, and keeps its memory for the next walk unless it is large. */
void end_walk(Walk *w)
{
    /* Each of these may run finalisers. None can reach this walk. */
    Py_CLEAR(w->leaves);
    Py_CLEAR(w->settled);
    pop_to(&w->leaves_so_far, 0);
    pop_to(&w->children, 0);
    pop_to(&w->pins, 0);
    /* Only these sizes are checked: there are no more names than children, and a pin has several bytes in the key. */
    if (spare.key == NULL && w->key_room <= MAX_SPARE && w->children.room * sizeof(PyObject *) <= MAX_SPARE &&
        w->leaves_so_far.room * sizeof(PyObject *) <= MAX_SPARE && w->frames_room * sizeof(Frame) <= MAX_SPARE) {
        spare = *w;
        spare.tags = NULL, spare.depth = 0, spare.key_size = 0;
        return;
    }
    free_memory(w);
}

/* Undoes a walk that has failed. An `Exception` is dropped, since the reference walks next, and raises it with its paths:
   UNHANDLED. Any other error, such as `KeyboardInterrupt`, is passed on. */
static int undo_walk(Walk *w, Py_ssize_t base)
{
    PyObject *type, *value, *traceback;
    Tags *tags = w->tags;
    /* A node that was opened as a value may have had a number as an object. */
    for (; w->depth > 0; w->depth--) {
        Frame *frame = &w->frames[w->depth - 1];
        if (frame->is_open)
            reset_value(&tags->numbers, frame->object, frame->old_number);
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (type != NULL && !PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        forget(tags, base);
        PyErr_Restore(type, value, traceback);
        return FAILED;
    }
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    return forget(tags, base) < 0 ? FAILED : UNHANDLED;
}

/* The parts of a `Latest`: the last key of calls of one pattern, its entry, and the value of `epoch_of_keys` then. A call with
   the same arguments as the one before finds its structure by one comparison of bytes, without hashing the key. */
enum { KEY_OF, ENTRY_OF, EPOCH_OF };

/* Replaced by a new object when pinned values may die although their structure lives, so that no `Latest` is valid any more. */
static PyObject *epoch_of_keys;

static PyType_Slot latest_slots[] = {
    {Py_tp_new, parts_new}, PARTS, {Py_tp_doc, "The last key of calls of one pattern."}, {0, NULL},
};

/* Returns the entry of the last call of this pattern, if its key is this walk's; a new reference. */
static PyObject *entry_of_latest(PyObject *latest, const Walk *w)
{
    PyObject **parts = latest == NULL ? NULL : parts_of(latest);
    int is_same = parts != NULL && parts[EPOCH_OF] == epoch_of_keys && (size_t)PyBytes_Size(parts[KEY_OF]) == w->key_size &&
                  memcmp(PyBytes_AsString(parts[KEY_OF]), w->key, w->key_size) == 0;
    return is_same ? Py_NewRef(parts[ENTRY_OF]) : NULL;
}

/* Makes each `Latest` invalid. Python calls this before it lets pinned values die whose structures live on. */
static PyObject *native_forget_keys(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *new_epoch = PyList_New(0);
    if (new_epoch == NULL)
        return NULL;
    replace(&epoch_of_keys, new_epoch);
    return none();
}

/* Looks up the structure of a walk's key, a new reference; NULL if there is none, or on an error. */
static PyObject *structure_of_key(const Walk *w, PyObject *structures, PyObject *latest)
{
    OWNED *latest_entry = entry_of_latest(latest, w), *key = NULL, *entry = NULL;
    PyObject *structure = referent(latest_entry);
    if (structure != NULL)
        return structure;
    key = PyBytes_FromStringAndSize(w->key, (Py_ssize_t)w->key_size);
    /* Held, since the next calls may collect garbage, and with it the structure and its entry. */
    entry = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(structures, key));
    structure = referent(entry);
    PyObject *parts[3] = {key, entry, epoch_of_keys};
    for (int i = 0; structure != NULL && latest != NULL && i < 3; i++)
        replace(&parts_of(latest)[i], Py_NewRef(parts[i]));
    return structure;
}

/* Makes the list of the leaves, and takes over their references. */
static PyObject *list_of_leaves(Walk *w)
{
    Pins *leaves = &w->leaves_so_far;
    PyObject *list = PyList_New((Py_ssize_t)leaves->size);
    for (size_t i = 0; list != NULL && i < leaves->size; i++)
        PyList_SetItem(list, (Py_ssize_t)i, leaves->items[i]);
    if (list != NULL)
        leaves->size = 0;
    return list;
}

/* Walks a tree and looks up the structure of its key. UNHANDLED if Python has to walk; FAILED with an error that is no
   `Exception`. */
int walk_tree(Walk *w, PyObject *tree, PyObject *structures, PyObject *latest, PyObject **structure)
{
    Py_ssize_t base = PyList_Size(w->tags->objects);
    w->expected = base;
    *structure = NULL;
    if (walk_all(w, tree) == DONE && (w->leaves = list_of_leaves(w)) != NULL)
        *structure = structure_of_key(w, structures, latest);
    return *structure != NULL ? DONE : undo_walk(w, base);
}

/* Walks a tree for Python: (tree, tags, rules, entries) -> (leaves, structure), or None if Python has to walk. */
static PyObject *native_walk(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tree, *structures, *result = NULL;
    OWNED *structure = NULL;
    Tags *tags;
    long rules;
    if (!PyArg_ParseTuple(args, "OO!lO!", &tree, tags_type, &tags, &rules, &PyDict_Type, &structures))
        return NULL;
    Walk w = new_walk(tags, rules);
    int outcome = walk_tree(&w, tree, structures, NULL, &structure);
    if (outcome != FAILED)
        result = outcome == UNHANDLED ? none() : PyTuple_Pack(2, w.leaves, structure);
    end_walk(&w);
    return result;
}

/* --- keys of trees that the reference has read --------------------------------------------------------------------- */

/* The reference keeps a log of its visits. For Pair(w, [w, 3]) the log, and the key that is written from it, are

       (type of Pair, 2, aux)   None   (type of list, 2, None)   0        (None, 0, 3)
       F <Pair> 0               L      N <list> 2                R 0      S i 3

   An entry is None for a traced leaf, a number for an object with that number, (NodeType, number of children, auxiliary data) for
   a node, and (None, 0, value) for a static leaf. */

/* Returns the kind of a NodeType, and asks Python for it if no instance has come yet. NULL on an error. */
Kind *kind_described(PyObject *node_type)
{
    PyObject *cls = PyTuple_Check(node_type) ? PyTuple_GetItem(node_type, 0) : raise_null(PyExc_TypeError, "not a NodeType");
    Kind *kind = cls == NULL ? NULL : kind_of((PyTypeObject *)cls);
    if (kind != NULL || cls == NULL)
        return kind;
    OWNED *description = PyObject_CallFunctionObjArgs(describe, node_type, NULL);
    return description == NULL ? NULL : new_kind(description);
}

/* Writes the bytes of one visit. */
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
        return raise_failed(PyExc_TypeError, "nothing that is visited");
    if (!PyArg_ParseTuple(visited, "OnO", &node_type, &count, &value))
        return FAILED;
    if (node_type == Py_None) {
        TRY(emit_code(w, 'S'));
        return emit_static(w, value, 0);
    }
    Kind *kind = kind_described(node_type);
    return kind == NULL ? FAILED : emit_node(w, kind, count, value);
}

/* Returns the pinned objects, each followed by its class. A value whose class has changed since the key was written is followed by
   None. A pinned token is followed by `Token`. */
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
        OWNED *item = Py_NewRef(PyList_GetItem(visited, i));
        TRY(emit_visited(w, item));
    }
    return settle_pins(w);
}

/* Writes the key of a tree that the reference has walked: (log, rules, number of the first object) -> (key, pins,
   settled values). */
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

/* --- the functions that Python calls -------------------------------------------------------------------------------- */

static PyObject *native_learn(PyObject *Py_UNUSED(module), PyObject *description)
{
    return new_kind(description) == NULL ? NULL : none();
}

/* From now on, leaves the instances of a class to its registered functions. */
static PyObject *native_unlearn(PyObject *Py_UNUSED(module), PyObject *cls)
{
    Kind *kind = kind_of((PyTypeObject *)cls);
    if (kind != NULL && kind->shape >= DATACLASS)
        kind->shape = OTHER;
    return none();
}

/* Invalidates guesses, since a class was registered with this package but not with JAX. */
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
    spare_slots = NULL, spare_size = 0;
    return none();
}

static PyMethodDef methods[] = {
    {"learn", native_learn, METH_O, "Enters the description of a class."},
    {"learn_reading", native_learn_reading, METH_VARARGS, "(class, shape, names, is_watched): how static values are read."},
    {"unlearn", native_unlearn, METH_O, "Leaves the instances of a class to its registered functions."},
    {"look_again", native_look_again, METH_NOARGS, "Asks Python again about classes that were not registered."},
    {"walk", native_walk, METH_VARARGS,
     "(tree, tags, rules as a number, entries) -> (leaves, entries[key]()), or None if Python has to walk."},
    {"key_of", native_key_of, METH_VARARGS,
     "(log of a walk, rules as a number, number of the first object) -> (key, pins, values and tokens)."},
    {"hold", native_hold, METH_O, "(value, token, ...) -> an object that keeps these values, recognised by address meanwhile."},
    {"forget_keys", native_forget_keys, METH_NOARGS, "From now on, pinned values may die although their structures live."},
    {"drop_spares", native_drop_spares, METH_NOARGS, "Frees the memory that is kept for the next walk."},
    {NULL, NULL, 0, NULL},
};

static NewType types[] = {
    {&tags_type, "Tags", {"sharedtree._native.Tags", sizeof(Tags), 0, OBJECT, tags_slots}},
    {&latest_type, "Latest", {"sharedtree._native.Latest", sizeof(Parts), 0, OBJECT, latest_slots}},
    {&held_type, NULL, {"sharedtree._native.Held", sizeof(Parts), 0, INNER, held_slots}},
};

/* Adds the functions, classes and constants of this file to the module. */
int set_up_walk(PyObject *module)
{
    TRY(PyModule_AddFunctions(module, methods));
    TRY(add_types(module, types, sizeof types / sizeof *types));
    references = PyDict_New();
    NEED(references);
    epoch_of_keys = PyList_New(0);
    NEED(epoch_of_keys);
    static const char *const conventions[] = {"JAX", "EQUINOX", "ANY", "INHERITED", "IN_VARIABLE", "OUTSIDE"};
    for (int i = JAX; i <= OUTSIDE; i++)
        TRY(PyModule_AddIntConstant(module, conventions[i], i));
    static const char *const names[] = {"READ_FIELDS", "READ_ITEMS", "READ_MAPPING", "READ_BYTES", "READ_EQUAL", "READ_NONE"};
    for (int i = 0; i < NUM_READINGS; i++)
        TRY(PyModule_AddIntConstant(module, names[i], i));
    for (int i = 0; i < NUM_SHAPES; i++)
        TRY(PyModule_AddIntConstant(module, OPENERS[i].name, i));
    return DONE;
}
