"""Names: what a class or function is called so that it is found again, and which of them a file may ask for.

In come objects, whose names are proved by looking them up, or names, which are judged before anything is imported; out
come names, or objects and reasons. It never imports what is not on the allow-list or not where things are installed,
never runs `getattr` on a module, and never calls anything by a file's word.
"""
