"""Load objects of the user's modules by name: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cotune.errors import ConfigError
from cotune.near_names import did_you_mean, near_names


def load_object(
    field: str,
    spec: str,
    example: str,
    *,
    kind: str = "functions",
    is_wanted: Callable[[Any], bool] = inspect.isfunction,
    remedy: str = "",
) -> Any:
    """Import `package.module:name` or `path/to/file.py:name`, from sys.path or the current folder.

    A file in a package (a folder with `__init__.py`) is imported as a module of the package, from the folder that holds
    the package. Raises ConfigError for `field` if the module, file or name does not exist or cannot be imported. The
    error lists objects of this `kind` in the module (`is_wanted` recognizes them) and the `remedy`, in which `{source}`
    is the module.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(field, spec, "must be module:name or path/to/file.py:name", f"For example: {example}.")
    _put_first(str(Path.cwd()))  # only here: a command that loads no user code must not import from the current folder
    module = _load_file(field, spec, source) if source.endswith(".py") else _load_module(field, spec, source)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            names = [name for name, member in vars(module).items() if is_wanted(member)]
            fault = f"must be a name in {source}; {kind} there: {', '.join(names) or 'none'}"
            similar = [f"{source}:{near}" for near in near_names(part, names or vars(module), most=1)]
            raise ConfigError(field, spec, fault, f"{did_you_mean(similar)} {remedy.format(source=source)}".strip())
        value = getattr(value, part)
    return value


def _put_first(entry: str) -> None:
    """Search modules in a folder before all others, unless it is searched already."""
    if entry not in sys.path:
        sys.path.insert(0, entry)


def takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether `fn` can be called with `count` positional arguments; True if Python does not know its signature."""
    try:
        inspect.signature(fn).bind(*range(count))
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def _load_module(field: str, spec: str, name: str) -> ModuleType:
    """Import a module by name. Raises ConfigError if it does not exist or fails to import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The named module itself does not exist, rather than a module that it imports.
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            fault = f"must be a module on sys.path or in {Path.cwd()}"
            raise ConfigError(field, spec, fault, f"Name a file instead ({_file_of(name)}:solve).") from None
        raise _broken(field, spec, error) from error
    except Exception as error:
        raise _broken(field, spec, error) from error


def _load_file(field: str, spec: str, source: str) -> ModuleType:
    """Import a file under its name, once. Raises ConfigError if it does not exist or fails to import."""
    path = Path(source).resolve()
    if not path.is_file():
        raise ConfigError(field, spec, "must be a file that exists", f"No file is at {path}.")
    packaged = _load_packaged(field, spec, path)
    if packaged is not None:
        return packaged
    _put_first(str(path.parent))
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    # Another module has the name already, so the name of the folder is added.
    name = path.stem if loaded is None else f"{path.parent.name}_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(field, spec, error) from error
    return module


def _load_packaged(field: str, spec: str, path: Path) -> ModuleType | None:
    """Import a file of the user that is in a package, under its full name, so that its relative imports work.

    Returns None for a file that is not in a package, or whose package has the name of another that is loaded already.
    """
    names = [path.stem]
    root = path.parent  # the folder that holds the outermost package
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if len(names) == 1 or not all(name.isidentifier() for name in names):
        return None
    loaded_package = sys.modules.get(names[0])
    if loaded_package is not None:
        folders = map(str, getattr(loaded_package, "__path__", ()))
        if str(root / names[0]) not in folders:  # another package of this name
            return None
    for entry in (str(path.parent), str(root)):  # the file's folder too, as it may import its neighbours by plain name
        _put_first(entry)
    try:
        return importlib.import_module(".".join(names))
    except Exception as error:
        raise _broken(field, spec, error) from error


def _file_of(module: str) -> str:
    """The file of a module below the current folder or its `src/`; a placeholder if it does not exist."""
    file = f"{module.replace('.', '/')}.py"
    return next((path for path in (file, f"src/{file}") if Path(path).is_file()), "path/to/app.py")


def remedy_of(raised: str, otherwise: str) -> str:
    """The remedy for an error of the application, from its text: a key is missing or refused, an address does not
    answer, there are too many requests, or an answer was cut. `otherwise` for another error."""
    if _KEYLESS.search(raised):
        return _KEY
    for pattern, remedy in _PROVIDER.items():
        if re.search(pattern, raised):
            return remedy
    return otherwise


_KEYLESS = re.compile(
    r"(?is)missing credentials|could not resolve authentication|did not find \w*api_?key|KeyError: '\w*_KEY'"
    r"|api_?key\b.{0,40}\b(required|must be (set|provided)|not set|missing|not found)\b"
)
_KEY = (
    "Set the key that it asks for, or load the .env file that has it. If no provider is called, as in check and train, "
    "any text will do: export OPENAI_API_KEY=none."
)
_PROVIDER = {
    r"(?i)connection error|connection refused|all connection attempts failed|name or service not known": (
        "No answer came from the address that it calls. Check that the provider, server or tool runs, and that the "
        "address is right (OPENAI_BASE_URL)."
    ),
    r"Error code: 40[13]\b|AuthenticationError": "The provider refuses the key: set the right one (OPENAI_API_KEY).",
    r"Error code: 429\b|RateLimitError": "The provider has too many requests: lower the concurrency, or try later.",
    r"LengthFinishReasonError": (
        "Raise max_tokens of that call (sampling.max_tokens if it names none), or let the application continue after "
        "an answer that was cut."
    ),
}
"""Remedies for errors of a provider, by patterns of their texts."""


def _broken(field: str, spec: str, error: Exception) -> ConfigError:
    """The error for a module that raised `error` when it was imported."""
    text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    fault = f"must be a module that imports; this one raised {text}{_line_of(error)}"
    return ConfigError(field, spec, fault, remedy_of(text, "Fix it first."))


def _line_of(error: Exception) -> str:
    """File and line of the user's code at which an import failed: the innermost line outside installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    importers = (Path(__file__), Path(importlib.__file__))
    frames: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<") and Path(frame.filename) not in importers:
            frames.append(frame)
    if not frames:
        return ""
    of_user = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix))]
    innermost = (of_user or frames)[-1]
    return f" ({innermost.filename}:{innermost.lineno})"
