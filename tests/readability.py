"""Count the symptoms of code that is hard to read: dense expressions, missing comments, vague names, tangled English.

    python tests/readability.py                    # the whole product
    python tests/readability.py trainer --worst 10 # one folder, and the files to start with, per figure
    python tests/readability.py --update           # store the figures that tests/test_readability.py holds

The figures are directions, not quotas: a figure that is met by awkward code is not met. The columns beside them are the
range in well-regarded Python projects (prime-rl, verifiers, tinker-cookbook, nanochat, httpx, Starlette, pydantic-ai)
in November 2026, and the target of this project.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
STORED = Path(__file__).with_suffix(".json")
LAYERS = ("core", "integrations", "adapters", "trainer")

COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
LONG_FUNCTION = 60
MANY_PARAMETERS = 8
VAGUE_NAMES = {
    "found", "given", "made", "said", "kept", "known", "told", "asked", "one", "own",
    "seen", "of", "its", "theirs", "rest", "now", "left", "there", "here",
}  # fmt: skip
PHRASES = {
    "what": r"\bwhat\b",
    "where it, where there, ...": r"\bwhere (it|there|that|this|they|nobody|nothing|one|none|both|all)\b",
    "those of, that of": r"\b(those|that) of\b",
    "such (as a noun), of which, by which": r"\bsuch\b(?! as)|\b(of|by|in|on|to|from|with) which\b|\bof whose\b",
    "is said, is told": r"\b(is|are|was|were) (said|told)\b",
    "goes on, anew, beside, as ever": r"\b(go|goes|went|going) on\b|\banew\b|\bbeside\b|\bas ever\b",
}
"""Habits of docstrings, comments and error messages that make a reader start the sentence again."""
DIRECTIVE = re.compile(r"noqa|type:|pragma|fmt:")
"""Comments that address a tool, not a reader."""

PEERS_AND_TARGETS = {
    "comprehensions per 1,000 lines": ("6-15", "28"),
    "dense comprehensions per 1,000 lines": ("0.3-1.8", "2"),
    "conditional expressions per 1,000 lines": ("5-15", "16"),
    "private functions used once per 1,000 lines": ("2.5-5.4", "6"),
    "comments per 100 lines": ("2.5-17", "2.5"),
    "functions over 60 lines": ("", ""),
    "functions with more than 8 parameters": ("", "0"),
    "vague names per 1,000 assignments": ("0-5", "15"),
    "what": ("0.0-1.3", "1.5"),
    "where it, where there, ...": ("0.0-0.3", "0.4"),
    "those of, that of": ("0.0-0.1", "0.3"),
    "such (as a noun), of which, by which": ("0.0-0.6", "0.6"),
    "is said, is told": ("0.0", "0.1"),
    "goes on, anew, beside, as ever": ("0.0-0.1", "0.2"),
    "pairs of rooms that import each other": ("", "0"),
}
MORE_IS_BETTER = {"comments per 100 lines"}
"""Every other figure is better when it is lower."""


@dataclass
class Counts:
    """Occurrences in a set of files, in total and by file, and the pairs of rooms that import each other."""

    totals: Counter[str] = field(default_factory=Counter)
    by_file: dict[str, Counter[Path]] = field(default_factory=lambda: defaultdict(Counter))
    file_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)

    def add(self, name: str, path: Path, count: int = 1) -> None:
        self.totals[name] += count
        self.by_file[name][path] += count


def measure(root: Path = ROOT, folders: tuple[str, ...] = LAYERS) -> tuple[Counts, dict[str, float]]:
    """Count all Python files in `folders` of `root`, and compute the figures of `PEERS_AND_TARGETS`.

    The pairs of rooms are those of the whole product, whichever folders are counted.
    """
    counts = Counts()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            count_file(path.relative_to(root), path.read_text(encoding="utf-8"), counts)
    counts.pairs = two_way_pairs(root)
    return counts, compute_figures(counts.totals, len(counts.pairs))


def compute_figures(totals: Counter[str], pairs: int) -> dict[str, float]:
    lines = max(totals["lines"], 1) / 1000
    words = max(totals["words"], 1) / 1000
    assignments = max(totals["assignments"], 1) / 1000
    figures = {
        "comprehensions per 1,000 lines": totals["comprehensions"] / lines,
        "dense comprehensions per 1,000 lines": totals["dense comprehensions"] / lines,
        "conditional expressions per 1,000 lines": totals["conditional expressions"] / lines,
        "private functions used once per 1,000 lines": totals["private functions used once"] / lines,
        "comments per 100 lines": totals["comments"] / lines / 10,
        "functions over 60 lines": float(totals["functions over 60 lines"]),
        "functions with more than 8 parameters": float(totals["functions with more than 8 parameters"]),
        "vague names per 1,000 assignments": totals["vague names"] / assignments,
    }
    for name in PHRASES:
        figures[name] = totals[name] / words
    figures["pairs of rooms that import each other"] = float(pairs)
    return figures


def count_file(path: Path, source: str, counts: Counts) -> None:
    tree = ast.parse(source)
    comments = read_comments(source)
    lines = source.count("\n")
    counts.totals["lines"] += lines
    counts.file_lines.append(lines)
    counts.add("comments", path, len(comments))

    occurrences = Counter(re.findall(r"\w+", source))
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, COMPREHENSIONS):
            counts.add("comprehensions", path)
            if is_dense(node):
                counts.add("dense comprehensions", path)
        elif isinstance(node, ast.IfExp):
            counts.add("conditional expressions", path)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts.totals["assignments"] += 1
            if node.id in VAGUE_NAMES:
                counts.add("vague names", path)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count_function(node, occurrences, path, counts)

    prose = " ".join(comments + docstrings_and_errors(nodes))
    counts.totals["words"] += len(re.findall(r"[A-Za-z']+", prose))
    for name, pattern in PHRASES.items():
        counts.add(name, path, len(re.findall(pattern, prose, re.IGNORECASE)))


def count_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef, occurrences: Counter[str], path: Path, counts: Counts
) -> None:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    counts.function_lines.append(lines)
    if lines > LONG_FUNCTION:
        counts.add("functions over 60 lines", path)

    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    is_method = bool(names) and names[0] in ("self", "cls")
    if len(names) + len(function.args.kwonlyargs) - is_method > MANY_PARAMETERS:
        counts.add("functions with more than 8 parameters", path)

    # Its definition and one more occurrence: extracted for its length rather than for its name.
    is_private = function.name.startswith("_") and not function.name.startswith("__")
    if is_private and occurrences[function.name] == 2:
        counts.add("private functions used once", path)


def is_dense(comprehension: ast.AST) -> bool:
    """Whether a comprehension does more than map or filter one iterable by one condition."""
    assert isinstance(comprehension, COMPREHENSIONS)
    loop = comprehension.generators[0]
    if len(comprehension.generators) > 1 or len(loop.ifs) > 1:
        return True
    if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "zip":
        return True
    if isinstance(loop.target, ast.Tuple) and sum(isinstance(node, ast.Name) for node in ast.walk(loop.target)) > 2:
        return True
    return any(isinstance(node, COMPREHENSIONS) for node in ast.walk(comprehension) if node is not comprehension)


def read_comments(source: str) -> list[str]:
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    return [comment for comment in comments if not DIRECTIVE.search(comment)]


def docstrings_and_errors(nodes: list[ast.AST]) -> list[str]:
    """Strings that stand alone, as docstrings do, and the string literals of raised errors."""
    texts = []
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.append(node.value.value)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            constants = [inner.value for inner in ast.walk(node.exc) if isinstance(inner, ast.Constant)]
            texts += [constant for constant in constants if isinstance(constant, str)]
    return texts


def two_way_pairs(root: Path = ROOT) -> list[str]:
    """Pairs of rooms that import each other, also inside functions. A room is a folder or a module of a layer, and in
    `integrations`, whose folders group rooms, a folder below one."""
    imports: set[tuple[str, str]] = set()
    for layer in LAYERS:
        for path in (root / layer).rglob("*.py"):
            parts = path.relative_to(root / layer).with_suffix("").parts
            depth = 2 if layer == "integrations" and len(parts) > 2 else 1
            room = "/".join((layer, *parts[:depth]))
            for module in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
                package, *names = module.split(".")
                if package != "cotune" or not names:
                    continue
                # `cotune.x` is core's, unless x is another layer.
                imported_layer = "core"
                if names[0] in LAYERS:
                    imported_layer = names.pop(0)
                imported_room = "/".join((imported_layer, *names[:depth]))
                if imported_layer == layer and names and imported_room != room:
                    imports.add((room, imported_room))
    return sorted(f"{a} <-> {b}" for a, b in imports if a < b and (b, a) in imports)


def imported_modules(tree: ast.AST) -> list[str]:
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return modules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=list(LAYERS), help="folders to count (default: the product)")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="name the N files with most of each")
    parser.add_argument("--update", action="store_true", help=f"store the product's figures in tests/{STORED.name}")
    args = parser.parse_args()
    if args.update and args.folders != list(LAYERS):
        parser.error("--update stores the figures of the whole product: pass it without folders")

    counts, figures = measure(folders=tuple(args.folders))
    if not counts.file_lines:
        sys.exit(f"No Python files in {', '.join(args.folders)}. Pass folders below {ROOT}, such as trainer/rollout.")
    print_figures(counts, figures)
    for pair in counts.pairs:
        print("  import each other:", pair)
    if args.worst:
        print_worst(counts, args.worst)
    if args.update:
        rounded = {name: round(value, 2) for name, value in figures.items()}
        STORED.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")


def print_figures(counts: Counts, figures: dict[str, float]) -> None:
    print(
        f"{len(counts.file_lines)} files, {counts.totals['lines']} lines; lines per file: median "
        f"{median(counts.file_lines):.0f}, longest {max(counts.file_lines)}; {len(counts.function_lines)} functions, "
        f"median {median(counts.function_lines or [0]):.0f} lines"
    )
    print(
        f"{'figure (English: per 1,000 words of docstrings, comments and errors)':68} {'here':>7} {'peers':>9} target"
    )
    for name, value in figures.items():
        peers, target = PEERS_AND_TARGETS[name]
        print(f"{name:68} {value:7.2f} {peers:>9} {target:>6}")


def print_worst(counts: Counts, number: int) -> None:
    for name, by_file in counts.by_file.items():
        if name in MORE_IS_BETTER or name == "comments":
            continue
        print(f"\n{name}:")
        for path, count in by_file.most_common(number):
            if count:
                print(f"  {path} {count}")


if __name__ == "__main__":
    main()
