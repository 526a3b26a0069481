"""Guards: statements that keep a fault out, each with a test that fails when the statement is gone.

A comment `# guard: NAME` stands above the statement, or at the end of its first line. A test carries the same name:
`@pytest.mark.guard("NAME")`. `test_mutations.py` takes out one guard after another in a copy of the repository. The
condition of an `if` becomes False, or True if its body returns; any other statement is dropped, or replaced by what the
test's mark gives as `without`. `python -m tests.reliability.mutations` puts the list into docs/reliability.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.figures import PAGE, ROOT, replaced

BEGIN, END = "<!-- guards: begin -->", "<!-- guards: end -->"


@dataclass(frozen=True)
class Guard:
    """A guard with its statement: the file and the number of the line on which the statement starts."""

    name: str
    file: str
    line: int

    def removed_from(self, source: str, without: str | None) -> str:
        """The source of the file without the guard."""
        lines = source.splitlines(keepends=True)
        statement = next(node for node in statements(source) if node.lineno == self.line)
        part, text = statement, without or "pass"
        if isinstance(statement, ast.If) and without is None:
            part, text = statement.test, str(isinstance(statement.body[-1], ast.Return))
        before = lines[part.lineno - 1].encode()[: part.col_offset].decode()
        after = lines[part.end_lineno - 1].encode()[part.end_col_offset :].decode()
        lines[part.lineno - 1 : part.end_lineno] = [before + text + after]
        return "".join(lines)


@dataclass(frozen=True)
class GuardTest:
    """A test that fails without its guard, and the statement that takes the guard's place meanwhile."""

    name: str
    test: str
    without: str | None


def statements(source: str) -> list[ast.stmt]:
    """All statements of a module in the order of their lines."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sorted(nodes, key=lambda node: node.lineno)


def guards() -> list[Guard]:
    """The guards that are marked in the package, file by file."""
    marked = []
    for path in sorted((ROOT / "geoflow_fast").rglob("*.py")):
        source = path.read_text()
        comments = (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if "# guard:" in token[1])
        for token in (token for token in comments if token.type == tokenize.COMMENT):
            line = next(node.lineno for node in statements(source) if node.lineno >= token.start[0])
            name = token.string.partition("# guard:")[2].strip()
            marked.append(Guard(name, path.relative_to(ROOT).as_posix(), line))
    return marked


def guard_tests() -> list[GuardTest]:
    """The tests that carry the name of a guard."""
    marked = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if "mark.guard(" not in source:
            continue
        for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
            for mark in (node for node in function.decorator_list if isinstance(node, ast.Call)):
                if re.fullmatch(r"pytest\.mark\.guard", ast.unparse(mark.func)):
                    without = {str(word.arg): ast.literal_eval(word.value) for word in mark.keywords}.get("without")
                    test = f"{path.relative_to(ROOT).as_posix()}::{function.name}"
                    marked.append(GuardTest(ast.literal_eval(mark.args[0]), test, without))
    return marked


def table() -> str:
    """The list as lines of Markdown."""
    tests = {test.name: test.test.removeprefix("tests/") for test in guard_tests()}
    rows = [f"| {guard.name} | `{guard.file}` | `{tests[guard.name]}` |" for guard in guards()]
    return "\n".join(["| Guard | Where | Fails without it |", "|---|---|---|", *rows])


if __name__ == "__main__":
    page = Path(PAGE)
    page.write_text(replaced(page.read_text(), BEGIN, END, table()))
