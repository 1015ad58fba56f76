"""The rules that no single module can keep: size, names, direction of imports, public interface, what is forbidden."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCES = sorted((CHECKOUT / "src").rglob("*.py"))
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MOST_NAMES_AT_THE_TOP = 23
MEANINGLESS = {"utils", "util", "common", "helper", "helpers", "manager", "core", "base", "misc"}

# Written in parts, so that this file does not hold what it forbids.
# Alice is nobody: tests of what must not be published need somebody's paths.
MACHINE_PATHS = re.compile(r"(?<![\w.])/" + r"(?:work|root|home|Users)/(?!alice\b)")
REMOTE_CODE = re.compile(r"trust_remote" + r"_code\s*=\s*True")
# Loading these runs whatever code the file's author wanted.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load", "os.system"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function below its signature, without its docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def dotted(node: ast.expr) -> str:
    """``torch.load`` of the expression that names it; empty for anything that is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def files_of_the_project() -> list[Path]:
    """Everything git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [CHECKOUT / name for name in listed.split("\0") if name and (CHECKOUT / name).is_file()]


def texts_of_the_project() -> dict[str, str]:
    texts = {}
    for path in files_of_the_project():
        try:
            texts[str(path.relative_to(CHECKOUT))] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def test_a_file_can_be_read_in_one_sitting_and_a_function_fits_a_screen():
    assert len(SOURCES) >= 50
    assert sum(len(functions_of(path)) for path in SOURCES) >= 200
    long = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in long.items() if lines > LONGEST_FILE} == {}
    long = [f"{path}: {f.name}" for path in SOURCES for f in functions_of(path) if body_lines(f) > LONGEST_FUNCTION]
    assert long == []


def test_a_module_says_what_it_is_in_a_sentence():
    """That it says something, ruff checks (D100, D104)."""
    firsts = {path: (ast.get_docstring(tree_of(path)) or "").partition("\n")[0].rstrip() for path in SOURCES}
    assert [str(path) for path, first in firsts.items() if not first.endswith((".", "?", "!", ":"))] == []


def test_names_mean_something_and_the_rooms_can_be_seen_at_a_glance():
    assert [str(path) for path in SOURCES if {path.stem, path.parent.name} & MEANINGLESS] == []
    names = {path.stem for path in (CHECKOUT / "src" / "perl").iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms = names - {"__init__", "__main__", "__pycache__"}
    assert 15 <= len(rooms) <= MOST_NAMES_AT_THE_TOP, sorted(rooms)


def test_no_module_hides_a_public_function():
    """Importing ``perl.train`` would replace the function of that name in the package."""
    import perl

    modules = {module.name for module in pkgutil.iter_modules(perl.__path__)}
    public_modules = {name for name in perl.__all__ if inspect.ismodule(getattr(perl, name))}
    assert public_modules == {"callbacks", "rewards"}
    assert modules & set(perl.__all__) == public_modules
    packages = [path.parent for path in SOURCES if path.name == "__init__.py"]
    assert len(packages) >= 8
    for folder in packages:
        name = ".".join(folder.relative_to(CHECKOUT / "src").parts)
        package = importlib.import_module(name)
        inside = [module.name for module in pkgutil.iter_modules([str(folder)])]
        hidden = [m for m in inside if hasattr(package, m) and not inspect.ismodule(getattr(package, m))]
        assert hidden == [], name


def test_the_public_names():
    import perl

    functions = ["callbacks", "compare", "evaluate", "new_recipe", "plan", "push", "report", "rewards"]
    functions += ["spectrum", "study", "train"]
    assert sorted(perl.__all__) == ["PeftGRPOTrainer", "PeftRLConfig", "Recipe", "Run", *functions]
    assert set(perl.__all__) <= set(dir(perl))
    assert all(getattr(perl, name) is not None for name in perl.__all__)
    with pytest.raises(AttributeError, match="'perl' has no attribute 'trian'"):
        _ = perl.trian


def test_the_signatures_of_train_and_the_rewards():
    import perl

    first = perl.train
    parameters = inspect.signature(perl.train).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "recipe": inspect.Parameter.empty,
        "overrides": (),
        "output_dir": None,
        "resume_from": None,
    }
    assert inspect.signature(perl.train).return_annotation is perl.Run
    # Importing what trains replaces no function of the package.
    importlib.import_module("perl.cli.train")
    importlib.import_module("perl.training.stages")
    assert perl.train is first
    assert list(inspect.signature(perl.rewards.check).parameters)[:2] == ["gold", "completion"]
    parameters = inspect.signature(perl.rewards.accuracy_reward).parameters
    assert list(parameters)[:2] == ["completions", "solution"]
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_the_trainer_takes_what_trls_takes_in_the_same_order():
    from trl import GRPOTrainer

    import perl

    trls = list(inspect.signature(GRPOTrainer.__init__).parameters.values())
    ours = list(inspect.signature(perl.PeftGRPOTrainer.__init__).parameters.values())
    assert len(trls) > 10
    assert [p.name for p in ours[: len(trls)]] == [p.name for p in trls]
    assert [p.kind for p in ours[: len(trls)]] == [p.kind for p in trls]
    required = [p.name for p in ours if p.default is p.empty]
    assert set(required) <= {p.name for p in trls if p.default is p.empty}
    assert issubclass(perl.PeftGRPOTrainer, GRPOTrainer)


def test_no_file_names_a_place_on_somebodys_machine_or_runs_code_from_a_models_repository():
    texts = texts_of_the_project()
    assert len(texts) >= 70
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    found += [name for name, text in texts.items() if REMOTE_CODE.search(text)]  # also over two lines
    assert found == []


def test_the_search_for_what_is_forbidden_finds_it():
    assert MACHINE_PATHS.search("see /" + "home/me/x")
    assert MACHINE_PATHS.search('"/' + 'root/.cache"')
    assert not MACHINE_PATHS.search("https://example.org/work/item")
    assert REMOTE_CODE.search("f(trust_remote" + "_code = True)")
    code = "import pickle\nfrom dill import loads\ntorch.load(x)\nyaml.load(t)\nyaml.load(t, Loader=L)\neval('1')\n"
    code += "model.eval()\ntorch.load(x, weights_only=True)\ntorch.load(x, weights_only=False)"
    expected = ["pickle", "dill", "torch.load", "yaml.load", "eval", "torch.load"]
    assert unsafe_in(ast.parse(code), safe_loaders={"L"}) == expected


def test_nothing_that_the_package_or_an_example_reads_can_run_code():
    examples = sorted((CHECKOUT / "examples").rglob("*.py"))
    assert examples
    trees = {path: tree_of(path) for path in [*SOURCES, *examples]}
    assert {str(p): u for p, tree in trees.items() if (u := unsafe_in(tree, safe_loaders=safe_loaders_of(tree)))} == {}


def safe_loaders_of(tree: ast.Module) -> set[str]:
    """Classes of a module that extend yaml's safe loader."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {c.name for c in classes if any(dotted(b) in ("yaml.SafeLoader", "yaml.CSafeLoader") for b in c.bases)}


def unsafe_in(tree: ast.Module, safe_loaders: set[str]) -> list[str]:
    """Imports and calls that run code from what they read."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call) and is_unsafe(node, safe_loaders):
            found.append(dotted(node.func))
    return found


def is_unsafe(call: ast.Call, safe_loaders: set[str]) -> bool:
    name = dotted(call.func)
    if name in ("yaml.load", "yaml.load_all"):
        loaders = [dotted(keyword.value) for keyword in call.keywords if keyword.arg == "Loader"]
        return not loaders or loaders[0] not in safe_loaders | {"yaml.SafeLoader", "yaml.CSafeLoader"}
    if name == "torch.load":  # which then makes tensors and what is allowed by name, and nothing else
        weights_only = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
        return not (weights_only and isinstance(weights_only[0], ast.Constant) and weights_only[0].value is True)
    return name in UNSAFE_CALLS
