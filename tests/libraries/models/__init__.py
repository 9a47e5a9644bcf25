"""A model of each library's own kind, in which one array stands at two places.

Each file has `make(w, b)`, the model with `w` at two places; `loss(model, x)`, a number; `places(model)`, what should
be one object, twice; and `bias(model)`, its `b`. Those whose objects can be changed have `change(model, b)`. `w` is
float32[3, 3], `b` and `x` are float32[3]; what else can be trained is in `OTHERS` and goes to `make`, too. `TRUSTED` is
what `st.load` has to be told, `POLICY` what the model needs.
"""
