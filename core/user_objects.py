"""What the user's own modules define, by name: `package.module:name` or `path/to/file.py:name`."""

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
    is_one: Callable[[Any], bool] = inspect.isfunction,
    remedy: str = "",
) -> Any:
    """Import `package.module:name` or `path/to/file.py:name`, from sys.path or the current folder.

    A file in a package, a folder with `__init__.py`, is imported as its module, from the folder that holds the package.
    Raises ConfigError for `field` where the module, file or name does not exist or fails to import. It names what the
    module has of that `kind`, as `is_one` says, and the `remedy`, in which `{source}` is the module.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ConfigError(field, spec, "must be module:name or path/to/file.py:name", f"For example: {example}.")
    _put_first(str(Path.cwd()))  # here, not at the start: a command that loads no user code imports none from a folder
    module = _load_file(field, spec, source) if source.endswith(".py") else _load_module(field, spec, source)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [name for name, value in vars(module).items() if is_one(value)]
            fault = f"must be a name in {source}; {kind} there: {', '.join(known) or 'none'}"
            meant = did_you_mean([f"{source}:{near}" for near in near_names(part, known or vars(module), most=1)])
            raise ConfigError(field, spec, fault, f"{meant} {remedy.format(source=source)}".strip())
        found = getattr(found, part)
    return found


def _put_first(entry: str) -> None:
    if entry not in sys.path:
        sys.path.insert(0, entry)


def takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether `fn` can be called with `count` positional arguments; True where Python cannot tell."""
    try:
        inspect.signature(fn).bind(*range(count))
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def _load_module(field: str, spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            fault = f"must be a module on sys.path or in {Path.cwd()}"
            raise ConfigError(field, spec, fault, f"Name a file instead ({_file_of(name)}:solve).") from None
        raise _broken(field, spec, error) from error
    except Exception as error:
        raise _broken(field, spec, error) from error


def _load_file(field: str, spec: str, source: str) -> ModuleType:
    path = Path(source).resolve()
    if not path.is_file():
        raise ConfigError(field, spec, "must be a file that exists", f"No file is at {path}.")
    if (packaged := _load_packaged(field, spec, path)) is not None:
        return packaged
    _put_first(str(path.parent))
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    name = path.stem if loaded is None else f"{path.parent.name}_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(field, spec, error) from error
    return module


def _load_packaged(field: str, spec: str, path: Path) -> ModuleType | None:
    """The module of a file in a package, whose relative and absolute imports then work; None for any other file."""
    names, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        names, root = [root.name, *names], root.parent
    top = sys.modules.get(names[0])
    elsewhere = top is not None and str(root / names[0]) not in map(str, getattr(top, "__path__", ()))
    if len(names) == 1 or elsewhere or not all(name.isidentifier() for name in names):
        return None
    for entry in (str(path.parent), str(root)):  # the file's own folder stays, for plain imports of its neighbours
        _put_first(entry)
    try:
        return importlib.import_module(".".join(names))
    except Exception as error:
        raise _broken(field, spec, error) from error


def _file_of(module: str) -> str:
    """The file of a module below the current folder or its `src/`, where it is there."""
    file = f"{module.replace('.', '/')}.py"
    return next((found for found in (file, f"src/{file}") if Path(found).is_file()), "path/to/app.py")


def remedy_of(raised: str, otherwise: str) -> str:
    """What to do about an error of the application's, where it says that a key is missing or refused, that nobody
    answers at an address, that there are too many requests, or that an answer was cut."""
    if _KEYLESS.search(raised):
        return _KEY
    return next((remedy for said, remedy in _PROVIDER.items() if re.search(said, raised)), otherwise)


_KEYLESS = re.compile(
    r"(?is)missing credentials|could not resolve authentication|did not find \w*api_?key|KeyError: '\w*_KEY'"
    r"|api_?key\b.{0,40}\b(required|must be (set|provided)|not set|missing|not found)\b"
)
_KEY = (
    "Set the key that it asks for, or load the .env file that has it. Where no provider is asked, as in check and "
    "train, any text will do: export OPENAI_API_KEY=none."
)
_PROVIDER = {
    r"(?i)connection error|connection refused|all connection attempts failed|name or service not known": (
        "Nobody answers at the address that it asks: is its provider, server or tool up, and the address right "
        "(OPENAI_BASE_URL)?"
    ),
    r"Error code: 40[13]\b|AuthenticationError": "The provider refuses the key: set the right one (OPENAI_API_KEY).",
    r"Error code: 429\b|RateLimitError": "The provider has too many requests: lower the concurrency, or try later.",
    r"LengthFinishReasonError": (
        "Raise max_tokens of that call (sampling.max_tokens where it names none), or let the application go on from an "
        "answer that was cut."
    ),
}
"""By what an error says of a provider, what to do."""


def _broken(field: str, spec: str, error: Exception) -> ConfigError:
    what = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    fault = f"must be a module that imports; this one raised {what}{_line_of(error)}"
    return ConfigError(field, spec, fault, remedy_of(what, "Fix it first."))


def _line_of(error: Exception) -> str:
    """File and line of the user's code that an import ended at: the innermost that is in no installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    frames = [frame for frame in frames if Path(frame.filename) not in (Path(__file__), Path(importlib.__file__))]
    outside = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix))]
    return f" ({(outside or frames)[-1].filename}:{(outside or frames)[-1].lineno})" if frames else ""
