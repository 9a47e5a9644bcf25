import lineax as lx

TRUSTED = []


def make(w, b):
    once = lx.MatrixLinearOperator(w)
    return once @ once + lx.DiagonalLinearOperator(b)


def loss(operator, x):
    return (lx.linear_solve(operator, x).value ** 2).sum()


def places(operator):
    return operator.operator1.operator1, operator.operator1.operator2


def bias(operator):
    return operator.operator2.diagonal
