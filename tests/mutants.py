"""`python -m tests.mutants [FOLDER ...] [--tests FOLDER ...]`: small changes of the code that no test notices.

A mutant is one change of a function in FOLDER (by default fuse/vfs/{lookup,change,upload}): a condition turned round, a
part of an `and` or `or` left out, another comparison, a statement left out, a loop that never runs. The tests are run
once to see which of them come to which line. Then each mutant is tried in a process of its own, which is forked from
the one that has imported everything: it takes over the changed function and runs the tests that come to its line, the
quickest first. All take half an hour; --seconds ends it early, --seed says in which order they are tried. Prints each
survivor: it wants a test, or is code that can go, or does the same as before. Exit code 1 when there are some.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fuse/vfs/lookup", "fuse/vfs/change", "fuse/vfs/upload")
TESTS = ("tests/unit/vfs",)
TIMES_LONGER, AT_LEAST_S = 4.0, 10.0
"""How many times as long as on the unchanged code, and how long at least, the tests of a mutant may take: a mutant that
takes longer counts as noticed."""
EACH_S = 60.0
"""On a mutant no more tests run than take so long on the unchanged code: the quickest."""
POLL_S = 0.005
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed function. line: of the changed statement; change: what became of what; code: that of the function."""

    path: Path
    line: int
    change: str
    code: CodeType


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a module, each of which compiles to other code than those before it."""
    tree = ast.parse(path.read_text())
    seen = set(_functions(compile(tree, path, "exec")))
    for node, put, line in list(_places(tree, 0)):
        for instead in _changes(node):
            change = f"{_headline(node)}   =>   {_headline(instead)}"
            put(ast.copy_location(instead, node))
            module = compile(ast.fix_missing_locations(tree), path, "exec")
            put(node)
            for code in set(_functions(module)) - seen:
                seen.add(code)
                yield Mutant(path, line, change, code)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in a node's place."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.comprehension(ifs=[_, *_]):
            yield _with(node, ifs=[])
        case ast.BoolOp():
            for number in range(len(node.values)):
                rest = node.values[:number] + node.values[number + 1 :]
                yield _with(node, values=rest) if len(rest) > 1 else copy.copy(rest[0])
        case ast.Compare(ops=[operator]) if type(operator) in COMPARED:
            yield _with(node, ops=[COMPARED[type(operator)]()])
        case ast.BinOp() if type(node.op) in COMPUTED:
            yield _with(node, op=COMPUTED[type(node.op)]())
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.For() | ast.AsyncFor():
            yield _with(node, iter=ast.Tuple([], ast.Load()))
        case (
            ast.Expr(value=ast.Call() | ast.Await())
            | (ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break())
            | ast.Return(value=None)
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])
        ):
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _places(node: ast.AST, line: int) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None], int]]:
    """Yield each node below `node`, but those of annotations, what puts another one in its place, and the line of its
    statement. line: that of the statement to which `node` belongs."""

    def put(field: str, number: int | None, child: ast.AST) -> None:
        if number is None:
            setattr(node, field, child)
        else:
            getattr(node, field)[number] = child

    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for number, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST):
                    at = child.lineno if isinstance(child, ast.stmt) else line
                    yield child, partial(put, field, number), at
                    yield from _places(child, at)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions and methods of a module, but not of those within functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from (constant,) if constant.co_flags & CO_OPTIMIZED else _functions(constant)


def _headline(node: ast.AST) -> str:
    shown = _with(node, body=[], orelse=[]) if isinstance(node, (ast.If, ast.While, ast.For, ast.AsyncFor)) else node
    return " ".join(ast.unparse(ast.fix_missing_locations(shown)).split())


def take_over(mutant: Mutant) -> bool:
    """Have this process run the mutant from now on. Return whether it has that function."""
    codes, waiting = dict[tuple[str, int], CodeType](), [mutant.code]
    while waiting:
        code = waiting.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        waiting += (constant for constant in code.co_consts if isinstance(constant, CodeType))
    found = False
    for each in gc.get_objects():
        if isinstance(each, FunctionType):
            code = each.__code__
            other = codes.get((code.co_qualname, code.co_firstlineno))
            if other is not None and Path(code.co_filename).resolve() == mutant.path:
                each.__code__ = other
                found = True
    return found


@contextlib.contextmanager
def _ended(pids: Iterable[int]) -> Iterator[None]:
    """End what still runs of some process groups after a block that broke off."""
    try:
        yield
    except BaseException:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        raise


class MutantRun:
    """A plugin of pytest that runs the collected tests on mutants, in place of pytest's own loop."""

    def __init__(self, mutants: Sequence[Mutant], seconds: float, folder: Path) -> None:
        self._mutants = mutants
        self._seconds = seconds
        self._lines = folder / "lines"
        self._failed = ""
        """The first test that failed in this process, and what it said."""
        self._took_s: dict[str, float] = {}
        self.tried = self.survivors = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = self._failed or f"{report.nodeid}: {report.longreprtext}"
        self._took_s[report.nodeid] = self._took_s.get(report.nodeid, 0.0) + report.duration

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        recording = self._fork(partial(self._record, session.items))
        with _ended([recording]):
            os.waitpid(recording, 0)
        if not self._lines.exists():
            sys.exit("the unchanged code does not pass its tests")
        self._took_s, tests = ast.literal_eval(self._lines.read_text())
        self._try_all(
            {
                (Path(name), line): list(self._quickest([session.items[number] for number in numbers]))
                for (name, line), numbers in tests.items()
            }
        )
        return True

    def _quickest(self, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
        """Yield the quickest of some tests, of EACH_S altogether, but at least one."""
        left_s = EACH_S
        for item in sorted(items, key=lambda item: self._took_s[item.nodeid]):
            if left_s > 0:
                yield item
            left_s -= self._took_s[item.nodeid]

    def _record(self, items: Sequence[pytest.Item]) -> None:
        """Run all tests, and write down how long each takes and which of them come to each line."""
        modules = sorted({str(mutant.path) for mutant in self._mutants})
        watch = coverage.Coverage(data_file=None, include=modules)
        watch.start()
        for number, (item, following) in enumerate(zip(items, (*items[1:], None), strict=True)):
            watch.switch_context(str(number))
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        watch.stop()
        if self._failed:
            print(self._failed, file=sys.stderr, flush=True)
            return
        known = watch.get_data()
        tests = {
            (str(Path(name).resolve()), line): [int(number) for number in numbers if number]
            for name in known.measured_files()
            for line, numbers in known.contexts_by_lineno(name).items()
        }
        self._lines.write_text(repr((self._took_s, tests)))

    def _fork(self, work: Callable[[], None]) -> int:
        """Do work in a process of its own, which ends with 0 when no test failed there. Return its pid."""
        pid = os.fork()
        if pid:
            os.setpgid(pid, pid)
            return pid
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work()
            code = 1 if self._failed else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _try(self, mutant: Mutant, items: Sequence[pytest.Item]) -> None:
        """Run tests on a mutant until one fails."""
        if not take_over(mutant):
            raise RuntimeError(f"{mutant.path}:{mutant.line}: nothing runs {mutant.code.co_qualname}")
        for item, following in zip(items, (*items[1:], None), strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return

    def _try_all(self, by_line: dict[tuple[Path, int], list[pytest.Item]]) -> None:
        deadline, waiting = time.monotonic() + self._seconds, iter(self._mutants)
        running = dict[int, tuple[Mutant, float]]()
        """By pid, the mutant and until when its tests may take."""
        with _ended(running):
            while True:
                while len(running) < (os.cpu_count() or 1) and time.monotonic() < deadline:
                    mutant = next(waiting, None)
                    if mutant is None:
                        break
                    self.tried += 1
                    if self.tried % 100 == 0:
                        print(f"{self.tried} of {len(self._mutants)} tried, {self.survivors} not noticed", flush=True)
                    items = by_line.get((mutant.path, mutant.line), [])
                    if items:
                        limit_s = AT_LEAST_S + TIMES_LONGER * sum(self._took_s[item.nodeid] for item in items)
                        pid = self._fork(partial(self._try, mutant, items))
                        running[pid] = mutant, time.monotonic() + limit_s
                    else:
                        self._survived(mutant, "no test comes here")
                if not running:
                    return
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid:
                    mutant, _ = running.pop(pid)
                    if status == 0:
                        self._survived(mutant, f"{len(by_line[mutant.path, mutant.line])} tests do not notice")
                else:
                    time.sleep(POLL_S)
                for pid, (_, until) in running.items():
                    if time.monotonic() > until:
                        os.killpg(pid, signal.SIGKILL)

    def _survived(self, mutant: Mutant, why: str) -> None:
        self.survivors += 1
        print(f"{os.path.relpath(mutant.path, ROOT)}:{mutant.line}: {mutant.change}   ({why})", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    given = parser.parse_args(arguments)
    modules = sorted(path for folder in given.folders for path in (ROOT / folder).glob("**/*.py"))
    mutants = [mutant for path in modules for mutant in mutants_of(path)]
    random.Random(given.seed).shuffle(mutants)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tempfile.tempdir = folder  # a process that tries a mutant ends without removing what its tests share
        run = MutantRun(mutants, given.seconds, Path(folder))
        kept = (f"--basetemp={folder}/tests", "-o", "tmp_path_retention_policy=failed")
        outcome = pytest.main(["-q", "-s", "-p", "no:cacheprovider", *kept, *given.tests], plugins=[run])
    noticed = run.tried - run.survivors
    print(f"seed {given.seed}: {run.tried} of {len(mutants)} mutants tried, {noticed} noticed, {run.survivors} not")
    done = outcome in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return 0 if done and not run.survivors else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
