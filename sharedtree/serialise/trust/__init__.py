"""Names: the name by which a class or function is found again, and the names a file may have.

This folder proves the name of an object by looking it up, and judges names of files before anything is looked up.
Loading imports nothing (but our own lazy modules), never runs `getattr` on a module, and calls nothing by a file's
word.

    _allow_list.py          what every file may name
    _buildable_classes.py   the seven kinds of classes whose instances can be rebuilt without calling the class
    _public_names.py        object → name; which module the user has to import
    _trusted_names.py       name → object, in three steps: the text, the look-up, the judgement of the object
    _resolved_names.py      all names of a file at once, and the errors that say what to do
"""
