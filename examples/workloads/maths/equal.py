"""Whether two expressions in LaTeX are equal, by math-verify in a process of its own.

math-verify stops long work by SIGALRM, which only a main thread may use and which the application may need itself; and
some work, such as a power of powers, no signal interrupts. So it runs in a child with a limit of memory, which is ended
when it does not answer in time.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import resource
import select
import subprocess
import sys
import threading
from typing import Any

SECONDS = 2
"""For each step of a comparison: reading both expressions, comparing them."""
PATIENCE = 30.0
"""Seconds until a child that does not answer is ended; its start is among them."""
MEMORY = 2 << 30
DIGITS = 60
"""To which values are compared; math-verify's own 15 take a near miss."""
log = logging.getLogger(__name__)


class Comparer:
    """A child that compares: started when it is first needed, and again after it was ended. For any thread.

    Raises ModuleNotFoundError, with the remedy, where math-verify is not installed.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError("answers are compared by math-verify: pip install math-verify")
        self.patience = patience
        self._child: subprocess.Popen[str] | None = None
        self._one = threading.Lock()

    def equal(self, gold: str, answer: str) -> bool:
        """Whether they are equal, and no more is left to work out in the answer than in the right one.

        What is not known in time is not.
        """
        with self._one:
            said = self._asked(json.dumps([gold, answer]))
            if not said:
                log.warning("%r was not compared with %r within the limits: it counts as wrong", answer, gold)
                self.close()
        return said == "true\n"

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _asked(self, question: str) -> str:
        if self._child is None:
            words = [sys.executable, "-P", __file__]
            self._child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdin and self._child.stdout
        try:
            print(question, file=self._child.stdin, flush=True)
        except BrokenPipeError:
            return ""
        answered, _, _ = select.select([self._child.stdout], [], [], self.patience)
        return self._child.stdout.readline() if answered else ""


def answer_all() -> None:
    """What the child does: a pair in JSON on each line in, `true` or `false` on each line out."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable()  # of what takes too long, the parent is told `false`
    for line in sys.stdin:
        print(json.dumps(_equal(*json.loads(line))), flush=True)


def _equal(gold: str, answer: str) -> bool:
    from math_verify import verify

    try:
        right, found = _tree(gold), _tree(answer)
        if right is None or found is None or _left_to_do(found) > _left_to_do(right):
            return False
        return bool(verify([right], [found], numeric_precision=DIGITS, timeout_seconds=SECONDS))
    except (MemoryError, RecursionError):
        return False


def _tree(text: str) -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    strict = LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True))
    found = parse(f"${text}$", [strict], fallback_mode="no_fallback", parsing_timeout=SECONDS)
    return found[0] if found else None


def _left_to_do(tree: Any) -> int:
    """Sums of like terms and products of plain numbers that are not worked out, as in 3 + 4 + x or 2x + 2x."""
    import sympy

    count = 0
    for node in sympy.preorder_traversal(tree):
        if isinstance(node, sympy.Add):
            count += len(node.args) - len({part.as_coeff_Mul()[1] for part in node.args})
        elif isinstance(node, sympy.Mul):
            count += max(0, sum(isinstance(part, sympy.Rational) for part in node.args) - 1)
    return count


if __name__ == "__main__":
    answer_all()
