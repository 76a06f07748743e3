"""The size and habit rules of CONTRIBUTING.md, each with a sample that breaks it.

A rule is a function from a parsed file to its offences; `RULES` lists them, `BROKEN` proves that each one bites.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("halfbyte", "bench", "examples", "tests")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_PARAMETERS = 7
MAX_KERNEL_PARAMETERS = 20
MAX_FORMAT_QUESTIONS = 30
HOME_OF_NUMBERS = "halfbyte/formats.py"
HOME_OF_THE_LAUNCHER = "halfbyte/train/launch.py"  # what torchrun says is no configuration
NUMBERS_WITH_ONE_HOME = {448, 2688, 57344}
LONG_SIGNATURES = {
    "quantize_row_col",  # both orientations of what quantize takes
    "grouped_quantize_row_col",
    "both_sides",
    "linear",  # every tensor of a layer's contract: x, w, bias, shared amax, main_grad
    "linear_shared",
    "grouped_linear",
}
OPERATIONS = {  # defined once in each room that has them: what a user calls, the op, the specification, the kernels
    "activation",
    "activation_backward",
    "add_norm",
    "amax_with_product",
    "column_outliers",
    "decode",
    "dequantize",
    "error_sums",
    "gemm_nt",
    "grouped_dequantize",
    "grouped_gemm_nt",
    "grouped_gemm_nt_batch_invariant",
    "grouped_quantize_row_col",
    "grouped_token_sum",
    "logit_gradient_",
    "logit_peak",
    "logit_sums",
    "norm",
    "norm_backward",
    "operand_noise",
    "operand_sums",
    "quantize",
    "quantize_residual",
    "quantize_row_col",
    "quantize_with_sum",
    "residual_of",
    "row_col_amax",
    "square_sum",
    "swizzle",  # layout.py specifies where bytes lie
    "token_mean",
    "token_sum",
    "transpose",
    "unswizzle",
}
TWINS = {"reference", "kernels"}  # a specification and its kernel have one name
DEFINED_AGAIN = {
    "main",  # where a command starts
    "post_all_gather_processing",  # Megatron's and TransformerEngine's name
}
NEGATIVE_NAME = re.compile(r"^(disable|no|not|without|skip)_")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    path: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]


@cache
def read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path.relative_to(ROOT).as_posix(), text, ast.parse(text))


def decorators(function: Function) -> list[str]:
    """Return the decorators' names, without arguments."""
    return [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]


def is_kernel(function: Function) -> bool:
    """Whether it is device code: of `triton.jit`, or of `jit` of kernels/launch.py if it is launched."""
    return any(name.split(".")[-1] == "jit" for name in decorators(function))


def parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls", "ctx")]


def file_size(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{lines} lines, at most {MAX_FILE_LINES}: split it along its layers"


def function_size(source: Source) -> Iterator[str]:
    for function in source.functions:
        lines = function.end_lineno - function.lineno + 1
        limit = MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES
        if lines > limit:
            yield f"{function.name}: {lines} lines, at most {limit}"


def op_bodies(source: Source) -> set[str]:
    """Return the functions that ops are defined with: they take what the schema says."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "op"]
    return {ast.unparse(argument) for call in calls for argument in call.args[1:]}


def parameter_count(source: Source) -> Iterator[str]:
    bodies = op_bodies(source)
    for function in source.functions:
        if function.name in bodies:
            continue
        count = len(parameters(function))
        if count > MAX_PARAMETERS and not is_kernel(function) and function.name not in LONG_SIGNATURES:
            yield f"{function.name}: {count} parameters, at most {MAX_PARAMETERS}: pass a value that groups them"


def kernel_heads(source: Source) -> Iterator[str]:
    for function in filter(is_kernel, source.functions):
        count = len(parameters(function))
        if count > MAX_KERNEL_PARAMETERS:
            yield f"{function.name}: {count} parameters, at most {MAX_KERNEL_PARAMETERS}: pass NamedTuples of them"


def parts_by_number(source: Source) -> Iterator[str]:
    """Device code says what it takes of a tuple; [0] is what all of a tuple of equal things are like."""
    for function in filter(is_kernel, source.functions):
        for node in ast.walk(function):
            is_part = isinstance(node, ast.Subscript) and not ast.unparse(node.value).endswith(".shape")
            if is_part and re.fullmatch(r"-?\d+", ast.unparse(node.slice)) and ast.unparse(node.slice) != "0":
                yield f"line {node.lineno}: {ast.unparse(node)}: name the parts of a NamedTuple, or unpack the tuple"


def negative_names(source: Source) -> Iterator[str]:
    for function in source.functions:
        for name in filter(NEGATIVE_NAME.match, parameters(function)):
            yield f"{function.name}({name}): say what it does, not what it leaves out"


def environment(source: Source) -> Iterator[str]:
    if source.path == HOME_OF_THE_LAUNCHER:
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
            yield f"line {node.lineno}: {ast.unparse(node)}: configuration is an argument"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for name in {alias.name for alias in node.names} & {"environ", "getenv"}:
                yield f"line {node.lineno}: from os import {name}: configuration is an argument"


def passed_through(source: Source) -> Iterator[str]:
    for function in source.functions:
        if function.args.kwarg is None:
            continue
        name = function.args.kwarg.arg
        for node in ast.walk(function):
            if isinstance(node, ast.keyword) and node.arg is None and ast.unparse(node.value) == name:
                yield f"{function.name}: passes **{name} on: name the arguments"
                break


def scattered_numbers(source: Source) -> Iterator[str]:
    if source.path == HOME_OF_NUMBERS:
        return
    for node in source.nodes:
        is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if is_number and node.value in NUMBERS_WITH_ONE_HOME:
            yield f"line {node.lineno}: {node.value}: import it from {HOME_OF_NUMBERS}"


def global_statements(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}: pass a value instead"


def docstrings(source: Source) -> Iterator[str]:
    if ast.get_docstring(source.tree) is None:
        yield "the module has no docstring"
    for node in source.tree.body:
        is_public = isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_")
        if isinstance(node, Function) and is_kernel(node):
            continue  # device code is not called from outside; its launcher says what it does
        if is_public and ast.get_docstring(node) is None:
            yield f"line {node.lineno}: public {node.name} has no docstring"


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"line {number}: {line.strip()}"
    for node in source.nodes:
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc):
            yield f"line {node.lineno}: {ast.unparse(node)}: refuse with a remedy, or build it"


def untold_launches(source: Source) -> Iterator[str]:
    """A launch that nobody is told of would be missing where an equal call is repeated."""
    for function in source.functions:
        named, kinds = function.name.endswith("_kernel"), decorators(function)
        if is_kernel(function) and named == ("triton.jit" in kinds):
            yield f"{function.name}: launched kernels are called …_kernel and are of launch.jit, others of triton.jit"
    for node in source.nodes:
        is_launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        if is_launch and "/kernels/" in source.path and not ast.unparse(node.func.value).endswith("_kernel"):
            yield f"line {node.lineno}: {ast.unparse(node.func.value)}[…](…): name what is launched …_kernel"


def launches(node: ast.AST) -> set[str]:
    """Return the kernels that are launched in a piece of code."""
    calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript))
    return {ast.unparse(call.value) for call in calls if ast.unparse(call.value).endswith("_kernel")}


def choices_outside_routes(source: Source) -> Iterator[str]:
    """A kernel is chosen in a table of a route file; elsewhere only what a choice says tells launches apart."""
    if "/kernels/" not in source.path or source.path.endswith("route.py"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("Candidate", "Choice"):
            yield f"line {node.lineno}: {ast.unparse(node.func)}(…): candidates and choices are made in route files"
    for function in source.functions:
        if re.search(r"^_?fits|_fits$|_problem$|^choose_(tile|kernel)$", function.name) and not is_kernel(function):
            yield f"{function.name}: a verifier belongs into the table of a route file"
        for node in [] if is_kernel(function) else ast.walk(function):
            if not isinstance(node, ast.If | ast.IfExp):
                continue
            parts = [node.body] if isinstance(node, ast.IfExp) else node.body
            inside = {name for part in parts for name in launches(part)}
            told = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} & {"choice", "plan", "how"}
            last = [] if isinstance(node, ast.IfExp) else node.body[-1:]
            ends = node.orelse or isinstance(last[0], ast.Return | ast.Continue)  # else one launch is added to another
            if inside and ends and launches(function) - inside and not told:
                yield f"{function.name}: `if {ast.unparse(node.test)}` chooses a kernel: ask a route file"


def room(path: str) -> str:
    """Return the folder of the package that a file is in, or its name."""
    return path.split("/")[1].removesuffix(".py")


def defined_again(sources: list[Source]) -> Iterator[str]:
    """A public function or class means one thing in the whole package."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.path)
    for name, paths in places.items():
        rooms = [room(path) for path in paths]
        once_a_room = len(set(rooms)) == len(rooms) and (name in OPERATIONS or TWINS.issuperset(rooms))
        if len(paths) > 1 and not once_a_room and name not in DEFINED_AGAIN:
            yield f"{name} is defined in {', '.join(paths)}: give each a name of its own"
        if len(paths) == 1 and name in DEFINED_AGAIN:
            yield f"{name} is defined once: take it off DEFINED_AGAIN"


def format_questions(sources: list[Source]) -> list[str]:
    """Return where a spec's class is asked for: mostly `spec.format` and its properties say what is wanted."""
    found = []
    for source in sources:
        for node in source.nodes:
            is_question = isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
            if is_question and re.search(r"\b(NVFP4|MXFP8)\b", ast.unparse(node.args[1])):
                found.append(f"{source.path}: line {node.lineno}")
    return found


Rule = Callable[[Source], Iterator[str]]

EVERYWHERE: tuple[Rule, ...] = (file_size, function_size)
IN_THE_PACKAGE: tuple[Rule, ...] = (
    parameter_count,
    kernel_heads,
    parts_by_number,
    negative_names,
    environment,
    passed_through,
    scattered_numbers,
    global_statements,
    docstrings,
    unfinished,
    untold_launches,
    choices_outside_routes,
)
RULES = (*EVERYWHERE, *IN_THE_PACKAGE)

BROKEN: dict[Rule, str] = {
    file_size: "x = 1\n" * (MAX_FILE_LINES + 1),
    function_size: "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
    parameter_count: "def f(a, b, c, d, *, e, f, g, h): ...\n",
    kernel_heads: f"@triton.jit\ndef f({', '.join(f'a{i}' for i in range(MAX_KERNEL_PARAMETERS + 1))}): ...\n",
    parts_by_number: "@jit\ndef copy_kernel(row):\n    tl.store(row[0], tl.load(row[1]))\n",
    negative_names: "def f(*, disable_rht=False): ...\n",
    environment: "import os\nif os.environ.get('FAST'): ...\n",
    passed_through: "def f(**kwargs):\n    return g(**kwargs)\n",
    scattered_numbers: "limit = 448.0\n",
    global_statements: "def f():\n    global state\n    state = 1\n",
    docstrings: '"""A module."""\ndef f(x):\n    return x\n',
    unfinished: "def f():\n    raise NotImplementedError\n",
    untold_launches: "@triton.jit\ndef copy_kernel(x_ptr): ...\n",
    choices_outside_routes: "def fits(x):\n    return True\n",
}


def sample(text: str, path: str = "halfbyte/sample.py") -> Source:
    return Source(path, text, ast.parse(text))


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def offences(source: Source, rules: tuple[Rule, ...]) -> list[str]:
    return [f"{source.path}: {text}" for rule in rules for text in rule(source)]


def test_files_and_functions_stay_small():
    found = [text for path in python_files(*FOLDERS) for text in offences(read(path), EVERYWHERE)]
    assert not found, "\n".join(found)


def test_package_keeps_the_habits():
    found = [text for path in python_files("halfbyte") for text in offences(read(path), IN_THE_PACKAGE)]
    assert not found, "\n".join(found)


def test_public_names_are_defined_once():
    found = list(defined_again([read(path) for path in python_files("halfbyte")]))
    assert not found, "\n".join(found)


def test_few_places_ask_for_the_class_of_a_spec():
    found = format_questions([read(path) for path in python_files("halfbyte")])
    assert 0 < len(found) <= MAX_FORMAT_QUESTIONS, "\n".join(found)
    assert format_questions([sample("isinstance(spec, NVFP4 | None)\nisinstance(spec, hb.MXFP8)\nisinstance(x, T)\n")])[
        1:
    ]


@pytest.mark.parametrize(
    "paths, name, bites",
    [
        (("kernels/a.py", "kernels/b.py"), "thing", True),
        (("train/a.py", "nn/b.py"), "Thing", True),
        (("reference/a.py", "kernels/b.py"), "thing", False),
        (("reference/a.py", "kernels/b.py", "kernels/c.py"), "thing", True),
        (("reference/a.py", "kernels/b.py", "ops/c.py"), "thing", True),
        (("reference/a.py", "kernels/b.py", "ops/c.py"), "quantize", False),
        (("kernels/a.py", "kernels/b.py", "ops/c.py"), "quantize", True),
        (("kernels/a.py", "train/b.py"), "main", False),
        (("kernels/a.py",), "main", True),
        (("train/a.py", "nn/b.py"), "_thing", False),
    ],
)
def test_names_that_mean_two_things(paths, name, bites):
    text = f"class {name}: ...\n" if name.istitle() else f"def {name}(): ...\n"
    assert bool(list(defined_again([sample(text, f"halfbyte/{path}") for path in paths]))) == bites


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_bites(rule):
    assert list(rule(sample(BROKEN[rule], "halfbyte/kernels/sample.py")))


CLEAN = '''"""A module that keeps every rule."""
import triton
from halfbyte.kernels.launch import jit


@triton.jit
def device_code(a, b, c, d, e, f, g, h, i):
    x = 1


@jit
def some_kernel(a, b, c, d, e, f, g, h, i):
    x = a[0] + b.shape[1] + c.part + d[e]


@jit(do_not_specialize=["a"])
def other_kernel(a, b, c, d, e, f, g, h, i):
    other_kernel[(1,)](a)


class Value:
    """A public class."""

    def __init__(self, a, b, c, d, e, f, g):
        self.a = dict(**a)


def _body(x, a, b, c, d, e, f, g, backend):
    return x


op("thing(Tensor x, int a, int b, int c, int d, int e, int f, int g, str backend) -> Tensor", _body, _body)


def add(x, **named):
    """A public function may receive keywords, as long as it does not hand them on."""
    return x + named["y"]
'''


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_clean_code_passes(rule):
    assert not list(rule(sample(CLEAN)))


@pytest.mark.parametrize("decorator", ["triton.jit", "jit", "launch.jit", "jit(do_not_specialize=['n'])"])
def test_kernels_have_their_own_limit(decorator):
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert not list(function_size(sample(f"@{decorator}\ndef f():\n" + body)))
    assert list(function_size(sample(f"@{decorator}\ndef f():\n" + body * 2)))


@pytest.mark.parametrize("decorator", ["jitter", "cache", "wraps(jit)", "lru_cache(maxsize=jit)"])
def test_what_only_sounds_like_a_kernel_is_none(decorator):
    source = sample(f"@{decorator}\ndef f(a, b, c, d, e, f, g, h):\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
    assert list(function_size(source)) and list(parameter_count(source)) and list(docstrings(source))


@pytest.mark.parametrize(
    "text",
    [
        "@triton.jit(noinline=True)\ndef copy_kernel(x): ...\n",
        "@jit\ndef copy(x): ...\n",
        "@jit(do_not_specialize=['n'])\ndef copy(x, n): ...\n",
        "def f(x):\n    copy[(1,)](x)\n",
        "def f(x):\n    module.copy[grid](x)\n",
    ],
)
def test_launch_that_would_not_be_told(text):
    assert list(untold_launches(sample(text, "halfbyte/kernels/sample.py")))


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    if x.shape[0] > 8:\n        a_kernel[(1,)](x)\n    else:\n        b_kernel[(1,)](x)\n",
        "def f(x):\n    if x.is_contiguous():\n        return a_kernel[(1,)](x)\n    return b_kernel[(1,)](x)\n",
        "def f(x):\n    return Choice('a_kernel', (1,))\n",
        "TABLE = (route.Candidate('a_kernel', None, None, ''),)\n",
        "def _strips_problem(x): ...\n",
    ],
)
def test_choice_outside_a_route_file(text):
    assert list(choices_outside_routes(sample(text, "halfbyte/kernels/sample.py")))
    assert not list(choices_outside_routes(sample(text, "halfbyte/kernels/sample_route.py")))


def test_launches_told_apart_by_a_choice():
    text = "def f(x, plan):\n    if plan.tma:\n        return a_kernel[(1,)](x)\n    return b_kernel[(1,)](x)\n"
    assert not list(choices_outside_routes(sample(text, "halfbyte/kernels/sample.py")))


def test_formats_may_name_its_numbers():
    assert not list(scattered_numbers(sample("limit = 448\n", HOME_OF_NUMBERS)))


@pytest.mark.parametrize("text", ["from os import environ\n", "import os\nos.getenv('A')\n"])
def test_environment_in_any_spelling(text):
    assert list(environment(sample(text)))


def test_comment_left_unfinished_is_caught():
    assert list(unfinished(sample("x = 1  # TO" + "DO: later\n")))
