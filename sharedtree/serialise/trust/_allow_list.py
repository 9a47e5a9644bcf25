"""Names that every file may use without being trusted: harmless functions, and classes that are data.

There is a row for each library. No function in it reads or writes a file, calls back to Python, takes a function to
evaluate, or changes a setting. Some libraries have a file in `sharedtree/libraries/`, which has their row. The rows of
all others are here. `core/_node_types.NamesInFiles` explains the fields of a row.
"""

from ...core._node_types import LIBRARIES, NamesInFiles

# Names of functions that both `numpy` and `jax.numpy` have.
_ELEMENTWISE = """
    abs absolute acos acosh add angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh
    bitwise_and bitwise_count bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    cbrt ceil clip conj conjugate copysign cos cosh deg2rad degrees divide divmod equal exp exp2 expm1 fabs float_power
    floor floor_divide fmax fmin fmod frexp gcd greater greater_equal heaviside hypot i0 imag invert isfinite isinf
    isnan isneginf isposinf lcm ldexp left_shift less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor maximum minimum mod modf multiply nan_to_num negative nextafter not_equal
    positive pow power rad2deg radians real reciprocal remainder right_shift rint round sign signbit sin sinc sinh
    spacing sqrt square subtract tan tanh true_divide trunc where
"""

# For libraries in which all classes of these kinds are harmless data.
_DATA = ("module", "namedtuple", "placeholder", "enum")

_ROWS = (
    # The standard library: these names and nothing else.
    NamesInFiles(
        classes="""
            builtins: bool int float complex str bytes bytearray tuple list dict set frozenset object slice range
            collections: OrderedDict defaultdict deque Counter
            functools: partial
            typing: Any
            pathlib: Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath
            types: NoneType EllipsisType NotImplementedType
        """,
    ),
    NamesInFiles(
        "numpy ml_dtypes",
        only_names=True,
        classes="""
            numpy: ndarray generic number integer signedinteger unsignedinteger inexact floating complexfloating
                flexible character bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 intp uintp intc uintc short
                ushort longlong ulonglong byte ubyte float16 float32 float64 longdouble complex64 complex128 clongdouble
                half single double csingle cdouble datetime64 timedelta64 str_ bytes_ dtype bool_
            ml_dtypes: bfloat16 int1 uint1 int2 uint2 int4 uint4 float4_e2m1fn float6_e2m3fn float6_e3m2fn float8_e3m4
                float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
        """,
        functions=f"numpy: {_ELEMENTWISE} matmul matvec vecdot vecmat",
    ),
    NamesInFiles(
        "jax jaxlib",
        instances="""
            jax.lax: AccuracyMode ConvDimensionNumbers DotAlgorithm DotAlgorithmPreset GatherDimensionNumbers
                GatherScatterMode Precision RandomAlgorithm RoundingMethod ScatterDimensionNumbers
            jax._src.numpy.linalg: EigResult EighResult QRResult SVDResult SlogdetResult
            jax.sharding: AxisType
        """,
        classes="""
            jax: Array ShapeDtypeStruct
            jax.numpy: ndarray bool_ int_ uint float_ complex_ int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16
                uint32 uint64 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz
                float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float16 bfloat16 float32 float64 half single double csingle
                cdouble complex64 complex128 generic number integer signedinteger unsignedinteger inexact floating
                complexfloating flexible character
        """,
        functions=f"""
            jax.nn: celu dot_product_attention elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity
                leaky_relu log1mexp log_sigmoid log_softmax logmeanexp logsumexp mish one_hot relu relu6 selu sigmoid
                silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize swish tanh
            jax.nn.initializers: constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform
                kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal truncated_normal
                uniform variance_scaling xavier_normal xavier_uniform zeros
            jax.numpy: {_ELEMENTWISE} all allclose amax amin any arange argmax argmin argsort array asarray average
                broadcast_to concat concatenate convolve correlate count_nonzero cross cumprod cumsum diag diagonal diff
                dot einsum expand_dims eye flip full full_like identity inner interp isclose kron linspace matmul
                matrix_transpose max mean median min moveaxis nanmax nanmean nanmin nansum ndim ones ones_like outer pad
                permute_dims prod quantile ravel repeat reshape roll shape size sort split squeeze stack std sum
                swapaxes take tensordot tile trace transpose tril triu unwrap vander var vdot vecdot zeros zeros_like
            jax.numpy.linalg: cholesky cond cross det diagonal eig eigh eigvals eigvalsh inv lstsq matmul matrix_norm
                matrix_power matrix_rank matrix_transpose multi_dot norm outer pinv qr slogdet solve svd svdvals
                tensordot trace vecdot vector_norm
            jax.numpy.fft: fft fft2 fftfreq fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft
                rfft2 rfftfreq rfftn
            jax.lax: abs acos acosh add argmax argmin asin asinh atan atan2 atanh batch_matmul bessel_i0e bessel_i1e
                betainc bitwise_and bitwise_not bitwise_or bitwise_xor broadcast cbrt ceil clamp clz complex concatenate
                conj conv conv_general_dilated conv_transpose convert_element_type cos cosh cumlogsumexp cummax cummin
                cumprod cumsum digamma div dot dot_general eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt
                igamma igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg
                nextafter pad polygamma population_count pow real reciprocal reduce_max reduce_min reduce_prod
                reduce_sum rem reshape rev round rsqrt select shift_left shift_right_arithmetic shift_right_logical sign
                sin sinh sqrt square squeeze stop_gradient sub tan tanh top_k transpose zeta
            jax.random: ball bernoulli beta binomial bits categorical cauchy chisquare choice dirichlet
                double_sided_maxwell exponential gamma generalized_normal geometric gumbel laplace loggamma logistic
                lognormal maxwell multinomial multivariate_normal normal orthogonal pareto permutation poisson
                rademacher randint rayleigh t triangular truncated_normal uniform wald weibull_min
            jax.scipy.special: bernoulli bessel_jn beta betainc betaln boxcox boxcox1p comb dawsn digamma entr erf erfc
                erfcinv erfcx erfinv exp1 expi expit expn factorial fresnel gamma gammainc gammaincc gammaln gammasgn
                hyp1f1 hyp2f1 i0 i0e i1 i1e kl_div log_ndtr log_softmax loggamma logit logsumexp multigammaln ndtr ndtri
                owens_t poch polygamma rel_entr sici softmax spence sph_harm_y wofz xlog1py xlogy zeta
        """,
    ),
    NamesInFiles("chex"),
    NamesInFiles(
        "lineax",
        kinds=_DATA,
        has_methods=True,
        functions="""
            lineax: max_norm rms_norm two_norm diagonal_tag lower_triangular_tag negative_semidefinite_tag
                positive_semidefinite_tag symmetric_tag tridiagonal_tag unit_diagonal_tag upper_triangular_tag
            lineax.internal: max_norm rms_norm two_norm
            lineax._norm: max_norm rms_norm two_norm
        """,
        tokens="""
            lineax._solve: _cholesky_token _diagonal_token _lu_token _qr_token _svd_token _triangular_token
                _tridiagonal_token _well_posed_diagonal_token
        """,
    ),
    NamesInFiles(
        "optimistix",
        kinds=_DATA,
        has_methods=True,
        functions="""
            optimistix: dai_yuan fletcher_reeves hestenes_stiefel max_norm polak_ribiere rms_norm two_norm
            optimistix._misc: _default_no_verbose default_verbose
        """,
    ),
    NamesInFiles(
        "diffrax",
        kinds=_DATA,
        has_methods=True,
        instances="diffrax: ButcherTableau StochasticButcherTableau",
        functions="""
            diffrax: adjoint_rms_seminorm is_event is_okay is_successful linear_interpolation rectilinear_interpolation
            diffrax._saveat: save_y
            diffrax._integrate: use_stepsize_tol
            diffrax._root_finder: use_stepsize_tol
            diffrax._root_finder._with_tols: use_stepsize_tol
        """,
    ),
    # Equinox, Flax, optax, treex, treeo, sharedtree and the rest with a file in `libraries/`.
    *[library.names for library in LIBRARIES],
)


def _names(table: str) -> frozenset[str]:
    """Returns the names in a table.

    `"jax: Array jit"` gives `jax:Array` and `jax:jit`. Words before the first module are returned as they are: a table
    of packages, `"jax jaxlib"`, gives `jax` and `jaxlib`.
    """
    module, names = "", list[str]()
    for word in table.split():
        if word.endswith(":"):
            module = word
        else:
            names.append(module + word)
    return frozenset(names)


def _names_of_all_rows(field: str) -> frozenset[str]:
    """Returns the names that all rows together have in one of their fields."""
    return frozenset().union(*[_names(getattr(row, field)) for row in _ROWS])


# ---- The allow-list: the rows as tables ----

ROW_OF = {package: row for row in _ROWS for package in _names(row.packages)}
"""Top-level package → what every file may name of it."""

NAMES_ONLY = frozenset([package for package, row in ROW_OF.items() if row.only_names])
"""Top-level packages of which only names in the list are allowed, even if the user trusts the package."""

PACKAGES = frozenset(ROW_OF) - NAMES_ONLY
"""Top-level packages of known libraries, except those in `NAMES_ONLY`. If the user trusts one, more is allowed."""

STATE = _names_of_all_rows("state")
"""Classes whose instances hold state, not parameters. Allows nothing: tables about a file use it for a column."""

OPTIMIZER_STATE = _names_of_all_rows("optimizer_state")
"""The same for the state of optimizers."""

STATE_ENTRIES = tuple([row.state_entry for row in _ROWS if row.state_entry])
"""For each library that has one: the entry of an instance that says which of its attributes are state."""

INSTANCES = _names_of_all_rows("instances")
"""Classes of which a file may hold instances, in addition to the kinds of classes that a row allows as a whole."""

CLASSES = _names_of_all_rows("classes")
"""Classes that a file may name as values. That does not allow instances of them."""

TOKENS = _names_of_all_rows("tokens")
"""Objects that mark a choice, and that their library compares by identity."""

FUNCTIONS = _names_of_all_rows("functions") | TOKENS
"""Functions and tokens that every file may name."""

IF_TRUSTED = _names_of_all_rows("if_trusted")
"""Classes that are allowed only if the user trusts their library."""

KEPT_BACK = _names_of_all_rows("kept_back")
"""Names of classes, and modules with all their classes, that are allowed only if the user trusts the library."""
