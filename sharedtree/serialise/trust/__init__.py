"""Names. Keeps the promise that loading imports nothing and hands out only what is allowed: `_trusted_names.py`.

When a file is written, this folder finds the name of an object and proves it by looking it up. When a file is loaded,
it judges the names in the file before anything is looked up. Loading imports nothing except our own lazy modules, reads
the dictionaries of modules and classes (`core/_class_attributes.py`), and makes no instance of a class to judge it.

    _allow_list.py          what every file may name, without being trusted
    _buildable_classes.py   the seven kinds of classes whose instances can be rebuilt without calling the class
    _public_names.py        object → name; advice on which module the user has to import
    _trusted_names.py       name → object, in three steps: the text is judged, looked up, the object judged
    _resolved_names.py      all names of a file at once, and the errors that say what to do
"""
